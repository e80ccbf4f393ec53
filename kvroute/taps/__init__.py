"""Debugging taps: what the services say they do, as it happens."""
