"""Hostile memory handles, descriptors and sockets: refused by name, nothing imported or left, the next works."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from memory_kit import PAGE, nothing_left_open
from setup_kit import Change, Job, at, job_of, payload_of, put, refused, with_payload
from test_handles import (
    DIGEST as DIGEST_AT,
)
from test_handles import (
    FABRIC_AT,
    FD_AT,
    GROUP,
    KIND,
    MAGIC,
    NAME,
    NAME_LEN,
    NBYTES,
    PID,
    RANK,
    SIZE,
    UID,
    VERSION,
    u32,
)

from moonep_jax.memory import fds, host
from moonep_jax.memory.backend import Chunk

__all__ = ["nothing_left_open"]  # a fixture for all tests here
SOCKETS_ONLY = fds.TRANSPORTS[:1]


@pytest.fixture(name="job")
def job_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with job_of((0, 1, 2), monkeypatch) as job:
        yield job


def fabric(record: bytes) -> bytes:
    """A fabric record without a fault of its own."""
    record = put(KIND, b"\2")(put(FD_AT, b"\xff" * 4 + bytes(108))(record))
    return put(FABRIC_AT, b"\1" * 64)(record)


# -- records -----------------------------------------------------------------------------------------------------------

WHO = "memory handles of process 1 (rank 1 of group 0 on host "
# name -> (what becomes of process 1's handle record, what is said of it)
RECORDS: dict[str, tuple[Change, str]] = {
    "magic": (put(MAGIC, b"X"), "a record without the magic; got b'XOONEPHD'"),
    "version": (put(VERSION, b"\2"), "a record of another version; got 2, expected 1"),
    "kind unknown": (put(KIND, b"\7"), "a record of unknown kind; got 7"),
    "kind zero": (put(KIND, b"\0"), "a record of unknown kind; got 0"),
    "another kind": (fabric, "rank 1's handle is of another kind; got fabric, expected fd"),
    "total size": (put(SIZE, u32(7)), "a record that states a wrong size; got 7 bytes"),
    "token": (lambda r: put(DIGEST_AT, bytes([r[DIGEST_AT] ^ 1]))(r), "a record of another setup or job"),
    "no token": (put(DIGEST_AT, bytes(16)), "a record of another setup or job"),
    "group": (put(GROUP, u32(3)), "a record of another group; got group 3, expected group 0"),
    "rank out of range": (put(RANK, u32(3)), "a rank out of range; got rank 3, expected 0 to 2"),
    "rank negative": (put(RANK, b"\xff" * 4), "a rank out of range; got rank 4294967295"),
    "rank twice": (put(RANK, u32(0)), "a record of another rank; got rank 0, expected rank 1"),
    "chunk size": (put(NBYTES, struct.pack("<Q", PAGE)), f"rank 1's chunk has another size; got {PAGE} bytes"),
    "chunk size zero": (put(NBYTES, bytes(8)), "rank 1's chunk has another size; got 0 bytes"),
    "chunk size huge": (put(NBYTES, b"\xff" * 8), "rank 1's chunk has another size; got 18446744073709551615 bytes"),
    "no pid": (put(PID, u32(0)), "a record without a process id"),
    "fd negative": (put(FD_AT, b"\xff" * 4), "rank 1's fd is not a descriptor; got -1"),
    "no name": (put(NAME_LEN, b"\0"), "rank 1's socket name is malformed; got 0 bytes"),
    "name too long": (put(NAME_LEN, b"\xff"), "rank 1's socket name is malformed; got 255 bytes"),
    "name cut": (put(NAME_LEN, b"\3"), "rank 1's socket name is malformed; got 3 bytes"),
    "name not ASCII": (put(NAME, b"\xe9"), "rank 1's socket name is malformed"),
    "two handles": (put(FABRIC_AT, b"\1"), "an fd record with a fabric handle"),
    "cut by one": (lambda r: r[:-1], "sent handle records of wrong length; got 231 bytes, expected 1 records of 232"),
    "one byte more": (lambda r: r + b"\0", "sent handle records of wrong length; got 233 bytes"),
    "two records": (lambda r: r + r, "sent handle records of wrong length; got 464 bytes"),
    "none": (lambda r: b"", "sent handle records of wrong length; got 0 bytes"),
    "zeros": (lambda r: bytes(len(r)), "a record without the magic"),
    "noise": (lambda r: bytes((i * 89 + 7) % 256 for i in range(len(r))), "a record without the magic"),
    "turned around": (lambda r: r[::-1], "a record without the magic"),
    "another uid": (put(UID, u32(4242)), "the chunk of rank 1 of group 0 is another user's; got user 4242"),
    "no uid": (put(UID, b"\xff" * 4), "the chunk of rank 1 of group 0 is another user's; got user 4294967295"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records(job: Job, name: str) -> None:
    change, text = RECORDS[name]
    job.on_set.append(at("handles", lambda r: with_payload(r, change(payload_of(r)))))
    got = refused(job.setup(), text)
    if "uid" not in name:
        assert "process 1 (rank 1 of group 0" in got and not job.fetched
        assert "step 'check the handles' failed on 3 of 3" in got and (WHO in got or "wrong length" in got)
    job.clean_setup()


@pytest.mark.parametrize("name", ["magic", "token", "rank twice", "cut by one"])
def test_a_record_that_one_process_sees_spoilt(job: Job, name: str) -> None:
    change, text = RECORDS[name]
    job.on_get.append(at("handles", lambda r: with_payload(r, change(payload_of(r))), reader=2))
    refused(job.setup(), text, "step 'check the handles' failed on 1 of 3 processes; got [process 2 (rank 2")
    assert not job.fetched
    job.clean_setup()


def test_the_record_of_another_process(job: Job) -> None:
    """A faithful copy: process 2's handle under process 1's name."""
    kept: list[bytes] = []
    ready = threading.Event()

    def keep(record: bytes) -> bytes:
        kept.append(payload_of(record))
        ready.set()
        return record

    def swap(record: bytes) -> bytes:
        assert ready.wait(5)
        return with_payload(record, kept[0])

    job.on_set += [at("handles", keep, sender=2), at("handles", swap)]
    refused(job.setup(), "a record of another rank; got rank 2, expected rank 1")
    job.clean_setup()


@pytest.mark.parametrize("source", ["an earlier setup of this job", "the same setup of another job"])
def test_a_record_of_another(job: Job, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Key prefixes are the same in every job that runs the same program, so they alone must not make a record valid."""
    kept: list[bytes] = []

    def keep(record: bytes) -> bytes:
        kept.append(payload_of(record))
        return record

    job.on_set.append(at("handles", keep))
    other = job.setup()
    if source == "the same setup of another job":
        job.counts.clear()
    job.on_set = [at("handles", lambda r: with_payload(r, kept[0]))]
    refused(job.setup(), WHO, "a record of another setup or job")
    job.close(other)
    job.clean_setup()


