"""The handle kind that `setup` would take, and why: for one process by the trial, for several by setup's own steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import numpy as np

from moonep_jax.doctor.rows import Row
from moonep_jax.doctor.trial import Outcome
from moonep_jax.env import Env
from moonep_jax.errors import SetupError
from moonep_jax.exchange import Exchange
from moonep_jax.handles import Capability, choose_kind
from moonep_jax.memory.backend import Backend
from moonep_jax.memory.hosts import HostInfo, gather_hosts
from moonep_jax.memory.share import share
from moonep_jax.topology import Topology

NAME: Final = "handle kind"
_CHUNK_BYTES: Final = 4096


def alone(variables: Env, outcome: Outcome) -> Row:
    """For a process on its own, which needs none; and what processes of this host would take."""
    ranks = [
        Capability(device, why.get("fd") == "", why.get("fabric") == "", str(HostInfo.here()), _detail(why))
        for device, why in outcome.items()
    ]
    requested = variables.mem_handle_type
    try:
        kind = choose_kind(requested, ranks)
    except SetupError as error:
        wrong, _, fix = str(error).rpartition("; ")
        data = {"requested": requested, "kind": None, "one_process": "local", "error": str(error)}
        text = f"local in one process; several processes of this host have none: {wrong}"
        return Row(NAME, "warning", text, fix, data=data)
    data = {"requested": requested, "kind": kind, "one_process": "local", "error": ""}
    why = f"{requested} is asked for" if requested != "auto" else "they are on one host, and fd works there"
    return Row(NAME, "ok", f"local in one process; {kind} between processes of this host: {why}", data=data)


def together(exchange: Exchange, mesh: Any, make: Callable[[], Backend], variables: Env) -> Row:
    """For all processes of the exchange as one EP group: what setup does, with small chunks. Collective."""
    requested = variables.mem_handle_type
    try:
        topology = exchange.guarded("read the mesh", lambda: Topology.from_mesh(mesh, "ep"))
        hosts = gather_hosts(exchange)
        exchange.describe = lambda p: topology.describe(p, hosts[p].hostname)
        backend = exchange.guarded("open the memory", make)
        shared = share(exchange, topology, exchange.participant, _CHUNK_BYTES, backend, variables, hosts)
    except SetupError as error:
        wrong, _, fix = str(error).rpartition("; ")
        data = {"requested": requested, "kind": None, "one_process": "local", "error": str(error)}
        return Row(NAME, "failure", wrong, fix, data=data)
    kind = shared.kind_of(0)
    shared.free()
    spread = len({hosts[p] for p in topology.processes})
    text = f"{kind}, for {topology.ranks} ranks of {len(topology.processes)} process(es) on {spread} host(s): "
    text += "every process mapped the memory of all others"
    text += f"; {requested} is asked for" if requested != "auto" else ""
    return Row(NAME, "ok", text, data={"requested": requested, "kind": kind, "one_process": "local", "error": ""})


def mesh_of_all() -> jax.sharding.Mesh:
    """All devices of all processes, as one EP group."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    return jax.sharding.Mesh(np.array(devices), ("ep",))


def _detail(why: Mapping[Any, str]) -> str:
    return " / ".join(f"{kind}: {text}" for kind, text in why.items() if text)
