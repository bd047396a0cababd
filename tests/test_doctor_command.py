"""Runs of `python -m moonep_jax doctor`: what a person sees, JSON, exit codes, several processes in one table."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from harness import STRICT, _free_port, one_fast
from memory_kit import outputs_of
from test_doctor import check_json

pytestmark = pytest.mark.multiprocess

LIMIT = 120  # seconds for one command


def start(*options: str, **variables: str) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MOONEP_", "XLA_", "JAX_"))}
    env |= {"JAX_PLATFORMS": "cpu", **variables}
    line = [sys.executable, *STRICT, "-m", "moonep_jax", "doctor", *options]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def doctor(*options: str, **variables: str) -> tuple[int, str, str]:
    process = start(*options, **variables)
    ((out, err),) = outputs_of([process], LIMIT)
    return process.returncode, out, err


def test_a_person_on_cpus() -> None:
    code, out, err = doctor("--selftest")
    assert code == 0 and not err, (out, err)
    lines = out.splitlines()
    assert lines[0].startswith("moonep_jax doctor: usable - 1 process on ") and lines[0].endswith(", 4 cpu device(s)")
    assert len(lines) < 40
    text = " ".join(out.split())  # lines end where the terminal does
    assert "fd between processes of this host" in text and "on 4 rank(s)" in text and "equal to the oracle" in text


def test_json_and_a_kind_that_cannot_be_forced() -> None:
    code, out, _ = doctor("--json", MOONEP_MEM_HANDLE_TYPE="fabric")
    data = json.loads(out)
    check_json(data)
    row = next(row for row in data["processes"][0]["rows"] if row["name"] == "handle kind")
    assert code == 0 and row["status"] == "warning" and "host memory has no fabric handles" in row["value"]


def test_jax_without_devices() -> None:
    code, out, _ = doctor(JAX_PLATFORMS="cuda")
    assert code == 1 and "NOT usable" in out and "FAIL devices" in out and "-> set JAX_PLATFORMS=cpu" in out


@pytest.mark.parametrize("broken", one_fast([False, True], False))
def test_several_processes_make_one_table(broken: bool) -> None:
    where = f"127.0.0.1:{_free_port()}"
    processes = [
        start(
            *("--coordinator", where, "--processes", "3", "--process", str(i), "--selftest"),
            **({"MOONEP_DELAY_US": "much"} if broken and i == 1 else {}),
        )
        for i in range(3)
    ]
    outputs = outputs_of(processes, LIMIT)
    out = " ".join(outputs[0][0].split())  # lines end where the terminal does
    assert [p.returncode for p in processes] == [int(broken)] * 3, outputs
    assert [o for o, _ in outputs[1:]] == ["", ""]
    assert f"{'NOT usable' if broken else 'usable'} - 3 processes on " in out
    if broken:
        assert "process 1: environment: bad value of MOONEP_DELAY_US; got 'much'" in out
        assert "not tried: another process has failures" in out and "not run" in out
    else:
        assert "fd, for 12 ranks of 3 process(es) on 1 host(s): every process mapped" in out
        assert "on 12 rank(s)" in out and "equal to the oracle" in out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--processes", "2"], "belong together"),
        (["--coordinator", "h:1", "--processes", "2", "--process", "2"], "must be from 0 to 1: 2"),
        (["--coordinator", "h:1", "--processes", "2", "--process", "1", "--cluster"], "--cluster finds"),
    ],
)
def test_bad_arguments(options: list[str], text: str) -> None:
    code, out, err = doctor(*options)
    assert code == 2 and not out and text in err
