"""The fault matrix as a Markdown table: fault and phase, for each backend the seconds to the error on the slowest
survivor and whether all of them named the right ranks.

test_faults makes the rows and writes them as JSON to the path in FAULTS_JSON. `python tests/fault_table.py FILE...`
prints the table of such files. No imports beyond the standard library.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # backend, fault, phase, seconds, named, close_s, note


def markdown(rows: list[Row]) -> str:
    """A line for each fault and phase, a column for each backend."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    cells = {(row["fault"], row["phase"], row["backend"]): _cell(row) for row in rows}
    lines = ["| fault | phase | " + " | ".join(backends) + " |", "|---" * (2 + len(backends)) + "|"]
    for fault, phase in dict.fromkeys((row["fault"], row["phase"]) for row in rows):
        line = [cells.get((fault, phase, backend), "") for backend in backends]
        lines.append(f"| {fault} | {phase} | " + " | ".join(line) + " |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    if row["seconds"] is None:
        return str(row["note"])
    named = "named" if row["named"] else "NOT named"
    closed = "" if row["close_s"] is None else f", closed in {row['close_s']:.1f} s"
    return f"{row['seconds']:.2f} s, {named}{closed}{'; ' + row['note'] if row['note'] else ''}"


def main(paths: list[str]) -> None:
    print(markdown([row for path in paths for row in json.loads(Path(path).read_text())]))


if __name__ == "__main__":
    main(sys.argv[1:])
