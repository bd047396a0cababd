"""Descriptors handed to other processes: by socket, by pidfd_getfd, and every refusal."""

from __future__ import annotations

import array
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from memory_kit import (  # noqa: F401  (fixtures)
    DIGEST,
    NAMESPACE,
    chunk_fixture,
    nothing_left_open,
    record_of,
)

from moonep_jax.errors import SetupError
from moonep_jax.memory import fds, host
from moonep_jax.memory.fds import FdServer, Offer


def test_server_hands_out_each_offer_once_and_stops(chunk: int) -> None:
    server = FdServer(DIGEST, [Offer(0, 1, chunk, [5, 6])])
    record = record_of(chunk, name=server.socket_name)
    by_socket = fds.TRANSPORTS[:1]
    for peer in (5, 6):
        got = fds.fetch(record, peer, 5.0, by_socket, validate=host.validate_memfd)
        assert got != chunk and not os.get_inheritable(got)
        assert os.path.sameopenfile(got, chunk)
        os.close(got)
        if peer == 5:
            with pytest.raises(SetupError, match="no descriptor for group 0, rank 1 and process 5"):
                fds.fetch(record, 5, 5.0, by_socket, validate=host.validate_memfd)
    server._thread.join(5)  # ends by itself
    with pytest.raises(SetupError, match=r"socket: .*refused"):
        fds.fetch(record, 5, 5.0, by_socket, validate=host.validate_memfd)
    server.close()
    server.close()


def test_server_refusals(chunk: int) -> None:
    server = FdServer(DIGEST, [Offer(0, 1, chunk, [5])])
    try:
        good = record_of(chunk, name=server.socket_name)
        for record, peer, text in [
            (replace(good, digest=bytes(16)), 5, "another setup or job"),
            (replace(good, group=1), 5, "no descriptor for group 1, rank 1"),
            (replace(good, rank=0), 5, "no descriptor for group 0, rank 0"),
            (good, 4, "and process 4"),
            (replace(good, uid=12345), 5, "the server's user is"),
        ]:
            with pytest.raises(OSError, match=text):
                fds.fetch_by_socket(record, peer, 5.0)
        for raw, text in [(b"x" * fds._REQUEST.size, b"magic"), (b"short", b"request of 5 bytes, expected 40")]:
            with socket.socket(socket.AF_UNIX) as s:
                s.connect("\0" + server.socket_name)
                s.sendall(raw)
                assert text in s.recv(1000)
        with socket.socket(socket.AF_UNIX) as s:  # a peer that leaves without a word
            s.connect("\0" + server.socket_name)
        got = fds.fetch_by_socket(good, 5, 5.0)  # still served
        os.close(got)
    finally:
        server.close()


def test_server_refuses_another_user(chunk: int) -> None:
    server = FdServer(DIGEST, [Offer(0, 1, chunk, [5])], uid_of=lambda _: os.geteuid() + 1)
    try:
        with pytest.raises(OSError, match=r"user .* is not"):
            fds.fetch_by_socket(record_of(chunk, name=server.socket_name), 5, 5.0)
    finally:
        server.close()


def test_a_silent_connection_does_not_block_the_server(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fds, "_CONNECTION_S", 0.1)
    server = FdServer(DIGEST, [Offer(0, 1, chunk, [5])])
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect("\0" + server.socket_name)
        os.close(fds.fetch_by_socket(record_of(chunk, name=server.socket_name), 5, 5.0))
    server.close()


def test_close_with_offers_pending(chunk: int) -> None:
    for _ in range(50):
        server = FdServer(DIGEST, [Offer(0, 1, chunk, [5])])
        server.close()


def test_a_server_that_never_answers_times_out(chunk: int) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind("\0mute-test")
        mute.listen(1)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            fds.fetch_by_socket(record_of(chunk, name="mute-test"), 5, 0.2)
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("reply", ["several", "none"])
def test_a_server_that_answers_wrongly(chunk: int, reply: str) -> None:
    with socket.socket(socket.AF_UNIX) as odd:
        odd.bind("\0odd-test")
        odd.listen(1)

        def answer() -> None:
            connection, _ = odd.accept()
            with connection:
                connection.recv(100)
                if reply == "several":
                    rights = array.array("i", [chunk])
                    connection.sendmsg([b"\1no"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="refused: no" if reply == "several" else "refused: no reply"):
            fds.fetch_by_socket(record_of(chunk, name="odd-test"), 5, 5.0)
        thread.join(5)


def test_fetch_falls_back_to_pidfd(chunk: int) -> None:
    got = fds.fetch(record_of(chunk, name="nobody-listens"), 5, 5.0, validate=host.validate_memfd)
    assert os.path.sameopenfile(got, chunk)
    os.close(got)


def test_fetch_names_all_failures(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int, *args: int) -> int:
        if number == fds._PIDFD_GETFD:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return os.open("/dev/null", os.O_RDONLY)

    monkeypatch.setattr(fds, "_syscall", refuse)
    with pytest.raises(SetupError) as caught:
        fds.fetch(record_of(chunk, name="nobody-listens"), 5, 5.0, validate=host.validate_memfd)
    text = str(caught.value)
    assert "socket: " in text and "pidfd_getfd: " in text and "CAP_SYS_PTRACE" in text and f"pid {os.getpid()}" in text


def test_pidfd_of_closed_fd_and_dead_process() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        fds.fetch_by_pidfd(record_of(999_999), 5, 1.0)
    with pytest.raises(ProcessLookupError):
        fds.fetch_by_pidfd(record_of(3, pid=2**22 - 1), 5, 1.0)


# -- real second processes ---------------------------------------------------------------------------------------------

OWNER = """
import os, sys
from moonep_jax.handles import HandleRecord, namespace_digest
from moonep_jax.memory import fds, host
digest = namespace_digest("moonep/test/0")
fd = host.create(8192, host.chunk_name(digest, 0, 1))
os.pwrite(fd, b"from the owner", 0)
server = fds.FdServer(digest, [fds.Offer(0, 1, fd, [7])])
record = HandleRecord("fd", digest, 0, 1, 8192, os.getpid(), os.geteuid(), fd, server.socket_name)
print(record.encode().hex(), flush=True)
sys.stdin.readline()
assert os.pread(fd, 4, 4096) == b"back"
server.close()
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("transport", fds.TRANSPORTS, ids=lambda t: t[0])
def test_fetch_from_another_process(transport: tuple[str, fds.Transport]) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        killer = threading.Timer(40, owner.kill)
        killer.start()
        try:
            assert owner.stdin and owner.stdout
            from moonep_jax.handles import decode

            data = bytes.fromhex(owner.stdout.readline())
            record = decode(data, namespace=NAMESPACE, group=0, rank=1, ranks=2, nbytes=8192)
            fd = fds.fetch(record, 7, 10.0, [transport], validate=host.validate_memfd)
            assert os.pread(fd, 14, 0) == b"from the owner"
            os.pwrite(fd, b"back", 4096)
            os.close(fd)
            owner.stdin.write("\n")
            owner.stdin.flush()
            assert owner.wait(20) == 0
        finally:
            killer.cancel()
            killer.join()
            owner.kill()
