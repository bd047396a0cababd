"""The key-value stores that processes meet over: jax.distributed's, and one for a single process.

`InProcessStore` also serves many simulated processes in threads. A store's error is a SetupError that says which call
on which key failed. Imports errors, and _compat for the client of jax.distributed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar, cast

import jax

from moonep_jax import _compat
from moonep_jax.errors import SetupError, message

T = TypeVar("T")

_PATIENCE_S: Final = 10.0  # seconds without an answer of jax.distributed's store after which process 0 counts as gone


class KeyValueStore(Protocol):
    """What the exchange needs of a store that all participants share."""

    def set(self, key: str, value: bytes) -> bool:
        """Stores a value under a new key. False, and no change, when the key exists."""
        ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a key. Raises TimeoutError."""
        ...

    def try_get(self, key: str) -> bytes | None:
        """The value of a key, None when it does not exist."""
        ...

    def barrier(self, name: str, participants: Sequence[int], timeout_s: float) -> None:
        """Waits until all participants have entered; a name is used once. Raises TimeoutError."""
        ...

    def delete(self, prefix: str) -> None:
        """Deletes the key `prefix` and all keys below `prefix + "/"`; none of them need exist."""
        ...


class InProcessStore:
    """A store in this process's memory; participants are threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._barriers: dict[str, threading.Barrier] = {}

    def set(self, key: str, value: bytes) -> bool:
        """See KeyValueStore."""
        with self._changed:
            if key in self._values:
                return False
            self._values[key] = value
            self._changed.notify_all()
            return True

    def get(self, key: str, timeout_s: float) -> bytes:
        """See KeyValueStore."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise TimeoutError(f"key {key} not set within {timeout_s} s")
            return self._values[key]

    def try_get(self, key: str) -> bytes | None:
        """See KeyValueStore."""
        with self._changed:
            return self._values.get(key)

    def barrier(self, name: str, participants: Sequence[int], timeout_s: float) -> None:
        """See KeyValueStore."""
        with self._changed:
            barrier = self._barriers.setdefault(name, threading.Barrier(len(participants)))
        try:
            barrier.wait(timeout_s)
        except threading.BrokenBarrierError:
            raise TimeoutError(f"barrier {name} not complete within {timeout_s} s") from None

    def delete(self, prefix: str) -> None:
        """See KeyValueStore."""
        with self._changed:
            for table in (self._values, self._barriers):
                for key in [k for k in table if k == prefix or k.startswith(prefix + "/")]:
                    del table[key]

    def keys(self) -> list[str]:
        """All keys now in the store, sorted."""
        with self._changed:
            return sorted(self._values)


class DistributedStore:
    """The store that jax.distributed keeps in process 0. Its errors become TimeoutError, False, None or SetupError."""

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        """Args: patience_s: seconds to wait for an answer; SetupError after that."""
        client = _compat.distributed_client()
        if client is None:
            fix = "call jax.distributed.initialize() in every process before the mesh is made"
            wrong = "the mesh spans processes, but jax.distributed has no client in this one"
            raise SetupError(message("setup", wrong, "no client", "an initialized jax.distributed", fix))
        self._client = client
        self._patience_s = patience_s
        self._unanswered: threading.Thread | None = None

    def set(self, key: str, value: bytes) -> bool:
        """See KeyValueStore."""
        try:
            self._ask("set", key, lambda: self._client.key_value_set_bytes(key, value))
        except jax.errors.JaxRuntimeError as error:
            if _code(error) == "ALREADY_EXISTS":
                return False
            raise _store_error("set", key, error) from error
        return True

    def get(self, key: str, timeout_s: float) -> bytes:
        """See KeyValueStore."""
        try:
            return self._client.blocking_key_value_get_bytes(key, _milliseconds(timeout_s))
        except jax.errors.JaxRuntimeError as error:
            if _code(error) == "DEADLINE_EXCEEDED":
                raise TimeoutError(f"key {key} not set within {timeout_s} s") from error
            raise _store_error("get", key, error) from error

    def try_get(self, key: str) -> bytes | None:
        """See KeyValueStore."""
        try:
            return self._ask("get", key, lambda: self._client.key_value_try_get_bytes(key))
        except jax.errors.JaxRuntimeError as error:
            if _code(error) == "NOT_FOUND":
                return None
            raise _store_error("get", key, error) from error

    def barrier(self, name: str, participants: Sequence[int], timeout_s: float) -> None:
        """See KeyValueStore."""
        try:
            wait = functools.partial(self._client.wait_at_barrier, name, _milliseconds(timeout_s))
            self._ask("barrier", name, lambda: wait(process_ids=list(participants)), timeout_s)
        except jax.errors.JaxRuntimeError as error:
            if _code(error) == "DEADLINE_EXCEEDED":
                raise TimeoutError(f"barrier {name} not complete within {timeout_s} s") from error
            raise _store_error("barrier", name, error) from error

    def delete(self, prefix: str) -> None:
        """See KeyValueStore."""
        try:
            # Deletes all keys below it, too.
            self._ask("delete", prefix, lambda: self._client.key_value_delete(prefix))
        except jax.errors.JaxRuntimeError as error:
            raise _store_error("delete", prefix, error) from error

    def _ask(self, call: str, key: str, body: Callable[[], T], timeout_s: float = 0.0) -> T:
        """What body, a call of the client, returns or raises. When process 0 is stopped, none but a blocking get ends.

        So the call runs on a thread, which is left behind if there is no answer; the next calls then fail at once.
        """
        outcome: list[tuple[T | None, Exception | None]] = []

        def run() -> None:
            try:
                outcome.append((body(), None))
            except Exception as error:
                outcome.append((None, error))

        if self._unanswered is None or not self._unanswered.is_alive():
            self._unanswered = threading.Thread(target=run, name="moonep-store", daemon=True)
            self._unanswered.start()
            self._unanswered.join(timeout_s + self._patience_s)
        if not outcome:
            wrong = f"process 0, which keeps the store of jax.distributed, does not answer in {call} of {key}"
            got, fix = (
                f"no word in {self._patience_s:g} s",
                "see the log of process 0: it may be dead, stopped or stuck",
            )
            raise SetupError(message("setup", wrong, got, "an answer", fix))
        result, error = outcome[0]
        if error is not None:
            raise error
        return cast(T, result)


def _code(error: Exception) -> str:
    return str(error).partition(":")[0]


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _store_error(call: str, key: str, error: Exception) -> SetupError:
    got, fix = str(error).partition("\n")[0], "see the log of process 0, which keeps the store"
    return SetupError(message("setup", f"the store of jax.distributed failed in {call} of {key}", got, "success", fix))


def open_store(participants: Sequence[int], timeout_s: float = _PATIENCE_S) -> KeyValueStore:
    """The store for these processes, whose steps wait for timeout_s. One process alone needs no jax.distributed."""
    return InProcessStore() if len(participants) == 1 else DistributedStore(min(_PATIENCE_S, timeout_s))
