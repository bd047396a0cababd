"""The real driver's wrapper over bindings that are simulated: errors with names and numbers, contexts put back."""

from __future__ import annotations

import enum
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonep_jax.errors import MoonEPError, SetupError
from moonep_jax.memory import driver as driver_module
from moonep_jax.memory.driver import Attributes, CudaDriver, DriverError, Facts, Link, load


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_PERMITTED = 800


class Names:
    """Any constant of an enum of the bindings: its own name."""

    def __getattr__(self, name: str) -> str:
        return name


class Fabric:
    data = b""

    def getPtr(self) -> int:  # as the bindings spell it
        return 0xFAB


class Bindings:
    """cuda.bindings.driver: records calls; `results[call]` is what follows the success code; `fails[call]` a code."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.results: dict[str, tuple[Any, ...]] = {
            "cuDeviceGet": ("device",),
            "cuDevicePrimaryCtxRetain": ("context",),
            "cuCtxPopCurrent": ("context",),
            "cuStreamCreate": ("stream",),
            "cuMemGetInfo": (5, 9),
            "cuDeviceGetAttribute": (1,),
        }
        self.fails: dict[str, int] = {}
        for name in (
            "memAllocationHandleType",
            "device_attribute",
            "memAllocationGranularity_flags",
            "device_P2PAttribute",
        ):
            setattr(self, f"CU{name}", Names())
        for name in ("memAllocationType", "memLocationType", "memAccess_flags", "stream_flags"):
            setattr(self, f"CU{name}", Names())
        self.CUmemAllocationProp = self.CUmemAccessDesc = lambda: SimpleNamespace(location=SimpleNamespace())
        self.CUmemFabricHandle = Fabric

    def __getattr__(self, call: str) -> Callable[..., tuple[Any, ...]]:
        if not call.startswith("cu"):
            raise AttributeError(call)

        def run(*args: Any) -> tuple[Any, ...]:
            self.calls.append((call, *args))
            code = Result(self.fails.get(call, 0))
            return (code, *self.results.get(call, ())) if not code else (code, None)

        return run

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


@pytest.fixture(name="bindings")
def bindings_fixture() -> Bindings:
    return Bindings()


@pytest.fixture(name="driver")
def driver_fixture(bindings: Bindings) -> CudaDriver:
    made = CudaDriver(bindings)
    bindings.calls.clear()
    return made


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    load.cache_clear()
    yield
    load.cache_clear()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(SetupError, match=r"needs the package cuda-python; .*pip install 'moonep-jax\[cuda13\]'"):
        load()


@pytest.mark.parametrize("missing", ["driver", "device"])
def test_without_a_driver(monkeypatch: pytest.MonkeyPatch, bindings: Bindings, missing: str) -> None:
    def no_library(flags: int) -> Any:
        raise RuntimeError("libcuda.so.1 not found")

    if missing == "driver":
        monkeypatch.setattr(bindings, "cuInit", no_library, raising=False)
    else:
        bindings.fails["cuInit"] = 800
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
    expected = {"driver": "libcuda.so.1 not found", "device": r"cuInit returned CUDA_ERROR_NOT_PERMITTED \(800\)"}
    with pytest.raises(SetupError, match=f"no CUDA driver; got {expected[missing]}"):
        load()


def test_one_driver_per_process(monkeypatch: pytest.MonkeyPatch, bindings: Bindings) -> None:
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
    assert load() is load()
    assert bindings.names() == ["cuInit"]


def test_errors_name_call_number_and_subject(driver: CudaDriver, bindings: Bindings) -> None:
    bindings.fails["cuMemCreate"] = 800
    with pytest.raises(DriverError) as caught:
        driver.create(3, 4096, "fabric")
    error = caught.value
    assert (error.call, error.code, error.name) == ("cuMemCreate", 800, "CUDA_ERROR_NOT_PERMITTED")
    subject = "4096 bytes on CUDA device 3, handle kind fabric"
    assert str(error) == f"cuMemCreate ({subject}) returned CUDA_ERROR_NOT_PERMITTED (800)"
    assert isinstance(error, MoonEPError)


def test_attributes(driver: CudaDriver, bindings: Bindings) -> None:
    assert driver.attributes(2) == Attributes(True, True, True, True)
    asked = [call[1] for call in bindings.calls if call[0] == "cuDeviceGetAttribute"]
    assert asked == [
        "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
        "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
        "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED",
        "CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED",
    ]


def test_what_reports_ask(driver: CudaDriver, bindings: Bindings) -> None:
    bindings.results |= {
        "cuDriverGetVersion": (13000,),
        "cuDeviceGetName": (b"NVIDIA H200\0\0\0",),
        "cuDeviceGetPCIBusId": (b"0000:0A:00.0\0",),
        "cuDeviceTotalMem": (7,),
        "cuDeviceGetAttribute": (9,),
        "cuDeviceGetP2PAttribute": (1,),
    }
    assert driver.version() == 13000
    assert driver.facts(2) == Facts("NVIDIA H200", (9, 9), 7, "0000:0A:00.0")
    assert driver.link(0, 1) == Link(True, True, 1)
    asked = [call[1] for call in bindings.calls if call[0] == "cuDeviceGetP2PAttribute"]
    names = ("ACCESS_SUPPORTED", "NATIVE_ATOMIC_SUPPORTED", "PERFORMANCE_RANK")
    assert asked == [f"CU_DEVICE_P2P_ATTRIBUTE_{name}" for name in names]


@pytest.mark.parametrize("fails", [None, "cuMemsetD8Async", "cuStreamSynchronize", "cuStreamCreate"])
def test_the_context_is_put_back(driver: CudaDriver, bindings: Bindings, fails: str | None) -> None:
    if fails:
        bindings.fails[fails] = 2
        with pytest.raises(DriverError, match=fails):
            driver.zero(1, 4096, 10)
    else:
        driver.zero(1, 4096, 10)
        assert ("cuMemsetD8Async", 4096, 0, 10, "stream") in bindings.calls
    names = bindings.names()
    assert names.count("cuCtxPushCurrent") == names.count("cuCtxPopCurrent") == 1
    assert names.count("cuStreamDestroy") == (fails != "cuStreamCreate")
    assert ("cuStreamCreate", "CU_STREAM_NON_BLOCKING") in bindings.calls
    assert driver.free_bytes(1) == 5
    assert bindings.names().count("cuDevicePrimaryCtxRetain") == 1  # and never released


def test_handles(driver: CudaDriver, bindings: Bindings) -> None:
    bindings.results["cuMemImportFromShareableHandle"] = (7,)
    assert driver.import_fabric(bytes(64)) == 7
    assert bindings.calls[-1] == ("cuMemImportFromShareableHandle", 0xFAB, "CU_MEM_HANDLE_TYPE_FABRIC")
    with pytest.raises(ValueError, match="fabric handle of 63 bytes"):
        driver.import_fabric(bytes(63))
    bindings.results["cuMemExportToShareableHandle"] = (bytes(range(64)),)
    assert driver.export_fabric(7) == bytes(range(64))
    assert bindings.calls[-1] == ("cuMemExportToShareableHandle", 7, "CU_MEM_HANDLE_TYPE_FABRIC", 0)
    fd = os.open("/dev/null", os.O_RDONLY)
    try:
        os.set_inheritable(fd, True)
        bindings.results["cuMemExportToShareableHandle"] = (fd,)
        assert driver.export_fd(7) == fd and not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_access_for_several_devices(driver: CudaDriver, bindings: Bindings) -> None:
    driver.set_access(4096, 8192, [2, 5])
    _, address, nbytes, descriptions, count = bindings.calls[-1]
    assert (address, nbytes, count, [d.location.id for d in descriptions]) == (4096, 8192, 2, [2, 5])
    assert {d.flags for d in descriptions} == {"CU_MEM_ACCESS_FLAGS_PROT_READWRITE"}


def test_no_multicast() -> None:
    folder = Path(driver_module.__file__).parent
    assert not [p.name for p in folder.glob("*.py") if re.search(r"cuMulticast|CUmulticast", p.read_text())]
