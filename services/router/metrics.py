"""The router's metrics; labels come from registrations, never from requests."""

from services.runtime.metrics import counter, gauge, histogram

QUERIES = counter("kvroute_router_queries_total", "Queries by outcome", ["route", "outcome"])
QUERY_SECONDS = histogram(
    "kvroute_router_query_seconds", "Time to answer a query, body read to body written", ["route"]
)
QUERIED_BLOCKS = counter("kvroute_router_queried_blocks_total", "Whole blocks asked for")
MATCHED_BLOCKS = counter("kvroute_router_matched_blocks_total", "Blocks of the best instance by tier", ["medium"])
POSTS = counter("kvroute_router_posts_total", "POST /events by outcome", ["outcome"])
POSTED_EVENTS = counter("kvroute_router_posted_events_total", "Events of POST /events by outcome", ["outcome"])
EVENTS = counter("kvroute_router_events_total", "Index events by what became of them", ["outcome"])
EVENT_BLOCKS = counter(
    "kvroute_router_event_blocks_total", "Blocks of index events by what became of them", ["outcome"]
)
REFUSED_BODIES = counter("kvroute_router_refused_messages_total", "Index messages that could not be read")
POSITION = gauge("kvroute_router_stream_position", "Sequence of KV_INDEX up to which everything is applied")
STREAM_END = gauge("kvroute_router_stream_end", "Last sequence of KV_INDEX at the last look")
BLOCKS = gauge("kvroute_router_blocks", "Blocks in the index", ["model", "tenant"])
MEMBERSHIPS = gauge("kvroute_router_memberships", "(holder, tier, block) entries", ["model", "tenant"])
WAITING = gauge("kvroute_router_waiting_blocks", "Blocks that wait for their parent", ["model", "tenant"])
EVICTED = gauge("kvroute_router_evicted_blocks", "Blocks dropped because of a limit, so far", ["model", "tenant"])
INDEX_BYTES = gauge("kvroute_router_index_bytes", "Memory of the index", ["model", "tenant"])
COVERAGE = gauge(
    "kvroute_router_index_coverage",
    "Share of what holders have that the index knows; below 1 the memory budget bites",
    ["model", "tenant"],
)
NATIVE = gauge("kvroute_router_native_index", "1 when the compiled index core is in use, 0 for the plain one")
FEEDBACK = counter("kvroute_router_feedback_total", "Responses reported to POST /v1/feedback", ["outcome"])
SNAPSHOTS = counter("kvroute_router_snapshots_total", "Snapshots by what became of them", ["outcome"])
SNAPSHOT_BYTES = gauge("kvroute_router_snapshot_bytes", "Size of the last snapshot that this replica wrote")
SNAPSHOT_SECONDS = gauge("kvroute_router_snapshot_seconds", "Time that the last snapshot of this replica took")
SNAPSHOT_POSITION = gauge("kvroute_router_snapshot_position", "Sequence of KV_INDEX at which the last snapshot ends")
STARTS_OVER = counter(
    "kvroute_router_starts_over_total", "Times everything was forgotten and the stream read again", ["reason"]
)
RESYNCS = counter("kvroute_router_resyncs_total", "Publishers that were asked to say everything again")
HISTORY_INCOMPLETE = gauge(
    "kvroute_router_history_incomplete", "1 when the stream had dropped messages that this router never read"
)
