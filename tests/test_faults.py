"""A rank that is killed, stopped, exits, raises or skips a call, in every phase of a domain's life: the others report
it in time, in one text that names it, stay usable, close, and end as usual.

Three ranks, a process each: on CPU devices, and sharing one GPU. The launches of a backend run three at a time, since
most of their time is waiting. FAULTS_JSON=path writes the matrix, which is printed, too (`pytest -rP`); fault_table.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fault_table
import gpu_kit
import pytest
from harness import Run, launch
from workers.faults import INSIDE, LIMIT_S, OPS, PHASES, SETUP_S, STOPPED_S

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

FAULTS = ("kill", "exit", "stop", "raise", "skip")
DIES = {"kill": [*PHASES, *INSIDE], "exit": list(PHASES)}  # a process is lost in each phase
SLACK_S = 5.0
# By default the processes of a job tune kernels together, also those that wait for their turn or are dead.
FLAGS = "--xla_gpu_shard_autotuning=false"
GPU = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": FLAGS}
# Every op on its own becomes a CUDA graph.
GRAPHS = f"{FLAGS} --xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
BACKENDS = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not gpu_kit.available(), reason="needs a GPU, the CUDA module and cuda-python"),
        ],
    ),
]


class Launches:
    """The launches of one backend, started when it is made; `rows` is the matrix."""

    def __init__(self, backend: str, out: Path, pool: ThreadPoolExecutor):
        self.backend, self._out, self._pool = backend, out, pool
        self.rows: list[fault_table.Row] = []
        self._runs: dict[str, Future[Run]] = {}
        # A GPU does not take more than about twenty processes at once.
        size = 3 if backend == "cuda" else len(PHASES) + len(INSIDE)
        self.dying = {f: [phases[i : i + size] for i in range(0, len(phases), size)] for f, phases in DIES.items()}
        for fault, groups in self.dying.items():
            for i, phases in enumerate(groups):
                self._start(f"{fault} {i}", "dying", len(phases) + 2, fault=fault, phases=phases)
        self._start("stop", "passing")
        self._start("skip", "passing", phases=[*PHASES, "cond"])
        self._start("raise", "passing")
        for fault in ("kill", "stop", "exit"):
            self._start(f"zero {fault}", "zero", fault=fault)
        if backend == "cpu":  # NCCL does not let ranks share a GPU
            for first in ("dispatch", "psum"):
                for fault in ("kill", "stop"):
                    self._start(f"mixed {first} {fault}", "mixed", fault=fault, first=first)
        else:
            phases = ["plan", "dispatch", "reduce_grad"]
            self._start("graphs", "passing", env={"XLA_FLAGS": GRAPHS}, fault="skip", phases=phases, graphs=True)

    def _start(self, name: str, worker: str, processes: int = 3, env: Any = None, **args: Any) -> None:
        env = {**(GPU if self.backend == "cuda" else {}), **(env or {})}
        self._runs[name] = self._pool.submit(
            launch, f"faults:{worker}", processes, 1, self._out / name, args={"fault": name, **args}, env=env,
            recoverable=True, timeout_s=170,
        )  # fmt: skip

    def run(self, name: str) -> Run:
        return self._runs[name].result()

    def of(self, fault: str, phase: str) -> tuple[Run, int]:
        """The launch with a fault in a phase, and the process that it happens to."""
        for i, phases in enumerate(self.dying.get(fault, [])):
            if phase in phases:
                return self.run(f"{fault} {i}"), 2 + phases.index(phase)
        return self.run(fault), 2

    def all_of(self, fault: str) -> list[Run]:
        """All launches of a fault."""
        return [self.run(f"{fault} {i}") for i in range(len(self.dying[fault]))] if fault in DIES else [self.run(fault)]

    def row(self, fault: str, phase: str, seconds: float | None, named: bool, close_s: float | None = None,
            note: str = "", backend: str = "") -> None:  # fmt: skip
        self.rows.append(
            {
                "backend": backend or self.backend,
                "fault": fault,
                "phase": phase,
                "seconds": seconds,
                "named": named,
                "close_s": close_s,
                "note": note,
            }
        )


_rows: list[fault_table.Row] = []


@pytest.fixture(scope="module", params=BACKENDS)
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launches]:
    with ThreadPoolExecutor(3) as pool:
        made = Launches(request.param, tmp_path_factory.mktemp(request.param), pool)
        yield made
        _rows.extend(made.rows)
        if path := os.environ.get("FAULTS_JSON"):
            Path(path).write_text(json.dumps(_rows, indent=1))


def _reports(run: Run, phase: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What survivors and the victim (if it came back) recorded for a phase."""
    records = [p.results[phase] for p in run.processes if phase in p.results]
    broken = [r["raised"] for r in records if "raised" in r]
    survivors = [r for r in records if not r.get("victim")]
    assert not broken and len(survivors) == 2, f"{phase}: {broken}\n{run.tails()}"
    return survivors, [r for r in records if r.get("victim")]


