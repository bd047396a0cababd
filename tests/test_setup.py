"""setup and close across processes: failures are the same error everywhere, and all that was taken is given back."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Run, launch, one_fast

pytestmark = pytest.mark.multiprocess

SEVERAL = {"4x1": (4, 1), "2x2": (2, 2)}


@pytest.fixture(scope="module", params=one_fast(SEVERAL, "2x2"))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return launch("setups:failures", *SEVERAL[request.param], tmp_path_factory.mktemp(request.param))


def _same_setup_error(records: list[Any]) -> str:
    """The text that every process raised."""
    assert all(r is not None and r["type"] == "SetupError" for r in records), records
    texts = {r["text"] for r in records}
    assert len(texts) == 1, texts
    return texts.pop()


def _who(run: Run, index: int) -> str:
    return f"process {index} (rank {index} of" if len(run.processes) == 4 else f"process {index} (ranks {2 * index},"


def test_config_mismatch_names_field_ranks_and_values(run: Run) -> None:
    text = _same_setup_error(run.of("mismatch"))
    last = len(run.processes) - 1
    before, _, after = text.partition(" / ")
    assert "config.tokens = '4' on " in before and all(_who(run, i) in before for i in range(last))
    assert after.startswith(f"'5' on {_who(run, last)}") and "config.hidden" not in text


def test_mesh_mismatch_names_both_orders(run: Run) -> None:
    # Each process describes ranks as its own mesh has them, so the texts agree in the values only.
    for record in run.of("other_mesh"):
        assert record["type"] == "SetupError" and "mesh.group_0 (device@process by rank) = '0@0 " in record["text"]
        assert "0@0' on " in record["text"] and "give every process the same config, mesh" in record["text"]


def test_experts_not_divisible(run: Run) -> None:
    text = _same_setup_error(run.of("indivisible"))
    assert "9 experts on 4 ranks" in text and f"failed on {len(run.processes)} of" in text


@pytest.mark.parametrize(("case", "culprits"), [("fabric", None), ("fabric_on_one", 1)])
def test_forced_fabric(run: Run, case: str, culprits: int | None) -> None:
    text = _same_setup_error(run.of(case))
    count = len(run.processes)
    assert f"failed on {culprits or count} of {count} processes" in text
    assert "fabric handles are forced" in text and "MOONEP_MEM_HANDLE_TYPE" in text


def test_failures_leave_nothing_half_done(run: Run) -> None:
    assert all(run.of("works after failures"))
    assert run.of("keys") == [0] * len(run.processes)


def test_overlapping_domains_in_any_order(run: Run) -> None:
    for record in run.of("halves"):
        assert record["right"] == [True, True] and len(set(record["ids"])) == 2
    assert len({record["ids"][1] for record in run.of("halves")}) == 1


def test_domains_closed_in_any_order(run: Run) -> None:
    records = run.of("orders")
    assert all(r["right"] == [True] * 3 and r["closed"] for r in records)
    assert len({tuple(r["ids"]) for r in records}) == 1 and len(set(records[0]["ids"])) == 3


def test_setups_out_of_order_are_an_error(run: Run) -> None:
    for first, second in run.of("other_setup_order"):
        for error in (first, second):
            assert error["type"] == "SetupError" and "mesh.axes = " in error["text"]


def test_exception_in_the_body_closes(run: Run) -> None:
    for record in run.of("exception"):
        assert record["error"]["type"] == "ValueError" and record["error"]["seconds"] < 60
        assert record["check"]["type"] == "DomainError" and "closed" in record["check"]["text"]
        assert record["stop"] is None, "close() again does nothing"


def test_absent_process_is_named(run: Run) -> None:
    *others, last = run.of("absent")
    text = _same_setup_error(others)
    assert f"no word from process {len(others)}, expected all {len(others) + 1} processes within 3 s" in text
    assert last is None and all(r["seconds"] < 60 for r in others)


def test_processes_end_well(run: Run) -> None:
    run.ended_well()


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (2, 2)])
def test_cycles_leave_no_trace(processes: int, devices: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = launch("setups:cycles", processes, devices, tmp_path_factory.mktemp("cycles"))
    run.ended_well()
    for cycle in range(0, 50, 10):
        assert all(run.of(f"works in cycle {cycle}"))
    for counts in run.of("traces"):
        assert all(c["moonep maps"] == 0 and c["keys"] == 0 and c["python threads"] == 1 for c in counts), counts
        # What one of the 40 cycles after the first ten leaves, all of them do: 40 descriptors, 40 chunks of 100 KiB or
        # more per rank. JAX itself may map a little more memory now and then, or start a thread late, with its stack.
        for name, slack in {"fds": 0, "threads": 1, "maps": 8, "KiB": 8192 + 8200}.items():
            grown = counts[-1][name] - counts[0][name]
            assert grown <= slack, f"{name} grew by {grown}: {counts}"


@pytest.mark.parametrize(("processes", "devices"), [(1, 16), pytest.param(4, 4, marks=pytest.mark.slow)])
def test_few_open_files(processes: int, devices: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = launch("setups:few_files", processes, devices, tmp_path_factory.mktemp("files"), files=64)
    run.ended_well()
    assert all(run.of("works"))
    for files in run.of("files"):
        assert files["during"] <= files["before"] and files["after"] <= files["before"], files


@pytest.mark.parametrize(("processes", "devices"), [(1, 2), (2, 1)])
def test_exit_without_close(processes: int, devices: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = launch("setups:no_close", processes, devices, tmp_path_factory.mktemp("no_close"))
    run.ended_well()
    assert all(run.of("works"))


def test_sys_exit_inside_the_context(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It closes the domain with the others, and its exit code is what JAX makes of it."""
    run = launch("setups:exit_on_one", 2, 1, tmp_path_factory.mktemp("exit"), timeout_s=120)
    assert all(run.of("works")) and all(s < 60 for s in run.of("seconds"))
    codes = [p.returncode for p in run.processes]
    assert codes == [0, 3], f"{codes}\n{run.tails()}"


@pytest.mark.slow
def test_process_that_never_closes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A process that is gone before close(): the others say who, within the limit, and end as usual."""
    run = launch(
        "setups:exit_without_close",
        3,
        1,
        tmp_path_factory.mktemp("gone"),
        env={"MOONEP_SETUP_TIMEOUT_S": "5"},
        recoverable=True,
        timeout_s=120,
    )
    assert all(run.of("works"))
    for process in run.processes[:-1]:
        record = process.results["close"]
        assert record["error"]["type"] == "SetupError" and record["seconds"] < 60
        assert record["error"]["text"].startswith("close: step 'close' timed out; got no word from process 2 (rank 2")
    assert [p.returncode for p in run.processes] == [0, 0, 3], run.tails()
