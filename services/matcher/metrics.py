"""The matcher's metrics; labels come from registrations, never from event contents."""

from services.runtime.metrics import counter, gauge, histogram

MESSAGES = counter("kvroute_matcher_messages_total", "Messages of kv.events by what became of them", ["outcome"])
STATES = counter("kvroute_matcher_blocks_total", "Blocks by state of the state machine", ["state", "medium"])
DROPPED = counter("kvroute_matcher_dropped_events_total", "Events without effect by reason", ["reason"])
CAPPED = counter("kvroute_matcher_capped_blocks_total", "Blocks that a limit pushed out or kept out", ["what"])
PENDING = gauge("kvroute_matcher_pending_blocks", "Blocks that wait for their content", ["model", "tenant"])
LEADER = gauge("kvroute_matcher_leader", "1 while this replica works, 0 while it stands by")
POSITION = gauge("kvroute_matcher_stream_position", "Sequence of KV_EVENTS up to which everything is done")
SKIPPED = counter("kvroute_matcher_skipped_messages_total", "Messages that KV_EVENTS dropped before they were read")
BATCH_SECONDS = histogram("kvroute_matcher_batch_seconds", "Time from taking a batch to its index messages stored")
DELAY_SECONDS = histogram("kvroute_matcher_delay_seconds", "Time from arrival at ingest to stored index message")
