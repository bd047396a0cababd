"""Ranks of one process, launched by hand and timed: what benchmarks/nvlink.py measures with.

A rank has a GPU to itself, or shares one where there are fewer, which shows that a benchmark runs and times no link.
CUDA events around the launches on each rank's stream; the streams start together and the slowest rank counts. Uses
tests/gpu_kit.py; starts nothing when it is imported, but must be imported before CUDA starts.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Kernels are loaded at once: to load one while another waits for a peer could wait for that one.
os.environ["CUDA_MODULE_LOADING"] = "EAGER"
# Multicast is the whole host's; nothing here uses it, and nothing that is loaded beside it shall.
os.environ.update({"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"})
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import gpu_kit  # (after the path is set; it also sets CUDA_DEVICE_MAX_CONNECTIONS)
import numpy as np

PHASES = (0, 1, 2, 3)  # begin, send, wait, local
WHOLE = 4  # all of them in one launch
WARM = 2  # runs of each variant that do not count
_FLUSH_BYTES = 1 << 30


class Hand(NamedTuple):
    """Which options a rank is launched with: SMs of kernels that use the link, 0: the library's choice; rounds of rows,
    0: by their bytes.
    """

    sms: int
    rounds: int = 0


def _nothing() -> None:
    pass


@dataclasses.dataclass
class Variant:
    """One thing to time: launches on the ranks' streams, by the clocks of `ranks` (None: all of them); the rest is
    outside the clock.
    """

    timed: Callable[[], None]
    before: Callable[[], None] = _nothing
    after: Callable[[], None] = _nothing
    ranks: tuple[int, ...] | None = None


class Clock:
    """A stream and events for each rank, on devices that reach each other's memory. One per process."""

    def __init__(self, ranks: int | None = None) -> None:
        """ranks: as many as there are devices, unless given."""
        from cuda.bindings import runtime

        self.runtime = runtime
        devices = gpu_kit.ok(runtime.cudaGetDeviceCount())
        self.ranks = tuple(range(ranks or devices))
        self.device = [r % devices for r in self.ranks]
        self.streams: list[Any] = []
        self._events: list[list[Any]] = []
        self._flush: dict[int, gpu_kit.Buffer] = {}
        for rank, device in enumerate(self.device):
            self.on(rank)
            if device not in self._flush:
                for peer in set(self.device) - {device}:
                    gpu_kit.ok(runtime.cudaDeviceEnablePeerAccess(peer, 0))
                self._flush[device] = gpu_kit.Buffer((_FLUSH_BYTES,), np.uint8)
            self.streams.append(gpu_kit.ok(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)))
            self._events.append([gpu_kit.ok(runtime.cudaEventCreate()) for _ in range(3)])  # ready, start, end

    def on(self, rank: int) -> None:
        """Makes a rank's device the current one."""
        gpu_kit.ok(self.runtime.cudaSetDevice(self.device[rank]))

    def sync(self) -> None:
        """Waits for all devices."""
        for device in self._flush:
            gpu_kit.ok(self.runtime.cudaSetDevice(device))
            gpu_kit.ok(self.runtime.cudaDeviceSynchronize())

    def copy(
        self, to: Sequence[gpu_kit.Buffer], peer: int, source: Sequence[gpu_kit.Buffer], rank: int, n: int
    ) -> None:
        """Enqueues a copy of n bytes of a rank's buffer to a peer's by a copy engine, on the rank's stream."""
        self.on(rank)
        args = to[peer].pointer, self.device[peer], source[rank].pointer, self.device[rank], n, self.streams[rank]
        gpu_kit.ok(self.runtime.cudaMemcpyPeerAsync(*args))

    def _record(self, which: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.on(rank)
            gpu_kit.ok(self.runtime.cudaEventRecord(self._events[rank][which], self.streams[rank]))

    def _start_together(self, flushes: int) -> None:
        """Flushes the caches, which keeps the streams busy while the host enqueues what is timed; then all go on."""
        for device, buffer in self._flush.items():
            gpu_kit.ok(self.runtime.cudaSetDevice(device))
            stream = self.streams[self.device.index(device)]
            for turn in range(flushes):
                gpu_kit.ok(self.runtime.cudaMemsetAsync(buffer.pointer, turn + 1, buffer.nbytes, stream))
        self._record(0, self.ranks)
        for rank in self.ranks:
            self.on(rank)
            for peer in self.ranks:
                if peer != rank:
                    gpu_kit.ok(self.runtime.cudaStreamWaitEvent(self.streams[rank], self._events[peer][0], 0))

    def measure(self, variants: dict[str, Variant], runs: int, flushes: int = 2) -> dict[str, list[float]]:
        """Microseconds of each run of each variant, which take turns."""
        times: dict[str, list[float]] = {name: [] for name in variants}
        for run in range(WARM + runs):
            for name, v in variants.items():
                ranks = self.ranks if v.ranks is None else v.ranks
                v.before()
                self.sync()
                self._start_together(flushes)
                self._record(1, ranks)
                v.timed()
                self._record(2, ranks)
                self.sync()
                us = [gpu_kit.ok(self.runtime.cudaEventElapsedTime(*self._events[r][1:])) * 1e3 for r in ranks]
                v.after()
                if run >= WARM:
                    times[name].append(max(us))
        return times


class Ranks:
    """All ranks with buffers. `hands` are the ranks with different options, all on the same chunks: what calls leave
    behind is there.
    """

    def __init__(self, clock: Clock, hands: Sequence[Hand], **shape: Any) -> None:
        from moonep_jax import _ffi_cuda

        self.clock = clock
        self.shape = _ffi_cuda.DomainShape(ranks=len(clock.ranks), **shape)
        self._made: list[gpu_kit.Buffer] = []
        chunks = self.new((self.shape.chunk_bytes()["total"],), np.uint8, fill=0)
        clock.sync()
        self.hands = {
            h: [
                _ffi_cuda.LoopbackRank(
                    shape=self.shape,
                    rank=r,
                    chunks=[c.pointer for c in chunks],
                    timeout_s=5.0,
                    device=clock.device[r],
                    link_blocks=h.sms,
                    rounds=h.rounds,
                )
                for r in clock.ranks
            ]
            for h in hands
        }

    def new(self, shape: tuple[int, ...], dtype: Any, fill: int = 0x3C) -> list[gpu_kit.Buffer]:
        """A buffer per rank; full of small numbers, unless told otherwise."""
        return [self._on(r, lambda: gpu_kit.Buffer(shape, dtype, fill=fill)) for r in self.clock.ranks]

    def put(self, arrays: Sequence[np.ndarray]) -> list[gpu_kit.Buffer]:
        """Copies of an array per rank."""
        return [self._on(r, lambda: gpu_kit.Buffer.of(arrays[r])) for r in self.clock.ranks]

    def alike(self, array: np.ndarray) -> list[gpu_kit.Buffer]:
        """Copies of an array on all ranks."""
        return self.put([array] * len(self.clock.ranks))

    def _on(self, rank: int, make: Callable[[], gpu_kit.Buffer]) -> gpu_kit.Buffer:
        self.clock.on(rank)
        self._made.append(make())
        return self._made[-1]

    def check(self) -> None:
        """Waits, and raises what a rank reports."""
        self.clock.sync()
        for rank in (rank for ranks in self.hands.values() for rank in ranks):
            if text := rank.error():
                raise RuntimeError(text)

    def close(self) -> None:
        """Frees all."""
        self.clock.sync()
        self.hands.clear()
        for buffer in self._made:
            buffer.free()


class Call:
    """One call of all ranks; args and rets: lists of a buffer per rank."""

    def __init__(self, of: Ranks, kind: str, args: list[list[gpu_kit.Buffer]], rets: list[list[gpu_kit.Buffer]]):
        self._of, self._kind = of, gpu_kit.KINDS[kind]
        self._raw = [([b[r].raw for b in args], [b[r].raw for b in rets]) for r in of.clock.ranks]
        for ranks in of.hands.values():
            for rank, raw in zip(ranks, self._raw, strict=True):
                if wrong := rank.check(self._kind, *raw):
                    raise ValueError(wrong)

    def launch(self, hand: Hand, phases: Sequence[int] = PHASES, who: Sequence[int] | None = None) -> None:
        """Enqueues phases of all rounds on ranks, phase by phase: what a kernel waits for is never behind it."""
        clock, ranks = self._of.clock, self._of.hands[hand]
        for round_ in range(ranks[0].rounds(self._kind, *self._raw[0])):
            for phase in phases:
                for r in clock.ranks if who is None else who:
                    clock.on(r)
                    ranks[r].launch(self._kind, *self._raw[r], 1, round_, phase, int(clock.streams[r]))

    def one_launch(self, hand: Hand) -> bool:
        """Whether the call is so small that one launch makes it."""
        return all(rank.whole(self._kind, *raw) for rank, raw in zip(self._of.hands[hand], self._raw, strict=True))

    def send(self, hand: Hand, who: tuple[int, ...] | None = None) -> Variant:
        """The send kernels of some ranks alone; of a call in one round."""
        others = [] if who is None else [r for r in self._of.clock.ranks if r not in who]

        def after() -> None:
            self.launch(hand, (1,), others)
            self.launch(hand, (2, 3))
            self._of.check()

        return Variant(lambda: self.launch(hand, (1,), who), lambda: self.launch(hand, (0,)), after, who)

    def whole(self, hand: Hand) -> Variant:
        """All kernels of all ranks."""
        return Variant(lambda: self.launch(hand), after=self._of.check)


class Graphs:
    """A sequence of calls, `repeats` times, captured once for each rank."""

    def __init__(self, of: Ranks, hand: Hand, calls: Sequence[tuple[Call, Sequence[int]]], repeats: int) -> None:
        self._of = of
        runtime, clock = of.clock.runtime, of.clock
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._replays: list[Any] = []
        for r in clock.ranks:
            clock.on(r)
            gpu_kit.ok(runtime.cudaStreamBeginCapture(clock.streams[r], mode))
            for _ in range(repeats):
                for call, phases in calls:
                    call.launch(hand, phases, (r,))
            graph = gpu_kit.ok(runtime.cudaStreamEndCapture(clock.streams[r]))
            self._replays.append(gpu_kit.ok(runtime.cudaGraphInstantiate(graph, 0)))
            gpu_kit.ok(runtime.cudaGraphDestroy(graph))
            gpu_kit.ok(runtime.cudaGraphUpload(self._replays[r], clock.streams[r]))

    def variant(self) -> Variant:
        """A replay on all ranks."""
        clock = self._of.clock

        def timed() -> None:
            for r in clock.ranks:
                clock.on(r)
                gpu_kit.ok(clock.runtime.cudaGraphLaunch(self._replays[r], clock.streams[r]))

        return Variant(timed, after=self._of.check)

    def close(self) -> None:
        """Frees them."""
        for r in self._of.clock.ranks:
            self._of.clock.on(r)
            gpu_kit.ok(self._of.clock.runtime.cudaGraphExecDestroy(self._replays[r]))
