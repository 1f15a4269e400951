"""The structure of docs/design.md, checked from the code itself: layers, circles, ceilings, paths.

Each check is a function from a source tree to a list of violations. It is run twice: on fusec,
which must have none, and on small trees with a planted violation, which it must find.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[1]
FILE_CEILING = 600
FUNCTION_CEILING = 60

FOUNDATION = {"errors", "options", "processors"}
COMPILER = FOUNDATION | {"driver.trace", "ir", "passes", "codegen"}
WHOLE = COMPILER | {"frontend", "runtime", "torch_interior"}
WHOLE |= {
    "driver.context",
    "driver.stages",
    "driver.structures",
    "driver.pipeline",
    "driver.launches",
}
WHOLE |= {"driver.observers", "driver.invariance", "driver.user_passes"}

LAYERS: dict[str, set[str]] = {
    # What every layer stands on.
    "errors": set(),
    "options": {"errors"},
    "processors": set(),
    "torch_interior": set(),
    "notation": {"ir"},
    # The compiler.
    "ir": {"errors"},
    "frontend": FOUNDATION | {"ir", "torch_interior"},
    "passes": FOUNDATION | {"ir"},
    "codegen": FOUNDATION | {"ir", "passes"},
    "runtime": FOUNDATION | {"torch_interior", ""},
    # Its driver, module by module.
    "driver": set(),
    "driver.trace": {"errors"},
    "driver.partition": FOUNDATION | {"ir", "frontend", "passes", "torch_interior"},
    "driver.structures": COMPILER | {"driver.partition"},
    "driver.context": COMPILER | {"frontend", "driver.structures"},
    "driver.stages": COMPILER
    | {"frontend", "driver.context", "driver.partition", "driver.structures"},
    "driver.user_passes": COMPILER | {"driver.context", "driver.stages"},
    "driver.launches": FOUNDATION | {"ir", "frontend", "torch_interior"},
    "driver.invariance": {"errors", "ir", "frontend", "torch_interior"},
    "driver.observers": {"options", "passes", "runtime", "driver.pipeline", "driver.trace"},
    "driver.pipeline": WHOLE,
    "driver.race": FOUNDATION | {"ir", "runtime"},
    "driver.contests": WHOLE | {"driver.race"},
    "driver.splitting": FOUNDATION | {"frontend", "torch_interior"},
    "driver.blame": FOUNDATION | {"ir", "frontend"},
    "driver.build": WHOLE,
    "driver.compiler": WHOLE | {"driver.blame", "driver.build", "driver.contests", "driver.race"},
    "driver.aot_metadata": FOUNDATION | {"runtime", "torch_interior"},
    "driver.warm": WHOLE | {"driver.aot_metadata", "driver.compiler"},
    "driver.backend": WHOLE
    | {
        "driver.compiler",
        "driver.partition",
        "driver.splitting",
        "driver.warm",
    },
    # Around it: nothing above imports what follows.
    "native": set(),
    "archive": {"errors", "runtime", "torch_interior", ""},
    "export": {"archive"}
    | WHOLE
    | {"driver.aot_metadata", "driver.backend", "driver.compiler", "driver.warm"}
    | {"backend", "tools.report"},
    "tools": set(),
    "tools.interpreter": {"errors", "ir"},
    "tools.verify": FOUNDATION | {"frontend", "runtime", "torch_interior", "driver.observers"},
    "tools.clock": FOUNDATION
    | {"frontend", "runtime", "torch_interior", "driver.launches", "driver.observers"},
    "tools.terminal": set(),
    "tools.dumps": WHOLE | {"driver.partition"},
    "tools.summary": WHOLE,
    "tools.assembly": {"errors", "runtime"},
    "tools.static_amd": frozenset(),
    "tools.static_checks": COMPILER | {"runtime", "tools.assembly", "tools.static_amd"},
    "tools.emulator": FOUNDATION | {"runtime", "tools.assembly", "tools.static_checks"},
    "tools.report": WHOLE
    | {"backend", "driver.build", "driver.compiler", "driver.backend"}
    | {"tools.clock", "tools.dumps", "tools.emulator", "tools.static_checks", "tools.summary"}
    | {"tools.assembly", "tools.terminal", "tools.verify"},
    "tools.bisect": WHOLE
    | {"driver.blame", "driver.compiler", "driver.backend", "driver.partition"}
    | {"tools.clock", "tools.interpreter", "tools.dumps", "tools.terminal", "tools.verify", ""},
    "tools.cli": WHOLE
    | {"driver.build", "driver.compiler", "export", "tools.report", "tools.bisect"}
    | {"tools.dumps", "tools.emulator", "tools.terminal", "archive", ""},
    "backend": {"driver.backend", "export", "torch_interior"}
    | {"tools.dumps", "tools.summary", "tools.verify"},
    "": {"driver.backend", "driver.user_passes", "frontend", "tools.report", "archive"},
    "__main__": {"tools.cli"},
}
"""Which layers a layer may import besides itself; "" is `fusec/__init__.py`.

