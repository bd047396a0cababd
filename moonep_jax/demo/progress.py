"""The demo's progress: a bar on a terminal (tqdm's where it is installed), else a few lines. Written to stderr."""

from __future__ import annotations

import shutil
import sys
from types import TracebackType
from typing import Any, Self

_LINES = 5
_WIDTH = 30


class Progress:
    """Context manager; call `step(done, text)` after each of `total` steps."""

    def __init__(self, total: int, quiet: bool):
        self._total = total
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._bar = None if quiet or not self._terminal else _tqdm(total)

    def step(self, done: int, text: str) -> None:
        """Shows that `done` steps are done; `text` says how it goes."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
        elif self._terminal:
            full = _WIDTH * done // self._total
            bar = "#" * full + "." * (_WIDTH - full)
            print(f"\r[{bar}] {done}/{self._total}  {text}", end="", file=sys.stderr, flush=True)
        elif done in (1, self._total) or done % max(1, self._total // _LINES) == 0:
            print(f"step {done:>{len(str(self._total))}}/{self._total}  {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._terminal and not self._quiet:
            print(file=sys.stderr)


def _tqdm(total: int) -> Any:
    try:
        from tqdm import tqdm  # pyright: ignore[reportMissingModuleSource]
    except ImportError:
        return None
    # Sizes from shutil, because tqdm shows nothing on a terminal that does not tell its size.
    size = shutil.get_terminal_size()
    columns = min(size.columns, 100)
    return tqdm(total=total, unit="step", desc="training", file=sys.stderr, ncols=columns, nrows=size.lines)
