"""Ranks with a GPU each: the ops against the oracle over real links, beside NCCL, and with faults of a rank.

As processes, which share memory by file descriptors, as devices of one process, and both, on all GPUs that there are.
What a survivor sees is printed as JSON (`pytest -rP` shows it), since not all of it is the library's to decide.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_kit
import pytest
from harness import Run, launch
from workers.each_op import OPS
from workers.pair import FIRST_S, INSIDE_S, LIMIT_S


def _gpus() -> int:
    if not gpu_kit.available():
        return 0
    from cuda.bindings import runtime

    return min(8, gpu_kit.ok(runtime.cudaGetDeviceCount()))


GPUS = _gpus()
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.multiprocess,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs or more, the CUDA module and cuda-python"),
]
ENV = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
LAYOUTS = {"processes": (GPUS, 1), "devices": (1, GPUS)} | ({"both": (2, GPUS // 2)} if GPUS > 2 else {})
# Command buffers never, and for every single op; JAX's default is the test before.
GRAPHS = {
    "off": "--xla_gpu_enable_command_buffer=",
    "always": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1",
}
SLACK_S = 5.0


def _run(layout: str, out: Path, flags: str = "", **args: Any) -> Run:
    processes, devices = LAYOUTS[layout]
    return launch("pair:run", processes, devices, out, env=ENV | {"XLA_FLAGS": flags}, own_gpus=processes > 1,
                  timeout_s=200, args=args)  # fmt: skip


def _check(run: Run) -> None:
    """All that both layouts do."""
    assert all(run.of("first"))
    for mixed in run.of("mixed"):
        assert mixed["seen"] == 0 and mixed["differ"] == 0, mixed
    # Lists are of what differs from the oracle.
    exact = {case for p in run.processes for case, value in p.results.items() if isinstance(value, list)}
    assert exact >= {
        "rows_float32_dedup",
        "rows_bfloat16_exact",
        "rows_in_rounds",
        "weights_own",
        "weights_full",
        "replays",
    }
    for case in exact:
        assert run.of(case) == [[]] * len(run.processes), case
    for layer in run.of("layer"):
        assert layer["y"] < 1e-5
    for scan in run.of("scan_remat"):
        assert scan["y"] < 1e-4 and scan["finite"] and scan["repeat"], scan
    run.ended_well()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_equals_the_oracle(layout: str, tmp_path: Path) -> None:
    late = layout == "devices"
    run = _run(layout, tmp_path, launches=1000, replays=100, late=late)
    _check(run)
    if late:
        _check_late(run)


def test_command_buffers(tmp_path: Path) -> None:
    """All settings at once, which share the GPUs."""
    cases = [(layout, graphs) for graphs in GRAPHS for layout in LAYOUTS]
    with ThreadPoolExecutor(len(cases)) as pool:
        runs = pool.map(
            lambda case: _run(
                case[0], tmp_path / "_".join(case), GRAPHS[case[1]], launches=100, replays=20, late=False
            ),
            cases,
        )
    for run in runs:
        _check(run)


def _check_late(run: Run) -> None:
    late, too_late = (run.of(case)[0] for case in ("late", "too_late"))
    print(json.dumps({"late": late, "too_late": too_late}))
    assert late["error"] == 0 and late["check"] is None, late
    assert late["seconds"] - late["enqueued_s"] > 0.5, "the host does not wait, the other device does"
    assert too_late["check"] is not None
    text = too_late["check"]["text"]
    assert text.startswith("plan: missing ranks [1] after 1 s"), text
    assert too_late["next"] is not None and text in too_late["next"]["text"]
    assert too_late["alive"] and too_late["close_s"] < 10, too_late


# -- faults ------------------------------------------------------------------------------------------------------------

# Before its call of a phase; or in it, when its rows are here and its kernels wait for ours.
KILLS = [(phase, False) for phase in ("idle", *OPS)] + [("dispatch", True), ("reduce_grad", True)]


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Run]:
    """All kills at once, with processes of their own."""

    def run(case: tuple[str, bool]) -> Run:
        phase, inside = case
        return launch("pair:kill", GPUS, 1, tmp_path_factory.mktemp(phase), env=ENV, own_gpus=True, recoverable=True,
                      timeout_s=120, args={"phase": phase, "inside": inside})  # fmt: skip

    with ThreadPoolExecutor(len(KILLS)) as pool:
        return dict(zip(KILLS, pool.map(run, KILLS), strict=True))


def _check_fault(fault: dict[str, Any], op: str, limit_s: float, close_s: float) -> str:
    """An op failed in time, naming itself and rank 1; the process is otherwise well. Returns the text."""
    assert fault["op"] == op, fault
    # The kernels give up and poison; the next look at the domain says so, at the latest.
    assert fault["check"] is not None, fault
    text = fault["check"]["text"]
    assert text.startswith(f"{op}: missing ranks [1] after ") and "rank 1 (device" in text, text
    assert fault["seconds"] < limit_s + SLACK_S, fault
    assert fault["blank"] in (True, None) or fault["ran"] is not None, fault
    # A captured graph replays without the handler that would raise; its kernels see the error, and the domain stays so.
    assert fault["later"] is None or text in fault["later"]["text"], fault
    assert fault["later_check"]["text"] == text, fault
    assert fault["later_s"] < SLACK_S and fault["alive"] and close_s < 15, fault
    assert fault["right"] in (True, None), "ops that finished did so with the right values"
    return text


@pytest.mark.parametrize(("phase", "inside"), KILLS)
def test_killed(kills: dict[tuple[str, bool], Run], phase: str, inside: bool) -> None:
    first, victim, *others = kills[phase, inside].processes
    assert victim.returncode == -9
    for survivor in (first, *others):
        print(
            json.dumps({"killed": phase, "inside": inside, "code": survivor.returncode, "survivor": survivor.results})
        )
        assert "fault" in survivor.results and survivor.returncode == 0, survivor.tail()
        fault, place = survivor.results["fault"], 0 if phase == "idle" else OPS.index(phase)
        failing = (OPS[place:] + OPS)[1 if inside else 0]
        limit_s = INSIDE_S if inside else FIRST_S if phase == "idle" else LIMIT_S
        _check_fault(fault, failing, limit_s, survivor.results["close_s"])
        assert fault["went_well"] == ([phase] if inside else [])
        assert survivor.results["alive"]


def test_stopped(tmp_path: Path) -> None:
    run = launch("pair:stop", GPUS, 1, tmp_path, env=ENV, own_gpus=True, recoverable=True, timeout_s=200)
    print(json.dumps([p.results for p in run.processes]))
    for phase in ("idle", *OPS):
        op = "plan" if phase == "idle" else phase
        first, stopped, *others = run.of(phase)
        limit_s = FIRST_S if phase == "idle" else LIMIT_S
        (text,) = {_check_fault(survivor, op, limit_s, survivor["close_s"]) for survivor in (first, *others)}
        assert stopped["check"]["text"] == text, "the one that was stopped reports the same"
        assert stopped["alive"] and stopped["close_s"] < 15
    for short in run.of("short"):
        assert short["right"] and short["check"] is None, "a stop below the limit changes nothing"
    run.ended_well()
