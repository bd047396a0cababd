"""Rows about GPUs: what each one is and says of itself beside what the trials showed, their links, IMEX channels.

Asks the driver only; never multicast, of which the attribute alone is read. NVML is used where its package is.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonep_jax.doctor.rows import Row
from moonep_jax.doctor.trial import KINDS, Outcome
from moonep_jax.errors import MoonEPError
from moonep_jax.memory.driver import Driver, Facts, Link

_LEAST_COMPUTE = (9, 0)
_IMEX = "dev/nvidia-caps-imex-channels"
_GIB = 2**30


def rows(
    driver: Driver, ordinals: Mapping[int, int], outcome: Outcome, runtime: int, root: Path = Path("/")
) -> list[Row]:
    """All of them. ordinals: JAX device.id -> CUDA ordinal; outcome: from try_devices; runtime: the module's CUDA."""
    found = [_versions(driver, runtime), imex(root)]
    for device, ordinal in ordinals.items():
        where = f"device {device}"
        try:
            found += [_device(driver, ordinal, where), _handles(driver, ordinal, where, outcome[device])]
        except MoonEPError as error:
            fix = "see whether nvidia-smi works for the device, and what the kernel's log says"
            found.append(Row("GPU", "failure", f"the driver fails: {error}", fix, where))
    return [*found, *_links(driver, ordinals)]


def absent(root: Path = Path("/")) -> Row | None:
    """A row for a process without GPUs on a host that seems to have some."""
    if not (root / "dev/nvidiactl").exists() and not (root / "proc/driver/nvidia").exists():
        return None
    fix = "pip install 'jax[cuda13]' and moonep_jax with nvcc in PATH, and leave JAX_PLATFORMS alone, to use it"
    return Row(
        "GPU", "warning", "this host has an NVIDIA driver, but JAX uses its CPU devices", fix, data={"used": False}
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _versions(driver: Driver, runtime: int) -> Row:
    try:
        newest = driver.version()
    except MoonEPError as error:
        return Row("CUDA", "failure", f"the driver fails: {error}", "reinstall the NVIDIA driver")
    data = {"driver": newest, "module_runtime": runtime, "nvml_driver": _nvml_driver()}
    built = f"module built with CUDA {_version(runtime)}" if runtime else "no module"
    text = f"driver for CUDA {_version(newest)}, {built}"
    if data["nvml_driver"]:
        text += f", NVIDIA driver {data['nvml_driver']}"
    if newest // 1000 < runtime // 1000:
        return Row("CUDA", "failure", text, f"install a driver for CUDA {runtime // 1000} or newer", data=data)
    return Row("CUDA", "ok", text, data=data)


def imex(root: Path = Path("/")) -> Row:
    """The channels through which fabric handles pass between hosts. One host alone needs none."""
    folder = root / _IMEX
    try:
        channels = sorted(p.name for p in folder.iterdir())
    except OSError:
        channels = []
    usable = [c for c in channels if os.access(folder / c, os.R_OK | os.W_OK)]
    data = {"channels": channels, "usable": usable}
    if not channels:
        return Row("IMEX channels", "info", f"none in /{_IMEX}: needed between hosts only", data=data)
    if not usable:
        fix = f"give this user read and write access to /{_IMEX}"
        return Row("IMEX channels", "warning", f"{', '.join(channels)}: not accessible", fix, data=data)
    return Row("IMEX channels", "ok", f"{', '.join(usable)} accessible", data=data)


def _device(driver: Driver, ordinal: int, where: str) -> Row:
    facts, free = driver.facts(ordinal), driver.free_bytes(ordinal)
    data = {"ordinal": ordinal, "free_bytes": free, **facts._asdict(), "compute": list(facts.compute)}
    compute = "{}.{}".format(*facts.compute)
    text = f"{facts.name}, compute {compute}, {free / _GIB:.1f} of {facts.total_bytes / _GIB:.1f} GiB free"
    if facts.compute < _LEAST_COMPUTE:
        return Row("GPU", "failure", text, "use a Hopper or Blackwell GPU (compute 9.0 or newer)", where, data)
    return Row("GPU", "ok", text, where=where, data=data)


def _handles(driver: Driver, ordinal: int, where: str, outcome: Mapping[Any, str]) -> Row:
    has = driver.attributes(ordinal)
    data: dict[str, Any] = {"vmm": has.vmm, "multicast": has.multicast}
    texts = [f"VMM {_yes(has.vmm)}"]
    for kind in KINDS:
        why = outcome.get(kind, "not tried")
        data[kind] = {"attribute": getattr(has, kind), "works": not why, "error": why}
        texts.append(f"{kind} {_yes(getattr(has, kind))}, tried: {why or 'works in a second process'}")
    texts.append(f"multicast {_yes(has.multicast)} (never used)")
    text = "; ".join(texts)
    if not has.vmm:
        return Row(
            "memory handles", "failure", text, "use a GPU and a driver with virtual memory management", where, data
        )
    if not any(data[kind]["works"] for kind in KINDS):
        fix = "share no GPU memory between processes: use one process per host, or fix what the text says"
        return Row("memory handles", "warning", text, fix, where, data)
    return Row("memory handles", "ok", text, where=where, data=data)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _links(driver: Driver, ordinals: Mapping[int, int]) -> list[Row]:
    found: list[Row] = []
    nvml = _nvml_links(driver, list(ordinals.values()))
    for (a, first), (b, second) in itertools.combinations(ordinals.items(), 2):
        where = f"devices {a}-{b}"
        try:
            link = driver.link(first, second)
        except MoonEPError as error:
            found.append(Row("link", "warning", f"unknown: {error}", "see nvidia-smi topo -m", where))
            continue
        kind = nvml.get((first, second)) or _guess(link)
        data = {"devices": [a, b], **link._asdict(), "type": kind, "nvml": (first, second) in nvml}
        if not link.access:
            fix = "put the ranks of one group on GPUs with peer access (nvidia-smi topo -p2p r)"
            found.append(Row("link", "failure", "no peer access", fix, where, data))
        else:
            found.append(Row("link", "ok", f"{kind}, performance rank {link.rank}", where=where, data=data))
    return found


def _guess(link: Link) -> str:
    """PCI express has no atomics between GPUs, NVLink has."""
    return "NVLink (by its atomics; no NVML here to ask)" if link.atomics else "PCI express (no atomics)"


# -- NVML, where its package is (pynvml of nvidia-ml-py) ---------------------------------------------------------------


def _nvml() -> Any | None:
    try:
        module = importlib.import_module("pynvml")
        module.nvmlInit()
    except Exception:  # the package is not there, or finds no driver
        return None
    return module


def _nvml_driver() -> str:
    if (nvml := _nvml()) is None:
        return ""
    try:
        version = nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    except nvml.NVMLError:
        return ""


def _nvml_links(driver: Driver, ordinals: list[int]) -> dict[tuple[int, int], str]:
    if len(ordinals) < 2 or (nvml := _nvml()) is None:
        return {}
    found: dict[tuple[int, int], str] = {}
    try:
        facts: dict[int, Facts] = {o: driver.facts(o) for o in ordinals}
        handles = {o: nvml.nvmlDeviceGetHandleByPciBusId(f.pci.encode()) for o, f in facts.items()}
        for a, b in itertools.combinations(ordinals, 2):
            status = nvml.nvmlDeviceGetP2PStatus(handles[a], handles[b], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            found[a, b] = "NVLink" if status == nvml.NVML_P2P_STATUS_OK else "PCI express"
    except (nvml.NVMLError, MoonEPError):
        return {}
    return found
