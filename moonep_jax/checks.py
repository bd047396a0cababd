"""Checks and casts at trace time, before an op is bound: axes, shapes, dtypes, channels. Pure; touches no memory.

Errors say op, argument, got, expected and how to fix.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from moonep_jax import _compat
from moonep_jax.errors import OpError, message
from moonep_jax.spec import DomainSpec, Plan

T = TypeVar("T")


def axes_bound(op: str, spec: DomainSpec) -> None:
    """The op must be traced inside a shard_map that is manual over all mesh axes, the EP axes among them."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(mesh.manual_axes)
    sizes = dict(mesh.shape)
    axes = spec.topology.axes
    if unbound := [a for a in axes if a not in manual]:
        fix = "call the op inside jax.shard_map over the mesh given to setup"
        raise OpError(message(op, "the EP axis is not bound", unbound, f"manual axes {list(axes)}", fix))
    if partial := [a for a in mesh.axis_names if a not in manual and sizes[a] > 1]:
        fix = "leave axis_names out of jax.shard_map, so that all axes are manual"
        raise OpError(message(op, "shard_map is manual over some axes only", f"automatic axes {partial}", "none", fix))
    ranks = int(np.prod([sizes[a] for a in axes]))
    if ranks != spec.ranks:
        fix = "use the mesh given to setup"
        raise OpError(message(op, "the EP axes have another size", ranks, spec.ranks, fix))


def channel(op: str, value: Any) -> int:
    """A channel is a static, small number."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= int(value) < 2**31:
        fix = "pass a Python int; 0 is right unless uses of one jitted or checkpointed function are independent"
        raise OpError(message(op, "bad channel", repr(value), "an int from 0 to 2**31 - 1", fix))
    return int(value)


def array(op: str, name: str, value: Any, shape: tuple[int | None, ...], dtype: Any, fix: str) -> jax.Array:
    """`value` as an array of this shape (None: any size from 1) and dtype."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        value = np.asarray(value)
    want = "[" + ", ".join("n" if n is None else str(n) for n in shape) + "]"
    expected = f"{np.dtype(dtype).name}{want}"
    fits = len(value.shape) == len(shape) and all(
        n == got or (n is None and got > 0) for n, got in zip(shape, value.shape, strict=True)
    )
    if not fits or value.dtype != dtype:
        got = f"{np.dtype(value.dtype).name if value.dtype != jax.dtypes.float0 else 'float0'}{list(value.shape)}"
        raise OpError(message(op, f"{name} does not fit", got, expected, fix))
    return jnp.asarray(value)


def tokens(op: str, name: str, value: Any, spec: DomainSpec) -> int:
    """Tokens of a call: the first dimension of x or topk_ids, from 1 to the capacity."""
    s = value.shape[0] if getattr(value, "ndim", 0) else 0
    if not 1 <= s <= spec.config.tokens:
        fix = "raise EPConfig.tokens, or split the batch"
        expected = f"1 to {spec.config.tokens} (EPConfig.tokens)"
        raise OpError(message(op, f"{name} has a bad number of tokens", s, expected, fix))
    return s


def plan(op: str, value: Any, spec: DomainSpec) -> Plan:
    """A Plan of this domain."""
    if not isinstance(value, Plan):
        fix = "pass the Plan that ep.plan or ep.dispatch returned (d.plan)"
        raise OpError(message(op, "plan is not a Plan", type(value).__name__, "moonep_jax.Plan", fix))
    if value.domain != spec.id:
        fix = "use each domain's plans with that domain"
        raise OpError(message(op, "the plan is another domain's", f"domain {value.domain}", f"domain {spec.id}", fix))
    return value


def cast_together(spec: DomainSpec, tree: T) -> T:
    """Casts all arrays to the union of their varying axes and the EP axes, so that results may carry that union.

    Outside the custom_vjp on purpose: the cast's transpose is the psum that a replicated operand's gradient needs.
    """
    return vary_together(tree, spec.topology.axes)


def vary_together(tree: T, axes: Iterable[str] = ()) -> T:
    """Casts all arrays to the union of their varying axes and `axes`."""
    leaves, treedef = jax.tree.flatten(tree)
    union = frozenset(axes).union(*(_compat.varying_axes(leaf) for leaf in leaves))
    order = [a for a in jax.sharding.get_abstract_mesh().axis_names if a in union]

    def cast(leaf: Any) -> Any:
        missing = tuple(a for a in order if a not in _compat.varying_axes(leaf))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.unflatten(treedef, [cast(leaf) for leaf in leaves])
