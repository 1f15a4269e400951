"""Tests replace few parts of the program, and no more than they do today.

A patched module is a condition that no user has: the test sees the inside of a module, follows each
move of a name, and passes where the real condition fails. What to do instead, in this order:

* make the real condition: a limit of the kernel (``tests/limits.py``), an environment variable, a
  directory in a file's place, a compiler that is a script, a verdict in the cache
  (``tests/verdicts.py``);
* watch what is called, where that is what the test is about: ``calls_of`` (``tests/calls.py``);
* add a row to a table of the compiler: ``LOWERINGS``, ``BUILDS``, ``TARGETS``
  (``tests/planted.py``, ``tune`` and ``recode``);
* hand over what the code takes as an argument: a judge, an observer, a clock, a cache.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MOST = 31
"""Patches of modules and classes. Where a rewrite needs fewer, lower it."""
MOST_ASSIGNED = 12
"""Attributes of what the tests did not make that they assign, most of them in processes of their
own: faults that ``fusec bisect`` is to find, a driver that stands for a device."""
OWN = ("tests", "test_")
"""What a test may change as it likes: modules of the tests themselves."""


@cache
def read(text: str) -> tuple[list[ast.AST], dict[str, str]]:
    """Return a file's nodes, and the names that its import statements bind, and from where."""
    nodes, imported = list(ast.walk(ast.parse(text))), dict[str, str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            imported |= {(n.asname or n.name.partition(".")[0]): n.name for n in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {(n.asname or n.name): f"{node.module}.{n.name}" for n in node.names}
    return [node for node in nodes if isinstance(node, ast.Call | ast.Attribute)], imported


def is_foreign(target: ast.expr, imported: dict[str, str]) -> bool:
    """Return True for what the tests did not make: a dotted name, or what an import binds."""
    if isinstance(target, ast.Constant | ast.JoinedStr):
        return not ast.unparse(target).strip("f'\"").startswith(OWN)
    while isinstance(target, ast.Attribute):
        target = target.value
    origin = imported.get(target.id) if isinstance(target, ast.Name) else None
    return origin is not None and not origin.startswith(OWN)


def patches_in(text: str) -> Iterator[int]:
    """Yield the lines that replace an attribute of what the tests did not make."""
    nodes, imported = read(text)
    for node in nodes:
        if isinstance(node, ast.Call) and node.args and is_foreign(node.args[0], imported):
            yield from [node.lineno] * count_replaced(node, imported)


def assignments_in(text: str) -> Iterator[int]:
    """Yield the lines that assign an attribute of what the tests did not make."""
    nodes, imported = read(text)
    for node in nodes:
        match node:
            case ast.Attribute(value=value, ctx=ast.Store()) if is_foreign(value, imported):
                yield node.lineno


def count_replaced(call: ast.Call, imported: dict[str, str]) -> int:
    """Return how many attributes a call replaces: `setattr`, or a form of `mock.patch`."""
    function = ast.unparse(call.func)
    head, _, rest = function.partition(".")
    origin = f"{imported.get(head, head)}{'.' if rest else ''}{rest}"
    match origin.removeprefix("unittest."):
        case "mock.patch" | "mock.patch.object":
            return 1
        case "mock.patch.multiple":
            return max(len(call.keywords), 1)
        case _:
            return int(function.endswith(("setattr", "set_attr", "delattr")))


@pytest.mark.parametrize(("lines", "most"), [(patches_in, MOST), (assignments_in, MOST_ASSIGNED)])
def test_few_tests_patch_what_they_did_not_make(
    lines: Callable[[str], Iterator[int]], most: int
) -> None:
    found = [
        f"{path.relative_to(TESTS.parent)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in lines(path.read_text())
    ]
    assert len(found) <= most, "\n".join((f"{__doc__}\n{len(found)}, not {most}:", *found))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("import os\ndef test(monkeypatch): monkeypatch.setattr(os, 'open', None)", 1),
        ("from fusec.driver import race\nsetattr(race.RaceJudge, 'race', None)", 1),
        ("def test(m): m.setattr('fusec.driver.race.race', None)", 1),
        ("import os\nfrom tests import x\nx.scope.set_attr(os, 'open', None)", 1),
        ("import gc\ndef test(m): m.delattr(gc, 'get_freeze_count')", 1),
        ("from unittest import mock\nmock.patch('torch.compile')", 1),
        ("from unittest.mock import patch\nimport torch\npatch.object(torch, 'compile')", 1),
        ("from unittest import mock\nimport os\nmock.patch.multiple(os, a=1, b=2)", 2),
        ("from unittest import mock\nimport os\nmock.patch.dict(os.environ)", 0),
        ("from tests import parts\ndef test(m): m.setattr(parts, 'failure', None)", 0),
        ("def test(m, fake): m.setattr(fake, 'launch', None)", 0),
        ("import torch\nwith torch._dynamo.config.patch(dynamic_shapes=True): pass", 0),
    ],
)
def test_what_counts_as_a_patch(text: str, count: int) -> None:
    assert len(list(patches_in(text))) == count
    assert not list(assignments_in(text))


def test_what_counts_as_an_assignment() -> None:
    assert list(assignments_in("import torch\nx = torch.ones(1)\ntorch.ones = x.grad = None")) == [
        3
    ]
