"""The kvroute command: embedded stack, taps, simulated engines."""

__version__ = "0.1.0"
