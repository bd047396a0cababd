"""The doctor's command: arguments, JAX's devices, the rows of this process, the exchange with the others, the output.

The only file of the doctor that starts JAX devices and jax.distributed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import jax

from moonep_jax import backends, env, native
from moonep_jax.doctor import gpu, host, kind, screen, selftest, software, trial
from moonep_jax.doctor.rows import Report, Row
from moonep_jax.errors import ConfigError, MoonEPError, SetupError
from moonep_jax.exchange import Exchange, namespace
from moonep_jax.memory import driver
from moonep_jax.memory.cuda import CudaMemory
from moonep_jax.memory.host import HostMemory
from moonep_jax.memory.hosts import HostInfo
from moonep_jax.stores import open_store

ABOUT = "look at this node, or at all nodes of a job, and say what works, what does not, and what to do"
_CPU_DEVICES = 4  # of a process that has no others, so that the self-test has ranks to move rows between


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("--json", action="store_true", help="print JSON (see moonep_jax/doctor/__init__.py)")
    parser.add_argument("--selftest", action="store_true", help="also run every op against the oracle (seconds)")
    group = parser.add_argument_group("several processes (start the command once for each; process 0 prints)")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    group.add_argument("--processes", type=int, metavar="N", help="number of processes")
    group.add_argument("--process", type=int, metavar="I", help="number of this process, from 0")
    group.add_argument(
        "--cluster", action="store_true", help="let JAX find the three above (Slurm, Open MPI, Kubernetes, ...)"
    )
    group.add_argument(
        "--local-device", type=int, action="append", metavar="D", help="GPU of this process (repeatable)"
    )


def main(args: argparse.Namespace, error: Callable[[str], NoReturn]) -> int:
    """Runs the doctor; the exit code: 0 usable, 1 not. `error` ends the program because of a bad argument."""
    given = [args.coordinator, args.processes, args.process]
    if None in given and given != [None] * 3:
        error("--coordinator, --processes and --process belong together")
    if args.cluster and args.coordinator:
        error("--cluster finds what --coordinator says")
    if args.process is not None and not 0 <= args.process < args.processes:
        error(f"argument --process: must be from 0 to {args.processes - 1}: {args.process}")
    env.leave_memory_to_others()
    config: Any = jax.config
    if config.jax_num_cpu_devices < 0:  # nobody has said
        config.update("jax_num_cpu_devices", _CPU_DEVICES)
    with ExitStack() as stack:
        if args.cluster or args.coordinator:
            jax.distributed.initialize(*given, local_device_ids=args.local_device)
            stack.callback(jax.distributed.shutdown)
        reports = examine(args.selftest, args.process or 0)
        first = _index(args.process or 0) == 0
    # A process that lost the others speaks for itself.
    if first or len(reports) == 1:
        print(json.dumps(screen.as_json(reports), indent=1) if args.json else screen.as_text(reports), flush=True)
    return 0 if all(report.usable for report in reports) else 1


def examine(with_selftest: bool, index: int = 0) -> list[Report]:
    """The reports of all processes, by process. Collective. index: of this process, should it have no devices."""
    rows, platform, devices = _here()
    usable = all(row.status != "failure" for row in rows)
    count = jax.process_count() if devices else 1
    if count > 1:
        extra, others = _together(rows, platform, usable)
        rows += extra
        usable = usable and others
    if with_selftest:
        if usable:
            rows.append(selftest.row())
        else:
            rows.append(Row("selftest", "warning", "not run", "remove the failures first"))
    here = Report(_index(index), HostInfo.here().hostname, os.getpid(), platform, devices, rows)
    return _gathered(here) if count > 1 else [here]


def _index(otherwise: int) -> int:
    try:
        return jax.process_index()
    except Exception:  # no devices: an assertion, even, where JAX_PLATFORMS names none that is here
        return otherwise


def _here() -> tuple[list[Row], str, list[int]]:
    """What this process finds by itself and with a child: its rows, its platform and its devices."""
    try:
        local = jax.local_devices()
    except Exception as error:
        config: Any = jax.config
        text = str(error).partition("\n")[0] or f"JAX_PLATFORMS={config.jax_platforms} names nothing that is here"
        fix = "set JAX_PLATFORMS=cpu, or install the JAX of this node's devices (pip install 'jax[cuda13]')"
        rows = [Row("devices", "failure", f"JAX finds none: {text}", fix)]
        return [*software.rows("cpu"), *rows, *host.rows()], "", []
    platform, ids = str(local[0].platform), [int(d.id) for d in local]
    kind_of_device = str(local[0].device_kind)
    client = str(getattr(local[0].client, "platform_version", "")).replace("\n", " ").strip()
    data = {"platform": platform, "devices": ids, "kind": kind_of_device, "client": client}
    here = Row("devices", "ok", f"{len(ids)} {platform} ({kind_of_device}; JAX's client: {client})", data=data)
    rows = [*software.rows(platform), here, *host.rows()]
    try:
        variables = env.read()
    except ConfigError:  # has a row of its own
        variables = env.Env()
    table = {int(d.id): int(d.local_hardware_id or 0) for d in local}
    if platform == "gpu":
        try:
            cuda_driver = driver.load()
        except SetupError as error:
            wrong, _, fix = str(error).rpartition("; ")
            return [*rows, Row("CUDA", "failure", wrong, fix)], platform, ids
        outcome, transports = trial.try_devices(platform, CudaMemory(cuda_driver, table), table)
        rows += gpu.rows(cuda_driver, table, outcome, _runtime())
    elif platform == "cpu":
        # One of them: they all have the same memory.
        outcome, transports = trial.try_devices(platform, HostMemory(native.module("cpu")), {ids[0]: 0})
        rows += filter(None, [gpu.absent()])
    else:
        return rows, platform, ids
    rows += trial.transport_rows(transports)
    if jax.process_count() == 1:
        rows.append(kind.alone(variables, outcome))
    return rows, platform, ids


def _runtime() -> int:
    try:
        return int(native.module("gpu").cuda_runtime_version())
    except ConfigError:  # has a row of its own
        return 0


def _exchange() -> Exchange:
    participants = list(range(jax.process_count()))
    limit = _timeout_s()
    return Exchange(
        open_store(participants), namespace(participants), jax.process_index(), participants, limit, op="doctor"
    )


def _timeout_s() -> float:
    try:
        return env.read().setup_timeout_s
    except ConfigError:  # has a row of its own
        return env.Env().setup_timeout_s


def _together(rows: list[Row], platform: str, usable: bool) -> tuple[list[Row], bool]:
    """What only all processes can find: whether they can share memory. Also whether all of them are usable."""
    try:
        with _exchange() as exchange:
            fine = all(v == b"1" for v in exchange.all_gather("usable", b"1" if usable else b"0").values())
    except SetupError as error:
        return [_lost(error)], False
    if not fine:
        if usable:
            return [Row(kind.NAME, "warning", "not tried: another process has failures", "remove them first")], False
        return [], False
    with _exchange() as exchange:
        mesh = kind.mesh_of_all()
        row = kind.together(
            exchange,
            mesh,
            lambda: backends.make(platform, mesh.devices.flat, jax.process_index(), env.read()).memory,
            env.read(),
        )
    return [row], row.status != "failure"


def _gathered(report: Report) -> list[Report]:
    try:
        with _exchange() as exchange:
            sent = exchange.all_gather("reports", report.encode())
    except SetupError as error:
        return [Report(**{**vars(report), "rows": [*report.rows, _lost(error)]})]
    return [Report.decode(data) for _, data in sorted(sent.items())]


def _lost(error: MoonEPError) -> Row:
    wrong, _, fix = str(error).rpartition("; ")
    return Row("processes", "failure", wrong, fix)
