"""The demo as a user runs it: its table, its comparison with dense training, its exit codes, and its processes."""

import dataclasses
import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from harness import STRICT

from moonep_jax.__main__ import main
from moonep_jax.demo import model, report, text
from moonep_jax.demo.progress import Progress

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
LIMIT = 200  # seconds for one command


def demo(*options: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the command; with `code`, in an interpreter that runs the code first."""
    start = ["-c", f"{code}\nimport sys; from moonep_jax.__main__ import main; sys.exit(main())"] if code else []
    command = [sys.executable, *STRICT, *(start or ["-m", "moonep_jax"]), "demo", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


def rows(output: str) -> dict[str, list[tuple[str, ...]]]:
    """The table's cells after "plain EP" and "here", layer by layer."""
    found = re.findall(r"^ +\d? +(plain EP|here) (.*)$", output, re.MULTILINE)
    return {name: [tuple(cells.split()) for label, cells in found if label == name] for name in ("plain EP", "here")}


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One run in one process, and the plot that it was asked for."""
    plot = tmp_path_factory.mktemp("demo") / "plot.png"
    return demo("--steps=20", "--skew=3", *([f"--plot={plot}"] if HAS_MATPLOTLIB else [])), plot


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_equal_rows_no_drops_and_the_loss_of_dense_training(skewed):
    done, _ = skewed
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout)
    assert len(table["plain EP"]) == len(table["here"]) == model.LAYERS
    total = model.SEQUENCES * model.LENGTH * model.TOPK
    for plain, here in zip(table["plain EP"], table["here"], strict=True):
        plain_rows, here_rows = ([int(cell) for cell in cells[: model.RANKS]] for cells in (plain, here))
        assert sum(plain_rows) == sum(here_rows) == total
        assert max(plain_rows) == plain_rows[0] and float(plain[4]) > 2  # experts 0 and 1 are rank 0's
        assert max(here_rows) - min(here_rows) <= 1 and float(here[4]) == 1
        assert int(here[5]) > 0 and int(here[6]) == 0
    losses = re.search(r"loss (\S+) -> (\S+) nats per character in 20 steps", done.stdout)
    assert losses is not None
    assert float(losses[1]) > 4.5 and float(losses[2]) < 3.2
    assert done.stdout.rstrip().splitlines()[-3 if HAS_MATPLOTLIB else -1] == "PASSED"
    assert "step 20/20" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_plot(skewed):
    done, plot = skewed
    assert f"plot: {plot}" in done.stdout
    content = plot.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.rstrip(b"\0")[-8:-4] == b"IEND"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_do_what_one_does(skewed, processes):
    done = demo("--steps=20", "--skew=3", "--quiet", f"--processes={processes}")
    assert done.returncode == 0, done.stderr
    assert f"in {processes} processes" in done.stdout and "shared as 'fd'" in done.stdout
    assert rows(done.stdout) == rows(skewed[0].stdout)
    assert done.stderr == ""


@pytest.mark.slow
def test_wrong_expert_weights_are_noticed():
    fault = """
import jax.numpy as jnp, moonep_jax
moonep_jax.Domain.prefetch = lambda self, plan, weights: {k: jnp.concatenate([w, w]) for k, w in weights.items()}
"""
    done = demo("--steps=3", "--skew=3", code=fault)
    assert done.returncode == 1, done.stderr
    assert done.stdout.rstrip().endswith("FAILED")


# -- processes that fail -----------------------------------------------------------------------------------------------


def workers(parent: int) -> dict[int, int]:
    """Process ids of a demo's workers, by their number."""
    found = {}
    for pid in map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()):
        if number := re.search(rb"--worker=(\d+)", Path(f"/proc/{pid}/cmdline").read_bytes()):
            found[int(number[1])] = pid
    return found


def wait_until(what) -> None:
    deadline = time.monotonic() + LIMIT / 2
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@contextmanager
def endless(*, training: bool) -> Iterator[tuple[subprocess.Popen[str], dict[int, int]]]:
    """A demo of 2 processes that would run for hours, and its workers: once they are there, or are training."""
    command = [sys.executable, "-m", "moonep_jax", "demo", "--steps=1000000", "--processes=2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as parent:
        found: dict[int, int] = {}
        try:
            assert parent.stderr is not None
            if training:
                assert "step" in parent.stderr.readline()
            wait_until(lambda: set(workers(parent.pid)) == {0, 1})
            found = workers(parent.pid)
            yield parent, found
        finally:
            for pid in found.values():
                if not ended(pid):
                    os.kill(pid, signal.SIGKILL)
            parent.kill()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_dead_worker_ends_the_others():
    with endless(training=False) as (parent, found):
        os.kill(found[0], signal.SIGSTOP)  # it cannot end by itself
        os.kill(found[1], signal.SIGKILL)
        _, errors = parent.communicate(timeout=LIMIT)
        assert parent.returncode == 1
        assert "demo: process 1 ended by SIGKILL" in errors
        assert all(map(ended, found.values()))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_end_with_their_parent():
    with endless(training=True) as (parent, found):
        parent.kill()
        wait_until(lambda: all(map(ended, found.values())))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_workers_error_is_shown():
    # Worker 1 cannot agree with worker 0, which also says so.
    fault = """
import os, subprocess
start = subprocess.Popen.__init__
def patched(self, command, **options):
    timeout = "nonsense" if "--worker=1" in command else "60"
    start(self, command, env={**os.environ, "MOONEP_SETUP_TIMEOUT_S": timeout}, **options)
subprocess.Popen.__init__ = patched
"""
    done = demo("--steps=1", "--processes=2", code=fault)
    assert done.returncode == 1
    assert "demo: process 1 failed with exit code 1" in done.stderr
    assert re.search(r"^  process 1: .*MOONEP_SETUP_TIMEOUT_S.*nonsense", done.stderr, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_time_limit():
    done = demo("--steps=1000000", "--quiet", "--processes=2", "--time-limit=1")
    assert done.returncode == 1
    assert "demo: processes [0, 1] were not done after 1 s" in done.stderr


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--steps=0"], "at least 1"),
        (["--steps=many"], "invalid int value"),
        (["--seed=-1"], "at least 0"),
        (["--skew=nan"], "finite"),
        (["--processes=3"], "invalid choice"),
        (["--processes=8"], "invalid choice"),
        (["--time-limit=0"], "at least 1"),
        (["--plot=plot.gif"], "must end in .png"),
        (["--plot=/no/such/folder/plot.png"], "no such folder"),
        (["--unknown"], "unrecognized arguments"),
    ],
)
def test_bad_arguments(options, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["demo", *options])
    assert says in capsys.readouterr().err


