"""The architecture picture, docs/images/layers.svg, drawn from the layers that tests enforce.

``python -m tests.docs.picture`` writes it. A box is a folder of ``fusec``; a line leads from a
folder to one that it imports, unless another path leads there, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import networkx

from tests.docs.pages import ROOT
from tests.test_layers import CORE, LAYERS

PICTURE = ROOT / "docs" / "images" / "layers.svg"
SAYS = {
    "ir": "index notation, kernels, programs: data, verifiers",
    "frontend": "FX graph to index notation",
    "passes": "rewrites, fusion, schedules",
    "codegen": "programs to Triton, C++, host code",
    "runtime": "build, load, launch, cache, races",
    "driver": "stages, cache, judges: torch.compile's call to a bound graph",
    "tools": "explain, report, bisect, emulate: a model as one file, the command line",
    "errors": "errors, options, processors, torch's private names",
}
"""What a box says below its name. The modules at the root are one box, ``errors``; ``export`` and
``tools``, which import each other's modules, are one, too."""
COLUMN = {"frontend": 0.0, "ir": 0.5, "runtime": 2.0}
"""Where a box stands in its row; in the middle where nothing is said."""
WIDTH, HEIGHT, GAP, STEP = 290, 54, 30, 92


def folders(layers: Mapping[str, set[str]]) -> networkx.DiGraph:
    """Return the graph of imports between folders, without edges that follow from others."""
    graph = networkx.DiGraph()
    for layer, imported in layers.items():
        for other in imported:
            a, b = (_folder(name) for name in (layer, other))
            if a and b and a != b:
                graph.add_edge(a, b)
    return networkx.transitive_reduction(graph)


def _folder(layer: str) -> str:
    """Return the box of a layer; "" for the package's own modules, which import on demand."""
    name = layer.partition(".")[0]
    root = {"errors", "options", "processors", "torch_interior"}
    name = {"export": "tools", **dict.fromkeys(root, "errors")}.get(name, name)
    return name if name in SAYS else ""


def draw(graph: networkx.DiGraph) -> str:
    """Return the picture as SVG: rows by the longest path down, dark boxes for the compiler."""
    depth: dict[str, int] = {}
    for name in reversed(list(networkx.topological_sort(graph))):
        depth[name] = max((depth[below] + 1 for below in graph[name]), default=0)
    across = 3 * (WIDTH + GAP) + GAP
    down = (max(depth.values()) + 1) * STEP + GAP
    place = {
        name: (
            GAP + COLUMN.get(name, 1.0) * (WIDTH + GAP),
            down - (depth[name] + 1) * STEP + GAP / 2,
        )
        for name in SAYS
    }
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" '
        f'width="{across}" font-family="sans-serif" text-anchor="middle">',
        f'<rect width="{across}" height="{down}" fill="white"/>',
    ]
    for a, b in sorted(graph.edges):
        (x1, y1), (x2, y2) = place[a], place[b]
        aside = max(-0.46 * WIDTH, min(0.46 * WIDTH, x2 - x1))  # past the boxes between
        lines.append(
            f'<line x1="{x1 + WIDTH / 2 + aside:g}" y1="{y1 + HEIGHT:g}" '
            f'x2="{x2 + WIDTH / 2:g}" y2="{y2:g}" stroke="#888"/>'
        )
    for name, (x, y) in place.items():
        fill, ink = ("#1f4e79", "white") if name in CORE else ("#e8eef4", "#222")
        title = {"errors": "the root", "tools": "tools/, export/"}.get(name, f"{name}/")
        words = SAYS[name].split(": ") if len(SAYS[name]) > 40 else [SAYS[name]]
        lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}"/>'
        )
        middle = x + WIDTH / 2
        lines.append(
            f'<text x="{middle:g}" y="{y + 17:g}" font-size="14" font-weight="bold" '
            f'fill="{ink}">{title}</text>'
        )
        for k, text in enumerate(words):
            top = y + (38 if len(words) == 1 else 33) + 14 * k
            lines.append(
                f'<text x="{middle:g}" y="{top:g}" font-size="11" fill="{ink}">{text}</text>'
            )
    return "\n".join([*lines, "</svg>\n"])


def main(picture: Path = PICTURE) -> None:
    picture.write_text(draw(folders(LAYERS)), encoding="utf-8")


if __name__ == "__main__":
    main()
