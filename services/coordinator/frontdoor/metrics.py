"""Metrics of the front door."""

from services.runtime.metrics import counter, gauge, histogram

FAULTS = ("tokenize_refused", "tokenize_failed", "query_refused", "query_failed")

REQUESTS = counter("kvroute_front_door_requests_total", "Requests by route and outcome", ("route", "outcome"))
ATTEMPTS = counter("kvroute_front_door_retries_total", "Requests sent to another engine before the first byte")
WITHOUT_PREFIX = counter(
    "kvroute_front_door_without_prefix_total", "Requests placed by load alone, by reason", ("reason",)
)
MATCHED_TOKENS = counter("kvroute_front_door_matched_tokens_total", "Tokens that the chosen engines had cached")
RUNNING = gauge("kvroute_front_door_running", "Requests that run on engines now")
PLACING_SECONDS = histogram("kvroute_front_door_placing_seconds", "Time from a read request to its first engine")
