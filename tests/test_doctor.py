"""The doctor: simulated GPUs with every fault that it must explain, its screen, its JSON, its self-test."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from fake_driver import FakeDriver, Machines
from memory_kit import nothing_left_open  # noqa: F401  (fixtures)

from moonep_jax import reference
from moonep_jax.doctor import child, command, gpu, host, kind, screen, selftest, software, trial
from moonep_jax.doctor.rows import Report, Row
from moonep_jax.env import VARIABLES, Env
from moonep_jax.errors import SetupError, message
from moonep_jax.memory import fds
from moonep_jax.memory.cuda import CudaMemory
from moonep_jax.memory.driver import Attributes, Link

TABLE = {5: 3, 9: 4}  # JAX device id -> CUDA ordinal
ROW_KEYS = {"name", "status", "value", "fix", "where", "data"}


class Node:
    """A host with simulated GPUs: this process's driver and the second process's."""

    def __init__(self, table: dict[int, int] | None = None) -> None:
        self.table = TABLE if table is None else table
        self.machines = Machines()
        self.mine, self.childs = (FakeDriver(self.machines, "host", sorted(self.table.values())) for _ in range(2))
        self.transports: Sequence[Any] = fds.TRANSPORTS
        self.requests: list[dict[str, Any]] = []

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        ordinals = {int(d): o for d, o in json.loads(json.dumps(request))["ordinals"].items()}
        return json.loads(json.dumps(child.answer(request, CudaMemory(self.childs, ordinals), self.transports)))

    def rows(self, root: Path = Path("/nothing"), runtime: int = 13000, env: Env | None = None) -> dict[str, list[Row]]:
        outcome, transports = trial.try_devices("gpu", CudaMemory(self.mine, self.table), self.table, self.ask)
        found = gpu.rows(self.mine, self.table, outcome, runtime, root) + trial.transport_rows(transports)
        found.append(kind.alone(env or Env(), outcome))
        assert self.mine.live() == self.childs.live() == {} and not self.machines.allocations
        by_name: dict[str, list[Row]] = {}
        for row in found:
            by_name.setdefault(row.name, []).append(row)
        return by_name


def failures(rows: dict[str, list[Row]]) -> list[str]:
    return [name for name, found in rows.items() if any(row.status == "failure" for row in found)]


# -- simulated GPUs ----------------------------------------------------------------------------------------------------


def test_healthy_gpus() -> None:
    rows = Node().rows()
    assert not failures(rows)
    assert [row.where for row in rows["GPU"]] == ["device 5", "device 9"]
    assert rows["GPU"][0].value == "Fake GPU, compute 9.0, 1.0 of 1.0 GiB free"
    assert rows["GPU"][0].data["ordinal"] == 3 and rows["GPU"][0].data["pci"] == "0000:03:00.0"
    for row in rows["memory handles"]:
        assert row.data["fd"] == row.data["fabric"] == {"attribute": True, "works": True, "error": ""}
    (link,) = rows["link"]
    assert link.where == "devices 5-9" and link.data["type"].startswith("NVLink")
    assert rows["unix sockets"][0].status == rows["pidfd_getfd"][0].status == "ok"
    assert rows["handle kind"][0].data["kind"] == "fd"
    assert rows["CUDA"][0].value.startswith("driver for CUDA 13.0, module built with CUDA 13.0")


def test_the_attribute_says_fabric_but_it_is_refused() -> None:
    node = Node()
    node.mine.refuses["fabric"] = 800
    rows = node.rows()
    assert not failures(rows)
    for row in rows["memory handles"]:
        assert row.data["fabric"]["attribute"] and not row.data["fabric"]["works"]
        assert "fabric yes, tried: fake create returned CUDA_ERROR_NOT_PERMITTED (800)" in row.value
        assert row.data["fd"]["works"]
    assert rows["handle kind"][0].data["kind"] == "fd"
    rows = node.rows(env=Env(mem_handle_type="fabric"))
    assert rows["handle kind"][0].status == "warning" and rows["handle kind"][0].data["kind"] is None
    assert "CUDA_ERROR_NOT_PERMITTED (800)" in rows["handle kind"][0].value
    assert "unset MOONEP_MEM_HANDLE_TYPE" in rows["handle kind"][0].fix


def test_own_import_works_but_the_second_process_cannot() -> None:
    node = Node()
    node.childs.imex = "another"
    rows = node.rows()
    assert not failures(rows)
    assert "import_fabric returned CUDA_ERROR_INVALID_VALUE (1)" in rows["memory handles"][0].data["fabric"]["error"]


@pytest.mark.parametrize("vmm", [True, False])
def test_no_handles_at_all(vmm: bool) -> None:
    node = Node()
    node.mine.says = Attributes(vmm=vmm, fd=False, fabric=False, multicast=True)
    rows = node.rows()
    assert failures(rows) == ([] if vmm else ["memory handles"])
    assert not node.requests  # nothing to hand out: no second process
    row = rows["memory handles"][0]
    assert row.status == ("warning" if vmm else "failure") and row.fix
    assert row.data["multicast"] and "multicast yes (never used)" in row.value
    assert rows["handle kind"][0].status == "warning"


def refused(record: Any, process_index: int, timeout_s: float) -> int:
    raise PermissionError(1, "Operation not permitted")


def test_pidfd_getfd_without_permission() -> None:
    node = Node()
    node.transports = (fds.TRANSPORTS[0], ("pidfd_getfd", refused))
    rows = node.rows()
    assert not failures(rows)
    assert rows["pidfd_getfd"][0].status == "info" and "not needed" in rows["pidfd_getfd"][0].value
    assert "Operation not permitted" in rows["pidfd_getfd"][0].data["error"]
    assert rows["handle kind"][0].data["kind"] == "fd"


def test_no_way_for_descriptors() -> None:
    node = Node()
    node.transports = (("socket", refused), ("pidfd_getfd", refused))
    rows = node.rows()
    assert failures(rows) == ["unix sockets", "pidfd_getfd"]
    assert "one network namespace" in rows["unix sockets"][0].fix and "CAP_SYS_PTRACE" in rows["pidfd_getfd"][0].fix
    assert rows["handle kind"][0].status == "warning"
    assert not rows["memory handles"][0].data["fd"]["works"] and rows["memory handles"][0].data["fabric"]["works"]


@pytest.mark.parametrize("answer", [{"error": "the second process failed"}, {}])
def test_the_second_process_fails(answer: dict[str, Any]) -> None:
    node = Node()
    node.ask = lambda request: answer
    row = node.rows()["memory handles"][0]
    assert row.status == "warning" and row.data["fd"]["error"] == answer.get("error", "not tried")


def test_memory_is_full() -> None:
    node = Node()
    node.mine.refuses["fd"] = node.mine.refuses["fabric"] = 2
    row = node.rows()["memory handles"][0]
    assert row.status == "warning" and "not enough memory" in row.data["fd"]["error"]


def test_a_gpu_that_is_lost_and_an_old_one() -> None:
    node = Node()
    node.mine.faults["facts", 1] = 999
    lost, fine = node.rows()["GPU"]
    assert lost.status == "failure" and "CUDA_ERROR_UNKNOWN (999)" in lost.value and fine.status == "ok"
    node = Node()
    node.mine.compute = (8, 0)
    assert failures(node.rows()) == ["GPU"]


@pytest.mark.parametrize(
    ("link", "status", "text"),
    [
        (Link(True, True, 0), "ok", "NVLink (by its atomics"),
        (Link(True, False, 1), "ok", "PCI express"),
        (Link(False, False, 0), "failure", "no peer access"),
    ],
)
def test_links(link: Link, status: str, text: str) -> None:
    node = Node()
    node.mine.links[3, 4] = link
    (row,) = node.rows()["link"]
    assert row.status == status and row.value.startswith(text) and row.data["access"] == link.access
    node.mine.faults["link", node.mine.calls["link"] + 1] = 999
    (row,) = node.rows()["link"]
    assert row.status == "warning" and "(999)" in row.value


class Nvml:
    """pynvml of nvidia-ml-py."""

    class NVMLError(Exception):
        pass

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    def __init__(self, connected: bool, broken: bool = False) -> None:
        self.connected, self.broken = connected, broken

    def nvmlInit(self) -> None:  # as the package spells them
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetHandleByPciBusId(self, pci: bytes) -> bytes:
        return pci

    def nvmlDeviceGetP2PStatus(self, a: bytes, b: bytes, index: int) -> int:
        if self.broken:
            raise self.NVMLError
        assert (a, b, index) == (b"0000:03:00.0", b"0000:04:00.0", 2)
        return 0 if self.connected else 3


def test_nvml_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for connected in (True, False):
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(connected))
        rows = Node().rows()
        assert rows["link"][0].data["type"] == ("NVLink" if connected else "PCI express")
        assert rows["link"][0].data["nvml"] and "NVIDIA driver 580.1" in rows["CUDA"][0].value
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(True, broken=True))
    assert not Node().rows()["link"][0].data["nvml"]


def test_imex_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.imex(tmp_path).data == {"channels": [], "usable": []}
    folder = tmp_path / "dev/nvidia-caps-imex-channels"
    folder.mkdir(parents=True)
    (folder / "channel0").touch()
    assert gpu.imex(tmp_path).status == "ok" and gpu.imex(tmp_path).data["usable"] == ["channel0"]
    monkeypatch.setattr(os, "access", lambda *_: False)
    row = gpu.imex(tmp_path)
    assert row.status == "warning" and "channel0: not accessible" in row.value and row.fix


def test_driver_older_than_the_module() -> None:
    assert failures(Node().rows(runtime=14000)) == ["CUDA"]
    assert not failures(Node().rows(runtime=13020))  # minor versions may differ
    assert "no module" in Node().rows(runtime=0)["CUDA"][0].value


def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX has a GPU; there is no CUDA module and no second process here."""
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    device = SimpleNamespace(id=0, platform="gpu", local_hardware_id=3, device_kind="Fake", client=client)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(command, "_runtime", lambda: 13000)


