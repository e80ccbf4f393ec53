"""``python -m services.coordinator``."""

import sys

from services.coordinator.app import coordinator
from services.runtime.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("coordinator", coordinator))