A layer is a folder of `fusec`, or a module or folder of `driver` and of `tools`.
"""

CORE = {"ir", "frontend", "passes", "codegen", "runtime", "driver"}
AROUND = {"archive", "export", "native", "tools"}
LOOSE = {"__init__", "__main__", "backend", "errors", "notation", "options", "processors"}
LOOSE |= {"torch_interior"}
LOOSE = {f"fusec/{name}.py" for name in LOOSE}
"""The compiler, what stands around it, and the modules that may stand at the root."""

LIBRARIES: dict[str, set[str]] = {
    "frontend": {"torch", "sympy"},
    "passes": {"networkx"},
    "torch_interior": {"torch"},
    "runtime": {"torch", "triton"},
    "archive": {"torch", "safetensors"},
    "backend": {"torch"},
    "driver": {"torch"},
    "export": {"torch"},
    "tools": {"torch"},
    "tools.report": {"torch", "jinja2"},
    "tools.cli": {"torch", "rich", "safetensors"},
}
"""Which layers may import what from outside the standard library; the others, nothing.

A part of `driver` or `tools` that has no row of its own has its folder's.
"""

PINNED = {
    "sympy": re.compile(r"fusec/frontend/(shapes|size_facts)\.py"),
    "numpy": re.compile(r"fusec/(tools/interpreter/\w+|tools/bisect/interpret)\.py"),
    "networkx": re.compile(
        r"fusec/(passes/(dag|fusion/fuse)|tools/(report/html/layout|emulator/decode))\.py"
    ),
    "triton": re.compile(r"fusec/runtime/kernels/triton_interior\.py"),
}
"""Libraries with one home. It may be part of a layer that may not import the library as a whole."""

INTERIOR = re.compile(r"fusec/(torch_interior|runtime/interior)\.py")
TREES = re.compile(r"fusec/runtime/calls/cuda_graphs\.py")
"""What takes torch's private names, and what takes those of its CUDA graph trees."""

WATCHED = {"torch", "triton", "networkx", "numpy", "sympy", "rich", "transformers"}
WATCHED |= {"jinja2", "safetensors"}


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, its path from the root, its syntax tree."""

    name: str
    path: str
    tree: ast.Module
    lines: int

    @property
    def layer(self) -> str:
        return layer_of(self.name)


def layer_of(name: str) -> str:
    """Return "ir" for "fusec.ir.expr", "driver.race" for "fusec.driver.race", "" for "fusec"."""
    parts = [*name.split("."), "", ""][1:3]
    return ".".join(filter(None, parts)) if parts[0] in ("driver", "tools") else parts[0]


@cache
def modules_of(root: Path) -> tuple[Module, ...]:
    modules = []
    for file in sorted((root / "fusec").rglob("*.py")):
        path = file.relative_to(root)
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        text = file.read_text()
        modules.append(Module(name, path.as_posix(), ast.parse(text), text.count("\n")))
    return tuple(modules)


@cache
def nodes_of(module: Module) -> tuple[ast.AST, ...]:
    """Return all nodes of a module's tree, in which most checks look."""
    return tuple(ast.walk(module.tree))


