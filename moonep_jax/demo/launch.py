"""The demo's command: arguments and processes. The only file of the demo that starts or ends processes.

With `--processes N` this process starts N workers, which meet through jax.distributed on the loopback interface. A
worker that fails ends them all, and workers whose parent is gone end themselves.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, NoReturn

import jax

from moonep_jax.demo import model, run

ABOUT = "train a small mixture-of-experts model on CPU devices, and compare it with dense training"
_TAIL = 30  # lines of a failed worker's stderr that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--steps", type=_whole(1), default=80, metavar="N", help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--skew",
        type=_finite,
        default=0.0,
        metavar="X",
        help="bias of the router towards expert 0; 3 makes it hot (default: 0)",
    )
    parser.add_argument(
        "--seed", type=_whole(0), default=0, metavar="N", help="seed of weights and batches (default: %(default)s)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        choices=[n for n in range(1, model.RANKS + 1) if model.RANKS % n == 0],
        default=1,
        help=f"processes that share the {model.RANKS} ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="write loss curves and rows per rank to a picture"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress, only the report")
    parser.add_argument(
        "--time-limit",
        type=_whole(1),
        default=900,
        metavar="SECONDS",
        help="end the workers of --processes after this time (default: %(default)s)",
    )
    parser.add_argument("--worker", type=_whole(0), help=argparse.SUPPRESS)  # this process's number
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)  # host:port of jax.distributed


def main(args: argparse.Namespace, error: Callable[[str], NoReturn]) -> int:
    """Runs the demo; the exit code. `error` ends the program because of a bad argument."""
    if args.plot is not None:
        # Before the training, which would be lost.
        if args.plot.suffix != ".png":
            error(f"argument --plot: the name must end in .png: {args.plot}")
        if not args.plot.parent.is_dir():
            error(f"argument --plot: no such folder: {args.plot.parent}")
        if importlib.util.find_spec("matplotlib") is None:
            error("argument --plot: needs matplotlib: pip install 'moonep_jax[demo]'")
    if args.worker is not None:
        _work(args)
    if args.processes > 1:
        return _launch(args)
    _use_devices(model.RANKS)
    return run.run(args)


def _use_devices(count: int) -> None:
    # Both before JAX makes its devices, and stronger than JAX_PLATFORMS and XLA_FLAGS.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


# -- a worker ----------------------------------------------------------------------------------------------------------


def _work(args: argparse.Namespace) -> NoReturn:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Native code greets on stdout (Gloo does): only Python's words are meant for the user.
    stdout, silence = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    sys.stdout = os.fdopen(stdout, "w")
    try:
        _use_devices(model.RANKS // args.processes)
        jax.distributed.initialize(args.coordinator, args.processes, args.worker)
        code = run.run(args)
        jax.distributed.shutdown()
        sys.stdout.flush()
    except BaseException as e:
        if not isinstance(e, KeyboardInterrupt):
            traceback.print_exc()
            sys.stderr.flush()
        # At once: a normal exit would wait for workers that wait for this one.
        os._exit(1)
    sys.exit(code)


def _end_with_parent() -> None:
    # The parent holds the other end of stdin and never writes. os.read, because sys.stdin's lock would be in the way
    # of the interpreter's exit.
    os.read(0, 1)
    os._exit(1)


# -- the parent --------------------------------------------------------------------------------------------------------


def _launch(args: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "moonep_jax", "demo", f"--steps={args.steps}", f"--skew={args.skew!r}"]
    command += [f"--seed={args.seed}", f"--processes={args.processes}", f"--coordinator=127.0.0.1:{_free_port()}"]
    command += ["--quiet"] if args.quiet else []
    command += [f"--plot={args.plot}"] if args.plot else []
    deadline = time.monotonic() + args.time_limit
    with ExitStack() as stack:
        workers: list[subprocess.Popen[bytes]] = []
        logs: list[IO[bytes] | None] = []
        for i in range(args.processes):
            # Worker 0 speaks for all, straight to this process's stdout and stderr.
            log = None if i == 0 else stack.enter_context(tempfile.TemporaryFile())
            out = None if i == 0 else subprocess.DEVNULL
            worker = subprocess.Popen([*command, f"--worker={i}"], stdin=subprocess.PIPE, stdout=out, stderr=log)
            stack.callback(_end, worker)
            workers.append(worker)
            logs.append(log)
        while None in (codes := [w.poll() for w in workers]) and not any(codes):
            if time.monotonic() > deadline:
                late = [i for i, code in enumerate(codes) if code is None]
                print(f"demo: processes {late} were not done after {args.time_limit} s", file=sys.stderr)
                return 1
            time.sleep(0.05)
        for i, code in enumerate(codes):
            if code:
                print(f"demo: process {i} {_describe(code)}", file=sys.stderr)
                _show_tail(i, logs[i])
        return 1 if any(codes) else 0


def _end(worker: subprocess.Popen[bytes]) -> None:
    # kill: jax.distributed may keep SIGTERM for itself.
    worker.kill()
    worker.wait()
    assert worker.stdin is not None
    worker.stdin.close()


def _describe(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"


def _show_tail(index: int, log: IO[bytes] | None) -> None:
    if log is None:
        return  # was shown as it came
    log.seek(0)
    for line in log.read().decode(errors="replace").splitlines()[-_TAIL:]:
        print(f"  process {index}: {line}", file=sys.stderr)


def _free_port() -> int:
    # Somebody else may take it before worker 0 does; then worker 0 fails, and says so.
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# -- types of arguments ------------------------------------------------------------------------------------------------


def _whole(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}: {text}")
        return value

    convert.__name__ = "int"  # argparse names it in its message
    return convert


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be finite: {text}")
    return value


_finite.__name__ = "float"
