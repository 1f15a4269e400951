"""The architecture picture shows the layers that are enforced today."""

from __future__ import annotations

from tests.docs.pages import ROOT
from tests.docs.picture import PICTURE, SAYS, draw, folders
from tests.test_layers import CORE, LAYERS


def test_the_picture_is_drawn_from_the_layers() -> None:
    drawn = draw(folders(LAYERS))
    assert PICTURE.read_text(encoding="utf-8") == drawn, "run python -m tests.docs.picture"
    assert all(f">{name}/</text>" in drawn for name in CORE)


def test_each_folder_has_a_box() -> None:
    assert set(folders(LAYERS)) == set(SAYS)


def test_an_import_that_follows_from_others_is_no_line() -> None:
    layers = {"tools": {"driver", "ir"}, "driver": {"ir"}, "ir": set()}
    assert set(folders(layers).edges) == {("tools", "driver"), ("driver", "ir")}


def test_the_design_is_short() -> None:
    assert len((ROOT / "docs/design.md").read_text(encoding="utf-8").splitlines()) <= 250
