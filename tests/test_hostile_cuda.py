"""Hostile memory handles on simulated GPUs: the trial, fabric handles, and the stamp that tells chunks apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cuda_kit import World as CudaWorld
from memory_kit import nothing_left_open, same_text, topology
from setup_kit import Change, payload_of, put, with_payload
from test_handles import DIGEST as DIGEST_AT
from test_handles import FABRIC_AT, FD_AT, KIND, MAGIC, NAME, RANK, u32

from moonep_jax.stores import InProcessStore

__all__ = ["nothing_left_open"]  # a fixture for all tests here


class Forger(InProcessStore):
    """Changes process 1's record of a step."""

    def __init__(self, step: str, change: Change) -> None:
        super().__init__()
        self._step, self._change = step.encode(), change

    def set(self, key: str, value: bytes) -> bool:
        if key.endswith("/1") and value[24:].startswith(self._step) and value[24 + len(self._step) :][:1] in b"{[M":
            value = with_payload(value, self._change(payload_of(value)))
        return super().set(key, value)


def in_trial(change: Change) -> Change:
    """Changes each record that process 1 offers for the trial."""

    def changed(payload: bytes) -> bytes:
        found, offered = json.loads(payload)
        return json.dumps([found, {k: change(bytes.fromhex(v)).hex() for k, v in offered.items()}]).encode()

    return changed


BAD_TRIAL = "bad record of step 'trial handles' from process 1 (rank 1 of group 0)"
BAD_RESULT = "bad record of step 'trial results' from process 1 (rank 1 of group 0)"
CUDA: dict[str, tuple[str, Change, str]] = {
    "trial: nonsense": ("trial handles", lambda p: b"{nonsense", BAD_TRIAL),
    "trial: nothing": ("trial handles", lambda p: b"", BAD_TRIAL),
    "trial: one table": ("trial handles", lambda p: b"[{}]", BAD_TRIAL),
    "trial: numbers": ("trial handles", lambda p: b'[{"0/1/fd": 0}, {}]', BAD_TRIAL),
    "trial: not hexadecimal": ("trial handles", lambda p: b'[{}, {"0/1/fabric": "xyz"}]', BAD_TRIAL),
    "trial: cut": ("trial handles", in_trial(lambda r: r[:9]), "a record of wrong length; got 9 bytes"),
    "trial: rank": ("trial handles", in_trial(put(RANK, u32(7))), "a rank out of range; got rank 7"),
    "trial: token": ("trial handles", in_trial(put(DIGEST_AT, bytes(16))), "a record of another setup or job"),
    "trial: empty handle": ("trial handles", in_trial(put(FABRIC_AT, bytes(64))), "rank 1's fabric handle is empty"),
    "trial: another handle": (
        "trial handles",
        in_trial(put(FABRIC_AT, b"FABRIC 999".ljust(64, b"."))),
        "fabric: cannot import from rank 1: fake import_fabric returned CUDA_ERROR_INVALID_VALUE (1)",
    ),
    "results: nonsense": ("trial results", lambda p: b"\xff", BAD_RESULT),
    "results: a list": ("trial results", lambda p: b"[]", BAD_RESULT),
    "results: none": ("trial results", lambda p: b"{}", "rank 1 on alpha (boot 1): fabric: it sent no result"),
    "results: a failure": ("trial results", lambda p: p.replace(b'""', b'"no IMEX"'), "rank 1 on alpha (boot 1): fab"),
    "handle: cut": ("handles", lambda p: p[:100], "process 1 (rank 1 of group 0) sent handle records of wrong length"),
    "handle: magic": ("handles", put(MAGIC, b"m"), "a record without the magic"),
    "handle: kind": ("handles", put(KIND, b"\1"), "rank 1's handle is of another kind; got fd, expected fabric"),
    "handle: rank twice": ("handles", put(RANK, u32(0)), "a record of another rank; got rank 0, expected rank 1"),
    "handle: with an fd": ("handles", put(FD_AT, u32(3)), "a fabric record with an fd or a socket; got fd 3"),
    "handle: with a name": ("handles", put(NAME, b"a"), "a fabric record with an fd or a socket"),
    "handle: empty": ("handles", put(FABRIC_AT, bytes(64)), "rank 1's fabric handle is empty"),
    "handle: nobody's": (
        "handles",
        put(FABRIC_AT, b"FABRIC 999".ljust(64, b".")),
        "cannot map the chunk of rank 1 of group 0; got [fake import_fabric returned CUDA_ERROR_INVALID_VALUE (1)]",
    ),
}


@pytest.mark.parametrize("name", CUDA)
def test_handles_of_gpus(name: str) -> None:
    """World.run checks that no process keeps an allocation, a mapping or a reservation."""
    step, change, text = CUDA[name]
    world = CudaWorld(topology(1, [0, 1, 2]), "{}".format)
    world.store = Forger(step, change)
    got = same_text(world.run())
    assert text in got, got
    if step == "handles" and name != "handle: nobody's":
        assert "step 'check the handles' failed on 3 of 3" in got and "process 1 (rank 1 of group 0)" in got
    world.store = InProcessStore()
    assert not any(isinstance(r, Exception) for r in world.run(world.check).values())


STAMPS = {
    "magic": (0, b"X"), "setup": (8, b"\0" * 16), "group": (24, u32(1)), "rank": (28, u32(2)), "size": (32, b"\1" * 8),
    "all": (0, bytes(40)),
}  # fmt: skip


@pytest.mark.parametrize("host_of", [None, "{}".format], ids=["fd", "fabric"])
@pytest.mark.parametrize("field", STAMPS)
def test_stamps(field: str, host_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle that works, of memory that is not the chunk: its stamp says so before anybody uses it."""
    world = CudaWorld(topology(1, [0, 1, 2]), host_of)
    driver = world.drivers[1]
    write, (offset, data) = driver.write, STAMPS[field]
    monkeypatch.setattr(driver, "write", lambda ordinal, at, stamp: write(ordinal, at, put(offset, data)(stamp)))
    text = same_text(world.run())
    assert "cannot import from rank 1: setup: the memory imported for rank 1 is not its chunk" in text
    monkeypatch.undo()
    assert not any(isinstance(r, Exception) for r in world.run(world.check).values())


@pytest.mark.parametrize("call", ["import_fd", "map", "set_access", "read"])
def test_a_gpu_that_fails_at_import_is_named_with_the_peer(call: str) -> None:
    good = CudaWorld(topology(1, [0, 1, 2]))
    good.run()
    world = CudaWorld(topology(1, [0, 1, 2]))
    world.drivers[2].faults[call, good.drivers[2].calls[call]] = 999  # the chunk of rank 1
    text = same_text(world.run())
    assert "process 2 (rank 2 of group 0): setup: cannot map the chunk of rank 1 of group 0" in text
    assert f"fake {call} returned CUDA_ERROR_UNKNOWN (999)" in text and "see the log of process 1" in text
