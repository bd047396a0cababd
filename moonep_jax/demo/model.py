"""The demo's model, with the mixture-of-experts layer left open: `expert_parallel` and `dense` are its two forms.

A layer mixes each channel over the last characters (a causal convolution) and sends each token to its TOPK experts.
Shapes: t tokens (all characters of a batch or of a rank's part of it), H HIDDEN, F FFN, E EXPERTS, K TOPK.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moonep_jax as moonep
from moonep_jax.demo.text import SYMBOLS

LAYERS, EXPERTS, TOPK, RANKS = 2, 8, 2, 4
HIDDEN, FFN, REACH = 64, 128, 8  # REACH: characters that the convolution sees
SEQUENCES, LENGTH = 16, 64  # of a batch; SEQUENCES / RANKS go to each rank

Params = dict[str, Any]
Moe = Callable[[int, jax.Array, jax.Array, jax.Array, Params], tuple[jax.Array, Any]]


def config() -> moonep.EPConfig:
    """The expert-parallel domain that the model needs."""
    return moonep.EPConfig(
        tokens=SEQUENCES // RANKS * LENGTH,
        hidden=HIDDEN,
        topk=TOPK,
        experts=EXPERTS,
        dtype=np.float32,
        weights={name: (leaf.shape[1:], np.float32) for name, leaf in init(0)["layers"][0]["experts"].items()},
    )


def init(seed: int) -> Params:
    """Parameters as NumPy arrays; the experts' leaves are [E, ...], expert by expert."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.normal(0, shape[-2] ** -0.5, shape).astype(np.float32)

    def layer() -> Params:
        experts = {
            "gate": normal(EXPERTS, HIDDEN, FFN),
            "up": normal(EXPERTS, HIDDEN, FFN),
            "down": normal(EXPERTS, FFN, HIDDEN),
        }
        return {"conv": normal(REACH, HIDDEN), "router": normal(HIDDEN, EXPERTS), "experts": experts}

    vocabulary = len(SYMBOLS)
    return {
        "embed": normal(vocabulary, HIDDEN) * vocabulary**0.5,
        "layers": [layer() for _ in range(LAYERS)],
        # Zero: the first loss is that of a uniform guess.
        "head": np.zeros((HIDDEN, vocabulary), np.float32),
    }


def loss(params: Params, text: jax.Array, skew: float, moe: Moe) -> tuple[jax.Array, list[Any]]:
    """Mean cross-entropy (nats per character) of text [b, length + 1], and what `moe` says of each layer."""
    inputs, targets = text[:, :-1], text[:, 1:]
    x = params["embed"][inputs]
    facts = []
    for index, layer in enumerate(params["layers"]):
        x = x + _convolve(_normalise(x), layer["conv"])
        tokens = _normalise(x).reshape(-1, HIDDEN)
        ids, weights = _route(tokens @ layer["router"], skew)
        y, fact = moe(index, tokens, ids, weights, layer["experts"])
        x = x + y.reshape(x.shape)
        facts.append(fact)
    logits = jax.nn.log_softmax(_normalise(x) @ params["head"])
    costs = -jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    # In two stages, because a float32 sum over all characters would be less exact than the two trainings are alike.
    return jnp.mean(jnp.mean(costs, axis=1)), facts


def _normalise(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def _convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    length = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (REACH - 1, 0), (0, 0)))
    return sum((padded[:, j : j + length] * kernel[j][None, None] for j in range(REACH)), jnp.zeros_like(x))


def _route(logits: jax.Array, skew: float) -> tuple[jax.Array, jax.Array]:
    """Each token's experts [t, K] int32 and their weights [t, K]; `skew` makes expert 0 hot, and 1 a little less."""
    bias = skew * np.array([1.0, 0.75] + [0.0] * (EXPERTS - 2), np.float32)
    top, ids = jax.lax.top_k(logits + bias[None], TOPK)
    return ids, jax.nn.softmax(top)


@dataclass(frozen=True)
class Facts:
    """What an expert-parallel layer did in a step; a pytree of int32 arrays, equal on all ranks.

    Attributes:
      ids: [tokens of all ranks, K] experts chosen.
      plain_rows: [R] rows that each rank would compute under plain expert parallelism.
      rows: [R] rows that each rank computed: those of its buffer that held a token.
      redundant: [] experts computed away from home, over all ranks.
      dropped: [] routed rows that no rank computed.
    """

    ids: jax.Array
    plain_rows: jax.Array
    rows: jax.Array
    redundant: jax.Array
    dropped: jax.Array


jax.tree_util.register_dataclass(Facts)


def expert_parallel(ep: moonep.Domain) -> Moe:
    """The layer inside shard_map: each rank has its tokens and its E/R experts. Says Facts."""

    def moe(index: int, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Params) -> tuple[jax.Array, Facts]:
        d = ep.dispatch(x, ids, weights, channel=index)
        w = ep.prefetch(d.plan, experts)
        gate = jax.lax.ragged_dot(d.hidden, w["gate"], d.group_sizes)
        up = jax.lax.ragged_dot(d.hidden, w["up"], d.group_sizes)
        out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, w["down"], d.group_sizes)
        return ep.combine(d.plan, out, d.weights), _facts(d.plan, ids)

    return moe


def _facts(plan: moonep.Plan, ids: jax.Array) -> Facts:
    rank = jax.lax.axis_index("ep")

    def gather(part: jax.Array) -> jax.Array:  # as a sum, which JAX knows to be equal on all ranks
        full = jnp.zeros((RANKS, *part.shape), part.dtype)
        return jax.lax.psum(jax.lax.dynamic_update_index_in_dim(full, part, rank, 0), "ep")

    # Counted in this rank's buffer, and not taken from plan.rank_rows, which only says what was intended.
    rows = gather(jnp.sum(plan.src >= 0, dtype=np.int32))
    return Facts(
        ids=gather(ids).reshape(-1, TOPK),
        plain_rows=jax.lax.pmax(plan.home_rows, "ep"),
        rows=rows,
        redundant=jax.lax.pmax(jnp.sum(plan.slot_expert >= 0, dtype=np.int32), "ep"),
        dropped=ids.size * RANKS - jnp.sum(rows),
    )


def dense(index: int, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Params) -> tuple[jax.Array, Any]:
    """The layer on one device: every expert computes every token, weighted 0 where not chosen. Says the ids."""
    del index
    share = jnp.sum(jax.nn.one_hot(ids, EXPERTS) * weights[..., None], axis=1)
    gate = jnp.einsum("th,ehf->tef", x, experts["gate"])
    up = jnp.einsum("th,ehf->tef", x, experts["up"])
    return jnp.einsum("tef,efh->th", jax.nn.silu(gate) * up * share[..., None], experts["down"]), ids