def test_a_process_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch)
    node = Node({0: 3})
    monkeypatch.setattr(command.driver, "load", lambda: node.mine)
    monkeypatch.setattr(trial.try_devices, "__defaults__", (node.ask,))
    rows, platform, devices = command._here()
    assert platform == "gpu" and devices == [0]
    names = [row.name for row in rows]
    assert {"GPU", "memory handles", "IMEX channels", "handle kind", "CUDA", "unix sockets"} <= set(names)
    assert "JAX's client: PJRT C API cuda 13000" in rows[names.index("devices")].value


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch)

    def none() -> Any:
        raise SetupError(message("setup", "no CUDA driver", "no libcuda", "a working libcuda", "install the driver"))

    monkeypatch.setattr(command.driver, "load", none)
    rows, _, _ = command._here()
    (row,) = [row for row in rows if row.name == "CUDA"]
    assert row.status == "failure" and "no libcuda" in row.value and row.fix == "install the driver"


def test_a_gpu_that_jax_does_not_use(tmp_path: Path) -> None:
    assert gpu.absent(tmp_path) is None
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    row = gpu.absent(tmp_path)
    assert row is not None and row.status == "warning" and "jax[cuda13]" in row.fix


# -- software and host -------------------------------------------------------------------------------------------------


def test_ffi_versions(tmp_path: Path) -> None:
    assert software.ffi_match((0, 3), (0, 5)).status == "ok"
    assert software.ffi_match((0, 5), (0, 3)).status == software.ffi_match((0, 3), (1, 3)).status == "failure"
    assert software.ffi_match((0, 3), None).status == "warning"
    assert software.jaxlib_api_version(tmp_path) is None
    here = software.jaxlib_api_version(Path(jax.ffi.include_dir()))
    assert here is not None and here >= (0, 3)


