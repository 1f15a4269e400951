"""Options: who wins, what is refused, and what the messages name."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from fusec.errors import UsageError
from fusec.options import MODES, Options, environment_variables


def options_from(
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
    **environ: str,
) -> Options:
    return Options.from_compile(mode, options, environ=environ)


def test_nothing_given_is_all_defaults() -> None:
    assert options_from() == Options()
    assert options_from(None, {}) == Options()


@pytest.mark.parametrize(
    ("mode", "race_budget_s", "cudagraphs"),
    [
        ("default", None, False),
        ("reduce-overhead", None, True),
        ("max-autotune", 300.0, True),
        ("max-autotune-no-cudagraphs", 300.0, False),
    ],
)
def test_modes_mean_what_users_know(
    mode: str, race_budget_s: float | None, cudagraphs: bool
) -> None:
    assert options_from(mode) == Options(race_budget_s=race_budget_s, cudagraphs=cudagraphs)


def test_max_autotune_races_where_the_environment_turned_it_off() -> None:
    assert not options_from(FUSEC_AUTOTUNE="0").autotune
    assert options_from("max-autotune", FUSEC_AUTOTUNE="0").autotune
    assert not options_from("max-autotune", {"autotune": False}).autotune


def test_modes_exist_in_torch_too() -> None:
    assert set(MODES) <= {"default", *torch._inductor.list_mode_options()}


def test_options_beat_the_mode_which_beats_the_environment() -> None:
    environ = {"FUSEC_CUDAGRAPHS": "1", "FUSEC_THREADS": "3", "FUSEC_STRICT": "1"}
    assert options_from(**environ) == Options(cudagraphs=True, threads=3, strict=True)
    chosen = options_from("max-autotune-no-cudagraphs", {"threads": 5}, **environ)
    assert chosen == Options(race_budget_s=300.0, cudagraphs=False, threads=5, strict=True)
    assert options_from("default", **environ).cudagraphs


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("on", True), ("YES", True), (" true ", True), ("0", False), ("Off", False)],
)
def test_booleans_of_the_environment(text: str, value: bool) -> None:
    assert options_from(FUSEC_VERIFY=text).verify is value
    assert options_from(FUSEC_CACHE=text).cache is value


def test_an_empty_variable_counts_as_unset() -> None:
    assert options_from(FUSEC_CACHE="", FUSEC_THREADS=" ", FUSEC_CXX="") == Options()


def test_a_misspelt_variable_is_named_once() -> None:
    with pytest.warns(UserWarning, match="FUSEC_CASHE. Did you mean FUSEC_CACHE\\?") as warned:
        for _ in range(2):
            options_from(FUSEC_CASHE="1", FUSEC_CACHE="1")
    assert len(warned) == 1


def test_cxx_falls_back_to_the_variable_that_make_knows() -> None:
    assert options_from(CXX="clang++").cxx == "clang++"
    assert options_from(CXX="clang++", FUSEC_CXX="g++-13").cxx == "g++-13"


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_THREADS", "7")
    assert Options.from_compile(None, None).threads == 7


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"FUSEC_STRICT": "maybe"}, "FUSEC_STRICT: 'maybe' is not 1 or 0"),
        ({"FUSEC_THREADS": "many"}, "FUSEC_THREADS: 'many' is no integer"),
        ({"FUSEC_THREADS": "-1"}, "FUSEC_THREADS: -1 is negative"),
        ({"FUSEC_RACE_BUDGET_S": "long"}, "FUSEC_RACE_BUDGET_S: 'long' is no number"),
        ({"FUSEC_RACE_BUDGET_S": "nan"}, "FUSEC_RACE_BUDGET_S: nan is no duration"),
        ({"FUSEC_RACE": "fuse"}, "FUSEC_RACE: 'fuse'. Did you mean 'fused'?"),
    ],
)
def test_a_bad_variable_is_named(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        options_from(**environ)


@pytest.mark.parametrize(
    ("mode", "meant"),
    [
        ("reduce_overhead", "reduce-overhead"),
        ("max-autotun", "max-autotune"),
        ("Default", "default"),
        ("max-autotune-no-cudagraph", "max-autotune-no-cudagraphs"),
    ],
)
def test_an_unknown_mode_names_the_nearest_and_all(mode: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"Did you mean '{meant}'") as caught:
        options_from(mode)
    assert all(valid in str(caught.value) for valid in MODES)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("triton.cudagraphs", "cudagraphs"),
        ("max_autotune", "autotune"),
        ("cachedir", "cache_dir"),
        ("Strict", "strict"),
        ("fuse", "fusion"),
    ],
)
def test_an_unknown_option_names_the_nearest_and_all(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"Did you mean '{meant}'") as caught:
        options_from(None, {name: True})
    assert all(field.name in str(caught.value) for field in dataclasses.fields(Options))


@pytest.mark.parametrize(
    ("name", "value", "seen"),
    [
        ("strict", 1, "1 (int) is not accepted; give True or False."),
        ("strict", "yes", "'yes' (str) is not accepted; give True or False."),
        ("threads", True, "True (bool) is not accepted; give a whole number."),
        ("threads", 2.0, "2.0 (float) is not accepted; give a whole number."),
        ("threads", None, "None (NoneType) is not accepted; give a whole number."),
        ("threads", -2, "-2 is negative"),
        ("cache_dir", 3, "3 (int) is not accepted; give a text or None."),
        ("cxx", b"g++", "b'g++' (bytes) is not accepted; give a text or None."),
        ("race", None, "None (NoneType) is not accepted; give one of 'auto', 'fused', 'library'."),
        ("race", "libary", "'libary'. Did you mean 'library'? Valid: auto, fused, library."),
        ("race_budget_s", "20", "'20' (str) is not accepted; give a number or None."),
        ("race_budget_s", True, "True (bool) is not accepted; give a number or None."),
        ("race_budget_s", -1.0, "-1.0 is no duration"),
        ("race_budget_s", float("inf"), "inf is no duration"),
        ("memory_budget", 1.5, "1.5 is not in [0, 1]"),
        ("precision", "exact", "'exact'. Valid: best, eager"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(name: str, value: object, seen: str) -> None:
    for build in (lambda: options_from(None, {name: value}), lambda: Options(**{name: value})):
        with pytest.raises(UsageError, match=re.escape(f"option {name!r}: {seen}")):
            build()


def test_a_path_object_is_taken_as_text() -> None:
    assert options_from(None, {"dump_dir": Path("/x/y")}).dump_dir == "/x/y"


def test_a_whole_number_of_seconds_is_the_same_duration() -> None:
    wanted = Options(race_budget_s=20.0).key()
    assert options_from(None, {"race_budget_s": 20}).key() == wanted
    assert options_from(FUSEC_RACE_BUDGET_S="20").key() == wanted
    with pytest.raises(UsageError, match="20 must be given as float"):
        Options(race_budget_s=20)


@pytest.mark.parametrize(("device", "seconds"), [("cuda", 20.0), ("cpu", 10.0)])
def test_races_take_as_long_as_a_device_is_worth_or_as_the_user_says(
    device: str, seconds: float
) -> None:
    assert Options().race_seconds(device) == seconds
    assert Options(race_budget_s=None).key() == Options().key()
    assert options_from(None, {"race_budget_s": 3}).race_seconds(device) == 3.0
    assert options_from("max-autotune").race_seconds(device) == 300.0


def test_options_are_frozen_and_hashable() -> None:
    options = Options()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.strict = True  # type: ignore[misc]
    assert {options: 1}[Options()] == 1


def test_the_key_changes_with_what_changes_code_and_with_nothing_else() -> None:
    def another(field):
        choices = field.metadata["about"].choices
        return choices[-1] if choices else other[str(field.type)](field.default)

    other = {
        "bool": lambda v: not v,
        "int": lambda v: v + 1,
        "float": lambda v: v / 2,
        "float | None": lambda v: 3.5,
        "str": lambda v: "another",
        "str | None": lambda v: "sm_90",
    }
    changing = {
        field.name
        for field in dataclasses.fields(Options)
        if Options(**{field.name: another(field)}).key() != Options().key()
    }
    assert changing == {
        *("autotune", "batch_invariant", "chunk_bytes", "cudagraphs", "descriptors"),
        *("dependent_launches", "deterministic", "fallback_random", "fusion"),
        *("channels_last", "memory_budget", "merge_limit", "native"),
        *("passes", "precision", "race", "race_budget_s", "roles", "target", "verify"),
    }


def test_the_names_of_passes_are_read_off_a_text() -> None:
    assert Options().pass_names == ()
    assert Options(passes=" one, another,").pass_names == ("one", "another")
    assert options_from(FUSEC_PASSES="one").pass_names == ("one",)


def test_nothing_is_timed_where_rules_choose() -> None:
    assert Options().times and not Options().by_rule
    for name in ("deterministic", "batch_invariant"):
        assert Options(**{name: True}).by_rule and not Options(**{name: True}).times
    for name in ("native", "batch_invariant"):
        assert Options(**{name: True}).alone and not Options(**{name: True}).times
    assert not Options(autotune=False).times and not Options(race="fused").times


@pytest.mark.parametrize("warn_only", (False, True))
def test_torch_s_deterministic_algorithms_are_ours_for_every_way_in(warn_only: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        made = [
            options_from(None, {name: name == "freeze"}) for name in ("freeze", "deterministic")
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(one.deterministic and not one.times for one in made) and made[0].freeze
    assert not options_from().deterministic


def test_options_are_read_without_torch() -> None:
    code = "import sys; from fusec.options import Options; Options.from_compile(None, None)"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)


def test_each_option_has_a_variable_and_a_line_of_help() -> None:
    rows = {row.name: row for row in environment_variables()}
    assert set(rows) == {f"FUSEC_{f.name.upper()}" for f in dataclasses.fields(Options)}
    assert all(row.help and len(row.help) < 90 for row in rows.values())
    assert (rows["FUSEC_CACHE"].type, rows["FUSEC_CACHE"].default) == ("bool", "1")
    assert (rows["FUSEC_CACHE_DIR"].type, rows["FUSEC_CACHE_DIR"].default) == ("str", "")
    assert rows["FUSEC_CACHE_SIZE_MB"].default == "2048"
