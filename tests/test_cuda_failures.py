"""What the CUDA kernels do when ranks do not make the same calls: who is named, what is poisoned, and that none hangs.

R ranks on one GPU, through the launchers, without JAX.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import gpu_kit
import numpy as np
import pytest
from cases import Shape, routing
from gpu_kit import BACK, KINDS, ROUTE, Buffer, Call, by_rank
from gpu_runs import BF16, Plan, Run

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not gpu_kit.available(), reason="needs a GPU, the CUDA module and cuda-python"),
]

R, S, K, E, H = 3, 8, 2, 6, 16
LEAF = (8, 8)  # 128 bytes of an expert, in two rounds of 64
TICKETS = {"dispatch": 5, "combine_grad": 5, "combine": 4, "dispatch_grad": 4, "prefetch": 1, "reduce_grad": 1}


class World:
    """Three ranks that have made a plan together, and operands for every op. Results hold no poison before the call."""

    def __init__(self, timeout_s: float, **options: bool) -> None:
        self.run = Run(Shape(R, S, K, E, H), stage_bytes=64 * E // R, timeout_s=timeout_s, **options)
        self.group = self.run.group
        self._ids = self.run.put(routing("uniform", self.run.shape))
        self._plan: Plan = self.run.blank_plan()
        self.run.call("plan", [self._ids], list(self._plan.values()))
        self.group.sync()

    def call(self, kind: str, site: int = 1000, ticket: int | None = None) -> dict[int, Call]:
        """A call by each rank, with results of its own."""
        ones = lambda *dims, dtype=BF16: self.run.put(np.ones((R, *dims), dtype))  # noqa: E731
        blank = lambda *dims, dtype=BF16: self.run.blank(dims, dtype, fill=0)  # noqa: E731
        n, epn, f32 = self.run.rows, E // R, np.float32
        route, back = ([self._plan[name] for name in names] for names in (ROUTE, BACK))
        slots = [self._plan["slot_expert"], self._plan["ticket"]]
        args, rets = {
            "plan": lambda: ([self._ids], list(self.run.blank_plan(fill=7).values())),
            "dispatch": lambda: ([*route, ones(S, H), ones(S, K, dtype=f32)], [blank(n, H), blank(n, dtype=f32)]),
            "combine": lambda: ([*back, ones(n, H), ones(n, dtype=f32)], [blank(S, H)]),
            "dispatch_grad": lambda: ([*back, ones(n, H), ones(n, dtype=f32)], [blank(S, H), blank(S, K, dtype=f32)]),
            "combine_grad": lambda: ([*route, ones(S, H)], [blank(n, H)]),
            "prefetch": lambda: ([*slots, ones(epn, *LEAF)], [blank(2 * epn, *LEAF)]),
            "reduce_grad": lambda: ([*slots, ones(2 * epn, *LEAF)], [blank(epn, *LEAF)]),
        }[kind]()
        if ticket is not None:
            args[TICKETS[kind]] = self.run.put(np.full((R, 1), ticket, np.int32))
        each = zip(by_rank(args), by_rank(rets), strict=True)
        return {r: Call(kind, a, o, site) for r, (a, o) in enumerate(each)}

    def enqueue(self, calls: dict[int, Call], *who: int) -> None:
        self.group.enqueue({r: calls[r] for r in who})


@pytest.fixture
def slow() -> Iterator[World]:
    """Ranks that wait for seconds: no limit passes in these tests."""
    world = World(timeout_s=20.0)
    with world.run:
        yield world


@pytest.fixture
def quick() -> Iterator[World]:
    """Ranks that wait for 0.3 s."""
    world = World(timeout_s=0.3)
    with world.run:
        yield world


def poisoned(call: Call) -> None:
    """Floats are NaN; a plan has no rows, and a ticket that every op refuses."""
    if call.kind != "plan":
        for buffer in call.rets:
            assert np.isnan(buffer.read().astype(np.float32)).all(), call.kind
        return
    plan: dict[str, Buffer] = dict(zip(gpu_kit.PLAN_ARRAYS, call.rets, strict=True))
    for name, buffer in plan.items():
        none = 0 if name in ("group_sizes", "group_rows", "home_rows", "rank_rows") else -1
        assert (buffer.read() == none).all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_does_not_call_is_named(kind: str, quick: World) -> None:
    calls = quick.call(kind)
    quick.enqueue(calls, 0, 1)
    first = quick.group.errors()
    assert all(text.startswith(f"{kind}: missing ranks [2] after 0.3 s") for text in first[:2]), first
    assert first[2] == ""
    for r in (0, 1):
        poisoned(calls[r])

    for later_kind in ("plan", "dispatch", kind):  # at once, and with the first error
        later = quick.call(later_kind, site=1001)
        start = time.monotonic()
        quick.enqueue(later, 0, 1)
        assert quick.group.errors() == first
        assert time.monotonic() - start < 1.0
        for r in (0, 1):
            poisoned(later[r])

    quick.enqueue(calls, 2)  # too late: it takes over what the others have
    late = quick.group.errors()
    assert late[:2] == first[:2] and late[2].startswith(f"{kind}: missing ranks [2]"), late
    poisoned(calls[2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["leave", "fail"])
def test_a_rank_that_leaves_is_not_waited_for(kind: str, way: str, slow: World) -> None:
    calls = slow.call(kind)
    slow.enqueue(calls, 0, 1)
    time.sleep(0.05)  # they wait for it
    start = time.monotonic()
    if way == "leave":
        slow.group.ranks[2].leave()
    else:
        slow.group.ranks[2].fail("dispatch: wrong on purpose")
    texts = slow.group.errors()
    assert time.monotonic() - start < 2.0  # of a limit of 20 s
    what = {"leave": "has closed the domain", "fail": "has found an error outside of the calls"}[way]
    for text in texts[:2]:
        assert text.startswith(f"{kind}: missing ranks [2]: rank 2 {what}"), texts
    assert texts[2] == "dispatch: wrong on purpose" or way == "leave"
    late = slow.call("plan", site=1001)
    slow.enqueue(late, 2)  # a call of its own ends at once
    assert slow.group.errors() == texts
    for call in (calls[0], calls[1], late[2]):
        poisoned(call)


def test_a_rank_with_an_error_leaves_it_as_it_is(quick: World) -> None:
    quick.enqueue(quick.call("dispatch"), 0, 1)
    first = quick.group.errors()
    quick.group.ranks[0].leave()
    quick.group.ranks[1].fail("dispatch: wrong on purpose")
    assert quick.group.errors() == first


@pytest.mark.parametrize("kind", ["dispatch", "combine"])
def test_a_rank_that_stops_within_a_call_is_named_by_the_next(kind: str, quick: World) -> None:
    calls = quick.call(kind)
    # Rank 2 sends, but never says that it has copied out what it got.
    quick.group.enqueue({2: calls[2]}, phases=("begin", "send"))
    quick.enqueue(calls, 0, 1)
    assert quick.group.errors() == ["", "", ""]
    calls = quick.call(kind, site=1001)
    quick.enqueue(calls, 0, 1)
    texts = quick.group.errors()
    assert all(text.startswith(f"{kind}: missing ranks [2]") for text in texts[:2]), texts
    for r in (0, 1):
        poisoned(calls[r])


@pytest.mark.parametrize(
    ("kind", "other", "site", "ticket"),
    [
        ("plan", "plan", 1001, None),
        ("dispatch", "dispatch", 1001, None),
        ("dispatch", "dispatch", 1000, 77),
        ("dispatch", "combine_grad", 1000, None),
        ("combine", "combine", 1000, 77),
        ("combine", "dispatch_grad", 1000, None),
        ("prefetch", "prefetch", 1001, None),
        ("prefetch", "reduce_grad", 1000, None),
    ],
)
def test_another_call_on_one_rank_is_an_error(
    kind: str, other: str, site: int, ticket: int | None, slow: World
) -> None:
    calls = slow.call(kind) | {1: slow.call(other, site, ticket)[1]}
    start = time.monotonic()
    slow.enqueue(calls, 0, 1, 2)
    texts = slow.group.errors()
    assert time.monotonic() - start < 10.0  # nobody waited for the limit
    for text in texts:
        # As seen by an ordinary rank, or by the one that differs: whoever came first.
        ordinary = text.startswith(f"{kind}: ") and "from ranks [1] of" in text
        differs = text.startswith(f"{other}: ") and "from ranks [0, 2] of" in text and "seen by rank 1" in text
        assert "ranks made different calls at the same time" in text and (ordinary or differs), texts
    for call in calls.values():
        poisoned(call)


@pytest.mark.parametrize("kind", TICKETS)
@pytest.mark.parametrize("who", [(1,), (0, 1, 2)])
def test_a_poisoned_plan_is_an_error_on_all_ranks(kind: str, who: tuple[int, ...], slow: World) -> None:
    bad = slow.call(kind, ticket=-1)
    calls = slow.call(kind) | {r: bad[r] for r in who}
    start = time.monotonic()
    slow.enqueue(calls, 0, 1, 2)
    texts = slow.group.errors()
    assert time.monotonic() - start < 10.0  # nobody waited for the limit
    for r, text in enumerate(texts):  # with several, each may be the first
        sees = [f"{kind}: the plan is poisoned; got ticket -1 on rank {w}, expected" for w in who]
        assert any(text.startswith(s) for s in sees), (r, texts)
    for call in calls.values():
        poisoned(call)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("value", [2**31 - 1, 2**30, 100, 1, 0, -2, -(2**31)])
@pytest.mark.parametrize("kind", TICKETS)
def test_sanitizer_plans_of_any_integers(kind: str, value: int, whole: bool) -> None:
    """Indices are checked before they become addresses: with wrong ones a call ends, touches nothing beside its buffers
    (which memcheck sees), and leaves the domain as it was."""
    world = World(timeout_s=60.0, whole=whole)
    with world.run as run:
        calls = world.call(kind)
        arrays = slice(0, TICKETS[kind])  # all before the ticket
        for call in calls.values():
            call.args[arrays] = [run.put(np.full((1, *a.shape), value, np.int32))[0] for a in call.args[arrays]]
        world.enqueue(calls, 0, 1, 2)
        assert world.group.errors() == ["", "", ""]
        run.check("uniform", 1)


@pytest.mark.parametrize("kind", ["plan", "dispatch", "combine", "prefetch"])
def test_two_calls_in_flight_on_one_device_are_an_error(kind: str, slow: World) -> None:
    slow.group.enqueue({0: slow.call(kind)[0]}, phases=("begin", "send"))
    second = slow.call(kind, site=1001)
    slow.enqueue(second, 0)
    text = slow.group.errors()[0]
    assert text.startswith(f"{kind}: two calls of one kind are in flight on one device") and "seen by rank 0" in text
    slow.enqueue(second, 1, 2)  # they hear of it
    assert slow.group.errors() == [text] * 3
    for call in second.values():
        poisoned(call)
