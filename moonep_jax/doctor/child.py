"""A second process for the doctor: fetches and imports what the first one exported, and says what worked.

`python -m moonep_jax.doctor.child` reads a request from stdin and prints the answer. It makes no JAX devices.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from moonep_jax.errors import MoonEPError
from moonep_jax.handles import decode
from moonep_jax.memory import cuda, driver, fds
from moonep_jax.memory.backend import Backend, accept
from moonep_jax.memory.host import HostMemory

BLOCK_BYTES: Final = 64
FETCHERS: Final = 3  # process indices 1, 2, ... that the child fetches as: one per transport, and one for the import
_FETCH_S: Final = 10.0


def answer(
    request: dict[str, Any], backend: Backend, transports: Sequence[tuple[str, fds.Transport]] = fds.TRANSPORTS
) -> dict[str, dict[str, dict[str, str]]]:
    """What works, per device: {device: {"transports": {name: ""}, "imports": {kind: ""}}}; else the error's text.

    request: {"namespace": text, "records": [[group, kind, device, record in hex], ...]}; a record's rank is 0.
    """
    result: dict[str, dict[str, dict[str, str]]] = {}
    for group, kind, device, data in request["records"]:
        place = {"group": group, "rank": 0, "ranks": 1, "nbytes": BLOCK_BYTES, "kind": kind}
        record = decode(bytes.fromhex(data), namespace=request["namespace"], **place)
        found = result.setdefault(str(device), {"transports": {}, "imports": {}})
        for i, transport in enumerate(transports if kind == "fd" else ()):
            found["transports"][transport[0]] = _outcome(
                lambda r=record, p=i + 1, t=transport: os.close(
                    fds.fetch(r, p, _FETCH_S, [t], validate=backend.validate_fd)
                )
            )
        fetch = functools.partial(fds.fetch, transports=transports, validate=backend.validate_fd)
        found["imports"][kind] = _outcome(
            lambda r=record, d=device, f=fetch: accept(backend, r, [d], f, FETCHERS, _FETCH_S).unmap()
        )
    return result


def _outcome(attempt: Any) -> str:
    try:
        attempt()
    except (MoonEPError, OSError) as error:
        return str(error)
    return ""


def _backend(platform: str, ordinals: dict[str, int]) -> Backend:
    if platform == "gpu":
        return cuda.CudaMemory(driver.load(), {int(device): ordinal for device, ordinal in ordinals.items()})
    from moonep_jax import native

    return HostMemory(native.module("cpu"))


def main() -> None:
    """Answers one request."""
    request = json.load(sys.stdin)
    try:
        result: dict[str, Any] = answer(request, _backend(request["platform"], request["ordinals"]))
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
