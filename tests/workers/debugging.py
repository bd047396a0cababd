"""Worker of test_debug: a bit of a row is flipped on the last rank, and every process records the domain's error.

On CPUs all ranks get the text; on GPUs the last rank does, and the others name it as the one that is missing.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from cases import Shape, routing
from jax.sharding import PartitionSpec as P
from planted import flip

import moonep_jax as moonep
from workers import Context


def run(c: Context) -> None:
    mesh, ranks = c.mesh(), c.devices
    shape = Shape(ranks, 8, 3, 2 * ranks, 8)
    config = moonep.EPConfig(tokens=8, hidden=8, topk=3, experts=2 * ranks, dtype="float32", timeout_s=20.0,
                             first_call_timeout_s=60.0)  # fmt: skip
    x = c.put(np.random.default_rng(0).standard_normal((ranks * 8, 8), np.float32), mesh, P("ep"))
    ids = c.put(routing("two_hot", shape).reshape(ranks * 8, 3), mesh, P("ep"))

    def program(ep: moonep.Domain) -> Any:
        def body(x: Any, ids: Any) -> Any:
            d = ep.dispatch(x, ids)
            return ep.combine(d.plan, d.hidden)

        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))

    def clean() -> None:
        with moonep.setup(mesh, "ep", config) as ep:
            jax.block_until_ready(program(ep)(x, ids))
            ep.check()

    def corrupt() -> str:
        with moonep.setup(mesh, "ep", config) as ep, pytest.MonkeyPatch.context() as patch:
            flip(patch, "dispatch", 0, ranks - 1, (0, 1), 4)
            step = program(ep)
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"corrupt rows|missing ranks"):
                for _ in range(3):
                    jax.block_until_ready(step(x, ids))
            with pytest.raises(moonep.DomainError) as caught:
                ep.check()
            return re.sub(r"\s+", " ", str(caught.value))

    c.case("clean", clean)
    c.case("text", corrupt)
