"""What must not change: bits from run to run, other tokens' bits, rows of another call in flight, the jit cache."""

from __future__ import annotations

import copy
import functools
from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ROUTINGS, Shape, routing
from conftest import make_mesh
from jax.sharding import PartitionSpec as P
from steps import call, check_step, operands, per_rank, same_bits, whole_step
from test_autodiff import by_moe, sharded, value_and_grads

from moonep_jax import reference as ref

SHAPE = Shape(4, 8, 3, 8, 16)


@pytest.fixture(params=[0, 300], ids=["", "delayed"])
def delays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also runs the test with random delays before each call is posted, which differ from rank to rank."""
    monkeypatch.setenv("MOONEP_DELAY_US", str(request.param))


def domain(make_domain: Any, shape: Shape = SHAPE, **fields: Any) -> Any:
    base = {"tokens": shape.S, "hidden": shape.H, "topk": shape.K, "experts": shape.E, "dtype": "bfloat16"}
    return make_domain(shape.R, **{**base, **fields})


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("combine", ["dedup", "exact"])
def test_twenty_runs_give_the_same_bits(make_domain: Any, combine: str) -> None:
    ep = domain(make_domain, combine=combine)
    step = whole_step(ep)
    ids = routing("lognormal_8", SHAPE)
    p = ref.plan(ids, SHAPE.E)
    a = operands(np.random.default_rng(0), ids, p, SHAPE, ep.spec.config.dtype)
    runs = set()
    tickets = []
    for _ in range(20):
        got = call(step, *a.values())
        tickets.append(int(got["plan"].ticket[0, 0]))
        got["plan"] = ()  # its ticket counts up
        runs.add(tuple(bits(got)))
    assert len(runs) == 1
    assert tickets == sorted(set(tickets))


def test_twenty_runs_of_a_layer_and_its_gradients(make_domain: Any) -> None:
    ep = make_domain(4, **dense.config("bfloat16"))
    step = jax.jit(value_and_grads(sharded(by_moe(ep))))
    a = dense.inputs(4 * dense.TOKENS, dtype=jnp.bfloat16)
    assert len({tuple(bits(jax.block_until_ready(step(a)))) for _ in range(20)}) == 1


def test_exact_combine_does_not_depend_on_other_tokens(make_domain: Any) -> None:
    """The same token among 20 other batches: another plan, other ranks, the same bits; dedup cannot promise it."""
    results: dict[str, set[bytes]] = {}
    for combine in ("exact", "dedup"):
        ep = domain(make_domain, combine=combine)

        def layer(x: Any, ids: Any, w: Any, ep: Any = ep) -> Any:
            d = ep.dispatch(x, ids, w)
            return ep.combine(d.plan, d.hidden * d.hidden, d.weights), d.plan.dst_rank

        step = per_rank(ep, layer)
        rng = np.random.default_rng(0)
        x0, w0 = rng.standard_normal(16, np.float32), rng.random(3, np.float32)
        seen: set[bytes] = set()
        places = set()
        for seed, name in enumerate([*ROUTINGS][:20]):
            rng = np.random.default_rng(seed)
            ids = routing(name, SHAPE, seed)
            x = rng.standard_normal((4, 8, 16), np.float32)
            w = rng.random((4, 8, 3), np.float32)
            ids[1, 5], x[1, 5], w[1, 5] = (6, 1, 7), x0, w0
            y, dst_rank = call(step, x.astype(ep.spec.config.dtype), ids, w)
            seen.add(y[1, 5].tobytes())
            places.add(tuple(dst_rank[1, 5].tolist()))
        assert len(places) > 3, "the token never moved"
        results[combine] = seen
    assert len(results["exact"]) == 1
    assert len(results["dedup"]) > 1


def test_consumer_right_after_dispatch(make_domain: Any) -> None:
    """1,000 iterations with new numbers each: a row read before it has arrived would be the last iteration's."""
    shape = Shape(4, 4, 2, 8, 8)
    ep = domain(make_domain, shape, dtype="float32", token_padding=1)

    def step(x: Any, ids: Any) -> Any:
        d = ep.dispatch(x, ids)
        return ep.combine(d.plan, d.hidden * 2 + (d.hidden != 0))

    run = per_rank(ep, step)
    everything = [routing(name, shape, 1) for name in ("uniform", "one_expert", "crowded", "partly_unrouted")]
    base = np.arange(4 * 4 * 8, dtype=np.float32).reshape(4, 4, 8) + 1
    for i in range(1000):
        ids = everything[i % 4]
        x = base + 1000 * (i % 97)  # small integers: float32 is exact
        routed = ((ids >= 0) & (ids < 8)).sum(axis=2, dtype=np.float32)[..., None]
        want = (2 * x + 1) * routed
        same_bits(run(x, ids), want, f"iteration {i}")


