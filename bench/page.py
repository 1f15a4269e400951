"""Tables and a picture of the results that are kept: `python -m bench.page`.

Reads bench/results/*.json and writes docs/benchmarks.md, docs/images/benchmarks.png and the tables
between README's comments, one for CPUs and one for GPUs. A case that was measured again on the same
device counts once, as it was measured last. Times are not compared across devices: ratios are of
one run.
"""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMAGE = "docs/images/benchmarks.png"
PEERS = {"eager/fusec": "eager / fusec", "inductor/fusec": "Inductor / fusec"}
BLOCK = r"(<!-- {} benchmark table: [^\n]*-->\n).*?(<!-- end of benchmark table -->)"
CHOSEN = {"cpu": (
    "residual+layernorm+gelu", "rmsnorm+rope", "masked softmax", "batchnorm+relu",
    "cross-entropy 512x50257", "linear + cross-entropy",
    "attention, written out 4x8", "attention, written out, causal 4x8",
    "gpt2 124M", "llama block", "t5 block", "small mlp",
), "gpu": (
    "linear+gelu vit-l", "linear+bias+residual gpt2-xl", "swiglu llama-8b",
    "attention, causal 2x32", "attention, written out", "attention, alibi",
    "attention B16 heads 32 of 8", "o+residual rows 1", "residual+layernorm 16384x1024",
    "rmsnorm+rope", "masked softmax", "cross-entropy 8192x50257",
    "linear+cross-entropy 8192x4096x32000", "AdamW", "llama-8b block",
)}  # fmt: skip
"""The beginnings of the cases that README shows, those that lose among them."""


@dataclass(frozen=True, slots=True)
class Row:
    """A case: for each peer, how many times its time of fusec's, forward and in training."""

    case: str
    ratios: dict[str, tuple[float | None, float | None]]


@dataclass(frozen=True, slots=True)
class Part:
    """What was measured on one machine and day."""

    title: str
    rows: tuple[Row, ...]


def runs(kind: str) -> list[dict[str, Any]]:
    """Return the runs on "cpu"s or on "gpu"s that are kept, the oldest first."""
    texts = (path.read_text(encoding="utf-8") for path in ROOT.glob(f"bench/results/{kind}*.json"))
    return sorted((json.loads(text) for text in texts), key=lambda run: run["date"])


def parts(kind: str) -> list[Part]:
    """Return what was measured, by machine and day, the oldest first."""
    kept = runs(kind)
    last = {(device(run), case): run["date"] for run in kept for case in cases(run)}
    found: dict[str, list[Row]] = {}
    for run in kept:
        mine = [case for case in cases(run) if last[device(run), case] == run["date"]]
        found.setdefault(title(run), []).extend(row(run, case) for case in mine)
    return [Part(title, tuple(rows)) for title, rows in found.items()]


def cases(run: dict[str, Any]) -> list[str]:
    """Return what a run measured, each case once."""
    return list(dict.fromkeys(name(result) for result in compared(run)))


def compared(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results that a table has a column for."""
    return [one for one in run["results"] if not PEERS.keys().isdisjoint(one.get("ratios", ()))]


def name(result: dict[str, Any]) -> str:
    """Return what a case is called: its group where its name is a variant's, and its type."""
    of = "attention, " if result["group"] == "attention" else ""
    return f"{of}{result['name']}" + ("" if result["dtype"] == "fp32" else f", {result['dtype']}")


def device(run: dict[str, Any]) -> str:
    """Return what a run was measured on."""
    return run["machine"].get("gpu") or run["machine"]["processor"]


def title(run: dict[str, Any]) -> str:
    machine, versions = run["machine"], run["versions"]
    name = device(run).replace("(R)", "").replace(" Processor", "")
    if "gpu" in machine:
        name += f", Triton {versions['triton']}"
    else:
        name += f", {machine['cpu_capability']}, {machine['cores']} cores"
    return f"{name}, torch {versions['torch'].partition('+')[0]}, {run['date'][:10]}"


def row(run: dict[str, Any], case: str) -> Row:
    of_mode = {one["mode"]: one["ratios"] for one in compared(run) if name(one) == case}
    forward, training = of_mode.get("forward", {}), of_mode.get("training", {})
    return Row(case, {peer: (forward.get(peer), training.get(peer)) for peer in PEERS})


def table(shown: list[Row]) -> str:
    """Return the rows in Markdown."""
    lines = ["| case | " + " | ".join(PEERS.values()) + " |", "|---|" + "---|" * len(PEERS)]
    for row in shown:
        cells = (" / ".join(map(number, row.ratios[peer])) for peer in PEERS)
        lines.append(f"| {row.case} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def page() -> str:
    """Return docs/benchmarks.md."""
    head = (
        "# Benchmarks\n\n"
        "Times of eager and of Inductor over fusec's, forward / training; above 1, fusec is\n"
        "faster. On CPUs, medians of interleaved rounds in one process; on GPUs, medians of CUDA\n"
        "graphs, without the host. fp32 unless said. The machines were shared: take a few percent\n"
        "as noise. Written by `python -m bench.page` from [bench/results](../bench/results);\n"
        "measured by `python -m bench.cpu` and `python -m bench.gpu`, as\n"
        "[performance.md](performance.md) says.\n"
    )
    every = [*parts("gpu"), *parts("cpu")]
    return head + "".join(f"\n## {part.title}\n\n{table([*part.rows])}" for part in every)


def short(kind: str) -> str:
    """Return a table of README: of each chosen case, what was measured last."""
    every = [row for part in reversed(parts(kind)) for row in part.rows]
    chosen = [next(row for row in every if row.case.startswith(start)) for start in CHOSEN[kind]]
    return table(chosen)


def picture(path: Path) -> None:
    """Draw every ratio as a point on a logarithmic axis, a panel for each peer."""
    try:
        import matplotlib  # an extra

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from PIL import Image  # matplotlib's
    except ImportError:
        sys.exit('error: the picture wants matplotlib: pip install -e ".[bench]"')
    shown = [row for part in parts("cpu") for row in part.rows]
    figure, panels = pyplot.subplots(
        1, 2, sharey=True, figsize=(9, 0.8 + 0.17 * len(shown)), layout="constrained"
    )
    for axes, (peer, label) in zip(panels, PEERS.items(), strict=True):
        for mode, (name, marker) in enumerate((("forward", "o"), ("training", "D"))):
            points = [(row.ratios[peer][mode], y) for y, row in enumerate(shown)]
            filled = [(x, y) for x, y in points if x is not None]
            face = "tab:blue" if mode == 0 else "none"
            axes.scatter(*zip(*filled, strict=True), s=22, marker=marker, label=name,
                         facecolors=face, edgecolors="tab:blue", zorder=2)  # fmt: skip
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(f"{label}: right of 1, fusec is faster", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(axis="both", linewidth=0.3)
    panels[0].set_yticks(range(len(shown)), [row.case for row in shown], fontsize=7)
    panels[0].invert_yaxis()
    panels[0].margins(y=0.01)
    panels[1].legend(fontsize=8, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=80)
    Image.open(drawn).convert("P", palette=Image.Palette.ADAPTIVE, colors=32).save(path)
    pyplot.close(figure)


def main() -> int:
    picture(ROOT / IMAGE)
    (ROOT / "docs/benchmarks.md").write_text(page(), encoding="utf-8")
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    for kind in CHOSEN:
        block = re.compile(BLOCK.format(kind.upper()), re.S)
        text = block.sub(lambda found, kind=kind: found[1] + short(kind) + found[2], text)
    readme.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
