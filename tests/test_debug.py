"""MOONEP_DEBUG=1: clean runs stay clean and exact, planted corruption is an error that names the pair, off is free."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dense
import gpu_kit
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ROUTINGS, Shape, routing
from conftest import make_mesh
from harness import launch, one_fast
from jax.sharding import PartitionSpec as P
from planted import flip
from steps import call, check_step, per_rank, same_bits, whole_step
from test_autodiff import by_hand, by_moe, sharded, value_and_grads

import moonep_jax as moonep
from moonep_jax import debug, ops, primitives
from moonep_jax import reference as ref

SHAPE = Shape(4, 8, 3, 8, 8)
IDS = routing("two_hot", SHAPE)
PLAN = ref.plan(IDS, SHAPE.E)
HOT, HOME, HOSTS = 2, 1, [0, 2]  # an expert, its home, and the ranks that have it in a slot
LEAVES = {"w": ((3, 5), np.float32), "b": ((7,), jnp.bfloat16)}


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONEP_DEBUG", "1")


def domain(make_domain: Any, shape: Shape = SHAPE, **fields: Any) -> moonep.Domain:
    base = {"tokens": shape.S, "hidden": shape.H, "topk": shape.K, "experts": shape.E, "dtype": "float32"}
    return make_domain(shape.R, **{**base, "weights": LEAVES, "timeout_s": 5.0, **fields})


# -- clean runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        (SHAPE, {"dtype": "bfloat16"}),
        (Shape(3, 5, 2, 3, 7), {"token_padding": 1, "combine": "exact"}),
        (Shape(2, 6, 3, 4, 7, S=16), {"dtype": "float16", "planner": "home"}),
        (Shape(1, 5, 2, 4, 8), {}),
    ],
    ids=str,
)
def test_clean_rows(make_domain: Any, shape: Shape, fields: Any) -> None:
    """Every routing, with NaN in the rows that hold no token: the oracle's bits, and no error."""
    ep = domain(make_domain, shape, **fields)
    assert ep.spec.debug
    step = whole_step(ep)
    for number, name in enumerate(ROUTINGS):
        check_step(step, np.random.default_rng(number), routing(name, shape), shape, ep.spec.config)
    ep.check()


@pytest.mark.slow
def test_clean_weights(make_domain: Any) -> None:
    """Both forms of leaves, of float and other dtypes, forward and backward, in the smallest stage."""
    leaves = {**LEAVES, "scalar": ((), np.float32), "ids": ((2,), np.int32), "mask": ((5,), np.bool_)}
    ep = domain(make_domain, weights=leaves, stage_bytes=64 * SHAPE.epn)
    rng = np.random.default_rng(0)

    def forward(ids: Any, w: Any) -> Any:
        return ep.prefetch(ep.plan(ids), w)

    def backward(ids: Any, w: Any, ct: Any) -> Any:
        p = ep.plan(ids)
        return jax.vjp(lambda w: ep.prefetch(p, w), w)[1](ct)[0]

    run, run_back = per_rank(ep, forward), per_rank(ep, backward)
    for name in ("one_expert", "crowded", "balanced", "unrouted"):
        ids = routing(name, SHAPE)
        p = ref.plan(ids, SHAPE.E)
        for rows in (SHAPE.epn, 2 * SHAPE.epn):
            w = {k: rng.integers(0, 2, (4, rows, *shape)).astype(dtype) for k, (shape, dtype) in leaves.items()}
            ct = {k: rng.standard_normal((4, 4, *leaves[k][0]), np.float32).astype(leaves[k][1]) for k in LEAVES}
            got, grads = call(run, ids, w), call(run_back, ids, {k: w[k] for k in LEAVES}, ct)
            used = np.concatenate([np.ones((4, SHAPE.epn), bool), p.slot_expert >= 0], axis=1)
            for k, leaf in w.items():
                same_bits(got[k][used], ref.prefetch(p, leaf[:, : SHAPE.epn])[used], k)
            for k, leaf in ct.items():
                same_bits(grads[k][:, : SHAPE.epn], ref.reduce_grad(p, leaf), f"gradient of {k}")
    ep.check()


@pytest.mark.parametrize("check_vma", one_fast([True, False], True))
@pytest.mark.parametrize("build", one_fast([by_moe, by_hand], by_moe))
def test_clean_layer_replicated_over_data(make_domain: Any, build: Any, check_vma: bool) -> None:
    mesh = make_mesh((2, 4), ("data", "ep"))
    ep = make_domain(mesh, **dense.config())
    a = dense.inputs(8 * dense.TOKENS)
    got = jax.jit(value_and_grads(sharded(build(ep), mesh, check_vma, x=("data", "ep"))))(a)
    dense.close(got, value_and_grads(dense.layer)(a))
    ep.check()


