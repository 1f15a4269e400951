"""A pytest plugin: Inductor's tests call fusec, and what asks for Inductor's own code is left out.

Their helpers compile by ``compile_fx``, ``torch.compile`` without a backend or the backend
"inductor"; all three become fusec, strict: a fallback is a failure. What becomes of each test goes
to a log of JSON lines, a line as it begins and one as it ends, so that a crash names its test.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._dynamo.backends import registry

from fusec.backend import fusec

LOG = "FUSEC_TORCH_SUITE_LOG"
"""The variable that says where the log is."""
_INTERIOR = re.compile(
    r"run_and_get|run_and_assert|prims\._low_memory|run_fw_bw_and_get|FileCheck|\bmetrics\."
    r"|torch\._inductor|inductor_config"
    r"|(?<!dynamo_)(?<!dynamo\.)\bconfig\.patch|\baoti|\bAOTI|\bV\.|_inductor\.|get_kernel"
    r"|patch_inductor|assertGeneratedKernel|counters\[.inductor"
)
"""What only a test of Inductor's generated code, counters and settings has in its text."""


def compile_fx(gm: Any, inputs: Sequence[Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """Compile in the place of Inductor."""
    return fusec(gm, inputs, options={"strict": True})


def is_portable(function: Callable[..., Any], module: ModuleType | None = None) -> bool:
    """Return True for a test that any backend of ``torch.compile`` should pass.

    Args:
        module: where it may be written: Inductor's tests are copied from a template under longer
            names, ``test_sum_cpu``, and decorated.
    """
    written = [] if module is None else _written(module, function.__name__)
    with contextlib.suppress(OSError, TypeError):
        written.append(inspect.getsource(inspect.unwrap(function)))
    return not any(map(_INTERIOR.search, written))


def _written(module: ModuleType, name: str) -> list[str]:
    """Return the text of the function with the longest name that ``name`` begins with."""
    known = _functions(module)
    names = [n for n in known if name == n or name.startswith(f"{n}_")]
    return [known[max(names, key=len)]] if names else []


@functools.cache
def _functions(module: ModuleType) -> dict[str, str]:
    """Return the text of each function of a module, and of the tests that it imports."""
    found: dict[str, str] = {}
    for value in vars(module).values():
        if inspect.isclass(value) and value.__name__.endswith("Template"):
            theirs = sys.modules[value.__module__]
            found |= _functions(theirs) if theirs is not module else {}
    text = inspect.getsource(module)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
            found[node.name] = "\n".join(lines)
    return found


def pytest_configure(config: pytest.Config) -> None:
    wrapper: Any = torch._TorchCompileInductorWrapper
    wrapper.__call__ = lambda self, gm, inputs, **_: compile_fx(gm, inputs)
    inductor: Any = importlib.import_module("torch._inductor.compile_fx")
    inductor.compile_fx = compile_fx
    registry.lookup_backend("inductor")  # registers it
    registry._COMPILER_FNS["inductor"] = compile_fx


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = {row["test"] for row in read_log(Path(os.environ[LOG]))}
    left = []
    for item in items:
        module: Any = getattr(item, "module", None)
        if hasattr(module, "compile_fx"):
            module.compile_fx = compile_fx
        if _name(item.nodeid) in known:
            continue
        if not is_portable(getattr(item, "function", _is_no_function), module):
            item.add_marker(pytest.mark.skip(reason="asks for Inductor's own code"))
        left.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(left)])
    items[:] = left


def pytest_runtest_logstart(nodeid: str) -> None:
    _tell({"test": _name(nodeid), "outcome": "crashed"})  # until it ends


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        said = str(report.longrepr or "")
        raised = [line[2:] for line in said.splitlines() if line.startswith("E ")] or [said[-300:]]
        _tell({"test": _name(report.nodeid), "outcome": report.outcome, "said": raised[0].strip()})


def read_log(path: Path) -> list[dict[str, str]]:
    """Return the last row of each test."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return list({row["test"]: row for row in rows}.values())


def _tell(row: dict[str, str]) -> None:
    with Path(os.environ[LOG]).open("a") as log:
        log.write(json.dumps(row) + "\n")


def _name(nodeid: str) -> str:
    """Return ``Class::test``, whatever the file's folder."""
    return nodeid.partition("::")[2]


def _is_no_function() -> None:
    """Stand in for what has no source: a doctest, say."""
