"""The model checker Spin on the models in tests/model: everything holds, and every mutant is found.

Skipped where there is no spin or no C compiler (Debian and Ubuntu: apt-get install spin).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODELS = Path(__file__).parent / "model"
COMPILER = next(filter(shutil.which, ("gcc", "clang", "cc")), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("spin") is None or COMPILER is None,
        reason="needs spin and a C compiler (apt-get install spin gcc)",
    ),
]

PLANS, MOVES = "PROGRAM=0", "PROGRAM=7"  # three plans; three calls that move rows
MIXED = ("PROGRAM=2", "PROGRAM=5", "PROGRAM=6")
GPU = [
    *(("N=3", "CALLS=3", program) for program in (PLANS, MOVES, *MIXED)),
    *(("N=3", "CALLS=3", program, "CRASH") for program in (PLANS, MOVES, *MIXED)),
    *(("N=2", "CALLS=4", program, "CRASH") for program in ("PROGRAM=10", "PROGRAM=12")),
    *(("N=3", "CALLS=3", program, skip) for program in (PLANS, "PROGRAM=2") for skip in ("SKIP=1", "SKIP=2")),
    ("N=3", "CALLS=3", MOVES, "SKIP=1"),
    *(("N=2", "CALLS=3", program, "IMPATIENT") for program in (PLANS, MOVES, "PROGRAM=2")),
    ("N=3", "CALLS=2", "PROGRAM=2", "IMPATIENT"),
    *(("N=3", "CALLS=2", program, "LEAVE") for program in (PLANS, MOVES)),
    ("N=2", "CALLS=3", "PROGRAM=2", "LEAVE"),
    *(("N=2", "CALLS=3", program, "ROUNDS=2") for program in (MOVES, *MIXED)),
    ("N=3", "CALLS=2", "PROGRAM=3", "ROUNDS=2"),
    *(("N=2", "CALLS=3", MOVES, "ROUNDS=2", what) for what in ("CRASH", "SKIP=1", "SKIP=2", "IMPATIENT", "LEAVE")),
    ("N=3", "CALLS=2", "PROGRAM=2", "ROUNDS=2", "CRASH"),
]
# What is broken, where it shows, and the part of the model that must notice.
GPU_MUTANTS = [
    ("NO_CONSUMED", ("N=2", "CALLS=3", MOVES), "cell"),
    ("CREDIT_BEFORE_READ", ("N=2", "CALLS=3", MOVES), "cell"),
    ("PUBLISH_BEFORE_LAST_STORE", ("N=2", "CALLS=2", PLANS), "cell"),
    ("PUBLISH_BEFORE_LAST_STORE", ("N=2", "CALLS=2", MOVES), "cell"),
    ("NO_PARITY", ("N=2", "CALLS=3", PLANS), "cell"),
    ("ANY_EPOCH", ("N=2", "CALLS=3", PLANS), "cell"),
    ("ANY_EPOCH", ("N=2", "CALLS=3", MOVES), "cell"),
    ("NO_TAG", ("N=2", "CALLS=3", MOVES, "SKIP=1"), "cell"),
    ("NEVER_AHEAD", ("N=2", "CALLS=3", PLANS), "error"),
    ("ERROR_NOT_FIRST", ("N=3", "CALLS=3", MOVES, "CRASH"), "error"),
    ("ERROR_NOT_FIRST", ("N=2", "CALLS=3", PLANS, "IMPATIENT"), "error"),
    ("POLL_ONE", ("N=3", "CALLS=3", MOVES, "CRASH"), "error"),
    ("RECORD_AFTER_WORD", ("N=3", "CALLS=2", MOVES, "CRASH"), "names"),
    ("READ_BEFORE_WAIT", ("N=2", "CALLS=2", MOVES, "ROUNDS=2"), "cell"),
    ("NO_ROUND_AHEAD", ("N=2", "CALLS=2", MOVES, "ROUNDS=2"), "error"),
    ("NO_CONSUMED", ("N=2", "CALLS=2", MOVES, "ROUNDS=2"), "cell"),
]
CPU = [
    ("N=2", "CALLS=2"),
    ("N=2", "CALLS=2", "SAME=3"),
    ("N=2", "CALLS=2", "WATCH"),
    ("N=2", "CALLS=2", "EMPTY=3", "WATCH"),
    ("N=2", "CALLS=2", "EMPTY=1", "WATCH"),
    ("N=2", "CALLS=3", "SAME=3"),
    ("N=2", "CALLS=2", "VICTIM=0"),
    ("N=2", "CALLS=2", "VICTIM=1", "SAME=3"),
]
CPU_MUTANTS = [
    ("NO_REGION", ("N=2", "CALLS=2", "SAME=3"), "unread"),
    ("NO_ALL_IN", ("N=2", "CALLS=2"), "data"),
    ("HEAD_BEFORE_KEY", ("N=2", "CALLS=2"), "mine"),
    ("NO_ROOM", ("N=2", "CALLS=3", "EMPTY=7"), "order"),
    ("LATE_SNAPSHOT", ("N=2", "CALLS=2"), "invalid end state"),
    ("NO_BELL_OF_STEP", ("N=2", "CALLS=2"), "invalid end state"),
    ("OLD_HEAD", ("N=2", "CALLS=2", "EMPTY=3", "WATCH"), "assertion violated 0"),
]
NAMES = lambda flags: "-".join(flags)  # noqa: E731


def check(model: str, flags: tuple[str, ...], where: Path) -> tuple[int, str]:
    """Searches all states of a model; returns how many there are, and what is wrong, or an empty text."""
    defines = [f"-D{flag}" for flag in flags]
    built = subprocess.run(
        ["spin", "-a", *defines, str(MODELS / model)], cwd=where, capture_output=True, text=True, timeout=60
    )
    assert built.returncode == 0 and (where / "pan.c").exists(), built.stdout + built.stderr
    # SAFETY: assertions and ranks that stop; nothing is asked of infinite runs, and there are none.
    compiler = [str(COMPILER), "-O1", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=4096", "-o", "pan", "pan.c"]
    subprocess.run(compiler, cwd=where, check=True, timeout=120)
    # -m: deeper than any run is; a search that was cut off says so and fails.
    ran = subprocess.run(["./pan", "-m100000"], cwd=where, capture_output=True, text=True, timeout=280)
    text = ran.stdout + ran.stderr
    errors, states = re.search(r"errors: (\d+)", text), re.search(r"(\d+) states, stored", text)
    assert errors is not None and states is not None, text
    assert "max search depth too small" not in text and "out of memory" not in text, text
    wrong = re.search(r"^pan:\d+: (.*)", text, re.MULTILINE)
    assert (int(errors[1]) > 0) == (wrong is not None), text
    return int(states[1]), "" if wrong is None else wrong[1]


def holds(model: str, flags: tuple[str, ...], where: Path) -> None:
    states, wrong = check(model, flags, where)
    assert wrong == ""
    assert states > 100, "the model does nothing"
    print(f"{model} {' '.join(flags)}: {states} states")


@pytest.mark.parametrize("flags", GPU, ids=NAMES)
def test_gpu(flags: tuple[str, ...], tmp_path: Path) -> None:
    holds("gpu.pml", flags, tmp_path)


@pytest.mark.parametrize("flags", CPU, ids=NAMES)
def test_cpu(flags: tuple[str, ...], tmp_path: Path) -> None:
    holds("cpu.pml", flags, tmp_path)


@pytest.mark.parametrize(("mutant", "flags", "part"), GPU_MUTANTS)
def test_gpu_mutants_fail(mutant: str, flags: tuple[str, ...], part: str, tmp_path: Path) -> None:
    assert part in check("gpu.pml", (*flags, mutant), tmp_path)[1]


@pytest.mark.parametrize(("mutant", "flags", "part"), CPU_MUTANTS)
def test_cpu_mutants_fail(mutant: str, flags: tuple[str, ...], part: str, tmp_path: Path) -> None:
    assert part in check("cpu.pml", (*flags, mutant), tmp_path)[1]
