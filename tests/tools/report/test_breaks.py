"""Each break has its line, its reason and a remedy; with the remedy applied it is gone."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fusec.frontend.origin import NO_TEXT
from fusec.tools.report.breaks import Break, Place, read_break, read_recompile
from fusec.tools.report.run_report import Seen
from fusec.tools.report.watching import watch
from tests.tools.report import unclean


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """Put torch's settings back, those that hold sets included."""
    config = torch._dynamo.config
    functions = set(config.reorderable_logging_functions)
    with config.patch(capture_scalar_outputs=False, capture_dynamic_output_shape_ops=False):
        yield
    config.reorderable_logging_functions.clear()
    config.reorderable_logging_functions.update(functions)


def seen_of(model: nn.Module, *rows: int) -> Seen:
    """Return what is seen of calls of a compiled model with so many rows; results are eager's."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="fusec")
    with watch() as watched, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in rows or (8,):
            x = torch.randn(count, 32)
            torch.testing.assert_close(compiled(x), model(x))
    return watched.seen


def line_of(model: type[nn.Module], text: str) -> int:
    lines, first = inspect.getsourcelines(model)
    return first + next(n for n, line in enumerate(lines) if text in line)


UNCLEAN = {
    "print": (unclean.Printing, "print(", "builtin operator `print`", None),
    "item": (unclean.Item, ".item()", "Tensor.item()", None),
    "branch": (unclean.Branch, "if y.sum()", "data-dependent branching", unclean.Chosen),
    "mask": (unclean.Mask, "x[x > 0]", "output shape depends on input", unclean.WholeMask),
    "disable": (unclean.Disabled, "noted(", "torch.compiler.disable", unclean.Enabled),
}


@pytest.mark.parametrize("case", UNCLEAN)
def test_a_break_has_its_line_its_reason_and_a_remedy(case: str) -> None:
    model, text, reason, _ = UNCLEAN[case]
    (found,) = seen_of(model()).breaks
    assert found.place.line == line_of(model, text)
    assert found.place.path == unclean.__file__
    assert found.place.function == "forward"
    assert text in found.place.code
    assert reason in found.reason
    assert found.skipped == (case == "print")  # it is in a loop
    assert str(found.remedy) != "none is known"


@pytest.mark.parametrize("case", ["print", "item", "mask"])
def test_the_setting_of_a_remedy_removes_the_break(case: str) -> None:
    model = UNCLEAN[case][0]
    (found,) = seen_of(model()).breaks
    exec(found.remedy.setting, {"torch": torch})
    after = seen_of(model())
    assert after.breaks == ()
    assert len(after.graphs) == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ["branch", "mask", "disable"])
def test_the_change_of_a_remedy_removes_the_break(case: str) -> None:
    model, _, _, mended = UNCLEAN[case]
    (found,) = seen_of(model()).breaks
    named = {"branch": "torch.where", "mask": "torch.where", "disable": "plus_one"}[case]
    assert named in found.remedy.change
    assert mended is not None
    assert seen_of(mended()).breaks == ()


class Logging(unclean.Item):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        logger.warning("inside")
        return torch.tanh(y)


logger = logging.getLogger(__name__)


def test_a_call_of_a_logger_has_a_remedy_that_works() -> None:
    (found,) = seen_of(Logging()).breaks
    assert "ignore_logging_functions" in found.remedy.change
    with torch._dynamo.config.patch(ignore_logging_functions={logger.warning}):
        assert seen_of(Logging()).breaks == ()


def test_a_break_in_code_that_no_file_holds_has_its_place() -> None:
    made: dict[str, type[nn.Module]] = {}
    text = inspect.getsource(unclean.Item)
    exec(text, {"nn": nn, "torch": torch}, made)
    (found,) = seen_of(made["Item"]()).breaks
    number = next(n for n, line in enumerate(text.splitlines(), 1) if ".item()" in line)
    assert str(found.place) == f"<string>:{number} in forward: {NO_TEXT}"


def test_a_skipped_function_stands_first_in_the_advice() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item, self.printing = unclean.Item(), unclean.Printing()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.printing(self.item(x))

    seen = seen_of(Both())
    assert [b.skipped for b in seen.breaks] == [True, False]
    assert seen.advice()[0].startswith("unclean.py:")
    assert "runs eagerly" in seen.advice()[0]


def test_a_compiled_optimizer_has_no_break_of_the_user_s() -> None:
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(4)).sum().backward()
    with watch() as watched:
        torch.compile(optimizer.step, backend="fusec")()
    assert watched.seen.breaks == ()
    assert len(watched.seen.graphs) == 1


def test_the_line_of_a_guard_is_no_part_of_the_reason() -> None:
    reason = f"0/0: {'k == 3.5':<60}  # h = h + k  # m.py:14 in f"
    found = read_recompile({"recompile_reason": reason}, Place("m.py", 1, "f"))
    assert found is not None and found.reason == "k == 3.5"


def test_a_break_that_is_met_again_is_counted() -> None:
    (found,) = seen_of(unclean.Item(), 8, 9).breaks
    assert found.count == 2


def test_a_text_of_another_form_keeps_its_last_line() -> None:
    found = read_break("something new\nTypeError: no such thing")
    assert isinstance(found, Break)
    assert found.reason == "TypeError: no such thing"
    assert str(found.remedy) == "none is known"


def test_a_recompile_has_its_function_its_reason_and_a_remedy() -> None:
    (found,) = seen_of(unclean.Chosen(), 8, 9).recompiles
    assert found.place.function == "forward"
    assert found.place.line == line_of(unclean.Chosen, "def forward")
    assert found.reason == "tensor 'x' size mismatch at index 0. expected 8, actual 9"
    assert "torch._dynamo.mark_dynamic(x, 0)" in found.remedy.change
    assert found.seconds > 0


def test_the_remedy_of_a_recompile_removes_it() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(unclean.Chosen(), backend="fusec")
    with watch() as watched, torch.no_grad():
        for rows in (8, 9):
            x = torch.randn(rows, 32)
            torch._dynamo.mark_dynamic(x, 0)
            compiled(x)
    assert watched.seen.recompiles == ()


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("0/0: tensor 'y' dtype mismatch. expected Float", "call it with the same dtype of y"),
        ("0/0: tensor 'kwargs['x']' size mismatch at index 1. e", "mark_dynamic(kwargs['x'], 1)"),
        ("0/0: len(self.seen) == 1", "let self.seen keep its length"),
        ("0/0: n == 3", "pass n as a tensor"),
        ("0/0: Unexpected recompilation: runtime guards failed", "none: "),
        ("0/0: self.training", "training and evaluation are two graphs"),
        ("0/0: GLOBAL_STATE changed: grad_mode", "with and without gradients"),
        ("0/0: ___stack0 == 1.99", "mend the break first"),
        ("0/0: something else", "the same from call to call"),
    ],
)
def test_reasons_of_recompiles_have_remedies(reason: str, remedy: str) -> None:
    found = read_recompile({"recompile_reason": reason}, Place("m.py", 1, "f"))
    assert found is not None and remedy in found.remedy.change
