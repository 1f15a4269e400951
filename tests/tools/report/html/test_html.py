"""The file of a report: it needs nothing else, and no name in it becomes markup."""

from __future__ import annotations

import base64
import gzip
import json
import sys
from html.parser import HTMLParser

import pytest

from fusec.errors import EnvironmentProblem
from fusec.tools.report.html import render, within
from fusec.tools.report.html.document import Document
from tests.tools.report.html.conftest import HOSTILE


class Elements(HTMLParser):
    """Collects the elements of a page with their attributes, and what is written in them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def page(document: Document) -> str:
    return render(document)


@pytest.fixture(scope="module")
def elements(page: str) -> Elements:
    return Elements(page)


def test_hostile_names_stay_text(page: str, elements: Elements) -> None:
    assert HOSTILE not in page
    assert not elements.named("img")
    assert len(elements.named("script")) == 2
    assert not [
        name for _, attributes in elements.found for name in attributes if name.startswith("on")
    ]
    # It is there all the same: as the title, of a break, of modules.
    assert sum(HOSTILE in text for text in elements.text) >= 5
    titles = [attributes.get("title") or "" for attributes in elements.named("button")]
    assert any(HOSTILE in title for title in titles)


def test_it_needs_no_other_file(page: str, elements: Elements) -> None:
    for _, attributes in elements.found:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not elements.named("link")
    assert "@import" not in page and "url(http" not in page


def test_the_packed_block_has_what_clicks_show(page: str, document: Document) -> None:
    block = page.partition('id="data">')[2].partition("</script>")[0]
    data = json.loads(gzip.decompress(base64.b64decode(block)))
    assert data["texts"] == list(document.texts)
    boxes = [f"g{g}-b{k}" for g, one in enumerate(document.graphs) for k in range(len(one.boxes))]
    assert list(data["boxes"]) == boxes
    ids = {attributes.get("id") for _, attributes in Elements(page).found}
    for box in data["boxes"].values():
        panel = Elements(box["panel"])
        feeding = [button["data-box"] for button in panel.named("button")]
        assert ids.issuperset([*feeding, *box["calls"]])
        assert not panel.named("img") and not panel.named("script")
    assert any(HOSTILE in text for text in Elements(str(data["boxes"].values())).text)


def test_every_box_can_be_reached_and_says_what_it_is(elements: Elements) -> None:
    buttons = elements.named("button")
    assert buttons and all(b.get("aria-pressed") == "false" and b.get("title") for b in buttons)
    ids = [a["id"] for _, a in elements.found if "id" in a]
    assert len(ids) == len(set(ids))


def test_the_same_document_is_the_same_page(page: str, document: Document) -> None:
    assert render(document) == page


def test_without_breaks_there_is_nothing_red(calm: Document) -> None:
    page = render(calm)
    assert "Graph breaks</h2>" not in page and 'class="break"' not in page


def test_modules_are_named_from_their_frame_on() -> None:
    assert within("a.h.*.mlp", "a.h.*") == "mlp"
    assert within("a.h.2.mlp.act", "a.h.*") == "2: mlp.act"
    assert within("a.h.2", "a.h.*") == "2"
    assert within("a.last", "a.h.*") == within("a.last", "") == "a.last"
    assert within("mlp", "4 rounds of 256 rows") == "mlp"


def test_a_missing_jinja2_is_named(document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(EnvironmentProblem, match=r"jinja2.*pip install 'fusec\[cli\]'"):
        render(document)
