"""Ranks of one process on one GPU, launched by hand through the CUDA module: what tests and benchmarks of kernels use.

Phases are launched breadth-first over the ranks, each on its own stream: a kernel that waits for its peers is never
queued before what it waits for.
"""

from __future__ import annotations

import os

# Streams that share a hardware queue would make a waiting kernel block the ones it waits for.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import copy
import dataclasses
import importlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

KINDS = {"plan": 0, "dispatch": 1, "combine": 2, "prefetch": 3, "dispatch_grad": 4, "combine_grad": 5, "reduce_grad": 6}
PLAN_ARRAYS = ("dst_rank", "dst_row", "src", "primary", "next", "group_sizes", "group_rows", "slot_expert", "home_rows",
               "rank_rows", "ticket")  # fmt: skip
# A plan's arrays among the operands of dispatch and combine_grad, and of combine and dispatch_grad.
ROUTE = ("dst_rank", "dst_row", "src", "primary", "next", "ticket")
BACK = ("dst_rank", "src", "primary", "next", "ticket")
FILL = True  # False: new memory is left as it is, but for control blocks
_TYPES = {"float32": 1, "float16": 2, "bfloat16": 3}
PHASES = ("begin", "send", "wait", "local")
WHOLE = "whole"  # all of them in one launch
Before = Callable[[str, int], None]  # (phase, rank)
_NOTHING: Before = lambda phase, rank: None  # noqa: E731


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
    """An array in device memory; `offset` bytes past an address that is a multiple of 256."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, fill: int | None = 0xFF, offset: int = 0) -> None:
        from cuda.bindings import runtime

        self._runtime = runtime
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self._base = int(ok(runtime.cudaMalloc(max(self.nbytes + offset, 1))))
        self.pointer = self._base + offset
        if fill is not None and FILL:
            self.fill(fill, self.nbytes)

    def fill(self, value: int, nbytes: int) -> None:
        """Sets the first bytes."""
        ok(self._runtime.cudaMemset(self.pointer, value, nbytes))
        self._settle()

    @staticmethod
    def of(array: np.ndarray, offset: int = 0) -> Buffer:
        """A copy of a host array."""
        buffer = Buffer(array.shape, array.dtype, fill=None, offset=offset)
        buffer.write(array)
        return buffer

    def part(self, i: int) -> Buffer:
        """The i-th of what the first axis counts: a view, which must not outlive this buffer."""
        view = copy.copy(self)
        view.shape = self.shape[1:]
        view.nbytes = self.nbytes // self.shape[0]
        view.pointer, view._base = self.pointer + i * view.nbytes, 0
        return view

    def write(self, array: np.ndarray) -> None:
        """Copies a host array in, to the beginning."""
        array = np.ascontiguousarray(array)
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        ok(self._runtime.cudaMemcpy(self.pointer, array.ctypes.data, array.nbytes, kind))
        self._settle()

    def tile(self, array: np.ndarray) -> None:
        """Fills the buffer with repeats of a host array, which crosses the bus once."""
        self.write(array)
        done, kind = array.nbytes, self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        while done < self.nbytes:
            more = min(done, self.nbytes - done)
            ok(self._runtime.cudaMemcpy(self.pointer + done, self.pointer, more, kind))
            done += more
        self._settle()

    def read(self) -> np.ndarray:
        """A copy on the host."""
        array = np.empty(self.shape, self.dtype)
        self._read(array, 0)
        return array

    def read_rows(self, rows: Iterable[int]) -> np.ndarray:
        """Copies of chosen rows of the last axis, which all axes before it number together."""
        wanted = [int(row) for row in rows]
        array = np.empty((len(wanted), self.shape[-1]), self.dtype)
        for at, row in enumerate(wanted):
            self._read(array[at], row * array[at].nbytes)
        return array

    def _settle(self) -> None:
        # Fills and copies may still be under way when they return, and the ranks' streams do not wait for this one.
        ok(self._runtime.cudaStreamSynchronize(0))

    def _read(self, into: np.ndarray, at: int) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        ok(self._runtime.cudaMemcpy(into.ctypes.data, self.pointer + at, into.nbytes, kind))

    @property
    def raw(self) -> tuple[int, list[int], int, int]:
        """What the CUDA module takes: pointer, dims, item bytes, element type."""
        return self.pointer, list(self.shape), self.dtype.itemsize, _TYPES.get(self.dtype.name, 0)

    def free(self) -> None:
        """Gives the memory back."""
        if self._base:
            ok(self._runtime.cudaFree(self._base))
            self._base = 0


class Pool:
    """Buffers of all ranks that are freed together."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._made: list[Buffer] = []

    def put(self, array: np.ndarray, offset: int = 0) -> list[Buffer]:
        """A rank's copy of each entry of the first axis."""
        made = [Buffer.of(a, offset) for a in array]
        self._made += made
        return made

    def blank(self, shape: tuple[int, ...], dtype: Any, fill: int | None = 0xFF, offset: int = 0) -> list[Buffer]:
        """A buffer for each rank; by default of NaN or -1."""
        made = [Buffer(shape, dtype, fill, offset) for _ in range(self._ranks)]
        self._made += made
        return made

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self._made:
            buffer.free()


