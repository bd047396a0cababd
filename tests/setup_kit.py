"""`setup` itself in every process of a simulated job: a thread per process, one key-value store, real memfds.

The processes share one native module, whose registry knows ranks by their devices: a domain of such a job can even run
steps. Everything that a process says to others or hears from them passes through hooks.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from memory_kit import in_threads, listening, open_fds

import moonep_jax as moonep
from moonep_jax import backends, domain, env, exchange, native, records
from moonep_jax.memory import fds
from moonep_jax.stores import InProcessStore

# The steps of a setup on CPUs, in order: test_hostile checks that it is so.
STEPS = (
    "check the arguments", "hosts", "compare the meshes", "compare the configs", "domain id", "check the memory",
    "tokens", "choose the handle kind", "create the chunks", "handles", "check the handles", "import the chunks",
    "start",
)  # fmt: skip
CONFIG: dict[str, Any] = {"tokens": 4, "hidden": 8, "topk": 2, "experts": 12, "dtype": "float32"}
# (process, step, sender, record) -> the record that is stored or read instead; may raise
Hook = Callable[[int, str, int, bytes], bytes]
Change = Callable[[bytes], bytes]  # of a record or a payload


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "cpu"


def mesh(owners: Sequence[int], names: Sequence[str] = ("ep",), shape: Sequence[int] = (), first: int = 0,
         platform: str = "cpu") -> jax.sharding.Mesh:  # fmt: skip
    """A mesh of simulated devices; owners[i] is the process of device first + i."""
    devices = np.empty(len(owners), dtype=object)
    devices[:] = [Device(first + i, p, platform) for i, p in enumerate(owners)]
    return jax.sharding.Mesh(devices.reshape(tuple(shape) or (len(owners),)), tuple(names))


def payload_of(record: bytes) -> bytes:
    return record[24 + int.from_bytes(record[10:12], "little") :]


def with_payload(record: bytes, payload: bytes) -> bytes:
    """A well-formed record of the same step and sender."""
    name = record[24 : 24 + int.from_bytes(record[10:12], "little")].decode()
    return records.pack(name, int.from_bytes(record[12:16], "little"), payload)


def at(step: str, change: Change, *, reader: int | None = None, sender: int = 1) -> Hook:
    """A hook that changes one sender's record of one step, for one reader or for all."""

    def hook(process: int, name: str, who: int, record: bytes) -> bytes:
        hit = (name, who) == (step, sender) and reader in (None, process)
        return change(record) if hit else record

    return hook


def put(offset: int, data: bytes) -> Change:
    """Changes bytes at an offset."""
    return lambda r: r[:offset] + data + r[offset + len(data) :]


class View:
    """One process's view of the job's store."""

    def __init__(self, job: Job, process: int) -> None:
        self._job, self._process = job, process

    @property
    def _store(self) -> InProcessStore:
        if self._process in self._job.gone:
            raise moonep.SetupError("setup: the store is gone; got UNAVAILABLE, expected success; see process 0")
        return self._job.store

    def _place(self, key: str) -> tuple[str, int] | None:
        """Step and sender of a key of a setup (not of close)."""
        *name, step, sender = key.split("/")
        if len(name) == 3 and step.isdigit() and not name[2].endswith("-close"):
            return STEPS[int(step)], int(sender)
        return None

    def set(self, key: str, value: bytes) -> bool:
        if place := self._place(key):
            self._job.seen.append((self._process, value[24:][: int.from_bytes(value[10:12], "little")].decode()))
            for hook in self._job.on_set:
                value = hook(self._process, *place, value)
        elif key.endswith("/abort") and self._job.abort is not None:
            value = self._job.abort
        return self._store.set(key, value)

    def _read(self, key: str, value: bytes) -> bytes:
        if place := self._place(key):
            for hook in self._job.on_get:
                value = hook(self._process, *place, value)
        return value

    def get(self, key: str, timeout_s: float) -> bytes:
        return self._read(key, self._store.get(key, timeout_s))

    def try_get(self, key: str) -> bytes | None:
        try:
            value = self._store.try_get(key)
            return None if value is None else self._read(key, value)
        except TimeoutError:  # a hook that hides the key
            return None

    def barrier(self, name: str, participants: Sequence[int], timeout_s: float) -> None:
        self._store.barrier(name, participants, timeout_s)

    def delete(self, prefix: str) -> None:
        self._store.delete(prefix)


