"""Topology: who is who in a mesh - EP groups, ranks, devices and processes - as plain, hashable values.

A *rank* is a place in its EP group, row-major over the EP axes in the order given. A *device id* is JAX's global
`device.id`. A *process index* is JAX's. None of the three may be taken for another. Imports NumPy, JAX's AbstractMesh
type and errors only, and starts no backend.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from moonep_jax.errors import ConfigError, message


class Member(NamedTuple):
    """One rank of a group: its rank in the group, its global device id and the process that owns the device."""

    rank: int
    device_id: int
    process_index: int


@dataclass(frozen=True)
class Group:
    """One EP group: its index, its coordinates on the mesh's other axes, and its devices in rank order."""

    index: int
    coords: tuple[int, ...]
    devices: tuple[Member, ...]

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """Process indices that own a member, ascending."""
        return tuple(sorted({m.process_index for m in self.devices}))


@dataclass(frozen=True)
class Topology:
    """All EP groups of a mesh.

    Attributes:
      axes: the EP axes, in the order given.
      other_axes: the mesh's other axes, in the mesh's order; groups are numbered row-major over them.
      ranks: R, size of every group.
      groups: all groups, by index.
      platform: platform of the devices ("cpu", "gpu", ...).
    """

    axes: tuple[str, ...]
    other_axes: tuple[str, ...]
    ranks: int
    groups: tuple[Group, ...]
    platform: str

    @staticmethod
    def from_mesh(mesh: jax.sharding.Mesh, axis: str | tuple[str, ...]) -> Topology:
        """Reads groups and ranks off a mesh. Raises ConfigError for an axis or a mesh that cannot be used."""
        if isinstance(mesh, jax.sharding.AbstractMesh):
            fix = "pass the jax.sharding.Mesh that holds the devices"
            raise _bad("the mesh has no devices", "an AbstractMesh", "a concrete jax.sharding.Mesh", fix)
        names, axes = tuple(mesh.axis_names), (axis,) if isinstance(axis, str) else tuple(axis)
        fix = f"name one axis of the mesh or a tuple of them (the mesh has {', '.join(map(repr, names))})"
        if not axes or len(set(axes)) != len(axes):
            raise _bad("bad EP axes", repr(axis), "at least one axis, each once", fix)
        if unknown := [a for a in axes if a not in names]:
            raise _bad("unknown EP axis", ", ".join(map(repr, unknown)), "axes of the mesh", fix)
        others = tuple(a for a in names if a not in axes)
        devices = np.asarray(mesh.devices, dtype=object)
        sizes = dict(zip(names, devices.shape, strict=True))
        ranks = math.prod(sizes[a] for a in axes)
        _check_devices(list(devices.flat))
        table = devices.transpose([names.index(a) for a in others + axes]).reshape(-1, ranks)
        groups = tuple(
            Group(
                index=g,
                coords=tuple(int(c) for c in np.unravel_index(g, tuple(sizes[a] for a in others))) if others else (),
                devices=tuple(Member(r, int(d.id), int(d.process_index)) for r, d in enumerate(row)),
            )
            for g, row in enumerate(table)
        )
        return Topology(axes, others, ranks, groups, str(devices.flat[0].platform))

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """Process indices that own a device of the mesh, ascending."""
        return tuple(sorted({p for g in self.groups for p in g.processes}))

    @functools.cached_property
    def device_ids(self) -> tuple[tuple[int, ...], ...]:
        """Global device ids of every group, by rank."""
        return tuple(tuple(m.device_id for m in g.devices) for g in self.groups)

    def local(self, process_index: int) -> list[tuple[Group, Member]]:
        """The members that a process owns, by group and rank."""
        return [(g, m) for g in self.groups for m in g.devices if m.process_index == process_index]

    def place(self, device_id: int) -> tuple[int, int]:
        """(group index, rank) of a device, by its global id. Raises ConfigError when it is not in the mesh."""
        try:
            return self._places[device_id]
        except KeyError:
            fix = "run the op on a device of the mesh that setup was given"
            raise _bad("device outside the mesh", f"device id {device_id}", "a device of the mesh", fix) from None

    @functools.cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {m.device_id: (g.index, m.rank) for g in self.groups for m in g.devices}

    def describe(self, process_index: int, host: str = "") -> str:
        """Text for messages: "process 3 (ranks 4,5 of group 0 on host h)"."""
        parts: list[str] = []
        for group in self.groups:
            if ranks := [str(m.rank) for m in group.devices if m.process_index == process_index]:
                parts.append(f"rank{'s' if len(ranks) > 1 else ''} {','.join(ranks)} of group {group.index}")
        where = ", ".join(parts) or "outside the mesh"
        return f"process {process_index} ({where}{f' on host {host}' if host else ''})"

    def fingerprint(self) -> dict[str, str]:
        """Axes, sizes and the device and process of every rank as text, for comparing processes."""
        fields = {
            "mesh.axes": ",".join(self.axes),
            "mesh.other_axes": ",".join(self.other_axes),
            "mesh.ranks": str(self.ranks),
            "mesh.groups": str(len(self.groups)),
            "mesh.platform": self.platform,
        }
        for g in self.groups:
            places = " ".join(f"{m.device_id}@{m.process_index}" for m in g.devices)
            fields[f"mesh.group_{g.index} (device@process by rank)"] = places
        return fields


def _bad(wrong: str, got: object, expected: object, fix: str) -> ConfigError:
    return ConfigError(message("setup", wrong, got, expected, fix))


def _check_devices(devices: list[Any]) -> None:
    ids = [int(d.id) for d in devices]
    if not ids:
        raise _bad("the mesh is empty", "0 devices", "at least one device", "build the mesh from jax.devices()")
    if len(set(ids)) != len(ids):
        twice = sorted({i for i in ids if ids.count(i) > 1})
        raise _bad("a device is in the mesh twice", f"device ids {twice}", "each device once", "rebuild the mesh")
    platforms = sorted({str(d.platform) for d in devices})
    if len(platforms) > 1:
        raise _bad("the mesh mixes platforms", ", ".join(platforms), "one platform", "use devices of one kind")
