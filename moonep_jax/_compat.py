"""JAX's private accessors, all in this file, so that a change in JAX touches one place. Imports JAX only."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax

# -- jax.distributed ---------------------------------------------------------------------------------------------------


def distributed_client() -> Any | None:
    """The key-value client of jax.distributed; None before `jax.distributed.initialize()`."""
    # JAX has no public way to reach the store that it starts for every multi-process program.
    from jax._src import distributed

    return distributed.global_state.client


# -- types of traced values --------------------------------------------------------------------------------------------


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which a value inside shard_map varies (empty with check_vma=False)."""
    return jax.typeof(x).mat.varying


def result_avals(operand: Any, results: Sequence[tuple[tuple[int, ...], Any]]) -> list[Any]:
    """Abstract values of the given (shape, dtype), varying over the same mesh axes as `operand`'s abstract value."""
    # jax.ShapeDtypeStruct spells "varying" differently in different versions; ShapedArray does not.
    from jax._src import core

    return [
        core.ShapedArray(
            shape,
            dtype,
            sharding=core.get_cur_mesh_sharding(jax.sharding.PartitionSpec(*([None] * len(shape)))),
            manual_axis_type=operand.mat,
        )
        for shape, dtype in results
    ]


# -- lowering ----------------------------------------------------------------------------------------------------------


def register_lowering(primitive: Any, rule: Any, platform: str) -> None:
    """Registers a lowering that runs for every use of the primitive: a cached one would repeat its site."""
    from jax._src.interpreters import mlir

    mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)


def new_site(ctx: Any) -> int:
    """A number for one use of an op, distinct within a program and alike in all processes that lower the program.

    The low 32 bits count, the next 31 tell programs of different names apart.
    """
    # JAX numbers its own collectives with this counter.
    count = ctx.module_context.new_channel()
    name = str(ctx.module_context.module.operation.attributes["sym_name"])
    return ((zlib.crc32(name.encode()) & 0x7FFFFFFF) << 32) | count


def refuse_transforms(primitive: Any, batching_rule: Any, jvp_rule: Any) -> None:
    """Installs rules that raise for vmap and for forward-mode differentiation."""
    from jax.interpreters import ad, batching

    batching.primitive_batchers[primitive] = batching_rule
    ad.primitive_jvps[primitive] = jvp_rule
