"""Stores and collective steps: every participant ends a step alike, culprits are named, no key stays behind."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from memory_kit import in_threads, outputs_of

from moonep_jax import _compat, exchange
from moonep_jax.errors import ConfigError, MoonEPError, SetupError
from moonep_jax.exchange import Exchange, namespace
from moonep_jax.stores import DistributedStore, InProcessStore, KeyValueStore, open_store


def run_all(
    participants: tuple[int, ...],
    body: Callable[[Exchange], Any],
    *,
    store: KeyValueStore | None = None,
    timeout_s: float = 20.0,
    absent: tuple[int, ...] = (),
) -> dict[int, Any]:
    """Runs body as every participant in its own thread: results, or the exception each raised."""
    shared = InProcessStore() if store is None else store

    def run(p: int) -> Any:
        return body(Exchange(shared, "moonep/test/0", p, participants, timeout_s, lambda q: f"process {q} (rank {q})"))

    return in_threads([p for p in participants if p not in absent], run)


def same_text(results: dict[int, Any]) -> str:
    texts = {str(r) for r in results.values()}
    assert all(isinstance(r, SetupError) for r in results.values()), results
    assert len(texts) == 1, texts
    return texts.pop()


# -- in-process store --------------------------------------------------------------------------------------------------


def test_in_process_store() -> None:
    store = InProcessStore()
    assert store.set("a/1", b"x\0y") and not store.set("a/1", b"z")
    assert store.get("a/1", 0) == store.try_get("a/1") == b"x\0y"
    assert store.try_get("a/2") is None
    with pytest.raises(TimeoutError):
        store.get("a/2", 0.01)
    store.set("a", b"")
    store.set("ab", b"kept")
    store.delete("a")
    store.delete("nothing")
    assert store.keys() == ["ab"]
    store.barrier("alone", [0], 1)
    with pytest.raises(TimeoutError):
        store.barrier("pair", [0, 1], 0.01)
    with pytest.raises(TimeoutError):
        store.barrier("pair", [0, 1], 10)  # broken once, broken for all: no wait


def test_open_store() -> None:
    assert isinstance(open_store((3,)), InProcessStore)
    with pytest.raises(SetupError, match=r"jax.distributed has no client.*call jax.distributed.initialize"):
        open_store((0, 1))


def test_namespaces_never_repeat() -> None:
    a, b, other = namespace((5, 6)), namespace((5, 6)), namespace((5, 67))
    assert a.startswith("moonep/") and a.endswith("/0") and b.endswith("/1")
    assert a.rpartition("/")[0] == b.rpartition("/")[0] != other.rpartition("/")[0]


# -- all_gather --------------------------------------------------------------------------------------------------------


def test_all_gather() -> None:
    def body(ex: Exchange) -> Any:
        first = ex.all_gather("one", bytes([ex.participant]))
        again = ex.all_gather("one", b"\0" * ex.participant)
        ex.barrier("all")
        return first, again

    results = run_all((2, 5, 9), body)
    expected = ({p: bytes([p]) for p in (2, 5, 9)}, {p: b"\0" * p for p in (2, 5, 9)})
    assert results == dict.fromkeys((2, 5, 9), expected)


def test_many_participants_and_large_payloads() -> None:
    results = run_all(tuple(range(72)), lambda ex: len(b"".join(ex.all_gather("x", b"p" * 10_000).values())))
    assert set(results.values()) == {720_000}


def test_all_missing_participants_are_named_alike() -> None:
    began = time.monotonic()
    results = run_all(tuple(range(6)), lambda ex: ex.all_gather("s", b""), timeout_s=0.4, absent=(2, 4))
    text = same_text(results)
    assert "step 's' timed out; got no word from process 2 (rank 2), process 4 (rank 4)" in text
    assert "MOONEP_SETUP_TIMEOUT_S" in text and time.monotonic() - began < 5


def test_late_participant_raises_the_same_error_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_SLICE_S", 0.05)
    late_s: list[float] = []

    def body(ex: Exchange) -> Any:
        if ex.participant == 1:
            ex.timeout_s = 30.0
            time.sleep(0.8)
            began = time.monotonic()
        ex.all_gather("first", b"")
        try:
            ex.all_gather("second", b"")
        finally:
            if ex.participant == 1:
                late_s.append(time.monotonic() - began)  # pyright: ignore[reportPossiblyUnboundVariable]

    text = same_text(run_all((0, 1), body, timeout_s=0.3))
    assert "step 'first' timed out; got no word from process 1" in text
    assert late_s[0] < 5


@pytest.mark.parametrize(
    ("forge", "text"),
    [
        (lambda r: r[:10], "10 bytes, shorter than the header"),
        (lambda r: b"X" + r[1:], "magic b'XOONEPEX'"),
        (lambda r: r[:8] + b"\x07" + r[9:], "version 7 instead of 1"),
        (lambda r: r.replace(b"step", b"stop"), "step 'stop' instead of 'step'"),
        (lambda r: r[:12] + b"\x05" + r[13:], "sender 5 instead of 1"),
        (lambda r: r + b"!", "8 payload bytes instead of 7"),
    ],
)
def test_malformed_record(forge: Callable[[bytes], bytes], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_SLICE_S", 0.05)

    class Forger(InProcessStore):
        def set(self, key: str, value: bytes) -> bool:
            return super().set(key, forge(value) if key.endswith("/0/1") else value)

    got = same_text(run_all((0, 1, 2), lambda ex: ex.all_gather("step", b"payload"), store=Forger()))
    assert "bad record of step 'step' from process 1 (rank 1)" in got and text in got


def test_participants_out_of_step_are_found() -> None:
    results = run_all((0, 1), lambda ex: ex.all_gather(f"step{ex.participant}", b""))
    assert "bad record" in same_text(results)


def test_a_namespace_used_twice_is_found() -> None:
    store = InProcessStore()
    Exchange(store, "moonep/n", 0, (0,), 1).all_gather("x", b"")
    with pytest.raises(SetupError, match="entered twice"):
        Exchange(store, "moonep/n", 0, (0,), 1).all_gather("x", b"")


# -- vote, guarded, compare --------------------------------------------------------------------------------------------


def test_vote_without_errors() -> None:
    assert run_all((0, 1), lambda ex: ex.vote("v", None)) == {0: None, 1: None}
    assert run_all((0, 1), lambda ex: ex.guarded("g", lambda: ex.participant)) == {0: 0, 1: 1}


def test_failure_on_one_is_the_same_error_on_all() -> None:
    def work(p: int) -> int:
        if p == 1:
            raise ValueError("broken thing")
        if p == 3:
            raise ConfigError("config: is bad")
        return p

    results = run_all((0, 1, 2, 3), lambda ex: ex.guarded("import", lambda: work(ex.participant)))
    text = same_text(results)
    assert text.startswith("setup: step 'import' failed on 2 of 4 processes; got [")
    assert "process 1 (rank 1): ValueError: broken thing" in text and "process 3 (rank 3): config: is bad" in text
    assert isinstance(results[1].__cause__, ValueError) and results[0].__cause__ is None


def test_equal_errors_are_stated_once() -> None:
    def fail() -> None:
        raise MoonEPError("no fabric here")

    text = same_text(run_all((0, 1, 2), lambda ex: ex.guarded("kind", fail)))
    assert text.count("no fabric here") == 1 and "process 0 (rank 0), process 1 (rank 1), process 2 (rank 2): " in text


def test_empty_error_text_is_an_error() -> None:
    assert "failed on 1 of 2" in same_text(run_all((0, 1), lambda ex: ex.vote("v", "" if ex.participant else None)))


def test_guarded_lets_interrupts_through() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    ex = Exchange(InProcessStore(), "moonep/i", 0, (0,), 1)
    with pytest.raises(KeyboardInterrupt):
        ex.guarded("g", interrupt)


def test_compare() -> None:
    assert run_all((0, 1), lambda ex: ex.compare("c", {"a": "1"})) == {0: None, 1: None}

    def body(ex: Exchange) -> None:
        fields = {"config.tokens": "8" if ex.participant < 2 else "16", "jax": "1", "mesh": "x"}
        if ex.participant == 0:
            del fields["jax"]
        ex.compare("fingerprint", fields)

    text = same_text(run_all((0, 1, 2), body))
    assert "config.tokens = '8' on process 0 (rank 0), process 1 (rank 1) / '16' on process 2 (rank 2)" in text
    assert "jax = '(no such field)' on process 0" in text and "mesh" not in text.partition(";")[2].partition("]")[0]


# -- finish ------------------------------------------------------------------------------------------------------------


def test_no_key_survives() -> None:
    store = InProcessStore()

    def body(ex: Exchange) -> None:
        try:
            ex.all_gather("a", b"1")
            ex.guarded("b", lambda: 1 // ex.participant)
        finally:
            ex.finish()

    same_text(run_all((0, 1, 2), body, store=store))
    assert store.keys() == []


def test_a_late_participant_raises_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_GRACE_S", 0.2)
    store = InProcessStore()

    def body(ex: Exchange) -> None:
        try:
            ex.all_gather("a", b"1")
        finally:
            ex.finish()

    text = same_text(run_all((0, 1, 2), body, store=store, timeout_s=0.3, absent=(1,)))
    assert store.keys() == ["moonep/test/0/abort"]
    assert same_text(run_all((0, 1, 2), body, store=store, timeout_s=30, absent=(0, 2))) == text
    assert store.keys() == ["moonep/test/0/abort"], "there may be more who are late"


@pytest.mark.parametrize("error", [ValueError("oops"), KeyboardInterrupt()])
def test_leaving_by_an_exception_is_raised_on_all(error: BaseException) -> None:
    store = InProcessStore()

    def body(ex: Exchange) -> None:
        try:
            with ex:
                ex.barrier("a")
                if ex.participant == 1:
                    raise error
                ex.barrier("b")
        except type(error):
            raise SetupError("") from None

    began = time.monotonic()
    results = run_all((0, 1, 2), body, store=store)
    assert str(results.pop(1)) == ""
    assert f"process 1 (rank 1) failed outside of a step; got {type(error).__name__}: " in same_text(results)
    assert store.keys() == [] and time.monotonic() - began < 10


def test_context_manager_without_an_error() -> None:
    store = InProcessStore()
    with Exchange(store, "moonep/c", 0, (0,), 1) as ex:
        ex.barrier("a")
    assert store.keys() == []


def test_keys_of_other_setups_stay() -> None:
    store = InProcessStore()
    one, ten = (Exchange(store, f"moonep/s/{n}", 0, (0,), 1) for n in (1, 10))
    one.barrier("x")
    ten.barrier("x")
    one.finish()
    assert store.keys() == ["moonep/s/10/0/0"]


# -- jax.distributed ---------------------------------------------------------------------------------------------------


class StoppedClient:
    """As jax.distributed's client while process 0 is stopped: nothing is answered until it goes on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: self.go_on.wait(30) and None


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    client = StoppedClient()
    monkeypatch.setattr(_compat, "distributed_client", lambda: client)
    store = open_store((0, 1), 0.2)
    began = time.monotonic()
    for call in (
        lambda: store.set("k", b""),
        lambda: store.try_get("k"),
        lambda: store.delete("k"),
        lambda: store.barrier("b", (0, 1), 0.2),
    ):
        with pytest.raises(SetupError, match=r"setup: process 0, which keeps the store .* does not answer in") as error:
            call()
        assert "got no word in 0.2 s, expected an answer" in str(error.value)
    assert time.monotonic() - began < 10
    client.go_on.set()
    for _ in range(100):  # the call that was left behind ends now
        with contextlib.suppress(SetupError):
            assert store.set("k", b"")
            break
        time.sleep(0.1)
    else:
        pytest.fail("the store is not used again")


