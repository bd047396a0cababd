"""Tests in C++, each a program of its own: compiled with the flags of the CPU module, and run.

core_test.cc: the planner and the placement in xla_ffi/core. sum_variants.cc: every variant of the row sums
(xla_ffi/cpu/sum_rows.cc) gives the same bits, of which tests of the ops run the widest only. Skipped where there is no
C++ compiler or no source tree. Bazel has them as cc_test.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-trapping-math")  # as in xla_ffi/CMakeLists.txt
COMPILER = next(filter(shutil.which, ("g++", "clang++", "c++")), None)

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (apt-get install g++)"),
    pytest.mark.skipif(not (ROOT / "xla_ffi").is_dir(), reason="needs the source tree"),
]


@pytest.mark.parametrize("source", ["core_test.cc", "sum_variants.cc"])
def test_program(source: str, tmp_path: Path) -> None:
    command = [str(COMPILER), *FLAGS, f"-I{ROOT}", str(ROOT / "tests" / source), "-o", str(tmp_path / "program")]
    subprocess.run(command, check=True, timeout=120)
    ran = subprocess.run([tmp_path / "program"], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
