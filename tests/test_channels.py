"""The rule of channels: a function that is compiled once and applied twice has one place, which needs care."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_mesh
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep

R, S, K, H, E = 4, 8, 2, 8, 8


def program(ep: moonep.Domain, channels: tuple[int, ...]) -> Callable[..., Any]:
    """Chains of three layers, one chain for each channel, all through one jitted function in one program."""

    @functools.partial(jax.jit, static_argnums=2)
    def moe(x: Any, ids: Any, channel: int) -> Any:
        d = ep.dispatch(x, ids, channel=channel)
        return ep.combine(d.plan, d.hidden)

    def body(x: Any, ids: Any) -> Any:
        out = []
        for i, channel in enumerate(channels):
            y = x + i
            for _ in range(3):
                y = moe(y, ids, channel)
            out.append(y)
        return jnp.stack(out)

    specs = {"in_specs": P("ep"), "out_specs": P(None, "ep")}
    return jax.jit(jax.shard_map(body, mesh=make_mesh((R,), ("ep",)), **specs))


def inputs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((R * S, E)), axis=1)[:, :K].astype(np.int32)
    return rng.integers(-9, 9, size=(R * S, H)).astype(np.float32), ids


@pytest.fixture
def domain(make_domain: Callable[..., moonep.Domain], monkeypatch: pytest.MonkeyPatch) -> moonep.Domain:
    # Posts wait a little, so that calls which may be in flight together are.
    monkeypatch.setenv("MOONEP_DELAY_US", "20000")
    return make_domain(R, tokens=S, hidden=H, topk=K, experts=E, dtype=jnp.float32)


def test_independent_calls_of_one_place_are_an_error(domain: moonep.Domain) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="two calls of one place in the program are in flight"):
        jax.block_until_ready(program(domain, (0, 0, 0, 0))(*inputs()))
    with pytest.raises(moonep.DomainError, match="give independent calls a channel each"):
        domain.check()


@pytest.mark.parametrize("channels", [(0, 1, 2, 3), (0,)])
def test_a_channel_each_or_order_by_data_is_right(domain: moonep.Domain, channels: tuple[int, ...]) -> None:
    x, ids = inputs()
    step = program(domain, channels)
    want = np.stack([(x + i) * np.float32(K**3) for i in range(len(channels))])
    for _ in range(5):
        np.testing.assert_array_equal(jax.block_until_ready(step(x, ids)), want)