HARMLESS: dict[str, Change] = {
    # Hints for pidfd_getfd, which is not needed; and a socket that is not, where pidfd_getfd is there.
    "another pid": put(PID, u32(1)),
    "another fd": put(FD_AT, u32(0)),
    "a socket of nobody": put(NAME, b"moonep-00000000"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_wrong_hints_do_no_harm(job: Job, name: str) -> None:
    """The right memory is mapped all the same: what is found is checked, not where."""
    job.on_set.append(at("handles", lambda r: with_payload(r, HARMLESS[name](payload_of(r)))))
    domains = job.setup()
    job.works(domains)
    job.close(domains)
    job.clean_setup()


BOTH = {"pid": put(PID, u32(1)), "fd": put(FD_AT, u32(0)), "dead pid": put(PID, u32(2**22 - 1))}


@pytest.mark.parametrize("name", BOTH)
def test_a_wrong_socket_and_a_wrong_hint(job: Job, name: str) -> None:
    lost = HARMLESS["a socket of nobody"]
    job.on_set.append(at("handles", lambda r: with_payload(r, lost(BOTH[name](payload_of(r))))))
    refused(job.setup(), "cannot import the chunk of rank 1 of group 0 from pid", "socket: ", "pidfd_getfd: ")
    job.clean_setup()


# -- descriptors -------------------------------------------------------------------------------------------------------

ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memfd(name: str, nbytes: int, seals: int = ALL_SEALS) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def named(chunk: Chunk, **changes: Any) -> str:
    c = chunk._replace(**changes)
    return host.chunk_name(c.digest, c.group, c.rank)


def pipe_end(keep: bool) -> int:
    ends = os.pipe()
    os.close(ends[not keep])
    return ends[keep]


def file_of(folder: str, chunk: Chunk) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(chunk.nbytes)
        return os.dup(file.fileno())


def epoll() -> int:
    with select.epoll() as made:
        return os.dup(made.fileno())


def closed() -> int:
    fd = os.open("/dev/null", os.O_RDONLY)
    os.close(fd)
    return fd


# name -> (what process 1 exports instead of its chunk's fd, what is said of it)
DESCRIPTORS: dict[str, tuple[Callable[[int, Chunk], int], str]] = {
    "a pipe to read": (lambda fd, c: pipe_end(False), "rank 1's descriptor is foreign; got pipe:["),
    "a pipe to write": (lambda fd, c: pipe_end(True), "rank 1's descriptor is foreign; got pipe:["),
    "a socket": (lambda fd, c: socket.socket(socket.AF_UNIX).detach(), "foreign; got socket:["),
    "a listening socket": (lambda fd, c: socket.create_server(("127.0.0.1", 0)).detach(), "foreign; got socket:["),
    "an epoll": (lambda fd, c: epoll(), "foreign; got anon_inode:[eventpoll]"),
    "an eventfd": (lambda fd, c: os.eventfd(0), "foreign; got anon_inode:[eventfd]"),
    "a file": (lambda fd, c: file_of("/tmp", c), "rank 1's descriptor is foreign; got /tmp/"),
    "a file in shared memory": (lambda fd, c: file_of("/dev/shm", c), "rank 1's descriptor is foreign; got /dev/shm/"),
    "a folder": (lambda fd, c: os.open("/", os.O_RDONLY), "rank 1's descriptor is foreign; got /, expected /memfd:"),
    "the null device": (lambda fd, c: os.open("/dev/null", os.O_RDWR), "foreign; got /dev/null"),
    "endless zeros": (lambda fd, c: os.open("/dev/zero", os.O_RDWR), "foreign; got /dev/zero"),
    "a memfd of another name": (lambda fd, c: memfd("x", c.nbytes), "foreign; got /memfd:x, expected /memfd:moonep-"),
    "of another setup": (lambda fd, c: memfd(named(c, digest=bytes(16)), c.nbytes), "foreign; got /memfd:moonep-0000"),
    "of another group": (lambda fd, c: memfd(named(c, group=1), c.nbytes), "rank 1's descriptor is foreign"),
    "of another rank": (lambda fd, c: memfd(named(c, rank=2), c.nbytes), "rank 1's descriptor is foreign"),
    "too small": (lambda fd, c: memfd(named(c), PAGE), f"rank 1's memfd has the wrong size; got {PAGE} bytes"),
    "empty": (lambda fd, c: memfd(named(c), 0), "rank 1's memfd has the wrong size; got 0 bytes"),
    "too large": (lambda fd, c: memfd(named(c), 2 * c.nbytes), "rank 1's memfd has the wrong size"),
    "not sealed": (lambda fd, c: memfd(named(c), c.nbytes, 0), "rank 1's memfd is not sealed; got seals 0x0"),
    "may shrink": (lambda fd, c: memfd(named(c), c.nbytes, fcntl.F_SEAL_GROW), "memfd is not sealed; got seals 0x4"),
    "read-only": (
        lambda fd, c: memfd(named(c), c.nbytes, ALL_SEALS | fcntl.F_SEAL_WRITE),
        "cannot map the chunk of rank 1 of group 0; got [",
    ),
    "opened to read": (
        lambda fd, c: os.open(f"/proc/self/fd/{fd}", os.O_RDONLY),
        "cannot map the chunk of rank 1 of group 0; got [",
    ),
    "a path only": (
        lambda fd, c: os.open(f"/proc/self/fd/{fd}", os.O_PATH),  # pyright: ignore[reportAttributeAccessIssue]
        "rank 1 of group 0",
    ),
    "closed": (lambda fd, c: closed(), "cannot import the chunk of rank 1 of group 0 from pid"),
}


@pytest.mark.parametrize("name", DESCRIPTORS)
def test_descriptors(job: Job, name: str) -> None:
    make, text = DESCRIPTORS[name]
    made: list[int] = []

    def evil(fd: int, chunk: Chunk) -> int:
        made.append(make(fd, chunk))
        return made[0]

    job.evil_fd = evil
    refused(job.setup(), "step 'import the chunks' failed on 2 of 3 processes; got [", text)
    if name != "closed":
        os.close(made[0])
    job.clean_setup()


# -- servers that are not the peer's -----------------------------------------------------------------------------------


def deaf(connection: socket.socket, stop: threading.Event) -> None:
    stop.wait(5)


def rude(connection: socket.socket, stop: threading.Event) -> None:
    """Hangs up."""


def refusing(connection: socket.socket, stop: threading.Event) -> None:
    connection.recv(100)
    connection.sendall(b"\1no, you may not")


def flooding(connection: socket.socket, stop: threading.Event) -> None:
    connection.recv(100)
    connection.sendall(b"\1" + b"x" * 100_000)


def handing(*paths: str) -> Callable[[socket.socket, threading.Event], None]:
    def answer(connection: socket.socket, stop: threading.Event) -> None:
        connection.recv(100)
        opened = [os.open(path, os.O_RDWR) for path in paths]
        try:
            socket.send_fds(connection, [b"\0"], opened)
        finally:
            for fd in opened:
                os.close(fd)

    return answer


SERVERS: dict[str, tuple[Callable[[socket.socket, threading.Event], None], str]] = {
    "deaf": (deaf, "socket: timed out"),
    "rude": (rude, "socket: "),
    "refusing": (refusing, "socket: the server refused: no, you may not"),
    "flooding": (flooding, "socket: the server refused: xxx"),
    "handing out nothing": (handing(), "socket: the server refused: no reply"),
    "handing out another's": (handing("/dev/null"), "rank 1's descriptor is foreign; got /dev/null"),
    "handing out two": (handing("/dev/null", "/dev/zero"), "socket: "),
}


@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "socket only"])
@pytest.mark.parametrize("name", SERVERS)
def test_servers(job: Job, name: str, pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 1's record names the socket of a server that is not its own."""
    answer, text = SERVERS[name]
    job.env_of = {p: type(job.env)(setup_timeout_s=1.0) for p in job.processes}
    stop = threading.Event()
    server = socket.socket(socket.AF_UNIX)
    server.bind("\0hostile-server")
    server.listen()

    def serve() -> None:
        with ExitStack() as open_ones:
            while True:
                try:
                    connection = open_ones.enter_context(server.accept()[0])
                except OSError:
                    return
                with suppress(OSError):
                    answer(connection, stop)
                if answer is not deaf:
                    connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        name_record = b"hostile-server".ljust(107, b"\0") + bytes([14])
        job.on_set.append(at("handles", lambda r: with_payload(r, put(NAME, name_record)(payload_of(r)))))
        job.transports = fds.TRANSPORTS if pidfd else SOCKETS_ONLY
        results = job.setup()
    finally:
        stop.set()
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(10)
    if pidfd:
        job.works(results)
        job.close(results)
    else:
        assert len(refused(results, "cannot import the chunk of rank 1 of group 0 from pid", text)) < 5000
    job.clean_setup()


def test_a_server_of_another_user(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fds, "peer_uid", lambda connection: os.geteuid() + 7)
    job.transports = SOCKETS_ONLY
    refused(job.setup(), f"socket: the server's user is {os.geteuid() + 7}, not {os.geteuid()}")
    monkeypatch.undo()
