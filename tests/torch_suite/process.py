"""One process of the suite: pytest over a file until it ends, or a test ends the process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.quick_build import quick_compiles_as_told
from tests.torch_suite.plugin import LOG


def run_pytest(folder: Path, file: str, chosen: str, log: Path, said: Path) -> None:
    """Run what is chosen of a file and is not in the log yet; exit with pytest's code.

    Args:
        folder: PyTorch's ``test``, of which tests import modules.
        log: what the plugin writes, beside which files of the tests go.
        said: gets what the process prints.
    """
    with said.open("w") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    os.chdir(log.parent)
    os.environ[LOG] = str(log)
    # What ran before may have put a folder there that hides a module of Python's.
    of_python = [path for path in sys.path if path.startswith(sys.base_prefix)]
    sys.path[:] = [str(folder), *of_python, *(p for p in sys.path if p not in of_python)]
    arguments = ["-q", "-p", "tests.torch_suite.plugin", "-p", "no:cacheprovider", "-p", "no:xdist",
                 "--noconftest", "-c", os.devnull, "--rootdir", str(folder), "-k", chosen,
                 str(folder / file)]  # fmt: skip
    with quick_compiles_as_told():
        code = pytest.main(arguments)
    sys.stdout.flush()
    sys.exit(int(code))
