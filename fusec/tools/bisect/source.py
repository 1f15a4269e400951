"""Print an excerpt as a file of plain torch that shows the fault whenever it is run.

Its exit code is 1, or a signal, while the fault is there, and 0 once it is mended. It ends in one
of three checks: results differ, the compile or a launch fails, fusec is slower than eager.

The JSON form of a ``Finding``, the result of a bisection, schema 1, is stable: fields are added,
never renamed or removed::

    {"schema": 1, "found": true, "kind": "wrong", "crash" or "slower",
     "graph", "kernel", "stage", "op", "line", "said", "merge", "helps": [option],
     "source": the file's text, "unshown", "values": [name], "library", "sentence"}

Where nothing is found it is ``{"schema": 1, "found": false}``.
"""

from __future__ import annotations

import itertools
import math
import platform
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fusec import __version__
from fusec.tools.bisect.excerpt import Excerpt, Input, Line, Ref, TensorType, rewritten
from fusec.tools.bisect.smaller import dense
from fusec.tools.terminal import Report

WRONG, CRASH, SLOWER = "wrong", "crash", "slower"
_TITLE_LINES = 3
_LEAST_LOSS_US, _LEAST_RATIO = 200.0, 1.25
"""The loss that a reduced program must show is at most this: more than a graph call costs."""
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault that a file shows.

    Attributes:
        kind: WRONG, CRASH or SLOWER.
        title: of the file, one sentence.
        options: of the compile.
        calls: for SLOWER, the calls per timing.
        lost_us: how much longer than eager a call takes in the user's program.
        ratio: of a call's time in the user's program to eager's.
        saved: its inputs are the user's, loaded from a file of the same name with suffix .pt.
    """

    kind: str
    title: str = "A fault of fusec."
    options: Mapping[str, Any] = field(default_factory=dict)
    calls: int = 1
    lost_us: float = 0.0
    ratio: float = 1.0
    saved: bool = False


# -- the finding -----------------------------------------------------------------------------------

_VERB = {
    WRONG: "computes something else than eager",
    CRASH: "fails",
    SLOWER: "is slower than eager",
}


@dataclass(frozen=True, slots=True)
class Finding(Report):
    """The fault that a bisection has found.

    Attributes:
        graph, kernel: their names in the user's program.
        stage: the rewrite that is wrong or fails, as ``fusec dump --stage`` has it, or "launch".
        op, line: the operation and the user's source line.
        said: the difference, the exception, the times.
        merge: the fusion decision that introduces the fault, or "".
        helps: options under which the fault is gone.
        source: the file's text.
        unshown: no file shows the fault by itself.
        library: the call in the place of an eager kernel, where it is slower than that, or "".
        values: the tensors that are saved beside the file for it to load; most files draw theirs.
    """

    kind: str
    graph: str
    kernel: str = ""
    stage: str = ""
    op: str = ""
    line: str = ""
    said: str = ""
    merge: str = ""
    helps: tuple[str, ...] = ()
    source: str = ""
    unshown: bool = False
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    library: str = ""

    @property
    def title(self) -> str:
        """One sentence, for the top of the file."""
        return f"fusec {_VERB[self.kind]}: {_first_line(self.said)}"

    @property
    def sentence(self) -> str:
        """What to put into a bug report."""
        parts = [
            f"fusec {__version__} (torch {torch.__version__}, {_device()}) {_VERB[self.kind]}",
            *([f"at {self.op}"] if self.op else []),
            *([f"in {self.library}"] if self.library else []),
            *([f"in stage {self.stage!r}"] if self.stage else []),
            *([f"with the merge of {self.merge}"] if self.merge else []),
        ]
        return f"{' '.join(parts)}: {_first_line(self.said)}"

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(replace(self, values={})) | {"values": sorted(self.values)}
        return {"found": True, **fields, "sentence": self.sentence}

    def text(self, *, whole: bool = False) -> str:
        rows = {
            "graph": self.graph,
            "eager kernel" if self.library else "kernel": self.kernel,
            "library": self.library,
            "stage": self.stage,
            "merge": self.merge,
            "operation": self.op,
            "line": self.line,
            "seen": self.said,
            "gone with": ", ".join(self.helps),
        }
        width = max(map(len, rows))
        table = [f"  {name:<{width}}  {_indented(t, width)}" for name, t in rows.items() if t]
        return "\n".join([f"fusec {_VERB[self.kind]}", *table])


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _indented(text: str, width: int) -> str:
    return text.strip().replace("\n", "\n" + " " * (width + 4))


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


# -- the file --------------------------------------------------------------------------------------


def as_file(excerpt: Excerpt, fault: Fault) -> str:
    """Return the text of a file that shows a fault by itself."""
    inputs = _saved(excerpt) if fault.saved else _inputs(_short_names(excerpt))
    excerpt = _short_names(excerpt)
    parts = (_head(excerpt, fault), _function(excerpt), inputs, _ending(excerpt, fault))
    return "\n\n\n".join("\n".join(part) for part in parts) + "\n"


def functions(excerpt: Excerpt) -> dict[str, Any]:
    """Return the namespace of a file's functions: ``f`` and ``inputs``."""
    excerpt = _short_names(excerpt)
    parts = (*_head(excerpt, Fault(CRASH)), *_function(excerpt), *_inputs(excerpt))
    made: dict[str, Any] = {}
    exec(compile("\n".join(parts), "<bisect>", "exec"), made)
    return made


