"""Adds `get_kv_connector_kv_cache_events` to MultiConnector and shows each child only its own events.

Subclasses (vllm-ascend's AscendMultiConnector) inherit both. Nothing happens where vLLM implements the method itself.
"""

import functools
import inspect
import logging
from typing import Any

_logger = logging.getLogger("vllm.kvroute_plugin")
_METHOD = "get_kv_connector_kv_cache_events"
_MARK = "_kvroute_own_events_only"


def patch_multi_connector() -> str:
    """Patch the class once; a sentence on what was done. Raises ImportError on releases without worker-side events."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from kvroute_vllm_plugin.container import MultiConnectorKVEvents

    present = getattr(MultiConnector, _METHOD, None)
    if getattr(present, _MARK, False):
        return "MultiConnector is patched already"
    if not hasattr(KVConnectorBase_V1, _METHOD):
        return "this vLLM release has no worker-side connector events, nothing to hand on"
    if present is not getattr(KVConnectorBase_V1, _METHOD):
        return "this vLLM release hands on its children's events itself, nothing to do"

    def get_kv_connector_kv_cache_events(self: Any) -> MultiConnectorKVEvents | None:
        children = {}
        for index, child in enumerate(self._connectors):
            events = _events_of(child)
            if events is not None:
                children[index] = events
        return MultiConnectorKVEvents(children) if children else None

    original_init = MultiConnector.__init__
    original_update = MultiConnector.update_connector_output

    @functools.wraps(original_init)
    def init_and_shield(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        _show_own_events_only(self, MultiConnectorKVEvents)

    @functools.wraps(original_update)
    def update_connector_output(self: Any, connector_output: Any) -> Any:
        # A subclass may have exchanged children after our __init__ ran.
        _show_own_events_only(self, MultiConnectorKVEvents)
        return original_update(self, connector_output)

    setattr(get_kv_connector_kv_cache_events, _MARK, True)
    MultiConnector.__init__ = init_and_shield
    MultiConnector.update_connector_output = update_connector_output
    setattr(MultiConnector, _METHOD, get_kv_connector_kv_cache_events)
    return "MultiConnector hands on the KV events of its children"


@functools.cache
def _warn_once(what: str, detail: str) -> None:
    _logger.warning("kvroute plugin: %s (%s)", what, detail)


def _events_of(child: Any) -> Any:
    try:
        return getattr(child, _METHOD)()
    except Exception as error:
        _warn_once(f"events of {type(child).__name__} are lost", f"{type(error).__name__}: {error}")
        return None


def _show_own_events_only(multi: Any, container: type) -> None:
    """Wrap every child's `update_connector_output` on the instance so that it sees its own container or None."""
    for index, child in enumerate(getattr(multi, "_connectors", ())):
        current = child.update_connector_output
        if getattr(current, _MARK, None) == index:
            continue
        try:
            child.update_connector_output = _own_events_only(
                inspect.unwrap(current, stop=_is_foreign), index, container
            )
        except AttributeError as error:
            _warn_once(f"{type(child).__name__} cannot be given its events", str(error))


def _is_foreign(function: Any) -> bool:
    return getattr(function, _MARK, None) is None


def _own_events_only(original: Any, index: int, container: type) -> Any:
    @functools.wraps(original)
    def update_connector_output(connector_output: Any) -> Any:
        events = connector_output.kv_cache_events
        if not isinstance(events, container):
            return original(connector_output)
        connector_output.kv_cache_events = events.child(index)  # type: ignore[attr-defined]
        try:
            return original(connector_output)
        finally:
            connector_output.kv_cache_events = events

    setattr(update_connector_output, _MARK, index)
    return update_connector_output
