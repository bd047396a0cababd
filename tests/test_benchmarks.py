"""Every benchmark runs, in its smallest form, and writes what the report needs. What it measures is nobody's limit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import STRICT

ROOT = Path(__file__).parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.skipif(importlib.util.find_spec("absl") is None, reason="needs absl-py"),
    pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="the benchmarks are not part of this tree"),
]

TINY = {
    "bench_moe": "--tokens=16 --hidden=16 --ffn=8 --experts=16 --devices=4 --maxvio=0,2 --repeats=1 "
    "--routings=one_home --leave_out=",
    "bench_ops": "--devices=2 --tokens=1 --hidden=16 --experts=4 --topk=2 --sweeps=tokens --repeats=1 --loop=2",
    "bench_prefetch": "--devices=2 --processes=2 --scale=64 --repeats=1 --loop=2 --configs=slots_1,full_3x8",
    "bench_planner": "--devices=4 --tokens=64 --group_tokens=256 --ranks=2,8 --show_ranks=8 --models=E64,Kimi-K3 "
    "--repeats=1 --plan_repeats=1",
    "bench_setup": "--devices=2 --tokens=16 --hidden=32 --width=32 --repeats=1 --jit_repeats=0 --imports=1 "
    "--domains=1,2 --also_processes=",
    "bench_memory": "--devices=2 --models=Kimi-K3 --ranks=8 --show_ranks=8 --tokens=128 --layer_tokens=8 "
    "--layer_hidden=16 --layer_experts=8 --nopeaks",
}


@pytest.mark.parametrize("name", TINY)
def test_runs(name: str, tmp_path: Path) -> None:
    files = [f"--json={tmp_path / 'f.json'}", f"--page={tmp_path / 'f.md'}", f"--plot={tmp_path / 'f.png'}"]
    command = [sys.executable, *STRICT, "-m", f"benchmarks.{name}", *TINY[name].split(), *files]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_", "MOONEP_"))}
    environment |= {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "f.json").read_text())
    assert record["benchmark"] == name and record["machine"]["jax"] and any(record["tables"].values())
    assert "| " in (tmp_path / "f.md").read_text() and (tmp_path / "f.png").stat().st_size > 1000
