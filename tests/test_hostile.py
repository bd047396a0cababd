"""Setups that a process, or the store between them, spoils: one clear error everywhere, no trace, and the next works.

What is wrong with memory handles, descriptors and sockets is in test_hostile_memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from conftest import make_mesh
from jax.sharding import PartitionSpec as P
from setup_kit import CONFIG, STEPS, Hook, Job, at, job_of, mesh, payload_of, refused, with_payload

import moonep_jax as moonep
from moonep_jax.env import Env
from moonep_jax.records import pack

OWNERS = (0, 1, 2)


@pytest.fixture(scope="module", autouse=True)
def jax_has_started() -> None:
    """Its threads stay."""
    mesh = make_mesh((3,), ("ep",))
    run = jax.jit(jax.shard_map(lambda x: x + jax.lax.psum(x, "ep"), mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    run(np.zeros(3)).block_until_ready()


@pytest.fixture(name="job")
def job_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with job_of(OWNERS, monkeypatch) as job:
        yield job


def test_a_clean_job(job: Job) -> None:
    """Setups without anything hostile, as often as one likes; a step on the last one's domain is right."""
    for _ in range(3):
        job.clean_setup()
    job.seen.clear()
    domains = job.setup()
    assert [step for p, step in job.seen if p == 2] == list(STEPS)
    job.works(domains)
    job.ran = True
    ep, real = domains[0], make_mesh((3,), ("ep",))

    def step(x: jax.Array, ids: jax.Array) -> jax.Array:
        d = ep.dispatch(x, ids)
        return ep.combine(d.plan, d.hidden)

    x = np.arange(3 * 4 * 8, dtype=np.float32).reshape(12, 8)
    ids = np.arange(24, dtype=np.int32).reshape(12, 2) % 12
    run = jax.jit(jax.shard_map(step, mesh=real, in_specs=P("ep"), out_specs=P("ep")))
    np.testing.assert_array_equal(run(x, ids), 2 * x)
    job.close(domains)


# -- the store ---------------------------------------------------------------------------------------------------------


def fails(_: bytes) -> bytes:
    raise moonep.SetupError("setup: the store is gone; got UNAVAILABLE, expected success; see process 0")


def breaks(_: bytes) -> bytes:
    raise RuntimeError("INTERNAL: a store that breaks its word")


def hides(_: bytes) -> bytes:
    raise TimeoutError


def garbage(record: bytes) -> bytes:
    """A good frame around nonsense."""
    return with_payload(record, b"\xff\x00{garbage")


