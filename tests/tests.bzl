"""Test targets: one for each tests/test_*.py, run by pytest, with sizes and tags from one table."""

load("@moonep_python//:defs.bzl", "PYTHON_PACKAGES")
load("@rules_python//python:defs.bzl", "py_binary", "py_test")

_ENV = {"PYTHONPATH": PYTHON_PACKAGES}

# A program's own folder, as a link's target in the source tree, would come first: its modules hide others of their names.
_PROGRAM_ENV = _ENV | {"PYTHONSAFEPATH": "1"}

# Test files from which other files of tests/ import. A change in one of them runs all tests again.
IMPORTED_TESTS = [
    "tests/test_%s.py" % name
    for name in ["autodiff", "doctor", "errors", "handles", "planner", "prefetch"]
]

# Tags of files; any other is a test of one process. "multiprocess" starts processes of its own, "cuda" needs an NVIDIA
# GPU and skips itself without one, "sanitize" runs under --config=asan and --config=tsan, and "fast" is what .ci/bazel
# runs. "no-sandbox": in Bazel's sandbox root cannot become another user.
_TAGS = {
    "channels": ["sanitize"],
    "config": ["fast"],
    "cuda_domain": ["cuda", "multiprocess"],
    "cuda_failures": ["cuda"],
    "cuda_kernels": ["cuda"],
    "cuda_pair": ["cuda", "multiprocess"],
    "cuda_rows": ["cuda"],
    "debug": ["multiprocess"],
    "demo": ["multiprocess"],
    "doctor_command": ["multiprocess"],
    "exchange": ["multiprocess"],
    "faults": ["multiprocess"],
    "fuzz": ["multiprocess"],
    "handles": ["fast"],
    "hostile_cuda": ["fast"],
    "hostile_users": ["multiprocess", "no-sandbox"],
    "leaks": ["multiprocess"],
    "matching": ["multiprocess"],
    "memory_cuda": ["fast"],
    "memory_driver": ["fast"],
    "memory_fds": ["multiprocess"],
    "memory_gpu": ["cuda", "multiprocess"],
    "memory_host": ["fast"],
    "memory_share": ["multiprocess"],
    "ops": ["fast"],
    "planner": ["fast"],
    "readme": ["fast", "multiprocess"],
    "reuse": ["sanitize"],
    "setup": ["multiprocess"],
    "shapes": ["multiprocess"],
    "timeouts": ["multiprocess"],
    "topology": ["fast"],
}

# Files that take more than a minute on two cores.
_LONG = [
    "autodiff",
    "debug",
    "demo",
    "faults",
    "fuzz",
    "hostile",
    "layer",
    "leaks",
    "lifetime",
    "matching",
    "model",
    "ops",
    "replicated",
    "reuse",
    "setup",
    "shapes",
    "timeouts",
]

def python_program(name, **kwargs):
    """A py_binary whose programs, and the processes that they start, find the packages of the build's Python."""
    py_binary(name = name, env = _PROGRAM_ENV, legacy_create_init = 0, **kwargs)

def python_tests(files, data, deps):
    """A py_test `test_x` for each file tests/test_x.py. A new file needs no line here."""
    for file in files:
        name = file.removeprefix("tests/").removesuffix(".py")
        tags = _TAGS.get(name.removeprefix("test_"), [])
        py_test(
            name = name,
            timeout = "long" if name.removeprefix("test_") in _LONG else "moderate",
            srcs = [file, "tests/run_pytest.py"],
            args = [file],
            data = data,
            env = _ENV,
            legacy_create_init = 0,
            main = "tests/run_pytest.py",
            tags = tags + (["cpu:2"] if "multiprocess" in tags else []),
            deps = deps,
        )
