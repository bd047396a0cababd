"""The watcher of a domain: a thread that logs the domain's first error once, whoever is or is not calling.

A program that only replays CUDA graphs runs no handler, and one that waits for results in another thread sees nothing
either: the log then is where an error shows first. Looks every PERIOD_S seconds; logs to "moonep_jax", level ERROR.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

_log = logging.getLogger("moonep_jax")

PERIOD_S: Final = 0.5


class Watcher:
    """Looks at `error()`, the text of a domain's first error or None, until there is one or until stop()."""

    def __init__(self, name: str, error: Callable[[], str | None], period_s: float = PERIOD_S) -> None:
        self._name, self._error, self._period_s = name, error, period_s
        self._stopped = threading.Event()
        # A daemon: a program may end without close().
        self._thread = threading.Thread(target=self._watch, name=f"moonep-watch-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Looks a last time and joins the thread. Idempotent. To be called while `error` still has an answer."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            last = self._stopped.wait(self._period_s)
            if (text := self._error()) is not None:
                _log.error("%s is in error: %s", self._name, text)
                return
            if last:
                return
