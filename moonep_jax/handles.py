"""Memory handles on the wire: the record that tells a peer how to import a chunk, its checks, and the choice of kind.

Kinds: "fd" (a file descriptor, one host) and "fabric" (64 bytes, hosts of one NVLink/IMEX domain). Nothing here opens,
imports or maps anything. Imports errors only.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from moonep_jax.errors import SetupError, message

Kind = Literal["fd", "fabric"]

FABRIC_BYTES: Final = 64
SOCKET_NAME_BYTES: Final = 107  # sun_path is 108 bytes, one of them the leading NUL of an abstract name
DIGEST_BYTES: Final = 16
_MAGIC: Final = b"MOONEPHD"
_VERSION: Final = 1
_KINDS: Final[dict[int, Kind]] = {1: "fd", 2: "fabric"}
# magic, version, kind, total bytes, digest, group, rank, chunk bytes, pid, uid, fd, socket name, its length, fabric
_RECORD: Final = struct.Struct(f"<8sHHI{DIGEST_BYTES}sIIQIIi{SOCKET_NAME_BYTES}sB{FABRIC_BYTES}s")
RECORD_BYTES: Final = _RECORD.size


def namespace_digest(namespace: str) -> bytes:
    """What binds records, sockets and memory to one setup: a digest of the exchange's namespace."""
    return hashlib.sha256(namespace.encode()).digest()[:DIGEST_BYTES]


@dataclass(frozen=True)
class HandleRecord:
    """How to import one rank's chunk.

    Attributes: kind. digest: namespace_digest of the setup. group, rank: whose chunk it is. nbytes: size of the chunk.
    pid, uid: the exporting process. fd: its descriptor number, -1 for fabric. socket_name: abstract unix socket that
    serves the fd, without the leading NUL; empty for fabric. fabric: the 64-byte handle; empty for fd.
    """

    kind: Kind
    digest: bytes
    group: int
    rank: int
    nbytes: int
    pid: int
    uid: int
    fd: int = -1
    socket_name: str = ""
    fabric: bytes = b""

    def encode(self) -> bytes:
        """The record as RECORD_BYTES bytes."""
        code = next(c for c, kind in _KINDS.items() if kind == self.kind)
        name = self.socket_name.encode("ascii")
        if len(name) > SOCKET_NAME_BYTES or len(self.fabric) not in (0, FABRIC_BYTES):
            got = f"{len(name)} and {len(self.fabric)} bytes"
            expected = f"at most {SOCKET_NAME_BYTES}, and 0 or {FABRIC_BYTES}"
            raise _bad("a socket name or fabric handle of wrong size", got, expected)
        head = (_MAGIC, _VERSION, code, RECORD_BYTES, self.digest, self.group, self.rank, self.nbytes)
        return _RECORD.pack(*head, self.pid, self.uid, self.fd, name, len(name), self.fabric)