def _one_text(survivors: list[dict[str, Any]], backend: str) -> str:
    assert all(s["check"] is not None for s in survivors), survivors
    # On GPUs, ranks that see the same at the same time may each be the first.
    texts = {s["check"]["text"].partition("seen by" if backend == "cuda" else "\0")[0] for s in survivors}
    assert len(texts) == 1, texts
    return survivors[0]["check"]["text"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("phase", ["setup", "close"])
def test_setup_and_close(launches: Launches, phase: str, fault: str) -> None:
    run, process = launches.of(fault, phase)
    survivors, victims = _reports(run, phase)
    seconds, rank = max(s["seconds"] for s in survivors), survivors[0]["rank"]
    assert all(s["alive"] for s in survivors)
    assert seconds < SETUP_S + SLACK_S, survivors
    if phase == "close":
        assert all("the domain is closed" in s["closed_check"]["text"] for s in survivors)
    if phase == "close" and fault == "raise":  # it closes the domain on its way out: nobody waits, nothing is wrong
        assert [s["check"] for s in survivors] == [None, None]
        launches.row(fault, phase, None, True, note=f"no error: closed in {seconds:.2f} s")
        return
    text = _one_text(survivors, launches.backend)
    label = f"process {process} (rank {rank} of group 0"
    if phase == "setup" and fault in ("raise", "exit"):
        named = text.startswith(f"setup: {label}") and "failed outside of a step" in text
    elif phase == "setup" and fault == "skip":  # before anybody knows the others' ranks
        named = text.startswith("setup: step ") and f"got no word from process {process}, expected" in text
    else:
        named = text.startswith(f"{phase}: step ") and f"got no word from {label}" in text and text.count("(rank") == 1
    launches.row(fault, phase, seconds, named)
    assert named, text
    for v in victims:  # one that comes late raises the same, and one that raised keeps its own
        assert v["error"]["text"] == (text if fault != "raise" else "on purpose")


CALLS = [(fault, op) for fault in FAULTS for op in OPS] + [("kill", phase) for phase in INSIDE] + [("skip", "cond")]


def _check_call(launches: Launches, run: Run, fault: str, phase: str, backend: str = "") -> None:
    survivors, victims = _reports(run, phase)
    text, rank, op = _one_text(survivors, launches.backend), survivors[0]["rank"], phase.split()[0]
    # A GPU's rows are here when their sender dies: then it is the next call that misses it.
    ops = ["plan"] if op == "cond" else [op]
    if "inside" in phase and launches.backend == "cuda":
        ops.append((*OPS, "plan")[OPS.index(op) + 1])
    named = any(text.startswith(f"{name}: missing ranks [{rank}]") for name in ops)
    named = named and f"rank {rank} (device" in text and "(ticket " in text and "seen by rank" in text
    seconds, close_s = (max(s[key] for s in survivors) for key in ("seconds", "close_s"))
    note = "" if text.startswith(ops[0]) else f"in {text.partition(':')[0]}"
    launches.row(fault, phase, seconds, named, close_s, note, backend)
    assert named, text
    for s in survivors:
        own = s["check"]["text"]
        assert s["ran"] is None or own in s["ran"]["text"], s
        assert s["ran"] is not None or launches.backend == "cuda", "on a CPU the call itself raises"
        # Kernels that give up poison their results.
        assert s["ran"] is not None or s["blank"] in (True, None), s
        # Later calls raise the first error's text. A captured graph runs no handler; check() has the text.
        assert s["later"] is None or own in s["later"]["text"], s
        assert s["later"] is not None or launches.backend == "cuda", s
        assert s["later_check"]["text"] == own and s["alive"], s
        assert s["right"] in (True, None), "calls that finished did so with the right values"
        assert s["close_error"] is None, s
    for v in victims:
        if fault == "raise":
            assert v["error"]["text"] == "on purpose"
        elif v.get("check") is not None or phase != "cond":  # in the other branch no kernel looks
            # Stopped or elsewhere meanwhile, it takes over what the others have.
            assert v["check"]["text"] in [s["check"]["text"] for s in survivors] and v["alive"], v
    assert seconds < LIMIT_S + SLACK_S and close_s < LIMIT_S + SLACK_S, survivors


@pytest.mark.parametrize(("fault", "phase"), CALLS)
def test_calls(launches: Launches, fault: str, phase: str) -> None:
    _check_call(launches, launches.of(fault, phase)[0], fault, phase)


def test_replayed_graphs(launches: Launches) -> None:
    if launches.backend == "cpu":
        pytest.skip("CUDA graphs only")
    run = launches.run("graphs")
    for phase in ("plan", "dispatch", "reduce_grad"):
        _check_call(launches, run, "skip", phase, "cuda, replayed graphs")
        assert all(s["ran"] is None for s in _reports(run, phase)[0]), "no handler runs in a replay"
    run.ended_well()


@pytest.mark.parametrize("fault", FAULTS)
def test_processes_end_as_usual(launches: Launches, fault: str) -> None:
    ends = {"kill": -9}.get(fault, 0)
    for run in launches.all_of(fault):
        assert [p.returncode for p in run.processes] == [0, 0] + [ends] * (len(run.processes) - 2), run.tails()


@pytest.mark.parametrize("fault", ["kill", "exit", "stop"])
def test_process_0(launches: Launches, fault: str) -> None:
    """It keeps the service of jax.distributed: JAX ends the others, whatever this library does, when they notice."""
    run = launches.run(f"zero {fault}")
    zero, *others = run.processes
    assert zero.returncode == (0 if fault == "exit" else -9), run.tails()
    assert all(p.returncode in (-6, 0) for p in others), run.tails()
    ended = "JAX ends the others" if any(p.returncode == -6 for p in others) else "the others go on"
    if fault != "stop" and not all("dispatch" in p.results for p in others):
        # Its sockets close with it, so that JAX notices within milliseconds; after an exit most often later.
        assert all(p.returncode == -6 for p in others if "dispatch" not in p.results), run.tails()
        launches.row(f"process 0: {fault}", "dispatch", None, False, note=f"{ended} at once")
        return
    # Stopped, or gone through JAX's shutdown: the record comes first.
    survivors, _ = _reports(run, "dispatch")
    text = _one_text(survivors, launches.backend)
    named = text.startswith("dispatch: missing ranks [1] after 1 s") and "of process 0" in text
    seconds, close_s = (max(s[key] for s in survivors) for key in ("seconds", "close_s"))
    launches.row(f"process 0: {fault}", "dispatch", seconds, named, close_s, f"then {ended}")
    assert named, text
    assert all(s["alive"] and s["close_error"] is None for s in survivors)
    assert seconds < 1 + SLACK_S and close_s < LIMIT_S + SLACK_S, survivors
    again, _ = _reports(run, "setup")
    seconds = max(s["seconds"] for s in again)
    named = all(s["check"]["type"] == "SetupError" and "process 0" in s["check"]["text"] for s in again)
    launches.row(f"process 0: {fault}", "setup", seconds, named)
    assert named and seconds < LIMIT_S + 1 + SLACK_S, again


@pytest.mark.parametrize("first", ["dispatch", "psum"])
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_beside_psum(launches: Launches, first: str, fault: str) -> None:
    """A program with calls and psum: what comes first in it, by data, is what notices."""
    if launches.backend == "cuda":
        pytest.skip("NCCL does not let ranks share a GPU; test_cuda_pair has two")
    run = launches.run(f"mixed {first} {fault}")
    ran = [p.results["ran"] for p in run.processes if "ran" in p.results]
    assert len(ran) == (2 if fault == "kill" else 3), run.tails()
    seconds, name = max(r["seconds"] for r in ran[:2]), f"{fault}, {first} before the other"
    if first == "dispatch":
        text = _one_text(ran, launches.backend)
        assert text.startswith("plan: missing ranks [2] after 2 s"), text
        assert all(text in r["error"]["text"] for r in ran)
        launches.row(name, "psum and dispatch", seconds, True)
    elif fault == "kill":  # JAX's own error, and the domain knows nothing of it
        assert all(r["error"]["type"] == "JaxRuntimeError" and r["check"] is None for r in ran), ran
        launches.row(name, "psum and dispatch", seconds, False, note="JAX's error (Gloo), not ours")
    else:  # XLA waits without a limit; the rank goes on, and so do all
        assert all(r["error"] is None and r["check"] is None for r in ran), ran
        assert seconds > STOPPED_S / 2
        launches.row(name, "psum and dispatch", None, False, note="no error: psum waits for as long as it takes")
    assert [p.returncode for p in run.processes] == [0, 0, -9 if fault == "kill" else 0], run.tails()


def test_matrix(launches: Launches) -> None:
    """Prints the matrix; nothing of it is missing."""
    print(fault_table.markdown(launches.rows))
    seen = {(row["fault"], row["phase"]) for row in launches.rows}
    assert seen >= {(fault, phase) for fault in FAULTS for phase in PHASES}