def imports_of(module: Module, *, local: bool = True) -> Iterator[tuple[str, int]]:
    """Yield what `module` imports as dotted names with their lines, inside functions if `local`.

    `from a import b` yields "a.b", whether b is a module or a name in one.
    """
    for node in nodes_of(module) if local else import_time_nodes(module.tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module.path}:{node.lineno}: imports are absolute"
            yield from ((f"{node.module}.{name.name}", node.lineno) for name in node.names)


def import_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the module is imported.

    That is all but the bodies of functions and what is under ``if TYPE_CHECKING``.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from import_time_nodes(node)


def starts_with(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


# The checks.


def layer_violations(root: Path) -> list[str]:
    """Imports between layers that `LAYERS` does not allow, and files in no layer."""
    modules = modules_of(root)
    layers = {module.layer for module in modules}
    found = [f"{m.path}: no layer {m.layer!r}" for m in modules if m.layer not in LAYERS]
    for module in modules:
        allowed = LAYERS.get(module.layer, set()) | {module.layer}
        for name, line in imports_of(module):
            if not starts_with(name, "fusec"):
                continue
            imported = layer_of(name)
            # `from fusec import __version__` takes a name, not a layer.
            folder = imported.split(".")[0]
            known = [layer for layer in (imported, folder) if layer in layers | set(LAYERS)]
            imported = known[0] if known else ""
            if imported not in allowed:
                found.append(f"{module.path}:{line}: {module.layer} imports {name}")
    return found


def library_violations(root: Path) -> list[str]:
    """Imports of libraries outside the layers, or the one home, that may use them."""
    found = []
    for module in modules_of(root):
        for name, line in imports_of(module):
            library = name.split(".")[0]
            home = next((h for p, h in PINNED.items() if starts_with(name, p)), None)
            if home is not None:
                allowed = bool(home.fullmatch(module.path))
            else:
                allowed = library not in WATCHED or library in libraries_of(module.layer)
            if not allowed:
                found.append(f"{module.path}:{line}: {module.layer} imports {name}")
    return found


def libraries_of(layer: str) -> set[str]:
    return LIBRARIES.get(layer, LIBRARIES.get(layer.split(".")[0], set()))


def tool_violations(root: Path) -> list[str]:
    """Imports by the compiler of what stands around it, and modules loose at the root."""
    found = [
        f"{module.path}:{line}: the compiler imports {name}"
        for module in modules_of(root)
        if module.layer.split(".")[0] in CORE
        for name, line in imports_of(module)
        if any(starts_with(name, f"fusec.{folder}") for folder in AROUND)
    ]
    loose = {m.path for m in modules_of(root) if m.path.count("/") == 1} - LOOSE
    return found + [f"{path}: loose at the root" for path in sorted(loose)]


def interior_violations(root: Path) -> list[str]:
    """Uses of torch's private names, imported or as attributes, outside the one module for them."""
    found = []
    for module in modules_of(root):
        if INTERIOR.fullmatch(module.path):
            continue
        used = [*imports_of(module), *attributes_of(module)]
        for name, line in used:
            library, *parts = name.split(".")
            private = library == "torch" and parts[:1] != ["ops"] and any(map(is_private, parts))
            trees = starts_with(name, "torch._inductor") and TREES.fullmatch(module.path)
            if private and not trees:
                found.append(f"{module.path}:{line}: {name}")
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def attributes_of(module: Module) -> Iterator[tuple[str, int]]:
    """Yield chains of attributes such as "torch.fx.Graph" with their lines, whole ones only."""
    inner = {id(n.value) for n in nodes_of(module) if isinstance(n, ast.Attribute)}
    for node in nodes_of(module):
        parts, first = [], node
        while isinstance(first, ast.Attribute):
            parts.append(first.attr)
            first = first.value
        if parts and isinstance(first, ast.Name) and id(node) not in inner:
            yield ".".join((first.id, *reversed(parts))), node.lineno


def circle_violations(root: Path) -> list[str]:
    """Circles of modules that import each other when they are imported.

    An import inside a function may look back at its own layer, as a node's `__str__` does that
    calls the printer; that it does not look up is for `layer_violations` to say.
    """
    modules = {module.name: module for module in modules_of(root)}
    graph = networkx.DiGraph()
    for module in modules.values():
        for name, _ in imports_of(module, local=False):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name:
                graph.add_edge(module.name, name)
    circles = [sorted(c) for c in networkx.strongly_connected_components(graph) if len(c) > 1]
    return [" <-> ".join(circle) for circle in sorted(circles)]


def ceiling_violations(root: Path) -> list[str]:
    """Files and functions that are too long to be read in one go."""
    found = []
    for module in modules_of(root):
        if module.lines > FILE_CEILING:
            found.append(f"{module.path}: {module.lines} lines")
        for node in nodes_of(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_CEILING:
                    found.append(f"{module.path}:{node.lineno}: {node.name}, {lines} lines")
    return found


TARGET_NAME = re.compile(r"cpu|cuda|gpu|hip|rocm|triton|cpp|sm_\d*\w*|gfx\w*")


def target_violations(root: Path) -> list[str]:
    """Questions which target code is made for, outside the one file that answers them."""
    return [
        f"{module.path}:{node.lineno}: {ast.unparse(node)[:60]}"
        for module in modules_of(root)
        if module.path != "fusec/codegen/targets.py"
        for node in nodes_of(module)
        if asks_for_target(node)
    ]


def asks_for_target(node: ast.AST) -> bool:
    """Whether `node` compares something named target with the name of one."""
    match node:
        case ast.Compare(left=left, comparators=others):
            sides = [left, *others]
            return any(map(names_target, sides)) and any(map(holds_target_name, sides))
        case ast.Call(func=ast.Attribute(value=asked, attr="startswith"), args=args):
            return names_target(asked) and any(map(holds_target_name, args))
        case ast.Match(subject=asked, cases=cases):
            return names_target(asked) and any(holds_target_name(c.pattern) for c in cases)
    return False


def names_target(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name):
            return name.endswith("target")
        case ast.Attribute(value=value, attr=name):
            return name.endswith("target") or names_target(value)
    return False


def holds_target_name(node: ast.AST) -> bool:
    return any(
        isinstance(inner, ast.Constant)
        and isinstance(inner.value, str)
        and TARGET_NAME.fullmatch(inner.value)
        for inner in ast.walk(node)
    )


STEP_KINDS = {"Def", "Kernel", "ForeachKernel", "RowLoop", "Extern", "Constant", "SizeMinimum"}
STEP_KINDS |= {"Line", "Step", "Call"}
STEP_QUESTIONS = 15


def step_violations(root: Path) -> list[str]:
    """Too many questions outside ``ir`` of what kind a line or a step is: it should say itself."""
    found = [
        f"{module.path}:{node.lineno}"
        for module in modules_of(root)
        if module.layer != "ir"
        for node in nodes_of(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and STEP_KINDS.intersection(n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name))
    ]
    return [" ".join(found)] if len(found) > STEP_QUESTIONS else []


def operation_violations(root: Path) -> list[str]:
    """Names of ATen's operations in passes, but for what docstrings say."""
    return [
        f"{module.path}:{node.lineno}: {node.value}"
        for module in modules_of(root)
        if module.layer == "passes"
        for node in nodes_of(module)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and "aten." in node.value
        and node not in docstrings(module.tree)
    ]


def table_violations(root: Path) -> list[str]:
    """Tables of ATen's operations outside the frontend: what they do is asked of definitions."""
    return [
        f"{module.path}:{node.lineno}: {', '.join(sorted(names))}"
        for module in modules_of(root)
        if module.layer.split(".")[0] in CORE - {"frontend"}
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Set | ast.Tuple | ast.List | ast.Dict | ast.MatchOr)
        and len(names := set(re.findall(r"\baten\.(\w+)", ast.unparse(node)))) > 1
    ]


def name_violations(root: Path) -> list[str]:
    """Classes and type aliases of the core that share their name with another one."""
    homes: dict[str, list[str]] = {}
    for module in modules_of(root):
        if module.name.split(".")[1:2] and module.name.split(".")[1] in CORE:
            for name in _type_names(module.tree):
                homes.setdefault(name, []).append(module.path)
    return [f"{name}: {' and '.join(paths)}" for name, paths in homes.items() if len(paths) > 1]


def _type_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module's classes, and of its aliases, which are spelled like classes."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp()):
                if name[:1].isupper() and not name.isupper():
                    yield name


def docstrings(tree: ast.AST) -> list[ast.expr]:
    """Return the strings that stand as statements: of modules, classes, functions, attributes."""
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]


