"""Runs one scenario against the vLLM files in a folder and prints what came out as JSON: ``scenario.py FOLDER NAME``.

Every scenario drives the path that a real engine takes: children collect events in the workers, vLLM's own
KVOutputAggregator merges the ranks, the scheduler's MultiConnector gets the result and `take_events` yields what would
be published.
"""

import importlib
import json
import logging
import pickle
import sys
from pathlib import Path

root, name = Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from stub_vllm import install  # noqa: E402

install(root)

kv_events = importlib.import_module("vllm.distributed.kv_events")
base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
multi_connector = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402

MultiConnector = multi_connector.MultiConnector


class PoolEvents(kv_events.KVConnectorKVEvents):
    """A child's container in the manner of LMCache's: only what all reporting ranks have in common counts."""

    def __init__(self, num_workers=1):
        self._aggregator = kv_events.KVEventAggregator(num_workers)

    def add_events(self, events):
        self._aggregator.add_events(events)

    def aggregate(self):
        common = self._aggregator.get_common_events()
        self._aggregator.clear_events()
        self._aggregator.add_events(common)
        self._aggregator.reset_workers()
        return self

    def increment_workers(self, count=1):
        self._aggregator.increment_workers(count)

    def get_all_events(self):
        return self._aggregator.get_all_events()

    def get_number_of_workers(self):
        return self._aggregator.get_number_of_workers()

    def clear_events(self):
        self._aggregator.clear_events()
        self._aggregator.reset_workers()


class OtherPoolEvents(PoolEvents):
    pass


class Child(base.KVConnectorBase_V1):
    """A pool connector: the worker side reports what it was told to, the scheduler side keeps what it is given."""

    container = PoolEvents

    def __init__(self, label):
        self.label = label
        self.to_report = []
        self.received = []
        self.seen_types = []

    def get_kv_connector_kv_cache_events(self):
        if not self.to_report:
            return None
        events = self.container()
        events.add_events(self.to_report)
        self.to_report = []
        return events

    def update_connector_output(self, connector_output):
        events = connector_output.kv_cache_events
        self.seen_types.append(type(events).__name__)
        if isinstance(events, self.container):
            events.aggregate()
            self.received.extend(events.get_all_events())

    def take_events(self):
        yield from self.received
        self.received = []


class OtherChild(Child):
    container = OtherPoolEvents


class RaisingChild(Child):
    def get_kv_connector_kv_cache_events(self):
        raise RuntimeError("broken child")


for cls in (Child, OtherChild, RaisingChild):
    cls.__abstractmethods__ = frozenset()


class AscendMultiConnector(MultiConnector):
    """A subclass as vllm-ascend registers it, overriding none of the event methods."""


def build(cls, children):
    """A MultiConnector around these children, through its real __init__ (the configuration is stubbed)."""
    cls.__abstractmethods__ = frozenset()
    order = iter(children)
    cls._get_connector_classes_and_configs = classmethod(
        lambda klass, config: [
            (lambda *a, **k: next(order), type("Config", (), {"kv_transfer_config": None})()) for _ in children
        ]
    )
    original = base.KVConnectorBase_V1.__init__
    base.KVConnectorBase_V1.__init__ = lambda self, **kwargs: None
    config = type("V", (), {})()
    config.kv_transfer_config = type("K", (), {"kv_connector_extra_config": {}, "engine_id": "e"})()
    config.scheduler_config = type("S", (), {"disable_hybrid_kv_cache_manager": True})()
    try:
        return cls(config, None, None)
    finally:
        base.KVConnectorBase_V1.__init__ = original


def stored(number):
    values = {"block_hashes": (number,), "parent_block_hash": None, "token_ids": (number,), "block_size": 1}
    values |= {"lora_id": None, "medium": "cpu", "lora_name": None}
    return kv_events.BlockStored(**values)


