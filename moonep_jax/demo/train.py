"""The demo's two ways to train, with the same Adam: expert-parallel over a mesh, and densely on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import moonep_jax as moonep
from moonep_jax.demo import model

RATE, DECAY1, DECAY2, EPSILON = 6e-3, 0.9, 0.98, 1e-6

State = dict[str, Any]  # {"params", "mean", "square": trees alike, "steps": float32 []}
Step = Callable[[State, Any], tuple[State, jax.Array, list[Any]]]


def init(seed: int) -> State:
    """Parameters and Adam's moments, as NumPy arrays."""
    params = model.init(seed)
    zeros = jax.tree.map(np.zeros_like, params)
    return {"params": params, "mean": zeros, "square": zeros, "steps": np.zeros((), np.float32)}


def _adam(state: State, grads: Any) -> State:
    steps = state["steps"] + 1
    mean = jax.tree.map(lambda m, g: DECAY1 * m + (1 - DECAY1) * g, state["mean"], grads)
    square = jax.tree.map(lambda v, g: DECAY2 * v + (1 - DECAY2) * g * g, state["square"], grads)

    def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return p - RATE * (m / (1 - DECAY1**steps)) / (jnp.sqrt(v / (1 - DECAY2**steps)) + EPSILON)

    params = jax.tree.map(update, state["params"], mean, square)
    return {"params": params, "mean": mean, "square": square, "steps": steps}


def _specs(state: State) -> Any:
    """The experts' leaves are split over the ranks, all else is on each of them."""

    def spec(path: tuple[Any, ...], _: Any) -> PartitionSpec:
        return PartitionSpec("ep") if jax.tree_util.DictKey("experts") in path else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, state)


class ExpertParallel:
    """Training over a mesh whose only axis is "ep", with the domain `ep` on it."""

    def __init__(self, ep: moonep.Domain, mesh: Mesh, seed: int, skew: float):
        self._mesh = mesh
        start = init(seed)
        specs = _specs(start)
        self._state = jax.tree.map(self._place, start, specs)

        def step(state: State, text: jax.Array) -> tuple[State, jax.Array, list[model.Facts]]:
            def loss(params: Any) -> tuple[jax.Array, Any]:
                part, facts = model.loss(params, text, skew, model.expert_parallel(ep))
                return jax.lax.pmean(part, "ep"), facts

            # shard_map knows which parameters are on every rank, and sums their gradients over the ranks.
            (value, facts), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
            return _adam(state, grads), value, facts

        out = (specs, PartitionSpec(), PartitionSpec())
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, PartitionSpec("ep")), out_specs=out)
        self._step = jax.jit(mapped, donate_argnums=0)

    def _place(self, value: npt.NDArray[Any], spec: PartitionSpec) -> jax.Array:
        # Works with any number of processes: each of them gives its own devices' parts.
        return jax.make_array_from_callback(value.shape, NamedSharding(self._mesh, spec), lambda index: value[index])

    def step(self, text: npt.NDArray[np.int32]) -> tuple[float, list[model.Facts]]:
        """One step on text [SEQUENCES, length + 1]; the loss before it, and the layers' Facts as NumPy arrays."""
        self._state, loss, facts = self._step(self._state, self._place(text, PartitionSpec("ep")))
        return float(loss), jax.tree.map(np.asarray, facts)

    def params(self) -> Any:
        """All parameters as NumPy arrays, on every process. Collective."""
        everywhere = jax.jit(lambda tree: tree, out_shardings=NamedSharding(self._mesh, PartitionSpec()))
        return jax.tree.map(np.asarray, everywhere(self._state["params"]))


class Dense:
    """The same training on one device, without expert parallelism: every expert computes every token."""

    def __init__(self, seed: int, skew: float):
        self._state = jax.tree.map(jnp.asarray, init(seed))

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: State, text: jax.Array) -> tuple[State, jax.Array, list[jax.Array]]:
            def loss(params: Any) -> tuple[jax.Array, Any]:
                return model.loss(params, text, skew, model.dense)

            (value, ids), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
            return _adam(state, grads), value, ids

        self._step = step

    def step(self, text: npt.NDArray[np.int32]) -> tuple[float, list[npt.NDArray[np.int32]]]:
        """One step; the loss before it, and each layer's choices [tokens, K]."""
        self._state, loss, ids = self._step(self._state, text)
        return float(loss), jax.tree.map(np.asarray, ids)

    def params(self) -> Any:
        """All parameters as NumPy arrays."""
        return jax.tree.map(np.asarray, self._state["params"])
