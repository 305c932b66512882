"""Slow, plain re-implementations of docs/replay.md and of reuse, used as oracles."""
