"""Which host each process of a setup runs on. Linux only. Imports exchange and records."""

from __future__ import annotations

import dataclasses
import json
import socket
from dataclasses import dataclass
from pathlib import Path

from moonep_jax.exchange import Exchange
from moonep_jax.records import parse_texts


@dataclass(frozen=True)
class HostInfo:
    """A running host: processes share memory by fd exactly when their HostInfo is equal."""

    boot_id: str
    hostname: str

    @staticmethod
    def here() -> HostInfo:
        """This process's host."""
        return HostInfo(_boot_id(), socket.gethostname())

    def __str__(self) -> str:
        return f"{self.hostname} (boot {self.boot_id[:8]})"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def gather_hosts(exchange: Exchange, here: HostInfo | None = None) -> dict[int, HostInfo]:
    """Every process's host, by process index. Collective."""
    info = HostInfo.here() if here is None else here
    sent = json.dumps(dataclasses.asdict(info)).encode()
    return exchange.all_gather("hosts", sent, lambda data: HostInfo(**parse_texts(data)))