def test_no_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "COMMAND" in capsys.readouterr().err


def test_plot_without_matplotlib_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--plot=plot.png"])
    assert "moonep_jax[demo]" in capsys.readouterr().err


# -- the report --------------------------------------------------------------------------------------------------------


def result(loss: float = 0.0, params: float = 0.0, others: int = 0, dropped: int = 0) -> report.Result:
    """A result of two steps that differs from dense training by this much."""
    ids = np.tile(np.array([[0, 1]], np.int32), (50_000, 1))
    dense_ids = ids[:, ::-1].copy()  # the same experts
    dense_ids[:others, 0] = 7
    fact = model.Facts(ids, np.array([60_000, 40_000]), np.array([50_000, 50_000]), np.array(1), np.array(dropped))
    made = report.Result()
    made.add(4.5, [fact], 4.5, [dense_ids])
    made.add(3.0 + loss, [fact], 3.0, [dense_ids])
    weights = np.array([-2.0, 1.0])
    made.compare_params({"a": weights, "b": weights + np.array([0.0, 2 * params])}, {"a": weights, "b": weights})
    return made


@pytest.mark.parametrize(
    ("fields", "passed"),
    [
        ({}, True),
        ({"loss": 0.9e-4, "params": 0.9e-3}, True),
        ({"loss": 1.1e-4}, False),
        ({"loss": -1.1e-4}, False),
        ({"loss": np.nan}, False),
        ({"params": 1.1e-3}, False),
        ({"params": np.nan}, False),
        ({"dropped": 1}, False),
        ({"others": 10, "loss": 0.9e-3, "params": 0.9e-2}, True),  # in each of two steps: 20 of 200,000
        ({"others": 10, "loss": 1.1e-3}, False),
        ({"others": 11}, False),
    ],
)
def test_verdict(fields, passed):
    made = result(**fields)
    assert made.passed() == passed
    assert report.summary(made).endswith("PASSED" if passed else "FAILED")


def test_summary_names_the_worst_parameter_and_counts_ties():
    shown = report.summary(result(params=5e-4, others=3))
    assert "(b)" in shown and "6 of 200,000 differ" in shown and "10 times wider" in shown


def test_a_result_without_parameters_compared_fails():
    made = dataclasses.replace(result(), params_difference=np.nan)
    assert not made.passed()


# -- parts -------------------------------------------------------------------------------------------------------------


def test_text_is_english_and_batches_repeat():
    data = text.corpus()
    assert len(data) > 300_000 and data.min() == 0 and data.max() < len(text.SYMBOLS)
    assert "The following" in "".join(text.SYMBOLS[i] for i in data)
    first, again, other = (text.batch(data, 4, 16, 7, step) for step in (0, 0, 1))
    assert first.shape == (4, 17)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_the_model_does_not_see_what_it_predicts():
    x = np.random.default_rng(0).normal(size=(2, 12, model.HIDDEN)).astype(np.float32)
    changed = x.copy()
    changed[:, 5:] += 1
    kernel = np.ones((model.REACH, model.HIDDEN), np.float32)
    before, after = model._convolve(jnp.asarray(x), kernel), model._convolve(jnp.asarray(changed), kernel)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (np.asarray(before[:, 5]) != np.asarray(after[:, 5])).all()


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("tqdm", [False, True])
@pytest.mark.parametrize("quiet", [False, True])
def test_progress(monkeypatch, terminal, tqdm, quiet):
    if tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    with Progress(20, quiet) as progress:
        for step in range(20):
            progress.step(step + 1, "loss 1")
    lines = shown.getvalue()
    if quiet:
        assert lines == ""
    else:
        assert "20/20" in lines and lines.endswith("\n")
        assert ("\r" in lines) == terminal
        assert terminal or len(lines.splitlines()) == 6
