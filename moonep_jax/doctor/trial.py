"""Rows about sharing memory between processes, by trial: this process exports, a second one fetches and imports.

Uses the code that setup uses (memory/). What an attribute says stands beside what the trial showed.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

from moonep_jax.doctor import child
from moonep_jax.doctor.rows import Row
from moonep_jax.errors import MoonEPError
from moonep_jax.handles import Kind, namespace_digest
from moonep_jax.memory import fds
from moonep_jax.memory.backend import Backend, Chunk, Export, offer

_CHILD_S: Final = 90.0
KINDS: Final[tuple[Kind, ...]] = ("fd", "fabric")
# {device: {kind: "" or why it does not work between two processes}}
Outcome = dict[int, dict[Kind, str]]
Ask = Callable[[dict[str, Any]], dict[str, Any]]


def ask_child(request: dict[str, Any]) -> dict[str, Any]:
    """The answer of a second process; {"error": text} when it gave none."""
    command = [sys.executable, "-m", "moonep_jax.doctor.child"]
    try:
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=_CHILD_S)
    except subprocess.TimeoutExpired:
        return {"error": f"the second process gave no answer within {_CHILD_S:g} s"}
    except OSError as error:
        return {"error": f"cannot start a second process: {error}"}
    try:
        return json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        return {"error": f"the second process failed with exit code {done.returncode}: {last}"}


def try_devices(
    platform: str, backend: Backend, ordinals: Mapping[int, int], ask: Ask = ask_child
) -> tuple[Outcome, dict[str, str]]:
    """What a second process could do with memory of each device, and with each way to get a descriptor ("" or why).

    ordinals: JAX device.id -> CUDA ordinal, or anything on CPUs.
    """
    namespace = f"moonep/doctor/{secrets.token_hex(8)}"
    digest = namespace_digest(namespace)
    outcome: Outcome = {device: {} for device in ordinals}
    with ExitStack() as transient:
        exports: list[Export] = []
        places: list[tuple[int, Kind, int]] = []
        for device in ordinals:
            for kind in KINDS:
                try:
                    if why := backend.refusal(kind, device):
                        outcome[device][kind] = why
                        continue
                    chunk = Chunk(digest, len(places), 0, child.BLOCK_BYTES)
                    mapped, handle = backend.create(chunk, kind, device, [device], transient)
                    transient.callback(mapped.unmap)
                except (MoonEPError, OSError) as error:
                    outcome[device][kind] = str(error)
                    continue
                assert handle is not None  # a kind was asked for
                exports.append(Export(chunk, kind, handle, range(1, child.FETCHERS + 1)))
                places.append((len(places), kind, device))
        if not exports:
            return outcome, {}
        try:
            records = offer(exports, transient)
        except OSError as error:  # no unix sockets here
            for _, kind, device in places:
                outcome[device][kind] = f"cannot serve descriptors: {error}"
            return outcome, {"socket": str(error)}
        sent = [[*place, record.encode().hex()] for place, record in zip(places, records, strict=True)]
        request = {"namespace": namespace, "platform": platform, "ordinals": dict(ordinals), "records": sent}
        answer = ask(request)
    transports: dict[str, str] = {}
    for _, kind, device in places:
        found = answer.get(str(device), {"transports": {}, "imports": {}})
        outcome[device][kind] = found["imports"].get(kind, answer.get("error", "not tried"))
        transports |= {name: why for name, why in found["transports"].items() if why or name not in transports}
    if "error" in answer:
        transports = {name: answer["error"] for name, _ in fds.TRANSPORTS}
    return outcome, transports


def transport_rows(transports: Mapping[str, str]) -> list[Row]:
    """How a descriptor gets from one process to another. One way is enough."""
    rows: list[Row] = []
    works = not all(transports.values())
    about = {
        "socket": ("unix sockets", "run the processes as one user and in one network namespace"),
        "pidfd_getfd": (
            "pidfd_getfd",
            "give CAP_SYS_PTRACE or set kernel.yama.ptrace_scope=0, and allow pidfd_getfd in the seccomp profile",
        ),
    }
    for transport, why in transports.items():
        name, fix = about[transport]
        data = {"works": not why, "error": why}
        if not why:
            rows.append(Row(name, "ok", "a second process got a descriptor", data=data))
        elif works:
            rows.append(Row(name, "info", f"refused, and not needed: {_short(why)}", data=data))
        else:
            rows.append(Row(name, "failure", f"refused: {_short(why)}", fix, data=data))
    return rows


def _short(why: str) -> str:
    """The middle of a message of fetch(): what failed, without whose chunk it was."""
    return why.partition("; got [")[2].partition("], expected")[0] or why