def test_leaving_works_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    client = StoppedClient()
    monkeypatch.setattr(_compat, "distributed_client", lambda: client)
    with Exchange(open_store((0, 1), 0.2), "moonep/left", 1, (0, 1), 0.2) as ex:
        ex.leave("close")
    client.go_on.set()


def test_store_errors_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    class Broken:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> None:
                raise jax.errors.JaxRuntimeError("UNAVAILABLE: the service is gone\nmore")

            return call

    monkeypatch.setattr(_compat, "distributed_client", Broken)
    store = DistributedStore()
    calls: list[Callable[[], Any]] = [
        lambda: store.set("k", b""),
        lambda: store.get("k", 1),
        lambda: store.try_get("k"),
        lambda: store.barrier("k", [0], 1),
        lambda: store.delete("k"),
    ]
    for call in calls:
        with pytest.raises(SetupError, match=r"store of jax.distributed failed .* of k; got UNAVAILABLE: the service"):
            call()
    Exchange(store, "moonep/gone", 0, (0, 1), 1).finish()  # best effort, no error


WORKER = """
import sys, jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from moonep_jax.errors import SetupError
from moonep_jax.exchange import Exchange, namespace
from moonep_jax.stores import open_store
me = int(sys.argv[2])
store = open_store((0, 1))
if me == 0:
    assert store.set("t/k", b"a\\0b") and not store.set("t/k", b"c")
    assert store.try_get("t/k") == b"a\\0b" and store.try_get("t/none") is None
    store.set("tt/k", b"")
    store.delete("t")
    assert store.try_get("t/k") is None and store.try_get("tt/k") == b""
    try:
        store.get("t/none", 0.05)
        raise SystemExit("no timeout")
    except TimeoutError:
        pass
spaces = []
for fail in (False, True):
    ex = Exchange(store, namespace((0, 1)), me, (0, 1), 30.0)
    spaces.append(ex.namespace)
    assert ex.all_gather("g", b"x" * me * 3_000_000) == {0: b"", 1: b"x" * 3_000_000}
    ex.compare("c", {"a": "b"})
    try:
        ex.guarded("work", lambda: 1 // (0 if fail and me else 1))
        assert not fail
    except SetupError as error:
        print("ERROR", error, flush=True)
    ex.finish()
    store.barrier("check/" + ex.namespace, (0, 1), 30)
    assert all(store.try_get(f"{ex.namespace}/{n}/{p}") is None for n in range(4) for p in (0, 1))
assert spaces[0] != spaces[1]
ex = Exchange(store, namespace((0, 1)), me, (0, 1), 0.5)
if me == 0:
    try:
        ex.barrier("lonely")
    except SetupError as error:
        assert "no word from process 1" in str(error), error
    ex.finish()
store.barrier("end", (0, 1), 60)
print("OK", flush=True)
"""


@pytest.mark.multiprocess
def test_jax_distributed_store_between_two_processes() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-c", WORKER, address]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([*command, str(p)], **pipes) for p in (0, 1)]
    outputs = outputs_of(workers, timeout_s=50)
    assert [w.returncode for w in workers] == [0, 0], outputs
    lines = [out.splitlines() for out, _ in outputs]
    assert lines[0] == lines[1] and lines[0][-1] == "OK", outputs
    assert "process 1: ZeroDivisionError" in lines[0][0]
