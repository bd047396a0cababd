"""The demo's result: what was measured, whether it agrees with dense training, and how it is printed and plotted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from moonep_jax.demo.model import Facts

# float32 sums in another order: over 500 steps the losses were seen to differ by 5e-7, the parameters by 1e-5.
LOSS_TOLERANCE = 1e-4  # nats per character, in any step
PARAMS_TOLERANCE = 1e-3  # of the largest element of the same parameter, after the last step
# A near tie may go either way in the router. One other expert for one token is seen in the loss, so the tolerances are
# wider then; many of them are an error.
TIE_FACTOR = 10
MOST_TIES = 1e-4  # of all choices


@dataclass
class Result:
    """Both trainings, step by step."""

    losses: list[float] = field(default_factory=list)
    dense_losses: list[float] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)  # of the last step, one per layer
    choices: int = 0  # of experts, in all steps and layers
    other_choices: int = 0  # of those, how many dense training did not make
    dropped: int = 0  # routed rows that no rank computed, in all steps and layers
    params_difference: float = np.nan
    params_name: str = ""  # the parameter that differs most
    seconds: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(2))  # expert-parallel, dense

    def add(self, loss: float, facts: list[Facts], dense_loss: float, dense_ids: list[npt.NDArray[Any]]) -> None:
        """Adds a step: what ExpertParallel.step and Dense.step returned."""
        self.losses.append(loss)
        self.dense_losses.append(dense_loss)
        self.facts = facts
        for fact, ids in zip(facts, dense_ids, strict=True):
            # As sets: the order of a token's experts does not matter.
            same = (np.asarray(fact.ids)[:, :, None] == ids[:, None, :]).any(axis=2)
            self.dropped += int(fact.dropped)
            self.choices += same.size
            self.other_choices += int(np.sum(~same))

    def compare_params(self, params: Any, dense_params: Any) -> None:
        """Finds the parameter that differs most, relative to its largest element."""

        def difference(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
            return float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), np.finfo(np.float32).tiny))

        differences = jax.tree.map(difference, params, dense_params)
        named = jax.tree_util.tree_flatten_with_path(differences)[0]
        # NaN is no maximum: it must win here.
        path, worst = max(named, key=lambda item: (np.isnan(item[1]), item[1]))
        self.params_difference, self.params_name = worst, jax.tree_util.keystr(path, simple=True, separator=".")

    @property
    def loss_difference(self) -> float:
        """The largest, over all steps; NaN if there is one."""
        return float(np.max(np.abs(np.array(self.losses) - np.array(self.dense_losses))))

    def tolerances(self) -> tuple[float, float]:
        """For the losses and for the parameters."""
        factor = TIE_FACTOR if self.other_choices else 1
        return factor * LOSS_TOLERANCE, factor * PARAMS_TOLERANCE

    def passed(self) -> bool:
        """Whether both trainings agree within the tolerances, and no row was dropped."""
        loss, params = self.tolerances()
        return (
            self.loss_difference <= loss
            and self.params_difference <= params
            and self.other_choices <= MOST_TIES * self.choices
            and self.dropped == 0
        )


def summary(result: Result) -> str:
    """The text that ends the demo."""
    loss, params = result.tolerances()
    here, dense = result.seconds
    ties = f"{result.other_choices} of {result.choices:,} differ"
    return "\n".join(
        [
            "",
            "rows per rank, last step",
            *_table(result.facts),
            "",
            f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f} nats per character in {len(result.losses)} steps "
            f"({here:.1f} s; densely {dense:.1f} s; both with compilation)",
            "",
            "against the same training done densely on one device",
            f"  loss            {result.loss_difference:.1e}  largest difference of any step; tolerance {loss:.0e}",
            f"  parameters      {result.params_difference:.1e}  of the largest element, after the last step "
            f"({result.params_name}); tolerance {params:.0e}",
            f"  expert choices  {ties}; at most 1 in {1 / MOST_TIES:,.0f} may, at near ties"
            + (f" (tolerances are {TIE_FACTOR} times wider then)" if result.other_choices else ""),
            "",
            "PASSED" if result.passed() else "FAILED",
        ]
    )


def _table(facts: list[Facts]) -> list[str]:
    ranks = len(facts[0].rows)
    head = ["layer", "", *(f"rank {r}" for r in range(ranks)), "max/mean", "redundant experts", "dropped rows"]
    lines = [head]
    for i, fact in enumerate(facts):
        lines.append([str(i), "plain EP", *_cells(fact.plain_rows), "-", "-"])
        lines.append(["", "here", *_cells(fact.rows), str(int(fact.redundant)), str(int(fact.dropped))])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    left = 2  # columns of text; the others are numbers
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def _cells(rows: Any) -> list[str]:
    rows = np.asarray(rows)
    return [*(str(int(n)) for n in rows), f"{rows.max() / rows.mean():.2f}"]


def plot(result: Result, path: Path) -> None:
    """Writes loss curves and rows per rank as a PNG."""
    # Not pyplot: it would look for a display and keep global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = len(result.facts)
    figure = Figure(figsize=(5 + 3 * layers, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, *bars = figure.subplots(1, 1 + layers, width_ratios=[5] + [3] * layers)
    steps = np.arange(1, len(result.losses) + 1)
    loss.plot(steps, result.dense_losses, color="0.6", linewidth=4, label="dense, one device")
    loss.plot(steps, result.losses, color="C0", label="expert-parallel")
    loss.set(title="Training loss", xlabel="step", ylabel="nats per character")
    loss.legend()
    ranks = np.arange(len(result.facts[0].rows))
    top = max(int(np.max(fact.plain_rows)) for fact in result.facts)
    for i, (axes, fact) in enumerate(zip(bars, result.facts, strict=True)):
        axes.bar(ranks - 0.2, fact.plain_rows, 0.4, color="C1", label="plain EP")
        axes.bar(ranks + 0.2, fact.rows, 0.4, color="C0", label="here")
        axes.set(title=f"Rows per rank, layer {i}", xlabel="rank", xticks=ranks, ylim=(0, 1.25 * top))
        axes.legend()
    figure.savefig(path, dpi=120)
