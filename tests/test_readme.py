"""What the README says is so: its example runs, its table of environment variables is the one in the code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import STRICT

import moonep_jax
from moonep_jax import env

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_environment_table() -> None:
    rows = re.findall(r"^\| `(MOONEP_\w+)` \| `([^`]*)` \| (.*) \|$", README, re.MULTILINE)
    assert rows == [tuple(variable) for variable in env.VARIABLES]


@pytest.mark.multiprocess
def test_example_runs_as_printed() -> None:
    code = re.search(r"```python\n(import os\n.*?)```", README, re.DOTALL)
    assert code is not None
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *STRICT, "-c", code[1]], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "'gate': (8, 64, 256)" in done.stdout
    assert len(code[1].splitlines()) <= 40


def test_the_version_is_this_one() -> None:
    assert re.findall(r'name = "moonep_jax", version = "([^"]*)"', README) == [moonep_jax.__version__]


def test_commands_are_marked() -> None:
    for name in ("demo", "test"):
        assert re.search(rf"<!-- command: {name} -->\n```sh\npython3 -m venv .*\n```\n", README)