def test_chained_calls_in_one_program(delays: None, make_domain: Any) -> None:
    """50 dispatches and combines in a scan: each reuses the regions of the one before."""
    ep = domain(make_domain, dtype="float32")

    def step(x: Any, ids: Any) -> Any:
        def body(x: Any, i: Any) -> Any:
            d = ep.dispatch(x, (ids + i) % SHAPE.E)
            y = ep.combine(d.plan, d.hidden)
            return y / SHAPE.K + 1, y[0]

        return jax.lax.scan(body, x, jnp.arange(50, dtype=np.int32))

    x = np.random.default_rng(0).integers(-4, 5, size=(4, 8, 16)).astype(np.float32)
    got, _ = call(per_rank(ep, step), x, routing("uniform", SHAPE))
    np.testing.assert_allclose(got, x + 50, rtol=1e-5, atol=1e-4)


def test_two_domains_interleaved(delays: None, make_domain: Any) -> None:
    """Two models of different shapes take turns, then share one program."""
    shapes = [SHAPE, Shape(8, 4, 2, 16, 8)]
    domains = [domain(make_domain, shape, combine=mode) for shape, mode in zip(shapes, ("dedup", "exact"), strict=True)]
    steps = [whole_step(ep) for ep in domains]
    for i, name in enumerate(ROUTINGS):
        for ep, step, shape in zip(domains, steps, shapes, strict=True):
            check_step(step, np.random.default_rng(i), routing(name, shape, i), shape, ep.spec.config)


def test_two_domains_in_one_program(delays: None, make_domain: Any) -> None:
    """Independent calls of two domains, and of two channels of each, may run in any order; rows never swap."""
    domains = [domain(make_domain, dtype="float32") for _ in range(2)]

    def step(x: Any, ids: Any) -> Any:
        rows = []
        for i, ep in enumerate(domains):
            for channel in range(2):
                d = ep.dispatch(x + (10 * i + channel), (ids + i + 3 * channel) % SHAPE.E, channel=channel)
                rows.append((d.hidden, ep.combine(d.plan, d.hidden)))
        return rows

    run = per_rank(domains[0], step)
    x = np.random.default_rng(0).standard_normal((4, 8, 16), np.float32)
    for seed in range(10):
        ids = routing("lognormal_8", SHAPE, seed)
        for number, (hidden, y) in enumerate(call(run, x, ids)):
            i, channel = divmod(number, 2)
            p = ref.plan((ids + i + 3 * channel) % SHAPE.E, SHAPE.E)
            want, _ = ref.dispatch(p, x + np.float32(10 * i + channel))
            same_bits(hidden, want, f"hidden of domain {i}, channel {channel}")
            same_bits(y, ref.combine(p, want), f"y of domain {i}, channel {channel}")


