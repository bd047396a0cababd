"""JAX's private accessors, all in this file, so that a change in JAX touches one place. Imports JAX only."""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax

# -- versions ----------------------------------------------------------------------------------------------------------

TESTED: Final = ((0, 10, 2), (0, 12, 0))  # the oldest and the newest jax that CI runs; a fourth number is a rebuild


def warn_if_untested(version: tuple[int, ...] = jax.__version_info__) -> None:
    """Warns when jax is newer than what was tested. No error: most releases change nothing that matters here."""
    # jax refuses a jaxlib newer than itself, so its own number says it for both.
    if version[:3] > TESTED[1]:
        oldest, newest, this = (".".join(map(str, v)) for v in (*TESTED, version))
        warnings.warn(
            f"moonep_jax is tested with jax {oldest} to {newest}, and this is {this}; use jax {newest} if something "
            "fails, or ignore this UserWarning",
            stacklevel=3,
        )


# -- jax.distributed, callbacks ----------------------------------------------------------------------------------------


def distributed_client() -> Any | None:
    """The key-value client of jax.distributed; None before `jax.distributed.initialize()`."""
    # JAX has no public way to reach the store that it starts for every multi-process program.
    from jax._src import distributed

    return distributed.global_state.client


def forget_callbacks() -> None:
    """Drops JAX's tokens of programs with callbacks: it waits for them at exit, and a failed one would raise there."""
    from jax._src import dispatch

    dispatch.runtime_tokens.clear()


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


def lowering_mesh(ctx: Any) -> jax.sharding.Mesh | None:
    """The mesh of the shard_map that is being lowered; None where it has no devices."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return mesh if isinstance(mesh, jax.sharding.Mesh) else None


def new_site(ctx: Any) -> int:
    """A number for one use of an op, distinct within a program and alike in all processes that lower the program.

    The low 32 bits count, the next 31 tell programs of different names apart.
    """
    # JAX numbers its own collectives with this counter.
    count = ctx.module_context.new_channel()
    name = str(ctx.module_context.module.operation.attributes["sym_name"])
    return ((zlib.crc32(name.encode()) & 0x7FFFFFFF) << 32) | count


def has_collective_stream() -> bool:
    """Whether XLA knows the stream of its collectives by name: an older one ends the process over such a name."""
    from jax._src import lib

    return lib.version >= (0, 11, 1)  # jaxlib's, which brings XLA


def lower_on_collective_stream(ctx: Any, name: str, rule: Any, operands: Sequence[Any]) -> list[Any]:
    """What `rule(ctx, *operands)` lowers to, in a function whose call XLA runs on the stream of its collectives.

    `jax.experimental.compute_on` with "gpu_stream:collective" annotates calls alike. Here the traced program stays as
    it is, and so do gradients, remat and types. Shapes must be static: the function gets the operands and nothing else.
    """
    # XLA hands a call's attributes on to every element of its result, and would make each element of the annotated
    # call an asynchronous call of its own. Alone in a function that is not inlined either, that call keeps them whole.
    kept = {"inlineable": "false"}

    def annotated(*inner: Any) -> list[Any]:
        return _call(ctx, name, functools.partial(rule, ctx), inner, {"_xla_stream_annotation": "collective", **kept})

    return _call(ctx, f"{name}_call", annotated, operands, kept)


def _call(
    ctx: Any, name: str, body: Callable[..., Sequence[Any]], operands: Sequence[Any], attributes: dict[str, str]
) -> list[Any]:
    """Calls a new function that computes `body`, with XLA's frontend attributes on the call."""
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import func

    module = ctx.module_context
    types = [operand.type for operand in operands]
    function = func.FuncOp(name, ir.FunctionType.get(types, []), visibility="private", ip=module.ip)
    module.symbol_table.insert(function)  # makes the name unique
    block = function.add_entry_block()
    with ir.InsertionPoint(block):
        returned = list(body(*block.arguments))
        func.ReturnOp(returned)
    result_types = [value.type for value in returned]  # known only now
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, result_types))
    call = func.CallOp(result_types, ir.FlatSymbolRefAttr.get(function.name.value), list(operands))
    strings: dict[str, ir.Attribute] = {key: ir.StringAttr.get(value) for key, value in attributes.items()}
    call.operation.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(strings)
    return list(call.results)


def refuse_transforms(primitive: Any, batching_rule: Any, jvp_rule: Any) -> None:
    """Installs rules that raise for vmap and for forward-mode differentiation."""
    from jax.interpreters import ad, batching

    batching.primitive_batchers[primitive] = batching_rule
    ad.primitive_jvps[primitive] = jvp_rule