def plain_name(target: str) -> str:
    """Return "tanh" for "torch.ops.aten.tanh.default", "linear" for "torch._C._nn.linear"."""
    if target.startswith("torch.ops."):
        return target.split(".")[3]
    return target.rpartition(".")[2]


def _head(excerpt: Excerpt, fault: Fault) -> list[str]:
    modules = {"torch"} | ({"statistics", "sys", "time"} if fault.kind == SLOWER else set())
    targets = [line.target for line in excerpt.lines if _operator(line) is None]
    modules |= {"operator"} if any(t.startswith("_operator.") for t in targets) else set()
    modules |= {"math"} if any(t.startswith("math.") for t in targets) else set()
    own = sorted(modules - {"torch"})
    imports = [f"import {name}" for name in own]
    imports += ["from pathlib import Path"] if fault.saved else []
    imports += [*([""] if imports else []), "import torch"]
    title = textwrap.wrap(fault.title.replace("\\", "/").replace('"', "'"), 96)
    title = [*title[:_TITLE_LINES]]
    said = [f'"""{title[0]}', *title[1:]]
    if len(said) == 1:
        return [f'{said[0]}"""', "", *imports]
    return [*said, '"""', "", *imports]


# -- the function ----------------------------------------------------------------------------------


def _function(excerpt: Excerpt) -> list[str]:
    names = ", ".join(one.name for one in excerpt.inputs)
    before = ("", *(one.where for one in excerpt.lines))
    body = [
        t for one, last in zip(excerpt.lines, before, strict=False) for t in _printed(one, last)
    ]
    several = len(excerpt.results) > 1 or excerpt.trains
    results = ", ".join(excerpt.results) + ("," if len(excerpt.results) == 1 and several else "")
    return [f"def f({names}):", *(f"    {line}" for line in body), f"    return {results}"]


def _short_names(excerpt: Excerpt) -> Excerpt:
    """Return an excerpt with its inputs renamed to a, b, c..., without the names of lines."""
    taken = {line.name for line in excerpt.lines}
    letters = itertools.chain("abcdeghijklmnopqrstuvwxyz", (f"x{n}" for n in itertools.count()))
    free = (name for name in letters if name not in taken)
    new = {one.name: name for one, name in zip(excerpt.inputs, free, strict=False)}

    def change(value: Any) -> Any:
        return Ref(new[value.name]) if isinstance(value, Ref) and value.name in new else value

    return replace(
        excerpt,
        inputs=tuple(replace(one, name=new[one.name]) for one in excerpt.inputs),
        lines=tuple(rewritten(line, change) for line in excerpt.lines),
        results=tuple(new.get(name, name) for name in excerpt.results),
    )


