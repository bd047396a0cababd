"""The figures of benchmarks.loopback as Markdown tables and as a plot. Reads a result, measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def table(result: dict[str, Any]) -> str:
    """The figures as Markdown tables."""
    lines = [f"{result['device']}, {result['sms']} SMs", ""]
    if rows := result.get("prefetch"):
        sms = [int(k.rsplit("_", 1)[1]) for k in rows[0] if k.startswith("send_us_")]
        head = ["config", "E", "B", "H", "Hp", "slots", "Data MB"]
        head += [f"{what} {sm} SMs" for sm in sms for what in ("us", "BW", "CommBW")] + ["memcpy us", "BW"]
        lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for r in rows:
            cells = [r["config"], r["E"], r["B"], r["H"], r["Hp"], r["slots"], f"{r['data_MB']:.2f}"]
            for sm in sms:
                bw = r["data_MB"] / r[f"send_us_{sm}"] * 1e3
                cells += [f"{r[f'send_us_{sm}']:.1f}", f"{bw:.0f}", f"{bw / 2:.0f}"]
            cells += [f"{r['memcpy_us']:.1f}", f"{r['data_MB'] / r['memcpy_us'] * 1e3:.0f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines.append("")
    if rows := result.get("rows", []) + result.get("weights", []):
        lines += [
            "| R | op | part | mode | routing | blocks | us | MB moved | GB/s | share of a copy |",
            "|" + "---|" * 10,
        ]
        for r in rows:
            case = f"{r['R']} | {r['op']} | {r['part']} | {r['mode']} | {r['routing']} | {r['blocks']}"
            figures = f"{r['us']:.1f} | {r['bytes'] / 1e6:.0f} | {r['GBps']:.0f} | {r['share']:.2f}"
            lines.append(f"| {case} | {figures} |")
        lines.append("")
    if rows := result.get("plan", []) + result.get("decode", []):
        lines += ["| op | R | E | s | K | routing | us | local part us |", "|" + "---|" * 8]
        for r in rows:
            cells = [r["op"], r["R"], r["E"], r["s"], r["K"], r["routing"], f"{r['us']:.1f}", f"{r['local_us']:.1f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines.append("")
    if seconds := result.get("seconds"):
        lines.append("Seconds: " + ", ".join(f"{part} {s:.0f}" for part, s in seconds.items()))
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Bandwidth of the prefetch table over its size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = sorted(result["prefetch"], key=lambda r: r["data_MB"])
    figure, axes = plt.subplots(figsize=(8, 5))
    size = [r["data_MB"] for r in rows]
    for key in [k for k in rows[0] if k.startswith("send_us_")]:
        label = f"prefetch send, {key.rsplit('_', 1)[1]} SMs"
        axes.plot(size, [r["data_MB"] / r[key] for r in rows], marker="o", label=label)
    axes.plot(size, [r["data_MB"] / r["memcpy_us"] for r in rows], "k--", label="cudaMemcpyAsync")
    axes.set(xscale="log", xlabel="MB read + written", ylabel="TB/s read + written", title=result["device"])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
