"""EPConfig, environment variables and error texts."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from moonep_jax import env
from moonep_jax.config import EPConfig, WeightLeaf, Weights
from moonep_jax.errors import ConfigError, MoonEPError, SetupError, message


def make(**changes: Any) -> EPConfig:
    return EPConfig(**{"tokens": 16, "hidden": 64, "topk": 2, "experts": 8, **changes})


def test_error_hierarchy_and_text() -> None:
    assert issubclass(SetupError, MoonEPError) and issubclass(MoonEPError, RuntimeError)
    assert issubclass(ConfigError, MoonEPError) and issubclass(ConfigError, ValueError)
    assert message("op", "x is bad", 3, 4, "pass 4") == "op: x is bad; got 3, expected 4; pass 4"


def test_defaults_and_normalised_values() -> None:
    cfg = make(tokens=np.int32(16), timeout_s=5, weights={"up": ([3, np.int64(4)], "float32"), "b": ((), jnp.int8)})
    assert cfg.dtype == np.dtype(jnp.bfloat16) and cfg.token_padding == 8
    assert type(cfg.tokens) is int and type(cfg.timeout_s) is float
    assert list(cfg.weights) == ["b", "up"]
    assert cfg.weights["up"] == WeightLeaf((3, 4), np.dtype(np.float32))
    assert cfg.weights["b"] == ((), np.dtype(np.int8))
    with pytest.raises(KeyError):
        cfg.weights["down"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.tokens = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_equality_and_hash_are_by_value() -> None:
    leaves = {"up": ((3, 4), jnp.bfloat16), "down": ((4, 3), jnp.float32)}
    one = make(weights=leaves, dtype=jnp.float32)
    two = make(weights=dict(reversed(leaves.items())), dtype="float32")
    assert one == two and hash(one) == hash(two) and len({one, two}) == 1
    assert one != make(weights=leaves, dtype="float32", topk=3)
    assert one != make(dtype="float32")
    assert dataclasses.replace(one, topk=2) == one
    assert pickle.loads(pickle.dumps(one)) == one and copy.deepcopy(one) == one
    assert make().weights == {} and hash(make()) == hash(make(weights={}))
    assert "'up': ((3, 4), bfloat16)" in repr(one)


@pytest.mark.parametrize(
    ("field", "value"),
    [(f, v) for f in ("tokens", "hidden", "topk", "experts", "token_padding") for v in (0, -1, 1.5, "4", None, True)]
    + [(f, v) for f in ("num_sms", "local_sms", "stage_bytes") for v in (0, -1, 2.0, False)]
    + [(f, v) for f in ("timeout_s", "first_call_timeout_s") for v in (0, -1.0, math.inf, math.nan, "3", True)]
    + [("token_padding", v) for v in (3, 12, 129)]
    + [("dtype", v) for v in (jnp.int32, jnp.float64, "nonsense", None, object())]
    + [("combine", "sum"), ("combine", None), ("planner", "slack"), ("capture_plan", 1)],
)
def test_bad_field_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^EPConfig: bad {field}; got .*, expected .*; ") as caught:
        make(**{field: value})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "weights",
    [
        3,
        [("up", ((1,), "float32"))],
        {1: ((1,), "float32")},
        {"": ((1,), "float32")},
        {"up": (4, 4)},
        {"up": "xy"},
        {"up": ((0, 3), "float32")},
        {"up": ((2, -1), "float32")},
        {"up": ("23", "float32")},
        {"up": ((2, 3), "nope")},
        {"up": ((2, 3), object)},
        {"up": ((2, 3), "float32", 1)},
    ],
)
def test_bad_weights(weights: object) -> None:
    with pytest.raises(ConfigError, match=r"^EPConfig: bad weights"):
        make(weights=weights)


def test_arrays_as_weights_are_not_printed() -> None:
    with pytest.raises(
        ConfigError, match=r"^EPConfig: bad weights\['up'\]; got ndarray of shape \(8, 4\), expected \(sh"
    ):
        make(weights={"up": np.zeros((8, 4), np.float32)})


def test_experts_per_rank() -> None:
    assert make().experts_per_rank(4) == 2
    assert make().experts_per_rank(1) == 8
    with pytest.raises(ConfigError, match="8 experts on 3 ranks"):
        make().experts_per_rank(3)
    for ranks in (0, -2):
        with pytest.raises(ValueError, match="bad ranks"):
            make().experts_per_rank(ranks)


@pytest.mark.parametrize("padding", [1, 2, 8, 128])
def test_recv_rows(padding: int) -> None:
    cfg, home = make(token_padding=padding, topk=3), make(token_padding=padding, topk=3, planner="home")
    for ranks, tokens in [(1, None), (2, 16), (4, 5), (8, 1)]:
        s, epn = tokens or 16, 8 // ranks
        exact_rows, home_rows = s * 3 + (padding - 1) * 2 * epn, ranks * s * 3 + (padding - 1) * epn
        assert cfg.recv_rows(ranks, tokens) == math.ceil(exact_rows / padding) * padding
        assert home.recv_rows(ranks, tokens) == math.ceil(home_rows / padding) * padding
    assert make(token_padding=8).recv_rows(2) == 88  # 16*2 + 7*8 = 88


def test_recv_rows_beyond_capacity() -> None:
    with pytest.raises(ConfigError, match=r"got 17 tokens per rank, expected at most 16"):
        make().recv_rows(2, 17)
    with pytest.raises(ConfigError, match="bad tokens"):
        make().recv_rows(2, 0)


def test_expert_bytes_rounds_each_leaf() -> None:
    cfg = make(weights={"a": ((3,), "float32"), "b": ((32,), jnp.bfloat16), "c": ((65,), "int8"), "d": ((), "int8")})
    assert cfg.expert_bytes == 64 + 64 + 128 + 64
    assert make().expert_bytes == 0
    assert Weights({}) == {} and WeightLeaf((3, 5), np.dtype("float16")).nbytes == 30


def test_limits() -> None:
    make(experts=1024).limits_check(128)
    with pytest.raises(ConfigError, match="assignments of the group"):
        make(tokens=2**24, topk=16).limits_check(8)
    with pytest.raises(ConfigError, match="rows of the dispatched buffer"):
        make(tokens=2**26, topk=31, token_padding=2**26).limits_check(1)
    with pytest.raises(ConfigError, match="entries of the count table"):
        make(experts=2**20, token_padding=1).limits_check(2**11)
    make(tokens=2**27 - 1, topk=2, token_padding=1).limits_check(8)  # one below the limit
    with pytest.raises(ConfigError, match=rf"got {2**31}, expected less than {2**31}"):
        make(tokens=2**27, topk=2, token_padding=1).limits_check(8)


def test_timeouts() -> None:
    assert make().timeouts("cpu", 1) == (30.0, 30.0)
    assert make().timeouts("cpu", 2) == (300.0, 900.0)
    assert make().timeouts("gpu", 1) == (300.0, 900.0)
    assert make(timeout_s=7, first_call_timeout_s=8.5).timeouts("cpu", 1) == (7.0, 8.5)
    assert make(timeout_s=7).timeouts("gpu", 4) == (7.0, 900.0)


def test_fingerprint_has_every_field() -> None:
    cfg = make(weights={"up": ((3, 4), jnp.bfloat16)})
    prints = cfg.fingerprint()
    assert set(prints) == {f"config.{f.name}" for f in dataclasses.fields(EPConfig)}
    assert prints["config.dtype"] == "bfloat16" and prints["config.weights"] == "{'up': ((3, 4), bfloat16)}"
    assert prints == make(weights={"up": ([3, 4], "bfloat16")}).fingerprint()
    assert prints != make(weights={"up": ((3, 4), "float16")}).fingerprint()


# -- environment -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_environment_defaults() -> None:
    assert env.read() == env.Env("auto", 120.0, False, 0, 0) == env.Env()
    assert len({v.name for v in env.VARIABLES}) == len(dataclasses.fields(env.Env))


def test_table_defaults_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        assert variable.meaning.endswith(".")
        monkeypatch.setenv(variable.name, variable.default)
    assert env.read() == env.Env()
    for variable in env.VARIABLES:
        monkeypatch.setenv(variable.name, " ")
    assert env.read() == env.Env()


def test_environment_values(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ("fabric", "2.5", "1", "300", "7", "1", "1")
    for variable, value in zip(env.VARIABLES, values, strict=True):
        monkeypatch.setenv(variable.name, value)
    assert env.read() == env.Env("fabric", 2.5, True, 300, 7, True, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("MOONEP_MEM_HANDLE_TYPE", v) for v in ("FD", "nvlink")]
    + [("MOONEP_SETUP_TIMEOUT_S", v) for v in ("0", "-1", "inf", "nan", "soon")]
    + [("MOONEP_POISON", v) for v in ("2", "true")]
    + [("MOONEP_COLLECTIVE_STREAM", "yes"), ("MOONEP_DEBUG", "on")]
    + [(n, v) for n in ("MOONEP_DELAY_US", "MOONEP_DELAY_SEED") for v in ("-1", "1.5", "x", str(2**31), "\u0663")],
)
def test_bad_environment(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"^environment: bad value of {name}; got '.*', expected .*; set {name} to"):
        env.read()
