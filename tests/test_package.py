"""What an index gets, and what a user gets from it: the archives, their description, their types.

The source distribution is built of a copy without traces of other builds, the wheel of the source
distribution. Nothing is installed: a wheel is an archive of what a site's directory gets.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILT = {"PKG-INFO", "setup.cfg"}
LEFT_BEHIND = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info")
LEFT_BEHIND += ("build", "dist", "shared")
BY_TORCH = {"torch", "sympy"}
"""What comes with torch."""

USER = """
import fusec
from fusec import explain, kernels, refreeze, watch

reveal_type(explain)
reveal_type(kernels)
reveal_type(refreeze)
reveal_type(watch)
reveal_type(fusec.__version__)
fusec.nonsense
"""


def run(*command: str | Path, directory: Path) -> str:
    """Run a command that must succeed; return what it prints."""
    free = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=directory, env=free, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository without what tools left behind."""
    directory = tmp_path_factory.mktemp("copy") / "fusec"
    return shutil.copytree(ROOT, directory, ignore=shutil.ignore_patterns(*LEFT_BEHIND))


@pytest.fixture(scope="module")
def files(copy: Path) -> set[str]:
    """Return the paths of the repository's files."""
    return {str(file.relative_to(copy)) for file in copy.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def built(copy: Path, files: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the two archives."""
    directory = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "-o", directory, ".", directory=copy)
    return directory


@pytest.fixture(scope="module")
def unpacked(built: Path) -> Path:
    """Return the directory that the source distribution unpacks to."""
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(built, filter="data")
    return built / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (archive,) = built.glob("*.whl")
    return zipfile.ZipFile(archive)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    return message_from_string(wheel.read(name).decode())


@pytest.mark.slow
def test_the_source_distribution_is_the_repository(unpacked: Path, files: set[str]) -> None:
    packed = {str(file.relative_to(unpacked)) for file in unpacked.rglob("*") if file.is_file()}
    added = {file for file in packed if file.startswith("fusec.egg-info/")} | BUILT
    assert packed - added == files


@pytest.mark.slow
def test_tests_run_where_the_source_distribution_is_unpacked(unpacked: Path) -> None:
    tests = ["tests/ir/test_expr.py", "tests/driver/test_backend.py", "tests/test_layers.py"]
    where = f"import fusec; assert fusec.__file__.startswith({str(unpacked)!r})"
    run(sys.executable, "-c", where, directory=unpacked)
    printed = run(sys.executable, "-m", "pytest", "-q", "-x", *tests, directory=unpacked)
    assert " passed" in printed and "failed" not in printed


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(
    wheel: zipfile.ZipFile, files: set[str]
) -> None:
    names = {name for name in wheel.namelist() if not name.startswith("fusec-")}
    assert names == {file for file in files if file.startswith("fusec/")}
    assert os.stat(str(wheel.filename)).st_size < 1_500_000


@pytest.mark.slow
def test_the_description_stands_alone(metadata: Message) -> None:
    text = str(metadata.get_payload())
    assert text.startswith("# fusec\n") and "docs/design.md" in text
    assert re.findall(r"\]\((?!https?://)[^)]*\)", text) == []
    assert metadata["Description-Content-Type"] == "text/markdown"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_types_are_found_in_an_installed_package(
    kind: str, checker: str, wheel: zipfile.ZipFile, copy: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "site")
    python = tmp_path / "site" / "bin" / "python"
    (site,) = (tmp_path / "site").glob("lib/python*/site-packages")
    (wheel if kind == "wheel" else editable(copy, tmp_path)).extractall(site)
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    said = check_types(checker, python, tmp_path)
    revealed = re.findall(r"(?:Revealed type|Type of \S+) is \"(.*)\"", said)
    ends = ["Explanation", "KernelTexts", "int", "Watch, None, None]", "str"]
    assert len(revealed) == len(ends), said
    assert all(shown.rstrip(")").endswith(end) for shown, end in zip(revealed, ends, strict=True))
    (error,) = re.findall(r".*error: .*", said)
    assert "nonsense" in error


def editable(copy: Path, directory: Path) -> zipfile.ZipFile:
    """Return the wheel of an editable install."""
    build = f"from setuptools import build_meta as b; b.build_editable({str(directory)!r})"
    run(sys.executable, "-c", build, directory=copy)
    (archive,) = directory.glob("*.whl")
    return zipfile.ZipFile(archive)


def check_types(checker: str, python: Path, directory: Path) -> str:
    """Return what a type checker says of `user.py`, for a Python of its own."""
    if checker == "pyright" and shutil.which("node") is None:
        pytest.skip("pyright wants node")
    option = {"mypy": "--python-executable", "pyright": "--pythonpath"}[checker]
    command = [sys.executable, "-m", checker, option, str(python), "user.py"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True).stdout


class Runs(ast.NodeTransformer):
    """Takes out of a tree what only a type checker reads."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node


def imported(file: Path, always: set[str]) -> list[tuple[str, bool]]:
    """Return the packages that a file imports, and whether it says what to do without each.

    Nothing of a file all of whose lines that look like an import are of packages that are there.
    """
    text = file.read_text(encoding="utf-8")
    if always.issuperset(re.findall(r"^\s*(?:import|from)\s+(\w+)", text, re.MULTILINE)):
        return []
    tree = Runs().visit(ast.parse(text))
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and any("ImportError" in ast.dump(h) for h in node.handlers)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(name.name.split(".")[0], id(node) in guarded) for name in node.names]
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module.split(".")[0], id(node) in guarded))
    return found


def test_what_is_imported_is_a_dependency_or_an_extra_that_may_be_missing() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert needed is not None
    always = {*sys.stdlib_module_names, *BY_TORCH, "fusec", *re.findall(r'"(\w+)', needed[1])}
    wrong = [
        f"{file.relative_to(ROOT)}: {package}"
        for file in (ROOT / "fusec").rglob("*.py")
        for package, guarded in imported(file, always)
        if package not in always and not (guarded and f'"{package}' in text)
    ]
    assert wrong == []


def test_each_requirement_has_an_exact_version() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r"^\w+ = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    extras = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    wanted = {name.lower() for name in re.findall(r'"([\w-]+)', extras)}
    assert lists and wanted
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
    assert [name for name in wanted if not re.search(rf"^{name}==", pinned, re.MULTILINE)] == []