class Native:
    """The native module of all processes: counts mappings, and stops a domain for one of them at a time."""

    def __init__(self, module: Any) -> None:
        self._module, self._lock = module, threading.Lock()
        self.live: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def map_fd(self, fd: int, nbytes: int) -> int:
        address = self._module.map_fd(fd, nbytes)
        self.live.add(address)
        return address

    def unmap(self, address: int, nbytes: int) -> None:
        self.live.remove(address)
        self._module.unmap(address, nbytes)

    def stop(self, number: int, together: bool) -> None:
        with self._lock:  # the first one stops all ranks; nobody may unmap before that is done
            self._module.stop(number, together)


class Job:
    """A job of processes, each with ranks on devices of one mesh. Use `make_job`."""

    def __init__(self, owners: Sequence[int], timeout_s: float = 10.0) -> None:
        self.owners, self.processes = tuple(owners), sorted(set(owners))
        self.store = InProcessStore()
        self.native = Native(native.module("cpu"))
        self.local = threading.local()
        self.counts: defaultdict[Any, int] = defaultdict(int)
        self.fetched: list[tuple[int, Any]] = []  # (process, record) of each import that was begun
        self.missed = False  # whether a process did not come: it may still find out why the others gave up
        self.ran = False  # whether JAX ran something, for which it may start threads that stay
        self.seen: list[tuple[int, str]] = []  # (process, step) of each record that was sent
        self.env = env.Env(setup_timeout_s=timeout_s)
        self.calm()

    def calm(self) -> None:
        """Takes everything hostile away."""
        self.on_set: list[Hook] = []
        self.on_get: list[Hook] = []
        self.gone: set[int] = set()  # processes for which the store fails in every call
        self.abort: bytes | None = None  # what is stored instead of any reason to give up
        self.transports = fds.TRANSPORTS
        self.mesh = {p: mesh(self.owners) for p in self.processes}
        self.axis: dict[int, Any] = dict.fromkeys(self.processes, "ep")
        self.config = {p: dict(CONFIG) for p in self.processes}
        self.env_of: dict[int, env.Env] = dict.fromkeys(self.processes, self.env)
        self.evil_fd: Callable[[int, Any], int] | None = None  # (chunk's fd, Chunk) -> what process 1 exports instead

    @property
    def process(self) -> int:
        return self.local.process

    def namespace(self, participants: Sequence[int]) -> str:
        key = (self.process, *participants)
        self.counts[key] += 1
        return f"moonep/{'.'.join(map(str, participants))}/{self.counts[key] - 1}"

    def setup(self) -> dict[int, Any]:
        """setup in every process: domains or exceptions."""

        def run(p: int) -> Any:
            return moonep.setup(self.mesh[p], self.axis[p], moonep.EPConfig(**self.config[p]))

        return self.each(run)

    def each(self, body: Callable[[int], Any]) -> dict[int, Any]:
        """body in every process's thread: results or exceptions."""

        def run(p: int) -> Any:
            self.local.process = p
            return body(p)

        return in_threads(self.processes, run)

    def close(self, domains: dict[int, moonep.Domain]) -> None:
        assert self.each(lambda p: domains[p].close()) == dict.fromkeys(self.processes)

    def works(self, domains: dict[int, Any]) -> None:
        """Every process has a domain, and all of them map the same memory for a rank."""
        assert all(isinstance(d, moonep.Domain) for d in domains.values()), domains
        inodes = {p: _inodes(d._shared.address) for p, d in domains.items()}
        assert len({tuple(sorted(i.items())) for i in inodes.values()}) == 1, inodes
        assert len({i for table in inodes.values() for i in table.values()}) == len(self.owners)
        assert len(self.native.live) == len(self.owners) * len(self.processes)

    def clean_setup(self) -> None:
        """What must work whatever happened before."""
        self.calm()
        domains = self.setup()
        self.works(domains)
        self.close(domains)


