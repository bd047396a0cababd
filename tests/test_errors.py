"""Every way to call an op wrongly: an error while tracing that says op, argument, got, expected and how to fix."""

from __future__ import annotations

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

R, S, K, E, H = 2, 6, 2, 4, 8
F32, I32 = np.dtype(np.float32), np.dtype(np.int32)
MESSAGE = re.compile(
    r"^(?P<op>[\w ]+): (?P<wrong>[^;]+); got (?P<got>.+), expected (?P<expected>.+); (?P<fix>.+)$", re.S
)


@pytest.fixture
def ep(make_domain: Any) -> moonep.Domain:
    weights = {"w": ((3,), np.float32), "ids": ((2,), np.int32), "small": ((4,), jnp.float8_e4m3fn)}
    return make_domain(R, tokens=S, hidden=H, topk=K, experts=E, dtype="float32", weights=weights)


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.zeros(shape, dtype)


def inside(body: Callable[[], Any], ranks: int = R, **kwargs: Any) -> Any:
    """Traces `body` inside shard_map; it makes its operands itself."""
    mesh = kwargs.pop("mesh", None) or make_mesh((ranks,), ("ep",))

    def local(_: Any) -> Any:
        body()
        return _

    return jax.eval_shape(
        jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False, **kwargs), zeros(1)
    )


def refused(op: str, *parts: str, error: Any = moonep.OpError) -> Any:
    """Expects an error of the one format, of this op, that has all `parts` in its text."""

    class Check:
        def __enter__(self) -> None:
            self.raises = pytest.raises(error)
            self.info = self.raises.__enter__()

        def __exit__(self, *exc: Any) -> Any:
            result = self.raises.__exit__(*exc)
            text = str(self.info.value)
            fields = MESSAGE.match(text)
            assert fields, f"not of the format: {text}"
            assert fields["op"] == op, text
            for part in parts:
                assert part in text, f"{part!r} is not in: {text}"
            return result

    return Check()


def a_plan(ep: moonep.Domain, s: int = S) -> moonep.Plan:
    return ep.plan(zeros(s, K, dtype=I32))


# -- operands ----------------------------------------------------------------------------------------------------------

