"""The comparison of compiler flags: a kernel beside itself is the same bits in the same time."""

from __future__ import annotations

import pytest

from bench import cpp_flags


@pytest.mark.slow
def test_sets_of_flags_are_built_timed_and_compared_bit_by_bit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    today = " ".join(cpp_flags.SETS["today"])
    arguments = [
        "--only",
        "layernorm+gelu 4096x1024 forward fp32",
        "--shrink",
        "16",
        "--seconds",
        "0",
        *("--set", f"again={today}", "--set", f"apart={today} -ffp-contract=off"),
    ]
    assert cpp_flags.main(arguments) == 0
    *_, again, apart_row = capsys.readouterr().out.splitlines()
    assert again.startswith("again") and again.split()[4] == "0"
    assert apart_row.startswith("apart") and apart_row.split()[4] == "1"


def test_an_unknown_name_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cpp_flags.main(["--only", "nothing like it"]) == 2
    assert "nothing like it" in capsys.readouterr().err
