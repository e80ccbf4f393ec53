"""Simulated engines and pools: the same bytes and the same behaviour as the real ones, without a model."""
