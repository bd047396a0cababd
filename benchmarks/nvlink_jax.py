"""A mixture-of-experts layer's communication under jit on the devices of one process: ours against what JAX has.

`python -m benchmarks.nvlink_jax --json FILE`. Each layer brings the rows to their experts, grouped by expert as a
grouped GEMM wants them, scales them by a number of the expert, and sums them up at home: the part in which layers
differ. Forward, and forward with gradients of rows and route weights; every result is compared with a dense float32
layer, and rows that a capacity dropped are counted. Layers take turns in one loop, in the same process.

Peers in their usual forms: all_to_all with a capacity per pair of ranks (1.25 of the mean, and full), all_gather with
psum_scatter, and lax.ragged_all_to_all. Their permutations are gathers in both directions.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Multicast is the whole host's; nothing here may use it.
os.environ.update({"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"})
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")  # the chunk is beside JAX's memory
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
from cases import Shape, routing
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep

EP = P("ep")
Layer = Callable[..., jax.Array]  # (x [s, H], ids [s, K], w [s, K], scale [epn]) -> y [s, H], of one rank


# -- the peers ---------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def move(rows: jax.Array, source: jax.Array, back: jax.Array) -> jax.Array:
    """Row i of the result is rows[source[i]], zero where that is outside. `back` is the inverse, for the gradient."""
    return jnp.take(rows, source, axis=0, mode="fill", fill_value=0)


move.defvjp(
    lambda rows, source, back: (move(rows, source, back), back),
    lambda back, ct: (jnp.take(ct, back, axis=0, mode="fill", fill_value=0), None, None),
)


def inverse(order: jax.Array, length: int, outside: int) -> jax.Array:
    """inverse[order[i]] = i; `outside` elsewhere. Indices of `length` and more are dropped."""
    return jnp.full(length, outside, np.int32).at[order].set(jnp.arange(len(order), dtype=np.int32), mode="drop")


def experts(rows: jax.Array, local: jax.Array, scale: jax.Array) -> jax.Array:
    """Groups rows by their local expert (len(scale): no row), applies the experts, and undoes the grouping."""
    order = jnp.argsort(local, stable=True).astype(np.int32)
    back = inverse(order, len(order), 0)
    grouped = move(rows, order, back)
    each = jnp.concatenate([scale, jnp.zeros(1, scale.dtype)])[local[order]]
    return move((grouped * each[:, None]).astype(rows.dtype), back, order)


def repeat(x: jax.Array, topk: int) -> jax.Array:
    """A row per assignment."""
    return jnp.broadcast_to(x[:, None], (len(x), topk, x.shape[1])).reshape(-1, x.shape[1])


def weigh(rows: jax.Array, w: jax.Array) -> jax.Array:
    """Sums a token's rows by weight, in float32."""
    return jnp.einsum("skh,sk->sh", rows.reshape(*w.shape, -1).astype(np.float32), w).astype(rows.dtype)


def local_ids(ids: jax.Array, epn: int) -> jax.Array:
    """Ids of this rank's experts, epn for all others."""
    local = ids - lax.axis_index("ep") * epn
    return jnp.where((local >= 0) & (local < epn), local, epn)


def all_to_all(x: jax.Array, ids: jax.Array, w: jax.Array, scale: jax.Array, *, factor: float | None) -> jax.Array:
    """Rows to ranks in buffers of one size per pair; factor None: as large as can be needed."""
    ranks, epn, n = lax.axis_size("ep"), len(scale), ids.size
    capacity = n if factor is None else int(factor * n / ranks)
    flat = ids.reshape(-1)
    rank = flat // epn
    one_hot = rank[:, None] == jnp.arange(ranks)[None]
    place = (jnp.cumsum(one_hot, axis=0) * one_hot).sum(1).astype(np.int32) - 1  # among the rows to this rank
    slot = jnp.where(place < capacity, rank * capacity + place, ranks * capacity)
    source = inverse(slot, ranks * capacity, n)
    swap = functools.partial(lax.all_to_all, axis_name="ep", split_axis=0, concat_axis=0, tiled=True)
    there = swap(move(repeat(x, w.shape[1]), source, slot))
    out = experts(there, local_ids(swap(jnp.take(flat, source, mode="fill", fill_value=-1)), epn), scale)
    return weigh(move(swap(out), slot, source), w)


