"""Environment variables: the only file that reads `os.environ`.

`VARIABLES` is the table of them all (the README's table is tested against it); `read()` checks the values.
Imports errors only.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, cast

from moonep_jax.errors import ConfigError, message

HandleType = Literal["auto", "fd", "fabric"]


class Variable(NamedTuple):
    """One environment variable: its name, its default as it would be written, and what it does."""

    name: str
    default: str
    meaning: str


VARIABLES: Final = (
    Variable("MOONEP_MEM_HANDLE_TYPE", "auto", "Handle kind of symmetric memory: auto, fd (one host) or fabric."),
    Variable("MOONEP_SETUP_TIMEOUT_S", "120", "Seconds that each step of setup and close waits for other processes."),
    Variable("MOONEP_POISON", "0", "1: outputs and staging memory are filled with NaN before use (for tests on CPUs)."),
    Variable(
        "MOONEP_DELAY_US", "0", "Longest random delay before a call is posted, in microseconds (for tests on CPUs)."
    ),
    Variable("MOONEP_DELAY_SEED", "0", "Seed of those delays (for tests on CPUs)."),
    Variable(
        "MOONEP_COLLECTIVE_STREAM",
        "0",
        "1: calls on GPUs run on the stream of XLA's collectives, not beside NCCL's kernels (jax 0.11.1 or newer).",
    ),
    Variable("MOONEP_DEBUG", "0", "1: every call is checked on the device: plans, rows, sums and weights (slow)."),
)


@dataclass(frozen=True)
class Env:
    """The checked values of `VARIABLES`, in their order."""

    mem_handle_type: HandleType = "auto"
    setup_timeout_s: float = 120.0
    poison: bool = False
    delay_us: int = 0
    delay_seed: int = 0
    collective_stream: bool = False
    debug: bool = False


def read() -> Env:
    """Reads all variables. Raises ConfigError for a value outside the ones allowed. An empty value is the default."""
    kind, timeout, poison, delay, seed, stream, debug = (
        os.environ.get(v.name, "").strip() or v.default for v in VARIABLES
    )
    if kind not in ("auto", "fd", "fabric"):
        raise _bad(0, kind, "auto, fd or fabric")
    if poison not in ("0", "1"):
        raise _bad(2, poison, "0 or 1")
    if stream not in ("0", "1"):
        raise _bad(5, stream, "0 or 1")
    if debug not in ("0", "1"):
        raise _bad(6, debug, "0 or 1")
    return Env(
        mem_handle_type=cast(HandleType, kind),
        setup_timeout_s=_seconds(1, timeout),
        poison=poison == "1",
        delay_us=_natural(3, delay),
        delay_seed=_natural(4, seed),
        collective_stream=stream == "1",
        debug=debug == "1",
    )


def leave_memory_to_others() -> None:
    """Has a JAX that makes its devices later take GPU memory as it needs it, unless the user has said otherwise."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _seconds(index: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise _bad(index, text, "a positive number of seconds")
    return value


def _natural(index: int, text: str) -> int:
    # isdecimal alone would let other scripts' digits through.
    if not (text.isascii() and text.isdecimal() and int(text) < 2**31):
        raise _bad(index, text, "an integer from 0 to 2**31 - 1")
    return int(text)


def _bad(index: int, got: str, expected: str) -> ConfigError:
    variable = VARIABLES[index]
    fix = f"set {variable.name} to an allowed value or unset it (default {variable.default})"
    return ConfigError(message("environment", f"bad value of {variable.name}", repr(got), expected, fix))
