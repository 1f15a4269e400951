"""PyTorch's own compiler tests, where ``--torch-tests`` says they are; and how they are run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch_suite.__main__ import FILES, expectations, run_file
from tests.torch_suite.plugin import is_portable

TOY = """
import os, signal
import torch
from torch._inductor.compile_fx import compile_fx
from torch.testing._internal.common_utils import TestCase
from fusec.driver.compiler import RECENT

class ToyTests(TestCase):
    def test_a_default(self):
        RECENT.clear()
        x = torch.ones(3)
        self.assertEqual(torch.compile(lambda x: x.sin() * 2)(x), x.sin() * 2)
        assert RECENT, "fusec compiles"

    def test_b_helper(self):
        RECENT.clear()
        x = torch.ones(3)
        call = torch._dynamo.optimize_assert(lambda gm, i: compile_fx(gm, i))(lambda x: x.cos() + 1)
        self.assertEqual(call(x), x.cos() + 1)
        assert RECENT, "fusec compiles"

    def test_c_crash(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def test_d_code(self):
        run_and_get_code(lambda: None)

    def test_e_wrong(self):
        self.assertEqual(1, 2)
"""


def test_a_suite_is_run_by_fusec_over_crashes_without_what_asks_for_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hidden" / "html").mkdir(parents=True)
    (tmp_path / "hidden" / "html" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "hidden")  # a test before may leave a folder there
    (tmp_path / "test_toy.py").write_text(TOY)
    result = run_file(tmp_path, "test_toy.py", "ToyTests")
    assert result.whole
    assert {row["test"][-7:]: row["outcome"] for row in result.rows} == {
        "default": "passed", "_helper": "passed", "c_crash": "crashed", "_d_code": "skipped",
        "e_wrong": "failed",
    }  # fmt: skip
    listed = {"test_toy.py::ToyTests::test_c_crash": "it ends its process"}
    (wrong,) = result.unexpected(listed)
    assert wrong.startswith("ToyTests::test_e_wrong: failed")


def test_what_asks_for_generated_code_is_not_portable() -> None:
    def portable() -> None:
        with dynamo_config.patch(dynamic_shapes=True):  # type: ignore[name-defined]  # noqa: F821
            pass

    def bound() -> None:
        with config.patch(fallback_random=True):  # type: ignore[name-defined]  # noqa: F821
            pass

    assert is_portable(portable) and not is_portable(bound)


def test_each_expected_failure_has_a_reason() -> None:
    assert all(expectations().values())


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_pytorch_s_own_tests_pass(file: str, request: pytest.FixtureRequest) -> None:
    given = request.config.getoption("--torch-tests")
    if given is None:
        pytest.skip("no --torch-tests PATH to the folder `test` of a checkout of PyTorch")
    if not Path(given, file).exists():
        pytest.skip(f"{given} has no {file}")
    result = run_file(Path(given).resolve(), file, FILES[file])
    print(file, dict(result.counts))
    assert result.whole and result.unexpected(expectations()) == []
