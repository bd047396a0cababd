"""share(): the collective part of symmetric memory, the same for every kind of memory (`Backend`).

check room -> choose the handle kind -> create and export -> gather and check handles -> import and map. Each step ends
in a vote, so that a failure anywhere is the same SetupError everywhere and frees everything.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Final, Literal

from moonep_jax.env import Env
from moonep_jax.errors import SetupError, message
from moonep_jax.exchange import Exchange
from moonep_jax.handles import RECORD_BYTES, HandleRecord, decode, namespace_digest
from moonep_jax.memory import fds
from moonep_jax.memory.backend import Backend, Chunk, Export, Fetch, accept, offer
from moonep_jax.memory.hosts import HostInfo
from moonep_jax.memory.trial import choose_kinds
from moonep_jax.topology import Group, Member, Topology

_log = logging.getLogger("moonep_jax")

SharedBy = Literal["local", "fd", "fabric"]
_TOKEN_BYTES: Final = 16


class SharedMemory:
    """The chunks of all groups that have a member in this process, mapped once each.

    Attributes: nbytes: size of a chunk. address: (group, rank) -> address in this process, of every rank that owns one.
    """

    def __init__(self, nbytes: int, kinds: Mapping[int, SharedBy]) -> None:
        self.nbytes = nbytes
        self.address: dict[tuple[int, int], int] = {}
        self._kinds = dict(kinds)
        # Exit stacks run every step even if one raises, and only once.
        self._own, self._peers = ExitStack(), ExitStack()

    def kind_of(self, group: int) -> SharedBy:
        """How a group's chunks are shared: "local" when all its members are in this process."""
        return self._kinds[group]

    def add(self, group: int, rank: int, address: int, unmap: Callable[[], None], *, own: bool) -> None:
        """Takes over a mapping, which `unmap` undoes."""
        stack = self._own if own else self._peers
        self.address[group, rank] = address
        stack.callback(unmap)
        stack.callback(self.address.pop, (group, rank))

    def unmap_peers(self) -> None:
        """Unmaps the chunks of other processes. Idempotent."""
        self._peers.close()

    def free(self) -> None:
        """Unmaps everything; own chunks are freed once no peer maps them either. Idempotent."""
        try:
            self.unmap_peers()
        finally:
            self._own.close()


