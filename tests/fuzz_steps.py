"""End-to-end part of the fuzzer: random domains, one program each that runs every op, many routings through it.

The same case runs on the local devices of one process and on those of several (workers/fuzzing.py): results are
compared shard by shard with the oracle, bit for bit, so no process needs more than its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from cases import ROUTINGS, Shape
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from steps import HALF_ULP, operands, same_bits, whole_body
from workers import variables

import moonep_jax as moonep
from moonep_jax import reference as ref
from moonep_jax.spec import PLAN_ARRAYS

Array = Any  # NumPy arrays of any dtype
EP = P("ep")
RANKS = (1, 2, 2, 3, 4, 4, 5, 8)
LEAVES = ((), (1,), (3, 5), (33,), (2, 1, 3))
LEAF_DTYPES = ("float32", "float16", "bfloat16")
ALIKE = ("slot_expert", "home_rows", "rank_rows")


@dataclasses.dataclass(frozen=True)
class Case:
    """One domain. `full`: which leaves come as [2*epn, ...]. `variables`: the environment at setup."""

    shape: Shape
    config: moonep.EPConfig
    full: dict[str, bool]
    variables: dict[str, Any]

    def __str__(self) -> str:
        c = self.config
        leaves = ", ".join(f"{n}{'*' if self.full[n] else ''} {leaf.dtype.name}{list(leaf.shape)}"
                           for n, leaf in c.weights.items())  # fmt: skip
        return (
            f"{self.shape} {c.dtype.name} A{c.token_padding} {c.combine} {c.planner} stage {c.stage_bytes} "
            f"[{leaves}] {self.variables}"
        )


def draw(rng: np.random.Generator, ranks: int | None = None) -> Case:
    """A random domain of `ranks` ranks, or of any number."""
    r = int(rng.choice(RANKS)) if ranks is None else ranks
    epn, s = int(rng.integers(1, 5)), int(rng.integers(1, 9))
    hidden = int(rng.choice([1, 2, 7, 8, 16, 33, 64]))
    shape = Shape(r, s, int(rng.integers(1, 6)), r * epn, hidden, S=s + int(rng.choice([0, 0, 3])))
    leaves = {
        name: (LEAVES[rng.integers(len(LEAVES))], str(rng.choice(LEAF_DTYPES))) for name in "ab"[: rng.integers(1, 3)]
    }
    config = moonep.EPConfig(
        tokens=shape.S,
        hidden=hidden,
        topk=shape.K,
        experts=shape.E,
        dtype=str(rng.choice(["float32", "float16", "bfloat16"])),
        token_padding=int(rng.choice([1, 2, 8, 64])),
        weights=leaves,
        combine=str(rng.choice(["dedup", "exact"])),
        planner=str(rng.choice(["exact", "exact", "exact", "home"])),
        stage_bytes=[None, 64 * epn, 64 * epn + int(rng.integers(300))][rng.integers(3)],
    )
    full = {name: bool(rng.integers(2)) for name in leaves}
    delay = int(rng.choice([0, 0, 100, 400]))
    variables = {"MOONEP_POISON": 1, "MOONEP_DELAY_US": delay, "MOONEP_DELAY_SEED": int(rng.integers(2**31))}
    # The checks of debug mode must keep silent, too; they take long to compile.
    variables["MOONEP_DEBUG"] = int(rng.random() < 0.1)
    return Case(shape, config, full, variables)


def draw_ids(rng: np.random.Generator, shape: Shape) -> Array:
    """Ids of any family; half of the time each rank routes a number of tokens of its own."""
    name = list(ROUTINGS)[rng.integers(len(ROUTINGS))]
    ids = ROUTINGS[name](rng, shape.R, shape.s, shape.K, shape.E)
    if rng.random() < 0.5:
        ids[np.arange(shape.s) >= rng.integers(shape.s + 1, size=(shape.R, 1))] = -1
    return ids


def program(domain: moonep.Domain, mesh: Mesh) -> Any:
    """Plan and every op on it, forward and backward: jit of a function of arrays that lead with the ranks."""
    rows = whole_body(domain)

    def body(a: dict[str, Any], w: dict[str, Any], ct: dict[str, Any]) -> Any:
        got = rows(**a)
        full, back = jax.vjp(lambda w: domain.prefetch(got["plan"], w), w)
        return {**got, "full": full, "grads": back(ct)[0]}

    def local(*args: Any) -> Any:
        return jax.tree.map(lambda x: x[None], body(*jax.tree.map(lambda x: x[0], args)))

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=EP, out_specs=EP))


@contextlib.contextmanager
def running(case: Case, mesh: Mesh) -> Iterator[Callable[[np.random.Generator], str]]:
    """Sets the domain up; gives a function that runs and checks one step, and returns the kind of its plan."""
    with variables(**case.variables):
        domain = moonep.setup(mesh, "ep", case.config)
    with domain:
        step = program(domain, mesh)
        yield lambda rng: _one_step(case, step, mesh, rng)
        domain.check()


def _one_step(case: Case, step: Any, mesh: Mesh, rng: np.random.Generator) -> str:
    shape, config = case.shape, case.config
    ids = draw_ids(rng, shape)
    p = ref.plan(ids, shape.E, config.token_padding, config.planner)
    a = operands(rng, ids, p, shape, config.dtype)
    w, ct = {}, {}
    for name, leaf in config.weights.items():
        size = (shape.R, 2 * shape.epn, *leaf.shape)
        w[name] = rng.standard_normal(size, np.float32).astype(leaf.dtype)[:, : (1 + case.full[name]) * shape.epn]
        ct[name] = rng.standard_normal(size, np.float32).astype(leaf.dtype)
    sharding = NamedSharding(mesh, EP)
    placed = jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda i, x=x: x[i]), (a, w, ct))
    got = jax.block_until_ready(step(*placed))
    for name, want in expected(p, a, w, ct, config).items():
        array = got
        for key in name.split("/"):
            array = getattr(array, key) if hasattr(array, key) and not isinstance(array, dict) else _item(array, key)
        for shard in array.addressable_shards:
            same_bits(shard.data, want[shard.index], f"{name} of {_ranks(shard.index, shape)}")
    _check_dweights(p, a, got["combine_grads"][1], config, shape)
    tickets = [int(np.asarray(s.data)[0, 0]) for s in got["plan"].ticket.addressable_shards]
    assert min(tickets) == max(tickets) >= 0, f"tickets {tickets}"
    return p.kind


def _item(tree: Any, key: str) -> Any:
    return tree[int(key)] if isinstance(tree, tuple | list) else tree[key]


def _ranks(index: Any, shape: Shape) -> str:
    return f"rank {range(shape.R)[index[0]].start}"


def expected(
    p: ref.ReferencePlan, a: dict[str, Array], w: dict[str, Array], ct: dict[str, Array], config: moonep.EPConfig
) -> dict[str, Array]:
    """The oracle's results, by path in the program's."""
    want = {}
    for name in set(PLAN_ARRAYS) - {"ticket"}:
        array = getattr(p, name)
        want[f"plan/{name}"] = np.broadcast_to(array, (p.ranks, *array.shape)) if name in ALIKE else array
    want["hidden"], want["weights"] = ref.dispatch(p, a["x"], a["topk_weights"])
    want["y"] = ref.combine(p, a["out"], want["weights"], config.combine)
    want["y_plain"] = ref.combine(p, a["out"], None, config.combine)
    want["dispatch_grads/0"], want["dispatch_grads/1"] = ref.dispatch_grad(
        p, a["ct_hidden"], a["ct_weights"], config.combine
    )
    want["combine_grads/0"] = ref.combine_grad(p, a["dy"], a["out"], want["weights"])[0]
    want["plain_grad"] = ref.combine_grad(p, a["dy"], a["out"])[0]
    epn = p.slot_expert.shape[1]
    for name, leaf in w.items():
        full, grad = ref.prefetch(p, leaf[:, :epn]), ref.reduce_grad(p, ct[name])
        if leaf.shape[1] == 2 * epn:  # unused slots, and their gradients, pass through
            rows = np.concatenate([np.zeros((p.ranks, epn), bool), p.slot_expert < 0], axis=1)
            unused = rows.reshape(*rows.shape, *([1] * (leaf.ndim - 2)))
            full = np.where(unused, leaf, full)
            grad = np.concatenate([grad, np.where(unused, ct[name], np.zeros_like(ct[name]))[:, epn:]], axis=1)
        want[f"full/{name}"], want[f"grads/{name}"] = full, grad
    return want


def _check_dweights(p: ref.ReferencePlan, a: dict[str, Array], got: Any, config: Any, shape: Shape) -> None:
    """The one result whose sum XLA orders: within the bound of a float32 sum in any order."""
    weights = ref.dispatch(p, a["x"], a["topk_weights"])[1]
    want = ref.combine_grad(p, a["dy"], a["out"], weights)[1]
    size = ref.combine_grad(p, np.abs(a["dy"]), np.abs(a["out"]), weights)[1]
    assert want is not None and size is not None
    for shard in got.addressable_shards:
        error = np.abs(np.asarray(shard.data, np.float64) - want[shard.index])
        assert (error <= (shape.H + 1) * HALF_ULP * size[shard.index]).all(), f"dweights: error {error.max()}"
