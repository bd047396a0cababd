"""The case table: routings, shapes and paddings shared by all tests and benchmarks. Imports numpy only.

A routing is a function ``(rng, R, s, K, E) -> ids [R, s, K] int32``; ids outside [0, E) are not routed. Notation as in
``moonep_jax.reference``. ``routing(name, shape, seed)`` builds one reproducibly.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Array = npt.NDArray[Any]
Routing = Callable[[np.random.Generator, int, int, int, int], Ids]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one case: ranks, rows of x per rank, experts per token, experts, hidden, and token capacity S >= s."""

    R: int
    s: int
    K: int
    E: int
    H: int
    S: int = 0  # 0: equal to s

    def __post_init__(self) -> None:
        if not self.S:
            object.__setattr__(self, "S", self.s)

    @property
    def epn(self) -> int:
        """Experts per rank."""
        return self.E // self.R

    def __str__(self) -> str:
        capacity = f"-S{self.S}" if self.s != self.S else ""
        return f"R{self.R}-s{self.s}{capacity}-K{self.K}-E{self.E}-H{self.H}"


SHAPES: list[Shape] = [
    Shape(1, 8, 2, 4, 8),
    Shape(1, 5, 1, 1, 7),
    Shape(2, 8, 2, 4, 8),  # K = epn
    Shape(2, 6, 3, 4, 7, S=16),  # K > epn, fewer rows than capacity
    Shape(2, 1, 9, 32, 8),  # one token
    Shape(3, 7, 2, 12, 8),  # no power of two anywhere
    Shape(3, 5, 1, 3, 7),  # K = epn = 1
    Shape(4, 16, 4, 8, 64),  # K > epn
    Shape(4, 16, 1, 32, 8),  # K = 1, maxvio up to 31
    Shape(4, 3, 8, 8, 8, S=8),  # every token to every expert
    Shape(5, 9, 3, 20, 7),
    Shape(8, 16, 4, 64, 64),
    Shape(8, 8, 2, 8, 8),  # epn = 1: the cascade is common
    Shape(8, 4, 6, 48, 7, S=32),
    Shape(16, 4, 4, 32, 8),
    Shape(16, 8, 8, 128, 8),  # K = epn
]

# Shapes with real group sizes; a few of them, they take a while in NumPy.
LARGE_SHAPES: list[Shape] = [
    Shape(64, 8, 8, 256, 8),
    Shape(72, 4, 8, 288, 8),
    Shape(128, 8, 8, 1024, 8),
]

PADDINGS = (1, 8, 128)

# Ids that are not routed, whatever E is; E itself and ids near it are added where they are used.
OUTSIDE = (-1, -5, np.iinfo(np.int32).min, np.iinfo(np.int32).max)


def _i32(ids: Array) -> Ids:
    return np.ascontiguousarray(ids, np.int32)


def _by_popularity(rng: np.random.Generator, log_p: Array, R: int, s: int, K: int) -> Ids:
    """K experts per token drawn by popularity; distinct when there are at least K (Gumbel top-k)."""
    E = len(log_p)
    if K > E:
        return _i32((log_p + rng.gumbel(size=(R, s, K, E))).argmax(axis=-1))
    score = log_p + rng.gumbel(size=(R, s, E))
    return _i32(np.argsort(-score, axis=-1, kind="stable")[..., :K])


def lognormal_ids(rng: np.random.Generator, R: int, s: int, K: int, E: int, maxvio: float) -> Ids:
    """Lognormal expert popularity whose width is bisected until the routing's own maxvio meets the target.

    Distinct experts per token bound maxvio by E / K - 1; a target out of reach gives the most skewed routing.
    """
    z = rng.standard_normal(E)
    seed = int(rng.integers(2**32))  # the same noise at each width, so that maxvio grows with it

    def draw(sigma: float) -> tuple[Ids, float]:
        ids = _by_popularity(np.random.default_rng(seed), sigma * z, R, s, K)
        return ids, float(np.bincount(ids.reshape(-1), minlength=E).max() * E / ids.size - 1)

    low, high = 0.0, 64.0
    for _ in range(14):
        middle = (low + high) / 2
        if draw(middle)[1] < maxvio:
            low = middle
        else:
            high = middle
    return draw(high)[0]