def test_a_bad_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONEP_POISON", "yes")
    row = next(row for row in software.rows("cpu") if row.name == "environment")
    assert row.status == "failure" and "bad value of MOONEP_POISON; got 'yes'" in row.value and "unset it" in row.fix
    assert command._here()[1] == "cpu"  # the rest is looked at all the same


def test_changed_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for v in VARIABLES:
        monkeypatch.delenv(v.name, raising=False)
    monkeypatch.setenv("MOONEP_DELAY_US", "7")
    row = next(row for row in software.rows("cpu") if row.name == "environment")
    assert row.data == {"changed": {"MOONEP_DELAY_US": "7"}}


def test_unknown_platform() -> None:
    row = next(row for row in software.rows("tpu") if row.name == "FFI")
    assert row.status == "failure" and "'tpu'" in row.value and "CPU devices or NVIDIA GPUs" in row.fix


def test_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {row.name: row.status for row in host.rows()} == dict.fromkeys(
        ("cores", "host memory", "open files", "memfd", "futex"), "ok"
    )
    assert next(row for row in host.rows(tmp_path) if row.name == "host memory").status == "warning"

    def denied(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", denied)
    row = next(row for row in host.rows() if row.name == "memfd")
    assert row.status == "failure" and "Operation not permitted" in row.value and "seccomp" in row.fix


# -- output ------------------------------------------------------------------------------------------------------------


def report(process: int, *rows: Row, devices: Sequence[int] = ()) -> Report:
    return Report(process, f"host{process // 4}", 100 + process, "gpu", list(devices), list(rows))


def test_a_failure_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="without a way out"):
        Row("GPU", "failure", "broken")


