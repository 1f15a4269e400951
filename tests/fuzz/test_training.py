"""Random training programs, eager against the compiled ones, and some that were wrong once."""

from __future__ import annotations

import pytest

from fusec.frontend import results
from tests.fuzz import training
from tests.fuzz.training import Training, as_file, draw, failures, is_as_torch, wrong

MATRIX = (("leaf", (3, 3)),)


def program(*lines: str, returns: str, inputs=MATRIX) -> Training:
    return Training(0, inputs, lines, returns)


FOUND = {
    "a detached result of what two views are made of": program(
        "y = torch.sin(a0)", returns="y[:2], y[2:], y.detach()"
    ),
    "the same beside a result of its own": program(
        "y = torch.sin(a0)", returns="y[:2], y[2:], y.detach(), y * 3"
    ),
    "a view, detached": program("y = a0 * 2", returns="y.view(-1).detach(), y"),
    "detached, and viewed then": program("y = a0 * 2", returns="y.detach().view(-1), y.t(), y"),
    "a view of a result that has its shape": program(
        "y = a0 * 2", returns="y.view(3, 3), y, y", inputs=(("buffer", (3, 3)),)
    ),
    "a detached result, twice": program(
        "y = a0 * 2", "z = y.detach()", returns="z, z, y, y.detach()"
    ),
    "a view and the same view, detached": program(
        "y = a0 * 2", returns="y.t().detach(), y.t()"
    ),
    "rows and the same rows, detached": program("y = a0 * 2", returns="y[0].detach(), y[0]"),
    "one of several views, detached": program(
        "y = a0 * 2", "p, q = y.split(2)", returns="p, p.detach(), q"
    ),
    "views of what is computed of indices alone": program(
        "y = torch.arange(6.0)", returns="y.view(2, 3), y, y[2:], a0 * 2"
    ),
    "views of a constant": program(
        "y = torch.zeros(2, 3)", returns="{'p': y[0], 'q': [y.t(), y]}"
    ),
    "equal values in memory of their own": program(
        "y = a0 * 2", returns="y, y.clone(), a0 * 2, y.clone().view(-1)"
    ),
    "a result without gradient of what has one": program(
        "with torch.no_grad():\n    v = a0.view(-1)", "y = a0 * 2", returns="v, y, a0.detach()"
    ),
    "a hook on a view that is returned": program(
        "v = a0.view(-1)", "v.register_hook(lambda g: g * 2)", returns="v, a0 * 2"
    ),
    "a hook on a view of a result": program(
        "y = a0 * 2", "v = y.view(-1)", "v.register_hook(lambda g: g * 2)", returns="v, y"
    ),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FOUND)
def test_a_program_that_was_wrong_is_right(name: str) -> None:
    assert not wrong(FOUND[name])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 240, 12))
def test_compiled_training_programs_do_what_eager_does(first: int) -> None:
    drawn = [draw(seed) for seed in range(first, first + 12)]
    assert not [as_file(*one) for one in failures(drawn) if not is_as_torch(*one)]


def test_a_few_training_programs_do_what_eager_does() -> None:
    assert not [as_file(*one) for one in failures([draw(seed, memory=False) for seed in range(6)])]


def test_a_seed_is_one_program_and_seeds_reach_every_kind_of_line() -> None:
    drawn = [draw(seed) for seed in range(60)]
    assert drawn[7] == draw(7)
    text = "\n".join(one.source() for one in drawn)
    for kind in (training.VALUES, training.VIEWS, training.DETACHED, training.MEMORY):
        assert any(line.partition("{x}")[2][:6] in text for line in kind)
    assert {kind for one in drawn for kind, _ in one.inputs} == set(training.KINDS)


def test_results_that_are_one_object_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_DETACHES", set())
    monkeypatch.setattr("fusec.compiler.fingerprint", lambda: "no result is detached")
    found = wrong(FOUND["a view, detached"])
    assert any("requires_grad" in line for line in found)
