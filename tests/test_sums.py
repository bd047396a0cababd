"""Every variant of the CPU backend's row sums (xla_ffi/cpu/sum_rows.cc) gives the same bits, whatever machine runs it.

Tests of the ops run the widest variant only. Skipped where there is no C++ compiler.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLAGS = ("-ffp-contract=off", "-fno-trapping-math")  # as in xla_ffi/CMakeLists.txt
COMPILER = next(filter(shutil.which, ("g++", "clang++", "c++")), None)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (apt-get install g++)")
def test_variants_give_the_same_bits(tmp_path: Path) -> None:
    program = tmp_path / "sums"
    command = [str(COMPILER), "-std=c++17", "-O3", *FLAGS, f"-I{ROOT}", str(ROOT / "tests/sum_variants.cc")]
    subprocess.run([*command, "-o", str(program)], check=True, timeout=120)
    ran = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.startswith("plain\n")
