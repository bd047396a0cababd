"""The prefetch table: 14 configurations, by how often each expert of rank 0 is fetched. Values only; imports numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Config(NamedTuple):
    """One configuration.

    name: of the table; experts: of 4 ranks; columns: slot columns per rank; h, hp: shape of an expert's weights, 2-byte
    elements; fetched: how often each of rank 0's experts is fetched, by as many other ranks.
    """

    name: str
    experts: int
    columns: int
    h: int
    hp: int
    fetched: list[int]


PREFETCH = [
    Config("slots_1", 32, 14, 3584, 3072, [1]),
    Config("slots_2", 32, 14, 3584, 3072, [1, 1]),
    Config("slots_3", 32, 14, 3584, 3072, [2, 1]),
    Config("slots_5", 32, 14, 3584, 3072, [3, 2]),
    Config("ramp_0_3", 32, 14, 3584, 3072, [0, 1, 2, 3, 0, 1, 2, 3]),
    Config("mixed", 32, 14, 3584, 3072, [3, 0, 2, 1, 3, 0, 2, 1]),
    Config("heavy", 32, 14, 3584, 3072, [3, 3, 2, 3, 1, 0, 2, 3]),
    Config("full_3x8", 32, 14, 3584, 3072, [3] * 8),
    Config("dense_B8", 32, 8, 3584, 3072, [2, 1, 3, 1, 2, 3, 1, 2]),
    Config("epn4_full", 16, 14, 3584, 3072, [3] * 4),
    Config("epn16_mixed", 64, 16, 3584, 3072, [3, 2, 1, 0] * 4),
    Config("thin_7168x128", 32, 16, 7168, 128, [3, 0, 2, 1, 3, 0, 2, 1]),
    Config("tall_1024x3072", 32, 14, 1024, 3072, [3, 0, 2, 1, 3, 0, 2, 1]),
    Config("tiny_512x512", 32, 16, 512, 512, [3, 3, 2, 3, 1, 0, 2, 3]),
]


def slots_of(fetched: Sequence[int], experts: int, ranks: int) -> np.ndarray:
    """slot_expert [ranks, experts per rank]: expert e of rank 0 in slots of fetched[e] other ranks."""
    epn = experts // ranks
    slots = np.full((ranks, epn), -1, np.int32)
    used = [0] * ranks
    for e, count in enumerate(fetched):
        for i in range(count):
            r = 1 + (e + i) % (ranks - 1)
            slots[r, used[r]] = e
            used[r] += 1
    return slots
