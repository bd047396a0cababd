"""The choice of a group's handle kind by trial: every rank exports a small block, every process imports its peers'.

A device attribute proves nothing: an allocation may be refused, and an own import may work where a peer's fails (hosts
of different IMEX domains). So all ranks learn what failed where, and take one path. Collective; leaves nothing behind.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Final

from moonep_jax.env import Env, HandleType
from moonep_jax.errors import MoonEPError
from moonep_jax.exchange import Exchange
from moonep_jax.handles import Capability, HandleRecord, Kind, choose_kind, decode, namespace_digest
from moonep_jax.memory.backend import Backend, Chunk, Export, Fetch, accept, offer
from moonep_jax.memory.hosts import HostInfo
from moonep_jax.records import check_texts, parse_texts
from moonep_jax.topology import Group, Topology

_log = logging.getLogger("moonep_jax")

_BLOCK_BYTES: Final = 64
_KINDS: Final[tuple[Kind, ...]] = ("fd", "fabric")
# (group, rank, kind) -> "" when the kind works for the rank, else why it does not
Findings = dict[tuple[int, int, Kind], str]


def choose_kinds(
    exchange: Exchange,
    name: str,
    topology: Topology,
    process_index: int,
    backend: Backend,
    env: Env,
    hosts: Mapping[int, HostInfo],
    fetch: Fetch,
) -> dict[int, Kind]:
    """The handle kind of each of this process's groups that span processes. Collective over the topology's processes.

    name: of this setup, and of no other anywhere.
    Every process raises the same SetupError when a group has no kind that works.
    """
    spanning = [g for g in topology.groups if len(g.processes) > 1]
    if not spanning:
        return {}
    tried = {g.index: _tried(env.mem_handle_type, len({hosts[p] for p in g.processes})) for g in spanning}
    mine = [g for g in spanning if process_index in g.processes]
    found: Findings
    if backend.trial:
        found = _try_all(exchange, f"{name}/trial", topology, process_index, backend, tried, fetch)
    else:
        found = {
            (g.index, m.rank, kind): backend.refusal(kind, m.device_id)
            for g in mine
            for m in g.devices
            for kind in tried[g.index]
        }

    def decide() -> dict[int, Kind]:
        kinds: dict[int, Kind] = {}
        for g in mine:
            ranks = [_capability(g, m.rank, str(hosts[m.process_index]), found) for m in g.devices]
            kinds[g.index] = choose_kind(env.mem_handle_type, ranks)
            for c in ranks:
                if c.detail:
                    _log.debug("setup: rank %d of group %d on %s: %s", c.rank, g.index, c.host, c.detail)
        return kinds

    return exchange.guarded("choose the handle kind", decide)


def _tried(requested: HandleType, hosts: int) -> tuple[Kind, ...]:
    """The kinds worth a trial: an fd cannot leave its host, and a forced kind is never replaced."""
    kinds = _KINDS if requested == "auto" else (requested,)
    return kinds if hosts == 1 else tuple(k for k in kinds if k != "fd")


def _capability(group: Group, rank: int, host: str, found: Findings) -> Capability:
    why = {kind: found[group.index, rank, kind] for kind in _KINDS if (group.index, rank, kind) in found}
    detail = " / ".join(f"{kind}: {text}" for kind, text in why.items() if text)
    return Capability(rank, why.get("fd") == "", why.get("fabric") == "", host, detail)


def _try_all(
    exchange: Exchange,
    name: str,
    topology: Topology,
    process_index: int,
    backend: Backend,
    tried: Mapping[int, tuple[Kind, ...]],
    fetch: Fetch,
) -> Findings:
    """What every rank of every group found. name: of its own: a record of the trial must not pass for a chunk's."""
    digest = namespace_digest(name)
    places = [(g, m) for g, m in topology.local(process_index) if g.index in tried]

    def devices(group: Group) -> list[int]:
        return [m.device_id for m in group.devices if m.process_index == process_index]

    with ExitStack() as transient:  # blocks, handles, descriptors, the server

        def export() -> bytes:
            found: dict[str, str] = {}
            exports: list[Export] = []
            for g, m in places:
                peers = [p for p in g.processes if p != process_index]
                for kind in tried[g.index]:
                    why = backend.refusal(kind, m.device_id)
                    found[_key(g.index, m.rank, kind)] = why
                    if not why:
                        chunk = Chunk(digest, g.index, m.rank, _BLOCK_BYTES)
                        mapped, handle = backend.create(chunk, kind, m.device_id, devices(g), transient)
                        transient.callback(mapped.unmap)
                        assert handle is not None  # a kind was asked for
                        exports.append(Export(chunk, kind, handle, peers))
            records = {_key(r.group, r.rank, r.kind): r.encode().hex() for r in offer(exports, transient)}
            return json.dumps([found, records]).encode()

        sent = exchange.guarded("try the handle kinds", export)
        answers = exchange.all_gather("trial handles", sent, _parse_offer)

        def attach() -> bytes:
            # Half of the limit, so that a slow import still leaves the others time to wait for this process.
            deadline = time.monotonic() + exchange.timeout_s / 2
            found: dict[str, str] = answers[process_index][0]
            for g in {g.index: g for g, _ in places}.values():
                for kind in tried[g.index]:
                    failures: defaultdict[str, list[int]] = defaultdict(list)
                    for m in g.devices:
                        data = answers[m.process_index][1].get(_key(g.index, m.rank, kind))
                        if m.process_index == process_index or data is None:
                            continue
                        sender = exchange.describe(m.process_index)
                        record = _decode(data, name, g, m.rank, kind, topology.ranks, sender)
                        try:
                            left = max(0.1, deadline - time.monotonic())
                            accept(backend, record, devices(g), fetch, process_index, left).unmap()
                        except (MoonEPError, OSError) as error:
                            failures[str(error)].append(m.rank)
                    text = "; ".join(f"cannot import from {_ranks(r)}: {e}" for e, r in failures.items())
                    for m in g.devices:
                        if text and m.process_index == process_index:
                            key = _key(g.index, m.rank, kind)
                            found[key] = "; ".join(filter(None, (found[key], text)))
            return json.dumps(found).encode()

        # Once all results are there, nobody needs the blocks any more.
        sent = exchange.guarded("import the trial handles", attach)
        results = exchange.all_gather("trial results", sent, parse_texts)
    return {
        (g.index, m.rank, kind): results[m.process_index].get(_key(g.index, m.rank, kind), "it sent no result")
        for g in topology.groups
        for m in g.devices
        for kind in tried.get(g.index, ())
    }


def _parse_offer(data: bytes) -> tuple[dict[str, str], dict[str, bytes]]:
    found, records = json.loads(data)
    return check_texts(found), {key: bytes.fromhex(text) for key, text in check_texts(records).items()}


def _decode(data: bytes, name: str, group: Group, rank: int, kind: Kind, ranks: int, sender: str) -> HandleRecord:
    at: dict[str, Any] = {"group": group.index, "rank": rank, "ranks": ranks, "nbytes": _BLOCK_BYTES, "kind": kind}
    return decode(data, namespace=name, sender=sender, **at)


def _key(group: int, rank: int, kind: Kind) -> str:
    return f"{group}/{rank}/{kind}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(map(str, ranks))}"
