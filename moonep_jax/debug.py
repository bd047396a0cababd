"""MOONEP_DEBUG=1: checks of what the ops returned, in the traced program itself, alike on CPUs and GPUs.

A plan is held against its rules. Rows carry a checksum from their source: a second dispatch has it as its weights,
which travel bit for bit, and the destination compares it with what it got. Weights of experts do the same with a leaf
of checksums. Sums cannot be checked from either side; they are computed twice. What is wrong puts the domain in error,
with a text that names the op and both ranks, and the results are poisoned. No effect is traced, so jit, grad, remat and
scan stay as they are. Without the variable nothing here runs. Imports primitives and native; ops and domain use it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moonep_jax import _compat, checks, native, primitives
from moonep_jax.errors import ConfigError, message
from moonep_jax.spec import DomainSpec, Plan

_log = logging.getLogger("moonep_jax")
_FIX = (
    "close the domain; look for a plan that is used with other ids, for a write into its memory, a failing device or "
    "link, or report a bug"
)

Array = jax.Array
# One program where ops run without jit. Inlined into a traced one: a function lowered once would repeat its sites.
_compiled = functools.partial(jax.jit, static_argnums=0, inline=True)
Describe = Callable[[int, list[int]], tuple[str, str, str]]  # (rank, counts) -> what is wrong, got, expected


def require(platform: str) -> None:
    """Raises ConfigError where checks could not tell the host: JAX runs callbacks of GPU programs through its CPU."""
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError as error:
        wrong, got = "MOONEP_DEBUG needs JAX's CPU devices too", f"JAX_PLATFORMS with {platform} only"
        fix = "set JAX_PLATFORMS=cuda,cpu, or unset it"
        raise ConfigError(message("setup", wrong, got, "platforms that include cpu", fix)) from error


# -- checksums ---------------------------------------------------------------------------------------------------------


def _mix(h: Array) -> Array:
    """One to one on uint32, so that one flipped bit in an element always changes a checksum before it is shortened."""
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _bits(x: Array) -> Array:
    """The bits of a [n, ...] array as uint32 [n, m]: NaN payloads and the sign of zero count."""
    if x.dtype == np.bool_:
        x = x.astype(np.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    size = min(x.dtype.itemsize, 4)  # of 8 bytes: two halves
    return jax.lax.bitcast_convert_type(x, np.dtype(f"uint{8 * size}")).astype(np.uint32).reshape(x.shape[0], -1)


def _checksum(x: Array) -> Array:
    """uint32 [n] of the rows of [n, ...]; a sum of mixed elements and places, so in any order."""
    bits = _bits(x)
    place = np.arange(bits.shape[1], dtype=np.uint32) * np.uint32(0x9E3779B1)
    return jnp.sum(_mix(bits + place[None]), axis=1, dtype=np.uint32)


def _join(*parts: Array) -> Array:
    """One checksum out of several, which broadcast."""
    h = jnp.uint32(0)
    for part in parts:
        h = _mix(h * np.uint32(31) + part.astype(np.uint32) + np.uint32(0x9E3779B9))
    return h


def _as_weight(h: Array) -> Array:
    """23 bits of a checksum as a float in [1, 2): a normal number, which no hardware changes under way."""
    return jax.lax.bitcast_convert_type((h >> 9) | np.uint32(0x3F800000), np.float32)


def _differ(a: Array, b: Array) -> Array:
    """[n] rows of [n, ...] whose bits differ anywhere."""
    return jnp.any(_bits(a) != _bits(b), axis=1)


# -- verdicts ----------------------------------------------------------------------------------------------------------


def _rank(spec: DomainSpec) -> Array:
    return jax.lax.axis_index(spec.topology.axes)


def _per_rank(spec: DomainSpec, rank: Array, bad: Array) -> Array:
    """int32 [R]: how many of `bad` belong to each rank."""
    ranks = np.arange(spec.ranks, dtype=np.int32)
    hits = (rank.reshape(-1, 1) == ranks[None]) & bad.reshape(-1, 1)
    return jnp.sum(hits, axis=0, dtype=np.int32)


def _record(spec: DomainSpec, op: str, describe: Describe, payload: Any) -> np.int32:
    """On the host, after a check has failed: the first error of the domain is kept, by the native module."""
    rank, *counts = (int(n) for n in np.asarray(payload))
    module = native.module(spec.topology.platform)
    if module.error(spec.id) is None:  # else the results are what that error left
        text = message(op, *describe(rank, counts), _FIX)
        _log.error("%s", text)
        module.fail(spec.id, text)
    return np.int32(1)


def _verdict(spec: DomainSpec, op: str, counts: Array, live: Array, describe: Describe) -> Array:
    """Whether a count is not zero; then the host has been told. `live`: the plan's ticket, which says if it worked.

    The host is told without raising there: a rank that leaves the program hangs the others in XLA's own collectives.
    """
    payload = jnp.concatenate(checks.cast_together(spec, [_rank(spec)[None].astype(np.int32), counts]))
    union = _compat.varying_axes(payload)

    def tell(payload: Array) -> Array:
        told = jax.pure_callback(
            functools.partial(_record, spec, op, describe), jax.ShapeDtypeStruct((), np.int32), payload
        )
        missing = tuple(a for a in union if a not in _compat.varying_axes(told))
        return jax.lax.pcast(told, missing, to="varying") if missing else told

    bad = jnp.any(counts != 0) & jnp.all(live >= 0)
    return jax.lax.cond(bad, tell, lambda payload: payload[0] * 0, payload) != 0


def _gate(failed: Array, results: Sequence[Array]) -> list[Array]:
    """The results, poisoned if a check failed. They depend on the verdict, so the check is never dropped."""

    def poisoned(a: Array) -> Array:
        poison = jnp.nan if jnp.issubdtype(a.dtype, jnp.inexact) else 0
        return jnp.where(failed, jnp.full_like(a, poison), a)

    return [poisoned(a) for a in results]


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _arrivals(what: str, there: str, rank: int, counts: list[int]) -> tuple[str, str, str]:
    """`rank` got `what` from the ranks with a count; `there`: what the source said of it."""
    parts = [f"{n} {what} from rank {r} on rank {rank}" for r, n in enumerate(counts) if n]
    return f"corrupt {what}", f"{', '.join(parts)} with another checksum", there


def _resent(what: str, rank: int, counts: list[int]) -> tuple[str, str, str]:
    """Sums on `rank` that a second call gave otherwise; counts: terms of each rank, then sums."""
    sources = [r for r, n in enumerate(counts[:-1]) if n]
    where = f"from {_names(sources)} " if sources else ""
    return "corrupt sums", f"{counts[-1]} {what} {where}on rank {rank} that differ when sent again", "equal bits"


# -- plan --------------------------------------------------------------------------------------------------------------


@_compiled
def plan(spec: DomainSpec, topk_ids: Array, p: Plan) -> Plan:
    """The plan; its ticket is -1 if an array breaks a rule."""
    rules = _rules(spec, topk_ids, p)
    names = list(rules)
    counts = jnp.stack([jnp.sum(~jnp.asarray(holds), dtype=np.int32) for holds in rules.values()])

    def describe(rank: int, counts: list[int]) -> tuple[str, str, str]:
        broken = [name for name, n in zip(names, counts, strict=True) if n]
        return "the plan breaks its rules", f"broken on rank {rank}: {'; '.join(broken)}", "a plan that keeps all"

    failed = _verdict(spec, "plan", counts, p.ticket, describe)
    return dataclasses.replace(p, ticket=jnp.where(failed, jnp.full_like(p.ticket, -1), p.ticket))


def _at(array: Array, index: Array) -> Array:
    return array[jnp.clip(index, 0, array.shape[0] - 1)]  # an index may be what is wrong


def _groups(p: Plan, row: Array) -> Array:
    """The group of each row; of the last one in the tail."""
    group = jnp.searchsorted(jnp.cumsum(p.group_sizes), row, side="right")
    return jnp.minimum(group, p.group_sizes.shape[0] - 1).astype(np.int32)


def _experts(spec: DomainSpec, p: Plan) -> Array:
    """int32 [2*epn]: the expert of each of this rank's groups, -1: none."""
    epn, me = spec.experts_per_rank, _rank(spec).astype(np.int32)
    return jnp.concatenate(checks.cast_together(spec, [me * epn + np.arange(epn, dtype=np.int32), p.slot_expert[me]]))


