"""Main program of the Bazel test targets: pytest on the files named, with the settings of pyproject.toml.

Writes to the folders that Bazel gives it only, and hands its import path on to the processes that tests start.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent  # of the runfiles: links are not followed, or it would be the source tree's
TEMPORARY = os.environ.get("TEST_TMPDIR", "/tmp")


def prepare() -> None:
    """Sets what has to stand before the first import of a library."""
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ.setdefault("HOME", TEMPORARY)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = os.path.join(TEMPORARY, "hypothesis")
    os.environ["MPLCONFIGDIR"] = os.path.join(TEMPORARY, "matplotlib")
    # Python puts this program's folder first, as a link's target: the source tree again.
    sys.path[:] = [str(ROOT / "tests"), *(p for p in sys.path if p != str(Path(__file__).resolve().parent))]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))


def options() -> list[str]:
    """What Bazel asks for, as options of pytest."""
    chosen = ["-q", "-p", "no:cacheprovider", f"-c={ROOT / 'pyproject.toml'}", f"--rootdir={ROOT}"]
    chosen.append(f"--basetemp={os.path.join(TEMPORARY, 'pytest')}")
    if "XML_OUTPUT_FILE" in os.environ:
        chosen.append(f"--junitxml={os.environ['XML_OUTPUT_FILE']}")
    if "TESTBRIDGE_TEST_ONLY" in os.environ:  # bazel test --test_filter=EXPRESSION
        chosen += ["-k", os.environ["TESTBRIDGE_TEST_ONLY"]]
    return chosen


if __name__ == "__main__":
    prepare()
    import pytest

    code = pytest.main([*options(), *(str(ROOT / file) for file in sys.argv[1:])])
    # A file whose tests all need what this machine lacks has none to run: that is no failure.
    sys.exit(0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code)
