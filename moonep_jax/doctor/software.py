"""Rows about software: versions, the FFI of the native modules against the running jaxlib, environment variables."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from pathlib import Path
from typing import Any

import jax

from moonep_jax import env, native
from moonep_jax.doctor.rows import Row
from moonep_jax.errors import ConfigError
from moonep_jax.version import __version__


def rows(device_platform: str) -> list[Row]:
    """All of them, for a process whose devices are of a platform."""
    return [_versions(), _ffi(device_platform), _environment()]


def _versions() -> Row:
    found = {
        "moonep_jax": __version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
    }
    return Row("versions", "ok", ", ".join(f"{name} {version}" for name, version in found.items()), data=found)


def _ffi(device_platform: str) -> Row:
    try:
        module: Any = native.module(device_platform)
    except ConfigError as error:
        return Row("FFI", "failure", _wrong(error), _fix(error), data={"module": None, "jaxlib": None})
    return ffi_match(tuple(module.ffi_api_version()), jaxlib_api_version(Path(jax.ffi.include_dir())))


def ffi_match(built: tuple[int, int], running: tuple[int, int] | None) -> Row:
    """The row for a module built against one version of XLA's FFI, in a jaxlib of another (None: unknown)."""
    data = {"module": list(built), "jaxlib": list(running) if running else None}
    text = f"module {built[0]}.{built[1]}, jaxlib {'unknown' if running is None else '{}.{}'.format(*running)}"
    if running is None:
        return Row(
            "FFI", "warning", text, "reinstall jaxlib: its headers are not where jax.ffi.include_dir() says", data=data
        )
    if built[0] == running[0] and built[1] <= running[1]:
        return Row("FFI", "ok", text, data=data)
    fix = "update jaxlib, or install moonep_jax again, which builds against jaxlib 0.10.2"
    return Row("FFI", "failure", f"{text}: a module must not be newer than jaxlib", fix, data=data)


def jaxlib_api_version(include: Path) -> tuple[int, int] | None:
    """What the headers say that the running jaxlib brings."""
    try:
        text = (include / "xla/ffi/api/c_api.h").read_text()
    except OSError:
        return None
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    return (int(found[0][1]), int(found[1][1])) if found[0] and found[1] else None


def _environment() -> Row:
    try:
        values = env.read()
    except ConfigError as error:
        return Row("environment", "failure", _wrong(error), _fix(error), data={"changed": {}})
    default = env.Env()
    pairs = zip(env.VARIABLES, vars(values).items(), strict=True)
    changed = {v.name: str(value) for v, (field, value) in pairs if value != getattr(default, field)}
    text = ", ".join(f"{name}={value}" for name, value in changed.items()) or "all MOONEP_ variables at their defaults"
    return Row("environment", "info", text, data={"changed": changed})


def _wrong(error: Exception) -> str:
    return str(error).rpartition("; ")[0]


def _fix(error: Exception) -> str:
    return str(error).rpartition("; ")[2]
