"""Calls meet the calls that belong to them, whatever order XLA and the ranks take: branches, reuse, remat, scan, cond.

When a call needs a channel of its own: JAX lowers a jitted or checkpointed function once for each set of static
arguments, however often it is applied, so the calls in it share their sites. Applications that data orders may share a
channel; independent ones need one each, given as a static argument. Code that is written out has sites of its own, and
calls that are given a plan are told apart by it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_mesh
from harness import Run, launch, one_fast
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep

SHAPES = {"1x8": (1, 8), "4x1": (4, 1), "2x2": (2, 2)}
MEETINGS = (
    "branches_1",
    "branches_2",
    "branches_one_channel",
    "one_plan",
    "plans_of_one_function",
    "reused_in_order",
    "reduce_grads",
    "psum_between",
    "unawaited",
    "untaken_branch",
    "remat_unrolled",
    "remat_scan",
    "remat_stacks",
)
OPPOSITE = [f"opposite_by_{by}_{how}" for by in ("name", "channel", "program") for how in ("awaited", "unawaited")]


@pytest.fixture(scope="module", params=one_fast(SHAPES, "2x2"))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return launch("matching:run", *SHAPES[request.param], tmp_path_factory.mktemp(request.param))


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", MEETINGS)
def test_rows_meet_their_own(run: Run, case: str) -> None:
    assert run.of(case) == [[]] * len(run.processes)


@pytest.mark.multiprocess
def test_rank_varying_branch_is_an_error(run: Run) -> None:
    """Not a hang, and no NaN that looks like a result: all that made the call fail and name the rank that did not."""
    records = run.of("varying_branch")
    texts = {r["check"]["text"] for r in records}
    assert len(texts) == 1 and all(r["check"]["type"] == "DomainError" for r in records)
    (text,) = texts
    last = sum(len(r["readable"]) for r in records) - 1
    assert text.startswith(f"plan: missing ranks [{last}] after 3 s;")
    for record in records:
        assert record["readable"] == {rank: int(rank) == last for rank in record["readable"]}
        if any(int(rank) != last for rank in record["readable"]):
            assert record["error"]["type"] == "JaxRuntimeError"
            assert "DEADLINE_EXCEEDED" in record["error"]["text"] and text in record["error"]["text"]
            assert record["error"]["seconds"] < 60


@pytest.mark.multiprocess
# One process launches its programs in one order.
@pytest.mark.parametrize("run", one_fast(["4x1", "2x2"], "2x2"), indirect=True)
@pytest.mark.parametrize("case", OPPOSITE)
def test_opposite_order_is_right_or_an_error(run: Run, case: str) -> None:
    for record in run.of(case):
        assert record["wrong"] == []
        if record["error"]:
            assert record["error"]["type"] == "JaxRuntimeError" and "missing ranks" in record["error"]["text"]


@pytest.mark.multiprocess
def test_processes_end_well(run: Run) -> None:
    run.ended_well()


def _plan_sites(ep: moonep.Domain, mesh: jax.sharding.Mesh, wrap: Callable[..., Any], channels: tuple[int, int]) -> int:
    """Distinct (site, channel) of the plans in a program that applies one layer to two independent batches."""
    layer = wrap(lambda x, ids, channel: ep.dispatch(x, ids, channel=channel).hidden)

    def model(xs: Any, ids: Any) -> Any:
        return [layer(x, i, channel) for x, i, channel in zip(xs, ids, channels, strict=True)]

    f = jax.jit(jax.shard_map(model, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    xs, ids = [jnp.zeros((8, 4))] * 2, [jnp.zeros((8, 2), np.int32)] * 2
    text = f.lower(xs, ids).compile().as_text()
    plans = [line for line in text.splitlines() if 'custom_call_target="moonep_plan"' in line]
    assert len(plans) == 2, "XLA merges calls of one site only when they are equal"
    return len({tuple(re.findall(r"(?:site|channel) = (\d+)", line)) for line in plans})


@pytest.mark.parametrize(
    ("wrap", "channels", "distinct"),
    [
        pytest.param(lambda f: f, (0, 0), 2, id="written_out"),
        pytest.param(lambda f: jax.jit(f, static_argnums=2), (0, 0), 1, id="jit_one_channel"),
        pytest.param(lambda f: jax.jit(f, static_argnums=2), (0, 1), 2, id="jit_two_channels"),
        pytest.param(lambda f: jax.checkpoint(f, static_argnums=2), (0, 0), 1, id="remat_one_channel"),
        pytest.param(lambda f: jax.checkpoint(f, static_argnums=2), (0, 1), 2, id="remat_two_channels"),
    ],
)
def test_when_a_call_needs_its_own_channel(
    make_domain: Callable[..., moonep.Domain], wrap: Callable[..., Any], channels: tuple[int, int], distinct: int
) -> None:
    mesh = make_mesh((2,), ("ep",))
    ep = make_domain(mesh, tokens=4, hidden=4, topk=2, experts=4, dtype=jnp.float32)
    assert _plan_sites(ep, mesh, wrap, channels) == distinct
