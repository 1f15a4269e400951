"""A report in a real browser: it opens without an error, and mouse and keyboard find everything.

Chromium runs headless, driven by selenium, from a file and without a network. Where there is none,
these tests are left out: on Debian, ``apt-get install chromium chromium-driver``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusec.tools.cli import main
from fusec.tools.report.html import render
from fusec.tools.report.html.details import leads_of
from fusec.tools.report.html.document import Document
from tests.tools.report.html.conftest import HOSTILE

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="there is no chromium with its chromedriver: apt-get install chromium chromium-driver",
)

OPTIONS = (
    "--headless",
    "--no-sandbox",  # the tests may run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no network
    "--window-size=1500,1000",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def address(document: Document, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(document), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(browser: webdriver.Chrome, address: str) -> webdriver.Chrome:
    """The report, opened anew."""
    return opened(browser, address)


def opened(browser: webdriver.Chrome, address: str) -> webdriver.Chrome:
    browser.get("about:blank")
    browser.get(address)
    WebDriverWait(browser, 20).until(
        lambda b: b.execute_script("return document.documentElement.dataset.ready") == "yes"
    )
    return browser


def panel(page: webdriver.Chrome) -> str:
    return page.find_element(By.ID, "panel").text


def pressed(page: webdriver.Chrome) -> str:
    (box,) = page.find_elements(By.CSS_SELECTOR, ".box[aria-pressed=true]")
    return str(box.get_attribute("id"))


def focused(page: webdriver.Chrome) -> str:
    return str(page.execute_script("return document.activeElement.id"))


def test_it_opens_without_an_error_and_asks_for_nothing(page: webdriver.Chrome) -> None:
    assert page.get_log("browser") == []
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert not page.find_elements(By.TAG_NAME, "img")
    assert page.title.startswith(HOSTILE)


def dearest(document: Document, graph: int) -> str:
    return f"g{graph}-b{document.graphs[graph].dearest}"


def test_the_dearest_launch_is_shown_at_first(page: webdriver.Chrome, document: Document) -> None:
    assert pressed(page) == dearest(document, 0)
    assert "Reads" in panel(page)


def test_the_panel_follows_the_reader_until_a_launch_is_chosen(
    page: webdriver.Chrome, document: Document
) -> None:
    scroll = "document.getElementById(arguments[0]).scrollIntoView({block: 'center'})"
    page.execute_script(scroll, "g1-b0")
    WebDriverWait(page, 20).until(lambda page: pressed(page) == dearest(document, 1))
    page.find_element(By.ID, "g1-b0").click()
    page.execute_script(scroll, "g0-b0")
    # The observer's callbacks run with the next frames: two of them are over.
    page.execute_async_script(
        "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0], 50)))"
    )
    assert pressed(page) == "g1-b0"


def test_search_fades_what_does_not_match_and_goes_through_what_does(
    page: webdriver.Chrome, document: Document
) -> None:
    matching = [
        f"g{g}-b{k}"
        for g, graph in enumerate(document.graphs)
        for k, box in enumerate(graph.boxes)
        if "fft" in " ".join((box.title, box.module, box.reason, *box.lines))
    ]
    boxes = page.find_elements(By.CSS_SELECTOR, ".box")
    field = page.find_element(By.ID, "search")
    field.send_keys("FFT")
    bright = page.find_elements(By.CSS_SELECTOR, ".box:not(.missed)")
    assert 0 < len(bright) < len(boxes)
    assert {box.get_attribute("id") for box in bright} == set(matching)
    assert page.find_element(By.ID, "found").text == f"{len(bright)} of {len(boxes)}"
    gone = []
    for _ in matching:
        field.send_keys(Keys.ENTER)
        gone.append(pressed(page))
    assert sorted(gone) == sorted(matching)


def test_a_lead_goes_to_its_launch(page: webdriver.Chrome, document: Document) -> None:
    first = page.find_element(By.CSS_SELECTOR, ".leads a")
    first.send_keys(Keys.ENTER)
    assert pressed(page) == leads_of(document.graphs)[0][0]


def test_the_dearest_launch_has_the_warmest_colour(
    page: webdriver.Chrome, document: Document
) -> None:
    heat = page.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('.box')].map("
        "(box) => [box.id, getComputedStyle(box).getPropertyValue('--heat')]))"
    )
    for g, graph in enumerate(document.graphs):
        assert heat[dearest(document, g)] == "100%"
        assert any(heat[f"g{g}-b{k}"] != "100%" for k in range(len(graph.boxes)))


def test_a_click_shows_a_kernel_and_its_neighbours(
    page: webdriver.Chrome, document: Document
) -> None:
    graph = document.graphs[0]
    k = next(k for k, box in enumerate(graph.boxes) if box.fed_by and box.feeds and box.calls)
    box = graph.boxes[k]
    page.find_element(By.ID, f"g0-b{k}").click()
    assert pressed(page) == f"g0-b{k}"
    assert box.title in panel(page) and box.lines[0] in panel(page)
    near = {b.get_attribute("id") for b in page.find_elements(By.CSS_SELECTOR, ".box.near")}
    assert near == {f"g0-b{j}" for j in (*box.feeds, *box.fed_by)}
    same = {c.get_attribute("id") for c in page.find_elements(By.CSS_SELECTOR, ".call.same")}
    assert same == {f"g0-c{j}" for j in box.calls}
    assert len(page.find_elements(By.CSS_SELECTOR, "path.out")) >= len(set(box.feeds) - {k})


def test_tabs_show_notation_schedule_and_source(page: webdriver.Chrome, document: Document) -> None:
    number, kernel = next(
        (k, box) for k, box in enumerate(document.graphs[0].boxes) if box.kind == "kernel"
    )
    page.find_element(By.ID, f"g0-b{number}").click()
    shown = []
    for tab in page.find_elements(By.CSS_SELECTOR, "[role=tab]"):
        shown.append(tab.text)
    assert shown == ["Overview", "Notation", "Schedule", "C++"]
    for listing in kernel.listings:
        page.find_element(By.XPATH, f"//button[@role='tab'][.='{listing.label}']").click()
        text = page.find_element(By.CSS_SELECTOR, "[role=tabpanel] pre").get_attribute(
            "textContent"
        )
        assert text == document.texts[listing.text]
        comments = [c.text for c in page.find_elements(By.CSS_SELECTOR, "#panel .hl-c")]
        assert bool(comments) == (listing.label == "C++")  # "//" divides in index notation
        assert all(comment.startswith("//") for comment in comments)


def test_the_keyboard_goes_through_boxes_and_tabs(page: webdriver.Chrome) -> None:
    first = page.find_element(By.ID, "g0-b0")
    first.send_keys(Keys.ENTER)
    assert pressed(page) == "g0-b0"
    first.send_keys(Keys.ARROW_DOWN)
    assert pressed(page) == focused(page) == "g0-b1"
    tab = page.find_element(By.CSS_SELECTOR, "[aria-selected=true]")
    tab.send_keys(Keys.ARROW_RIGHT)
    chosen = page.find_element(By.CSS_SELECTOR, "[aria-selected=true]")
    assert chosen.text == "Notation" and page.switch_to.active_element == chosen
    chosen.send_keys(Keys.ESCAPE)
    assert focused(page) == "g0-b1"


def test_a_point_of_the_roofline_leads_to_its_kernel(page: webdriver.Chrome) -> None:
    link = page.find_elements(By.CSS_SELECTOR, ".plot a")[-1]
    link.send_keys(Keys.ENTER)
    assert pressed(page) == focused(page) == link.get_attribute("data-box")
    assert page.execute_script("return location.hash") == f"#{pressed(page)}"


def test_a_narrow_page_shows_its_panel_when_asked_and_closes_it(
    browser: webdriver.Chrome, address: str
) -> None:
    browser.set_window_size(600, 1000)
    page = opened(browser, address)
    hidden = page.find_element(By.ID, "panel").is_displayed()
    first = page.find_element(By.ID, "g0-b0")
    first.send_keys(Keys.ENTER)
    shown = panel(page)
    wide = page.execute_script("return document.documentElement.scrollWidth")
    right = max(
        box.rect["x"] + box.rect["width"] for box in page.find_elements(By.CSS_SELECTOR, ".box")
    )
    frames = [frame.text for frame in page.find_elements(By.CSS_SELECTOR, ".listed")]
    page.find_element(By.CSS_SELECTOR, ".close").send_keys(Keys.ENTER)
    closed = page.find_element(By.ID, "panel").is_displayed()
    at = focused(page)
    browser.set_window_size(1500, 1000)
    assert (hidden, closed, at) == (False, False, "g0-b0")
    assert "Notation" in shown and wide <= 600 and right <= 600
    assert frames and set(frames) == {"3 × h.*"}  # launches are a list, layer by layer
    assert not page.find_elements(By.CSS_SELECTOR, ".box[aria-pressed=true]")


def test_a_link_to_a_box_opens_it(browser: webdriver.Chrome, address: str) -> None:
    assert pressed(opened(browser, f"{address}#g1-b2")) == "g1-b2"


def test_hostile_texts_of_a_kernel_stay_text(page: webdriver.Chrome, document: Document) -> None:
    boxes = [
        f"g{g}-b{k}"
        for g, graph in enumerate(document.graphs)
        for k, box in enumerate(graph.boxes)
        if any("<img" in line for line in box.lines)
    ]
    assert boxes
    page.execute_script("document.getElementById(arguments[0]).click()", boxes[0])
    assert "<img" in panel(page)
    assert not page.find_elements(By.TAG_NAME, "img") and page.get_log("browser") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_in_dark(page: webdriver.Chrome, scheme: str) -> None:
    """WCAG's contrast of 4.5 for all that is read."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    pairs = page.execute_script(
        """
        const solid = (element) => {
          for (let at = element; at; at = at.parentElement) {
            const colour = getComputedStyle(at).backgroundColor;
            if (!colour.endsWith(", 0)")) return colour;
          }
        };
        const read = ".box *, .call *, .break *, .cards *, h2, .note, td, th, a, #panel *";
        const text = (e) => e.childNodes[0]?.nodeType === Node.TEXT_NODE && e.textContent.trim();
        return [...document.querySelectorAll(read)]
          .filter(text)
          .map((e) => [getComputedStyle(e).color, solid(e), e.textContent.slice(0, 30)]);
        """
    )
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert len(pairs) > 50
    low = [(text, contrast(ink, paper)) for ink, paper, text in pairs if contrast(ink, paper) < 4.5]
    assert low == []


