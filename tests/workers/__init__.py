"""Programs that the multi-process tests run in child processes, and the Context that each of them gets."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec


class Context:
    """Who this process is, where its results go, and how to build meshes and arrays over all processes."""

    def __init__(self, spec: dict[str, Any]):
        self.index: int = spec["index"]
        self.processes: int = spec["processes"]
        self.local_devices: int = spec["devices"]
        self.args: dict[str, Any] = spec["args"]
        self.out = Path(spec["out"])
        self._results = open(self.out / f"{self.index}.results", "a", buffering=1)  # noqa: SIM115 - lives as we do
        self._barriers: Counter[tuple[int, ...]] = Counter()  # passed, by members

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self._results.close()

    @property
    def devices(self) -> int:
        """Devices of all processes."""
        return self.processes * self.local_devices

    def record(self, case: str, value: Any) -> None:
        """Keeps a JSON value under the name of a case."""
        self._results.write(json.dumps({"case": case, "value": value}) + "\n")

    def case(self, name: str, body: Callable[[], Any]) -> None:
        """Records what body returns, or the exception that it raises."""
        try:
            value = body()
        except Exception:
            value = {"raised": traceback.format_exc()[-3000:]}
        self.record(name, value)

    def mesh(
        self,
        shape: tuple[int, ...] | None = None,
        names: tuple[str, ...] = ("ep",),
        order: tuple[int, ...] | None = None,
        axis_type: AxisType = AxisType.Auto,
    ) -> jax.sharding.Mesh:
        """A mesh over all devices of the run (a machine may have more), in JAX's order or in the order given."""
        devices = np.array(jax.devices())[list(order) if order else slice(self.devices)].reshape(
            shape or (self.devices,)
        )
        return jax.sharding.Mesh(devices, names, axis_types=(axis_type,) * len(names))

    @staticmethod
    def put(array: Any, mesh: jax.sharding.Mesh, spec: PartitionSpec) -> jax.Array:
        """A global array from its whole value, which every process knows."""
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    @staticmethod
    def rank_of(device: jax.Device, mesh: jax.sharding.Mesh) -> int:
        """The place of a device in a mesh of one axis."""
        return list(mesh.devices.flat).index(device)

    @staticmethod
    def local(array: jax.Array) -> Iterator[tuple[Any, np.ndarray]]:
        """(index into the global array, value) of each shard of this process."""
        for shard in array.addressable_shards:
            yield shard.index, np.asarray(shard.data)

    def error(self, array: jax.Array, expected: np.ndarray) -> float:
        """Largest difference of this process's shards from the whole expected array, relative to its largest value."""
        scale = float(np.abs(expected).max()) or 1.0
        worst = 0.0
        for index, value in self.local(array):
            difference = np.abs(value.astype(np.float64) - expected[index])
            worst = max(worst, float(np.nan_to_num(difference, nan=np.inf).max()) / scale)
        return worst

    def barrier(self, timeout_s: float = 120.0, members: Sequence[int] | None = None) -> None:
        """Waits for all processes, or those named, through jax.distributed's service: no XLA collective, nothing of the
        library under test."""
        who = tuple(range(self.processes) if members is None else members)
        self._barriers[who] += 1
        if len(who) > 1:
            name = "/".join(["tests", *map(str, who), f"n{self._barriers[who]}"])
            client().wait_at_barrier(name, round(timeout_s * 1000), process_ids=list(who))

    def shut_down_after(self, others: Iterable[int]) -> None:
        """Ends jax.distributed in the survivors of a recoverable run: process 0, which keeps the service, comes last.

        There is no barrier at shutdown in such a run, and a service that goes first takes the others with it.
        """
        if self.index == 0:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not all((self.out / f"{i}.done").exists() for i in others):
                time.sleep(0.05)
        jax.distributed.shutdown()
        (self.out / f"{self.index}.done").touch()


def client() -> Any:
    """The client of jax.distributed."""
    from jax._src import distributed

    return distributed.global_state.client


@contextlib.contextmanager
def variables(**values: Any) -> Iterator[None]:
    """Sets environment variables for a while; setup reads them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def raised(body: Callable[[], Any]) -> dict[str, Any] | None:
    """Type, text and seconds of the exception that body raises; None when it returns."""
    start = time.monotonic()
    try:
        body()
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    return None
