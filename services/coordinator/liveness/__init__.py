"""Health checks of engines: one coordinator asks, everybody reads the answer in NATS KV."""
