"""Types of the native module of the CPU backend (xla_ffi/cpu/module.cc says what each function does)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

class DomainShape:
    def __init__(
        self,
        *,
        ranks: int,
        experts: int,
        topk: int,
        tokens: int,
        padding: int,
        home: bool = False,
        exact: bool = False,
        hidden: int = 1,
        row_bytes: int = 4,
        stage_bytes: int = 0,
    ) -> None: ...
    def recv_rows(self, tokens: int, /) -> int: ...
    def chunk_bytes(self) -> dict[str, int]: ...

def registrations() -> dict[str, Any]: ...
def map_fd(fd: int, nbytes: int, /) -> int: ...
def map_anonymous(nbytes: int, /) -> int: ...
def unmap(address: int, nbytes: int, /) -> None: ...
def add_rank(
    *,
    domain: int,
    device: int,
    shape: DomainShape,
    rank: int,
    chunks: list[int],
    labels: list[str],
    group: str,
    timeout_s: float,
    first_call_timeout_s: float,
    poison: bool,
    delay_us: int,
    delay_seed: int,
) -> None: ...
def error(domain: int, /) -> str | None: ...
def fail(domain: int, text: str, /) -> None: ...
def executed(domain: int, /) -> int: ...
def stop(domain: int, /) -> None: ...
def limits() -> dict[str, int]: ...
def plan_all(shape: DomainShape, ids: NDArray[np.int32], /) -> dict[str, Any]: ...
