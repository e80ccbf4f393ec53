"""``python -m services.router``."""

import sys

from services.router.app import start
from services.runtime.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("router", start))
