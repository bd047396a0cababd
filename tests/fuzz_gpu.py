"""GPU part of the fuzzer: random domains of R ranks as streams of one process, all calls, against the oracle."""

from __future__ import annotations

import numpy as np
from cases import ROUTINGS, Shape
from fuzz_steps import LEAVES, draw_ids
from gpu_runs import BF16, Rows, Run, check_weights

DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BF16)


def run_case(rng: np.random.Generator, steps: int) -> str:
    """Draws a domain and runs `steps` routings through all ops on it. Returns what it drew."""
    ranks, epn, s = int(rng.choice([1, 2, 3, 4, 5, 8])), int(rng.integers(1, 5)), int(rng.integers(1, 33))
    hidden = int(rng.choice([1, 7, 8, 16, 64, 136, 512]))
    shape = Shape(ranks, s, int(rng.integers(1, 9)), ranks * epn, hidden, S=s + int(rng.choice([0, 3])))
    dtype = DTYPES[rng.integers(len(DTYPES))]
    fields = {
        "padding": int(rng.choice([1, 2, 8, 64])),
        "mode": str(rng.choice(["dedup", "exact"])),
        "planner": str(rng.choice(["exact", "exact", "exact", "home"])),
    }
    options = {
        "stage_bytes": 64 * epn * int(rng.choice([1, 2, 50])),
        "link_blocks": int(rng.choice([0, 1, 2, 5, 16])),
        "local_blocks": int(rng.choice([0, 1, 3, 16])),
        "whole": bool(rng.integers(2)),
        "rounds": int(rng.choice([0, 1, 3])),
    }
    text = f"{shape} {dtype.name} {fields} {options}"
    with Run(shape, dtype=dtype, **fields, **options) as run:
        for index in range(steps):
            seed = int(rng.integers(2**31))
            ids = draw_ids(np.random.default_rng(seed), shape)
            with_fields = (fields["padding"], dtype, fields["mode"], fields["planner"])
            run.compare(Rows(shape, ids, seed, *with_fields), what=f"step {index} of {text}")
        if fields["planner"] == "exact":
            leaves = [LEAVES[rng.integers(len(LEAVES))] for _ in range(int(rng.integers(1, 3)))]
            name = list(ROUTINGS)[rng.integers(len(ROUTINGS))]
            check_weights(run, name, int(rng.integers(1000)), leaves, DTYPES[rng.integers(3)], bool(rng.integers(2)))
    return text