@pytest.mark.parametrize("check_vma", one_fast([True, False], True))
def test_clean_under_remat_and_scan(make_domain: Any, check_vma: bool) -> None:
    """jax.checkpoint of the body of a scan, and its gradient."""
    ep = make_domain(4, **dense.config())
    a = dense.inputs(4 * dense.TOKENS)
    mesh = make_mesh((4,), ("ep",))
    specs = tuple(dense.specs("ep").values())

    def stack(layer: Any) -> Any:
        def run(x: Any, router: Any, bias: Any, params: Any) -> Any:
            body = jax.checkpoint(lambda x, _: (x + layer(x, router, bias, params), None))
            return jax.lax.scan(body, x, None, length=3)[0]

        return run

    mapped = jax.shard_map(stack(by_moe(ep)), mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=check_vma)
    dense.close(jax.jit(value_and_grads(mapped))(a), value_and_grads(stack(dense.layer))(a))
    ep.check()


# -- planted corruption ------------------------------------------------------------------------------------------------


def error_of(ep: moonep.Domain, step: Any, *args: Any) -> str:
    """The domain's error after a step, which may raise it itself; a step after it must."""
    for _ in range(2):
        try:
            results = call(step, *args)
        except jax.errors.JaxRuntimeError as error:
            assert "rank" in str(error) or "see the domain's first error" in str(error)
            break
        floats = [a for a in jax.tree.leaves(results) if np.issubdtype(a.dtype, np.floating)]
        assert any(np.isnan(a).any() for a in floats)
    else:
        pytest.fail("the second step did not raise")
    with pytest.raises(moonep.DomainError) as caught:
        ep.check()
    text = str(caught.value)
    assert re.match(r"^[\w]+: [^;]+; got .+, expected .+; .+$", text), text
    return text


def cross_row() -> tuple[int, int, int]:
    """(destination, row, source) of a row that crosses between ranks."""
    for rank, row in np.argwhere(PLAN.src >= 0):
        source = int(PLAN.src[rank, row]) // (SHAPE.s * SHAPE.K)
        if source != rank and PLAN.primary[rank, row] == row:
            return int(rank), int(row), source
    raise AssertionError("no row crosses")


def layer(ep: moonep.Domain) -> Any:
    def body(x: Any, ids: Any, topk_weights: Any) -> Any:
        d = ep.dispatch(x, ids, topk_weights)
        return ep.combine(d.plan, d.hidden, d.weights)

    return body