def _rules(spec: DomainSpec, ids: Array, p: Plan) -> dict[str, Array]:
    """What holds of one rank's arrays, by the rule: booleans of any shape."""
    config, ranks, epn = spec.config, spec.ranks, spec.experts_per_rank
    per_rank = p.tokens * config.topk
    me = _rank(spec).astype(np.int32)

    def within(array: Array, end: int) -> Array:
        return (array >= -1) & (array < end)

    routed = (ids >= 0) & (ids < config.experts)
    own = np.arange(ranks * epn, dtype=np.int32).reshape(ranks, epn)  # [R, epn] the experts at home
    hosts = (_at(jnp.asarray(own), p.dst_rank) == ids[..., None]) | (_at(p.slot_expert, p.dst_rank) == ids[..., None])

    held, row = p.src >= 0, jnp.arange(p.rows, dtype=np.int32)
    token, first, after = p.src // config.topk, _at(p.src, p.primary), _at(p.src, p.next)
    ends = jnp.cumsum(p.group_sizes)
    group = _groups(p, row)
    filled = (row < ends[-1]) & (row - _at(ends - p.group_sizes, group) < _at(p.group_rows, group))
    order = jnp.sort(p.src)

    slots, used = p.slot_expert, p.slot_expert >= 0
    total = jnp.sum(p.home_rows)
    padding = config.token_padding
    if config.planner == "home":
        share = p.home_rows
    else:
        share = total // ranks + (np.arange(ranks, dtype=np.int32) < total % ranks)
    mine = held & (p.src // per_rank == me)  # rows that come from here: both ends are on this rank
    place = p.src - me * per_rank
    back = (_at(p.dst_rank.reshape(-1), place) == me) & (_at(p.dst_row.reshape(-1), place) == row)
    return {
        "routed ids, and only those, have a place": ((p.dst_rank >= 0) == routed) & ((p.dst_row >= 0) == routed),
        "destinations are in range": within(p.dst_rank, ranks) & within(p.dst_row, p.rows),
        "a destination owns the expert or has it in a slot": hosts.any(axis=-1) | ~routed,
        "sources and links are in range": within(p.src, ranks * per_rank)
        & within(p.primary, p.rows)
        & within(p.next, p.rows),
        "a row has one source, and a source one row": (order[1:] != order[:-1]) | (order[1:] < 0),
        "a primary is the first row of its token": jnp.where(
            held,
            (p.primary >= 0)
            & (first // config.topk == token)
            & (first <= p.src)
            & (_at(p.primary, p.primary) == p.primary),
            p.primary == -1,
        ),
        "a link leads to a later row of its token": jnp.where(
            p.next >= 0, held & (after // config.topk == token) & (after > p.src), p.next == -1
        ),
        "own rows lie where their tokens say": jnp.where(mine, back, True),
        "own rows are all here": jnp.sum(mine) == jnp.sum(p.dst_rank == me),
        "rows fill their groups from the start": held == filled,
        "groups are padded": (p.group_rows >= 0) & (p.group_sizes == -(-p.group_rows // padding) * padding),
        "groups fit the buffer": ends[-1] <= p.rows,
        "rows are conserved": (jnp.sum(p.rank_rows) == total)
        & (jnp.sum(p.group_rows) == _at(p.rank_rows, me))
        & (p.home_rows >= 0),
        "every rank computes its share": p.rank_rows == share,
        "slots hold foreign experts": within(slots, config.experts)
        & (~used | (slots // epn != np.arange(ranks, dtype=np.int32)[:, None])),
        "slots ascend, unused ones last": jnp.where(used[:, 1:], used[:, :-1] & (slots[:, 1:] > slots[:, :-1]), True),
        "slots in use have rows, others have none": (_at(slots, me) >= 0) == (p.group_rows[epn:] > 0),
    }


# -- rows --------------------------------------------------------------------------------------------------------------


def _expected(spec: DomainSpec, p: Plan, rows: Array, extra: Array) -> Array:
    """[s, K] float32: what the source says of each assignment: its row's bits, its place, its extra bits, the slots."""
    shared = _checksum(p.slot_expert.reshape(1, -1))
    h = _join(shared[:, None], _checksum(rows)[:, None], p.dst_rank, p.dst_row, extra)
    return _as_weight(h)


def _arrived(spec: DomainSpec, p: Plan, rows: Array, extra: Array) -> Array:
    """[N] float32: the same, by the destination."""
    shared = _checksum(p.slot_expert.reshape(1, -1))
    row = jnp.arange(p.rows, dtype=np.int32)
    return _as_weight(_join(shared, _checksum(rows), _rank(spec), row, extra))


def _send(spec: DomainSpec, p: Plan, x: Array, checksums: Array) -> Array:
    """A dispatch that brings the sources' checksums to the rows."""
    route = [p.dst_rank, p.dst_row, p.src, p.primary, p.next, p.ticket]
    operands = checks.cast_together(spec, [*route, x, checksums])
    results = [((p.rows, x.shape[1]), x.dtype), ((p.rows,), np.float32)]
    return primitives.call("dispatch", operands, results, spec=spec)[1]


def _rows(spec: DomainSpec, op: str, p: Plan, x: Array, rows: Array, sent: Array, got: Array, zero: Array) -> Array:
    """Whether rows of x did not arrive as they were sent; `sent` [s, K] and `got` [N] are more bits to compare."""
    said = _send(spec, p, x, _expected(spec, p, x, sent))
    held = p.src >= 0
    wrong = held & _differ(said, _arrived(spec, p, rows, got))
    stray = ~held & ((_bits(rows) != 0).any(axis=1) | zero)
    source = p.src // (p.tokens * spec.config.topk)
    counts = jnp.concatenate([_per_rank(spec, source, wrong), jnp.sum(stray, dtype=np.int32)[None]])

    def describe(rank: int, counts: list[int]) -> tuple[str, str, str]:
        if any(counts[:-1]):
            return _arrivals("rows", "what the source has sent", rank, counts[:-1])
        return "rows that hold no token are not zero", f"{counts[-1]} on rank {rank}", "zeros"

    return _verdict(spec, op, counts, p.ticket, describe)


def dispatch(
    spec: DomainSpec, p: Plan, x: Array, ids: Array, topk_weights: Array, hidden: Array, weights: Array
) -> list[Array]:
    """hidden and weights. Rows, route weights, experts and places are compared."""
    # This runs outside of custom_vjp, and no primitive may be differentiated.
    x, topk_weights, rows, route = map(jax.lax.stop_gradient, (x, topk_weights, hidden, weights))
    return _gate(_dispatched(spec, p, x, ids, topk_weights, rows, route), [hidden, weights])


@_compiled
def _dispatched(
    spec: DomainSpec, p: Plan, x: Array, ids: Array, topk_weights: Array, rows: Array, route: Array
) -> Array:
    row = jnp.arange(p.rows, dtype=np.int32)
    sent = _join(ids, _bits(topk_weights))
    got = _join(_at(_experts(spec, p), _groups(p, row)), _bits(route)[:, 0])
    return _rows(spec, "dispatch", p, x, rows, sent, got, _bits(route)[:, 0] != 0)


@_compiled
def combine_grad(spec: DomainSpec, p: Plan, dy: Array, rows: Array) -> Array:
    """The rows of dy."""
    nothing = jnp.zeros((), np.uint32)
    failed = _rows(spec, "combine_grad", p, dy, rows, nothing, nothing, jnp.zeros((), bool))
    return _gate(failed, [rows])[0]


# -- sums --------------------------------------------------------------------------------------------------------------


def _sums(spec: DomainSpec, op: str, p: Plan, bad: Array, back: Array) -> Array:
    """Whether tokens (bad [s]) or values on their way back (back [s, K]) are wrong."""
    hits = (bad[:, None] | back) & (p.dst_rank >= 0)
    counts = jnp.concatenate([_per_rank(spec, p.dst_rank, hits), jnp.sum(bad | back.any(axis=1), dtype=np.int32)[None]])
    return _verdict(spec, op, counts, p.ticket, functools.partial(_resent, "tokens"))


@_compiled
def combine(spec: DomainSpec, p: Plan, operands: Sequence[Array], y: Array) -> Array:
    """The sums y; `operands` are those of the call."""
    (again,) = primitives.call("combine", operands, [(y.shape, y.dtype)], spec=spec)
    failed = _sums(spec, "combine", p, _differ(y, again), jnp.zeros(p.dst_rank.shape, bool))
    return _gate(failed, [y])[0]


@_compiled
def dispatch_grad(spec: DomainSpec, p: Plan, operands: Sequence[Array], dx: Array, dw: Array) -> list[Array]:
    """The sums dx, and the weights' gradients dw, whose checksums travel beside them."""
    row = jnp.arange(p.rows, dtype=np.int32)
    checksums = _as_weight(_join(_bits(operands[-1])[:, 0], _rank(spec), row))
    again = checks.cast_together(spec, [*operands[:-1], checksums])
    results = [(dx.shape, dx.dtype), (dw.shape, np.float32)]
    other, said = primitives.call("dispatch_grad", again, results, spec=spec)
    got = _as_weight(_join(jax.lax.bitcast_convert_type(dw, np.uint32), p.dst_rank, p.dst_row))
    routed = p.dst_rank >= 0
    back = jnp.where(routed, _bits(said) != _bits(got), _bits(dw) != 0)
    failed = _sums(spec, "dispatch_grad", p, _differ(dx, other), back)
    return _gate(failed, [dx, dw])


# -- weights -----------------------------------------------------------------------------------------------------------


@_compiled
def prefetch(spec: DomainSpec, p: Plan, leaves: Sequence[Array], full: Sequence[Array]) -> list[Array]:
    """The filled leaves: checksums, one per own expert and leaf, travel as they did."""
    epn = spec.experts_per_rank
    own = jnp.stack([_checksum(leaf[:epn]) for leaf in leaves], axis=1)
    operands = checks.cast_together(spec, [p.slot_expert, p.ticket, own])
    (said,) = primitives.call("prefetch", operands, [((2 * epn, own.shape[1]), np.uint32)], spec=spec)
    got = jnp.stack([_checksum(leaf) for leaf in full], axis=1)
    experts = _experts(spec, p)
    wrong = _differ(got, jnp.concatenate([own, said[epn:]])) & (experts >= 0)
    counts = _per_rank(spec, experts // epn, wrong)
    describe = functools.partial(_arrivals, "experts' weights", "what their home has sent")
    return _gate(_verdict(spec, "prefetch", counts, p.ticket, describe), full)


@_compiled
def reduce_grad(spec: DomainSpec, p: Plan, grads: Sequence[Array], again: Sequence[Array]) -> list[Array]:
    """The summed gradients; `again` are those of a second call."""
    epn, me = spec.experts_per_rank, _rank(spec)
    wrong = functools.reduce(jnp.logical_or, [_differ(a, b)[:epn] for a, b in zip(grads, again, strict=True)])
    own = me * epn + np.arange(epn, dtype=np.int32)
    holds = (p.slot_expert[:, :, None] == own[None, None]).any(axis=1)  # [R, epn] which ranks have a replica
    counts = jnp.sum(holds & wrong[None], axis=1, dtype=np.int32)
    counts = jnp.concatenate([counts, jnp.sum(wrong, dtype=np.int32)[None]])
    return _gate(_verdict(spec, "reduce_grad", counts, p.ticket, functools.partial(_resent, "experts")), grads)
