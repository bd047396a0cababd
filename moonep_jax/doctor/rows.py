"""What the doctor finds, as values: one Row per finding, one Report per process. Imports the standard library only."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "info", "warning", "failure"]


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
      name: what was looked at; the names and `data` are stable (see the package's docstring).
      status: "failure" makes the node unusable; "info" says nothing about that.
      value: what was found, for a person.
      fix: what to do about it; never empty for a failure.
      where: what it holds for: "" the process, "device 3", "devices 0-1".
      data: the finding for a program, as JSON values.
    """

    name: str
    status: Status
    value: str
    fix: str = ""
    where: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status == "failure" and not self.fix:
            raise ValueError(f"doctor: a failure without a way out; got {self}, expected a fix; say what to do")


@dataclass(frozen=True)
class Report:
    """All findings of one process: its index, host, process id, platform of its devices, and their JAX device ids."""

    process: int
    host: str
    pid: int
    platform: str
    devices: list[int]
    rows: list[Row]

    @property
    def usable(self) -> bool:
        """Whether nothing failed."""
        return all(row.status != "failure" for row in self.rows)

    def encode(self) -> bytes:
        """For the other processes."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Report:
        """Undoes encode()."""
        fields = json.loads(data)
        return Report(**{**fields, "rows": [Row(**row) for row in fields["rows"]]})
