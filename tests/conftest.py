"""Settings for all tests: 16 CPU devices, poisoned buffers, strict JAX; domains that tests make are closed."""

import os

# Before the first import of jax: these are read once.
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=16".strip()
os.environ["MOONEP_POISON"] = "1"

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import moonep_jax as moonep

jax.config.update("jax_numpy_rank_promotion", "raise")


def make_mesh(
    shape: tuple[int, ...], names: tuple[str, ...], axis_type: AxisType = AxisType.Auto, first: int = 0
) -> jax.sharding.Mesh:
    """A mesh over CPU devices first, first + 1, ..."""
    count = int(np.prod(shape))
    devices = np.array(jax.devices()[first : first + count]).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(axis_type,) * len(names))


@pytest.fixture
def make_domain() -> Iterator[Callable[..., moonep.Domain]]:
    """Factory of domains: make_domain(mesh_or_ranks, axis="ep", **config fields); all are closed at the end."""
    domains: list[moonep.Domain] = []

    def make(mesh: jax.sharding.Mesh | int, axis: str | tuple[str, ...] = "ep", **fields: Any) -> moonep.Domain:
        if isinstance(mesh, int):
            mesh = make_mesh((mesh,), ("ep",))
        domains.append(moonep.setup(mesh, axis, moonep.EPConfig(**fields)))
        return domains[-1]

    yield make
    for domain in reversed(domains):
        with contextlib.suppress(moonep.DomainError):  # tests of errors
            domain.close()