def by_rank(buffers: Iterable[list[Buffer]]) -> list[list[Buffer]]:
    """Lists with a buffer of each rank, as a list of buffers for each rank."""
    return [list(of_rank) for of_rank in zip(*buffers, strict=True)]


@dataclasses.dataclass(frozen=True)
class Call:
    """One rank's part in a call. Ranks that belong together have the same kind, site and ticket."""

    kind: str
    args: list[Buffer]
    rets: list[Buffer]
    site: int

    @property
    def raw(self) -> tuple[list[Any], list[Any]]:
        """Operands and results as the CUDA module takes them."""
        return [b.raw for b in self.args], [b.raw for b in self.rets]


class Group:
    """R ranks on one device, with a stream each."""

    def __init__(
        self,
        ranks: int,
        *,
        link_blocks: int = 0,
        local_blocks: int = 0,
        timeout_s: float = 5.0,
        whole: bool = True,
        rounds: int = 0,
        **shape: Any,
    ):
        from cuda.bindings import runtime

        from moonep_jax import _ffi_cuda

        self._runtime = runtime
        self.shape = _ffi_cuda.DomainShape(ranks=ranks, **shape)
        parts = self.shape.chunk_bytes()
        self.chunks = [Buffer((parts["total"],), np.uint8, fill=0) for _ in range(ranks)]
        for chunk in self.chunks:
            chunk.fill(0, parts["control"])
        pointers = [c.pointer for c in self.chunks]
        self.ranks = [
            _ffi_cuda.LoopbackRank(
                shape=self.shape,
                rank=r,
                chunks=pointers,
                timeout_s=timeout_s,
                link_blocks=link_blocks,
                local_blocks=local_blocks,
                whole=whole and ranks <= 8,  # a waiting cluster per rank: more are not sure to fit on one GPU
                rounds=rounds,
            )
            for r in range(ranks)
        ]
        self.streams = [ok(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)) for _ in range(ranks)]
        self._site = 0

    def launch(self, kind: str, args: list[list[Buffer]], rets: list[list[Buffer]], before: Before = _NOTHING) -> None:
        """Enqueues one call on every rank, as a handler would; args[r] and rets[r] are rank r's buffers."""
        self._site += 1
        calls = {r: Call(kind, a, o, self._site) for r, (a, o) in enumerate(zip(args, rets, strict=True))}
        self.enqueue(calls, before=before)

    def enqueue(self, calls: dict[int, Call], phases: tuple[str, ...] | None = None, before: Before = _NOTHING) -> None:
        """Enqueues the calls of some ranks, by rank; before(phase, rank) runs before each phase of each.

        phases: by default what a handler would launch, all of them or the one that does it all.
        """
        self.prepared(calls, phases, before)()

    def prepared(
        self, calls: dict[int, Call], phases: tuple[str, ...] | None = None, before: Before = _NOTHING
    ) -> Callable[[], None]:
        """What enqueues these calls, as often as it is called, with as little work for the host as can be."""
        raw = {r: (KINDS[call.kind], *call.raw) for r, call in calls.items()}
        for r, each in raw.items():
            if wrong := self.ranks[r].check(*each):
                raise ValueError(wrong)
        rounds = max((self.ranks[r].rounds(*each) for r, each in raw.items()), default=0)
        if phases is None:
            phases = (WHOLE,) if any(self.ranks[r].whole(*each) for r, each in raw.items()) else PHASES
        numbers = {phase: number for number, phase in enumerate((*PHASES, WHOLE))}

        def run() -> None:
            for round_ in range(rounds):
                for phase in phases:
                    for r, each in raw.items():
                        before(phase, r)
                        self.ranks[r].launch(*each, calls[r].site, round_, numbers[phase], int(self.streams[r]))

        return run

    def errors(self) -> list[str]:
        """Waits for all streams; the first error that each rank knows of, or an empty text."""
        ok(self._runtime.cudaDeviceSynchronize())
        return [rank.error() for rank in self.ranks]

    def sync(self) -> None:
        """Waits for all streams; raises what a rank reports."""
        if texts := list(filter(None, self.errors())):
            raise RuntimeError(texts[0])

    def close(self) -> None:
        """Frees everything."""
        ok(self._runtime.cudaDeviceSynchronize())
        self.ranks.clear()
        for stream in self.streams:
            ok(self._runtime.cudaStreamDestroy(stream))
        for chunk in self.chunks:
            chunk.free()