def step(ranks, scheduler):
    """One engine step: worker connectors -> pickled outputs -> aggregator -> scheduler -> published events."""
    outputs = []
    for worker in ranks:
        output = KVConnectorOutput(kv_cache_events=worker.get_kv_connector_kv_cache_events())
        runner = ModelRunnerOutput.__new__(ModelRunnerOutput)
        runner.kv_connector_output = pickle.loads(pickle.dumps(output))
        outputs.append(runner)
    if len(outputs) > 1:
        merged = KVOutputAggregator(expected_finished_count=len(outputs)).aggregate(outputs, 0).kv_connector_output
    else:
        merged = outputs[0].kv_connector_output
    scheduler.update_connector_output(merged)
    return sorted(event.block_hashes[0] for event in scheduler.take_events())


def pair(cls, kinds, ranks=1):
    workers = [build(cls, [kind(str(i)) for i, kind in enumerate(kinds)]) for _ in range(ranks)]
    return workers, build(cls, [kind(str(i)) for i, kind in enumerate(kinds)])


def two_children(cls=MultiConnector, kinds=(Child, OtherChild), ranks=1):
    workers, scheduler = pair(cls, kinds, ranks)
    for worker in workers:
        worker._connectors[0].to_report = [stored(1), stored(2)]
        worker._connectors[1].to_report = [stored(3)]
    published = step(workers, scheduler)
    seen = [child.seen_types for child in scheduler._connectors]
    per_child = {"published": published, "seen": seen}
    workers[0]._connectors[1].to_report = [stored(4)]
    per_child["second_step"] = step(workers, scheduler)
    return per_child


def silent_first_rank():
    workers, scheduler = pair(MultiConnector, (Child, OtherChild), 2)
    workers[0]._connectors[0].to_report = [stored(1)]
    workers[1]._connectors[0].to_report = [stored(1)]
    workers[1]._connectors[1].to_report = [stored(9)]
    return {"published": step(workers, scheduler)}


def broken_child():
    workers, scheduler = pair(MultiConnector, (RaisingChild, Child))
    workers[0]._connectors[1].to_report = [stored(5)]
    return {"published": step(workers, scheduler)}


def nested():
    workers, scheduler = pair(MultiConnector, (Child,))
    inner_worker, inner_scheduler = pair(MultiConnector, (Child, Child))
    outer_worker, outer_scheduler = (
        build(MultiConnector, [inner_worker[0], workers[0]]),
        build(MultiConnector, [inner_scheduler, scheduler]),
    )
    inner_worker[0]._connectors[1].to_report = [stored(7)]
    workers[0]._connectors[0].to_report = [stored(8)]
    return {"published": step([outer_worker], outer_scheduler)}


messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("vllm.kvroute_plugin").addHandler(handler)
logging.getLogger("vllm.kvroute_plugin").setLevel(logging.INFO)

if name == "implemented":
    MultiConnector.get_kv_connector_kv_cache_events = lambda self: "vllm's own"
if name == "no_worker_events":
    del base.KVConnectorBase_V1.get_kv_connector_kv_cache_events
if name == "import_breaks":
    sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"] = None
if name != "unpatched":
    import kvroute_vllm_plugin

    kvroute_vllm_plugin.register()
    kvroute_vllm_plugin.register()

SCENARIOS = {
    "unpatched": two_children,
    "patched": two_children,
    "subclass": lambda: two_children(cls=AscendMultiConnector),
    "same_class": lambda: two_children(kinds=(Child, Child)),
    "tensor_parallel": lambda: two_children(ranks=2),
    "tensor_parallel_same_class": lambda: two_children(kinds=(Child, Child), ranks=2),
    "silent_first_rank": silent_first_rank,
    "broken_child": broken_child,
    "nested": nested,
    "implemented": lambda: {"own": MultiConnector.get_kv_connector_kv_cache_events(None)},
    "no_worker_events": dict,
    "import_breaks": dict,
}
print(json.dumps(SCENARIOS[name]() | {"messages": messages}))
