"""The fuzzer: a few seconds of it with a fixed and with a random seed, exact replay, and planted bugs that it finds."""

from __future__ import annotations

import re
import secrets
from typing import Any

import fuzz
import fuzz_plans
import fuzz_steps
import gpu_kit
import numpy as np
import pytest
from harness import one_fast

from moonep_jax import reference as ref

FIXED = 1  # its first cases compile fast
RANDOM = secrets.randbits(31)  # pytest shows it where a test fails; the fuzzer prints it, too


@pytest.mark.parametrize("seed", [FIXED, RANDOM], ids=["fixed", "random"])
def test_planner(seed: int, capsys: Any) -> None:
    assert fuzz.main(["--seconds", "3", "--seed", str(seed), "--planner-only"]) == 0, capsys.readouterr().out
    assert f"seed {seed}" in capsys.readouterr().out


@pytest.mark.parametrize("seed", one_fast([FIXED, RANDOM], FIXED), ids=["fixed", "random"])
def test_steps(seed: int) -> None:
    done = fuzz.run_part("steps", lambda n: fuzz.steps(seed, n, 15), 3.0, lambda done: done["steps"] >= 15)
    assert done["steps"] % 15 == 0


@pytest.mark.multiprocess
def test_processes() -> None:
    """Three random domains over 2x2 processes and devices."""
    assert fuzz.processes(FIXED, 2, 5)["steps"] == 15


@pytest.mark.cuda
@pytest.mark.skipif(not gpu_kit.available(), reason="needs a GPU and the CUDA module")
def test_gpu(capsys: Any) -> None:
    assert fuzz.main(["--backend", "cuda", "--seconds", "20"]) == 0, capsys.readouterr().out


def test_a_seed_gives_the_same_cases() -> None:
    for number in range(5):
        first, second = (fuzz_plans.draw(np.random.default_rng([FIXED, 0, number]), 100) for _ in range(2))
        assert first.shape == second.shape and np.array_equal(first.ids, second.ids)
        assert len({str(fuzz_steps.draw(np.random.default_rng([FIXED, 1, number]))) for _ in range(2)}) == 1
    cases = [fuzz_steps.draw(np.random.default_rng([FIXED, 1, n])) for n in range(60)]
    assert {c.shape.R for c in cases} == set(fuzz_steps.RANKS)
    assert {c.config.combine for c in cases} == {"dedup", "exact"} and {c.config.planner for c in cases} == {
        "exact",
        "home",
    }
    assert len({c.config.dtype for c in cases}) == 3
    assert {v for c in cases for v in c.full.values()} == {True, False}
    assert {c.variables["MOONEP_DEBUG"] for c in cases} == {0, 1}


def test_the_batches_meet_all_plans() -> None:
    kinds = {"moved": 0, "cascade": 0, "routings": 0}
    for number in range(40):
        rng = np.random.default_rng([FIXED, 0, number])
        counts = fuzz_plans.check(fuzz_plans.draw(rng, 100), rng, 0.0)
        kinds = {name: kinds[name] + counts[name] for name in kinds}
    assert kinds["cascade"] > 5 and 0 < kinds["moved"] - kinds["cascade"] < kinds["routings"]


@pytest.mark.parametrize("name", [*fuzz_plans.PER_RANK, *fuzz_plans.ALIKE])
def test_every_changed_entry_of_a_plan_is_found(name: str) -> None:
    """30 random routings; in each, one entry of one array is changed by one, or to another entry's value."""
    for number in range(30):
        rng = np.random.default_rng([FIXED, 0, number])
        batch = fuzz_plans.draw(rng, 1)
        plans = fuzz_plans.native(batch)
        fuzz_plans.check_batch(batch, plans)
        array = plans[name].reshape(-1)
        at, other = rng.integers(array.size, size=2)
        before = array[at]
        array[at] = array[other] if array[other] != before else before + 1
        with pytest.raises(fuzz_plans.PlanError):
            fuzz_plans.check_batch(batch, plans)


def test_a_planted_bug_of_the_planner_is_found_and_replayed(monkeypatch: Any, capsys: Any) -> None:
    """The native planner swaps two rows of rank 0 in one routing of many; the printed command fails alike."""
    real = fuzz_plans.native_plan

    def broken(ids: Any, *args: Any) -> Any:
        plan = real(ids, *args)
        src = plan["src"][0]
        held = np.flatnonzero(src >= 0)
        if int(ids.sum()) % 997 == 0 and len(held) > 1:
            src[held[[0, 1]]] = src[held[[1, 0]]]
        return plan

    with monkeypatch.context() as patch:
        patch.setattr(fuzz_plans, "native_plan", broken)
        assert fuzz.main(["--seconds", "30", "--seed", str(FIXED), "--planner-only"]) == 1
        again = re.search(r"^python -m tests.fuzz (.*)$", capsys.readouterr().out, re.M)
        assert again is not None
        assert fuzz.main(again[1].split()) == 1
        assert "src inverts the places" in capsys.readouterr().out
    assert fuzz.main(again[1].split()) == 0


def test_a_planted_bug_of_an_op_is_found_and_replayed(monkeypatch: Any, capsys: Any) -> None:
    """The oracle rounds one element of combine otherwise: as good as an op that does."""
    real = ref.combine

    def broken(p: Any, out: Any, weights: Any = None, mode: str = "dedup") -> Any:
        y = real(p, out, weights, mode)
        y.view(np.uint8).reshape(-1)[0] ^= 1
        return y

    command = ["--seed", str(FIXED), "--steps-per-case", "2", "--case", "steps:1"]
    with monkeypatch.context() as patch:
        patch.setattr(ref, "combine", broken)
        assert fuzz.main(command) == 1
        assert "elements differ" in (out := capsys.readouterr().out)
        assert f"python -m tests.fuzz {' '.join(command)}" in out
    assert fuzz.main(command) == 0


def test_the_report(tmp_path: Any) -> None:
    import json

    path = tmp_path / "report.json"
    assert fuzz.main(["--seed", "1", "--case", "planner:0", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["seed"] == 1 and report["failures"] == [] and report["planner"]["routings"] > 0
    assert set(report["versions"]) == {"python", "moonep_jax", "jax", "jaxlib", "numpy"}
