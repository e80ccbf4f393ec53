"""vLLM plugin: MultiConnector hands on the worker-side KV events of its children.

vLLM calls `register` in every process it starts (API server, engine core, workers) through the entry point group
``vllm.general_plugins``. It changes one class in memory and no file, and it never raises: an engine without pool
events is slower, an engine that does not start is down.
"""

import functools
import logging

__all__ = ["register"]

_logger = logging.getLogger("vllm.kvroute_plugin")


@functools.cache
def register() -> None:
    """Patch MultiConnector in this process, once; says once, in the log, what it did or why it did nothing."""
    try:
        from kvroute_vllm_plugin.patch import patch_multi_connector

        _logger.info("kvroute plugin: %s", patch_multi_connector())
    except Exception as error:
        _logger.warning("kvroute plugin: MultiConnector left as it is (%s: %s)", type(error).__name__, error)
