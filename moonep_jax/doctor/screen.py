"""The doctor's output: one screen for a person, or JSON for a program. Knows no checks. Imports rows only."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from moonep_jax.doctor.rows import Report, Row

SCHEMA: Final = 1
_MARKS: Final = {"ok": "ok", "info": "-", "warning": "!", "failure": "FAIL"}
_NAME, _MARK = 15, 4
_ALIKE: Final = 4  # lines of one name that may differ


def as_json(reports: Sequence[Report]) -> dict[str, Any]:
    """As the package's docstring says."""
    return {
        "schema": SCHEMA,
        "usable": all(r.usable for r in reports),
        "processes": [{**dataclasses.asdict(r), "usable": r.usable} for r in reports],
    }


def as_text(reports: Sequence[Report], width: int | None = None) -> str:
    """A table; findings that several processes or devices share are one line."""
    width = max(60, min(width or shutil.get_terminal_size((120, 40)).columns, 140))
    hosts = sorted({r.host for r in reports})
    devices = sum(len(r.devices) for r in reports)
    platforms = "/".join(sorted({r.platform for r in reports if r.platform}))
    usable = all(r.usable for r in reports)
    count = len(reports)
    who = f"{count} process{'es' if count > 1 else ''} on {', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''}"
    what = f"{devices} {platforms} device(s)" if devices else "no devices"
    lines = [f"moonep_jax doctor: {'usable' if usable else 'NOT usable'} - {who}, {what}", ""]
    for row, places in _merged(reports):
        where = _places(places, reports)
        head = f"  {_MARKS[row.status]:<{_MARK}} {row.name:<{_NAME}} "
        text = f"{where}: {row.value}" if where else row.value
        lines += _wrapped(head, text, width)
        if row.fix and row.status in ("warning", "failure"):
            lines += _wrapped(" " * len(head) + "-> ", row.fix, width)
    return "\n".join(lines)


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


Place = tuple[int, str]  # process, where


def _merged(reports: Sequence[Report]) -> list[tuple[Row, list[Place]]]:
    """Rows that say the same, once, with the places that they hold for; in the order of the first process's rows."""
    found: dict[tuple[str, str, str, str], tuple[Row, list[Place]]] = {}
    for report in reports:
        for row in report.rows:
            key = (row.name, row.status, row.value, row.fix)
            found.setdefault(key, (row, []))[1].append((report.process, row.where))
    order = {name: i for i, name in reversed(list(enumerate(r.name for report in reports for r in report.rows)))}
    merged = sorted(found.values(), key=lambda item: order[item[0].name])
    kinds = Counter((row.name, row.status) for row, _ in merged)
    return [item for item in (_condensed(merged, *item, kinds) for item in merged) if item is not None]


def _condensed(
    merged: Sequence[tuple[Row, list[Place]]], row: Row, places: list[Place], kinds: Counter[tuple[str, str]]
) -> tuple[Row, list[Place]] | None:
    """The line itself; or, where many lines of a name differ in numbers only, the first of them for all (or None)."""
    if kinds[row.name, row.status] <= _ALIKE or row.status in ("warning", "failure"):
        return row, places
    alike = [(other, at) for other, at in merged if (other.name, other.status) == (row.name, row.status)]
    if alike[0][0] is not row:
        return None
    value = f"{row.value} - and the like ({len(alike)} different; --json has all)"
    return dataclasses.replace(row, value=value), [place for _, at in alike for place in at]


def _places(places: Sequence[Place], reports: Sequence[Report]) -> str:
    if wheres := [where for _, where in places if where]:
        if any("-" in where for where in wheres):  # pairs
            return ", ".join(wheres[:6]) + (f", ... ({len(wheres)} pairs)" if len(wheres) > 6 else "")
        numbers = sorted({int(where.split()[-1]) for where in wheres})
        return f"device{'s' if len(numbers) > 1 else ''} {_ranges(numbers)}"
    processes = sorted({p for p, _ in places})
    if len(processes) == len(reports):
        return ""
    return f"process{'es' if len(processes) > 1 else ''} {_ranges(processes)}"


def _ranges(numbers: Iterable[int]) -> str:
    """0-3,7"""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
