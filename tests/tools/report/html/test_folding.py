"""Alike launches as one, and the order in which a drawing has them."""

from __future__ import annotations

from fusec.tools.report.eager_cost import EagerCall
from fusec.tools.report.html.drawn import fold_calls, segments
from fusec.tools.report.layers import Layers


def calls(*named: str) -> list[EagerCall]:
    """Return launches given as "op module"."""
    return [EagerCall(op, 8, module) for op, _, module in (n.partition(" ") for n in named)]


def blocks(*named: str) -> Layers:
    """Return the layers of modules that are all of one class, and have parts."""
    paths = [name.partition(" ")[2].split(".") for name in named]
    every = {".".join(path[:count]) for path in paths for count in range(1, len(path) + 1)}
    return Layers.of(dict.fromkeys(every, "Block") | {f"{path}.part": "" for path in every})


def drawn(*named: str) -> list[tuple[str, int, list[str]]]:
    """Return (frame, layers, ["2 x op"]) of each stretch."""
    layers = blocks(*named)
    alike = fold_calls(calls(*named), layers)
    return [
        (s.frame, s.layers, [f"{alike[k].count} x {alike[k].first.op}" for k in s.calls])
        for s in segments([], alike, layers)
    ]


def test_layers_are_drawn_once_and_what_is_around_them_stays_there() -> None:
    found = drawn("a top", "n h.0.ln", "m h.0.mlp", "n h.1.ln", "m h.1.mlp", "c top.last")
    assert found == [("", 1, ["1 x a"]), ("h.*", 2, ["2 x n", "2 x m"]), ("", 1, ["1 x c"])]


def test_what_only_one_layer_launches_stands_in_its_frame() -> None:
    found = drawn("n h.0.ln", "n h.1.ln", "d h.1.drop")
    assert found == [("h.*", 2, ["2 x n", "1 x d"])]


def test_numbered_parts_that_are_not_alike_are_no_layers() -> None:
    assert drawn("mm 0", "relu 1", "mm2 2") == [("", 1, ["1 x mm", "1 x relu", "1 x mm2"])]


def test_stacks_of_layers_are_frames_of_their_own() -> None:
    found = drawn("a enc.0", "a enc.1", "x mid", "b dec.0", "b dec.1", "b dec.2")
    assert [(frame, layers) for frame, layers, _ in found] == [("enc.*", 2), ("", 1), ("dec.*", 3)]


def test_what_stands_between_parts_of_a_layer_goes_to_the_nearer_side() -> None:
    before = drawn("n h.0", "x top", "m h.0", "o h.0", "n h.1", "m h.1", "o h.1")
    assert [frame for frame, _, _ in before] == ["", "h.*"]
    behind = drawn("n h.0", "m h.0", "o h.0", "x top", "p h.0", "n h.1", "m h.1", "o h.1", "p h.1")
    assert [frame for frame, _, _ in behind] == ["h.*", ""]


def test_paths_are_folded_only_where_they_differ() -> None:
    named = ("n h.0.ln", "n h.1.ln", "d h.1.drop")
    alike = fold_calls(calls(*named), blocks(*named))
    assert [a.module for a in alike] == ["h.*.ln", "h.1.drop"]
