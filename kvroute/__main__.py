"""``python -m kvroute``."""

from kvroute.cli import main

if __name__ == "__main__":
    main()
