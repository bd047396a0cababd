"""Entry of a child process: limits, then JAX, then the worker named on the command line."""

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from typing import Any


def main(spec: dict[str, Any]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed test run leaves nothing behind
    if spec["files"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (spec["files"], spec["files"]))

    import jax

    jax.config.update("jax_num_cpu_devices", spec["devices"])
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if spec["processes"] > 1:
        limits: dict[str, Any] = {"initialization_timeout": 120}
        if os.environ["JAX_PLATFORMS"].startswith("cuda"):
            limits["local_device_ids"] = spec["gpus"]
        if spec["recoverable"]:
            jax.config.update("jax_enable_recoverability", True)
            # Survivors wait for the one that left when they shut down.
            limits |= {"heartbeat_timeout_seconds": 20, "shutdown_timeout_seconds": 10}
        jax.distributed.initialize(f"127.0.0.1:{spec['port']}", spec["processes"], spec["index"], **limits)

    from workers import Context

    module, _, function = spec["worker"].partition(":")
    with Context(spec) as context:
        getattr(importlib.import_module(f"workers.{module}"), function)(context)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
