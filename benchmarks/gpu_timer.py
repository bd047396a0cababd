"""How the GPU benchmarks measure: CUDA events on a stream, a cache flush before each run, one phase of one rank.

Allocates device memory of its own; needs the tests' gpu_kit.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import gpu_kit  # (after the path is set; it also sets CUDA_DEVICE_MAX_CONNECTIONS)
import numpy as np


class Timer:
    """Events on a stream; flushes the cache before each run."""

    def __init__(self, runs: int = 15) -> None:
        from cuda.bindings import runtime

        self._runtime, self._runs = runtime, runs
        self._flush = gpu_kit.Buffer((1 << 30,), np.uint8)
        self._events = [gpu_kit.ok(runtime.cudaEventCreate()) for _ in range(2)]

    def us(self, stream: Any, timed: Callable[[], None], before: Callable[[], None] = lambda: None,
           after: Callable[[], None] = lambda: None) -> float:  # fmt: skip
        """Median microseconds of `timed`; before and after run each time, outside the clock."""
        times = []
        for i in range(self._runs + 3):
            before()
            gpu_kit.ok(self._runtime.cudaDeviceSynchronize())
            # Flushes the cache, and keeps the stream busy while the host enqueues what is timed.
            gpu_kit.ok(self._runtime.cudaMemsetAsync(self._flush.pointer, i % 256, self._flush.nbytes, stream))
            gpu_kit.ok(self._runtime.cudaEventRecord(self._events[0], stream))
            timed()
            gpu_kit.ok(self._runtime.cudaEventRecord(self._events[1], stream))
            gpu_kit.ok(self._runtime.cudaDeviceSynchronize())
            after()
            times.append(gpu_kit.ok(self._runtime.cudaEventElapsedTime(*self._events)) * 1e3)
        return statistics.median(times[3:])

    def memcpy(self, nbytes: int) -> float:
        """Microseconds of cudaMemcpyAsync of nbytes on the device."""
        a, b = gpu_kit.Buffer((nbytes,), np.uint8), gpu_kit.Buffer((nbytes,), np.uint8)
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        run = lambda: gpu_kit.ok(self._runtime.cudaMemcpyAsync(b.pointer, a.pointer, nbytes, kind, 0))  # noqa: E731
        us = self.us(0, run)
        a.free(), b.free()
        return us

    def copy(self, nbytes: int, blocks: int) -> float:
        """Microseconds of a plain copy kernel of nbytes."""
        from moonep_jax import _ffi_cuda

        a, b = gpu_kit.Buffer((nbytes,), np.uint8), gpu_kit.Buffer((nbytes,), np.uint8)
        us = self.us(0, lambda: _ffi_cuda.copy(b.pointer, a.pointer, nbytes, blocks, 0))
        a.free(), b.free()
        return us

    def part(self, group: gpu_kit.Group, kind: str, args: list[list[gpu_kit.Buffer]], rets: list[list[gpu_kit.Buffer]],
             rank: int, part: str) -> float:  # fmt: skip
        """Microseconds of one phase of one rank, whose peers are idle meanwhile; each run is a whole call of all."""
        calls = {r: gpu_kit.Call(kind, a, o, site=1) for r, (a, o) in enumerate(zip(args, rets, strict=True))}
        at = gpu_kit.PHASES.index(part)
        before = group.prepared(calls, gpu_kit.PHASES[:at])
        timed = group.prepared({rank: calls[rank]}, (part,))
        others = group.prepared({r: call for r, call in calls.items() if r != rank}, (part,))
        rest = group.prepared(calls, gpu_kit.PHASES[at + 1 :])

        def after() -> None:
            others()
            rest()
            group.sync()

        return self.us(group.streams[rank], timed, before, after)
