"""A check of printed wrappers: no name is read before it has a value, nor after it was deleted.

Python says so only when the line runs, and a wrapper that fails then cannot fall back any more.
"""

from __future__ import annotations

import ast

from fusec.errors import InternalError


def check_name_order(text: str) -> None:
    """Follow the functions of a wrapper line by line.

    Assumes: their statements run in the order in which they stand.

    Raises:
        InternalError: if a line reads a variable that has no value there.
    """
    for function in ast.parse(text).body:
        if isinstance(function, ast.FunctionDef):
            _check_function(function)


def _check_function(function: ast.FunctionDef) -> None:
    variables = _names(function, ast.Store)
    known = {argument.arg for argument in function.args.args}
    for statement in function.body:
        early = (_names(statement, ast.Load) & variables) - known - _stored_inside(statement)
        if early:
            line = ast.unparse(statement).splitlines()[0]
            raise InternalError(
                f"{min(early)} has no value in the wrapper's line {line!r}", stage="codegen.wrapper"
            )
        known |= _names(statement, ast.Store)
        known -= _names(statement, ast.Del)


def _stored_inside(statement: ast.stmt) -> set[str]:
    """Return what a statement with a body of its own, or a comprehension, gives values to."""
    return set() if isinstance(statement, ast.Assign) else _names(statement, ast.Store)


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}