def uniform(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Every expert equally likely, distinct within a token."""
    return _by_popularity(rng, np.zeros(E), R, s, K)


def lognormal_2(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """maxvio 2."""
    return lognormal_ids(rng, R, s, K, E, 2)


def lognormal_8(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """maxvio 8."""
    return lognormal_ids(rng, R, s, K, E, 8)


def lognormal_24(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """maxvio above 20 where E / K allows."""
    return lognormal_ids(rng, R, s, K, E, 24)


def one_expert(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Every assignment of all ranks to one expert."""
    return np.full((R, s, K), rng.integers(E), np.int32)


def one_home(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Only experts of one rank are chosen."""
    epn = E // R
    return _i32(rng.integers(R) * epn + rng.integers(epn, size=(R, s, K)))


def two_hot(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Two experts share most rows; the rest is uniform."""
    hot = rng.integers(E, size=2)
    ids = rng.integers(E, size=(R, s, K))
    return _i32(np.where(rng.random((R, s, K)) < 0.8, hot[rng.integers(2, size=(R, s, K))], ids))


def staircase(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Home r is chosen in proportion to r + 1: many donors, many receivers."""
    return _by_popularity(rng, np.log(np.arange(E) // (E // R) + 1.0), R, s, K)


def crowded(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """All homes but one share the rows evenly over their experts.

    The empty one would take rows of many foreign experts: the lean plan needs more slots than there are wherever
    ceil(epn / R) * (R - 1) > epn, and the cascade is taken.
    """
    epn = E // R
    homes = rng.permutation(R)[: max(R - 1, 1)]
    i = rng.permutation(R * s * K)
    return _i32(homes[i % len(homes)] * epn + (i // len(homes)) % epn).reshape(R, s, K)


def crowded_pair(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Half of the homes share the rows evenly over their experts, the other half gets nothing."""
    epn = E // R
    homes = rng.permutation(R)[: (R + 1) // 2]
    i = rng.permutation(R * s * K)
    return _i32(homes[i % len(homes)] * epn + (i // len(homes)) % epn).reshape(R, s, K)


def balanced(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Every home gets exactly s * K rows, distinct experts within a token when K <= E: nothing moves."""
    epn = E // R
    i = rng.permutation(R * s)[:, None] * K + np.arange(K)
    return _i32(i % R * epn + i // R % epn).reshape(R, s, K)


def own_home(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Every rank chooses its own experts: balanced, and no row crosses a link."""
    epn = E // R
    return _i32(np.arange(R)[:, None, None] * epn + rng.integers(epn, size=(R, s, K)))


def reversed_homes(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Rank r chooses experts of rank R - 1 - r: balanced, and every row crosses (but the middle rank's)."""
    epn = E // R
    return _i32(np.arange(R)[::-1, None, None] * epn + rng.integers(epn, size=(R, s, K)))


def k_same(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """All K choices of a token are one expert."""
    return _i32(np.broadcast_to(rng.integers(E, size=(R, s, 1)), (R, s, K)))


def duplicates(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Choices from few experts with repeats within a token."""
    few = rng.integers(E, size=max(2, E // 4))
    return _i32(few[rng.integers(len(few), size=(R, s, K))])


def unrouted(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Nothing is routed."""
    return np.full((R, s, K), -1, np.int32)


def partly_unrouted(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """A third of the choices is -1, some whole tokens too; T does not divide by R as a rule."""
    ids = uniform(rng, R, s, K, E)
    ids[rng.random((R, s, K)) < 0.3] = -1
    ids[rng.random((R, s)) < 0.2] = -1
    return ids


def padded_tails(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Each rank routes a random number of leading tokens, the rest is padding: T does not divide by R as a rule."""
    ids = lognormal_2(rng, R, s, K, E)
    ids[np.arange(s) >= rng.integers(s + 1, size=(R, 1))] = -1
    return ids


def one_short(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """A uniform routing without its last choice: T = R * s * K - 1 never divides by R > 1."""
    ids = uniform(rng, R, s, K, E)
    ids[-1, -1, -1] = -1
    return ids


def one_over(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Balanced but for one choice moved to another home: a single row is surplus."""
    ids = balanced(rng, R, s, K, E)
    ids[0, 0, 0] = (ids[0, 0, 0] + E // R) % E
    return ids


def empty_ranks(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Half of the ranks (at least one, if there are two) have no routed token."""
    ids = lognormal_2(rng, R, s, K, E)
    ids[rng.permutation(R)[: R // 2]] = -1
    return ids


def single_token(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Rank 0 has one token, the others have none."""
    ids = np.full((R, s, K), -1, np.int32)
    ids[0, 0] = uniform(rng, 1, 1, K, E)[0, 0]
    return ids


def single_row(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """One routed row in all: the last choice of the last rank, to the last expert."""
    ids = np.full((R, s, K), -1, np.int32)
    ids[-1, -1, -1] = E - 1
    return ids


def out_of_range(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Ids E, E + 7, -5 and the int32 limits mixed in: not routed."""
    ids = uniform(rng, R, s, K, E)
    outside = np.array([E, E + 7, *OUTSIDE], np.int64)
    return _i32(np.where(rng.random((R, s, K)) < 0.4, outside[rng.integers(len(outside), size=(R, s, K))], ids))


def anything(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Ids:
    """Random width of popularity, repeats, padding and stray ids at once: for fuzzing over seeds."""
    log_p = rng.uniform(0, 4) * rng.standard_normal(E)
    ids = (log_p + rng.gumbel(size=(R, s, K, E))).argmax(axis=-1)
    ids[rng.random((R, s, K)) < rng.choice([0, 0.1, 0.7])] = -1
    ids[rng.random((R, s, K)) < rng.choice([0, 0.1])] = E
    ids[rng.random(R) < rng.choice([0, 0.4])] = -1
    return _i32(ids)


ROUTINGS: dict[str, Routing] = {
    f.__name__: f
    for f in (
        uniform,
        lognormal_2,
        lognormal_8,
        lognormal_24,
        one_expert,
        one_home,
        two_hot,
        staircase,
        crowded,
        crowded_pair,
        balanced,
        own_home,
        reversed_homes,
        k_same,
        duplicates,
        unrouted,
        partly_unrouted,
        padded_tails,
        one_short,
        one_over,
        empty_ranks,
        single_token,
        single_row,
        out_of_range,
        anything,
    )
}

# Routings under which the exact planner moves nothing.
BALANCED = ("balanced", "own_home", "reversed_homes", "unrouted")


def routing(name: str, shape: Shape, seed: int = 0) -> Ids:
    """ids [R, s, K] of the named routing; the same for the same name, shape and seed on every machine."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode()), shape.R, shape.s, shape.K, shape.E])
    return ROUTINGS[name](rng, shape.R, shape.s, shape.K, shape.E)
