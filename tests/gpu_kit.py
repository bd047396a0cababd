"""Ranks of one process on one GPU or several, launched by hand through the CUDA module: for tests and benchmarks.

Phases are launched breadth-first over the ranks, each on its own stream: a kernel that waits for its peers is never
queued before what it waits for.
"""

from __future__ import annotations

import os

# Streams that share a hardware queue would make a waiting kernel block the ones it waits for.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

KINDS = {"plan": 0, "dispatch": 1, "combine": 2, "prefetch": 3, "dispatch_grad": 4, "combine_grad": 5, "reduce_grad": 6}
PLAN_ARRAYS = ("dst_rank", "dst_row", "src", "primary", "next", "group_sizes", "group_rows", "slot_expert", "home_rows",
               "rank_rows", "ticket")  # fmt: skip
_TYPES = {"float32": 1, "float16": 2, "bfloat16": 3}
PHASES = ("begin", "send", "wait", "local")
WHOLE = 4  # all of them in one launch


def available(devices: int = 1) -> bool:
    """Whether this machine has that many GPUs, the CUDA module and cuda-python."""
    try:
        importlib.import_module("moonep_jax._ffi_cuda")
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return False
    error, count = runtime.cudaGetDeviceCount()
    return int(error) == 0 and count >= devices


def ok(result: Any) -> Any:
    """Result of a cuda-python call, or an exception with its error."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA: {error}")
    return values[0] if len(values) == 1 else tuple(values)


_peers: set[tuple[int, int]] = set()


def enable_peers(devices: Sequence[int]) -> None:
    """Lets each of these devices reach the others' memory.

    Once per pair and process: asking again is an error, which CUDA would keep for the next launch to report.
    """
    from cuda.bindings import runtime

    for device in devices:
        for peer in devices:
            if device != peer and (device, peer) not in _peers:
                ok(runtime.cudaSetDevice(device))
                ok(runtime.cudaDeviceEnablePeerAccess(peer, 0))
                _peers.add((device, peer))


class Buffer:
    """An array in the memory of a device, which this makes the current one of the thread."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, fill: int | None = 0xFF, device: int = 0) -> None:
        from cuda.bindings import runtime

        self._runtime = runtime
        ok(runtime.cudaSetDevice(device))
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize
        self.pointer = int(ok(runtime.cudaMalloc(max(self.nbytes, 1))))
        if fill is not None:
            ok(runtime.cudaMemset(self.pointer, fill, self.nbytes))

    @staticmethod
    def of(array: np.ndarray, device: int = 0) -> Buffer:
        """A copy of a host array."""
        array = np.ascontiguousarray(array)
        buffer = Buffer(array.shape, array.dtype, fill=None, device=device)
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
    """R ranks with a stream each; rank r is on devices[r % len(devices)]."""

    def __init__(
        self,
        ranks: int,
        *,
        link_blocks: int = 0,
        local_blocks: int = 0,
        timeout_s: float = 5.0,
        whole: bool = True,
        bulk: bool = True,
        devices: Sequence[int] = (0,),
        **shape: Any,
    ):
        from cuda.bindings import runtime

        from moonep_jax import _ffi_cuda

        self._runtime = runtime
        self._module = _ffi_cuda
        self._timeout_s = timeout_s
        self.shape = _ffi_cuda.DomainShape(ranks=ranks, **shape)
        self.devices = [devices[r % len(devices)] for r in range(ranks)]  # by rank
        enable_peers(devices)
        total = self.shape.chunk_bytes()["total"]
        self.chunks = [Buffer((total,), np.uint8, fill=0, device=d) for d in self.devices]
        self.streams = []
        for device in self.devices:
            ok(runtime.cudaSetDevice(device))
            self.streams.append(ok(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)))
        self.ranks = self.make_ranks(link_blocks=link_blocks, local_blocks=local_blocks, whole=whole, bulk=bulk)
        self._site = 0

    def make_ranks(self, **options: Any) -> list[Any]:
        """The ranks once more, with other options: all that calls leave behind is in the chunks, which they share."""
        self.sync_devices()  # the chunks are filled on streams of their own
        pointers = [c.pointer for c in self.chunks]
        return [
            self._module.LoopbackRank(
                shape=self.shape, rank=r, chunks=pointers, timeout_s=self._timeout_s, device=device, **options
            )
            for r, device in enumerate(self.devices)
        ]

    def launch(self, kind: str, args: list[list[Buffer]], rets: list[list[Buffer]]) -> None:
        """Enqueues one call on every rank, as a handler would; args[r] and rets[r] are rank r's buffers."""
        self._site += 1
        raw = [([b.raw for b in a], [b.raw for b in o]) for a, o in zip(args, rets, strict=True)]
        number = KINDS[kind]
        for rank, (a, o) in zip(self.ranks, raw, strict=True):
            if wrong := rank.check(number, a, o):
                raise ValueError(wrong)
        phases = [WHOLE] if self.ranks[0].whole(number, *raw[0]) else range(len(PHASES))
        for round_ in range(self.ranks[0].rounds(number, *raw[0])):
            for phase in phases:
                for r, rank in enumerate(self.ranks):
                    ok(self._runtime.cudaSetDevice(self.devices[r]))
                    rank.launch(number, *raw[r], self._site, round_, phase, int(self.streams[r]))

    def sync_devices(self) -> None:
        """Waits for all that was enqueued on the devices."""
        for device in sorted(set(self.devices)):
            ok(self._runtime.cudaSetDevice(device))
            ok(self._runtime.cudaDeviceSynchronize())

    def sync(self) -> None:
        """Waits for all streams; raises what a rank reports."""
        self.sync_devices()
        for rank in self.ranks:
            if text := rank.error():
                raise RuntimeError(text)

    def close(self) -> None:
        """Frees everything."""
        self.sync_devices()
        self.ranks.clear()
        for device, stream in zip(self.devices, self.streams, strict=True):
            ok(self._runtime.cudaSetDevice(device))
            ok(self._runtime.cudaStreamDestroy(stream))
        for chunk in self.chunks:
            chunk.free()
        ok(self._runtime.cudaSetDevice(0))
