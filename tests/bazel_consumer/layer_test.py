"""A user's test: a layer with expert parallelism on four CPU devices equals the dense one, and so do its gradients."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import unittest

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep

R, S, H, E, K = 4, 32, 16, 8, 2  # ranks, tokens per rank, hidden, experts, experts per token


class LayerTest(unittest.TestCase):
    """Every expert is one matrix; the router sends most tokens to expert 0, so rows and weights have to move."""

    def test_equals_dense(self) -> None:
        mesh = jax.make_mesh((R,), ("ep",), axis_types=(AxisType.Auto,))
        weights = {"w": ((H, H), jnp.float32)}
        config = moonep.EPConfig(tokens=S, hidden=H, topk=K, experts=E, dtype=jnp.float32, weights=weights)
        random = np.random.default_rng(0)
        x = jnp.asarray(random.normal(size=(R * S, H)), jnp.float32)
        w = jnp.asarray(random.normal(size=(E, H, H)) / 4, jnp.float32)
        ids = jnp.asarray(np.stack([random.integers(0, 2, R * S), random.integers(2, E, R * S)], 1), jnp.int32)
        scale = jnp.asarray(random.uniform(size=(R * S, K)), jnp.float32)

        with moonep.setup(mesh, "ep", config) as ep:

            def layer(x: jax.Array, ids: jax.Array, scale: jax.Array, w: jax.Array) -> jax.Array:
                d = ep.dispatch(x, ids, scale)
                experts = ep.prefetch(d.plan, {"w": w})["w"]
                return ep.combine(d.plan, jax.lax.ragged_dot(d.hidden, experts, d.group_sizes), d.weights)

            split = jax.shard_map(layer, mesh=mesh, in_specs=(P("ep"),) * 4, out_specs=P("ep"))
            loss = lambda x, scale, w: (split(x, ids, scale, w) ** 2).sum()  # noqa: E731
            value, grads = jax.block_until_ready(jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, scale, w))
            self.assertGreater(ep.stats()["moved_experts"], 0)

        dense = lambda x, scale, w: (jnp.einsum("th,tkhf,tk->tf", x, w[ids], scale) ** 2).sum()  # noqa: E731
        want, want_grads = jax.value_and_grad(dense, argnums=(0, 1, 2))(x, scale, w)
        np.testing.assert_allclose(value, want, rtol=1e-4)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), grads, want_grads)


if __name__ == "__main__":
    unittest.main()
