"""Placement: which worker a request goes to, from what the index, the load account and predictions say (pure)."""
