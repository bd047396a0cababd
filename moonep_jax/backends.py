"""What setup does differently on CPUs and on GPUs: native module, memory, device numbers, limits. One class each.

Imports native, memory and config; allocates nothing by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from moonep_jax import env, native
from moonep_jax.config import EPConfig
from moonep_jax.errors import ConfigError, message
from moonep_jax.memory import cuda, driver
from moonep_jax.memory.backend import Backend as MemoryBackend
from moonep_jax.memory.host import HostMemory
from moonep_jax.topology import Member

_STAGE_ALIGN = 64  # bytes; least share of the stage per expert


class Backend(Protocol):
    """What `setup` needs of a platform."""

    module: Any  # the native module: DomainShape, add_rank, error, fail, executed, counters, stop(domain, together)
    memory: MemoryBackend

    def device_number(self, member: Member) -> int:
        """The number by which XLA tells a handler this device."""
        ...

    def options(self, config: EPConfig) -> dict[str, Any]:
        """Arguments of add_rank that other platforms do not have."""
        ...


class CpuBackend:
    """Shared host memory, progress threads."""

    def __init__(self, variables: env.Env) -> None:
        self.module = native.module("cpu")
        self.memory: MemoryBackend = HostMemory(self.module)
        self._variables = variables

    def device_number(self, member: Member) -> int:
        """XLA:CPU gives handlers the global device id."""
        return member.device_id

    def options(self, config: EPConfig) -> dict[str, Any]:
        """Test settings."""
        v = self._variables
        return {"poison": v.poison, "delay_us": v.delay_us, "delay_seed": v.delay_seed}


class GpuBackend:
    """CUDA virtual memory, kernels."""

    def __init__(self, devices: Iterable[Any], process_index: int) -> None:
        self.module = native.module("gpu")
        self._ordinals = cuda.ordinals(devices, process_index)
        self.memory: MemoryBackend = cuda.CudaMemory(driver.load(), self._ordinals)

    def device_number(self, member: Member) -> int:
        """XLA:GPU gives handlers the ordinal among the process's devices."""
        return self._ordinals[member.device_id]

    def options(self, config: EPConfig) -> dict[str, Any]:
        """Grids; 0 is the library's choice."""
        return {
            "link_blocks": config.num_sms or 0,
            "local_blocks": config.local_sms or 0,
        }


def make(platform: str, devices: Iterable[Any], process_index: int, variables: env.Env) -> Backend:
    """The backend for devices of a platform. Raises ConfigError when there is none here."""
    native.module(platform)  # says what is missing
    return CpuBackend(variables) if platform == "cpu" else GpuBackend(devices, process_index)


def domain_shape(backend: Backend, config: EPConfig, ranks: int) -> Any:
    """The native DomainShape. Raises ConfigError for what the backend cannot hold."""
    epn = config.experts_per_rank(ranks)
    config.limits_check(ranks)
    sizes = {"ranks": ranks, "experts": config.experts, "topk": config.topk, "leaves": len(config.weights)}
    for name, most in backend.module.limits().items():
        if (got := sizes[name]) > most:
            fix = "use a smaller one"
            raise ConfigError(message("setup", f"too many {name} for this backend", got, f"at most {most}", fix))
    stage = epn * config.expert_bytes
    if config.stage_bytes is not None and config.stage_bytes < stage:
        stage = config.stage_bytes
        if stage < epn * _STAGE_ALIGN:
            fix = f"raise stage_bytes to {_STAGE_ALIGN} per own expert or more"
            raise ConfigError(message("setup", "stage_bytes too small", stage, epn * _STAGE_ALIGN, fix))
    return backend.module.DomainShape(
        ranks=ranks,
        experts=config.experts,
        topk=config.topk,
        tokens=config.tokens,
        padding=config.token_padding,
        home=config.planner == "home",
        exact=config.combine == "exact",
        hidden=config.hidden,
        row_bytes=config.hidden * np.dtype(config.dtype).itemsize,
        stage_bytes=stage,
    )
