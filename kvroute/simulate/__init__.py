"""Replays request traces against the real placement and the real index, with a simple engine model."""
