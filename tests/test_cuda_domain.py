"""The whole library on one GPU: R processes with a rank each (fd handles, jax.distributed), against the oracle."""

from __future__ import annotations

from pathlib import Path

import gpu_kit
import pytest
from harness import launch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not gpu_kit.available(), reason="needs a GPU, the CUDA module and cuda-python"),
]
ENV = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
# Command buffers as JAX ships them, never, and for every single op.
GRAPHS = {
    "default": "",
    "off": "--xla_gpu_enable_command_buffer=",
    "always": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1",
}


EXACT = ("rows_float32_dedup", "rows_bfloat16_exact", "rows_float16_dedup", "rows_in_rounds", "weights_own",
         "weights_full", "donation", "remat", "replays")  # fmt: skip
# Where only the command buffers differ: one of each op, in all the ways that programs use them.
FEW = ("rows_bfloat16_exact", "rows_in_rounds", "weights_full", "donation", "scan_remat", "replays")


@pytest.mark.parametrize(
    ("ranks", "graphs"), [(1, "default"), (2, "default"), (4, "default"), (2, "off"), (2, "always")]
)
def test_everything_equals_the_oracle(ranks: int, graphs: str, tmp_path: Path) -> None:
    cases = (*EXACT, "layer", "scan_remat") if graphs == "default" else FEW
    run = launch("gpu:run", ranks, 1, tmp_path, env=ENV | {"XLA_FLAGS": GRAPHS[graphs]}, timeout_s=280,
                 args={"cases": cases, "replays": 100 if ranks < 4 else 20})  # fmt: skip
    for case in cases:
        for got in run.of(case):
            if case in EXACT:
                assert got == [], case
            elif case == "layer":
                assert got["y"] < 1e-5
            else:
                assert got["y"] < 1e-4 and got["finite"] and got["repeat"], got
    run.ended_well()


def test_a_rank_that_leaves_is_named_by_every_op(tmp_path: Path) -> None:
    run = launch("gpu:missing", 3, 1, tmp_path, env=ENV, timeout_s=240)
    for kind in ("plan", "dispatch", "combine", "prefetch", "dispatch_grad", "combine_grad", "reduce_grad"):
        results = run.of(kind)
        for got in results[:2]:
            text = got["check"]["text"]
            assert text.startswith(f"{kind}: missing ranks [2]"), text
            assert got["stats"]["text"] == text
            assert text in got["later"]["text"], (text, got["later"])
            assert got["poisoned"] and got["alive"] == 10.0, (kind, got)
        assert len({got["check"]["text"].split(" (ticket")[0] for got in results[:2]}) == 1, results
        assert all(got["closed"] < 15 for got in results), results
    for closed in run.of("close")[:2]:
        assert closed is not None and closed["text"].startswith(
            "plan: missing ranks [2] after 1.5 s; got ranks [0, 1] of"
        )
    run.ended_well()


def test_setups_leave_nothing_behind(tmp_path: Path) -> None:
    """200 that succeed, and 200 in each of which a call of one process's driver fails, each call in turn."""
    run = launch("leaks:gpu_cycles", 2, 1, tmp_path, env=ENV, timeout_s=280, args={"clean": 200, "failing": 200})
    for case in ("clean", "failing"):
        for (early_fds, early_free), (late_fds, late_free) in run.of(case):
            assert late_fds <= early_fds, case
            assert late_free >= early_free - (4 << 20), case
    first, second = run.of("texts")
    assert first == second and len(first) == 200
    # A descriptor that does not open is fetched another way.
    failed = [text for text in first if text != "nothing after import_fd"]
    assert len(failed) >= 180
    odd = [text for text in failed if not (text.startswith("SetupError: ") and "injected" in text.lower())]
    assert odd == []
    assert all(run.of("works"))
    run.ended_well()
