"""Handle records and the choice of the handle kind: every check has its own error."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest

from moonep_jax import handles
from moonep_jax.errors import SetupError
from moonep_jax.handles import Capability, HandleRecord, choose_kind, decode, namespace_digest

NAMESPACE = "moonep/abc/0"
FD = HandleRecord("fd", namespace_digest(NAMESPACE), 1, 2, 4096, 77, 1000, 5, "moonep-x")
FABRIC = HandleRecord("fabric", namespace_digest(NAMESPACE), 1, 2, 4096, 77, 0xFFFFFFFF, fabric=bytes(range(64)))


def check(data: bytes, **changes: Any) -> HandleRecord:
    return decode(data, **{"namespace": NAMESPACE, "group": 1, "rank": 2, "ranks": 4, "nbytes": 4096, **changes})


@pytest.mark.parametrize("record", [FD, FABRIC, dataclasses.replace(FD, socket_name="s" * 107)])
def test_round_trip(record: HandleRecord) -> None:
    assert len(record.encode()) == handles.RECORD_BYTES
    assert check(record.encode()) == record


def patched(record: HandleRecord, offset: int, data: bytes) -> bytes:
    raw = bytearray(record.encode())
    raw[offset : offset + len(data)] = data
    return bytes(raw)


# Offsets of the wire format, spelled out here so that a change of it does not go unnoticed.
MAGIC, VERSION, KIND, SIZE, DIGEST, GROUP, RANK, NBYTES, PID, UID, FD_AT, NAME, NAME_LEN, FABRIC_AT = (
    0, 8, 10, 12, 16, 32, 36, 40, 48, 52, 56, 60, 167, 168,
)  # fmt: skip


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "wrong length; got 0 bytes, expected 232 bytes"),
        (FD.encode()[:-1], "wrong length; got 231 bytes"),
        (FD.encode() + b"\0", "wrong length; got 233 bytes"),
        (patched(FD, MAGIC, b"X"), "without the magic"),
        (patched(FD, VERSION, b"\x09"), "another version; got 9, expected 1"),
        (patched(FD, SIZE, u32(7)), "states a wrong size; got 7 bytes"),
        (patched(FD, KIND, b"\x03"), r"unknown kind; got 3, expected 1 \(fd\), 2 \(fabric\)"),
        (patched(FD, DIGEST, b"12345678"), "another setup or job"),
        (patched(FD, GROUP, u32(3)), "another group; got group 3, expected group 1"),
        (patched(FD, RANK, u32(4)), "rank out of range; got rank 4, expected 0 to 3"),
        (patched(FD, RANK, u32(0xFFFFFFFF)), "rank out of range"),
        (patched(FD, RANK, u32(1)), "another rank; got rank 1, expected rank 2"),
        (patched(FD, NBYTES, u32(8192)), "another size; got 8192 bytes, expected 4096 bytes"),
        (patched(FD, PID, u32(0)), "without a process id"),
        (patched(FD, FD_AT, u32(0xFFFFFFFF)), "not a descriptor; got -1"),
        (patched(FD, NAME_LEN, b"\0"), "socket name is malformed"),
        (patched(FD, NAME_LEN, b"\x6c"), "socket name is malformed"),
        (patched(FD, NAME_LEN, b"\x02"), "socket name is malformed"),
        (patched(FD, NAME, b"\xff"), "socket name is malformed"),
        (patched(FD, FABRIC_AT, b"\1"), "fd record with a fabric handle"),
        (patched(FABRIC, FD_AT, u32(3)), "fabric record with an fd"),
        (patched(FABRIC, NAME, b"a"), "fabric record with an fd or a socket"),
        (patched(FABRIC, FABRIC_AT, bytes(64)), "fabric handle is empty"),
    ],
)
def test_each_check(data: bytes, text: str) -> None:
    with pytest.raises(SetupError, match=text) as caught:
        check(data)
    assert str(caught.value).startswith("setup: memory handles: ")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"namespace": "moonep/abc/1"}, "another setup or job"),
        ({"group": 0}, "another group"),
        ({"rank": 3}, "another rank"),
        ({"ranks": 2}, "out of range"),
        ({"nbytes": 1}, "another size"),
        ({"kind": "fabric"}, "rank 2's handle is of another kind; got fd, expected fabric"),
    ],
)
def test_record_of_somebody_else(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SetupError, match=text):
        check(FD.encode(), **changes)


def test_encode_refuses_what_does_not_fit() -> None:
    for record in (dataclasses.replace(FD, socket_name="s" * 108), dataclasses.replace(FABRIC, fabric=b"short")):
        with pytest.raises(SetupError, match="wrong size"):
            record.encode()


def ranks(*spec: tuple[str, bool, bool]) -> list[Capability]:
    """(host, fd_ok, fabric_ok) of each rank."""
    return [Capability(r, fd, fabric, host, f"why{r}") for r, (host, fd, fabric) in enumerate(spec)]


BOTH, FD_ONLY, FABRIC_ONLY, NEITHER = (True, True), (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    ("requested", "spec", "kind"),
    [
        ("auto", [("a", *BOTH), ("a", *BOTH)], "fd"),
        ("auto", [("a", *FD_ONLY), ("a", *BOTH)], "fd"),
        ("auto", [("a", *BOTH), ("b", *BOTH)], "fabric"),
        ("auto", [("a", *FABRIC_ONLY), ("b", *BOTH)], "fabric"),
        ("fabric", [("a", *BOTH), ("a", *FABRIC_ONLY)], "fabric"),
        ("fabric", [("a", *BOTH), ("b", *BOTH)], "fabric"),
        ("fd", [("a", *BOTH), ("a", *FD_ONLY)], "fd"),
    ],
)
def test_kind_chosen(requested: Any, spec: Any, kind: str) -> None:
    assert choose_kind(requested, ranks(*spec)) == kind


@pytest.mark.parametrize(
    ("requested", "spec", "texts"),
    [
        ("auto", [("a", *FD_ONLY), ("b", *BOTH)], ["a (ranks 0), b (ranks 1)", "[rank 0 on a: why0]", "needed"]),
        ("auto", [("a", *NEITHER), ("a", *BOTH)], ["fd handles do not work", "[rank 0 on a: why0]"]),
        ("fabric", [("a", *FD_ONLY), ("a", *BOTH), ("a", *NEITHER)], ["forced", "rank 0 on a", "rank 2 on a: why2"]),
        ("fd", [("a", *BOTH), ("b", *BOTH), ("a", *BOTH)], ["spans hosts", "a (ranks 0,2), b (ranks 1)"]),
        ("fd", [("a", *FABRIC_ONLY), ("a", *BOTH)], ["fd handles do not work", "rank 0 on a: why0"]),
    ],
)
def test_kind_refused(requested: Any, spec: Any, texts: list[str]) -> None:
    with pytest.raises(SetupError) as caught:
        choose_kind(requested, ranks(*spec))
    assert all(t in str(caught.value) for t in texts), str(caught.value)


def test_ranks_that_fail_alike_are_named_together() -> None:
    many = [Capability(r, False, False, f"h{r // 2}", "no IMEX channel") for r in range(4)]
    with pytest.raises(SetupError) as caught:
        choose_kind("fabric", many)
    assert "[ranks 0,1 on h0: no IMEX channel | ranks 2,3 on h1: no IMEX channel]" in str(caught.value)
