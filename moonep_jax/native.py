"""The native modules: which one runs a platform's ops, and what to do when it is missing. Registers FFI targets.

The CPU module is always there. The CUDA module is built where nvcc is found; it imports without a GPU or a driver.
"""

from __future__ import annotations

from typing import Any

import jax

from moonep_jax.errors import ConfigError, message

try:
    from moonep_jax import _ffi_cpu
except ImportError as error:
    # Python puts the working directory first, so a checkout hides an installed package.
    got, fix = "the source folder only", "install it with `pip install -e .`, or run outside of the checkout"
    raise ImportError(message("moonep_jax", "the native module is missing", got, "a built package", fix)) from error
try:
    from moonep_jax import _ffi_cuda  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:  # built without nvcc
    _ffi_cuda = None

_MODULES: dict[str, Any] = {"cpu": _ffi_cpu, "gpu": _ffi_cuda}
LOWERING_PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}  # device.platform -> the name that lowering rules go by

for _platform, _module in (("cpu", _ffi_cpu), ("CUDA", _ffi_cuda)):
    if _module is not None:
        for _target, _capsule in _module.registrations().items():
            jax.ffi.register_ffi_target(_target, _capsule, platform=_platform)


def module(platform: str) -> Any:
    """The native module for devices of a platform (`device.platform`). Raises ConfigError when there is none."""
    if platform not in _MODULES:
        fix = "use a mesh of CPU devices or NVIDIA GPUs"
        raise ConfigError(message("setup", "no backend for this platform", repr(platform), list(_MODULES), fix))
    if _MODULES[platform] is None:
        fix = (
            "install moonep_jax again with nvcc (CUDA 13) in PATH or MOONEP_NVCC_FROM_PYPI=1, or use CPU devices "
            "(JAX_PLATFORMS=cpu)"
        )
        raise ConfigError(message("setup", "the CUDA module is missing", "a build without nvcc", "_ffi_cuda", fix))
    return _MODULES[platform]
