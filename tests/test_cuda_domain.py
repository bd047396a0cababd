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


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("graphs", GRAPHS)
def test_everything_equals_the_oracle(ranks: int, graphs: str, tmp_path: Path) -> None:
    if graphs != "default" and ranks == 4:
        pytest.skip("two ranks show the same, and four share the GPU for minutes")
    run = launch("gpu:run", ranks, 1, tmp_path, env=ENV | {"XLA_FLAGS": GRAPHS[graphs]}, timeout_s=280,
                 args={"replays": 100 if ranks < 4 else 20})  # fmt: skip
    for case in (
        "rows_float32_dedup",
        "rows_bfloat16_exact",
        "rows_float16_dedup",
        "weights_own",
        "weights_full",
        "replays",
    ):
        assert run.of(case) == [[]] * ranks, case
    for layer in run.of("layer"):
        assert layer["y"] < 1e-5
    for scan in run.of("scan_remat"):
        assert scan["y"] < 1e-4 and scan["finite"] and scan["repeat"], scan
    run.ended_well()


def test_a_rank_that_skips_a_call_is_named(tmp_path: Path) -> None:
    run = launch("gpu:missing", 3, 1, tmp_path, env=ENV, timeout_s=200)
    for process in run.processes[:2]:
        text = process.results["check"]["text"]
        assert "missing ranks [2]" in text and text.startswith("plan:"), text
        assert "missing ranks [2]" in process.results["next"]["text"]
        assert process.results["alive"] == 10.0
    texts = {p.results["check"]["text"].split(" (ticket")[0] for p in run.processes[:2]}
    assert len(texts) == 1
    run.ended_well()


def test_fifty_setups_leave_nothing_behind(tmp_path: Path) -> None:
    run = launch("gpu:cycles", 2, 1, tmp_path, env=ENV, timeout_s=200)
    for (early_fds, early_free), (late_fds, late_free) in run.of("counts"):
        assert late_fds <= early_fds
        assert late_free >= early_free - (4 << 20)
    run.ended_well()
