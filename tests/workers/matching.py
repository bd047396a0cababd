"""Worker of test_matching: programs whose rows say where they come from, so that a wrong meeting cannot look right.

A row carries its source rank, branch, step and token; the rank that computes it adds its own rank, branch and step. The
oracle knows what must arrive. Random delays before each post and work of data-dependent length between the ops make
ranks reach their calls in different orders; every result is an output, so that XLA has no buffer to reuse and with it
no reason to run the branches one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep
from moonep_jax import reference
from workers import Context, raised, variables

S, K, H = 8, 2, 8  # tokens per rank, experts per token, columns: 4 of the source, 3 of the destination, 1 spare
EP = P("ep")


class Case:
    """One domain over all devices, and its markers."""

    def __init__(self, c: Context, ep: moonep.Domain, mesh: jax.sharding.Mesh):
        self.c, self.ep, self.mesh = c, ep, mesh
        self.ranks, self.experts = c.devices, 2 * c.devices
        self.big = np.eye(64, dtype=np.float32)
        self.turns = 8  # matmuls per unit of work

    def put(self, array: np.ndarray) -> jax.Array:
        return self.c.put(array, self.mesh, EP)

    def ids(self, *key: int) -> np.ndarray:
        """[R * s, K] skewed ids, different for each key."""
        rng = np.random.default_rng([*key, self.ranks])
        scores = rng.gumbel(size=(self.ranks * S, self.experts)) + 2.0 * rng.standard_normal(self.experts)
        return np.argsort(-scores, axis=1)[:, :K].astype(np.int32)

    def rows(self, branch: int, step: int) -> np.ndarray:
        """[R * s, H] rows with the source's markers."""
        x = np.zeros((self.ranks, S, H), np.float32)
        x[..., 0] = np.arange(self.ranks)[:, None]
        x[..., 1:3] = branch, step
        x[..., 3] = np.arange(S)
        return x.reshape(-1, H)

    def jit(self, f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return jax.jit(jax.shard_map(f, mesh=self.mesh, in_specs=EP, out_specs=EP), **options)

    def slow(self, x: jax.Array, branch: Any, step: Any) -> jax.Array:
        """x, after a number of matmuls that differs between ranks, branches and steps."""
        one = 1 + 0 * x[0, 0]
        turns = (branch * 7 + jax.lax.axis_index("ep") * 5 + step * 3).astype(np.int32) % 8 * self.turns
        m = jax.lax.fori_loop(0, turns, lambda _, m: m @ self.big, self.big * one)
        return x * m[0, 0]

    def meet(self, x: jax.Array, ids: jax.Array, channel: int = 0, plan: Any = None) -> dict[str, Any]:
        """Rows out and back, all results returned; they come back with what the other side says of itself."""
        branch, step = x[0, 1], x[0, 2]
        x = self.slow(x, branch, step)
        if plan is None:
            ids = ids + (0 * x[0, 0]).astype(np.int32)  # the plan, too, waits for the work
        d = self.ep.dispatch(x, ids, plan=plan, channel=channel)
        rank = jax.lax.axis_index("ep").astype(np.float32)
        out = d.hidden.at[:, 4].set(branch).at[:, 5].set(step).at[:, 6].set(rank)
        y = self.ep.combine(d.plan, out)
        return {"y": y, "hidden": d.hidden, "weights": d.weights, "plan": d.plan}

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a Case lives as long as its process
    def _oracle(self, *key: int) -> reference.ReferencePlan:
        return reference.plan(self.ids(*key).reshape(self.ranks, S, K), self.experts)

    def wrong(self, got: dict[str, Any], branch: int, step: int, *key: int) -> list[str]:
        """What this process got that is not what the oracle expects of these ids, branch and step."""
        p = self._oracle(*key)
        hidden, weights = reference.dispatch(p, self.rows(branch, step).reshape(self.ranks, S, H))
        out = hidden.copy()
        out[..., 4:6] = branch, step
        out[..., 6] = np.arange(self.ranks)[:, None]
        expected = {"y": reference.combine(p, out), "hidden": hidden, "weights": weights}
        arrays = {name: got[name] for name in expected}
        for name in ("src", "dst_rank", "dst_row", "slot_expert"):
            arrays[f"plan.{name}"] = getattr(got["plan"], name)
            expected[f"plan.{name}"] = getattr(p, name)
        expected["plan.slot_expert"] = np.broadcast_to(p.slot_expert, (self.ranks, *p.slot_expert.shape))
        bad = []
        for name, array in arrays.items():
            whole = expected[name].reshape(array.shape)
            if any(not np.array_equal(value, whole[index]) for index, value in self.c.local(array)):
                bad.append(f"{name} of branch {branch}, step {step}")
        return bad


@contextmanager
def case(c: Context, seed: int, delay_us: int = 2000, **fields: Any) -> Iterator[Case]:
    mesh = c.mesh()
    fields = {"tokens": S, "hidden": H, "topk": K, "experts": 2 * c.devices, "dtype": np.float32} | fields
    with variables(MOONEP_DELAY_US=delay_us, MOONEP_DELAY_SEED=seed):
        ep = moonep.setup(mesh, "ep", moonep.EPConfig(weights={"scale": ((H,), np.float32)}, **fields))
    with ep:
        yield Case(c, ep, mesh)


def run(c: Context) -> None:
    from workers import layers  # it builds on this module

    for seed in (1, 2):
        c.case(f"branches_{seed}", lambda seed=seed: branches(c, seed, launches=25, inline=False))
    c.case("branches_one_channel", lambda: branches(c, 3, launches=10, inline=True))
    for f in (one_plan, plans_of_one_function, reused_in_order, reduce_grads, psum_between, unawaited, untaken_branch):
        c.case(f.__name__, functools.partial(f, c))
    layers.run(c)
    # Last: these end in errors.
    c.case("varying_branch", lambda: varying_branch(c))
    if c.processes > 1:
        for by in ("name", "channel", "program"):
            for awaited in (True, False):
                name = f"opposite_by_{by}_{'awaited' if awaited else 'unawaited'}"
                c.case(name, functools.partial(opposite_order, c, by, awaited))


def branches(c: Context, seed: int, launches: int, inline: bool) -> list[str]:
    """8 parallel chains of two layers: one jitted layer with a channel per chain, or written out on one channel."""
    with case(c, seed) as at:
        layer = at.meet if inline else jax.jit(at.meet, static_argnums=2)
        keys = [[(b, level) for level in range(2)] for b in range(8)]

        def model(xs: Any, ids: Any) -> Any:
            outs = []
            for b in range(8):
                first = layer(xs[b], ids[b][0], 0 if inline else b)
                again = xs[b] + 0 * first["y"]
                outs.append([first, layer(again, ids[b][1], 0 if inline else b)])
            return outs

        step_fn = at.jit(model)
        ids = [[at.put(at.ids(*key)) for key in chain] for chain in keys]
        bad: list[str] = []
        for step in range(launches):
            got = jax.block_until_ready(step_fn([at.put(at.rows(b, step)) for b in range(8)], ids))
            for b in range(8):
                for level in range(2):
                    bad += at.wrong(got[b][level], b, step, *keys[b][level])
        return bad[:20]


def one_plan(c: Context) -> list[str]:
    """One plan, four independent dispatches and combines."""
    with case(c, 4) as at:

        def model(xs: Any, ids: Any) -> Any:
            plan = at.ep.plan(ids)
            return [at.meet(x, ids, plan=plan) for x in xs]

        step_fn, ids, bad = at.jit(model), at.put(at.ids(0)), []
        for step in range(15):
            got = jax.block_until_ready(step_fn([at.put(at.rows(b, step)) for b in range(4)], ids))
            bad += [text for b in range(4) for text in at.wrong(got[b], b, step, 0)]
        return bad


def plans_of_one_function(c: Context) -> list[str]:
    """One jitted function of a plan, applied to four independent plans: their tickets tell its calls apart."""
    with case(c, 12) as at:
        shared = jax.jit(lambda x, ids, plan: at.meet(x, ids, plan=plan))

        def model(xs: Any, ids: Any) -> Any:
            outs = []
            for x, i in zip(xs, ids, strict=True):
                plan = at.ep.plan(i)
                first = shared(x, i, plan)
                outs += [first, shared(x + 0 * first["y"], i, plan)]
            return outs

        step_fn, ids, bad = at.jit(model), [at.put(at.ids(b)) for b in range(4)], []
        for step in range(15):
            got = jax.block_until_ready(step_fn([at.put(at.rows(b, step)) for b in range(4)], ids))
            bad += [text for n, out in enumerate(got) for text in at.wrong(out, n // 2, step, n // 2)]
        return bad


def reused_in_order(c: Context) -> list[str]:
    """One jitted function applied three times on one channel is right when data orders its uses."""
    with case(c, 5) as at:
        layer = jax.jit(at.meet, static_argnums=2)

        def model(xs: Any, ids: Any) -> Any:
            outs: list[Any] = []
            for x, i in zip(xs, ids, strict=True):
                if outs:
                    x = x + 0 * outs[-1]["y"]
                outs.append(layer(x, i, 0))
            return outs

        step_fn, ids, bad = at.jit(model), [at.put(at.ids(b)) for b in range(3)], []
        for step in range(10):
            got = jax.block_until_ready(step_fn([at.put(at.rows(b, step)) for b in range(3)], ids))
            bad += [text for b in range(3) for text in at.wrong(got[b], b, step, b)]
        return bad


def reduce_grads(c: Context) -> list[str]:
    """The reduce_grads of two layers may start in either order."""
    with case(c, 6) as at:
        epn = at.experts // at.ranks

        def model(scales: Any, cts: Any, ids: Any, steps: Any) -> Any:
            grads = []
            for layer in range(2):
                plan = at.ep.plan(ids[layer], channel=layer)
                w, back = jax.vjp(lambda scale, plan=plan: at.ep.prefetch(plan, {"scale": scale}), scales[layer])
                ct = at.slow(cts[layer], jnp.float32(layer), steps[0, 0])
                grads.append((w["scale"], back({"scale": ct})[0], plan))
            return grads

        step_fn, ids, bad = at.jit(model), [at.put(at.ids(layer)) for layer in range(2)], []
        for step in range(15):
            rng = np.random.default_rng(step)
            scales = rng.integers(1, 99, (2, at.ranks, epn, H)).astype(np.float32)
            cts = rng.integers(1, 99, (2, at.ranks, 2 * epn, H)).astype(np.float32)
            flat = [[at.put(a.reshape(-1, H)) for a in arrays] for arrays in (scales, cts)]
            got = jax.block_until_ready(step_fn(*flat, ids, at.put(np.full((at.ranks, 1), step, np.float32))))
            for layer, (w, grad, _) in enumerate(got):
                p = at._oracle(layer)
                pushed, summed = reference.prefetch(p, scales[layer]), reference.reduce_grad(p, cts[layer])
                for name, array, whole in (("prefetch", w, pushed), ("grad", grad, summed)):
                    whole = whole.reshape(array.shape)
                    if any(not np.array_equal(value, whole[index]) for index, value in c.local(array)):
                        bad.append(f"{name} of layer {layer}, step {step}")
        return bad


def psum_between(c: Context) -> list[str]:
    """Three branches with XLA's own collective before, between and after the ops."""
    with case(c, 7) as at:

        def one(x: Any, ids: Any, channel: int) -> Any:
            first = at.meet(x, ids, channel)
            ranks = jax.lax.psum(1.0 + 0 * first["y"][0, 0], "ep")
            second = at.meet(x * (ranks / at.ranks), ids, channel)
            return first, second, jax.lax.psum(second["y"], "ep")[None]

        step_fn = at.jit(lambda xs, ids: [one(xs[b], ids[b], b) for b in range(3)])
        ids, bad = [at.put(at.ids(b)) for b in range(3)], []
        for step in range(12):
            got = jax.block_until_ready(step_fn([at.put(at.rows(b, step)) for b in range(3)], ids))
            bad += [text for b in range(3) for out in got[b][:2] for text in at.wrong(out, b, step, b)]
        return bad


def unawaited(c: Context) -> list[str]:
    """20 launches of one program in flight: independent in one process, chained through data in several."""
    with case(c, 8) as at:
        at.turns = 100

        def model(x: Any, ids: Any) -> Any:
            out = at.meet(x, ids)
            return out, (x + 0 * out["y"]).at[:, 2].add(1)

        step_fn, ids = at.jit(model), at.put(at.ids(0))
        got, x = [], at.put(at.rows(0, 0))
        for step in range(20):
            out, following = step_fn(x, ids)
            got.append(out)
            x = at.put(at.rows(0, step + 1)) if c.processes == 1 else following
        jax.block_until_ready(got)
        return [text for step, out in enumerate(got) for text in at.wrong(out, 0, step, 0)]


def _choose(at: Case, choice: Callable[[Any], Any]) -> Callable[..., Any]:
    """meet, or rows of zeros, by a predicate."""

    def model(x: Any, ids: Any, flag: Any) -> Any:
        taken = lambda: at.meet(x, ids)["y"]  # noqa: E731
        return jax.lax.cond(choice(flag), taken, lambda: 0 * x)

    return at.jit(model)


def untaken_branch(c: Context) -> list[str]:
    """An op in a lax.cond branch that no rank takes does nothing; taken by all, it is right."""
    with case(c, 9) as at:
        # Every rank's own copy of the flag: equal, but XLA does not know that.
        step_fn, ids, bad = _choose(at, lambda flag: flag[0, 0] > 0), at.put(at.ids(0)), []
        for step in range(6):
            taken = step % 2
            before = at.ep.stats()["executed"]
            flag = at.put(np.full((at.ranks, 1), taken, np.float32))
            y = jax.block_until_ready(step_fn(at.put(at.rows(0, step)), ids, flag))
            calls = at.ep.stats()["executed"] - before
            p = at._oracle(0)
            hidden, _ = reference.dispatch(p, at.rows(0, step).reshape(at.ranks, S, H))
            hidden[..., 4:6] = 0, step
            hidden[..., 6] = np.arange(at.ranks)[:, None]
            whole = reference.combine(p, hidden).reshape(-1, H) * taken
            bad += [f"y of step {step}" for index, value in c.local(y) if not np.array_equal(value, whole[index])]
            if not taken and calls:
                bad.append(f"{calls} calls in step {step}, which takes none")
        return bad


def varying_branch(c: Context) -> Any:
    """A rank-varying predicate around an op."""
    with case(c, 10, timeout_s=3.0, first_call_timeout_s=3.0) as at:
        step_fn = _choose(at, lambda flag: jax.lax.axis_index("ep") != at.ranks - 1)
        args = (at.put(at.rows(0, 0)), at.put(at.ids(0)), at.put(np.ones((at.ranks, 1), np.float32)))
        compiled = step_fn.lower(*args).compile()
        c.barrier()
        y = compiled(*args)
        error = raised(lambda: jax.block_until_ready(y))
        # The shard that skipped is healthy and readable.
        shards = {c.rank_of(s.device, at.mesh): s for s in y.addressable_shards}
        readable = {r: raised(lambda s=s: np.asarray(s.data)) is None for r, s in shards.items()}
        c.barrier()  # or the rank that skipped would close the domain before the others' limit
        return {"error": error, "readable": readable, "check": raised(at.ep.check)}


def opposite_order(c: Context, by: str, awaited: bool) -> Any:
    """Odd processes launch two programs, told apart by their names, by their channels or by nothing else than what they
    compute, in the opposite order."""
    with case(c, 11, timeout_s=3.0, first_call_timeout_s=3.0) as at:

        def first(x: Any, ids: Any) -> Any:
            return at.meet(x, ids, channel=0)

        def second(x: Any, ids: Any) -> Any:
            x = jnp.where(x == x, x, 0) if by == "program" else x
            return at.meet(x, ids, channel=1 if by == "channel" else 0)

        if by != "name":
            second.__name__ = first.__name__
        args = [(at.put(at.rows(b, 0)), at.put(at.ids(b))) for b in range(2)]
        compiled = [at.jit(f).lower(*a).compile() for f, a in zip((first, second), args, strict=True)]
        c.barrier()
        outs: dict[int, Any] = {}
        error = None
        for b in (1, 0) if c.index % 2 else (0, 1):
            outs[b] = compiled[b](*args[b])
            if awaited:
                error = error or raised(lambda b=b: jax.block_until_ready(outs[b]))
        error = error or raised(lambda: jax.block_until_ready(outs))
        bad = [] if error else [text for b in range(2) for text in at.wrong(outs[b], b, 0, b)]
        c.barrier()
        check = raised(at.ep.check)  # which close() need not say again
        return {"error": error, "wrong": bad, "check": check}
