"""What a structure of any stage computes: ``fusec/tools/bisect/interpret.py``, as an assertion."""

from __future__ import annotations

from typing import Any

from fusec.driver.structures import verify
from fusec.tools.bisect.interpret import Step, differs


def check(step: Step, made: Any) -> None:
    """Assert that what a stage made is legal, and computes what the stage was given.

    Raises:
        InvalidIR: saying what is not legal.
        InternalError: of an interpreter, for what only a mistake does.
        AssertionError: for another value.
    """
    verify(made)
    problem = differs(step, made)
    assert problem is None, problem