def test_a_report_survives_the_exchange() -> None:
    sent = report(1, Row("GPU", "failure", "broken", "mend it", "device 4", {"ordinal": 0}), devices=[4])
    assert Report.decode(sent.encode()) == sent and not sent.usable


def test_one_screen_for_many_processes() -> None:
    reports = [
        report(
            p,
            Row("FFI", "ok", "module 0.3, jaxlib 0.3"),
            Row("GPU", "ok", f"H200, {100 + p} GiB free", where=f"device {p}"),
            *([Row("memfd", "failure", "does not work", "allow memfd_create")] if p in (3, 4, 5, 40) else []),
            Row("link", "ok", "NVLink", where=f"devices {2 * p}-{2 * p + 1}"),
            devices=[p],
        )
        for p in range(72)
    ]
    text = screen.as_text(reports, 100)
    lines = text.splitlines()
    assert len(lines) < 15 and max(map(len, lines)) <= 100
    assert lines[0].startswith(
        "moonep_jax doctor: NOT usable - 72 processes on host0, host1, host10, host11, ..., 72 gpu"
    )
    assert "  ok   FFI             module 0.3, jaxlib 0.3" in lines
    assert any("devices 0-71: H200, 100 GiB free - and the like (72 different" in line for line in lines)
    at = next(i for i, line in enumerate(lines) if "FAIL memfd" in line)
    assert "processes 3-5,40: does not work" in lines[at] and "-> allow memfd_create" in lines[at + 1]
    assert "(72 pairs): NVLink" in text


def check_json(data: dict[str, Any]) -> None:
    assert set(data) == {"schema", "usable", "processes"} and data["schema"] == screen.SCHEMA
    for process in data["processes"]:
        assert set(process) == {"process", "host", "pid", "platform", "devices", "usable", "rows"}
        for row in process["rows"]:
            assert set(row) == ROW_KEYS and row["status"] in ("ok", "info", "warning", "failure")
            assert row["fix"] or row["status"] != "failure"
    rows = [row for process in data["processes"] for row in process["rows"]]
    assert data["usable"] == all(row["status"] != "failure" for row in rows)


def test_json_of_all_rows_is_documented() -> None:
    rows = [row for found in Node().rows().values() for row in found]
    check_json(json.loads(json.dumps(screen.as_json([report(0, *rows)]))))
    about = sys.modules["moonep_jax.doctor"].__doc__ or ""
    for row in [*rows, *command._here()[0], selftest.row()]:
        assert row.name in about
        assert all(key in about for key in row.data), (row.name, row.data)


# -- the self-test -----------------------------------------------------------------------------------------------------


def test_the_selftest_notices_a_wrong_op(monkeypatch: pytest.MonkeyPatch) -> None:
    right = selftest.row()
    assert right.status == "ok" and right.data["passed"], right
    combine = reference.combine
    monkeypatch.setattr(reference, "combine", lambda *a, **k: combine(*a, **k) + 1)
    wrong = selftest.row()
    assert wrong.status == "failure" and {"combine", "dispatch_grad"} >= set(wrong.data["wrong"]) >= {"combine"}
