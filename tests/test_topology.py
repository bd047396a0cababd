"""Groups, ranks and places of meshes of fake devices."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from moonep_jax.errors import ConfigError
from moonep_jax.topology import Group, Member, Topology


@dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    platform: str = "cpu"


def fake_mesh(shape: tuple[int, ...], names: tuple[str, ...], per_process: int = 1, ids: Any = None) -> Any:
    count = int(np.prod(shape))
    ids = range(count) if ids is None else ids
    devices = np.empty(count, dtype=object)
    devices[:] = [FakeDevice(i, n // per_process) for n, i in enumerate(ids)]
    return SimpleNamespace(devices=devices.reshape(shape), axis_names=names)


def test_real_mesh_of_one_device() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("ep",))
    topology = Topology.from_mesh(mesh, "ep")
    assert topology.ranks == 1 and topology.processes == (0,) and topology.platform == jax.devices()[0].platform
    assert topology.place(jax.devices()[0].id) == (0, 0)


def test_one_axis() -> None:
    topology = Topology.from_mesh(fake_mesh((4,), ("ep",), per_process=2, ids=(7, 2048, 3, 1)), "ep")
    members = (Member(0, 7, 0), Member(1, 2048, 0), Member(2, 3, 1), Member(3, 1, 1))
    assert topology.groups == (Group(0, (), members),)
    assert (topology.axes, topology.other_axes, topology.ranks) == (("ep",), (), 4)
    assert topology.local(1) == [(topology.groups[0], members[2]), (topology.groups[0], members[3])]
    assert topology.local(9) == []
    assert topology.place(2048) == (0, 1)
    assert topology == Topology.from_mesh(fake_mesh((4,), ("ep",), per_process=2, ids=(7, 2048, 3, 1)), ("ep",))
    assert hash(topology) == hash(Topology.from_mesh(fake_mesh((4,), ("ep",), 2, (7, 2048, 3, 1)), "ep"))


def test_groups_are_the_other_axes() -> None:
    mesh = fake_mesh((2, 3, 4), ("data", "ep", "model"))
    topology = Topology.from_mesh(mesh, "ep")
    assert topology.ranks == 3 and len(topology.groups) == 8 and topology.other_axes == ("data", "model")
    for group in topology.groups:
        d, m = group.coords
        assert group.index == d * 4 + m
        assert [x.device_id for x in group.devices] == [mesh.devices[d, r, m].id for r in range(3)]
        assert [x.rank for x in group.devices] == [0, 1, 2]


@pytest.mark.parametrize("axes", [("a", "c"), ("c", "a"), ("c", "b", "a"), ("b",)])
def test_rank_is_row_major_over_the_axes_as_given(axes: tuple[str, ...]) -> None:
    sizes = {"a": 2, "b": 3, "c": 4}
    mesh = fake_mesh((2, 3, 4), ("a", "b", "c"))
    topology = Topology.from_mesh(mesh, axes)
    others = [n for n in sizes if n not in axes]
    seen = 0
    for index in np.ndindex(2, 3, 4):
        at = dict(zip(sizes, index, strict=True))
        rank = 0
        for axis in axes:
            rank = rank * sizes[axis] + at[axis]
        group, got = topology.place(mesh.devices[index].id)
        assert got == rank and topology.groups[group].coords == tuple(at[n] for n in others)
        seen += 1
    assert seen == sum(len(g.devices) for g in topology.groups) == topology.ranks * len(topology.groups)


@pytest.mark.parametrize("ranks", [1, 72, 128])
def test_large_groups(ranks: int) -> None:
    topology = Topology.from_mesh(fake_mesh((2, ranks), ("dp", "ep"), per_process=4 if ranks > 1 else 1), "ep")
    assert topology.ranks == ranks and len(topology.groups) == 2
    assert topology.processes == tuple(range(2 * ranks // (4 if ranks > 1 else 1)))
    assert sum(len(topology.local(p)) for p in topology.processes) == 2 * ranks
    assert [topology.place(ranks + r) for r in range(ranks)] == [(1, r) for r in range(ranks)]


def test_processes_of_a_group() -> None:
    topology = Topology.from_mesh(fake_mesh((2, 4), ("dp", "ep"), per_process=2), "ep")
    assert [g.processes for g in topology.groups] == [(0, 1), (2, 3)]


def test_describe() -> None:
    topology = Topology.from_mesh(fake_mesh((2, 2), ("ep", "dp"), per_process=2), "ep")
    assert topology.describe(0) == "process 0 (rank 0 of group 0, rank 0 of group 1)"
    one = Topology.from_mesh(fake_mesh((4,), ("ep",), per_process=2), "ep")
    assert one.describe(1, "h") == "process 1 (ranks 2,3 of group 0 on host h)"
    assert one.describe(5) == "process 5 (outside the mesh)"


def test_fingerprint_tells_meshes_apart() -> None:
    base = Topology.from_mesh(fake_mesh((2, 4), ("dp", "ep")), "ep").fingerprint()
    assert base["mesh.axes"] == "ep" and base["mesh.ranks"] == "4" and base["mesh.groups"] == "2"
    assert all(isinstance(v, str) for v in base.values())
    others = [
        Topology.from_mesh(fake_mesh((2, 4), ("dp", "ep"), ids=(1, 0, *range(2, 8))), "ep"),
        Topology.from_mesh(fake_mesh((2, 4), ("dp", "ep"), per_process=2), "ep"),
        Topology.from_mesh(fake_mesh((2, 4), ("dp", "ep")), "dp"),
        Topology.from_mesh(fake_mesh((2, 4), ("dp", "ep")), ("dp", "ep")),
    ]
    assert all(o.fingerprint() != base for o in others)


@pytest.mark.parametrize("axis", ["nope", ("ep", "nope"), (), ("ep", "ep")])
def test_bad_axis(axis: Any) -> None:
    with pytest.raises(ConfigError, match=r"^setup: (unknown EP axis|bad EP axes); .*the mesh has 'dp', 'ep'"):
        Topology.from_mesh(fake_mesh((2, 4), ("dp", "ep")), axis)


def test_bad_meshes() -> None:
    with pytest.raises(ConfigError, match="the mesh has no devices; got an AbstractMesh"):
        Topology.from_mesh(jax.sharding.AbstractMesh((2,), ("ep",)), "ep")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"twice; got device ids \[3\]"):
        Topology.from_mesh(fake_mesh((4,), ("ep",), ids=(3, 1, 2, 3)), "ep")
    with pytest.raises(ConfigError, match="mesh is empty"):
        Topology.from_mesh(fake_mesh((0,), ("ep",)), "ep")
    mixed = fake_mesh((2,), ("ep",))
    mixed.devices[1] = FakeDevice(1, 0, "gpu")
    with pytest.raises(ConfigError, match="mixes platforms; got cpu, gpu"):
        Topology.from_mesh(mixed, "ep")
    with pytest.raises(ConfigError, match="device id 99"):
        Topology.from_mesh(fake_mesh((4,), ("ep",)), "ep").place(99)