def decode(
    data: bytes,
    *,
    namespace: str,
    group: int,
    rank: int,
    ranks: int,
    nbytes: int,
    kind: Kind | None = None,
    sender: str = "",
) -> HandleRecord:
    """The record that `rank` of `group` (of `ranks` ranks) sent in this setup. SetupError, with a text per check.

    kind: the one kind to accept; None: any. sender: who sent it, for the texts.
    """

    def bad(wrong: str, got: object, expected: object) -> SetupError:
        return _bad(wrong, got, expected, sender)

    if len(data) != RECORD_BYTES:
        raise bad("a record of wrong length", f"{len(data)} bytes", f"{RECORD_BYTES} bytes")
    magic, version, code, total, digest, *rest = _RECORD.unpack(data)
    got_group, got_rank, got_bytes, pid, uid, fd, name, name_bytes, fabric = rest
    if magic != _MAGIC:
        raise bad("a record without the magic", repr(magic), repr(_MAGIC))
    if version != _VERSION:
        raise bad("a record of another version", version, _VERSION)
    if total != RECORD_BYTES:
        raise bad("a record that states a wrong size", f"{total} bytes", f"{RECORD_BYTES} bytes")
    if code not in _KINDS:
        raise bad("a record of unknown kind", code, ", ".join(f"{c} ({kind})" for c, kind in _KINDS.items()))
    if digest != namespace_digest(namespace):
        raise bad("a record of another setup or job", digest.hex(), namespace_digest(namespace).hex())
    if got_group != group:
        raise bad("a record of another group", f"group {got_group}", f"group {group}")
    if got_rank >= ranks:
        raise bad("a rank out of range", f"rank {got_rank}", f"0 to {ranks - 1}")
    if got_rank != rank:
        raise bad("a record of another rank", f"rank {got_rank}", f"rank {rank}")
    if got_bytes != nbytes:
        raise bad(f"rank {rank}'s chunk has another size", f"{got_bytes} bytes", f"{nbytes} bytes")
    if pid == 0:
        raise bad("a record without a process id", pid, "a process id of at least 1")
    if kind is not None and kind != _KINDS[code]:
        raise bad(f"rank {rank}'s handle is of another kind", _KINDS[code], kind)
    kind = _KINDS[code]
    if kind == "fd":
        if fd < 0:
            raise bad(f"rank {rank}'s fd is not a descriptor", fd, "0 or more")
        if not 0 < name_bytes <= SOCKET_NAME_BYTES or not name[:name_bytes].isascii() or any(name[name_bytes:]):
            expected = f"1 to {SOCKET_NAME_BYTES} ASCII bytes"
            raise bad(f"rank {rank}'s socket name is malformed", f"{name_bytes} bytes", expected)
        if any(fabric):
            raise bad("an fd record with a fabric handle", fabric.hex(), "zeros")
        return HandleRecord(kind, digest, group, rank, nbytes, pid, uid, fd, name[:name_bytes].decode("ascii"))
    if fd != -1 or name_bytes or any(name):
        raise bad("a fabric record with an fd or a socket", f"fd {fd}, {name_bytes} name bytes", "fd -1, no name")
    if not any(fabric):
        raise bad(f"rank {rank}'s fabric handle is empty", "zeros", f"{FABRIC_BYTES} bytes from the driver")
    return HandleRecord(kind, digest, group, rank, nbytes, pid, uid, fabric=fabric)


class Capability(NamedTuple):
    """What one rank of a group found by trial: which kinds work, the host it is on, and why a kind does not work."""

    rank: int
    fd_ok: bool
    fabric_ok: bool
    host: str
    detail: str = ""


def choose_kind(requested: Literal["auto", "fd", "fabric"], capabilities: Sequence[Capability]) -> Kind:
    """The one handle kind of a group, from what all its ranks found; every rank computes the same.

    fabric when all ranks can and the group spans hosts or it is asked for; else fd when the group is on one host and
    all ranks can; else SetupError naming ranks, hosts and what failed. A forced kind is never replaced.
    """
    hosts: dict[str, list[int]] = {}
    for c in capabilities:
        hosts.setdefault(c.host, []).append(c.rank)
    where = ", ".join(f"{host} (ranks {','.join(map(str, ranks))})" for host, ranks in hosts.items())
    spans = len(hosts) > 1
    if requested == "fabric" or (requested == "auto" and spans):
        if lacking := [c for c in capabilities if not c.fabric_ok]:
            fix = (
                "use GPUs of one NVLink/IMEX domain with IMEX channels"
                if requested == "auto"
                else "unset MOONEP_MEM_HANDLE_TYPE or set it to auto"
            )
            wrong = "fabric handles are " + ("forced" if requested == "fabric" else f"needed (the group is on {where})")
            raise _kind_error(f"{wrong}, but do not work on some ranks", lacking, "fabric on every rank", fix)
        return "fabric"
    if spans:
        fix = "unset MOONEP_MEM_HANDLE_TYPE, or put the group on one host"
        raise SetupError(message("setup", "fd handles are forced, but the group spans hosts", where, "one host", fix))
    if lacking := [c for c in capabilities if not c.fd_ok]:
        fix = "allow unix sockets or pidfd_getfd (CAP_SYS_PTRACE) between the processes"
        raise _kind_error("fd handles do not work on some ranks", lacking, "fd on every rank", fix)
    return "fd"


def _kind_error(wrong: str, lacking: Sequence[Capability], expected: str, fix: str) -> SetupError:
    alike: dict[tuple[str, str], list[str]] = {}
    for c in lacking:
        alike.setdefault((c.host, c.detail or "not supported"), []).append(str(c.rank))
    got = " | ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {','.join(ranks)} on {host}: {why}"
        for (host, why), ranks in alike.items()
    )
    return SetupError(message("setup", wrong, f"[{got}]", expected, fix))


def _bad(wrong: str, got: object, expected: object, sender: str = "") -> SetupError:
    fix = "run the same version of moonep_jax and the same config on every process"
    return SetupError(
        message("setup", f"memory handles{f' of {sender}' if sender else ''}: {wrong}", got, expected, fix)
    )
