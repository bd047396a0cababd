"""Symmetric memory: one chunk per rank, mapped by every process of the rank's group. `host` is the CPU's kind."""