def ring(x: jax.Array, ids: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """All tokens to all ranks, partial sums back."""
    x, ids, w = (lax.all_gather(a, "ep", tiled=True) for a in (x, ids, w))
    out = experts(repeat(x, w.shape[1]), local_ids(ids.reshape(-1), len(scale)), scale)
    return lax.psum_scatter(weigh(out, w), "ep", tiled=True)


def ragged(x: jax.Array, ids: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """Rows to ranks as many as there are, into a buffer that holds the worst case."""
    ranks, epn, n = lax.axis_size("ep"), len(scale), ids.size
    flat, me = ids.reshape(-1), lax.axis_index("ep")
    order = jnp.argsort(flat // epn, stable=True).astype(np.int32)
    back = inverse(order, n, 0)
    counts = lax.all_gather(jnp.bincount(flat // epn, length=ranks).astype(np.int32), "ep")  # [source, destination]
    sent_at = jnp.cumsum(counts, axis=1) - counts  # where a source keeps its rows to a destination
    here_at = jnp.cumsum(counts, axis=0) - counts  # where a destination puts a source's
    there = functools.partial(
        lax.ragged_all_to_all, input_offsets=sent_at[me], send_sizes=counts[me], output_offsets=here_at[me],
        recv_sizes=counts[:, me], axis_name="ep",
    )  # fmt: skip
    home = functools.partial(
        lax.ragged_all_to_all, input_offsets=here_at[:, me], send_sizes=counts[:, me], output_offsets=sent_at[:, me],
        recv_sizes=counts[me], axis_name="ep",
    )  # fmt: skip
    rows = there(move(repeat(x, w.shape[1]), order, back), jnp.zeros((ranks * n, x.shape[1]), x.dtype))
    came = there(flat[order], jnp.full(ranks * n, -1, np.int32))
    out = experts(rows, local_ids(came, epn), scale)
    return weigh(move(home(out, jnp.zeros((n, x.shape[1]), x.dtype)), back, order), w)


# -- ours --------------------------------------------------------------------------------------------------------------


def ours(ep: moonep.Domain, x: jax.Array, ids: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """dispatch, prefetch of the experts' numbers, combine."""
    d = ep.dispatch(x, ids, w)
    each = ep.prefetch(d.plan, {"scale": scale[:, None]})["scale"][:, 0]
    rows = jnp.repeat(each, d.group_sizes, total_repeat_length=len(d.weights))
    return ep.combine(d.plan, (d.hidden * rows[:, None]).astype(x.dtype), d.weights)


# -- measuring ---------------------------------------------------------------------------------------------------------


@jax.jit
def dense(x: jax.Array, ids: jax.Array, w: jax.Array, scale: jax.Array, ct: jax.Array) -> list[jax.Array]:
    """y and the gradients of x and w, in float32 and without any parallelism."""
    x, ct, each = x.astype(np.float32), ct.astype(np.float32), scale[ids]
    factor = (w * each).sum(1, keepdims=True)
    return [factor * x, factor * ct, each * (x * ct).sum(1, keepdims=True)]


@jax.jit
def error(got: jax.Array, want: jax.Array) -> jax.Array:
    """Largest difference, relative to the largest value."""
    return jnp.abs(got.astype(np.float32) - want).max() / jnp.abs(want).max()


class Case:
    """One size: data, and every layer's programs."""

    def __init__(self, mesh: jax.sharding.Mesh, ep: moonep.Domain, shape: Shape, leave_out: list[str]) -> None:
        self._mesh, self._shape = mesh, shape
        rng = np.random.default_rng(0)
        tokens = shape.R * shape.s
        x, ct = (rng.standard_normal((tokens, shape.H), np.float32).astype(jnp.bfloat16) for _ in range(2))
        w = rng.uniform(0.2, 1.0, (tokens, shape.K)).astype(np.float32)
        scale = rng.uniform(0.5, 1.5, shape.E).astype(np.float32)
        self._floats = [self.put(a) for a in (x, w, scale, ct)]
        layers: dict[str, Layer] = {
            "ours": functools.partial(ours, ep),
            "all_to_all 1.25": functools.partial(all_to_all, factor=1.25),
            "all_to_all full": functools.partial(all_to_all, factor=None),
            "ring": ring,
            "ragged_all_to_all": ragged,
        }
        self.programs: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        for name, layer in ((n, f) for n, f in layers.items() if n not in leave_out):
            try:
                self.programs[name] = self._compile(layer)
            except Exception as e:  # a peer that this JAX cannot compile is a result, too
                self.failed[name] = f"{type(e).__name__}: {str(e)[:300]}"

    def put(self, array: Any) -> jax.Array:
        """Sharded over the ranks."""
        return jax.device_put(array, NamedSharding(self._mesh, EP))

    def arguments(self, name: str) -> tuple[np.ndarray, list[jax.Array]]:
        """The ids of a routing, and the operands of all programs."""
        ids = routing(name, self._shape, 0).reshape(-1, self._shape.K)
        return ids, [self._floats[0], self.put(ids), *self._floats[1:]]

    def _compile(self, layer: Layer) -> dict[str, Any]:
        mapped = jax.shard_map(layer, mesh=self._mesh, in_specs=EP, out_specs=EP, check_vma=False)

        def forward(x: Any, ids: Any, w: Any, scale: Any, ct: Any) -> Any:
            del ct
            return [mapped(x, ids, w, scale)]

        def both(x: Any, ids: Any, w: Any, scale: Any, ct: Any) -> Any:
            y, back = jax.vjp(lambda x, w: mapped(x, ids, w, scale), x, w)
            return [y, *back(ct)]

        args = self.arguments("uniform")[1]
        return {name: jax.jit(f).lower(*args).compile() for name, f in (("forward", forward), ("both", both))}


def measure(programs: dict[str, Callable[[], Any]], rounds: int, launches: int) -> dict[str, list[float]]:
    """Milliseconds per launch of each round, by program; programs take turns, launches of a round are not awaited."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(rounds + 1):  # the first is for warming up
        for name, program in programs.items():
            jax.block_until_ready(program())
            count = min(launches, 2) if turn == 0 else launches
            start = time.perf_counter()
            last = None
            for _ in range(count):
                last = program()
            jax.block_until_ready(last)
            if turn:
                times[name].append((time.perf_counter() - start) / count * 1e3)
    return times


def main() -> None:
    """Runs all routings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for all figures, written after every routing")
    parser.add_argument("--routings", default="uniform,lognormal_2,lognormal_8,lognormal_24,one_home")
    parser.add_argument("--leave-out", default="", help="peers not to measure, by name, with commas")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launches", type=int, default=5)
    o = parser.parse_args()
    shape = Shape(o.ranks, o.tokens, 8, o.experts, o.hidden)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: o.ranks]), ("ep",))
    config = moonep.EPConfig(tokens=o.tokens, hidden=o.hidden, topk=8, experts=o.experts,
                             weights={"scale": ((1,), "float32")}, timeout_s=30, first_call_timeout_s=60)  # fmt: skip
    result: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "shape": str(shape)}
    print("| routing | layer | forward ms | with gradients ms | ours is faster by | dropped | error y | dx | dw |")
    print("|" + "---|" * 9, flush=True)
    with moonep.setup(mesh, "ep", config) as ep:
        case = Case(mesh, ep, shape, o.leave_out.split(","))
        result["failed"] = case.failed
        rows = result["rows"] = []
        for routing_name in o.routings.split(","):
            ids, args = case.arguments(routing_name)
            want = dense(*args)
            times: dict[str, dict[str, float]] = {}
            for part in ("forward", "both"):
                programs = {n: functools.partial(p[part], *args) for n, p in case.programs.items()}
                quick = {n: p for n, p in programs.items() if n != "ragged_all_to_all"}
                slow = {n: p for n, p in programs.items() if n not in quick}  # measured at 3 GB/s: a few are enough
                timed = measure(quick, o.rounds, o.launches) | measure(slow, 2, 1)
                times[part] = {n: statistics.median(t) for n, t in timed.items()}
            for name, programs in case.programs.items():
                got = programs["both"](*args)
                errors = [float(error(g, e)) for g, e in zip(got, want, strict=True)]
                rank = ids.reshape(o.ranks, -1) // (o.experts // o.ranks)
                share = np.array([np.bincount(r, minlength=o.ranks) for r in rank])  # [source, destination]
                capacity = int(1.25 * share.sum(1).max() / o.ranks)
                dropped = float(np.maximum(share - capacity, 0).sum() / share.sum()) if "1.25" in name else 0.0
                row = {"routing": routing_name, "layer": name, "forward_ms": times["forward"][name],
                       "both_ms": times["both"][name], "ours_faster": times["both"][name] / times["both"]["ours"],
                       "dropped": dropped, "errors": dict(zip(("y", "dx", "dw"), errors, strict=True))}  # fmt: skip
                rows.append(row)
                cells = [routing_name, name, f"{row['forward_ms']:.3f}", f"{row['both_ms']:.3f}",
                         f"{row['ours_faster']:.2f}", f"{dropped:.2f}", *(f"{e:.1e}" for e in errors)]  # fmt: skip
                print("| " + " | ".join(cells) + " |", flush=True)
            if o.json:
                o.json.parent.mkdir(parents=True, exist_ok=True)
                o.json.write_text(json.dumps(result, indent=1))
        ep.check()
    for name, text in case.failed.items():
        print(f"{name}: {text}")


if __name__ == "__main__":
    main()
