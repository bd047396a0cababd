"""Programs of one op over the ranks of a mesh, for timing: a call by itself, and many calls in one program.

In a program every call's operand depends on the call before, so that XLA can neither merge the calls nor move one out
of the loop. Shapes are one rank's unless they are said to be global; global arrays are split over the mesh axis "ep".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import kit  # sets what must be set before jax starts

EP = P("ep")


def mesh_of(ranks: int) -> jax.sharding.Mesh:
    """A mesh of the first devices; all of them where there are several processes."""
    if jax.process_count() > 1 and ranks != jax.device_count():
        raise SystemExit(f"several processes: a mesh needs all {jax.device_count()} devices, not {ranks}; leave it out")
    if not 0 < ranks <= jax.device_count():
        raise SystemExit(f"{ranks} ranks, and {jax.device_count()} devices; pass fewer ranks, or (on CPU) --devices")
    return jax.sharding.Mesh(np.array(jax.devices()[:ranks]), ("ep",))


def full(mesh: jax.sharding.Mesh, shape: Sequence[int], dtype: Any, value: float = 1) -> jax.Array:
    """A global array of one value, [ranks * shape[0], ...] for a rank's shape; made on the devices."""
    return _filler(NamedSharding(mesh, EP), (mesh.size * shape[0], *shape[1:]), dtype, value)()


@functools.cache  # a program for each shape, not for each array
def _filler(sharding: NamedSharding, shape: tuple[int, ...], dtype: Any, value: float) -> Any:
    return jax.jit(lambda: jnp.full(shape, value, dtype), out_shardings=sharding)


def fetch(array: jax.Array) -> np.ndarray[Any, Any]:
    """A global array, whole, on every process."""
    if jax.process_count() == 1:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


class Box:
    """Holds an array that programs take, overwrite and give back; several may share one."""

    def __init__(self, value: jax.Array) -> None:
        self.value = value


def chained(ticket: jax.Array, results: Any) -> jax.Array:
    """The ticket of the next call: the same one, but XLA cannot know before this call's results are there.

    The ticket, because it is the one small operand of every op: to change a number of a large one may copy all of it.
    """
    first = jax.tree.leaves(results)[0]
    return jnp.where(jnp.isnan(first[(0,) * first.ndim]), -1, ticket)


def replaced(carry: jax.Array, results: jax.Array) -> jax.Array:
    """The operand of the next call: this one's result."""
    del carry
    return results


class Op:
    """One op, as `call` and as `program`."""

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        body: Callable[..., Any],
        box: Box,
        rest: Sequence[Any] = (),
        follow: Callable[[Any, Any], Any] = chained,
        in_place: bool = False,
        loop: int = 8,
    ) -> None:
        """body(operand, *rest) -> results, of one rank.

        Args:
          mesh: its ranks.
          body: one rank's call.
          box: the operand that is carried from call to call.
          rest: the other operands.
          follow: (operand, results) -> the operand of a program's next call.
          in_place: the result takes the operand's memory, by itself and in a program.
          loop: calls of a program.
        """

        def many(operand: Any, *others: Any) -> Any:
            return jax.lax.fori_loop(0, loop, lambda _, given: follow(given, body(given, *others)), operand)

        self._box, self._rest, self._in_place = box, tuple(rest), in_place
        self._one = kit.on_ranks(mesh, body, donate_argnums=(0,) if in_place else ())
        self._many = kit.on_ranks(mesh, many, donate_argnums=0)

    def call(self) -> Any:
        """One call."""
        results = self._one(self._box.value, *self._rest)
        if self._in_place:
            self._box.value = results
        return results

    def program(self) -> Any:
        """A program of `loop` calls."""
        self._box.value = self._many(self._box.value, *self._rest)
        return self._box.value


def copy(mesh: jax.sharding.Mesh, nbytes: int, loop: int = 8) -> Op:
    """What every rank's plain pass over nbytes of its memory costs, all at once: each byte is read and written once.

    By itself into a new array, in a program in place. Adding one keeps XLA from leaving the copy out.
    """
    box = Box(full(mesh, (max(1, nbytes // 4),), np.int32))
    return Op(mesh, _pass_over, box, follow=replaced, loop=loop)


def _pass_over(data: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(data + 1)


def both(name: str, op: Op) -> dict[str, Callable[[], Any]]:
    """An op's two calls for kit.side_by_side: "name/call" and "name/program"."""
    return {f"{name}/call": op.call, f"{name}/program": op.program}


def side_by_side(calls: dict[str, Callable[[], Any]], loop: int) -> dict[str, dict[str, float]]:
    """kit.summary of each; of those whose name ends in "/program" per call."""
    return {
        name: kit.summary([t / loop for t in times] if name.endswith("/program") else times)
        for name, times in kit.side_by_side(calls).items()
    }


@functools.cache
def copy_gbps(mesh: jax.sharding.Mesh, loop: int = 4) -> float:
    """GB/s of each rank when all of them copy large arrays at once: bytes copied, not read plus written."""
    nbytes = 16 << 20
    return nbytes / side_by_side({"copy/program": copy(mesh, nbytes, loop).program}, loop)["copy/program"]["p50"] / 1e3
