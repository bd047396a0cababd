"""The life of a domain: errors of setup, closing, what is left to call after it, several domains at once."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Shape, routing
from conftest import make_mesh
from jax.sharding import PartitionSpec as P
from steps import call, check_step, per_rank, whole_step
from test_errors import inside, refused, zeros

import moonep_jax as moonep
from moonep_jax import native

BASE: dict[str, Any] = {"tokens": 4, "hidden": 8, "topk": 2, "experts": 4, "dtype": "float32"}


def config(**fields: Any) -> moonep.EPConfig:
    return moonep.EPConfig(**{**BASE, **fields})


# -- setup -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"experts": 6}, ("6 experts on 4 ranks", "divisible")),
        ({"weights": {"w": ((64,), "float32")}, "stage_bytes": 63}, ("stage_bytes", "63", "64")),
        ({"tokens": 2**30, "topk": 2}, ("assignments", str(2**33))),
        ({"tokens": 2**28, "topk": 2, "planner": "home"}, ("got 2147483648", "less than 2147483648")),
    ],
)
def test_configs_that_do_not_fit_the_mesh(fields: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(moonep.MoonEPError) as info:
        moonep.setup(make_mesh((4,), ("ep",)), "ep", config(**fields))
    for part in parts:
        assert part in str(info.value), info.value


def test_a_process_without_a_device_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 7)
    with pytest.raises(moonep.ConfigError, match=r"this process owns no device of the mesh; got 7, expected \[0\]; "):
        moonep.setup(make_mesh((2,), ("ep",)), "ep", config())


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"tokens": 0}, ("bad tokens", "got 0")),
        ({"experts": 0}, ("bad experts", "got 0")),
        ({"topk": -1}, ("bad topk", "got -1")),
        ({"token_padding": 12}, ("bad token_padding", "got 12", "a power of two")),
        ({"dtype": "float64"}, ("bad dtype", "got float64")),
        ({"combine": "fast"}, ("bad combine", "'fast'", "'exact'")),
        ({"planner": "slack"}, ("bad planner", "'slack'", "'home'")),
        ({"timeout_s": 0}, ("bad timeout_s", "got 0")),
    ],
)
def test_bad_fields(fields: dict[str, Any], parts: tuple[str, ...]) -> None:
    with refused("EPConfig", *parts, error=moonep.ConfigError):
        config(**fields)


def test_arguments_of_setup() -> None:
    mesh = make_mesh((4,), ("ep",))
    with refused("setup", "bad config", "dict", error=moonep.ConfigError):
        moonep.setup(mesh, "ep", BASE)  # pyright: ignore[reportArgumentType]
    with refused("setup", "bad mesh", "list", error=moonep.ConfigError):
        moonep.setup(list(mesh.devices), "ep", config())  # pyright: ignore[reportArgumentType]
    for axis in ("data", ("ep", "ep"), ()):
        with pytest.raises(moonep.MoonEPError, match=r"axis|axes"):
            moonep.setup(mesh, axis, config())


def test_a_failed_setup_leaves_the_process_usable(make_domain: Any) -> None:
    for _ in range(3):
        with pytest.raises(moonep.MoonEPError):
            moonep.setup(make_mesh((3,), ("ep",)), "ep", config())
    use(make_domain(4, **BASE))


# -- closing -----------------------------------------------------------------------------------------------------------


def use(ep: moonep.Domain, step: Any = None) -> None:
    """One whole step, checked."""
    shape = Shape(ep.spec.ranks, 4, 2, 4, 8)
    check_step(step or whole_step(ep), np.random.default_rng(0), routing("two_hot", shape), shape, ep.spec.config)


def test_close_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time talks to nobody: the other processes may be gone."""
    ep = moonep.setup(make_mesh((2,), ("ep",)), "ep", config())
    use(ep)
    ep.close()
    monkeypatch.setattr("moonep_jax.domain.Exchange", None)
    ep.close()
    with ep:
        pass


def test_the_context_closes_also_after_an_exception() -> None:
    with pytest.raises(KeyError), moonep.setup(make_mesh((2,), ("ep",)), "ep", config()) as ep:
        raise KeyError
    with refused("plan", "the domain is closed", error=moonep.DomainError):
        inside(lambda: ep.plan(zeros(4, 2, dtype=np.int32)))


def test_every_op_after_close() -> None:
    ep = moonep.setup(make_mesh((2,), ("ep",)), "ep", config(weights={"w": ((3,), "float32")}))
    ep.close()
    plan = moonep.Plan(*[zeros(1, dtype=np.int32)] * 11, domain=ep.spec.id)
    ids = zeros(4, 2, dtype=np.int32)
    for op, run in {
        "plan": lambda: ep.plan(ids),
        "dispatch": lambda: ep.dispatch(zeros(4, 8), ids),
        "combine": lambda: ep.combine(plan, zeros(1, 8)),
        "prefetch": lambda: ep.prefetch(plan, {"w": zeros(2, 3)}),
        "moe": lambda: ep.moe(zeros(4, 8), zeros(4, 4), {}),
        "check": ep.check,
    }.items():
        with refused(op, "the domain is closed", f"Domain {ep.spec.id}", error=moonep.DomainError):
            inside(run)
    with pytest.raises(moonep.DomainError):
        ep.stats()


