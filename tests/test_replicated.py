"""Meshes with other axes than the EP axis, and operands that are replicated over some of them.

A replicated operand's gradient is the sum over the ranks that hold it; the cast that leads to the sum must lie outside
the ops' custom gradients, or the sum is silently left out.
"""

from __future__ import annotations

import functools
from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_mesh
from jax.sharding import PartitionSpec as P
from steps import same_bits
from test_autodiff import by_hand, by_moe, expected, loss_of, sharded, value_and_grads

from moonep_jax import _compat
from moonep_jax import reference as ref


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("build", [by_moe, by_hand])
def test_weights_replicated_over_data(make_domain: Any, build: Any, check_vma: bool) -> None:
    """mesh (data 2, ep 4): tokens are split over both axes, expert weights over ep only."""
    mesh = make_mesh((2, 4), ("data", "ep"))
    ep = make_domain(mesh, **dense.config())
    a = dense.inputs(8 * dense.TOKENS)
    step = sharded(build(ep), mesh, check_vma, x=("data", "ep"))
    dense.close(jax.jit(value_and_grads(step))(a), expected(a))


def test_gradient_inside_shard_map(make_domain: Any) -> None:
    """jax.grad of the local loss inside shard_map: replicated operands come out summed over data, x does not."""
    mesh = make_mesh((2, 4), ("data", "ep"))
    ep = make_domain(mesh, **dense.config())
    a = dense.inputs(8 * dense.TOKENS)
    specs = dense.specs(("data", "ep"))
    step = jax.shard_map(
        jax.grad(lambda a: loss_of(by_moe(ep), a)[0]), mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=True
    )
    dense.close(jax.jit(step)(a), expected(a)[1])


@pytest.mark.parametrize("names", [("ep", "data"), ("data", "ep")])
def test_each_data_coordinate_is_a_group_of_its_own(make_domain: Any, names: tuple[str, str]) -> None:
    """Plans of two groups, from different ids, do not meet; ranks run along the EP axis wherever it stands."""
    mesh = make_mesh((4, 2) if names[0] == "ep" else (2, 4), names)
    ep = make_domain(mesh, tokens=6, hidden=8, topk=2, experts=8, dtype="float32")
    rng = np.random.default_rng(0)
    ids = rng.integers(8, size=(2, 4, 6, 2)).astype(np.int32)
    ids[0] //= 3  # the groups' loads differ
    x = rng.standard_normal((2, 4, 6, 8), np.float32)

    def body(x: Any, ids: Any) -> Any:
        d = ep.dispatch(x[0, 0], ids[0, 0])
        return d.hidden[None, None], d.plan.dst_row[None, None], ep.combine(d.plan, d.hidden)[None, None]

    both = P("data", "ep")
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=both, out_specs=both))
    hidden, rows, y = step(x, ids)
    for group in range(2):
        p = ref.plan(ids[group], 8)
        same_bits(rows[group], p.dst_row, "dst_row")
        same_bits(hidden[group], ref.dispatch(p, x[group])[0], "hidden")
        same_bits(y[group], ref.combine(p, ref.dispatch(p, x[group])[0]), "y")


@pytest.mark.parametrize("check_vma", [True, False])
def test_x_replicated_over_the_ep_axis(make_domain: Any, check_vma: bool) -> None:
    """Every rank brings the same tokens: y is R times alike, the gradients R times those of one."""
    mesh = make_mesh((4,), ("ep",))
    ep = make_domain(4, **dense.config())
    a = dense.inputs(dense.TOKENS)
    specs = dense.specs(None)
    layer = jax.shard_map(by_moe(ep), mesh=mesh, in_specs=tuple(specs.values()), out_specs=P("ep"), check_vma=check_vma)
    y, grads = jax.jit(value_and_grads(layer))(a)
    want_y, want_grads = expected(a)
    dense.close(y, np.tile(want_y, (4, 1)))
    dense.close(grads, jax.tree.map(lambda g: 4 * np.asarray(g), want_grads))


