"""Runs one worker function in N real processes of D devices each, and collects what they recorded.

A worker is a function of a module in tests/workers, named "module:function"; it gets a `workers.Context`. One launch
runs many cases, because starting JAX costs more than most cases; a worker records each case on its own, so that one
that fails or hangs hides none that came before. Only the processes started here are ever ended, by their ids.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
# A jax newer than any that was tested is not what a test is about.
STRICT = ("-W", "error", "-W", "ignore:moonep_jax is tested with")
_TAIL = 6000  # characters of a failing process's output to show
# NVLink multicast is the whole host's: a test must not be able to take it.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@dataclasses.dataclass
class Process:
    """How one process ended. `results` are what it recorded, by case; `returncode` is None if it had to be ended."""

    index: int
    returncode: int | None
    stdout: str
    stderr: str
    results: dict[str, Any]

    def tail(self) -> str:
        return (
            f"--- process {self.index}: exit code {self.returncode}, recorded {list(self.results)}\n"
            f"stdout: {self.stdout[-_TAIL:]}\nstderr: {self.stderr[-_TAIL:]}\n"
        )


@dataclasses.dataclass
class Run:
    """All processes of one launch."""

    name: str
    processes: list[Process]

    def of(self, case: str) -> list[Any]:
        """What every process recorded for a case; fails the test where one recorded nothing or an exception."""
        missing = [p.index for p in self.processes if case not in p.results]
        raised = [p for p in self.processes if isinstance(p.results.get(case), dict) and "raised" in p.results[case]]
        if missing or raised:
            texts = "\n".join(f"process {p.index} raised:\n{p.results[case]['raised']}" for p in raised)
            pytest.fail(f"{self.name}, case {case}: nothing from processes {missing}; {texts}\n{self.tails()}")
        return [p.results[case] for p in self.processes]

    def ended_well(self) -> None:
        """Fails the test unless every process ended by itself with exit code 0."""
        if any(p.returncode != 0 for p in self.processes):
            pytest.fail(f"{self.name}: exit codes {[p.returncode for p in self.processes]}\n{self.tails()}")

    def tails(self) -> str:
        return "".join(p.tail() for p in self.processes)


def one_fast(values: Iterable[Any], fast: Any) -> list[Any]:
    """Parameters of a test or fixture, all but one of which are marked slow."""
    return [value if value == fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def _free_port() -> int:
    # Below the ports that the kernel hands out by itself: nobody takes it before process 0 listens.
    for port in random.SystemRandom().sample(range(20000, 30000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port on the loopback interface")


def launch(
    worker: str,
    processes: int,
    devices: int,
    out: Path,
    *,
    args: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    process_env: Callable[[int], Mapping[str, str]] | None = None,
    recoverable: bool = False,
    files: int | None = None,
    own_gpus: bool = False,
    timeout_s: float = 240.0,
) -> Run:
    """Runs a worker in `processes` processes of `devices` devices each; waits for all, `timeout_s` seconds at most.

    Args:
      worker: "module:function" in tests/workers.
      out: an empty folder for results and logs.
      args: JSON values for the worker.
      env, process_env: variables for all processes, and for one by its index. MOONEP_POISON=1 unless set here.
      recoverable: sets jax_enable_recoverability, so that a process may leave.
      files: limit of open files (RLIMIT_NOFILE) of each process.
      own_gpus: each process has as many GPUs to itself as devices; otherwise all processes share GPU 0.
      timeout_s: what is still running after it is ended, and has returncode None.
    """
    out.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    base = {k: v for k, v in os.environ.items() if not k.startswith(("MOONEP_", "JAX_", "XLA_", "PYTEST_"))}
    base |= {
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "JAX_PLATFORMS": "cpu",
        "MOONEP_POISON": "1",
        "PYTHONFAULTHANDLER": "1",
        **_NO_MULTICAST,
        **(env or {}),
    }
    started: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + timeout_s
    try:
        for index in range(processes):
            spec = {
                "worker": worker,
                "index": index,
                "processes": processes,
                "devices": devices,
                "port": port,
                "out": str(out),
                "args": dict(args or {}),
                "recoverable": recoverable,
                "files": files,
                "gpus": [index * devices + i for i in range(devices)] if own_gpus else [0],
            }
            with open(out / f"{index}.out", "wb") as stdout, open(out / f"{index}.err", "wb") as stderr:
                started.append(
                    subprocess.Popen(
                        [sys.executable, *STRICT, "-m", "workers", json.dumps(spec)],
                        env=base | (dict(process_env(index)) if process_env else {}),
                        cwd=out,
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stderr,
                        start_new_session=True,  # a group of its own, so that ending it ends its children, too
                    )
                )
        for child in started:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        codes = [child.poll() for child in started]
        if None in codes:
            _show_stacks([c for c in started if c.poll() is None])
    finally:
        for child in started:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return Run(
        f"{worker} in {processes}x{devices}",
        [Process(i, code, *_output(out, i), _results(out, i)) for i, code in enumerate(codes)],
    )


def _show_stacks(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.send_signal(signal.SIGABRT)  # faulthandler writes every thread's stack
    limit = time.monotonic() + 5
    for child in children:
        try:
            child.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            return


def _output(out: Path, index: int) -> tuple[str, str]:
    return tuple((out / f"{index}.{kind}").read_text(errors="replace") for kind in ("out", "err"))  # type: ignore[return-value]


def _results(out: Path, index: int) -> dict[str, Any]:
    path = out / f"{index}.results"
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["case"]: record["value"] for record in map(json.loads, lines)}