# name -> (which hooks, what the store does to the record of process 1, what the text says of whom)
STORES: dict[str, tuple[str, Hook | Callable[[bytes], bytes], int | None, str]] = {
    "cannot write": ("on_set", fails, None, "the key-value store failed in step '{}' on process 1"),
    "breaks when it writes": ("on_set", breaks, None, "failed in step '{}' on process 1"),
    "cannot read": ("on_get", fails, 2, "the key-value store failed in step '{}' on process 2"),
    "breaks when it reads": ("on_get", breaks, 2, "INTERNAL: a store that breaks its word"),
    "hides it": ("on_get", hides, None, "step '{}' timed out; got no word from process 1"),
    "hides it from one": ("on_get", hides, 0, "step '{}' timed out; got no word from process 1"),
    "empties it": ("on_get", lambda r: b"", None, "bad record of step '{}' from process 1"),
    "empties it for one": ("on_get", lambda r: b"", 0, "bad record of step '{}' from process 1"),
    "returns noise": ("on_get", lambda r: bytes(range(256)), None, "bad record of step '{}' from process 1"),
    "cuts it": ("on_get", lambda r: r[:-1], None, "bad record of step '{}' from process 1"),
    "adds to it": ("on_get", lambda r: r + b"\0", None, "bad record of step '{}' from process 1"),
    "swaps senders": ("on_get", lambda r: r[:12] + b"\2" + r[13:], None, "sender 2 instead of 1"),
    "other version": ("on_get", lambda r: r[:8] + b"\2" + r[9:], None, "version 2 instead of 1"),
    "huge length": ("on_get", lambda r: r[:16] + b"\xff" * 8 + r[24:], None, "payload bytes instead of"),
    "nonsense inside": ("on_set", garbage, None, "process 1"),
    "nonsense inside for one": ("on_get", garbage, 2, "process 1"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("store", STORES)
def test_stores(job: Job, step: str, store: str) -> None:
    where, change, reader, text = STORES[store]
    if "hides" in store:
        job.env_of[0] = Env(setup_timeout_s=0.3)
    getattr(job, where).append(at(step, change, reader=reader))  # pyright: ignore[reportArgumentType]
    refused(job.setup(), text.format(step))
    if STEPS.index(step) < STEPS.index("check the handles"):  # its vote, too, may be spoilt for one only
        assert not job.fetched
    job.clean_setup()


PAYLOADS: dict[str, list[bytes]] = {
    "hosts": [b"", b"null", b"[]", b"{}", b'{"boot_id": 1, "hostname": "a"}', b'{"boot_id": "a"}', b'{"a": "b"}'],
    "compare the meshes": [b"", b"[]", b"7", b'{"mesh.ranks": 3}', b'{"a": ', b"\xff"],
    "compare the configs": [b"", b"[]", b'"text"', b'{"config.tokens": null}', b"[" * 2000],
    "domain id": [b"", b"-1", b"x", b"1.5", b"9" * 30, b" 1", "\u0661".encode()],
    "tokens": [b"", b"short", b"x" * 17],
    "handles": [b"", b"x", b"\0" * 232, b"\xff" * 232, b"\0" * 464],
}


@pytest.mark.parametrize(("step", "payload"), [(s, p) for s, many in PAYLOADS.items() for p in many])
def test_payloads(job: Job, step: str, payload: bytes) -> None:
    """Well-framed, and not what the step expects. The largest id that passes leaves ids for later setups."""
    job.on_set.append(at(step, lambda r: with_payload(r, payload)))
    text = refused(job.setup(), "process 1")
    assert f"bad record of step '{step}'" in text or step == "handles", text
    assert len(text) < 2000 and not job.fetched
    job.clean_setup()


def test_a_vote_with_a_text_is_that_process_s_failure(job: Job) -> None:
    job.on_set.append(at("start", lambda r: with_payload(r, b"\xff not even text")))
    refused(job.setup(), "step 'start' failed on 1 of 3 processes", "process 1", "not even text")
    job.clean_setup()


@pytest.mark.parametrize("reason", [b"", b"\xff\xfe", b"gibberish", b"x" * 100_000])
def test_a_reason_to_give_up_that_is_none(job: Job, reason: bytes) -> None:
    job.abort = reason
    job.on_get.append(at("hosts", lambda r: b"", reader=1))
    assert len(refused(job.setup(), "a process gave up without a reason that can be read")) < 1000
    job.clean_setup()


def test_two_processes_with_one_index(job: Job) -> None:
    job.store.set("moonep/0.1.2/0/0/1", pack(STEPS[0], 1, b""))
    refused(job.setup(), "was entered twice; got process 1", "every process its own index")
    job.clean_setup()


def test_a_store_that_is_gone_on_one(job: Job) -> None:
    """No common text without a common store: it says so, and the others name it."""
    job.gone, job.missed = {1}, True
    job.env_of = dict.fromkeys(job.processes, Env(setup_timeout_s=0.5))
    results = job.setup()
    refused({1: results.pop(1)}, "the key-value store failed in step 'check the arguments' on process 1")
    refused(results, "no word from process 1, expected")
    job.clean_setup()


# -- configs, versions, variables --------------------------------------------------------------------------------------

OTHER: dict[str, Any] = {
    "tokens": 5, "hidden": 16, "topk": 1, "experts": 24, "dtype": "bfloat16", "token_padding": 16,
    "weights": {"w": ((3,), "float32")}, "combine": "exact", "planner": "home", "num_sms": 3, "local_sms": 5,
    "stage_bytes": 4096, "timeout_s": 7.0, "first_call_timeout_s": 70.0, "capture_plan": True,
}  # fmt: skip


def test_every_field_has_a_row() -> None:
    assert set(OTHER) == {f.name for f in dataclasses.fields(moonep.EPConfig)}


@pytest.mark.parametrize("field", OTHER)
def test_configs_that_differ(job: Job, field: str) -> None:
    job.config[2][field] = OTHER[field]
    ours, theirs = (str(getattr(moonep.EPConfig(**job.config[p]), field)) for p in (0, 2))
    text = refused(
        job.setup(), f"config.{field} = {ours!r} on process 0 (rank 0 of", f"/ {theirs!r} on process 2 (rank 2"
    )
    assert text.count("config.") == 1 and not job.fetched
    job.clean_setup()


def test_a_leaf_that_differs(job: Job) -> None:
    for p, shape in enumerate([(3,), (3,), (4,)]):
        job.config[p]["weights"] = {"w": (shape, "float32")}
    refused(job.setup(), "config.weights = ", "(3,), float32", "(4,), float32", "on process 2")
    job.clean_setup()


@pytest.mark.parametrize(
    "field", ["version.moonep_jax", "version.jax", "version.jaxlib", "MOONEP_COLLECTIVE_STREAM", "MOONEP_DEBUG"]
)
@pytest.mark.parametrize("value", ["9.9.9", None])
def test_versions_that_differ(job: Job, field: str, value: str | None) -> None:
    def change(record: bytes) -> bytes:
        fields = json.loads(payload_of(record))
        del fields[field]
        return with_payload(record, json.dumps(fields | ({field: value} if value else {})).encode())

    job.on_set.append(at("compare the configs", change, sender=2))
    refused(job.setup(), f"{field} = ", f"/ {value or '(no such field)'!r} on process 2")
    job.clean_setup()


def test_a_forced_kind_on_one(job: Job) -> None:
    job.env_of[1] = dataclasses.replace(job.env, mem_handle_type="fabric")
    refused(job.setup(), "step 'choose the handle kind' failed on 1 of 3", "process 1", "fabric handles are forced")
    job.clean_setup()


# -- meshes ------------------------------------------------------------------------------------------------------------

MESHES: dict[str, tuple[Any, Any, str]] = {
    "order": (mesh((0, 2, 1)), "ep", "mesh.group_0 (device@process by rank) = "),
    "owners": (mesh((0, 1, 1, 2)), "ep", "mesh.ranks = '3' on process 0, process 1 / '4' on process 2"),
    "device ids": (mesh(OWNERS, first=7), "ep", "'7@0 8@1 9@2' on process 2"),
    "axis name": (mesh(OWNERS, names=("expert",)), "expert", "mesh.axes = 'ep' on process 0, process 1 / 'expert' on"),
    "other axes": (mesh(OWNERS, ("ep", "dp"), (3, 1)), "ep", "mesh.other_axes = '' on process 0, process 1 / 'dp'"),
    "groups": (mesh(OWNERS, ("ep", "dp"), (1, 3)), "ep", "mesh.groups = '1' on process 0, process 1 / '3' on"),
    "two axes": (mesh(OWNERS, ("a", "ep"), (1, 3)), ("a", "ep"), "mesh.axes = 'ep' on process 0, process 1 / 'a,ep'"),
    "axis unknown": (mesh(OWNERS), "nothing", "process 2: setup: unknown EP axis; got 'nothing'"),
    "no axis": (mesh(OWNERS), (), "process 2: setup: bad EP axes; got ()"),
    "axis twice": (mesh(OWNERS), ("ep", "ep"), "process 2: setup: bad EP axes"),
    "mixed platforms": (mesh(OWNERS), "ep", "process 2: setup: the mesh mixes platforms; got cpu, gpu"),
    "a device twice": (mesh(OWNERS), "ep", "process 2: setup: a device is in the mesh twice; got device ids [0]"),
}


@pytest.mark.parametrize("name", MESHES)
def test_meshes_that_differ(job: Job, name: str) -> None:
    job.mesh[2], job.axis[2], text = MESHES[name]
    if name in ("mixed platforms", "a device twice"):
        devices = np.array(job.mesh[2].devices)
        devices[1] = dataclasses.replace(devices[1], **({"platform": "gpu"} if "mixed" in name else {"id": 0}))
        job.mesh[2] = jax.sharding.Mesh(devices, ("ep",))
    refused(job.setup(), text)
    assert not job.fetched
    job.clean_setup()


@pytest.mark.parametrize("experts", [4, 1])
def test_a_config_that_does_not_fit(job: Job, experts: int) -> None:
    for p in job.processes:
        job.config[p]["experts"] = experts
    refused(job.setup(), "failed on 3 of 3", f"{experts} experts on 3 ranks")
    job.clean_setup()


def test_a_mesh_of_other_processes(job: Job) -> None:
    """They cannot meet at all: each side names who did not come."""
    job.env_of = dict.fromkeys(job.processes, Env(setup_timeout_s=0.3))
    job.mesh[2], job.missed = mesh((1, 2)), True
    results = job.setup()
    refused({2: results.pop(2)}, "no word from process 1, expected all 2 processes")
    refused(results, "no word from process 2, expected all 3 processes")


def test_the_base_is_what_the_rows_change() -> None:
    assert all(moonep.EPConfig(**CONFIG) != moonep.EPConfig(**CONFIG | {k: v}) for k, v in OTHER.items())