def rows_of(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    return rng.standard_normal((4, 8, 8), np.float32), IDS, rng.random((4, 8, 3), np.float32)


@pytest.mark.parametrize("bit", one_fast([0, 15, 31], 15))
@pytest.mark.parametrize("result", [0, 1], ids=["hidden", "weights"])
def test_a_flipped_bit_of_dispatch(make_domain: Any, monkeypatch: Any, result: int, bit: int) -> None:
    rank, row, source = cross_row()
    flip(monkeypatch, "dispatch", result, rank, (row, 3)[: 2 - result], bit)
    ep = domain(make_domain)
    text = error_of(ep, per_rank(ep, layer(ep)), *rows_of(np.random.default_rng(0)))
    assert text.startswith(f"dispatch: corrupt rows; got 1 rows from rank {source} on rank {rank} with"), text


def test_a_row_that_should_be_zero(make_domain: Any, monkeypatch: Any) -> None:
    rank, row = map(int, np.argwhere(PLAN.src < 0)[0])
    flip(monkeypatch, "dispatch", 0, rank, (row, 0), 31)
    ep = domain(make_domain)
    text = error_of(ep, per_rank(ep, layer(ep)), *rows_of(np.random.default_rng(0)))
    assert text.startswith(f"dispatch: rows that hold no token are not zero; got 1 on rank {rank}"), text


Arrays = dict[str, Any]


def _set(name: str, place: Callable[[Arrays], Any], value: Callable[[Arrays], Any]) -> Callable[[Arrays], None]:
    def change(a: Arrays) -> None:
        a[name][place(a)] = value(a)

    return change


def _own(a: Arrays, i: int) -> int:
    """Row of the i-th assignment that stays on its rank, which is 2."""
    return int(np.flatnonzero(a["src"] // (SHAPE.s * SHAPE.K) == 2)[i])


def _held(a: Arrays, i: int) -> int:
    return int(np.flatnonzero(a["src"] >= 0)[i])


def _swap_own_sources(a: Arrays) -> None:
    rows = [_own(a, 0), _own(a, 1)]
    a["src"][rows] = a["src"][rows[::-1]]


def _not_a_host(a: Arrays) -> int:
    expert = IDS[2].reshape(SHAPE.s, SHAPE.K)[0, 0]
    hosts = [expert // SHAPE.epn, *np.flatnonzero((a["slot_expert"] == expert).any(axis=1))]
    return min(set(range(SHAPE.R)) - {int(h) for h in hosts})


# What breaks a rule, in the arrays of rank 2. Others may break with it.
BROKEN: dict[str, Callable[[Arrays], None]] = {
    "routed ids, and only those, have a place": _set("dst_row", lambda a: (0, 0), lambda a: -1),
    "destinations are in range": _set("dst_row", lambda a: (0, 0), lambda a: PLAN.rows),
    "a destination owns the expert or has it in a slot": _set("dst_rank", lambda a: (0, 0), _not_a_host),
    "sources and links are in range": _set("next", lambda a: _held(a, 0), lambda a: PLAN.rows),
    "a row has one source, and a source one row": _set("src", lambda a: _held(a, 0), lambda a: a["src"][_held(a, 1)]),
    "a primary is the first row of its token": _set("primary", lambda a: _held(a, 0), lambda a: -1),
    "a link leads to a later row of its token": _set("next", lambda a: _held(a, 0), lambda a: _held(a, 0)),
    "own rows lie where their tokens say": _swap_own_sources,
    "own rows are all here": _set("src", lambda a: _own(a, 0), lambda a: -1),
    "rows fill their groups from the start": _set("src", lambda a: _held(a, 0), lambda a: -1),
    "groups are padded": _set("group_sizes", lambda a: 0, lambda a: a["group_sizes"][0] + 1),
    "groups fit the buffer": _set("group_sizes", lambda a: -1, lambda a: PLAN.rows + 8),
    "rows are conserved": _set("rank_rows", lambda a: 0, lambda a: a["rank_rows"][0] + 1),
    "every rank computes its share": _set("rank_rows", lambda a: [0, 1], lambda a: np.add(a["rank_rows"][:2], [1, -1])),
    "slots hold foreign experts": _set("slot_expert", lambda a: (2, 0), lambda a: 2 * SHAPE.epn),
    "slots ascend, unused ones last": _set("slot_expert", lambda a: 2, lambda a: [-1, 7]),
    "slots in use have rows, others have none": _set("group_rows", lambda a: slice(SHAPE.epn, None), lambda a: 0),
}


def test_every_rule_of_a_plan(make_domain: Any) -> None:
    """Each is broken by itself, and seen; a plan that keeps all breaks none."""
    ep = domain(make_domain)
    found: list[str] = []

    def body(ids: Any, arrays: Arrays) -> Any:
        rules = debug._rules(ep.spec, ids, moonep.Plan(**arrays, domain=ep.spec.id))
        found[:] = rules
        return jnp.stack([jnp.sum(~jnp.asarray(holds), dtype=np.int32) for holds in rules.values()])

    def stacked() -> Arrays:
        given = {n: np.asarray(getattr(PLAN, n), np.int32) for n in moonep.spec.PLAN_ARRAYS if n != "ticket"}
        for n in ("slot_expert", "home_rows", "rank_rows"):
            given[n] = np.stack([given[n]] * SHAPE.R)
        return {n: a.copy() for n, a in given.items()} | {"ticket": np.zeros((SHAPE.R, 1), np.int32)}

    step = per_rank(ep, body)
    assert not np.asarray(call(step, IDS, stacked())).any()
    assert sorted(found) == sorted(BROKEN)
    for rule, change in BROKEN.items():
        arrays = stacked()
        change({n: a[2] for n, a in arrays.items()})
        counts = np.asarray(call(step, IDS, arrays)).reshape(SHAPE.R, -1)
        assert counts[2, found.index(rule)] > 0, rule
        assert not counts[[0, 1, 3]].any(), rule


@pytest.mark.parametrize("name", one_fast([n for n in moonep.spec.PLAN_ARRAYS if n != "ticket"], "dst_row"))
@pytest.mark.parametrize("bit", one_fast([0, 2, 30], 2))
def test_a_flipped_bit_of_a_plan(make_domain: Any, monkeypatch: Any, name: str, bit: int) -> None:
    """On rank 2, in an entry that is in use: the plan's own rules see it, or dispatch does."""
    result = moonep.spec.PLAN_ARRAYS.index(name)
    array = getattr(PLAN, name)
    where = (0, 0) if name == "slot_expert" else tuple(np.argwhere(array[2] > 0)[-1]) if array.ndim > 1 else (1,)
    flip(monkeypatch, "plan", result, 2, tuple(map(int, where)), bit)
    ep = domain(make_domain)
    text = error_of(ep, per_rank(ep, layer(ep)), *rows_of(np.random.default_rng(0)))
    assert "rank 2" in text and text.startswith(("plan: the plan breaks its rules; got", "dispatch: corrupt rows")), (
        text
    )


def test_a_flipped_bit_of_a_sum(make_domain: Any, monkeypatch: Any) -> None:
    flip(monkeypatch, "combine", 0, 1, (2, 5), 0)
    ep = domain(make_domain)
    text = error_of(ep, per_rank(ep, layer(ep)), *rows_of(np.random.default_rng(0)))
    ranks = sorted({int(r) for r in PLAN.dst_rank[1, 2] if r >= 0})
    assert text.startswith("combine: corrupt sums; got 1 tokens from rank"), text
    assert text.split(" on rank 1 ")[0].endswith(", ".join(map(str, ranks))), text


@pytest.mark.parametrize(("op", "result"), [("dispatch_grad", 0), ("dispatch_grad", 1), ("combine_grad", 0)])
def test_a_flipped_bit_of_a_gradient(make_domain: Any, monkeypatch: Any, op: str, result: int) -> None:
    rank, row, source = cross_row()
    where = (row, 1) if op == "combine_grad" else (2, 1)
    at = rank if op == "combine_grad" else 1
    flip(monkeypatch, op, result, at, where, 0)
    ep = domain(make_domain)

    def step(x: Any, ids: Any, w: Any) -> Any:
        return jax.grad(lambda x, w: (layer(ep)(x, ids, w) ** 2).sum(), argnums=(0, 1))(x, w)

    text = error_of(ep, per_rank(ep, step), *rows_of(np.random.default_rng(0)))
    if op == "combine_grad":
        assert text.startswith(f"combine_grad: corrupt rows; got 1 rows from rank {source} on rank {rank} "), text
    else:
        host = int(PLAN.dst_rank[1, 2, 1])
        assert re.match(rf"dispatch_grad: corrupt sums; got 1 tokens from ranks? [^;]*{host}[^;]* on rank 1 ", text), (
            text
        )


@pytest.mark.parametrize("op", ["prefetch", "reduce_grad"])
@pytest.mark.parametrize("leaf", [0, 1])
def test_a_flipped_bit_of_an_expert(make_domain: Any, monkeypatch: Any, op: str, leaf: int) -> None:
    """A slot that holds the hot expert; the hot expert's gradient at home."""
    assert [r for r in range(4) if HOT in PLAN.slot_expert[r]] == HOSTS and PLAN.slot_expert[2, 0] == HOT
    rank, row = (2, SHAPE.epn) if op == "prefetch" else (HOME, HOT % SHAPE.epn)
    flip(monkeypatch, op, leaf, rank, (row, 1, 2)[: 2 + leaf], 0)  # leaf "b" [7], leaf "w" [3, 5]
    ep = domain(make_domain)
    w = {k: np.ones((4, SHAPE.epn, *shape), dtype) for k, (shape, dtype) in LEAVES.items()}

    def step(ids: Any, w: Any) -> Any:
        p = ep.plan(ids)
        return jax.grad(lambda w: sum((x.astype(np.float32) ** 2).sum() for x in ep.prefetch(p, w).values()))(w)

    text = error_of(ep, per_rank(ep, step), IDS, w)
    if op == "prefetch":
        assert text.startswith(f"prefetch: corrupt experts' weights; got 1 experts' weights from rank {HOME} on"), text
        assert f"on rank {rank} with another checksum" in text
    else:
        assert text.startswith(f"reduce_grad: corrupt sums; got 1 experts from ranks 0, 2 on rank {HOME} "), text


def test_the_first_error_stays(make_domain: Any, monkeypatch: Any) -> None:
    """Every op of a domain in error fails with the first text, on every rank; another domain goes on."""
    rank, row, _ = cross_row()
    flip(monkeypatch, "dispatch", 0, rank, (row, 0), 3)
    ep, other = domain(make_domain), domain(make_domain)
    text = error_of(ep, per_rank(ep, layer(ep)), *rows_of(np.random.default_rng(0)))
    monkeypatch.undo()
    monkeypatch.setenv("MOONEP_DEBUG", "1")
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(text)):
        call(per_rank(ep, layer(ep)), *rows_of(np.random.default_rng(1)))
    call(per_rank(other, layer(other)), *rows_of(np.random.default_rng(1)))
    other.check()


@pytest.mark.multiprocess
def test_every_process_learns(tmp_path: Path) -> None:
    """Four ranks in 2x2: rank 3 gets a wrong row from rank 0; both processes fail with the same text."""
    run = launch("debugging:run", 2, 2, tmp_path, env={"MOONEP_DEBUG": "1"}, timeout_s=150)
    texts = run.of("text")
    assert texts[0] == texts[1] and re.match(r"dispatch: corrupt rows; got 1 rows from rank \d on rank 3 ", texts[0]), (
        texts
    )
    assert run.of("clean") == [None, None]
    run.ended_well()


def test_gpus_need_cpu_devices_too(monkeypatch: Any) -> None:
    debug.require("cpu")

    def none(backend: str) -> Any:
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", none)
    with pytest.raises(
        moonep.ConfigError, match=r"^setup: MOONEP_DEBUG needs .*; got .*, expected .*; set JAX_PLATFORMS"
    ):
        debug.require("gpu")
    monkeypatch.setattr(debug, "require", lambda platform: none(platform))
    with pytest.raises(moonep.SetupError, match="Unknown backend cpu"):
        moonep.setup(make_mesh((2,), ("ep",)), "ep", moonep.EPConfig(tokens=4, hidden=8, topk=2, experts=4))


# -- on a GPU ----------------------------------------------------------------------------------------------------------

GPU = {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "MOONEP_DEBUG": "1"}
needs_gpu = pytest.mark.skipif(not gpu_kit.available(), reason="needs a GPU, the CUDA module and cuda-python")


@pytest.mark.cuda
@pytest.mark.multiprocess
@needs_gpu
def test_clean_on_a_gpu(tmp_path: Path) -> None:
    cases = ("rows_float32_dedup", "rows_bfloat16_exact", "weights_own", "weights_full", "remat")
    run = launch("gpu:run", 2, 1, tmp_path, env=GPU, timeout_s=280, args={"cases": (*cases, "layer"), "replays": 5})
    for case in cases:
        assert run.of(case) == [[], []], case
    assert all(got["y"] < 1e-5 for got in run.of("layer"))
    run.ended_well()


@pytest.mark.cuda
@pytest.mark.multiprocess
@needs_gpu
def test_corruption_on_a_gpu_is_named(tmp_path: Path) -> None:
    run = launch("debugging:run", 3, 1, tmp_path, env=GPU, timeout_s=240)
    assert run.of("clean") == [None] * 3
    *others, last = run.of("text")
    assert re.match(r"dispatch: corrupt rows; got 1 rows from rank \d on rank 2 ", last), last
    assert all("missing ranks [2]" in text for text in others), others
    run.ended_well()


# -- off ---------------------------------------------------------------------------------------------------------------


def test_off_is_free(make_domain: Any, monkeypatch: Any) -> None:
    """Without the variable nothing of debug.py runs, and the program is the one without it; with it there is more."""
    a = dense.inputs(4 * dense.TOKENS)

    def program(ep: moonep.Domain) -> tuple[str, str]:
        step = jax.jit(value_and_grads(sharded(by_moe(ep))))
        text = step.lower(a).as_text()
        jaxpr = str(jax.make_jaxpr(step)(a))
        return re.sub(rf"domain = {ep.spec.id} : i64", "domain = N", text), jaxpr

    monkeypatch.setenv("MOONEP_DEBUG", "0")
    ep = make_domain(4, **dense.config())
    here = program(ep)
    monkeypatch.setattr(ops, "debug", None)  # any use of it would raise
    assert program(ep) == here
    monkeypatch.setattr(ops, "debug", debug)
    assert "callback" not in here[0] + here[1]
    # plan, dispatch, prefetch, combine and the gradients of the last three
    assert len(re.findall(r"custom_call @moonep_", here[0])) == 7

    monkeypatch.setenv("MOONEP_DEBUG", "1")
    text, _ = program(make_domain(4, **dense.config()))
    assert "callback" in text
    assert len(re.findall(r"custom_call @moonep_", text)) == 13
    assert primitives.call is debug.primitives.call
