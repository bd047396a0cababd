"""What setup hands to the native modules: each field of the config where it belongs, and the limits of each module."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

import moonep_jax as moonep
from moonep_jax import backends, env, native
from moonep_jax.topology import Member


def config(**fields: Any) -> moonep.EPConfig:
    return moonep.EPConfig(**{"tokens": 4, "hidden": 8, "topk": 2, "experts": 8, "dtype": "float32"} | fields)


def gpu_backend() -> backends.GpuBackend:
    """One that has looked for no GPU."""
    return object.__new__(backends.GpuBackend)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, (0, 0)),
        ({"num_sms": 3}, (3, 0)),
        ({"local_sms": 5}, (0, 5)),
        ({"num_sms": 3, "local_sms": 5}, (3, 5)),
    ],
)
def test_sms_of_a_gpu(fields: dict[str, int], options: tuple[int, int]) -> None:
    assert gpu_backend().options(config(**fields)) == dict(zip(("link_blocks", "local_blocks"), options, strict=True))


def test_numbers_of_a_gpu() -> None:
    """A handler is told a place among the process's devices, and not a global id."""
    backend = gpu_backend()
    backend._ordinals = {12: 0, 13: 1}
    assert [backend.device_number(Member(5, device, 3)) for device in (13, 12)] == [1, 0]


@pytest.mark.parametrize(("name", "most"), [("ranks", 3), ("experts", 7), ("topk", 1), ("leaves", 1)])
def test_limits_of_a_module(name: str, most: int) -> None:
    known = {"ranks": 4, "experts": 8, "topk": 2, "leaves": 2}
    given = config(weights={"a": ((1,), "float32"), "b": ((1,), "float32")})
    module = native.module("cpu")
    fake = SimpleNamespace(limits=lambda: known | {name: most}, DomainShape=module.DomainShape)
    backend: Any = SimpleNamespace(module=fake)
    text = f"^setup: too many {name} for this backend; got {most + 1}, expected at most {most}; "
    with pytest.raises(moonep.ConfigError, match=text):
        backends.domain_shape(backend, given, ranks=4)
    fake.limits = lambda: known
    backends.domain_shape(backend, given, ranks=4)


def test_variables_for_tests_reach_the_cpu() -> None:
    variables = dataclasses.replace(env.read(), poison=True, delay_us=3, delay_seed=5)
    for poison in (True, False):
        backend = backends.make("cpu", [], 0, dataclasses.replace(variables, poison=poison))
        assert backend.options(config()) == {"poison": poison, "delay_us": 3, "delay_seed": 5}


@pytest.mark.parametrize("planner", ["exact", "home"])
@pytest.mark.parametrize("padding", [1, 4, 64])
def test_both_sides_know_the_rows(planner: str, padding: int) -> None:
    given = config(planner=planner, token_padding=padding)
    shape = backends.domain_shape(backends.make("cpu", [], 0, env.read()), given, ranks=4)
    for tokens in (1, 3, 4):
        assert shape.recv_rows(tokens) == given.recv_rows(4, tokens)