# (op, call, parts of the message)
OPERANDS: list[tuple[str, Callable[[moonep.Domain], Any], tuple[str, ...]]] = [
    ("plan", lambda ep: ep.plan(zeros(S + 1, K, dtype=I32)), ("got 7", "1 to 6")),
    ("plan", lambda ep: ep.plan(zeros(0, K, dtype=I32)), ("got 0", "1 to 6")),
    ("plan", lambda ep: ep.plan(np.int32(3)), ("topk_ids",)),
    ("plan", lambda ep: ep.plan(None), ("topk_ids",)),
    ("plan", lambda ep: ep.plan(zeros(S, K + 1, dtype=I32)), ("topk_ids", "[6, 3]", "[6, 2]")),
    ("plan", lambda ep: ep.plan(zeros(S, dtype=I32)), ("topk_ids", "[6]", "[6, 2]")),
    ("plan", lambda ep: ep.plan(zeros(S, K)), ("float32[6, 2]", "int32[6, 2]")),
    ("plan", lambda ep: ep.plan(zeros(S, K, dtype=np.uint32)), ("uint32[6, 2]", "int32[6, 2]")),
    ("dispatch", lambda ep: ep.dispatch(zeros(S + 1, H), zeros(S + 1, K, dtype=I32)), ("got 7", "1 to 6")),
    ("dispatch", lambda ep: ep.dispatch(zeros(S, H + 1), zeros(S, K, dtype=I32)), ("x ", "[6, 9]", "[6, 8]")),
    ("dispatch", lambda ep: ep.dispatch(zeros(S, H, dtype=jnp.bfloat16), zeros(S, K, dtype=I32)), ("bfloat16[6, 8]",)),
    ("dispatch", lambda ep: ep.dispatch(zeros(S, H), zeros(S - 1, K, dtype=I32)), ("topk_ids", "[5, 2]", "[6, 2]")),
    ("dispatch", lambda ep: ep.dispatch(zeros(S, H), zeros(S, K)), ("topk_ids", "float32", "int32[6, 2]")),
    (
        "dispatch",
        lambda ep: ep.dispatch(zeros(S, H), zeros(S, K, dtype=I32), zeros(S, K, dtype=jnp.bfloat16)),
        ("topk_weights", "bfloat16[6, 2]", "float32[6, 2]"),
    ),
    (
        "dispatch",
        lambda ep: ep.dispatch(zeros(S, H), zeros(S, K, dtype=I32), zeros(S)),
        ("topk_weights", "[6]", "[6, 2]"),
    ),
    (
        "dispatch",
        lambda ep: ep.dispatch(zeros(3, H), zeros(3, K, dtype=I32), plan=a_plan(ep)),
        ("another number of tokens", "got 6", "expected 3"),
    ),
    (
        "dispatch",
        lambda ep: ep.dispatch(zeros(S, H), zeros(S, K, dtype=I32), plan=(1, 2)),  # pyright: ignore
        ("not a Plan", "tuple"),
    ),
    ("combine", lambda ep: ep.combine(None, zeros(20, H)), ("not a Plan", "NoneType")),  # pyright: ignore
    ("combine", lambda ep: ep.combine(a_plan(ep), zeros(3, H)), ("out ", "float32[3, 8]")),
    ("combine", lambda ep: ep.combine(a_plan(ep), zeros(ep.recv_rows(1), H)), ("out ", "[32, 8]", "[40, 8]")),
    ("combine", lambda ep: ep.combine(a_plan(ep), zeros(ep.recv_rows(), H, dtype=np.float16)), ("out ", "float16")),
    (
        "combine",
        lambda ep: ep.combine(a_plan(ep), zeros(ep.recv_rows(), H), zeros(ep.recv_rows(), 1)),
        ("weights", "[40, 1]", "[40]"),
    ),
    (
        "combine",
        lambda ep: ep.combine(a_plan(ep), zeros(ep.recv_rows(), H), zeros(ep.recv_rows(), dtype=np.float16)),
        ("weights", "float16"),
    ),
    ("prefetch", lambda ep: ep.prefetch({}, {"w": zeros(2, 3)}), ("not a Plan", "dict")),  # pyright: ignore
    ("prefetch", lambda ep: ep.prefetch(a_plan(ep), {}), ("unknown weights", "'w'")),
    ("prefetch", lambda ep: ep.prefetch(a_plan(ep), {"v": zeros(2, 3)}), ("unknown weights", "['v']", "'w'")),
    ("prefetch", lambda ep: ep.prefetch(a_plan(ep), zeros(2, 3)), ("unknown weights",)),  # pyright: ignore
    ("prefetch", lambda ep: ep.prefetch(a_plan(ep), {"w": zeros(3, 3)}), ("weights['w']", "[3, 3]", "[2, 3]")),
    ("prefetch", lambda ep: ep.prefetch(a_plan(ep), {"w": zeros(2, 4)}), ("weights['w']", "[2, 4]", "[2, 3]")),
    ("prefetch", lambda ep: ep.prefetch(a_plan(ep), {"w": zeros(4, 4)}), ("weights['w']", "[4, 4]", "[4, 3]")),
    ("prefetch", lambda ep: ep.prefetch(a_plan(ep), {"w": zeros(2, 3, dtype=I32)}), ("int32[2, 3]", "float32[2, 3]")),
    ("moe", lambda ep: ep.moe(zeros(S + 1, H), zeros(S + 1, E), {}), ("got 7", "1 to 6")),
    ("moe", lambda ep: ep.moe(zeros(S, H), zeros(S, E + 1), {}), ("router_logits", "(6, 5)", "(6, 4)")),
    ("moe", lambda ep: ep.moe(zeros(S, H), None, {}), ("router_logits", "NoneType")),
    ("moe", lambda ep: ep.moe(zeros(S, H), zeros(S, E), {"gate": 1, "up": 2}), ("params", "['gate', 'up']", "down")),
    ("moe", lambda ep: ep.moe(zeros(S, H), zeros(S, E), [1]), ("params", "list")),  # pyright: ignore
    (
        "moe",
        lambda ep: ep.moe(zeros(S, H), zeros(S, E), dict.fromkeys(("gate", "up", "down"), 0)),
        ("declare another layer", "leaves ['ids', 'small', 'w']", "gate (8, F)", 'declare weights={"gate": ((H, F)'),
    ),
    ("moe", lambda ep: ep.moe(zeros(2, S, H), zeros(S, E), {}), ("x does not fit", "[2, 6, 8]", "[2, 8]")),
    ("moe", lambda ep: ep.moe(zeros(S, H, dtype=I32), zeros(S, E), {}), ("x does not fit", "int32", "float32")),
]


