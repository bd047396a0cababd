"""Symmetric memory: one chunk per rank, mapped by every process of its group. `host` and `cuda` are the kinds of it."""