def _printed(line: Line, before: str) -> Iterator[str]:
    """Yield a line's text, after a comment with the user's line unless that is ``before``."""
    if line.where and line.where != before:
        yield f"# {line.where}"
    yield f"{line.name} = {_operator(line) or _call(line)}"


def _operator(line: Line) -> str | None:
    """Return a line in operator syntax, such as ``x[0]``; None if it is printed as a call."""
    if line.target == "_operator.getitem":
        return f"{_shown(line.args[0])}[{_index(line.args[1])}]"
    sign = _SIGNS.get(line.target)
    return None if sign is None else f"{_shown(line.args[0])} {sign} {_shown(line.args[1])}"


_SIGNS = {
    f"_operator.{name}": sign
    for name, sign in {
        "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%",
        "pow": "**", "matmul": "@", "and_": "&", "or_": "|", "eq": "==", "ne": "!=", "lt": "<",
        "le": "<=", "gt": ">", "ge": ">=",
    }.items()
}  # fmt: skip


def _index(value: Any) -> str:
    if isinstance(value, tuple) and value:
        return ", ".join(map(_index, value)) + ("," if len(value) == 1 else "")
    if isinstance(value, slice):
        bounds = [("" if v is None else _shown(v)) for v in (value.start, value.stop)]
        return ":".join(bounds) + ("" if value.step is None else f":{_shown(value.step)}")
    return "..." if value is ... else _shown(value)


def _call(line: Line) -> str:
    args = list(map(_shown, line.args))
    named = [f"{name}={_shown(value)}" for name, value in line.kwargs.items()]
    if line.target.startswith("."):
        return f"{args[0]}{line.target}({', '.join([*args[1:], *named])})"
    target = line.target.removeprefix("_") if line.target.startswith("_op") else line.target
    return f"{target}({', '.join([*args, *named])})"


def _shown(value: Any) -> str:
    match value:
        case Ref():
            return value.name
        case tuple():
            return f"({', '.join(map(_shown, value))}{',' if len(value) == 1 else ''})"
        case list():
            return f"[{', '.join(map(_shown, value))}]"
        case dict():
            return "{" + ", ".join(f"{k!r}: {_shown(v)}" for k, v in value.items()) + "}"
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case torch.device():
            return f'"{value}"'
        case torch.dtype() | torch.memory_format() | torch.layout():
            return str(value)
        case slice():
            return f"slice({_shown(value.start)}, {_shown(value.stop)}, {_shown(value.step)})"
        case str():
            return f'"{value}"' if value.isidentifier() else repr(value)
        case _:
            return repr(value)


# -- its inputs ------------------------------------------------------------------------------------


def _inputs(excerpt: Excerpt) -> list[str]:
    rows = [f"        {_drawn(one)},  # {one.name}" for one in excerpt.inputs]
    return ["def inputs():", "    torch.manual_seed(0)", "    return [", *rows, "    ]"]


def _saved(excerpt: Excerpt) -> list[str]:
    rows = [
        f"        {one.type},"
        if isinstance(one.type, int)
        else f'        saved["{one.name}"].clone(){".requires_grad_()" if one.trained else ""},'
        for one in excerpt.inputs
    ]
    load = '    saved = torch.load(Path(__file__).with_suffix(".pt"))'
    return ["def inputs():", load, "    return [", *rows, "    ]"]


def _drawn(given: Input) -> str:
    kind = given.type
    if isinstance(kind, int):
        return str(kind)
    plain = kind.strides == dense(kind.shape) or 0 in kind.shape
    shape = kind.shape
    if not plain:  # the elements that the strides reach
        reached = sum((n - 1) * s for n, s in zip(kind.shape, kind.strides, strict=True))
        shape = (reached + 1,)
    text = _random(given, kind, ", ".join(map(str, shape)))
    if not plain:
        text += f".as_strided({kind.shape}, {kind.strides})"
    return f"{text}.requires_grad_()" if given.trained else text


