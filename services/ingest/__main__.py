"""``python -m services.ingest``."""

import sys

from services.ingest.app import ingest
from services.runtime.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("ingest", ingest))
