"""Compares what the index promises with what engines really have."""