def test_independent_calls_on_one_plan(delays: None, make_domain: Any) -> None:
    """Four dispatches and four combines of one plan that do not depend on each other."""
    ep = domain(make_domain, dtype="float32")

    def step(x: Any, ids: Any) -> Any:
        p = ep.plan(ids)
        hidden = [ep.dispatch(x * (i + 1), ids, plan=p).hidden for i in range(4)]
        return hidden, [ep.combine(p, h) for h in reversed(hidden)]

    run = per_rank(ep, step)
    x = np.random.default_rng(0).standard_normal((4, 8, 16), np.float32)
    for seed in range(20):
        ids = routing("lognormal_2", SHAPE, seed)
        p = ref.plan(ids, SHAPE.E)
        hidden, y = call(run, x, ids)
        for i in range(4):
            want, _ = ref.dispatch(p, x * np.float32(i + 1))
            same_bits(hidden[i], want, f"hidden {i}")
            same_bits(y[3 - i], ref.combine(p, want), f"y {i}")


def test_launches_in_flight_are_never_swapped(delays: None, make_domain: Any) -> None:
    """20 launches of one program with different numbers, then one wait for all."""
    ep = domain(make_domain, dtype="float32")

    def step(x: Any, ids: Any) -> Any:
        d = ep.dispatch(x, ids)
        return d.hidden, ep.combine(d.plan, d.hidden)

    run = per_rank(ep, step)
    many = [routing("anything", SHAPE, seed) for seed in range(20)]
    x = np.random.default_rng(0).standard_normal((4, 8, 16), np.float32)
    jax.block_until_ready(run(x, many[0]))
    for _ in range(3):
        flying = [run(x + np.float32(i), ids) for i, ids in enumerate(many)]
        jax.block_until_ready(flying)
        for i, (hidden, y) in enumerate(flying):
            p = ref.plan(many[i], SHAPE.E)
            want, _ = ref.dispatch(p, x + np.float32(i))
            same_bits(hidden, want, f"hidden of launch {i}")
            same_bits(y, ref.combine(p, want), f"y of launch {i}")


def test_a_domain_as_static_argument_never_retraces(make_domain: Any) -> None:
    """Equal by value and id: the same domain, found again from its spec, compiles nothing; another one does."""
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def step(ep: Any, x: Any, ids: Any) -> Any:
        traces.append(ep.spec.id)
        mesh = make_mesh((4,), ("ep",))
        body = lambda x, ids: ep.dispatch(x, ids).hidden  # noqa: E731
        return jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(x, ids)

    first, second = domain(make_domain), domain(make_domain)
    x = jnp.zeros((32, 16), jnp.bfloat16)
    ids = jnp.zeros((32, 3), np.int32)
    for ep in (first, first, second, first, second):
        step(ep, x, ids).block_until_ready()
    twin = copy.copy(first)  # equal, but another object
    twin._closed = True  # nobody is to close it
    step(twin, x, ids).block_until_ready()
    assert traces == [first.spec.id, second.spec.id]
    assert step._cache_size() == 2


def test_stats_count_calls(make_domain: Any) -> None:
    """One call of the op is one execution on each of this process's ranks."""
    ep = domain(make_domain, dtype="float32", weights={"w": ((3,), "float32")})
    assert ep.stats()["executed"] == 0

    def step(x: Any, ids: Any, w: Any) -> Any:
        d = ep.dispatch(x, ids)
        return ep.combine(d.plan, d.hidden), ep.prefetch(d.plan, {"w": w})["w"]

    run = per_rank(ep, step)
    x = np.zeros((4, 8, 16), np.float32)
    for times in (1, 2, 3):
        call(run, x, routing("uniform", SHAPE, times), np.zeros((4, 2, 3), np.float32))
        assert ep.stats()["executed"] == times * 4 * 4  # plan, dispatch, combine, prefetch on four ranks
    parts = ep.stats()["bytes_per_rank"]
    assert parts["slots"] >= 2 * 64  # one leaf, padded, of two own experts
    assert parts["total"] == sum(size for name, size in parts.items() if name != "total")
    assert parts["rows"] >= 8 * 16 * 4 and parts["returns"] >= 8 * 3 * 16 * 4
    assert set(ep.stats()["memory"]) == {0}
