"""``fusec report``: one HTML file that needs nothing else, not even a network.

``document.py`` makes its content, ``render`` prints that with jinja2, which escapes all text. What
a click shows of each box, and the texts of all kernels, are one compressed block, which the page's
own script unpacks; it shows texts of kernels as text, never as markup.
"""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusec.errors import EnvironmentProblem
from fusec.frontend.modules import BETWEEN
from fusec.ir.names import operation_words
from fusec.tools.report.html.details import facts_of, hint, leads_of, names_of, saving_of
from fusec.tools.report.html.document import Document
from fusec.tools.report.html.plots import memory_plot, roofline_plot
from fusec.tools.terminal import format_bytes, format_seconds

if TYPE_CHECKING:
    from jinja2 import Environment

_HERE = Path(__file__).parent


def render(document: Document) -> str:
    """Return a report as HTML.

    Raises:
        EnvironmentProblem: if jinja2 is not installed.
    """
    templates = environment()
    return templates.get_template("page.html").render(
        document=document,
        leads=leads_of(document.graphs),
        plots=[
            (roofline_plot(graph), None if graph.usage is None else memory_plot(graph.usage))
            for graph in document.graphs
        ],
        style=_text("page.css"),
        script=_text("page.js"),
        data=packed({"texts": list(document.texts), "boxes": _boxes(document, templates)}),
    )


def _boxes(document: Document, templates: Environment) -> dict[str, Any]:
    """Return, for the page's script, each box's panel, its listings and the ids of its calls."""
    panel = templates.get_template("panel.html")
    return {
        f"g{g}-b{k}": {
            "panel": panel.render(box=box, graph=graph, g=g),
            "listings": [[listing.label, listing.text] for listing in box.listings],
            "calls": [f"g{g}-c{call}" for call in box.calls],
        }
        for g, graph in enumerate(document.graphs)
        for k, box in enumerate(graph.boxes)
    }


def environment() -> Environment:
    """Return the jinja2 environment of the templates.

    Raises:
        EnvironmentProblem: if jinja2 is not installed.
    """
    try:
        import jinja2  # an optional dependency
    except ImportError as error:
        raise EnvironmentProblem(
            "a report wants jinja2, which is not installed: pip install 'fusec[cli]'"
        ) from error
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters.update(bytes=format_bytes, seconds=format_seconds, within=within, hint=hint)
    made.filters.update(facts=facts_of, names=names_of, saving=saving_of, word=operation_word)
    return made


def operation_word(op: str) -> str:
    """Return the usual name of an operation: "layer_norm" for "native_layer_norm.default"."""
    return operation_words([op])[0]


def within(module: str, frame: str) -> str:
    """Return a module's path relative to its frame.

    In the frame "h.*" that is "mlp" for "h.*.mlp", and "2: mlp" for the "h.2.mlp" of one layer.
    """
    return BETWEEN.join(_within(one, frame) for one in module.split(BETWEEN))


def _within(module: str, frame: str) -> str:
    outer = frame.removesuffix("*")
    if outer == frame or not module.startswith(outer):
        return module
    layer, _, inner = module.removeprefix(outer).partition(".")
    return inner if layer == "*" else f"{layer}: {inner}".rstrip(": ")


def packed(value: Any) -> str:
    """Return a value as base64 of compressed JSON: the same for the same value."""
    text = json.dumps(value, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
