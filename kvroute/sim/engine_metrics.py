"""A simulated engine's Prometheus metrics, under the names vLLM gives them."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvroute.sim.rank_server import FirstToken, Prompt, RankServer

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
LABELS = ("model_name", "engine")


class EngineMetrics:
    """Metrics of all DP ranks of one engine; label ``engine`` is the DP rank."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._running = self._gauge("num_requests_running", "Requests being served.")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of device blocks in use, 1 means all.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens served.")
        self._generated = self._counter("generation_tokens", "Output tokens.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the device cache.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the device cache.")
        self._external = self._counter("external_prefix_cache_hits", "Prompt tokens found in a pool or CPU tier.")
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds", "Seconds.", LABELS, registry=self._registry, buckets=TTFT_BUCKETS
        )

    def served(self, dp_rank: int, prompt: Prompt, first: FirstToken, block_size: int) -> None:
        """Count a prompt whose first token is there."""
        labels = (self._model, str(dp_rank))
        npu_tokens = first.npu_blocks * block_size
        self._prompt.labels(*labels).inc(len(prompt.tokens))
        self._generated.labels(*labels).inc(prompt.output_limit)
        self._queries.labels(*labels).inc(len(prompt.tokens))
        self._hits.labels(*labels).inc(npu_tokens)
        self._external.labels(*labels).inc(first.cached_tokens - npu_tokens)
        self._ttft.labels(*labels).observe(first.seconds)

    def render(self, ranks: list[RankServer]) -> bytes:
        """The text form."""
        for server in ranks:
            labels = (self._model, str(server.dp_rank))
            pool = server.rank.pool
            self._running.labels(*labels).set(server.running)
            self._waiting.labels(*labels).set(server.waiting.qsize())
            self._usage.labels(*labels).set(1 - pool.free_blocks / pool.capacity)
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, LABELS, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, LABELS, registry=self._registry)