def contrast(a: str, b: str) -> float:
    """Return WCAG's contrast of two colours: "rgb(r, g, b)", or "color(srgb r g b)" of a mix."""
    high, low = sorted(map(luminance, (a, b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    kind, _, numbers = colour.rstrip(")").partition("(")
    most = 1 if kind == "color" else 255
    shares = [float(number) / most for number in re.findall(r"(?<!\w)[\d.e-]+", numbers)[:3]]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_it_prints_all_graphs_within_the_paper(page: webdriver.Chrome) -> None:
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    page.set_window_size(794, 1123)  # A4 at 96 dots an inch
    wide = page.execute_script("return document.documentElement.scrollWidth")
    shown = page.execute_script("return getComputedStyle(document.querySelector('nav')).display")
    page.set_window_size(1500, 1000)
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert wide <= 794 and shown == "none"


@pytest.mark.slow
def test_gpt2_xl_in_training_is_small_and_opens(
    browser: webdriver.Chrome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "xl.html"
    target = ["examples/gpt2_xl.py:step", "--input", "i64[1,1024]<50257", "--train"]
    assert main(["report", *target, "--target", "sm_90", "-o", str(path)]) == 0
    assert path.stat().st_size < 1_000_000
    page = opened(browser, path.as_uri())
    frames = [frame.text for frame in page.find_elements(By.CSS_SELECTOR, ".frame h4")]
    assert set(frames) == {"48 × model.transformer.h.*"}
    assert len(page.find_elements(By.CSS_SELECTOR, ".box")) < 100
    assert page.get_log("browser") == []
