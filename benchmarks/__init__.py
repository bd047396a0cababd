"""Benchmarks: one file per table; results, raw, under results/."""
