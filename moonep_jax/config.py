"""EPConfig: what the caller fixes about an expert-parallel domain, checked when it is made.

Notation: S tokens per rank, K experts per token, H hidden, E experts, R ranks, epn = E/R experts per rank,
G = 2*epn groups per rank, A token_padding, NvS(s) rows of the dispatched buffer of a call with s tokens.
Pure values: imports NumPy, ml_dtypes (for the name "bfloat16") and errors only.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from moonep_jax.errors import ConfigError, message

ROW_DTYPES: Final = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
LEAF_ALIGN: Final = 64  # bytes; each weight leaf of an expert starts at a multiple of it
SUB_BYTE: Final = ("int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn")  # XLA packs them, NumPy does not
INT32_LIMIT: Final = 2**31  # row and assignment ids are int32


class WeightLeaf(NamedTuple):
    """Shape of one expert's leaf (without the expert axis) and its dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of one expert's leaf, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


class Weights(Mapping[str, WeightLeaf]):
    """Immutable, hashable mapping of leaf names to `WeightLeaf`; iterates in ascending order of names, as JAX does."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, WeightLeaf]) -> None:
        self._items = tuple(sorted(items.items()))

    def __getitem__(self, name: str) -> WeightLeaf:
        for key, leaf in self._items:
            if key == name:
                return leaf
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: ({leaf.shape}, {leaf.dtype.name})" for name, leaf in self._items) + "}"


@dataclass(frozen=True)
class EPConfig:
    """Static description of a domain. Frozen, hashable and compared by value; a bad field raises ConfigError.

    Attributes:
      tokens: S, most tokens per rank in one call.
      hidden: H, elements of a token's row.
      topk: K, experts per token.
      experts: E, experts of the EP group (all ranks together).
      dtype: dtype of the rows: float32, float16 or bfloat16. Stored as np.dtype.
      token_padding: A, rows; every group is padded to a multiple of it. A power of two.
      weights: leaf name -> (shape of one expert's leaf, dtype), for prefetch. Stored as `Weights`; None: no leaves.
      combine: "dedup" sums a token's rows on the destination first; "exact" sums all of them on the source.
      planner: "exact" gives every rank the same number of rows; "home" moves nothing (plain EP).
      num_sms: most GPU streaming multiprocessors that talk to peers at a time; None: the library's choice. Not of
        `plan`, whose few microseconds are latency. Where local work runs beside it, an eighth is left for that.
      local_sms: the same for work that stays on the device, which may run beside those. Calls of at most 1 MiB run on
        8 of them, both kinds of work together, unless num_sms is less.
      stage_bytes: cap, in bytes, of the region that holds weights under way; None: no cap.
      timeout_s: seconds that a call waits for a peer; None: 300, or 30 in a single-process CPU run.
      first_call_timeout_s: the same for the first call, which includes compiling; None: 900, or 30 likewise.
      capture_plan: lets CUDA graphs capture `plan`, at the price of errors being raised later.
    """

    tokens: int
    hidden: int
    topk: int
    experts: int
    dtype: Any = dataclasses.field(default="bfloat16")
    token_padding: int = 8
    weights: Any = None
    combine: str = "dedup"
    planner: str = "exact"
    num_sms: int | None = None
    local_sms: int | None = None
    stage_bytes: int | None = None
    timeout_s: float | None = None
    first_call_timeout_s: float | None = None
    capture_plan: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden", "topk", "experts", "token_padding"):
            self._store(name, _positive(name, getattr(self, name)))
        for name in ("num_sms", "local_sms", "stage_bytes"):
            if getattr(self, name) is not None:
                self._store(name, _positive(name, getattr(self, name)))
        for name in ("timeout_s", "first_call_timeout_s"):
            if getattr(self, name) is not None:
                self._store(name, _seconds(name, getattr(self, name)))
        if self.token_padding & (self.token_padding - 1):
            raise _bad("token_padding", self.token_padding, "a power of two", "pass 1, 8, 64 or 128, for example")
        dtype = _dtype("dtype", self.dtype)
        if dtype not in ROW_DTYPES:
            raise _bad("dtype", dtype.name, "float32, float16 or bfloat16", "cast the rows to one of them")
        self._store("dtype", dtype)
        self._store("weights", _weights(self.weights))
        for name, allowed in (("combine", ("dedup", "exact")), ("planner", ("exact", "home"))):
            if getattr(self, name) not in allowed:
                raise _bad(name, repr(getattr(self, name)), " or ".join(map(repr, allowed)), "pass one of them")
        if not isinstance(self.capture_plan, bool):
            raise _bad("capture_plan", repr(self.capture_plan), "True or False", "pass a bool")

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # normalising a field of a frozen dataclass

    def experts_per_rank(self, ranks: int) -> int:
        """epn = E/R. Raises ConfigError when ranks < 1 or E is not divisible by it."""
        ranks = _positive("ranks", ranks)
        if self.experts % ranks:
            fix = "choose experts as a multiple of the EP group's size"
            raise _bad("experts", f"{self.experts} experts on {ranks} ranks", "experts divisible by ranks", fix)
        return self.experts // ranks

    def recv_rows(self, ranks: int, tokens: int | None = None) -> int:
        """NvS(tokens): rows of the dispatched buffer of a call with `tokens` rows per rank (None: S)."""
        tokens = self.tokens if tokens is None else _positive("tokens", tokens)
        if tokens > self.tokens:
            fix = "raise EPConfig.tokens or split the batch"
            raise _bad("tokens", f"{tokens} tokens per rank", f"at most {self.tokens} (the capacity)", fix)
        epn, pad = self.experts_per_rank(ranks), self.token_padding
        if self.planner == "home":
            rows = ranks * tokens * self.topk + (pad - 1) * epn
        else:
            rows = tokens * self.topk + (pad - 1) * 2 * epn
        return -(-rows // pad) * pad

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's leaves as they travel: each leaf rounded up to 64 bytes."""
        return sum(-(-leaf.nbytes // LEAF_ALIGN) * LEAF_ALIGN for leaf in self.weights.values())

    def limits_check(self, ranks: int) -> None:
        """Raises ConfigError when an id of this config on `ranks` ranks would not fit int32."""
        sizes = {
            "assignments of the group (ranks * tokens * topk)": ranks * self.tokens * self.topk,
            "rows of the dispatched buffer": self.recv_rows(ranks),
            "entries of the count table (ranks * experts)": ranks * self.experts,
        }
        for name, size in sizes.items():
            if size >= INT32_LIMIT:
                fix = "lower tokens, topk, experts or token_padding"
                raise ConfigError(message("EPConfig", f"too many {name}", size, f"less than {INT32_LIMIT}", fix))

    def timeouts(self, platform: str, processes: int) -> tuple[float, float]:
        """(timeout_s, first_call_timeout_s) in seconds, defaults filled in.

        XLA aborts a single CPU process when one of its own collectives waits for 40 s, so there both defaults are 30 s.
        """
        short = platform == "cpu" and processes == 1
        later = self.timeout_s if self.timeout_s is not None else (30.0 if short else 300.0)
        first = self.first_call_timeout_s if self.first_call_timeout_s is not None else (30.0 if short else 900.0)
        return later, first

    def fingerprint(self) -> dict[str, str]:
        """Every field as text, for comparing processes: {"config.<field>": value}."""
        return {f"config.{f.name}": str(getattr(self, f.name)) for f in dataclasses.fields(self)}


def _bad(name: str, got: object, expected: object, fix: str) -> ConfigError:
    return ConfigError(message("EPConfig", f"bad {name}", got, expected, fix))


def _positive(name: str, value: Any) -> int:
    try:
        number = 0 if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise _bad(name, repr(value), "an integer of at least 1", f"pass a positive int as {name}")
    return number


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _bad(name, repr(value), "a positive, finite number of seconds or None", f"pass seconds as {name}")
    return float(value)


def _dtype(name: str, value: Any) -> np.dtype[Any]:
    try:
        if value is not None:  # np.dtype(None) is float64
            return np.dtype(value)
    except TypeError:
        pass
    raise _bad(name, repr(value), "a dtype such as jnp.bfloat16", "pass a NumPy or JAX dtype")


def _weights(value: Any) -> Weights:
    fix = 'pass weights={"up": ((H, F), jnp.bfloat16), ...}'
    if value is None:
        return Weights({})
    if not isinstance(value, Mapping):
        raise _bad("weights", type(value).__name__, "a mapping of leaf name to (shape, dtype)", fix)
    leaves: dict[str, WeightLeaf] = {}
    for name, leaf in value.items():
        if not isinstance(name, str) or not name:
            raise _bad("weights", f"leaf name {name!r}", "a non-empty string", fix)
        if not isinstance(leaf, Sequence) or isinstance(leaf, str) or len(leaf) != 2:
            shape = getattr(leaf, "shape", None)
            given = repr(leaf) if shape is None else f"{type(leaf).__name__} of shape {shape}"
            raise _bad(f"weights[{name!r}]", given, "(shape of one expert's leaf, dtype)", fix)
        shape, dtype = leaf
        if not isinstance(shape, Sequence) or isinstance(shape, str):
            raise _bad(f"weights[{name!r}]", f"shape {shape!r}", "a tuple of positive ints", fix)
        dims = tuple(_positive(f"weights[{name!r}] dimension", n) for n in shape)
        leaves[name] = WeightLeaf(dims, _dtype(f"weights[{name!r}] dtype", dtype))
        if leaves[name].dtype.hasobject or leaves[name].dtype.itemsize == 0:
            raise _bad(f"weights[{name!r}]", f"dtype {leaves[name].dtype}", "a dtype of plain bytes", fix)
        if leaves[name].dtype.name in SUB_BYTE:
            packed = "pack its elements into uint8 (jax.lax.bitcast_convert_type)"
            raise _bad(f"weights[{name!r}]", f"dtype {leaves[name].dtype.name}", "elements of whole bytes", packed)
    return Weights(leaves)
