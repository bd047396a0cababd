"""What the ops are in the compiled program: custom call targets, buffers that operands and results share, sites."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_mesh
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep
from moonep_jax import ops

R, S, K, E, H, LEAF = 2, 4, 2, 8, 4, 16
EP = P("ep")
IDS = np.arange(R * S * K, dtype=np.int32).reshape(-1, K) % (E // R)  # of the first rank's experts


@pytest.fixture
def ep(make_domain: Any) -> moonep.Domain:
    leaf = {"w": ((LEAF,), "float32")}
    return make_domain(R, tokens=S, hidden=H, topk=K, experts=E, dtype="float32", weights=leaf)


def prefetched(ep: moonep.Domain) -> Callable[..., Any]:
    return lambda ids, w: ep.prefetch(ep.plan(ids), {"w": w})["w"]


def on_ranks(body: Callable[..., Any]) -> Callable[..., Any]:
    return jax.shard_map(body, mesh=make_mesh((R,), ("ep",)), in_specs=EP, out_specs=EP)


def lowered(body: Callable[..., Any], *args: Any, platform: str = "cuda") -> str:
    return jax.jit(on_ranks(body)).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_only_a_plan_on_gpus_may_be_captured(ep: moonep.Domain, platform: str, capture: bool) -> None:
    """CUDA graphs take a call or not by its target; a CPU has the one."""
    spec = dataclasses.replace(
        ep.spec,
        config=dataclasses.replace(ep.spec.config, capture_plan=capture),
        topology=dataclasses.replace(ep.spec.topology, platform=platform),
    )
    text = lowered(lambda ids: ops.plan(spec, ids).dst_row, IDS, platform={"gpu": "cuda"}.get(platform, platform))
    target = "moonep_plan_captured" if capture and platform == "gpu" else "moonep_plan"
    assert re.findall(r"custom_call @(\w+)", text) == [target]


def test_full_leaves_are_filled_where_they_are(ep: moonep.Domain) -> None:
    """[2*epn] leaves are donated to prefetch: the result is in their memory, on every rank."""
    step = jax.jit(on_ranks(prefetched(ep)), donate_argnums=1)
    sharding = jax.sharding.NamedSharding(make_mesh((R,), ("ep",)), EP)
    leaves = jax.jit(lambda: jnp.ones((2 * E, LEAF)), out_shardings=sharding)()  # memory of the host cannot be donated
    before = [s.data.unsafe_buffer_pointer() for s in leaves.addressable_shards]
    full = jax.block_until_ready(step(IDS, leaves))
    assert [s.data.unsafe_buffer_pointer() for s in full.addressable_shards] == before
    assert "output_operand_alias" in lowered(prefetched(ep), IDS, full)


@pytest.mark.parametrize(("rows", "shared"), [(2 * E, 2), (E, 0)])
def test_gradients_of_full_leaves_are_summed_where_they_are(ep: moonep.Domain, rows: int, shared: int) -> None:
    """Of prefetch and of reduce_grad."""

    def body(ids: Any, w: Any, ct: Any) -> Any:
        full, back = jax.vjp(lambda w: ep.prefetch(ep.plan(ids), {"w": w})["w"], w)
        return full, back(ct)

    text = lowered(body, IDS, jnp.ones((rows, LEAF)), jnp.ones((2 * E, LEAF)))
    assert text.count("output_operand_alias<") == shared


def test_own_leaves_stay(ep: moonep.Domain) -> None:
    assert "output_operand_alias" not in lowered(prefetched(ep), IDS, jnp.ones((E, LEAF)))


# -- the mesh of the program -------------------------------------------------------------------------------------------


def a_mesh(ids: list[Any], names: tuple[str, ...], abstract: bool = False) -> Any:
    devices = np.array([jax.devices()[i] for i in np.ravel(ids)]).reshape(np.shape(ids))
    mesh = jax.sharding.Mesh(devices, names)
    return mesh.abstract_mesh if abstract else mesh


def step_on(ep: moonep.Domain, mesh: Any, axes: Any) -> None:
    """Traces and lowers a layer's forward and backward pass on a mesh."""

    def body(x: Any, ids: Any) -> Any:
        d = ep.dispatch(x, ids)
        return ep.combine(d.plan, d.hidden)

    f = jax.shard_map(body, mesh=mesh, in_specs=P(axes), out_specs=P(axes))
    n = S * mesh.size
    ids = np.zeros((n, K), np.int32)
    jax.jit(jax.grad(lambda x: f(x, ids).sum())).trace(np.ones((n, H), np.float32)).lower()


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        ([1, 0], ("ep",)),  # other ranks
        ([2, 3], ("ep",)),  # other devices
        ([[0, 2], [1, 3]], ("data", "ep")),  # other groups
        ([[0, 1], [3, 2]], ("data", "ep")),  # one of them in another order
        ([[0, 1], [2, 3]], ("ep", "data")),
    ],
)
def test_another_mesh_is_an_error(make_domain: Any, ids: list[Any], names: tuple[str, ...]) -> None:
    given = a_mesh([[0, 1], [2, 3]], ("data", "ep")) if len(names) > 1 else a_mesh([0, 1], ("ep",))
    ep = make_domain(given, tokens=S, hidden=H, topk=K, experts=E, dtype="float32")
    text = r"^\w+: an EP group of the mesh is not one of setup's; got devices \[.*\], expected one of \[\[0, 1\]"
    with pytest.raises(moonep.OpError, match=text):
        step_on(ep, a_mesh(ids, names), names)


