"""Ranks of one process on one GPU, launched by hand through the CUDA module: what tests and benchmarks of kernels use.

Phases are launched breadth-first over the ranks, each on its own stream: a kernel that waits for its peers is never
queued before what it waits for.
"""

from __future__ import annotations

import os

# Streams that share a hardware queue would make a waiting kernel block the ones it waits for.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import importlib
from typing import Any

import numpy as np

KINDS = {"plan": 0, "dispatch": 1, "combine": 2, "prefetch": 3, "dispatch_grad": 4, "combine_grad": 5, "reduce_grad": 6}
PLAN_ARRAYS = ("dst_rank", "dst_row", "src", "primary", "next", "group_sizes", "group_rows", "slot_expert", "home_rows",
               "rank_rows", "ticket")  # fmt: skip
_TYPES = {"float32": 1, "float16": 2, "bfloat16": 3}
PHASES = ("begin", "send", "wait", "local")


def available() -> bool:
    """Whether this machine has a GPU, the CUDA module and cuda-python."""
    try:
        importlib.import_module("moonep_jax._ffi_cuda")
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return False
    error, count = runtime.cudaGetDeviceCount()
    return int(error) == 0 and count > 0


def ok(result: Any) -> Any:
    """Result of a cuda-python call, or an exception with its error."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA: {error}")
    return values[0] if len(values) == 1 else tuple(values)


class Buffer:
    """An array in device memory."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, fill: int | None = 0xFF) -> None:
        from cuda.bindings import runtime

        self._runtime = runtime
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize
        self.pointer = int(ok(runtime.cudaMalloc(max(self.nbytes, 1))))
        if fill is not None:
            ok(runtime.cudaMemset(self.pointer, fill, self.nbytes))

    @staticmethod
    def of(array: np.ndarray) -> Buffer:
        """A copy of a host array."""
        array = np.ascontiguousarray(array)
        buffer = Buffer(array.shape, array.dtype, fill=None)
        buffer.write(array)
        return buffer

    def write(self, array: np.ndarray) -> None:
        """Copies a host array in."""
        array = np.ascontiguousarray(array)
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        ok(self._runtime.cudaMemcpy(self.pointer, array.ctypes.data, array.nbytes, kind))

    def read(self) -> np.ndarray:
        """A copy on the host."""
        array = np.empty(self.shape, self.dtype)
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        ok(self._runtime.cudaMemcpy(array.ctypes.data, self.pointer, self.nbytes, kind))
        return array

    @property
    def raw(self) -> tuple[int, list[int], int, int]:
        """What the CUDA module takes: pointer, dims, item bytes, element type."""
        return self.pointer, list(self.shape), self.dtype.itemsize, _TYPES.get(self.dtype.name, 0)

    def free(self) -> None:
        """Gives the memory back."""
        if self.pointer:
            ok(self._runtime.cudaFree(self.pointer))
            self.pointer = 0


class Group:
    """R ranks on one device, with a stream each."""

    def __init__(
        self, ranks: int, *, link_blocks: int = 0, local_blocks: int = 0, timeout_s: float = 5.0, **shape: Any
    ):
        from cuda.bindings import runtime

        from moonep_jax import _ffi_cuda

        self._runtime = runtime
        self.shape = _ffi_cuda.DomainShape(ranks=ranks, **shape)
        total = self.shape.chunk_bytes()["total"]
        self.chunks = [Buffer((total,), np.uint8, fill=0) for _ in range(ranks)]
        pointers = [c.pointer for c in self.chunks]
        self.ranks = [
            _ffi_cuda.LoopbackRank(self.shape, r, pointers, timeout_s, 0, link_blocks, local_blocks)
            for r in range(ranks)
        ]
        self.streams = [ok(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)) for _ in range(ranks)]
        self._site = 0

    def launch(
        self, kind: str, args: list[list[Buffer]], rets: list[list[Buffer]], phases: tuple[str, ...] = PHASES
    ) -> None:
        """Enqueues one call on every rank; args[r] and rets[r] are rank r's buffers."""
        self._site += 1
        raw = [([b.raw for b in a], [b.raw for b in o]) for a, o in zip(args, rets, strict=True)]
        number = KINDS[kind]
        for rank, (a, o) in zip(self.ranks, raw, strict=True):
            if wrong := rank.check(number, a, o):
                raise ValueError(wrong)
        for round_ in range(self.ranks[0].rounds(number, *raw[0])):
            for phase in phases:
                for rank, (a, o), stream in zip(self.ranks, raw, self.streams, strict=True):
                    rank.launch(number, a, o, self._site, round_, PHASES.index(phase), int(stream))

    def sync(self) -> None:
        """Waits for all streams; raises what a rank reports."""
        ok(self._runtime.cudaDeviceSynchronize())
        for rank in self.ranks:
            if text := rank.error():
                raise RuntimeError(text)

    def close(self) -> None:
        """Frees everything."""
        ok(self._runtime.cudaDeviceSynchronize())
        self.ranks.clear()
        for stream in self.streams:
            ok(self._runtime.cudaStreamDestroy(stream))
        for chunk in self.chunks:
            chunk.free()
