"""What other users of the host get: no descriptor, no memory, no place in the queue; and nothing to connect to."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from memory_kit import DIGEST, PAGE, listening, nothing_left_open, open_fds, record_of
from setup_kit import Job, at, job_of, refused, with_payload

from moonep_jax.memory import fds, host
from moonep_jax.memory.fds import FdServer, Offer

__all__ = ["nothing_left_open"]  # a fixture for all tests here


@pytest.fixture(name="job")
def job_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with job_of((0, 1, 2), monkeypatch) as job:
        yield job


STRANGER = """
import os, socket, sys
from moonep_jax.memory import fds
uid, pid, fd = map(int, sys.argv[1:4])
name, request = sys.argv[4], bytes.fromhex(sys.argv[5])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
def outcome(body):
    try:
        return repr(body())
    except OSError as error:
        return type(error).__name__
def ask():
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(5)
        s.connect("\\0" + name)
        s.sendall(request)
        reply, found, _, _ = socket.recv_fds(s, 1000, 4)
        return found, reply[1:].decode()
def pidfd():
    return fds._syscall(fds._PIDFD_GETFD, fds._syscall(fds._PIDFD_OPEN, pid, 0), fd, 0)
print(outcome(lambda: os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)))
print(outcome(lambda: os.listdir(f"/proc/{pid}/map_files")))
print(outcome(lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR)))
print(outcome(pidfd))
print(outcome(ask))
"""


@pytest.mark.multiprocess
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing() -> None:
    """For real: a process of `nobody` that knows pid, descriptor, socket name and the right request."""
    uid = pwd.getpwnam("nobody").pw_uid
    fd = host.create(PAGE, host.chunk_name(DIGEST, 0, 1))
    server = FdServer(DIGEST, [Offer(0, 1, fd, [5])])
    try:
        request = fds._REQUEST.pack(fds._REQUEST_MAGIC, fds._REQUEST_VERSION, DIGEST, 0, 1, 5)
        command = [
            sys.executable,
            "-c",
            STRANGER,
            str(uid),
            str(os.getpid()),
            str(fd),
            server.socket_name,
            request.hex(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        opened, maps, memory, pidfd, asked = done.stdout.splitlines()
        assert (opened, maps, memory, pidfd) == ("PermissionError",) * 4
        assert asked == repr(([], f"user {uid} is not 0"))
        got = fds.fetch_by_socket(record_of(fd, name=server.socket_name), 5, 5.0)  # a peer is still served
        os.close(got)
    finally:
        server.close()
        os.close(fd)


def test_modes() -> None:
    """Whoever gets at a descriptor's path as another user must not open it."""
    fd = host.create(PAGE, "modes")
    assert os.fstat(fd).st_mode & 0o7777 == 0o600 and os.fstat(fd).st_uid == os.geteuid()
    os.close(fd)


def test_silent_strangers_do_not_hold_up_the_peers() -> None:
    """Abstract names are listed in /proc/net/unix: anybody may connect, and say nothing."""
    fd = host.create(PAGE, host.chunk_name(DIGEST, 0, 1))
    strange = threading.Event()
    strange.set()
    uid_of = lambda connection: os.geteuid() + (1 if strange.is_set() else 0)  # noqa: E731
    server = FdServer(DIGEST, [Offer(0, 1, fd, [5])], uid_of=uid_of)
    with ExitStack() as silent:
        for _ in range(10):
            silent.enter_context(socket.socket(socket.AF_UNIX)).connect("\0" + server.socket_name)
        began = time.monotonic()
        waiting = silent.enter_context(socket.socket(socket.AF_UNIX))
        waiting.settimeout(15)
        waiting.connect("\0" + server.socket_name)
        waiting.sendall(b"x" * fds._REQUEST.size)
        assert b"is not" in waiting.recv(100)
        assert time.monotonic() - began < 10  # at the peers' limit it would be 20
    strange.clear()
    os.close(fds.fetch_by_socket(record_of(fd, name=server.socket_name), 5, 5.0))
    server.close()
    os.close(fd)


def test_nothing_listens_and_no_descriptor_stays(job: Job) -> None:
    """Neither while a domain is open nor after a failure: sockets of every kind, by the kernel's own tables."""

    def sockets() -> set[str]:
        mine = {target[8:-1] for target in open_fds().values() if target.startswith("socket:[")}
        rows = [
            (line.split()[column] if len(line.split()) > column else "")
            for table, column in (("unix", 6), ("tcp", 9), ("tcp6", 9), ("udp", 9), ("udp6", 9))
            for line in _lines(f"/proc/net/{table}")
        ]
        return mine.intersection(rows)

    before, descriptors = sockets(), open_fds()
    domains = job.setup()
    job.works(domains)
    assert sockets() == before and listening() == 0 and open_fds() == descriptors
    job.close(domains)
    job.on_set.append(at("start", lambda r: with_payload(r, b"spoilt")))
    refused(job.setup(), "spoilt")
    assert sockets() == before and listening() == 0 and open_fds() == descriptors


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if os.path.exists(path) else []