@pytest.mark.parametrize("case", range(len(OPERANDS)), ids=lambda i: f"{i}-{OPERANDS[i][0]}")
def test_operands(ep: moonep.Domain, case: int) -> None:
    op, call, parts = OPERANDS[case]
    with refused(op, *parts):
        inside(lambda: call(ep))


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_a_layer_declared_the_other_way_round(make_domain: Any, name: str) -> None:
    shapes = {"gate": (H, 6), "up": (H, 6), "down": (6, H)}
    shapes[name] = shapes[name][::-1]
    weights = {n: (shape, "float32") for n, shape in shapes.items()}
    ep = make_domain(R, tokens=S, hidden=H, topk=K, experts=E, dtype="float32", weights=weights)
    leaves = {n: zeros(E // R, *shape) for n, shape in shapes.items()}
    with refused("moe", "declare another layer", f"{name} {shapes[name]}"):
        inside(lambda: ep.moe(zeros(S, H), zeros(S, E), leaves))


@pytest.mark.parametrize("channel", [-1, 2**31, 1.0, True, None, "0", np.zeros(1, np.int32)], ids=str)
def test_channels(ep: moonep.Domain, channel: Any) -> None:
    with refused("plan", "bad channel", repr(channel)):
        inside(lambda: ep.plan(zeros(S, K, dtype=I32), channel))
    with refused("dispatch", "bad channel"):
        inside(lambda: ep.dispatch(zeros(S, H), zeros(S, K, dtype=I32), channel=channel))


def test_channels_at_the_limits_are_fine(ep: moonep.Domain) -> None:
    for channel in (0, 2**31 - 1, np.int64(5)):
        inside(lambda channel=channel: ep.plan(zeros(S, K, dtype=I32), channel))


# -- where an op may be called -----------------------------------------------------------------------------------------


def calls(ep: moonep.Domain) -> dict[str, Callable[[], Any]]:
    """One good call of each op."""
    plan = moonep.Plan(*[zeros(1, dtype=I32)] * 11, domain=ep.spec.id)
    return {
        "plan": lambda: ep.plan(zeros(S, K, dtype=I32)),
        "dispatch": lambda: ep.dispatch(zeros(S, H), zeros(S, K, dtype=I32)),
        "combine": lambda: ep.combine(plan, zeros(1, H)),
        "prefetch": lambda: ep.prefetch(plan, {"w": zeros(2, 3)}),
        "moe": lambda: ep.moe(zeros(S, H), zeros(S, E), {}),
    }


@pytest.mark.parametrize("op", ["plan", "dispatch", "combine", "prefetch", "moe"])
def test_outside_shard_map(ep: moonep.Domain, op: str) -> None:
    with refused(op, "the EP axis is not bound", "'ep'", "shard_map"):
        calls(ep)[op]()
    with refused(op, "the EP axis is not bound"):
        jax.eval_shape(lambda _: calls(ep)[op](), zeros(1))


@pytest.mark.parametrize("op", ["plan", "dispatch", "combine", "prefetch", "moe"])
def test_another_axis_is_bound(ep: moonep.Domain, op: str) -> None:
    with refused(op, "the EP axis is not bound"):
        inside(calls(ep)[op], mesh=make_mesh((R,), ("data",)))


@pytest.mark.parametrize("op", ["plan", "dispatch", "combine", "prefetch", "moe"])
def test_partial_manual_shard_map(make_domain: Any, op: str) -> None:
    mesh = make_mesh((2, 2), ("data", "ep"))
    ep = make_domain(mesh, tokens=S, hidden=H, topk=K, experts=E, dtype="float32", weights={"w": ((3,), np.float32)})
    with refused(op, "manual over some axes only", "'data'", "axis_names"):
        inside(calls(ep)[op], mesh=mesh, axis_names={"ep"})


def test_automatic_axes_of_size_one_are_fine(make_domain: Any) -> None:
    mesh = make_mesh((1, 2), ("data", "ep"))
    ep = make_domain(mesh, tokens=S, hidden=H, topk=K, experts=E)
    inside(lambda: ep.plan(zeros(S, K, dtype=I32)), mesh=mesh, axis_names={"ep"})


@pytest.mark.parametrize("op", ["plan", "dispatch", "combine", "prefetch", "moe"])
def test_mesh_of_another_size(ep: moonep.Domain, op: str) -> None:
    with refused(op, "another size", "got 4", "expected 2"):
        inside(calls(ep)[op], ranks=4)


@pytest.mark.parametrize("op", ["dispatch", "combine", "prefetch"])
def test_plan_of_another_domain(ep: moonep.Domain, make_domain: Any, op: str) -> None:
    other = make_domain(R, tokens=S, hidden=H, topk=K, experts=E, dtype="float32")
    use = {
        "dispatch": lambda p: ep.dispatch(zeros(S, H), zeros(S, K, dtype=I32), plan=p),
        "combine": lambda p: ep.combine(p, zeros(p.rows, H)),
        "prefetch": lambda p: ep.prefetch(p, {"w": zeros(2, 3)}),
    }
    with refused(op, "another domain", f"domain {other.spec.id}", f"domain {ep.spec.id}"):
        inside(lambda: use[op](a_plan(other)))


# -- transformations ---------------------------------------------------------------------------------------------------


def transformable(ep: moonep.Domain) -> dict[str, tuple[Callable[[Any], Any], Any]]:
    """A function of one array for each op, and its argument."""
    ids = zeros(S, K, dtype=I32)
    return {
        "dispatch": (lambda x: ep.dispatch(x, ids).hidden, zeros(S, H)),
        "combine": (lambda out: ep.combine(a_plan(ep), out), zeros(ep.recv_rows(), H)),
        "prefetch": (lambda w: ep.prefetch(a_plan(ep), {"w": w})["w"], zeros(2, 3)),
    }


def test_vmap_of_plan(ep: moonep.Domain) -> None:
    with refused("plan", "vmap is not supported", "lax.scan"):
        inside(lambda: jax.vmap(ep.plan)(zeros(3, S, K, dtype=I32)))


@pytest.mark.parametrize("op", ["dispatch", "combine", "prefetch"])
def test_vmap(ep: moonep.Domain, op: str) -> None:
    run, value = transformable(ep)[op]
    with refused(op, "vmap is not supported", "lax.scan"):
        inside(lambda: jax.vmap(run)(zeros(3, *value.shape)))


@pytest.mark.parametrize(("op", "kind"), [("dispatch", "dispatch_grad"), ("combine", "combine_grad")])
def test_vmap_of_a_gradient(ep: moonep.Domain, op: str, kind: str) -> None:
    """jax.jacrev is a vmap of the backward pass."""
    run, value = transformable(ep)[op]
    with refused(kind, "vmap is not supported"):
        inside(lambda: jax.jacrev(run)(value))


def test_vmap_around_shard_map(ep: moonep.Domain) -> None:
    mesh = make_mesh((R,), ("ep",))
    step = jax.shard_map(lambda ids: ep.plan(ids).dst_row, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    with refused("plan", "vmap is not supported"):
        jax.eval_shape(jax.vmap(step), zeros(3, R * S, K, dtype=I32))


@pytest.mark.parametrize("op", ["dispatch", "combine", "prefetch"])
def test_forward_mode(ep: moonep.Domain, op: str) -> None:
    """JAX itself refuses it while lowering; a function with a custom gradient may still be traced so."""
    run, value = transformable(ep)[op]
    mesh = make_mesh((R,), ("ep",))
    for transformed in (lambda v: jax.jvp(run, (v,), (v,))[1], jax.jacfwd(run)):
        step = jax.shard_map(transformed, mesh=mesh, in_specs=P(), out_specs=P("ep"), check_vma=False)
        with pytest.raises((moonep.OpError, TypeError), match="forward-mode"):
            jax.jit(step).lower(value)


@pytest.mark.parametrize(
    ("op", "kind"), [("dispatch", "dispatch_grad"), ("combine", "combine_grad"), ("prefetch", "reduce_grad")]
)
def test_second_order(ep: moonep.Domain, op: str, kind: str) -> None:
    run, value = transformable(ep)[op]
    first = jax.grad(lambda v: (run(v) ** 2).sum())
    with refused(kind, "repeated differentiation", "jax.grad"):
        inside(lambda: jax.grad(lambda v: first(v).sum())(value))


def test_float_leaf_without_a_gradient(ep: moonep.Domain) -> None:
    def loss(small: Any) -> Any:
        return ep.prefetch(a_plan(ep), {"small": small})["small"].astype(np.float32).sum()

    with refused("reduce_grad", "no gradient", "float8_e4m3fn"):
        inside(lambda: jax.grad(loss)(zeros(2, 4, dtype=jnp.float8_e4m3fn)))
