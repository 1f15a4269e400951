"""Which modules are alike layers: by class, by what is in them, and by what stands between."""

from __future__ import annotations

import pytest

from fusec.tools.report.layers import Layers

BLOCKS = {f"h.{n}": "Block" for n in range(3)} | {f"h.{n}.mlp": "MLP" for n in range(3)}
MIXED = {"net.0": "Linear", "net.1": "GELU", "net.2": "Linear"}
AROUND = {"net.0": "Embedding", "net.4": "LayerNorm"} | {
    path.replace("h", "net", 1).replace(str(n), str(n + 1), 1): kind
    for n in range(3)
    for path, kind in BLOCKS.items()
    if path.startswith(f"h.{n}")
}
RUN = {"net.0": "Stem", "net.1": "Cell", "net.2": "Cell", "net.3": "Head"}
BRANCHES = {"net.0": "Sequential", "net.1": "Sequential", "net.0.0": "Conv2d", "net.1.0": "Conv2d"}


@pytest.mark.parametrize(
    ("kinds", "module", "folded"),
    [
        (BLOCKS, "h.2.mlp", "h.*.mlp"),
        ({"h.0": "Block", "h.0.mlp": "MLP"}, "h.0.mlp", "h.0.mlp"),  # one is no stack
        (MIXED, "net.0", "net.0"),
        (MIXED, "net.2", "net.2"),
        ({"net.0": "Linear", "net.2": "Linear"}, "net.2", "net.2"),  # a dropout that does nothing
        ({"net.0": "Linear", "net.1": "Linear"}, "net.1", "net.*"),
        (AROUND, "net.0", "net.0"),
        (AROUND, "net.3.mlp", "net.*.mlp"),
        (AROUND, "net.4", "net.4"),
        (RUN, "net.2", "net.*"),
        (RUN, "net.3", "net.3"),
        (BRANCHES, "net.1.0", "net.*.0"),
        (BRANCHES | {"net.1.0": "Linear"}, "net.1.0", "net.1.0"),  # unlike inside
        (BLOCKS, "h.1.mlp..h.2", "h.*.mlp..h.*"),
        (BLOCKS, "h.2.mlp..h.0.mlp", "h.*.mlp"),
        (BLOCKS, "", ""),
    ],
)
def test_layers_are_children_of_one_class(kinds: dict[str, str], module: str, folded: str) -> None:
    assert Layers.of(kinds).folded(module) == folded


def test_layers_in_layers_are_folded_each() -> None:
    kinds = {f"h.{n}.experts.{e}": "Expert" for n in range(2) for e in range(4)}
    kinds |= {f"h.{n}": "Block" for n in range(2)} | {f"h.{n}.experts": "" for n in range(2)}
    assert Layers.of(kinds).folded("h.1.experts.3.up") == "h.*.experts.*.up"
    assert Layers.of(kinds).layer_of("h.1.experts.3.up") == ("h.*", "1")


def test_graphs_of_one_layer_each_are_layers_together() -> None:
    parts = [{f"h.{n}": "Block", f"h.{n}.mlp": "MLP"} for n in range(2)]
    assert Layers.of(parts[0]).folded("h.0.mlp") == "h.0.mlp"
    assert Layers.of(*parts).folded("h.0.mlp") == "h.*.mlp"


def test_a_layer_has_its_frame_and_its_number() -> None:
    layers = Layers.of(BLOCKS)
    assert layers.layer_of("h.2.mlp") == ("h.*", "2")
    assert layers.layer_of("h.*.mlp") == ("h.*", "*")
    assert layers.layer_of("h.1.mlp..h.2") == ("h.*", "1")
    assert layers.layer_of("h.1.mlp..head") == ("", "")
    assert layers.layer_of("head") == layers.layer_of("") == ("", "")
    assert Layers.of({"0": "Block", "1": "Block"}).layer_of("1.mlp") == ("*", "1")
