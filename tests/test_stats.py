"""What a domain tells of itself: counters against the oracle's plans, the line that setup logs, errors in the log."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest
from cases import Shape, routing
from conftest import make_mesh
from jax.sharding import PartitionSpec as P
from steps import Array, call, per_rank
from test_prefetch import domain_of

import moonep_jax as moonep
from moonep_jax import reference as ref
from moonep_jax import watch

SHAPE = Shape(4, 16, 3, 8, 8)
LEAF = (5, 3)
OPS = ("plan", "dispatch", "combine", "prefetch", "dispatch_grad", "combine_grad", "reduce_grad")


def crossing(p: ref.ReferencePlan) -> tuple[int, int]:
    """Rows that come from another rank; of them, the first of their token on the rank."""
    held = p.src >= 0
    source = p.src // (p.dst_rank.shape[1] * p.dst_rank.shape[2])
    other = held & (source != np.arange(p.ranks)[:, None])
    first = p.primary == np.arange(p.rows)
    return int(other.sum()), int((other & first).sum())


def training_step(ep: moonep.Domain) -> Any:
    """Every op once, and its gradient."""

    def body(x: Any, ids: Any, topk_weights: Any, w: Any) -> Any:
        def loss(x: Any, topk_weights: Any, w: Any) -> Any:
            d = ep.dispatch(x, ids, topk_weights)
            scale = ep.prefetch(d.plan, {"w": w})["w"].sum()
            return (ep.combine(d.plan, d.hidden * scale, d.weights) ** 2).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(x, topk_weights, w)

    return per_rank(ep, body)


@pytest.mark.parametrize("combine", ["dedup", "exact"])
@pytest.mark.parametrize("planner", ["exact", "home"])
@pytest.mark.parametrize("stage_bytes", [None, 128])
def test_counters_are_those_of_the_oracles_plans(
    make_domain: Any, combine: str, planner: str, stage_bytes: int | None
) -> None:
    s = SHAPE
    fields = {"combine": combine, "planner": planner, "stage_bytes": stage_bytes}
    ep = domain_of(make_domain, s, {"w": (LEAF, "float32")}, **fields)
    step, rng = training_step(ep), np.random.default_rng(0)
    assert ep.stats()["calls"] == ep.stats()["bytes"] == dict.fromkeys(OPS, 0)
    calls, rows, link_rows, moved = 0, 0, 0, 0
    want = dict.fromkeys(OPS, 0)
    for seed, name in enumerate(("uniform", "one_home", "duplicates", "partly_unrouted", "unrouted", "crowded")):
        ids = routing(name, s, seed)
        x = rng.standard_normal((s.R, s.S, s.H), np.float32)
        weights = rng.standard_normal(ids.shape, np.float32)
        call(step, x, ids, weights, np.ones((s.R, s.E // s.R, *LEAF), np.float32))
        p = ref.plan(ids, s.E, planner=planner)
        other, link = crossing(p)
        calls, rows, link_rows = calls + s.R, rows + int(p.rank_rows.sum()), link_rows + link
        slots = int((p.slot_expert >= 0).sum())
        moved += slots
        returned = other if combine == "exact" else link
        row, leaf = s.H * 4, int(np.prod(LEAF)) * 4
        want["plan"] += s.R * (s.R - 1) * (s.S * s.K + s.E) * 4
        want["dispatch"] += link * row + other * 4
        want["combine"] += returned * row + (other * 4 if combine == "exact" else 0)
        want["dispatch_grad"] += returned * row + other * 4
        want["combine_grad"] += link * row
        want["prefetch"] += slots * leaf
        want["reduce_grad"] += slots * leaf
    got = ep.stats()
    assert got["calls"] == dict.fromkeys(OPS, calls)
    assert (got["rows"], got["link_rows"], got["moved_experts"]) == (rows, link_rows, moved)
    assert got["bytes"] == want
    assert link_rows > 0 and (moved > 0) == (planner == "exact")
    assert got["executed"] == sum(got["calls"].values())
    assert all(0 <= seconds < 600 for seconds in got["wait_s"].values())


def test_waiting_for_a_late_rank_is_counted(make_domain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def waited(delay_us: int) -> float:
        monkeypatch.setenv("MOONEP_DELAY_US", str(delay_us))
        ep = make_domain(4, tokens=8, hidden=8, topk=2, experts=8)
        step = per_rank(ep, lambda ids: ep.plan(ids).dst_row)
        for seed in range(3):
            call(step, routing("uniform", Shape(4, 8, 2, 8, 8), seed))
        return ep.stats()["wait_s"]["plan"]

    # Four ranks wait for the latest: three calls with delays of up to 0.3 s each, some of which are long.
    assert waited(300_000) > 0.1


# -- logs --------------------------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "moonep_jax" and r.levelno == level]


def test_setup_logs_one_line(make_domain: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moonep_jax"):
        ep = make_domain(make_mesh((2, 2), ("dp", "ep")), tokens=8, hidden=8, topk=2, experts=8)
    (line,) = lines(caplog, logging.INFO)
    assert line.startswith(
        f"setup: domain {ep.spec.id}: 2 group(s) of 2 rank(s) over ('ep',) on cpu, 1 process(es) on 1"
    )
    assert "here process 0 (ranks 0,1 of group 0, ranks 0,1 of group 1 on host" in line
    parts = ep.stats()["bytes_per_rank"]
    assert f"memory shared by local: {parts['total']} bytes per rank (control {parts['control']}, " in line


def wait_until(what: Any) -> float:
    """Seconds that it took. The limit is never the time under test: a loaded machine may take this long."""
    start = time.monotonic()
    while not what():
        assert time.monotonic() - start < 60
        time.sleep(0.01)
    return time.monotonic() - start


def test_an_error_is_raised_and_logged_once(make_domain: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One rank takes another branch. The call raises, check() knows at once, and the log has it soon, once."""
    ep = make_domain(2, tokens=8, hidden=8, topk=2, experts=8, timeout_s=1.0, first_call_timeout_s=1.0)

    def body(ids: Any) -> Any:
        skip = jax.lax.axis_index("ep") == 1
        return jax.lax.cond(skip, lambda i: i, lambda i: ep.plan(i).dst_row, ids)

    mesh = make_mesh((2,), ("ep",))
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False))
    ids: Array = np.zeros((16, 2), np.int32)

    def checked() -> str | None:
        try:
            ep.check()
        except moonep.DomainError as error:
            return str(error)
        return None

    assert checked() is None
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="plan: missing ranks"):
        jax.block_until_ready(step(ids))
    text = checked()
    assert text is not None and text.startswith("plan: missing ranks [1]")
    seconds = wait_until(lambda: lines(caplog, logging.ERROR))
    print(f"logged {seconds:.3f} s after the call had failed (the watcher looks every {watch.PERIOD_S} s)")
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="plan: missing ranks"):
        jax.block_until_ready(step(ids))
    ep.close()
    assert lines(caplog, logging.ERROR) == [f"domain {ep.spec.id} is in error: {text}"]


def watchers() -> int:
    return sum(t.name.startswith("moonep-watch") for t in threading.enumerate())


def test_an_error_just_before_close_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    before = watchers()
    answers: list[str | None] = ["gone wrong"]
    watcher = watch.Watcher("domain 7", lambda: answers[-1], period_s=3600)
    watcher.stop()
    watcher.stop()
    assert lines(caplog, logging.ERROR) == ["domain 7 is in error: gone wrong"]
    assert watchers() == before


def test_a_closed_domain_leaves_no_thread(make_domain: Any, caplog: pytest.LogCaptureFixture) -> None:
    before = watchers()
    ep = make_domain(2, tokens=8, hidden=8, topk=2, experts=8)
    assert watchers() == before + 1
    ep.close()
    assert watchers() == before and not lines(caplog, logging.ERROR)
