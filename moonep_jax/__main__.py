"""The command line: `python -m moonep_jax COMMAND`. Each command is a module with `add_arguments` and `main`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from moonep_jax.demo import launch as demo
from moonep_jax.doctor import command as doctor
from moonep_jax.version import __version__

COMMANDS = {"demo": demo, "doctor": doctor}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit code: 0 success, 1 failure, 130 interrupted; bad arguments raise SystemExit(2)."""
    parser = argparse.ArgumentParser(prog="python -m moonep_jax", description="Tools of the moonep_jax library.")
    parser.add_argument("--version", action="version", version=f"moonep_jax {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers = {}
    for name, module in COMMANDS.items():
        about = module.ABOUT
        parsers[name] = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        module.add_arguments(parsers[name])
    args = parser.parse_args(argv)
    try:
        return COMMANDS[args.command].main(args, parsers[args.command].error)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
