"""Worker of the fuzzer: the given end-to-end cases over all processes; records for each the steps that were equal."""

from __future__ import annotations

import fuzz_steps
import numpy as np

from workers import Context


def run(c: Context) -> None:
    mesh = c.mesh()
    seed, steps = c.args["seed"], c.args["steps"]
    for number in c.args["cases"]:

        def body(number: int = number) -> int:
            rng = np.random.default_rng([seed, 2, number])
            case = fuzz_steps.draw(rng, c.devices)
            with fuzz_steps.running(case, mesh) as step:
                for index in range(steps):
                    step(np.random.default_rng([seed, 2, number, index]))
            return steps

        c.case(str(number), body)
