"""A container health check without shell or curl: ``python -m services.runtime.probe URL`` exits 0 on a 2xx answer."""

import sys
import urllib.error
import urllib.request

TIMEOUT_SECONDS = 2.5


def probe(url: str) -> tuple[bool, str]:
    """Whether the URL answers with success, and the start of what it said."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
            return True, response.read(2000).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return False, f"{error.code} {error.read(2000).decode('utf-8', 'replace')}"
    except (OSError, ValueError) as error:
        return False, str(error)


def main(arguments: list[str]) -> int:
    """Exit code 0 for success, 1 for failure, 2 for a wrong call."""
    if len(arguments) != 1 or not arguments[0].startswith(("http://", "https://")):
        print("usage: python -m services.runtime.probe URL", file=sys.stderr)
        return 2
    healthy, text = probe(arguments[0])
    print(text, file=sys.stdout if healthy else sys.stderr)
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
