"""memfd chunks: free memory, sizes, names and seals."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from memory_kit import (  # noqa: F401  (fixtures)
    DIGEST,
    PAGE,
    chunk_fixture,
    nothing_left_open,
    record_of,
)

from moonep_jax.errors import SetupError
from moonep_jax.memory import fds, host
from moonep_jax.memory.host import FreeBytes


def test_create(chunk: int) -> None:
    assert os.fstat(chunk).st_size == PAGE and not os.get_inheritable(chunk)
    assert os.pread(chunk, PAGE, 0) == bytes(PAGE)
    os.pwrite(chunk, b"x", 0)
    for size in (0, 2 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(chunk, size)
    host.validate_memfd(chunk, record_of(chunk))


def test_create_without_memory() -> None:
    with pytest.raises(SetupError, match=r"not enough memory .* got \d+ bytes free, expected 1125899906842624 bytes"):
        host.create(1 << 50, "big")


def test_check_free_names_numbers_and_knobs() -> None:
    host.check_free(10, 20, FreeBytes(20, 10))
    with pytest.raises(SetupError, match=r"this host; got 19 bytes free, expected 20 bytes; .*tokens.*stage_bytes"):
        host.check_free(10, 20, FreeBytes(19, 100))
    with pytest.raises(SetupError, match="control group; got 9 bytes free, expected 10 bytes"):
        host.check_free(10, 20, FreeBytes(100, 9))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, FreeBytes(1000 * 1024, 1000 * 1024)),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "5\n",
                "sys/fs/cgroup/a/memory.max": "5000\n",
                "sys/fs/cgroup/a/memory.current": "3000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 7\ninactive_file 500\n",
            },
            FreeBytes(1000 * 1024, 2500),
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/x\n4:memory,hugetlb:/job\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4096\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "9999\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            },
            FreeBytes(1000 * 1024, 0),
        ),
    ],
    ids=["no cgroup", "version 2, parent's limit", "version 1"],
)
def test_free_bytes(tmp_path: Path, files: dict[str, str], expected: FreeBytes) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 9999 kB\nMemAvailable:  1000 kB\n", **files})
    assert host.free_bytes(tmp_path) == expected


def test_free_bytes_of_this_machine() -> None:
    free = host.free_bytes()
    assert 0 < free.cgroup <= free.host


def memfd(name: str, size: int, seals: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
BAD_FDS: list[tuple[Callable[[], int], str]] = [
    (lambda: os.open("/dev/null", os.O_RDWR), "foreign; got /dev/null"),
    (lambda: memfd("other", PAGE, ALL_SEALS), "foreign; got /memfd:other"),
    (lambda: memfd(host.chunk_name(DIGEST, 0, 2), PAGE, ALL_SEALS), "foreign"),
    (lambda: memfd(host.chunk_name(DIGEST, 0, 1), 2 * PAGE, ALL_SEALS), f"got {2 * PAGE} bytes, expected {PAGE}"),
    (lambda: memfd(host.chunk_name(DIGEST, 0, 1), PAGE, fcntl.F_SEAL_GROW), "not sealed; got seals 0x4"),
]


@pytest.mark.parametrize(("make", "text"), BAD_FDS)
def test_a_foreign_descriptor_is_refused_and_closed(make: Callable[[], int], text: str) -> None:
    with pytest.raises(SetupError, match=text):
        fds.fetch(record_of(3), 1, 1.0, [("injected", lambda *_: make())], validate=host.validate_memfd)
