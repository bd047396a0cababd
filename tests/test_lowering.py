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
    step = jax.jit(on_ranks(lambda ids, w: ep.prefetch(ep.plan(ids), {"w": w})["w"]), donate_argnums=1)
    mesh = make_mesh((R,), ("ep",))
    leaves = jax.device_put(np.ones((2 * E, LEAF), np.float32), jax.sharding.NamedSharding(mesh, EP))
    before = [s.data.unsafe_buffer_pointer() for s in leaves.addressable_shards]
    full = jax.block_until_ready(step(IDS, leaves))
    assert [s.data.unsafe_buffer_pointer() for s in full.addressable_shards] == before
    assert "output_operand_alias" in lowered(lambda ids, w: ep.prefetch(ep.plan(ids), {"w": w})["w"], IDS, full)


def test_own_leaves_stay(ep: moonep.Domain) -> None:
    assert "output_operand_alias" not in lowered(
        lambda ids, w: ep.prefetch(ep.plan(ids), {"w": w})["w"], IDS, jnp.ones((E, LEAF))
    )


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
