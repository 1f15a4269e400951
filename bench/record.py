"""The JSON that every benchmark writes, its table and its plot.

    {"schema": 1, "kind": "cpu" | "compile" | "start" | "gpu", "date", "machine": {...},
     "versions": {...}, "settings": {...},
     "results": [{"group", "name", "mode", "dtype",
                  "peers": {PEER: {"median_ms", "p20_ms", "p80_ms", "samples", "error", "accurate",
                                   "compile_s", "peak_mib"} | {"failed": MESSAGE}},
                  "ratios": {"eager/fusec", "inductor/fusec", "inductor-freezing/fusec-freeze"}}],
     "summary": {GROUP: {RATIO: {"geomean", "worst", "wins", "rows"}}}}

A ratio above one means that fusec is faster. GPU rows count microseconds (`median_us`); what else
a kind adds is said where it is measured. The file is replaced whole after each result, by rename.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
WIN = 1.03  # what counts as a win: beyond noise


class Record:
    """One run's results; `add` makes them durable at once.

    Args:
        resume: a record of this kind whose results are kept, and added to.
    """

    def __init__(
        self, kind: str, directory: Path, *, resume: Path | None = None, **settings: Any
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{kind}.json"
        self.data: dict[str, Any]
        if resume is not None:
            self.data = json.loads(resume.read_text())
            self.flush()
            return
        self.data = {
            "schema": SCHEMA,
            "kind": kind,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "settings": settings,
            "results": [],
            "summary": {},
        }
        self.flush()

    @property
    def results(self) -> list[dict[str, Any]]:
        return self.data["results"]

    def add(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        self.data["summary"] = summarise(self.results)
        self.flush()

    def note(self, key: str, value: Any) -> None:
        """Set a further top-level entry."""
        self.data[key] = value
        self.flush()

    def flush(self) -> None:
        temporary = self.path.with_suffix(".tmp")
        text = json.dumps(_finite(self.data), indent=1, allow_nan=False, default=str)
        temporary.write_text(text + "\n")
        os.replace(temporary, self.path)


def _finite(value: Any) -> Any:
    """Return JSON values with infinities and NaN, the errors of broken results, as text."""
    match value:
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return value


def machine() -> dict[str, Any]:
    """What the numbers depend on; nothing that names the machine."""
    found: dict[str, Any] = {
        "processor": processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
    }
    if hasattr(os, "getloadavg"):
        found["load_average"] = round(os.getloadavg()[0], 2)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
    return found


def processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("fusec", "triton", "numpy", "transformers", "onnxruntime", "openvino"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def geomean(values: list[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric mean, worst row and wins of each ratio, for each group."""
    summary: dict[str, Any] = {}
    for result in results:
        for ratio, value in result.get("ratios", {}).items():
            summary.setdefault(result["group"], {}).setdefault(ratio, []).append(value)
    return {
        group: {
            ratio: {
                "geomean": round(geomean(values), 4),
                "worst": round(min(values), 4),
                "wins": sum(v > WIN for v in values),
                "rows": len(values),
            }
            for ratio, values in ratios.items()
        }
        for group, ratios in summary.items()
    }


def table(data: dict[str, Any], unit: str = "ms") -> str:
    """One line a result, one a group; what failed says so in its column."""
    peers = list(dict.fromkeys(p for r in data["results"] for p in r["peers"]))
    ratios = list(dict.fromkeys(k for r in data["results"] for k in r.get("ratios", {})))
    weighed = [
        p for p in peers if any("peak_mib" in r["peers"].get(p, {}) for r in data["results"])
    ]
    header = ["case", *(f"{p} {unit}" for p in peers), *ratios]
    header += [*(f"{p} MiB" for p in weighed), "fusec error", "ok"]
    rows = [header]
    for result in data["results"]:
        label = " ".join(str(result[k]) for k in ("name", "mode", "dtype") if k in result)
        cells = [_time(result["peers"].get(p, {}), unit) for p in peers]
        cells += [_number(result.get("ratios", {}).get(k)) for k in ratios]
        cells += [_number(result["peers"].get(p, {}).get("peak_mib")) for p in weighed]
        own = result["peers"].get("fusec", {})
        error = f"{own['error']:.1e}" if "error" in own else "-"
        rows.append([label, *cells, error, _verdict(result)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [_line(row, widths) for row in rows]
    for group, summary in data["summary"].items():
        for ratio, s in summary.items():
            lines.append(
                f"{group}: {ratio} geomean {s['geomean']:.2f}, worst {s['worst']:.2f}, "
                f"ahead in {s['wins']} of {s['rows']}"
            )
    return "\n".join(lines)


def _line(row: list[str], widths: list[int]) -> str:
    first, *rest = zip(row, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)])


def _time(peer: dict[str, Any], unit: str) -> str:
    if "failed" in peer:
        return "failed"
    return _number(peer.get(f"median_{unit}"))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _verdict(result: dict[str, Any]) -> str:
    wrong = [p for p, found in result["peers"].items() if found.get("accurate") is False]
    return f"inaccurate: {', '.join(wrong)}" if wrong else "yes"


def plot(data: dict[str, Any], path: Path) -> bool:
    """Bars of each ratio, a line at one. Returns False where matplotlib is not installed."""
    try:
        import matplotlib  # an extra: the numbers are in the JSON without it

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print('no plot, for matplotlib is missing: pip install -e ".[bench]"', file=sys.stderr)
        return False
    rows = [r for r in data["results"] if r.get("ratios")]
    if not rows:
        return False
    ratios = list(dict.fromkeys(k for r in rows for k in r["ratios"]))
    figure, axes = pyplot.subplots(figsize=(9, 0.6 + 0.5 * len(rows)), layout="constrained")
    height = 0.8 / len(ratios)
    for i, ratio in enumerate(ratios):
        places = [y + i * height for y in range(len(rows))]
        values = [r["ratios"].get(ratio, 0.0) for r in rows]
        bars = axes.barh(places, values, height, label=ratio, hatch="//" if i else None)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    labels = [" ".join(str(r[k]) for k in ("name", "mode", "dtype") if k in r) for r in rows]
    axes.set_yticks([y + 0.4 - height / 2 for y in range(len(rows))], labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.15, y=0.01)
    axes.set_xlabel("times faster with fusec (1: equal; logarithmic)")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True
