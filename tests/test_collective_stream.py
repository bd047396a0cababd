"""The calls on XLA's collective stream: what is lowered for CUDA (no GPU needed), and that it computes the same.

XLA gives the stream to an annotated call of a function. That call must be alone in a function of its own: its results
would be made asynchronous calls, too, if they were read where it stands (see _compat.py).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import dense
import jax
import numpy as np
import pytest
from conftest import make_mesh
from harness import one_fast
from jax.sharding import PartitionSpec as P
from steps import same_bits

from moonep_jax import _compat, primitives

R = 2
ANNOTATED = '{_xla_stream_annotation = "collective", inlineable = "false"}'
PLAIN = '{inlineable = "false"}'
SITE = re.compile(r"\bsite = (-?\d+) : i64")


@pytest.fixture
def stream_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a jaxlib that has the stream, whatever is installed."""
    monkeypatch.setenv("MOONEP_COLLECTIVE_STREAM", "1")
    monkeypatch.setattr(_compat, "has_collective_stream", lambda: True)


@pytest.fixture
def outlined_on_cpu(stream_on: None) -> Iterator[None]:
    """CPU programs are lowered as those for GPUs: XLA:CPU ignores the annotation and runs the functions."""

    def register(platform: str) -> None:
        for name in primitives._KINDS:
            rule = functools.partial(primitives._lower, platform=platform, name=name)
            _compat.register_lowering(primitives._PRIMITIVES[name], rule, "cpu")

    register("cuda")
    yield
    register("cpu")


def program(ep: Any, name: str) -> Callable[..., Any]:
    """A jitted function of dense.inputs' values; always the same function name, which sites depend on."""
    specs = dense.specs("ep")

    def moe(x: Any, router: Any, bias: Any, params: Any) -> Any:
        return ep.moe(x, dense.logits_of(x, router, bias), params)

    def full_leaves(x: Any, router: Any, bias: Any, params: Any) -> Any:
        _, ids = jax.lax.top_k(dense.logits_of(x, router, bias), dense.TOPK)
        d = ep.dispatch(x, ids.astype(np.int32))
        doubled = {key: jax.numpy.concatenate([w, w]) for key, w in params.items()}
        w = ep.prefetch(d.plan, doubled)  # in place
        return ep.combine(d.plan, d.hidden) + sum(leaf.astype(np.float32).sum() for leaf in w.values())

    def scanned(x: Any, router: Any, bias: Any, params: Any) -> Any:
        body = jax.checkpoint(lambda x, _: (x + moe(x, router, bias, params), None))
        return jax.lax.scan(body, x, None, length=2)[0]

    layer = {"remat": jax.checkpoint(moe), "scan": scanned, "full": full_leaves}.get(name, moe)
    layer = jax.shard_map(layer, mesh=make_mesh((R,), ("ep",)), in_specs=tuple(specs.values()), out_specs=P("ep"))

    def step(x: Any, router: Any, bias: Any, params: Any) -> Any:
        if name == "forward":
            return layer(x, router, bias, params)
        return jax.value_and_grad(lambda *a: (layer(*a) ** 2).sum(), argnums=(0, 1, 3))(x, router, bias, params)

    return jax.jit(step)


PROGRAMS = ["forward", "grad", "remat", "scan", "full"]


def lowered(step: Any, platform: str) -> str:
    a = dense.inputs(R * dense.TOKENS)
    return step.trace(*a.values()).lower(lowering_platforms=(platform,)).as_text()


def uses(text: str, function: str) -> list[str]:
    return [line for line in text.splitlines() if re.search(rf"\bcall @{function}\(", line)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call_is_annotated(make_domain: Any, stream_on: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ep = make_domain(R, **dense.config())
    text = lowered(program(ep, name), "cuda")
    outlined = re.findall(r"func\.func private @(\w+)\(([^\n]*)\{\n(.*?)\n  \}", text, re.DOTALL)
    inner = [function for function, _, body in outlined if "custom_call @moonep_" in body]
    assert len(inner) == text.count("custom_call @moonep_") > 0  # none is left where it was
    for function in inner:
        (use,) = uses(text, function)
        assert ANNOTATED in use, use
        (outer,) = (f for f, _, body in outlined if uses(body, function))
        (use,) = uses(text, outer)
        assert PLAIN in use, use
    assert text.count("_xla_stream_annotation") == len(inner)
    # One site for each, and the same ones as without.
    sites = SITE.findall(text)
    monkeypatch.setenv("MOONEP_COLLECTIVE_STREAM", "0")
    without = lowered(program(ep, name), "cuda")
    assert "_xla_stream_annotation" not in without and "inlineable" not in without
    assert len(set(sites)) == len(sites) and sorted(sites) == sorted(SITE.findall(without))


@pytest.mark.parametrize("name", one_fast(PROGRAMS, "grad"))
def test_other_platforms_and_versions_see_nothing(
    make_domain: Any, stream_on: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ep = make_domain(R, **dense.config())
    texts = {}
    for version in (False, True):
        monkeypatch.setattr(_compat, "has_collective_stream", lambda version=version: version)
        for on in (False, True):
            monkeypatch.setenv("MOONEP_COLLECTIVE_STREAM", str(int(on)))
            texts[version, on] = [lowered(program(ep, name), platform) for platform in ("cpu", "cuda")]
    cpu, cuda = zip(*texts.values(), strict=True)
    assert len(set(cpu)) == 1
    assert len(set(cuda[:3])) == 1 and cuda[3] != cuda[0]


def test_the_version_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, expected in (((0, 10, 2), False), ((0, 11, 0), False), ((0, 11, 1), True), ((0, 12, 0), True)):
        monkeypatch.setattr("jax._src.lib.version", version)
        assert _compat.has_collective_stream() is expected


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_computes_the_same(make_domain: Any, name: str, request: pytest.FixtureRequest) -> None:
    """Switched on, CPU programs are right; lowered as for GPUs, they still are: functions, aliases, sharding."""
    ep = make_domain(R, **dense.config())
    a = dense.inputs(R * dense.TOKENS)
    expected = program(ep, name)(*a.values())
    for fixture in ("stream_on", "outlined_on_cpu"):
        request.getfixturevalue(fixture)
        got = program(ep, name)(*a.values())
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            same_bits(x, np.asarray(y), fixture)
