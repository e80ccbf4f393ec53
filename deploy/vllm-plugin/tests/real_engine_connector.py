"""A worker-side pool connector for tests with a real engine: per scheduled new request, one synthetic stored event.

Child number n (extra config "base") names its blocks base + 0, base + 1, ...; vLLM loads it by module path.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import BlockStored, KVConnectorKVEvents, KVEventAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class PoolEvents(KVConnectorKVEvents):
    def __init__(self, num_workers: int = 1) -> None:
        self._aggregator = KVEventAggregator(num_workers)

    def add_events(self, events: list[Any]) -> None:
        self._aggregator.add_events(events)

    def aggregate(self) -> "PoolEvents":
        common = self._aggregator.get_common_events()
        self._aggregator.clear_events()
        self._aggregator.add_events(common)
        self._aggregator.reset_workers()
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._aggregator.increment_workers(count)

    def get_all_events(self) -> list[Any]:
        return self._aggregator.get_all_events()

    def get_number_of_workers(self) -> int:
        return self._aggregator.get_number_of_workers()

    def clear_events(self) -> None:
        self._aggregator.clear_events()
        self._aggregator.reset_workers()


@dataclass
class ToStore(KVConnectorMetadata):
    hashes: list[int] = field(default_factory=list)


class PoolConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._next = int(vllm_config.kv_transfer_config.kv_connector_extra_config["base"])
        self._received: list[Any] = []

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def get_kv_connector_kv_cache_events(self) -> PoolEvents | None:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, ToStore) or not metadata.hashes:
            return None
        events = PoolEvents()
        events.add_events([self._event(number) for number in metadata.hashes])
        return events

    def _event(self, number: int) -> Any:
        values: dict[str, Any] = {"block_hashes": (number,), "parent_block_hash": None, "token_ids": (number % 512,)}
        return BlockStored(**values, block_size=1, lora_id=None, medium="cpu", lora_name=None)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> ToStore:
        count = len(scheduler_output.scheduled_new_reqs)
        first, self._next = self._next, self._next + count
        return ToStore(list(range(first, first + count)))

    def update_connector_output(self, connector_output: Any) -> None:
        events = connector_output.kv_cache_events
        if isinstance(events, PoolEvents):
            events.aggregate()
            self._received.extend(events.get_all_events())

    def take_events(self) -> Any:
        yield from self._received
        self._received = []
