"""The ops as JAX primitives over XLA FFI custom calls: shapes, lowering and sites. No checks, no gradients.

Every kind of call (forward and backward uses are kinds of their own) is a primitive. A lowering takes a new `site` each
time it runs, so that calls are told apart by what they are and not by when they come. The calls carry no effect: XLA
may merge, drop, hoist or recompute them, and does so alike on all ranks. May touch: _compat, env, native.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.extend.core import Primitive

from moonep_jax import _compat, env, native
from moonep_jax.errors import OpError, message
from moonep_jax.spec import DomainSpec
from moonep_jax.topology import Topology

# Kind numbers are those of xla_ffi/common/operands.h, targets those of the two module.cc.
_KINDS = {
    "plan": (0, "moonep_plan"),
    "dispatch": (1, "moonep_dispatch"),
    "combine": (2, "moonep_combine"),
    "prefetch": (3, "moonep_prefetch"),
    "dispatch_grad": (4, "moonep_combine"),
    "combine_grad": (5, "moonep_dispatch"),
    "reduce_grad": (6, "moonep_reduce_grad"),
}


def _abstract(*operands: Any, results: Sequence[tuple[tuple[int, ...], Any]], **_: Any) -> list[Any]:
    return _compat.result_avals(operands[0], results)


def _lower(
    ctx: Any,
    *operands: Any,
    platform: str,
    name: str,
    domain: int,
    axes: tuple[str, ...],
    groups: tuple[tuple[int, ...], ...],
    channel: int,
    captured: bool,
    results: Any,
    aliases: tuple[tuple[int, int], ...],
) -> Any:
    del results  # the avals of ctx say the same
    _check_mesh(name, _compat.lowering_mesh(ctx), axes, groups)
    kind, target = _KINDS[name]
    rule = jax.ffi.ffi_lowering(f"{target}_captured" if captured else target, operand_output_aliases=dict(aliases))
    site = np.int64(_compat.new_site(ctx))
    attributes = {"domain": np.int64(domain), "kind": np.int64(kind), "channel": np.int64(channel), "site": site}
    rule = functools.partial(rule, **attributes)
    # All kinds or none: order on one stream is what the calls rely on.
    if platform == "cuda" and env.read().collective_stream and _compat.has_collective_stream():
        return _compat.lower_on_collective_stream(ctx, target, rule, operands)
    return rule(ctx, *operands)


def _check_mesh(
    name: str, mesh: jax.sharding.Mesh | None, axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...]
) -> None:
    """The program's EP groups must be the domain's, device by device: a rank is a device here, and a place there."""
    # Without devices (an abstract mesh), or inside another shard_map, there is nothing to compare.
    if mesh is None or any(a not in mesh.axis_names for a in axes):
        return
    if foreign := _foreign_group(mesh, axes, groups):
        wrong, got = "an EP group of the mesh is not one of setup's", f"devices {list(foreign)}"
        fix = "run the op on the mesh given to setup, with its devices in the same order"
        raise OpError(message(name, wrong, got, f"one of {[list(g) for g in groups]}", fix))


@functools.lru_cache  # every call of a program asks
def _foreign_group(
    mesh: jax.sharding.Mesh, axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...]
) -> tuple[int, ...] | None:
    known = set(groups)
    return next((g for g in Topology.from_mesh(mesh, axes).device_ids if g not in known), None)


def _refuse_vmap(name: str, *_: Any, **__: Any) -> NoReturn:
    fix = "call the op on the whole batch of tokens, or loop with lax.scan or lax.map"
    raise OpError(message(name, "vmap is not supported", "a batched operand", "one call per rank and step", fix))


def _refuse_jvp(name: str, *_: Any, **__: Any) -> NoReturn:
    fix = "use jax.grad or jax.vjp, once"
    raise OpError(
        message(
            name,
            "forward-mode and repeated differentiation are not supported",
            "a jvp of the op",
            "reverse-mode differentiation",
            fix,
        )
    )


def _define(name: str) -> Primitive:
    primitive = Primitive(f"moonep_{name}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(_abstract)
    for platform in native.LOWERING_PLATFORMS.values():
        rule = functools.partial(_lower, platform=platform, name=name)
        _compat.register_lowering(primitive, rule, platform)
    _compat.refuse_transforms(primitive, functools.partial(_refuse_vmap, name), functools.partial(_refuse_jvp, name))
    return primitive


_PRIMITIVES = {name: _define(name) for name in _KINDS}


def call(
    name: str,
    operands: Sequence[jax.Array],
    results: Sequence[tuple[tuple[int, ...], Any]],
    *,
    spec: DomainSpec,
    channel: int = 0,
    captured: bool = False,
    aliases: Sequence[tuple[int, int]] = (),
) -> list[jax.Array]:
    """Binds one op. Operands must vary over the same mesh axes; results (shape, dtype) vary over those too.

    `aliases` are (operand, result) pairs that share their buffer. `captured` picks the target that CUDA graphs may
    capture although errors then show later; only plan has two.
    """
    return _PRIMITIVES[name].bind(
        *operands,
        domain=spec.id,
        axes=spec.topology.axes,
        groups=spec.topology.device_ids,
        channel=channel,
        captured=captured,
        results=tuple((tuple(shape), np.dtype(dtype)) for shape, dtype in results),
        aliases=tuple(aliases),
    )