CHECKS = (
    layer_violations,
    tool_violations,
    library_violations,
    interior_violations,
    circle_violations,
    ceiling_violations,
    target_violations,
    step_violations,
    operation_violations,
    table_violations,
    name_violations,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_fusec_has_none(check: Callable[[Path], list[str]]) -> None:
    assert len(modules_of(ROOT)) > 5
    assert check(ROOT) == []


LONG_FUNCTION = "def long():\n" + "    x = 1\n" * FUNCTION_CEILING
LONG_FILE = "x = 1\n" * (FILE_CEILING + 1)


@pytest.mark.parametrize(
    ("check", "files"),
    [
        (layer_violations, {"ir/expr.py": "from fusec.options import Options"}),
        (layer_violations, {"passes/fuse.py": "from fusec.frontend.capture import capture"}),
        (layer_violations, {"frontend/capture.py": "import fusec.passes.fuse"}),
        (
            layer_violations,
            {"passes/fuse.py": "from fusec.codegen import lower", "codegen/a.py": ""},
        ),
        (layer_violations, {"runtime/cache.py": "from fusec import ir", "ir/expr.py": ""}),
        (layer_violations, {"runtime/cache.py": "def f():\n    from fusec.ir import expr"}),
        (layer_violations, {"codegen/a.py": "from fusec.driver.pipeline import compile_graph"}),
        (layer_violations, {"errors.py": "from fusec import __version__"}),
        (layer_violations, {"utils.py": ""}),
        (layer_violations, {"driver/race.py": "from fusec.driver import backend"}),
        (layer_violations, {"tools/report/a.py": "import fusec.tools.cli.run"}),
        (tool_violations, {"driver/a.py": "from fusec.tools.report import explain"}),
        (tool_violations, {"runtime/a.py": "def f():\n    from fusec import export"}),
        (tool_violations, {"race.py": ""}),
        (library_violations, {"ir/expr.py": "import torch"}),
        (library_violations, {"ir/graph.py": "import networkx as nx"}),
        (library_violations, {"ir/graph.py": "from numpy.typing import NDArray"}),
        (library_violations, {"passes/fuse.py": "from torch import fx"}),
        (library_violations, {"passes/unify.py": "import networkx"}),
        (library_violations, {"codegen/cpp.py": "import torch"}),
        (library_violations, {"frontend/views.py": "import sympy"}),
        (library_violations, {"options.py": "import torch"}),
        (library_violations, {"runtime/triton_kernel.py": "from triton.runtime import jit"}),
        (interior_violations, {"driver/backend.py": "import torch._inductor.config"}),
        (interior_violations, {"runtime/x.py": "from torch import _inductor"}),
        (interior_violations, {"driver/backend.py": "import torch\ntorch._inductor.config.x = 1"}),
        (interior_violations, {"driver/backend.py": "from torch._dynamo.backends import common"}),
        (interior_violations, {"frontend/a.py": "from torch.utils import _pytree"}),
        (interior_violations, {"runtime/calls/cuda_graphs.py": "import torch._guards"}),
        (circle_violations, {"ir/a.py": "import fusec.ir.b", "ir/b.py": "from fusec.ir import a"}),
        (circle_violations, {"ir/__init__.py": "import fusec.ir.a", "ir/a.py": "import fusec.ir"}),
        (circle_violations, {"a.py": "if 1:\n  import fusec.b", "b.py": "import fusec.a"}),
        (name_violations, {"ir/a.py": "class Call: ...", "passes/b.py": "class Call: ..."}),
        (name_violations, {"ir/a.py": "class Cut: ...", "ir/b.py": "Cut: TypeAlias = int"}),
        (name_violations, {"ir/a.py": "Rule = Callable[[int], int]", "ir/b.py": "class Rule: ..."}),
        (ceiling_violations, {"ir/a.py": LONG_FILE}),
        (ceiling_violations, {"ir/a.py": LONG_FUNCTION}),
        (target_violations, {"passes/a.py": "def f(target): return target == 'sm_90'"}),
        (target_violations, {"passes/a.py": "def f(o): return o.target.name in ('cpu', 'gpu')"}),
        (target_violations, {"passes/a.py": "def f(target): return target.startswith('sm_')"}),
        (target_violations, {"a.py": "match target:\n  case 'cpu': pass"}),
        (step_violations, {"passes/a.py": "isinstance(x, Def | Size)\n" * (STEP_QUESTIONS + 1)}),
        (step_violations, {"a.py": "isinstance(x, (str, Kernel))\n" * (STEP_QUESTIONS + 1)}),
        (operation_violations, {"passes/a.py": "def f(call): return call.target == 'aten.mm'"}),
        (table_violations, {"driver/a.py": "SAME = {aten.view.default, aten.alias.default}"}),
        (table_violations, {"runtime/a.py": "T = {torch.ops.aten.mm: 1, torch.ops.aten.bmm: 2}"}),
    ],
)
def test_a_planted_violation_is_found(
    tmp_path: Path, check: Callable[[Path], list[str]], files: dict[str, str]
) -> None:
    for name, text in files.items():
        file = tmp_path / "fusec" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert len(check(tmp_path)) == 1


def test_what_is_allowed_is_not_reported(tmp_path: Path) -> None:
    files = {
        "__init__.py": "def __getattr__(name):\n    from fusec.tools import report\n",
        "errors.py": "import difflib",
        "tools/interpreter/graph.py": "import numpy as np\nfrom fusec.errors import InvalidIR",
        "ir/expr.py": "def f():\n    from fusec.ir import text",
        "ir/text.py": "import fusec.ir.expr",
        "ir/index.py": "import fusec.ir.atoms",
        "ir/atoms.py": "if TYPE_CHECKING:\n    from fusec.ir.index import Index",
        "passes/dag.py": "import networkx\nfrom fusec.ir import graph",
        "passes/a.py": "'Of aten.mm.'\n" + "isinstance(x, Kernel)\n" * STEP_QUESTIONS,
        "passes/b.py": "isinstance(x, Size)",
        "ir/verify.py": "isinstance(x, Def)",
        "frontend/shapes.py": "import sympy, torch",
        "frontend/call.py": "def f(node): return node.target == 'output'",
        "runtime/calls/cuda_graphs.py": "import torch._inductor.cudagraph_trees",
        "runtime/kernels/triton_interior.py": "import triton.backends",
        "torch_interior.py": "from torch._ops import OpOverload",
        "frontend/tables.py": "T = (aten.mm.default, aten.bmm.default)",
        "driver/partition.py": "T = (aten.mm.default, aten.mm.out)",
        "frontend/names.py": "import torch\ntorch.ops.aten._to_copy, torch.__version__",
        "codegen/targets.py": "def f(target): return target == 'cpu'",
        "tools/report/__init__.py": "import torch, fusec.driver.compiler",
        "tools/cli/__init__.py": "from fusec import __version__",
    }
    for name, text in files.items():
        file = tmp_path / "fusec" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert [violation for check in CHECKS for violation in check(tmp_path)] == []


# What must not be in any file.

# In two pieces, because this file is searched, too.
MACHINE_PATHS = ("/" + "work/", "/" + "root/")


def tracked_files() -> list[Path]:
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name]


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    paths = re.compile(rf"(?<![\w.~-])({'|'.join(map(re.escape, MACHINE_PATHS))})")
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in tracked_files()
        if file.is_file() and file.suffix not in (".png", ".so")
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        if paths.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("name", "torch", "triton"),
    (
        ("constraints.txt", "2.13.0", "3.7.1"),
        ("constraints-newest.txt", "2.15.0", "3.9.0"),
        ("constraints-oldest.txt", "2.11.0", "3.6.0"),
    ),
)
def test_constraints_are_exact_versions_and_nothing_else(
    name: str, torch: str, triton: str
) -> None:
    lines = (ROOT / name).read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    pattern = re.compile(r'[\w.-]+==[\w.]+( ; python_version >= "3\.\d+")?')
    assert [pin for pin in pins if not pattern.fullmatch(pin)] == []
    assert f"torch=={torch}" in pins
    assert f"triton=={triton}" in pins
