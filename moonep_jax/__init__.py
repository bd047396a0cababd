"""Expert parallelism for mixture-of-experts models in JAX: exactly equal load, no dropped rows, static memory.

import moonep_jax as moonep

with moonep.setup(mesh, "ep", moonep.EPConfig(...)) as ep:  # before jit
    ...  # ep.plan, ep.dispatch, ep.prefetch, ep.combine, ep.moe inside jax.shard_map over the mesh
"""

from moonep_jax._compat import warn_if_untested
from moonep_jax.config import EPConfig
from moonep_jax.domain import Domain, setup
from moonep_jax.errors import ConfigError, DomainError, MoonEPError, OpError, SetupError
from moonep_jax.spec import Dispatched, Plan
from moonep_jax.version import __version__

__all__ = [
    "ConfigError",
    "Dispatched",
    "Domain",
    "DomainError",
    "EPConfig",
    "MoonEPError",
    "OpError",
    "Plan",
    "SetupError",
    "__version__",
    "setup",
]

warn_if_untested()  # once: a module is imported once
