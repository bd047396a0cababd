"""Descriptors across processes: any file descriptor, handed to peer processes of the same user.

`FdServer` serves, `fetch()` asks: through an abstract unix socket first, with pidfd_getfd second. Knows nothing of what
the descriptors are. Linux only. Imports errors and handles; starts one thread per server.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from moonep_jax.errors import SetupError, message
from moonep_jax.handles import HandleRecord

_log = logging.getLogger("moonep_jax")

_REQUEST: Final = struct.Struct("<8sI16sIII")  # magic, version, digest, group, rank, asking process
_REQUEST_MAGIC: Final = b"MOONEPFD"
_REQUEST_VERSION: Final = 1
_RIGHTS: Final = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
_CONNECTION_S: Final = 2.0  # seconds the server grants one connection, so that a stray one cannot block the others
_FOREIGN_S: Final = 0.05  # the same for a connection of another user
# System calls without a wrapper in Python or older C libraries; the numbers are those of x86_64 and aarch64 alike.
_PIDFD_OPEN: Final = 434
_PIDFD_GETFD: Final = 438


def peer_uid(connection: socket.socket) -> int:
    """User id of the process at the other end of a unix socket, as the kernel knows it."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid & 0xFFFFFFFF


class Offer(NamedTuple):
    """A descriptor to serve, whose chunk it is, and the process indices that may fetch it, each once."""

    group: int
    rank: int
    fd: int
    peers: Collection[int]


class FdServer:
    """Hands descriptors to peer processes of the same user through an abstract unix socket.

    An abstract name needs no file system, so neither a long TMPDIR nor a private /tmp matters. Stops listening once
    every offer was fetched, or at close(). The descriptors stay the caller's.
    """

    def __init__(
        self, digest: bytes, offers: Sequence[Offer], uid_of: Callable[[socket.socket], int] = peer_uid
    ) -> None:
        self.socket_name = f"moonep-{secrets.token_hex(16)}"
        self._digest, self._uid_of = digest, uid_of
        self._pending = {(o.group, o.rank, p): o.fd for o in offers for p in o.peers}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(f"\0{self.socket_name}")
            self._listener.listen(max(16, len(self._pending)))  # a full queue refuses, it does not wait
            self._thread = threading.Thread(target=self._serve, name="moonep-fd-server", daemon=True)
            self._thread.start()
        except BaseException:
            self._listener.close()
            raise

    def close(self) -> None:
        """Stops listening and joins the thread. Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._thread.join()

    def _serve(self) -> None:
        with self._listener:
            while self._pending:
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # close() was called
                    return
                with connection:
                    try:
                        self._answer(connection)
                    except OSError as error:
                        _log.warning("setup: a peer left while fetching a descriptor: %s", error)

    def _answer(self, connection: socket.socket) -> None:
        # Anybody may connect to an abstract name: another user must not hold up the peers.
        foreign = (uid := self._uid_of(connection)) != os.geteuid()
        connection.settimeout(_FOREIGN_S if foreign else _CONNECTION_S)
        # Read first: closing with the request unread would reset the connection and lose the refusal's text.
        request = connection.recv(_REQUEST.size)
        if foreign:
            refusal = f"user {uid} is not {os.geteuid()}"
        elif len(request) != _REQUEST.size:
            refusal = f"request of {len(request)} bytes, expected {_REQUEST.size}"
        else:
            magic, version, digest, *key = _REQUEST.unpack(request)
            fd = self._pending.get((key[0], key[1], key[2]))
            if (magic, version) != (_REQUEST_MAGIC, _REQUEST_VERSION):
                refusal = f"magic {magic!r} version {version}"
            elif digest != self._digest:
                refusal = "request of another setup or job"
            elif fd is None:
                refusal = "no descriptor for group {}, rank {} and process {}".format(*key)
            else:
                socket.send_fds(connection, [b"\0"], [fd])
                del self._pending[(key[0], key[1], key[2])]
                return
        _log.warning("setup: refused to hand out a descriptor: %s", refusal)
        connection.sendall(b"\1" + refusal.encode())


def fetch_by_socket(record: HandleRecord, process_index: int, timeout_s: float) -> int:
    """The record's descriptor from its FdServer. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{record.socket_name}")
        if (uid := peer_uid(connection)) != record.uid:
            raise PermissionError(f"the server's user is {uid}, not {record.uid}")
        head = (_REQUEST_MAGIC, _REQUEST_VERSION, record.digest)
        connection.sendall(_REQUEST.pack(*head, record.group, record.rank, process_index))
        # Not socket.recv_fds: it drops the flag, and a child started meanwhile would inherit the descriptor.
        room = socket.CMSG_SPACE(struct.calcsize("i"))
        reply, ancillary, _, _ = connection.recvmsg(1024, room, socket.MSG_CMSG_CLOEXEC)
    fds = [fd for level, kind, data in ancillary if (level, kind) == _RIGHTS for (fd,) in struct.iter_unpack("i", data)]
    if len(fds) == 1 and reply == b"\0":
        return fds[0]
    for fd in fds:
        os.close(fd)
    raise OSError(f"the server refused: {reply[1:].decode(errors='replace') or 'no reply'}")


def fetch_by_pidfd(record: HandleRecord, process_index: int, timeout_s: float) -> int:
    """The record's descriptor by pidfd_getfd; needs ptrace permission. Never blocks. Raises OSError."""
    del process_index, timeout_s
    pidfd = _syscall(_PIDFD_OPEN, record.pid, 0)
    try:
        return _syscall(_PIDFD_GETFD, pidfd, record.fd, 0)  # the new descriptor is close-on-exec
    except PermissionError as error:
        need = "needs CAP_SYS_PTRACE or kernel.yama.ptrace_scope=0, and a seccomp profile that allows pidfd_getfd"
        raise PermissionError(f"{error}; {need}") from error
    finally:
        os.close(pidfd)


def _syscall(number: int, *args: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in args))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


Transport = Callable[[HandleRecord, int, float], int]
TRANSPORTS: Final[tuple[tuple[str, Transport], ...]] = (("socket", fetch_by_socket), ("pidfd_getfd", fetch_by_pidfd))


def fetch(
    record: HandleRecord,
    process_index: int,
    timeout_s: float,
    transports: Sequence[tuple[str, Transport]] = TRANSPORTS,
    *,
    validate: Callable[[int, HandleRecord], None],
) -> int:
    """The record's descriptor in this process, validated; the caller closes it.

    Tries the transports in order. Raises SetupError saying what failed in each; no descriptor stays open then.
    """
    if record.uid != os.geteuid():
        fix = "run the processes as one user"
        wrong = f"the chunk of rank {record.rank} of group {record.group} is another user's"
        raise SetupError(message("setup", wrong, f"user {record.uid}", f"user {os.geteuid()}", fix))
    failures: list[str] = []
    for name, transport in transports:
        try:
            fd = transport(record, process_index, timeout_s)
            try:
                validate(fd, record)
            except BaseException:
                os.close(fd)
                raise
            return fd
        except (OSError, SetupError) as error:
            failures.append(f"{name}: {error}")
    fix = "run the processes as one user, in one network namespace or with ptrace permission"
    wrong = f"cannot import the chunk of rank {record.rank} of group {record.group} from pid {record.pid}"
    raise SetupError(message("setup", wrong, f"[{' | '.join(failures)}]", "its descriptor", fix))