def _random(given: Input, kind: TensorType, extents: str) -> str:
    more = "" if kind.dtype is torch.float32 else f", dtype={kind.dtype}"
    more += "" if kind.device == "cpu" else f', device="{kind.device}"'
    if kind.dtype.is_floating_point or kind.dtype.is_complex:
        shape = extents or "()"
        draw = "rand" if given.positive else "randn"
        if kind.dtype.itemsize == 1:  # no generator draws 8-bit floats
            return f"torch.{draw}({shape}).to({kind.dtype})"
        return f"torch.{draw}({shape}{more})"
    shape = f"({extents}{',' * (extents.isdigit())})"
    most = min(given.most, 2) if kind.dtype is torch.bool else given.most
    return f"torch.randint(0, {most}, {shape}{more})"


# -- how it ends -----------------------------------------------------------------------------------


def _ending(excerpt: Excerpt, fault: Fault) -> list[str]:
    options = dict(fault.options) | ({} if fault.kind == SLOWER else {"strict": True})
    dynamic = ", dynamic=True" if excerpt.dynamic else ""
    settings = f", options={_options(options)}" if options else ""
    compiled = f'torch.compile(f, backend="fusec"{dynamic}{settings})'
    run = _TRAINING.splitlines() if excerpt.trains else []
    ours, theirs = (
        ("run(compiled)", "run(f)") if excerpt.trains else ("compiled(*inputs())", "f(*inputs())")
    )
    match fault.kind:
        case "wrong":
            tolerance = f"{_tolerance(excerpt):g}"
            return [
                *run,
                f"expected = {theirs}",
                f"compiled = {compiled}",
                f'close = {{"rtol": {tolerance}, "atol": {tolerance}, "equal_nan": True}}',
                f"torch.testing.assert_close({ours}, expected, **close)",
                'print("fusec agrees with eager")',
            ]
        case "crash":
            return [
                *run,
                f"{theirs}  # eager can",
                f"compiled = {compiled}",
                ours,
                'print("fusec runs it")',
            ]
        case _:
            return [*run, f"compiled = {compiled}", *_timing(excerpt, fault)]


def _options(options: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f'"{name}": {_shown(value)}' for name, value in options.items()) + "}"


_TRAINING = """\
def run(call):
    args = inputs()
    results = call(*args)
    roots = [r for r in results if r.requires_grad]
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    ways = [torch.randn_like(r) for r in roots]
    return *results, *torch.autograd.grad(roots, leaves, ways, allow_unused=True)


"""
_TIMING = """\
eager = torch.compile(f, backend="eager")  # so that Dynamo costs both the same
{args}ways = {{"eager": lambda: {eager}, "fusec": lambda: {fusec}}}
times = {{name: [] for name in ways}}
for _ in range(25):  # in turn, so that what disturbs one disturbs the other
    for name, call in ways.items():
        {wait}start = time.perf_counter()
        {work}
        {wait}times[name].append((time.perf_counter() - start) * {scale:g})
theirs, ours = (statistics.median(spent[5:]) for spent in times.values())
print(f"eager {{theirs:.1f}} us, fusec {{ours:.1f}} us")
lost = ours > {ratio:.3g} * theirs
sys.exit(lost and ours - theirs > {least_us:.1f})
"""


def _timing(excerpt: Excerpt, fault: Fault) -> list[str]:
    on_gpu = any(isinstance(i.type, TensorType) and "cuda" in i.type.device for i in excerpt.inputs)
    trains, calls = excerpt.trains, fault.calls
    return _TIMING.format(
        args="" if trains else "args = inputs()\n",
        eager="run(eager)" if trains else "eager(*args)",
        fusec="run(compiled)" if trains else "compiled(*args)",
        wait="torch.cuda.synchronize()\n        " if on_gpu else "",
        work="call()" if calls == 1 else f"for _ in range({calls}):\n            call()",
        scale=1e6 / calls,
        ratio=min((1 + fault.ratio) / 2, _LEAST_RATIO),
        least_us=min(fault.lost_us / 2, _LEAST_LOSS_US),
    ).splitlines()


def _tolerance(excerpt: Excerpt) -> float:
    kinds = [kind for kind in excerpt.types.values() if isinstance(kind, TensorType)]
    floats = [kind.dtype for kind in kinds if kind.dtype.is_floating_point]
    return max((_TOLERANCE.get(dtype, 1e-3) for dtype in floats), default=1e-3)
