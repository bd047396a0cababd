"""Seeded fuzzer of the planner and of all ops against the oracle: python -m tests.fuzz --seconds 60.

Three parts share the time: `planner` (batches of routings through the native planner), `steps` (random domains on the
devices of one process, with random delays and poisoned buffers), `processes` (the same over several processes). Every
case is drawn from (seed, part, number) alone, so one that fails is run again by the command that is printed.
"""

from __future__ import annotations

import argparse
import json
import platform
import secrets
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import conftest
import jax
import numpy as np

import moonep_jax

PARTS = ("planner", "steps", "processes", "gpu")  # a case's place here is part of its seed
SHARES = {"planner": 0.35, "steps": 0.45, "processes": 0.2}
MESHES = ((1, 4), (4, 1), (2, 2), (2, 1))  # (processes, devices of each)
BATCH = 4000
SAMPLE = 0.002  # of the routings, compared with the oracle, too


class Failure(Exception):
    """A case that failed: its part and number, and why."""

    def __init__(self, part: str, number: int, text: str) -> None:
        super().__init__(text)
        self.part, self.number = part, number


def planner(seed: int, number: int) -> dict[str, int]:
    """A batch of routings of one shape."""
    import fuzz_plans

    rng = np.random.default_rng([seed, 0, number])
    batch = fuzz_plans.draw(rng, BATCH)
    try:
        return {"batches": 1, **fuzz_plans.check(batch, rng, SAMPLE)}
    except fuzz_plans.PlanError as error:
        about = f"{batch.shape}, padding {batch.padding}, planner {batch.planner}, family {batch.family}"
        raise AssertionError(f"{error}; {about}, ids {batch.ids[error.index].tolist()}") from error


def steps(seed: int, number: int, count: int) -> dict[str, int]:
    """One domain in this process, and `count` steps of its program."""
    import fuzz_steps

    case = fuzz_steps.draw(np.random.default_rng([seed, 1, number]))
    mesh = conftest.make_mesh((case.shape.R,), ("ep",))
    done: Counter[str] = Counter(configurations=1, debug=case.variables["MOONEP_DEBUG"])
    done["delayed"] += int(case.variables["MOONEP_DELAY_US"] > 0)
    index = -1
    try:
        with fuzz_steps.running(case, mesh) as step:
            for index in range(count):
                done[step(np.random.default_rng([seed, 1, number, index]))] += 1
                done["steps"] += 1
    except Exception as error:
        raise AssertionError(f"step {index} of {case}: {error}") from error
    return dict(done)


def processes(seed: int, number: int, count: int) -> dict[str, int]:
    """Three domains in one launch of several processes."""
    from harness import launch

    shape = MESHES[number % len(MESHES)]
    cases = [3 * number + i for i in range(3)]
    with tempfile.TemporaryDirectory() as out:
        args = {"seed": seed, "cases": cases, "steps": count}
        run = launch("fuzzing:run", *shape, Path(out), args=args, timeout_s=300 + count)
        for case in cases:
            for process in run.processes:
                got = process.results.get(str(case))
                if got != count:
                    why = got["raised"] if isinstance(got, dict) else f"no result\n{run.tails()}"
                    raise AssertionError(f"process {process.index} of {shape[0]}x{shape[1]}, case {case}: {why}")
    return {"launches": 1, "configurations": len(cases), "steps": count * len(cases), f"{shape[0]}x{shape[1]}": 1}


def gpu(seed: int, number: int, count: int) -> dict[str, int]:
    """One domain of R ranks on one GPU."""
    import fuzz_gpu

    fuzz_gpu.run_case(np.random.default_rng([seed, 3, number]), count)
    return {"configurations": 1, "steps": count}


def run_part(part: str, case: Callable[[int], dict[str, int]], seconds: float, enough: Callable[[Any], bool],
             first: int = 0, most: int | None = None) -> dict[str, Any]:  # fmt: skip
    """Cases first, first + 1, ... until the time is over and there are enough; counts of what was done."""
    done: Counter[str] = Counter()
    start, number = time.monotonic(), first
    while (most is None or number < first + most) and (time.monotonic() - start < seconds or not enough(done)):
        try:
            done.update(case(number))
        except Exception as error:
            raise Failure(part, number, f"{error}\n{traceback.format_exc()}") from error
        number += 1
    return {**done, "seconds": round(time.monotonic() - start, 1)}


def versions() -> dict[str, str]:
    """What the figures depend on."""
    import jaxlib

    named = {"moonep_jax": moonep_jax, "jax": jax, "jaxlib": jaxlib, "numpy": np}
    return {"python": platform.python_version(), **{name: module.__version__ for name, module in named.items()}}


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts; 0 when nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="time for all parts together")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, printed")
    parser.add_argument("--routings", type=int, default=0, help="run at least so many, however long it takes")
    parser.add_argument("--steps", type=int, default=0, help="run at least so many in this process")
    parser.add_argument("--steps-per-case", type=int, default=60, help="steps of each program (part of a replay)")
    parser.add_argument("--planner-only", action="store_true")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", metavar="PART:NUMBER", help="run this one case again")
    parser.add_argument("--json", type=Path, help="write counts, seed and versions here")
    options = parser.parse_args(arguments)
    seed = secrets.randbits(31) if options.seed is None else options.seed
    per_case = options.steps_per_case
    print(f"seed {seed}", flush=True)
    cases: dict[str, Callable[[int], dict[str, int]]] = {
        "planner": lambda n: planner(seed, n),
        "steps": lambda n: steps(seed, n, per_case),
        "processes": lambda n: processes(seed, n, max(per_case // 3, 1)),
        "gpu": lambda n: gpu(seed, n, min(per_case, 10)),
    }
    enough = {
        "planner": lambda done: done["routings"] >= options.routings,
        "steps": lambda done: done["steps"] >= options.steps,
    }
    if options.case is not None:
        part, _, number = options.case.partition(":")
        plan = {part: (0.0, int(number), 1)}
    elif options.backend == "cuda":
        plan = {"gpu": (options.seconds, 0, None)}
    elif options.planner_only:
        plan = {"planner": (options.seconds, 0, None)}
    else:
        plan = {part: (options.seconds * share, 0, None) for part, share in SHARES.items()}
    report: dict[str, Any] = {"seed": seed, "backend": options.backend, "steps_per_case": per_case}
    report |= {"versions": versions(), "failures": []}
    for part, (seconds, first, most) in plan.items():
        always = (lambda done: False) if most else enough.get(part, lambda done: True)
        try:
            report[part] = run_part(part, cases[part], seconds, always, first, most)
            print(f"{part}: {json.dumps(report[part])}", flush=True)
        except Failure as failure:
            again = f"python -m tests.fuzz --seed {seed} --steps-per-case {per_case} --case {part}:{failure.number}"
            report["failures"].append({"part": part, "number": failure.number, "again": again, "text": str(failure)})
            print(f"{part}: FAILED, case {failure.number}\n{failure}\nseed {seed}; again:\n{again}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