def test_a_compiled_step_after_close() -> None:
    """At run time, on every rank, naming the domain; the process goes on."""
    ep = moonep.setup(make_mesh((2,), ("ep",)), "ep", config())
    step = per_rank(ep, lambda ids: ep.plan(ids).dst_row)
    ids = np.zeros((2, 4, 2), np.int32)
    call(step, ids)
    ep.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"no such domain.*domain {ep.spec.id}.*close") as info:
        call(step, ids)
    assert "plan" in str(info.value)
    with moonep.setup(make_mesh((2,), ("ep",)), "ep", config()) as other:
        use(other)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_domain_that_is_not_closed_warns() -> None:
    ep = moonep.setup(make_mesh((2,), ("ep",)), "ep", config())
    held = {name: value for name, value in vars(ep).items()}
    text = repr(ep)
    with pytest.warns(ResourceWarning, match="was not closed") as caught:
        del ep
        gc.collect()
    assert text in str(caught[0].message)
    again = moonep.Domain.__new__(moonep.Domain)  # close what the test dropped
    again.__dict__.update(held)
    again.close()


def in_error() -> moonep.Domain:
    """A domain whose error no call has raised."""
    ep = moonep.setup(make_mesh((2,), ("ep",)), "ep", config())
    native.module("cpu").fail(ep.spec.id, "dispatch: wrong on purpose")
    return ep


def test_close_raises_an_error_that_nothing_has_raised() -> None:
    ep = in_error()
    with pytest.raises(moonep.DomainError, match=r"^dispatch: wrong on purpose$"):
        ep.close()
    assert ep._closed
    ep.close()  # once
    with pytest.raises(moonep.DomainError, match=r"^dispatch: wrong on purpose$"), in_error():
        pass


@pytest.mark.parametrize("use", ["check", "stats"])
def test_close_does_not_repeat_an_error(use: str) -> None:
    with in_error() as ep, pytest.raises(moonep.DomainError):
        getattr(ep, use)()


def test_an_exception_in_the_context_comes_first() -> None:
    with pytest.raises(ValueError, match="mine"), in_error():
        raise ValueError("mine")


HEAD = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, numpy as np
import moonep_jax as moonep
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
ep = moonep.setup(mesh, "ep", moonep.EPConfig(tokens=4, hidden=8, topk=2, experts=4, dtype="float32"))
plan = jax.jit(jax.shard_map(ep.plan, mesh=mesh, in_specs=jax.P("ep"), out_specs=jax.P("ep")))
ids = np.zeros((8, 2), np.int32)
"""


def script(body: str, first: str = "") -> str:
    """Runs a program to its end, which is a good one; what it wrote to stderr."""
    command = [sys.executable, "-c", first + HEAD + body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_an_import_after_jax_has_made_its_devices() -> None:
    first = (
        'import os\nos.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"\nimport jax\njax.devices()\n'
    )
    script("jax.block_until_ready(plan(ids))\nep.close()", first)


def test_a_domain_left_open_at_exit_is_silent() -> None:
    assert script("jax.block_until_ready(plan(ids))") == ""


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_forked_child_is_told_and_the_parent_goes_on() -> None:
    script("""
pid = os.fork()
if pid == 0:
    texts = []
    for use in (lambda: ep.plan(ids), ep.check, ep.stats):
        try:
            use()
        except moonep.DomainError as e:
            texts.append(str(e))
    ep.close()
    right = len(texts) == 3 and all("the domain is another process's; got process" in t for t in texts)
    os._exit(0 if right else 7)
assert os.waitpid(pid, 0)[1] == 0
jax.block_until_ready(plan(ids))
ep.close()
""")


def test_a_closed_domain_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    ep = moonep.setup(make_mesh((2,), ("ep",)), "ep", config())
    ep.close()
    del ep
    gc.collect()
    assert not [w for w in recwarn if issubclass(w.category, ResourceWarning)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_domains_close_in_any_order(order: tuple[int, ...]) -> None:
    """The others go on working, and memory goes back each time."""
    domains = [moonep.setup(make_mesh((2,), ("ep",)), "ep", config(tokens=4 + i)) for i in range(3)]
    steps = [whole_step(ep) for ep in domains]
    for ep, step in zip(domains, steps, strict=True):
        use(ep, step)
    for closed, index in enumerate(order):
        domains[index].close()
        for other in order[closed + 1 :]:
            use(domains[other], steps[other])


def test_equality_and_hash() -> None:
    mesh = make_mesh((2,), ("ep",))
    with moonep.setup(mesh, "ep", config()) as a, moonep.setup(mesh, "ep", config()) as b:
        assert a != b and a.spec != b.spec and len({a, b, a}) == 2
        assert b.spec.id > a.spec.id
        assert a == a and hash(a) == hash(a)
        assert a != 1


def test_a_step_that_was_only_traced_leaves_nothing_behind(make_domain: Any) -> None:
    ep = make_domain(2, **BASE)
    mesh = make_mesh((2,), ("ep",))
    step = jax.jit(jax.shard_map(lambda ids: ep.plan(ids).dst_row, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    step.lower(jnp.zeros((8, 2), np.int32)).compile()
    assert ep.stats()["executed"] == 0
