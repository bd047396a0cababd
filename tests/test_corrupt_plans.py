"""What the ops do with a Plan whose arrays a program has changed, and with operands that the Python side never passes.

Wrong indices are an error on all ranks, and nothing outside of the buffers is touched; what cannot be told from a plan
ends all the same. Kernels on GPUs: test_cuda_failures.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Shape, routing
from conftest import make_mesh
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep
from moonep_jax import ops, primitives

SHAPE = Shape(2, 6, 2, 8, 4)
LEAF = (3,)
EP = P("ep")
FAR = (2**31 - 1, -(2**31))  # the first rows beside a buffer might be there by luck


@pytest.fixture
def ep(make_domain: Any) -> moonep.Domain:
    return make_domain(
        SHAPE.R, tokens=SHAPE.s, hidden=SHAPE.H, topk=SHAPE.K, experts=SHAPE.E, dtype="float32",
        weights={"w": (LEAF, "float32")},
    )  # fmt: skip


def run(ep: moonep.Domain, body: Callable[..., Any]) -> Any:
    """body(plan, x, ids, rows, leaves) on all ranks; waits for it."""
    r, n = SHAPE.R, ep.recv_rows()
    mesh = make_mesh((r,), ("ep",))
    ids = routing("one_home", SHAPE).reshape(-1, SHAPE.K)  # experts move: slots are used
    args = [ids, *(np.ones(dims, np.float32) for dims in ((r * SHAPE.s, SHAPE.H), (r * n, SHAPE.H), (SHAPE.E, *LEAF)))]

    def local(ids: Any, x: Any, rows: Any, leaves: Any) -> Any:
        return body(ep.plan(ids), x, ids, rows, leaves)

    return jax.block_until_ready(jax.jit(jax.shard_map(local, mesh=mesh, in_specs=EP, out_specs=EP))(*args))


OPS: dict[str, Callable[..., Any]] = {
    "dispatch": lambda ep, p, x, ids, rows, leaves: ep.dispatch(x, ids, plan=p).hidden,
    "combine": lambda ep, p, x, ids, rows, leaves: ep.combine(p, rows),
    "prefetch": lambda ep, p, x, ids, rows, leaves: ep.prefetch(p, {"w": leaves})["w"],
}


def changed(op: str, ep: moonep.Domain, who: int, change: Callable[[moonep.Plan], moonep.Plan]) -> Callable[..., Any]:
    """The op with a plan that is changed on one rank."""

    def body(p: moonep.Plan, *args: Any) -> Any:
        there = jax.lax.axis_index("ep") == who
        return OPS[op](ep, jax.tree.map(lambda new, old: jnp.where(there, new, old), change(p), p), *args)

    return body


@pytest.mark.parametrize("far", [True, False])
@pytest.mark.parametrize(
    ("op", "field", "what"),
    [
        ("dispatch", "src", "src"),
        ("combine", "src", "src"),
        ("combine", "primary", "primary or next"),
        ("combine", "next", "primary or next"),
        ("prefetch", "slot_expert", "slot_expert"),
    ],
)
def test_indices_out_of_range(ep: moonep.Domain, op: str, field: str, what: str, far: bool) -> None:
    first = {"src": SHAPE.R * SHAPE.s * SHAPE.K, "slot_expert": SHAPE.E}.get(field, ep.recv_rows())
    value = FAR[0] if far else first

    def change(p: moonep.Plan) -> moonep.Plan:
        return dataclasses.replace(p, **{field: jnp.full_like(getattr(p, field), value)})

    text = f"{op}: the plan does not fit this call; got {what} out of range, expected a Plan made by this domain"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        run(ep, changed(op, ep, 1, change))
    with pytest.raises(moonep.DomainError, match=text):
        ep.check()


@pytest.mark.parametrize("value", FAR)
@pytest.mark.parametrize("op", OPS)
def test_any_integers_end(ep: moonep.Domain, op: str, value: int) -> None:
    """Every array of a plan but its ticket; with an error or without."""

    def change(p: moonep.Plan) -> moonep.Plan:
        return dataclasses.replace(jax.tree.map(lambda a: jnp.full_like(a, value), p), ticket=p.ticket)

    try:
        run(ep, changed(op, ep, 0, change))
    except jax.errors.JaxRuntimeError as e:
        assert "the plan does not fit this call" in str(e)


def test_a_chain_that_never_ends(ep: moonep.Domain) -> None:
    """Each row names itself as the next one of its token: no more than K are added."""
    y = run(ep, changed("combine", ep, 0, lambda p: dataclasses.replace(p, next=jnp.zeros_like(p.next))))
    assert np.isfinite(y).all()


@pytest.mark.parametrize("ticket", [-1, -(2**31)])
@pytest.mark.parametrize("op", OPS)
def test_poisoned(ep: moonep.Domain, op: str, ticket: int) -> None:
    text = rf"{op}: the plan is poisoned; got ticket {ticket} on rank 1 \(device"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        run(ep, changed(op, ep, 1, lambda p: dataclasses.replace(p, ticket=jnp.full_like(p.ticket, ticket))))
    with pytest.raises(moonep.DomainError, match=text):
        ep.check()


def test_a_plan_for_other_tokens(ep: moonep.Domain) -> None:
    """The native side checks shapes, too: it is what turns them into addresses."""

    def body(p: moonep.Plan, x: Any, *_: Any) -> Any:
        wide = jnp.concatenate([x, x], axis=1)
        results = [((p.rows, 2 * SHAPE.H), np.float32), ((p.rows,), np.float32)]
        ones = jnp.ones((SHAPE.s, SHAPE.K), jnp.float32)
        ones = jax.lax.pcast(ones, "ep", to="varying")
        return primitives.call("dispatch", [*ops._route(p), wide, ones], results, spec=ep.spec)[0]

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"dispatch: .*; got .*, expected "):
        run(ep, body)
