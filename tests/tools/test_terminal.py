"""Layout for a terminal: tables and paragraphs that fit, and names that are cut only where they
have to be."""

from __future__ import annotations

import pytest

from fusec.tools.terminal import (
    columns,
    fitted_table,
    format_bytes,
    format_seconds,
    in_units,
    tail,
    wrapped,
)

LONG = "scaled_dot_product_flash_attention_for_cpu"
ROWS = [(LONG, "with", LONG, "+1 us", "axes unify"), ("a", "with", "b", "", "a law " * 12)]


@pytest.mark.parametrize("width", (60, 80, 100, 140))
def test_a_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert columns() == width
    lines = fitted_table(ROWS, right=(3,), names=(0, 2), indent=4)
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()).count("law") == 12  # text is wrapped, never cut


def test_names_are_whole_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert fitted_table(ROWS, names=(0, 2))[0].count(LONG) == 2
    monkeypatch.setenv("COLUMNS", "100")
    first, *_ = fitted_table(ROWS, names=(0, 2))
    assert first.count("scaled_dot_pro") == 2 and first.count("...") == 2


def test_a_text_stands_below_its_row_where_there_is_no_room_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = fitted_table(ROWS, right=(3,), names=(0, 2), indent=4)
    assert [line.startswith(" " * 10) for line in lines] == [False, True, False, True, True]
    assert lines[1].strip() == "axes unify" and lines[0].endswith("+1 us")
    monkeypatch.setenv("COLUMNS", "100")
    assert fitted_table(ROWS, right=(3,), names=(0, 2), indent=4)[0].endswith("axes unify")


def test_of_a_path_the_end_is_kept() -> None:
    assert tail("encoder.layer.3.query", 12) == "...r.3.query" and tail("query", 5) == "query"


def test_what_one_copies_stays_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    setting = "torch._dynamo.config.capture_scalar_outputs = True"
    lines = wrapped(f"-> keep the number a tensor; or {setting}", "    ", "      ", whole=setting)
    assert lines == ["    -> keep the number a tensor; or", f"      {setting}"]


def test_sizes_are_in_powers_of_ten() -> None:
    assert [format_bytes(n) for n in (999, 12589056, 10**13)] == ["999 B", "12.6 MB", "10 TB"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0 us"), (4.2e-6, "4.2 us"), (999e-6, "999 us"), (999.6e-6, "1 ms"), (1e-3, "1 ms")),
        *((0.4242, "424 ms"), (1, "1 s"), (1234.5, "1234 s")),
    ],
)
def test_a_time_has_the_unit_that_leaves_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_what_rounds_to_a_thousand_is_one_of_the_next_unit() -> None:
    assert format_bytes(999_600) == "1 MB"
    assert [in_units(n, ("", "k")) for n in (999.4, 999.6, 5e6)] == ["999", "1 k", "5000 k"]