def _inodes(address: dict[tuple[int, int], int]) -> dict[tuple[int, int], str]:
    """(group, rank) -> inode of the memory mapped there."""
    rows = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    at = {int(row[0].split("-")[0], 16): row[4] for row in rows}
    return {place: at[where] for place, where in address.items()}


def traces() -> dict[str, Any]:
    """What a setup may leave behind in this process."""
    maps = Path("/proc/self/maps").read_text()
    return {
        "fds": open_fds(),
        "maps": maps.count("/memfd:moonep"),
        # Not those of others that have called Python once: they come and go.
        "threads": sorted(t.name for t in threading.enumerate() if not isinstance(t, threading._DummyThread)),
        "tasks": len(os.listdir("/proc/self/task")),
        "listening": listening(),
        "shm": sorted(os.listdir("/dev/shm")),
    }


@contextmanager
def job_of(owners: Sequence[int], monkeypatch: pytest.MonkeyPatch, timeout_s: float = 10.0) -> Iterator[Job]:
    """A job; what setup asks the process it runs in, the job answers. Nothing may be left at the end."""
    job = Job(owners, timeout_s)
    fetch, create = fds.fetch, backends.HostMemory.create

    def fetched(record: Any, *args: Any, **kwargs: Any) -> int:
        job.fetched.append((job.process, record))
        return fetch(record, *args, transports=job.transports, **kwargs)

    def created(self: Any, chunk: Any, kind: Any, device: int, devices: Any, transient: Any) -> Any:
        mapped, handle = create(self, chunk, kind, device, devices, transient)
        if job.evil_fd and job.process == 1:
            try:
                handle = job.evil_fd(handle, chunk)
            except BaseException:
                mapped.unmap()
                raise
        return mapped, handle

    monkeypatch.setattr(exchange, "_SLICE_S", 0.02)
    monkeypatch.setattr(exchange, "_GRACE_S", 1.0)
    monkeypatch.setattr(jax, "process_index", lambda: job.process)
    monkeypatch.setattr(native, "module", lambda platform: job.native)
    monkeypatch.setattr(domain, "open_store", lambda participants, *_: View(job, job.process))
    monkeypatch.setattr(domain, "namespace", job.namespace)
    monkeypatch.setattr(env, "read", lambda: job.env_of[job.process])
    monkeypatch.setattr(fds, "fetch", fetched)
    monkeypatch.setattr(backends.HostMemory, "create", created)
    before = traces()
    yield job
    assert not job.native.live
    deadline = time.monotonic() + 5
    while (after := traces()) != before and time.monotonic() < deadline:
        time.sleep(0.05)  # threads that end
    tasks = after.pop("tasks"), before.pop("tasks")
    assert after == before and (job.ran or tasks[0] <= tasks[1]), (after, before, tasks)
    left = job.store.keys()
    assert [k for k in left if not (job.missed and k.endswith("/abort"))] == []


def refused(results: dict[int, Any], *parts: str) -> str:
    """The text of the SetupError that all processes raised alike, with all parts in it."""
    assert all(isinstance(r, moonep.SetupError) for r in results.values()), results
    texts = {str(r) for r in results.values()}
    assert len(texts) == 1, "\n".join(texts)
    text = texts.pop()
    assert text.startswith("setup: ") and "; got " in text and ", expected " in text and text.count("; ") >= 2, text
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"
    return text
