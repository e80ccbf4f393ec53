"""Metrics of the memory pool's store: endpoint choice, parsing, mapping and a background collector."""
