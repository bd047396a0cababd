"""What the steps of an exchange send: the frame of a record, and the one kind of structured payload.

A record comes from another process: nothing of it is believed before it is checked. Imports the standard library only.
"""

from __future__ import annotations

import json
import struct
from typing import Final

_HEADER: Final = struct.Struct("<8sHHIQ")  # magic, version, bytes of the step's name, sender, bytes of the payload
_MAGIC: Final = b"MOONEPEX"
_VERSION: Final = 1


def pack(step: str, sender: int, payload: bytes) -> bytes:
    """A record."""
    name = step.encode()
    return _HEADER.pack(_MAGIC, _VERSION, len(name), sender, len(payload)) + name + payload


def unpack(record: bytes, step: str, sender: int) -> bytes:
    """The payload of a record. Raises ValueError saying what is wrong with it."""
    if len(record) < _HEADER.size:
        raise ValueError(f"{len(record)} bytes, shorter than the header of {_HEADER.size}")
    magic, version, name_bytes, got_sender, payload_bytes = _HEADER.unpack_from(record)
    name, payload = record[_HEADER.size : _HEADER.size + name_bytes], record[_HEADER.size + name_bytes :]
    if magic != _MAGIC:
        raise ValueError(f"magic {magic!r} instead of {_MAGIC!r}")
    if version != _VERSION:
        raise ValueError(f"version {version} instead of {_VERSION}")
    if name != step.encode():
        raise ValueError(f"step {name.decode(errors='replace')!r} instead of {step!r}")
    if got_sender != sender:
        raise ValueError(f"sender {got_sender} instead of {sender}")
    if len(payload) != payload_bytes:
        raise ValueError(f"{len(payload)} payload bytes instead of {payload_bytes}")
    return payload


def parse_texts(data: bytes) -> dict[str, str]:
    """A JSON object of strings. Raises ValueError."""
    return check_texts(json.loads(data))


def check_texts(table: object) -> dict[str, str]:
    """The table, if it is a dict of strings. Raises ValueError."""
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise ValueError(f"{str(table)[:80]} instead of an object of strings")
    return table