def share(
    exchange: Exchange,
    topology: Topology,
    process_index: int,
    nbytes: int,
    backend: Backend,
    env: Env,
    hosts: Mapping[int, HostInfo],
    *,
    owners: Collection[int] | None = None,
    fetch: Fetch | None = None,
) -> SharedMemory:
    """Creates and maps one zeroed chunk of nbytes per owner. Collective over the topology's processes.

    Args: hosts: from gather_hosts. owners: the ranks of every group that own a chunk, the same on all processes; None:
    all ranks. fetch: replaced in tests only.

    Every process maps every chunk of its groups. A group within one process exports nothing. A failure anywhere frees
    everything and raises the same SetupError in every process.
    """
    fetch = functools.partial(fds.fetch, validate=backend.validate_fd) if fetch is None else fetch
    ranks = frozenset(range(topology.ranks) if owners is None else owners)

    def places(p: int) -> list[tuple[Group, Member]]:
        return [(g, m) for g, m in topology.local(p) if m.rank in ranks]

    def devices(group: Group) -> list[int]:
        return [m.device_id for m in group.devices if m.process_index == process_index]

    def check() -> None:
        if not ranks or not ranks <= set(range(topology.ranks)):
            fix = "name at least one rank of the group"
            raise SetupError(message("setup", "bad owners", sorted(ranks), f"ranks 0 to {topology.ranks - 1}", fix))
        on_host = sum(len(places(p)) for p in topology.processes if hosts[p] == hosts[process_index])
        backend.check_room(nbytes, [m.device_id for _, m in places(process_index)], on_host)

    exchange.guarded("check the memory", check)
    # Namespaces are the same in every job. What binds records, sockets and memory to this setup is in no other.
    tokens = exchange.all_gather("tokens", secrets.token_bytes(_TOKEN_BYTES), _parse_token)
    name = f"{exchange.namespace}/{hashlib.sha256(b''.join(tokens.values())).hexdigest()}"
    digest = namespace_digest(name)
    kinds = choose_kinds(exchange, name, topology, process_index, backend, env, hosts, fetch)
    local = {g.index for g, _ in topology.local(process_index)}
    shared = SharedMemory(nbytes, {g: kinds.get(g, "local") for g in sorted(local)})

    def export() -> bytes:
        exports: list[Export] = []
        for g, m in places(process_index):
            chunk, kind = Chunk(digest, g.index, m.rank, nbytes), kinds.get(g.index)
            mapped, handle = backend.create(chunk, kind, m.device_id, devices(g), transient)
            shared.add(g.index, m.rank, *mapped, own=True)
            if kind is not None and handle is not None:
                exports.append(Export(chunk, kind, handle, [p for p in g.processes if p != process_index]))
        return b"".join(r.encode() for r in offer(exports, transient))

    def check_records() -> list[tuple[Group, Member, HandleRecord]]:
        records: list[tuple[Group, Member, HandleRecord]] = []
        for p, data in payloads.items():
            spanning = [(g, m) for g, m in places(p) if len(g.processes) > 1]
            if len(data) != RECORD_BYTES * len(spanning):
                wrong, got = f"{exchange.describe(p)} sent handle records of wrong length", f"{len(data)} bytes"
                expected = f"{len(spanning)} records of {RECORD_BYTES} bytes"
                fix = "run the same version of moonep_jax on every process"
                raise SetupError(message("setup", wrong, got, expected, fix))
            for i, (g, m) in enumerate(spanning):
                if g.index not in kinds:
                    continue
                record = decode(
                    data[i * RECORD_BYTES : (i + 1) * RECORD_BYTES],
                    namespace=name,
                    group=g.index,
                    rank=m.rank,
                    ranks=topology.ranks,
                    nbytes=nbytes,
                    kind=kinds[g.index],
                    sender=exchange.describe(p),
                )
                if p != process_index:
                    records.append((g, m, record))
        return records

    def attach() -> None:
        # Half of the limit, so that a slow import still leaves the others time to wait for this process's vote.
        deadline = time.monotonic() + exchange.timeout_s / 2
        for g, m, record in records:
            left = max(0.1, deadline - time.monotonic())
            try:
                mapped = accept(backend, record, devices(g), fetch, process_index, left)
            except SetupError:
                raise
            except (OSError, RuntimeError) as error:
                wrong = f"cannot map the chunk of rank {m.rank} of group {g.index}"
                fix = f"see the log of {exchange.describe(m.process_index)}"
                raise SetupError(message("setup", wrong, f"[{error}]", "its memory", fix)) from error
            shared.add(g.index, m.rank, *mapped, own=False)

    try:
        with ExitStack() as transient:  # handles, descriptors and the server: gone on every path
            payloads = exchange.all_gather("handles", exchange.guarded("create the chunks", export))
            records = exchange.guarded("check the handles", check_records)  # all of them, before any import
            exchange.guarded("import the chunks", attach)
    except BaseException:
        shared.free()
        raise
    for g in (topology.groups[i] for i in sorted(local)):
        spread = f"{topology.ranks} ranks on {len({hosts[p] for p in g.processes})} host(s)"
        _log.debug("setup: memory of group %d (%s) is shared by: %s", g.index, spread, shared.kind_of(g.index))
    return shared


def _parse_token(data: bytes) -> bytes:
    if len(data) != _TOKEN_BYTES:
        raise ValueError(f"{len(data)} bytes instead of {_TOKEN_BYTES}")
    return data
