"""``python -m services.matcher``."""

import sys

from services.matcher.app import start
from services.runtime.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("matcher", start))