@pytest.mark.parametrize("replicated", ["x", "topk_weights", "out", "weights"])
@pytest.mark.parametrize("where", ["outside", "outside, unchecked", "inside"])
def test_each_operand_replicated_over_data(make_domain: Any, replicated: str, where: str) -> None:
    """One operand is the same on both data coordinates, its ids and cotangents are not: its gradient is the sum.

    With jax.grad inside shard_map only the cast that the op makes leads to the sum.
    """
    mesh = make_mesh((2, 2), ("data", "ep"))
    ep = make_domain(mesh, tokens=5, hidden=8, topk=2, experts=4, dtype="float32")
    rng = np.random.default_rng(0)
    n = ep.recv_rows()
    ids = rng.integers(4, size=(2, 2, 5, 2)).astype(np.int32)
    plans = [ref.plan(ids[g], 4) for g in range(2)]

    def draw(*shape: int) -> Any:
        # Small integers: float32 sums of them are exact in any order.
        return rng.integers(-4, 5, size=shape).astype(np.float32)

    x, topk_weights = draw(2, 2, 5, 8), draw(2, 2, 5, 2)
    ct_hidden, ct_weights = draw(2, 2, n, 8), draw(2, 2, n)
    out, weights, dy = draw(2, 2, n, 8), draw(2, 2, n), draw(2, 2, 5, 8)
    primals = {"x": x, "topk_weights": topk_weights, "out": out, "weights": weights}
    primals[replicated][1] = primals[replicated][0]

    def local_loss(v: Any, ids: Any, ct_hidden: Any, ct_weights: Any, dy: Any) -> Any:
        v = {name: leaf[0, 0] for name, leaf in v.items()}
        d = ep.dispatch(v["x"], ids[0, 0], v["topk_weights"])
        y = ep.combine(d.plan, v["out"], v["weights"])
        hidden = (d.hidden * ct_hidden[0, 0]).sum() + (d.weights * ct_weights[0, 0]).sum()
        return hidden + (y * dy[0, 0]).sum()

    both = P("data", "ep")
    specs = {name: P(None, "ep") if name == replicated else both for name in primals}
    shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, *[both] * 4))
    if where == "inside":
        gradient = shard(jax.grad(local_loss), out_specs=specs)
    else:
        losses = shard(lambda *args: local_loss(*args)[None, None], out_specs=both, check_vma="unchecked" not in where)
        gradient = jax.grad(lambda *args: losses(*args).sum())
    given = {name: leaf[:1] if name == replicated else leaf for name, leaf in primals.items()}
    grads = jax.jit(gradient)(given, ids, ct_hidden, ct_weights, dy)

    want: dict[str, Any] = {name: np.zeros_like(leaf) for name, leaf in primals.items()}
    for g, p in enumerate(plans):
        want["x"][g], want["topk_weights"][g] = ref.dispatch_grad(p, ct_hidden[g], ct_weights[g])
        want["out"][g], want["weights"][g] = ref.combine_grad(p, dy[g], out[g], weights[g])
    want[replicated] = want[replicated].sum(axis=0, keepdims=True)
    for name in primals:
        np.testing.assert_array_equal(np.asarray(grads[name]), want[name], err_msg=name)


def test_a_plan_shared_by_replicas(make_domain: Any) -> None:
    """ids replicated over data, x not: the plan's arrays are cast beside x, and both groups' rows are right."""
    mesh = make_mesh((2, 2), ("data", "ep"))
    ep = make_domain(mesh, tokens=5, hidden=8, topk=2, experts=4, dtype="float32")
    rng = np.random.default_rng(0)
    ids = rng.integers(4, size=(2, 5, 2)).astype(np.int32)
    x = rng.standard_normal((2, 2, 5, 8), np.float32)

    def body(x: Any, ids: Any) -> Any:
        p = ep.plan(ids[0])
        d = ep.dispatch(x[0, 0], ids[0], plan=p)
        return ep.combine(p, d.hidden)[None, None]

    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("data", "ep"), P("ep")), out_specs=P("data", "ep")))
    y, p = step(x, ids), ref.plan(ids, 4)
    for group in range(2):
        same_bits(np.asarray(y)[group], ref.combine(p, ref.dispatch(p, x[group])[0]), "y")


def test_ep_over_two_axes_and_a_shuffled_mesh(make_domain: Any) -> None:
    """Ranks are row-major over the axes in the order given, wherever the devices are."""
    rng = np.random.default_rng(0)
    devices = np.array(jax.devices()[:8])[rng.permutation(8)].reshape(2, 2, 2)
    mesh = jax.sharding.Mesh(devices, ("a", "data", "b"))
    ids = rng.integers(16, size=(2, 8, 3, 2)).astype(np.int32)[:, :4]
    x = rng.standard_normal((2, 4, 3, 8), np.float32)
    for axes in (("a", "b"), ("b", "a")):
        ep = make_domain(mesh, axes, tokens=3, hidden=8, topk=2, experts=16, dtype="float32")

        def body(x: Any, ids: Any, ep: Any = ep) -> Any:
            d = ep.dispatch(x[0, 0], ids[0, 0])
            return d.hidden[None, None], ep.combine(d.plan, d.hidden)[None, None]

        spec = P("data", axes)
        hidden, y = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))(x, ids)
        for group in range(2):
            p = ref.plan(ids[group], 16)
            want = ref.dispatch(p, x[group])[0]
            same_bits(np.asarray(hidden)[group], want, f"hidden over {axes}")
            same_bits(np.asarray(y)[group], ref.combine(p, want), f"y over {axes}")


def test_results_vary_over_the_union_of_the_operands_axes(make_domain: Any) -> None:
    mesh = make_mesh((2, 4), ("data", "ep"))
    ep = make_domain(mesh, **dense.config())
    seen: list[Any] = []

    def body(x: Any, ids: Any, params: Any) -> Any:
        p = ep.plan(ids)
        d = ep.dispatch(x, ids, plan=p)
        w = ep.prefetch(p, params)
        y = ep.combine(p, d.hidden)
        seen.append({n: set(_compat.varying_axes(v)) for n, v in {"p": p.src, "y": y, "w": w["up"]}.items()})
        return y

    a = dense.inputs(8 * dense.TOKENS)
    ids = np.zeros((4 * dense.TOKENS, 2), np.int32)
    specs = (P(("data", "ep")), P("ep"), P("ep"))
    step = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(("data", "ep")))
    jax.eval_shape(functools.partial(step, a["x"], ids), a["params"])
    assert seen[-1] == {"p": {"ep"}, "y": {"data", "ep"}, "w": {"ep"}}
    assert jnp.isfinite(step(a["x"], ids, a["params"])).all()
