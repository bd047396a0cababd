"""setup() and Domain: makes, owns and closes what the ops run on. The only file that starts or stops native domains.

setup is collective over the mesh's processes and runs before jit: check -> compare -> agree on an id -> share memory ->
start. Each step ends in a vote, so that a failure anywhere is the same error everywhere and frees everything.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import jax
import jaxlib.version

from moonep_jax import _compat, backends, debug, env, layer, ops
from moonep_jax.backends import Backend
from moonep_jax.config import EPConfig
from moonep_jax.errors import ConfigError, DomainError, message
from moonep_jax.exchange import Exchange, namespace
from moonep_jax.memory.hosts import HostInfo, gather_hosts
from moonep_jax.memory.share import SharedMemory, share
from moonep_jax.spec import Dispatched, DomainSpec, Plan
from moonep_jax.stores import KeyValueStore, open_store
from moonep_jax.topology import Topology
from moonep_jax.version import __version__
from moonep_jax.watch import Watcher

_log = logging.getLogger("moonep_jax")
_next_id = itertools.count()


class Domain:
    """An expert-parallel domain: the EP groups of one mesh, their shared memory and their ops. Made by `setup`.

    The ops are pure functions of arrays for use inside `jax.shard_map` over the mesh (all axes manual): they work under
    jit, grad, remat, scan and donation. Shapes below are one rank's; notation as in `EPConfig` and `Plan`. Two domains
    are equal when their specs and ids are, so passing one as a static argument never recompiles.

    A call that cannot work raises `OpError` while tracing. A call that fails while running (a missing rank, say) makes
    jax raise `JaxRuntimeError` with the library's text, on every rank of the group; the domain then stays in error.
    """

    def __init__(
        self,
        spec: DomainSpec,
        native: Any,
        shared: SharedMemory,
        store: KeyValueStore,
        process: int,
        namespace: str,
        describe: Callable[[int], str],
        parts: dict[str, int],
    ):
        self.spec = spec
        self._native = native
        self._shared = shared
        self._store = store
        self._process = process
        self._namespace = namespace
        self._describe = describe
        self._parts = parts
        self._closed = False
        self._pid = os.getpid()
        self._last_error: str | None = None
        self._raised = False  # it, to the program
        # Without a reference to the domain, which may be dropped while the thread runs.
        self._watcher = Watcher(f"domain {spec.id}", functools.partial(native.error, spec.id))

    # -- ops -----------------------------------------------------------------------------------------------------------

    def plan(self, topk_ids: jax.Array, channel: int = 0) -> Plan:
        """Decides which rank computes which rows, from the ids of all ranks.

        Args:
          topk_ids: [s, K] int32, 1 <= s <= S, the same s on all ranks. Ids outside [0, E) are not routed.
          channel: static; 0 is right, except where one jitted or checkpointed function is applied several times and the
            uses do not depend on each other through data (independent micro-batches, say): a number for each of them.

        Returns: Plan. Its arrays have the name "moonep_plan" for `jax.checkpoint` policies.
        """
        self._open("plan")
        return ops.plan(self.spec, topk_ids, channel)

    def dispatch(
        self,
        x: jax.Array,
        topk_ids: jax.Array,
        topk_weights: jax.Array | None = None,
        plan: Plan | None = None,
        channel: int = 0,
    ) -> Dispatched:
        """Brings every token to the ranks that compute it, as rows grouped by expert. Nothing is dropped.

        Args:
          x: [s, H] rows in the config's dtype. Differentiable.
          topk_ids: [s, K] int32, as in `plan`.
          topk_weights: [s, K] float32 route weights; None: ones. Differentiable.
          plan: a Plan of the same ids; None: it is made here.
          channel: as in `plan`.

        Returns: Dispatched; its `hidden` [NvS(s), H] and `weights` [NvS(s)] are zero where no token is.
        """
        self._open("dispatch")
        return ops.dispatch(self.spec, x, topk_ids, topk_weights, plan, channel)

    def combine(self, plan: Plan, out: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Brings each token's K results home and sums them in float32.

        Args:
          plan: the Plan of the dispatch.
          out: [NvS(s), H] the experts' results in the config's dtype, row for row as `hidden` was. Rows that hold no
            token are not read. Differentiable.
          weights: [NvS(s)] float32 (`d.weights`) that scale the rows first; None: no scaling. Differentiable.

        Returns: [s, H] in the config's dtype; zero for tokens without a routed expert.
        """
        self._open("combine")
        return ops.combine(self.spec, plan, out, weights)

    def prefetch(self, plan: Plan, weights: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Brings the weights of the foreign experts that a plan gives this rank into its slots.

        Its gradient, reduce_grad, sums the replicas' gradients into the home rank: float32, in rank order.

        Args:
          plan: the Plan of the dispatch.
          weights: leaves of EPConfig.weights, all that are needed in one call; each [epn, *shape], or [2*epn, *shape]
            to be filled in place (rows from epn on are ignored; unused slots keep their bytes).

        Returns: the same names; each [2*epn, *shape]: own experts, then slots in the order of `Plan.slot_expert`;
          unused slots of the [epn] form are zero.
        """
        self._open("prefetch")
        return ops.prefetch(self.spec, plan, weights)

    def moe(
        self,
        x: jax.Array,
        router_logits: jax.Array,
        params: Mapping[str, jax.Array],
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
        channel: int = 0,
        grouped_gemm: layer.GroupedGemm | None = None,
    ) -> jax.Array:
        """A SwiGLU mixture-of-experts layer: softmax over the K largest logits, then down(act(gate x) * up x).

        Args:
          x: [s, H] in the config's dtype.
          router_logits: [s, E] float; ties go to the lowest expert. Padded tokens may have any finite ones.
          params: {"gate": [epn, H, F], "up": [epn, H, F], "down": [epn, F, H]}, declared in EPConfig.weights.
          activation: of the gate.
          channel: as in `plan`.
          grouped_gemm: (lhs [m, k], rhs [g, k, n], group_sizes [g]) -> [m, n]; None: grouped_gemm.tiled_dot on CPU,
            Tokamax on GPU where it is installed.

        Returns: [s, H] in the config's dtype.
        """
        self._open("moe")
        return layer.moe(self.spec, x, router_logits, params, activation, channel, grouped_gemm)

    def recv_rows(self, tokens: int | None = None) -> int:
        """NvS(tokens), rows of the dispatched buffer of a call with `tokens` per rank; None: the capacity S."""
        return self.spec.config.recv_rows(self.spec.ranks, tokens)

    # -- life ----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises DomainError when the domain is closed or in error; synchronises nothing.

        On CPUs it knows of an error as soon as any rank of the group has found it; the calls in flight raise by
        themselves. On GPUs as soon as a kernel of this process has, also while CUDA graphs replay; there the next call
        whose handler runs raises, too: at the latest the next `plan`, which stays out of graphs unless
        EPConfig.capture_plan is set. The log has the error's text at most half a second later, once, from a thread of
        the domain (logger "moonep_jax", level ERROR).
        """
        if self._last_error is None:
            self._last_error = self._native.error(self.spec.id)
        if self._last_error is not None:
            self._raised = True
            raise DomainError(self._last_error)
        self._open("check")

    def stats(self) -> dict[str, Any]:
        """Facts about the domain, and sums over the calls of this process's ranks since setup. Waits for no call.

        Raises what `check` raises. The ops are plan, dispatch, combine, prefetch and their backward uses dispatch_grad,
        combine_grad and reduce_grad.

        Returns:
          calls: {op: calls done}, once for each rank. GPUs: calls begun; replays of CUDA graphs count, too.
          wait_s: {op: seconds that calls waited for other ranks}, summed over ranks. CPUs: from when a call was posted
            to its end, without its own copying. GPUs: time in kernels that wait for peers.
          bytes: {op: bytes that these ranks moved from or to another rank}. None on GPUs, where counting them would
            cost time.
          rows: rows that these ranks compute, summed over plans; plans used twice count once.
          link_rows: of them, those that come from other ranks; of a token's rows on one rank only the first.
          moved_experts: foreign experts that these ranks compute, summed over plans.
          executed: calls of all ops (GPUs: without replays of CUDA graphs).
          bytes_per_rank: {part of a rank's shared memory: bytes}, with "total".
          memory: {group: how its memory is shared: "local", "fd" or "fabric"}.
        """
        self.check()
        counted = self._native.counters(self.spec.id)
        kinds = {g.index: self._shared.kind_of(g.index) for g, _ in self.spec.topology.local(self._process)}
        return {
            "calls": counted["calls"],
            "wait_s": {op: ns / 1e9 for op, ns in counted["wait_ns"].items()},
            "bytes": counted["bytes"] if self.spec.topology.platform == "cpu" else None,
            **{name: counted[name] for name in ("rows", "link_rows", "moved_experts")},
            "executed": self._native.executed(self.spec.id),
            "bytes_per_rank": dict(self._parts),
            "memory": kinds,
        }

    def close(self) -> None:
        """Stops the domain and frees its memory. Collective over the mesh's processes; idempotent.

        Calls in flight fail with "domain closed". With the domain in error nothing waits for other processes, except
        for a few seconds until they have read why. Never called by the interpreter: a domain that is not closed is
        freed with the process. In a forked child it does nothing, and every op raises: the domain is the parent's.

        Raises DomainError, once all is freed, when the domain is in error and neither `check` nor `stats` has said so.
        """
        self._close(together=True)
        if self._last_error is not None and not self._raised:
            self.check()

    def _close(self, together: bool) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._last_error = self._native.error(self.spec.id)
        self._watcher.stop()
        exchange = Exchange(
            self._store,
            # Of its own, and not below the setup's: a process late in setup still deletes the keys below that one.
            f"{self._namespace}-close",
            self._process,
            self.spec.topology.processes,
            env.read().setup_timeout_s,
            self._describe,
            "close",
        )
        if self.spec.debug and self._last_error is not None:
            _compat.forget_callbacks()
        with ExitStack() as stack:
            stack.enter_context(exchange)
            stack.callback(self._shared.free)
            stack.callback(self._native.stop, self.spec.id, False)
            if self._last_error is not None or not together:
                exchange.leave("close")
                return
            # No rank may lose a peer's memory while it still runs a call, nor free its own while a peer maps it.
            if exchange.all_present("close"):
                # Waits for kernels in flight: what they find is not to be lost.
                self._last_error = self._native.stop(self.spec.id, True)
                self._shared.unmap_peers()
                exchange.all_present("unmapped")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            # It may be this process's alone: the others may never come, and must not wait for it either.
            self._close(together=False)

    def __del__(self, _finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Closing is collective, and the garbage collector is not: only say so. (At exit modules may be gone.)
        if not _finalizing() and not getattr(self, "_closed", True):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Domain) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(self.spec)

    def __repr__(self) -> str:
        t = self.spec.topology
        return f"<moonep_jax.Domain {self.spec.id}: {len(t.groups)} group(s) of {t.ranks} rank(s) over {t.axes}>"

    def _open(self, op: str) -> None:
        if os.getpid() != self._pid:
            fix = "use it in the process that called setup; start others by spawn, not by fork"
            raise DomainError(message(op, "the domain is another process's", f"process {os.getpid()}", self._pid, fix))
        if self._closed:
            fix = "call close() after the last use, or set up a new domain"
            raise DomainError(message(op, "the domain is closed", repr(self), "an open domain", fix))


def setup(mesh: jax.sharding.Mesh, axis: str | tuple[str, ...], config: EPConfig) -> Domain:
    """Sets up an expert-parallel domain on a mesh. Collective over the mesh's processes; call it before the first jit.

    Args:
      mesh: its devices say who is who. Every coordinate of the axes that are not named is an EP group of its own.
      axis: the EP axis, or a tuple of them; a rank is row-major over them in this order.
      config: EPConfig; equal on all processes.

    Returns: Domain. Use it as a context manager, or call close().

    Raises:
      SetupError: on every process, with the same text, whatever failed wherever.
      ConfigError: for arguments that cannot name any processes to agree with.
    """
    if not isinstance(config, EPConfig):
        fix = "pass moonep_jax.EPConfig(...)"
        raise ConfigError(message("setup", "bad config", type(config).__name__, "an EPConfig", fix))
    if not isinstance(mesh, jax.sharding.Mesh):
        fix = "pass the jax.sharding.Mesh that holds the devices"
        raise ConfigError(message("setup", "bad mesh", type(mesh).__name__, "a jax.sharding.Mesh", fix))
    participants = sorted({int(d.process_index) for d in mesh.devices.flat})
    process = jax.process_index()
    if process not in participants:
        fix = "call setup on the processes that own the mesh's devices only"
        raise ConfigError(message("setup", "this process owns no device of the mesh", process, participants, fix))
    variables = env.read()
    store = open_store(participants, variables.setup_timeout_s)
    exchange = Exchange(store, namespace(participants), process, participants, variables.setup_timeout_s)
    with exchange, ExitStack() as undo:
        topology, backend, shape = exchange.guarded(
            "check the arguments", lambda: _check(mesh, axis, config, process, variables)
        )
        hosts = gather_hosts(exchange)
        # Meshes first: ranks can be named alike everywhere only if all processes mean the same ones.
        exchange.compare("compare the meshes", topology.fingerprint())
        exchange.describe = lambda p: topology.describe(p, hosts[p].hostname)
        # Launches match by numbers that XLA gives, which is jaxlib's.
        versions = {"moonep_jax": __version__, "jax": jax.__version__, "jaxlib": jaxlib.version.__version__}
        # They decide which calls a device makes, and in what order, which must be alike on all ranks.
        order = {
            "MOONEP_COLLECTIVE_STREAM": str(int(variables.collective_stream)),
            "MOONEP_DEBUG": str(int(variables.debug)),
        }
        exchange.compare(
            "compare the configs",
            {**config.fingerprint(), **{f"version.{name}": v for name, v in versions.items()}, **order},
        )
        domain_id = _agree_on_id(exchange)
        parts = shape.chunk_bytes()
        shared = share(exchange, topology, process, parts["total"], backend.memory, variables, hosts)
        undo.callback(shared.free)
        undo.callback(backend.module.stop, domain_id, False)
        spec = DomainSpec(domain_id, config, topology, variables.debug)
        exchange.guarded("start", lambda: _start(spec, backend, shape, shared, process, exchange.describe))
        exchange.finish()  # raises when the last step failed on another process
        domain = Domain(spec, backend.module, shared, store, process, exchange.namespace, exchange.describe, parts)
        undo.pop_all()
    _log.info("%s", _headline(domain, hosts))
    return domain


def _headline(domain: Domain, hosts: Mapping[int, HostInfo]) -> str:
    """The one line that a setup logs."""
    t, parts = domain.spec.topology, domain._parts
    here = t.local(domain._process)
    kinds = sorted({domain._shared.kind_of(g.index) for g, _ in here})
    sizes = ", ".join(f"{name} {count}" for name, count in parts.items() if name != "total")
    return (
        f"setup: domain {domain.spec.id}: {len(t.groups)} group(s) of {t.ranks} rank(s) over {t.axes} on {t.platform}, "
        f"{len(t.processes)} process(es) on {len(set(hosts.values()))} host(s); here "
        f"{t.describe(domain._process, hosts[domain._process].hostname)}; memory shared by {', '.join(kinds)}: "
        f"{parts['total']} bytes per rank ({sizes})"
    )


def _check(
    mesh: jax.sharding.Mesh, axis: Any, config: EPConfig, process: int, variables: env.Env
) -> tuple[Topology, Backend, Any]:
    topology = Topology.from_mesh(mesh, axis)
    backend = backends.make(topology.platform, mesh.devices.flat, process, variables)
    if variables.debug:
        debug.require(topology.platform)
    return topology, backend, backends.domain_shape(backend, config, topology.ranks)


def _agree_on_id(exchange: Exchange) -> int:
    """The largest of the processes' next free ids; none of them uses a smaller one again."""
    global _next_id
    free = next(_next_id)
    agreed = max(exchange.all_gather("domain id", str(free).encode(), _parse_id).values())
    _next_id = itertools.count(agreed + 1)
    return agreed


def _parse_id(data: bytes) -> int:
    # Later ids are larger: one that is far out would leave none.
    if not (data.isdigit() and len(data) < 10):
        raise ValueError(f"{data[:80]!r} instead of a number of less than 10 digits")
    return int(data)


def _start(
    spec: DomainSpec,
    backend: Backend,
    shape: Any,
    shared: SharedMemory,
    process: int,
    describe: Callable[[int], str],
) -> None:
    timeout_s, first_s = spec.config.timeouts(spec.topology.platform, len(spec.topology.processes))
    for group, member in spec.topology.local(process):
        backend.module.add_rank(
            domain=spec.id,
            device=backend.device_number(member),
            shape=shape,
            rank=member.rank,
            chunks=[shared.address[group.index, m.rank] for m in group.devices],
            labels=[f"rank {m.rank} (device {m.device_id} of {describe(m.process_index)})" for m in group.devices],
            group=f"group {group.index} of domain {spec.id}",
            timeout_s=timeout_s,
            first_call_timeout_s=first_s,
            **backend.options(spec.config),
        )
