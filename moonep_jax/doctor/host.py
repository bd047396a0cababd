"""Rows about the host: cores, memory, and the system calls that the library lives on, each tried for real."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path

from moonep_jax.doctor.rows import Row
from moonep_jax.errors import MoonEPError
from moonep_jax.memory import host

_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAKE = 1


def rows(root: Path = Path("/")) -> list[Row]:
    """All of them; `root` is where /proc, /sys and /dev are."""
    return [_cores(), _memory(root), _files(), _memfd(), _futex()]


def _cores() -> Row:
    cores = len(os.sched_getaffinity(0))
    return Row("cores", "ok", f"{cores} usable of {os.cpu_count()}", data={"usable": cores, "all": os.cpu_count()})


def _memory(root: Path) -> Row:
    try:
        free = host.free_bytes(root)
    except (OSError, KeyError, ValueError) as error:
        return Row("host memory", "warning", f"unknown: {error}", "mount /proc")
    text = f"{_gib(min(free))} free" + (" (limit of the control group)" if free.cgroup < free.host else "")
    return Row("host memory", "ok", text, data={"host_free": free.host, "cgroup_free": free.cgroup})


def _files() -> Row:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Setup holds one descriptor per rank of this process and one per import, for moments.
    if soft < 64:
        return Row("open files", "warning", f"limit {soft}", "ulimit -n 1024", data={"soft": soft, "hard": hard})
    return Row("open files", "ok", f"limit {soft}", data={"soft": soft, "hard": hard})


def _memfd() -> Row:
    shm = os.path.isdir("/dev/shm")
    where = f"works and is sealed; /dev/shm is not needed ({'is there' if shm else 'not there'})"
    fix = "allow memfd_create and file seals (a seccomp profile may refuse them)"
    return _tried("memfd", where, _try_memfd, fix)


def _try_memfd() -> None:
    fd = host.create(mmap.PAGESIZE, "moonep-doctor")
    try:
        with mmap.mmap(fd, mmap.PAGESIZE) as memory:
            memory[:6] = b"moonep"
        with contextlib.suppress(PermissionError):  # what a seal must raise
            os.ftruncate(fd, 0)
            raise OSError(errno.EPROTO, "the seal does not hold")
    finally:
        os.close(fd)


def _futex() -> Row:
    return _tried("futex", "works", _try_futex, "allow the futex system call (a seccomp profile may refuse it)")


def _try_futex() -> None:
    number = _FUTEX.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"unknown machine {os.uname().machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    word = ctypes.c_uint32(0)
    if libc.syscall(ctypes.c_long(number), ctypes.byref(word), _WAKE, 1, None, None, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _tried(name: str, fine: str, trial: Callable[[], None], fix: str) -> Row:
    try:
        trial()
    except (OSError, MoonEPError) as error:
        return Row(name, "failure", f"does not work: {error}", fix, data={"works": False, "error": str(error)})
    return Row(name, "ok", fine, data={"works": True, "error": ""})


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