@pytest.mark.parametrize(
    ("ids", "names", "abstract"),
    [
        ([[0, 1], [2, 3]], ("data", "ep"), False),
        ([[2, 3], [0, 1]], ("data", "ep"), False),  # groups are equals
        ([[0, 2], [1, 3]], ("ep", "data"), False),
        ([[[0], [1]], [[2], [3]]], ("pod", "ep", "model"), False),
        ([2, 3], ("ep",), False),  # one of the groups
        ([[2, 3], [0, 1]], ("data", "ep"), True),  # no devices to compare
    ],
)
def test_meshes_of_the_same_groups_are_fine(make_domain: Any, ids: list[Any], names: Any, abstract: bool) -> None:
    given = a_mesh([[0, 1], [2, 3]], ("data", "ep"))
    ep = make_domain(given, tokens=S, hidden=H, topk=K, experts=E, dtype="float32")
    step_on(ep, a_mesh(ids, names, abstract), names)


@pytest.mark.parametrize("op", ["plan", "dispatch", "moe"])
def test_a_channel_is_that_of_the_plan(make_domain: Any, op: str) -> None:
    leaves = {"gate": ((H, 6), "float32"), "up": ((H, 6), "float32"), "down": ((6, H), "float32")}
    ep = make_domain(R, tokens=S, hidden=H, topk=K, experts=E, dtype="float32", weights=leaves)
    x, params = (
        np.ones((R * S, H), np.float32),
        {n: np.ones((E, *leaf.shape), np.float32) for n, leaf in ep.spec.config.weights.items()},
    )
    body = {
        "plan": lambda x, ids, params: ep.plan(ids, channel=7).dst_row,
        "dispatch": lambda x, ids, params: ep.dispatch(x, ids, channel=7).hidden,
        "moe": lambda x, ids, params: ep.moe(x, jnp.ones((S, E)), params, channel=7),
    }[op]
    lines = [line for line in lowered(body, x, IDS, params).splitlines() if "custom_call @moonep_" in line]
    for line in lines:
        assert ("channel = 7 : i64" in line) == ("@moonep_plan" in line), line
    assert sum("@moonep_plan" in line for line in lines) == 1


# -- sites -------------------------------------------------------------------------------------------------------------


def test_sites_of_programs_with_other_names_differ(ep: moonep.Domain) -> None:
    """Two programs that number their calls alike: the name is what tells them apart."""

    def sites(name: str) -> set[str]:
        def body(ids: Any) -> Any:
            return ep.plan(ids).dst_row

        f = on_ranks(body)

        def step(ids: Any) -> Any:
            return f(ids)

        step.__name__ = name
        return set(re.findall(r"site = (\d+)", jax.jit(step).trace(IDS).lower().as_text()))

    train, evaluate = sites("train"), sites("evaluate")
    assert len(train) == len(evaluate) == 1 and not train & evaluate
    assert train == sites("train")
