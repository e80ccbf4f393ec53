"""The demo: simulated engines under a multi-turn conversation load, placed cache-aware and round robin."""
