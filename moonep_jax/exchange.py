"""Exchange: collective steps of the processes of a setup, over a key-value store.

Every participant enters the same steps in the same order. A step ends alike on all of them: with a result, or with a
SetupError of the same text that names the culprits; nobody is left waiting.

A *participant* is a process index. Imports errors, records and stores.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn, TypeVar

from moonep_jax.errors import MoonEPError, SetupError, message
from moonep_jax.records import pack, parse_texts, unpack
from moonep_jax.stores import KeyValueStore

T = TypeVar("T")

_SLICE_S: Final = 1.0  # seconds between two looks at the abort key while a record is awaited
_GRACE_S: Final = 3.0  # seconds that a failed setup waits for the others before it deletes the keys


_counters: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
_counters_lock = threading.Lock()


def namespace(participants: Sequence[int]) -> str:
    """A new key prefix for a setup of these processes.

    The n-th call for a set of processes returns the same prefix in each of them, so setups of one set must run in the
    same order everywhere, and consecutive ones never share keys.
    """
    key = tuple(participants)
    with _counters_lock:
        count = next(_counters[key])
    return f"moonep/{hashlib.sha256(','.join(map(str, key)).encode()).hexdigest()[:16]}/{count}"


class Exchange:
    """Collective steps of one setup (or close) among processes. All participants call the same steps in one order.

    A context manager: leaving it runs finish(), and an exception that leaves it is raised on the others, too.
    """

    def __init__(
        self,
        store: KeyValueStore,
        namespace: str,
        participant: int,
        participants: Sequence[int],
        timeout_s: float,
        describe: Callable[[int], str] = "process {}".format,
        op: str = "setup",
    ) -> None:
        """Args: store: shared by all participants.

        namespace: key prefix, equal on all participants and used by no other exchange. participant: this process's
        index, one of `participants`. timeout_s: seconds that one step waits for the others. describe: text for a
        participant in messages, equal on all. op: first word of the messages.
        """
        self.namespace = namespace
        self.participant = participant
        self.participants = tuple(participants)
        self.timeout_s = timeout_s
        self.describe = describe
        self.op = op
        self._store = store
        self._steps = 0
        self._failed = False
        self._left = False
        self._finished = False
        self._aborted: bytes | None = None  # the text that all raise

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not self._failed:
            # Raised outside of a guarded step: the others must not wait for this participant in the next one.
            wrong = f"{self.describe(self.participant)} failed outside of a step"
            fix = f"remove the cause and run {self.op} again on every process"
            with contextlib.suppress(SetupError):
                self._abort(self._text(wrong, _error_text(error), "success everywhere", fix))
        self.finish()

    def all_gather(self, step: str, payload: bytes, parse: Callable[[bytes], Any] = bytes) -> dict[int, Any]:
        """Every participant's payload, by participant. One time limit for all; all missing ones are named.

        parse: makes a value of a payload. What it raises is an error about the payload's sender, on all participants.
        """
        prefix = f"{self.namespace}/{self._steps}"
        self._steps += 1
        record = pack(step, self.participant, payload)
        if not self._stored(step, lambda: self._store.set(f"{prefix}/{self.participant}", record)):
            fix = "give every setup its own namespace, and every process its own index"
            self._abort(self._text(f"step '{step}' was entered twice", self.describe(self.participant), "once", fix))
        deadline = time.monotonic() + self.timeout_s
        gathered: dict[int, Any] = {}
        for p in self.participants:
            record = self._await(step, prefix, p, deadline)
            try:
                gathered[p] = parse(unpack(record, step, p))
            except Exception as error:
                got = error if type(error) is ValueError else _error_text(error)
                fix = "run the same version of moonep_jax and the same program on every process"
                self._abort(self._text(f"bad record of step '{step}' from {self.describe(p)}", got, "a record", fix))
        return gathered

    def _await(self, step: str, prefix: str, sender: int, deadline: float) -> bytes:
        keys = {p: f"{prefix}/{p}" for p in self.participants}
        while True:
            if (record := self._stored(step, lambda: self._get(keys[sender], deadline))) is not None:
                return record
            self._raise_if_aborted(step)
            if time.monotonic() >= deadline:
                late = self._stored(step, lambda: {p: self._store.try_get(key) for p, key in keys.items()})
                if (record := late[sender]) is not None:
                    return record
                names = ", ".join(self.describe(p) for p, value in late.items() if value is None)
                expected = f"all {len(self.participants)} processes within {self.timeout_s:g} s"
                fix = "see the logs of those processes, or raise MOONEP_SETUP_TIMEOUT_S"
                self._abort(self._text(f"step '{step}' timed out", f"no word from {names}", expected, fix))

    def _get(self, key: str, deadline: float) -> bytes | None:
        try:
            return self._store.get(key, max(0.0, min(deadline - time.monotonic(), _SLICE_S)))
        except TimeoutError:
            return None

    def _stored(self, step: str, call: Callable[[], T]) -> T:
        """What a call of the store returns. If it fails here, the step fails everywhere, and this one is named."""
        try:
            return call()
        except Exception as error:
            wrong = f"the key-value store failed in step '{step}' on {self.describe(self.participant)}"
            fix = "see the log of process 0, which keeps the store"
            self._abort(self._text(wrong, f"[{_error_text(error)}]", "an answer", fix), error)

    def vote(self, step: str, error: BaseException | str | None) -> None:
        """Ends a step on all participants alike: returns when none has an error, else raises one SetupError on all."""
        votes = self.all_gather(step, b"" if error is None else (_error_text(error) or "error").encode())
        culprits: defaultdict[str, list[str]] = defaultdict(list)
        for p, text in votes.items():
            if text:
                culprits[text.decode(errors="replace")].append(self.describe(p))
        if culprits:
            failed, count = sum(map(len, culprits.values())), len(self.participants)
            got = " | ".join(f"{', '.join(names)}: {text}" for text, names in culprits.items())
            wrong = f"step '{step}' failed on {failed} of {count} process{'es' if count > 1 else ''}"
            fix = f"remove the cause and run {self.op} again on every process"
            cause = error if isinstance(error, BaseException) else None
            self._abort(self._text(wrong, f"[{got}]", "success everywhere", fix), cause)

    def guarded(self, step: str, fn: Callable[[], T]) -> T:
        """Runs fn and votes: its result, or one SetupError on all participants when any of them failed.

        What fn acquires must be released by the caller when this raises: another participant may be the culprit.
        """
        try:
            result = fn()
        except Exception as error:
            self.vote(step, error)
            raise  # not reached: the vote raises
        self.vote(step, None)
        return result

    def compare(self, step: str, fields: dict[str, str]) -> None:
        """Returns when all participants gave the same fields; else names the fields, participants and values."""
        tables = self.all_gather(step, json.dumps(fields).encode(), parse_texts)
        differing: list[str] = []
        for field in sorted({f for table in tables.values() for f in table}):
            values: defaultdict[str, list[str]] = defaultdict(list)
            for p, table in tables.items():
                values[table.get(field, "(no such field)")].append(self.describe(p))
            if len(values) > 1:
                differing.append(f"{field} = " + " / ".join(f"{v!r} on {', '.join(n)}" for v, n in values.items()))
        if differing:
            fix = "give every process the same config, mesh and versions"
            wrong = f"step '{step}': the processes differ"
            self._abort(self._text(wrong, f"[{' | '.join(differing)}]", "one value of each field", fix))

    def barrier(self, step: str) -> None:
        """Waits for all participants; the missing ones are named in the SetupError."""
        self.all_gather(step, b"")

    def all_present(self, step: str) -> bool:
        """Waits for all participants; False when one of them has left instead of taking part."""
        left = [p for p, word in self.all_gather(step, b"here").items() if word != b"here"]
        self._failed = self._failed or bool(left)
        return not left

    def leave(self, step: str) -> None:
        """Tells whoever waits in `all_present(step)` that this participant takes no part; waits for nobody."""
        self._left = True
        key, word = f"{self.namespace}/{self._steps}/{self.participant}", pack(step, self.participant, b"left")
        with contextlib.suppress(Exception):  # without a store nobody waits for the word either
            self._store.set(key, word)

    def finish(self) -> None:
        """Deletes the exchange's keys once all participants are done with them. Idempotent; also called after failures.

        If a participant did not come, the text of the failure stays: should it come after all, it raises the same at
        once, and the next exchange finds all of them at the same count.

        Raises SetupError when this participant's steps all went well, but another's last one did not.
        """
        if self._finished:
            return
        self._finished = True
        # Best effort: if the store is gone, so are the keys. The others' last step may end as late as its limit.
        limit = min(_GRACE_S, self.timeout_s) if self._failed or self._left else self.timeout_s + _GRACE_S
        reason: bytes | None = None
        keep = self._aborted
        with contextlib.suppress(Exception):
            self._store.barrier(f"{self.namespace}/finish", self.participants, limit)
            keep = None
            reason = self._store.try_get(f"{self.namespace}/abort")
            self._store.barrier(f"{self.namespace}/read", self.participants, limit)  # all have looked
        with contextlib.suppress(Exception):
            self._store.delete(self.namespace)
            if keep is not None:
                self._store.set(f"{self.namespace}/abort", keep)
        if reason is not None and not self._failed and not self._left:
            self._failed = True
            raise SetupError(self._reason(reason))

    def _abort(self, text: str, cause: BaseException | None = None) -> NoReturn:
        # The first failure wins: its text is what every participant raises, late ones included.
        self._failed = True
        try:
            self._store.set(f"{self.namespace}/abort", text.encode())
            reason = self._store.try_get(f"{self.namespace}/abort")
        except Exception:  # no store, no common text
            reason = None
        self._aborted = text.encode() if reason is None else reason
        raise SetupError(text if reason is None else self._reason(reason)) from cause

    def _raise_if_aborted(self, step: str) -> None:
        if (reason := self._stored(step, lambda: self._store.try_get(f"{self.namespace}/abort"))) is not None:
            self._failed, self._aborted = True, reason
            raise SetupError(self._reason(reason))

    def _reason(self, text: bytes) -> str:
        """The text with which a participant gave up, or what to say instead of one that is none."""
        with contextlib.suppress(UnicodeDecodeError):
            if (reason := text.decode()).startswith(f"{self.op}: "):
                return reason
        fix = f"see the logs of all processes and run {self.op} again"
        return self._text("a process gave up without a reason that can be read", repr(text[:80]), "a text", fix)

    def _text(self, wrong: str, got: object, expected: object, fix: str) -> str:
        return message(self.op, wrong, got, expected, fix)


def _error_text(error: BaseException | str) -> str:
    return str(error) if isinstance(error, str | MoonEPError) else f"{type(error).__name__}: {error}"
