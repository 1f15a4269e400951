"""Random PyTorch programs: views, writes in place, mixed types, reductions, products, other sizes.

A `Program` is text: inputs, lines of Python, and what is returned. ``draw(seed)`` adds one random
line after another. A line is kept if eager accepts it, if its values are well conditioned (eager
is near fp64), and if nothing that decides between two branches lies near the border, so that a
difference of rounding is never a failure. What remains is compared by ``tests/support.py``.

A program that fails is shrunk by leaving out and short-circuiting lines, and printed as a file that
runs on its own; see ``python -m tests.fuzz``.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported

from fusec.tools.bisect.smaller import shrink
from tests.support import HALF, LAYOUTS, TOLERANCE, check, copy_inputs, values, with_layout

EXTENTS = {
    "a": (4, 7), "b": (6, 9), "c": (17, 12), "d": (1, 1), "e": (130, 67), "f": (2, 3), "g": (8, 6),
    "h": (16, 12),
}  # fmt: skip
"""Extents by letter, and their other values in programs of dynamic sizes."""
MOST_ELEMENTS = 40_000
MOST_DIMS = 5
ERROR = 0.02
"""Root-mean-square error of eager against fp64, relative, at which a line is ill conditioned."""
MAGNIFIED = 8
"""Times eager's own error by which a result may be off where rounding errors are magnified."""


@dataclass(frozen=True)
class Input:
    """A tensor by letters of its extents, type and layout (`with_layout`)."""

    dims: str
    dtype: str
    layout: str = "contiguous"


@dataclass(frozen=True)
class Program:
    """A function as text; ``a0, a1, ...`` are its inputs."""

    seed: int
    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    train: bool = False
    dynamic: bool = False

    def source(self) -> str:
        """Return the function's definition."""
        names = ", ".join(f"a{k}" for k in range(len(self.inputs)))
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def program({names}):\n{body}    return {', '.join(self.outputs)},\n"

    def function(self) -> Callable[..., tuple[Any, ...]]:
        """Return the function itself."""
        return _defined(self.source(), self.seed)

    def exact_source(self) -> str:
        """Return the function for inputs in fp64: casts to less round, and what follows is fp64."""
        rounded = re.sub(r"\.(half|bfloat16)\(\)", r".\1().double()", self.source())
        return rounded.replace(".float()", ".double()")

    def tensors(self, other: bool = False) -> tuple[Tensor, ...]:
        """Return the inputs, with the other sizes if asked."""
        return tuple(tensor_of(one, self.seed + k, other) for k, one in enumerate(self.inputs))

    def sizes(self) -> tuple[tuple[Tensor, ...], ...]:
        """Return the inputs of each call of a comparison."""
        return (self.tensors(), self.tensors(other=True)) if self.dynamic else (self.tensors(),)

    def tolerance(self) -> float | None:
        """Return the tolerance of the loosest type that the program uses, None if it is f32."""
        used = self.source().replace(".half()", "float16") + "".join(i.dtype for i in self.inputs)
        loose = [TOLERANCE[t] for t in HALF if str(t).removeprefix("torch.") in used]
        if "float64" in used:
            loose.append(TOLERANCE[torch.float32])
        return max(loose, default=None)


def _defined(source: str, seed: int) -> Callable[..., tuple[Any, ...]]:
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(compile(source, f"<program {seed}>", "exec"), scope)
    made: Callable[..., tuple[Any, ...]] = scope["program"]
    return made


def tensor_of(one: Input, seed: int, other: bool = False) -> Tensor:
    """Return the values of an input: the same for the same seed and sizes."""
    shape = [EXTENTS[letter][other] for letter in one.dims]
    return with_layout(values(*shape, dtype=getattr(torch, one.dtype), seed=seed), one.layout)


# -- lines -----------------------------------------------------------------------------------------

# {x} and {y} are earlier values, {d} and {e} dimensions of x, {n} a small number, {k} a constant.
# Behind "|" stands what must not be near zero; lines that begin with "!" write in place.
POINTWISE = (
    "torch.tanh({x})", "torch.sigmoid({x})", "F.gelu({x})", "F.silu({x})", "-{x}", "torch.sin({x})",
    "F.gelu({x}, approximate='tanh')", "{x} * {k} + 1", "torch.exp(-{x}.abs())", "{x} ** 2",
    "({x} * {x} + 1).rsqrt()", "torch.log1p({x}.abs())", "F.softplus({x})", "torch.erf({x})",
    "torch.relu({x}) | {x}", "{x}.clamp(-{k}, 0.75) | ({x} + {k}) * ({x} - 0.75)",
    "F.leaky_relu({x}, 0.1) | {x}", "F.hardswish({x}) | ({x} + 3) * ({x} - 3)", "{x}.abs() | {x}",
    "torch.sign({x}) | {x}", "{x}.floor() | {x} - {x}.round()", "torch.reciprocal({x}.abs() + 1)",
    "torch.where({x} > 0, {x}, {x} * 0.25) | {x}", "torch.logical_not({x})",
    "torch.nan_to_num({x})",
)  # fmt: skip
BINARY = (
    "{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} / ({y}.abs() + 1)",
    "torch.atan2({x}, {y}.abs() + 1)", "torch.maximum({x}, {y}) | {x} - {y}",
    "torch.minimum({x}, {y}) | {x} - {y}", "torch.where({y} > 0, {x}, {k}) | {y}",
    "{x} > {y} | {x} - {y}", "torch.lerp({x}, {y}, {k})", "torch.addcmul({x}, {x}, {y}, value={k})",
    "{x}.masked_fill({y} > {k}, -1.0) | {y} - {k}",
    "({x} > 0) & ({y} > 0) | torch.cat(({x}.flatten(), {y}.flatten()))",
    "torch.remainder({x}, {y}.abs() + 2) | {x} - ({y}.abs() + 2) * ({x} / ({y}.abs() + 2)).round()",
)  # fmt: skip
VIEWS = (
    "{x}.transpose({d}, {e})", "{x}.flatten({d}, min({d} + 1, {x}.dim() - 1))",
    "{x}.unsqueeze({d})", "{x}.unflatten({d}, (2, -1))", "{x}.narrow({d}, 1, {x}.shape[{d}] - 2)",
    "{x}.flip({d})", "{x}.select({d}, {x}.shape[{d}] // 2)", "{x}[..., ::2]", "{x}[..., {n}:]",
    "{x}[{n}:-1]", "{x}.roll({n}, {d})", "{x}.expand(2, *{x}.shape)",
    "{x}.repeat_interleave(2, {d})", "{x}.unfold({d}, 2, 1)", "{x}.movedim({d}, {e})",
    "{x}.diagonal()", "torch.tril({x})", "F.pad({x}, ({n}, 2), value=0.5)", "F.pad({x}, (-1, {n}))",
    "{x}.squeeze({d})", "{x}.repeat(2, *([1] * ({x}.dim() - 1)))", "torch.triu({x}, {n})",
    "{x}.contiguous()", "{x}.clone()", "{x}.chunk(2, {d})[-1]", "{x}.T.reshape(-1)", "{x}.detach()",
)  # fmt: skip
JOINS = (
    "torch.cat(({x}, {y}), {d})", "torch.stack(({x}, {x} * {k}), {d})",
    "torch.cat(({x}, {x}.flip({d})), {d})", "{x} @ {y}.to({x}.dtype)",
    "{x} @ {y}.to({x}.dtype).transpose(-1, -2)", "{x}.flatten() @ {y}.flatten()",
    "torch.einsum('...ij,...kj->...ik', {x}, {y}.to({x}.dtype))",
    "F.linear({x}, {x}.flatten(0, -2))", "{x} @ {x}.transpose(-1, -2) * 0.1",
)  # fmt: skip
REDUCTIONS = (
    "{x}.sum({d})", "{x}.sum({d}, keepdim=True)", "{x}.mean({d}, keepdim=True)", "{x}.mean()",
    "{x}.mean({d})", "{x}.var({d})", "{x}.std({d}, keepdim=True)",
    "torch.logsumexp({x}, {d})", "{x}.amax({d}, keepdim=True) | gap({x}, {d})",
    "{x}.amin({d}) | gap({x}, {d})", "{x}.norm()",
    "{x}.sum(({d}, {e}))", "{x}.mean(({d}, {e}), keepdim=True)", "{x}.prod({d}) * 0.1",
    "{x}.argmax({d}) | gap({x}, {d})", "({x} > 0).any({d}) | {x}", "({x} > 0).sum({d}) | {x}",
    "torch.var_mean({x}, {d})[0]", "{x}.cumsum({d})", "{x}.max({d})[0] | gap({x}, {d})",
    "torch.linalg.vector_norm({x}, dim={d}, keepdim=True)", "{x}.float().sum()",
)  # fmt: skip
NORMS = (
    "torch.softmax({x}, {d})", "torch.log_softmax({x}, {d})", "F.layer_norm({x}, {x}.shape[-1:])",
    "F.layer_norm({x}, {x}.shape[-2:])", "F.normalize({x}, dim={d})",
    "{x} - {x}.mean({d}, keepdim=True)",
    "{x} * torch.rsqrt({x}.float().pow(2).mean(-1, keepdim=True) + 1e-5).to({x})",
    "F.glu({x}, {d})",
    "torch.softmax({x}.masked_fill(torch.ones_like({x}).bool().triu(1), float('-inf')), -1)",
)  # fmt: skip
CASTS = (
    "{x}.float()", "{x}.bfloat16()", "{x}.half()", "{x}.double()",
    "{x} * torch.ones((), dtype=torch.float64)",
    "({x} * 4).to(torch.int32) | {x} * 4 - ({x} * 4).round()",
    "{x}.to(torch.int64) | {x} - {x}.round()",
)  # fmt: skip
INDEXING = (
    "{x}[torch.arange({x}.shape[0]) // 2]",
    "{x}.index_select({d}, torch.arange({x}.shape[{d}]).flip(0))",
    "{x}.gather({d}, torch.zeros_like({x}, dtype=torch.int64))", "{x}[:, None]",
    "{x}[None, ..., 0]", "torch.arange({x}.shape[-1]) / 64 * {x}",
    "torch.ones_like({x}) * {k}",
    "torch.zeros({x}.shape) + {y}",
)  # fmt: skip
IN_PLACE = (
    "!{x}.mul_({k})", "!{x}.add_({y})", "!{x}.select({d}, 0).add_(1)", "!{x}[..., {n}:].mul_({k})",
    "!{x}.copy_({y})", "!{x}[{n}:] = {k}", "!{x}.transpose({d}, {e}).add_({y})", "!{x}.zero_()",
    "!{x}[..., 0] = {x}[..., -1]", "!{x}.narrow({d}, 0, 1).copy_({y})",
    "!{x}.clamp_(-1, {k}) | ({x} + 1) * ({x} - {k})", "!{x}.fill_({k})", "!{x}.flatten().sub_(1)",
    "!{x}.masked_fill_({y} > 0, {k}) | {y}", "!{x}.t_()", "!{x}.unsqueeze_(0)", "!{x}[::2] += {k}",
    "!{x}.view(-1)[{n}:].exp_()", "!{x}.diagonal().fill_({k})",
)  # fmt: skip
KINDS = (
    POINTWISE, POINTWISE, BINARY, BINARY, VIEWS, VIEWS, VIEWS, JOINS, REDUCTIONS, REDUCTIONS, NORMS,
    CASTS, INDEXING, IN_PLACE, IN_PLACE,
)  # fmt: skip

PAIRS = (
    "torch.stack(({x}.sin(), {x}.cos()), -1)", "torch.stack(({x}, {x} * {k}), -1).flatten(-2)",
    "torch.stack(({x}.sin(), {x}.cos()), -1) * {x}.sum(-1, keepdim=True)[..., None]",
    "torch.stack(({x}, {x} * {k}), -1) / ({y}.abs().sum(-1, keepdim=True)[..., None] + 1)",
    "{x}.unflatten(-1, (-1, 2))", "{x}.unflatten(-1, (2, -1))", "{x}[..., 1::2] * {x}[..., ::2]",
    "torch.cat((-{x}[..., 1::2], {x}[..., ::2]), -1)", "torch.stack(({x}, {x} + {k}), {d})",
    "torch.cat((-{x}[..., {x}.shape[-1] // 2:], {x}[..., :{x}.shape[-1] // 2]), -1)",
    "torch.view_as_real(torch.complex({x}.float(), {x}.sin().float()) * (1 + {k}j))",
    "(torch.view_as_complex({x}.float().unflatten(-1, (-1, 2)).contiguous()) ** 2).imag",
    "torch.where(torch.arange({x}.shape[-1]) % 2 == 0, {x}, {x}.roll(1, -1))",
)  # fmt: skip
SHARED = (
    "{x} / ({x}.abs().sum(-1, keepdim=True) + 1)", "{y} - {y}.mean(({d}, {e}), keepdim=True)",
    "{x} / ({y}.abs().sum(-1, keepdim=True) + 1)", "{x} + {y}.mean({d}, keepdim=True)[..., None]",
    "{x} * {y}.sum({d})[..., None]", "{x}.sum({d}) + {y}.sum({e})", "{x} * {x}.mean()",
    "{x}.mean(1)", "torch.softmax({x} @ {x}.transpose(-1, -2) * 0.3, -1) @ {x}",
    "{x}.unfold({d}, 2, 1).amax(-1)",
    "{x} * ({x}.abs().sum(({d}, {e}), keepdim=True) + 1).rsqrt()",
)  # fmt: skip
"""Reductions beside what reads the same, or their own results."""
PLACES = (
    "{x}.flip({d}).cumsum({d}).flip({d})", "{x}.cummax({d})[0]", "{x}.logcumsumexp({d})",
    "{x}.index_add({d}, torch.arange({x}.shape[{d}]) // 2, {x})",
    "{x}.index_put((torch.arange({x}.shape[0]) // 2,), {x}, accumulate=True)",
    "{x}.gather({d}, ({x} * 2).abs().long() % {x}.shape[{d}]) | {x} * 2 - ({x} * 2).round()",
    "torch.zeros_like({x}).scatter_add({d}, {x}.abs().long() % {x}.shape[{d}], {x})"
    " | {x} - {x}.round()", "{x}.to(torch.int8) | {x} - {x}.round()",
    "{x}.index_select({d}, torch.arange({x}.shape[{d}]) // 2)", "F.pad({x}, ({n}, 1, 1, 0))",
    "{x}.argmax({d}, keepdim=True) + {x} | gap({x}, {d})",
)  # fmt: skip


@dataclass(frozen=True)
class Kit:
    """What programs are drawn from.

    Attributes:
        letters: of the extents of inputs.
        elements: the most of a value.
        others: the chance of an earlier value to be an output, too.
    """

    kinds: tuple[tuple[str, ...], ...] = KINDS
    letters: str = "aabbcdef"
    elements: int = MOST_ELEMENTS
    others: float = 0.15


WIDE = Kit()
SMALL = Kit(
    (POINTWISE, BINARY, VIEWS, JOINS, REDUCTIONS, NORMS, CASTS, INDEXING, IN_PLACE, PLACES,
     PAIRS, PAIRS, SHARED, SHARED),
    letters="aabdfggghhhh", elements=600, others=0.3,
)  # fmt: skip
"""For interpreters: few elements, and extents twice as long as others."""


def gap(x: Tensor, dim: int) -> Tensor:
    """Return how far the two greatest, and the two smallest, values along a dimension are apart."""
    ordered = x.sort(dim).values
    n = x.shape[dim]
    if n < 2:
        return torch.ones(())
    ends = ordered.narrow(dim, n - 1, 1) - ordered.narrow(dim, n - 2, 1)
    return torch.stack((ends, ordered.narrow(dim, 1, 1) - ordered.narrow(dim, 0, 1)))


# -- drawing ---------------------------------------------------------------------------------------


class Refused(Exception):
    """A line that cannot stay in the program."""


def draw(seed: int, kit: Kit = WIDE) -> Program:
    """Return the program of a seed: two to nine lines over one to three inputs."""
    pick = random.Random(seed)
    inputs = tuple(_input(pick, kit) for _ in range(pick.randint(1, 3)))
    floating = any(getattr(torch, one.dtype).is_floating_point for one in inputs)
    train, dynamic = floating and pick.random() < 0.5, pick.random() < 0.3
    program = Program(seed, inputs, (), tuple(f"a{k}" for k in range(len(inputs))), train, dynamic)
    lines, names = 2 + pick.randrange(8), [f"a{k}" for k in range(len(inputs))]
    for _ in range(12 * lines):
        if len(program.lines) == lines:
            break
        line, border, made = _line(pick, names, len(program.lines), kit.kinds)
        others = (name for name in names if pick.random() < kit.others)
        candidate = replace(program, lines=(*program.lines, line), outputs=(made, *others))
        try:
            _probe(candidate, border, kit.elements)
        except Exception:  # whatever eager raises, too: that line is none of this program
            continue
        program = candidate
        names += [made] * (made not in names)
    return program


def _input(pick: random.Random, kit: Kit) -> Input:
    dims = "".join(pick.choice(kit.letters) for _ in range(pick.choice((1, 2, 2, 2, 3, 3, 4))))
    dims = dims.replace("e", "b") if dims.count("e") > 1 or len(dims) > 3 else dims
    while math.prod(EXTENTS[letter][0] for letter in dims) > kit.elements:
        dims = dims[1:]
    dtype = pick.choice(
        ("float32",) * 6 + ("bfloat16",) * 3 + ("float16", "float64", "int64", "bool")
    )
    return Input(dims, dtype, pick.choice(("contiguous",) * 6 + LAYOUTS))


def _line(
    pick: random.Random, names: list[str], at: int, kinds: tuple[tuple[str, ...], ...]
) -> tuple[str, str, str]:
    """Return a random line, what of it must not be near zero ("": nothing), and its result."""
    template, _, border = pick.choice(pick.choice(kinds)).partition(" | ")
    recent = names[-1 - min(int(pick.expovariate(0.7)), len(names) - 1)]
    x, y = recent, pick.choice(names)
    filled = {
        "x": x, "y": y, "d": pick.randrange(3), "e": pick.randrange(3), "n": pick.randint(1, 2),
        "k": pick.choice((0.5, 1.5, 2, 3)),
    }  # fmt: skip
    text, border = template.format(**filled), border.format(**filled)
    if text.startswith("!"):
        return text[1:], border, x
    return f"v{at} = {text}", border, f"v{at}"


def _probe(program: Program, border: str, most: int = MOST_ELEMENTS) -> None:
    """Raise unless the last line belongs in the program; see the module."""
    for given in program.sizes():
        runs = [_run(program, given, border, dtype) for dtype in (None, torch.float64)]
        for eager, exact in zip(*runs, strict=True):
            _accept(eager, exact, most)


def _run(
    program: Program, given: Sequence[Tensor], border: str, dtype: torch.dtype | None
) -> list[Tensor]:
    """Run eagerly; return what lies behind the border, outputs and gradients."""
    leaves = copy_inputs(tuple(given), dtype=dtype, train=program.train)
    body = program
    if border:
        *before, last = program.lines
        body = replace(program, lines=(*before, f"border = ({border})", last))
        body = replace(body, outputs=("border", *program.outputs))
    function = body.function() if dtype is None else _defined(body.exact_source(), body.seed)
    function.__globals__["gap"] = gap
    with torch.set_grad_enabled(program.train), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a variance of one value, say
        found = list(function(*leaves))
    if border and _is_near_zero(found.pop(0), given):
        raise Refused("near a border")
    if program.train:
        roots = [t for t in found if t.requires_grad]
        wanted = [t for t in leaves if t.requires_grad]
        if not roots:
            raise Refused("no gradient")
        gradients = torch.autograd.grad(
            roots, wanted, [torch.ones_like(t) for t in roots], allow_unused=True
        )
        found += [g for g in gradients if g is not None]
    return [t.detach() for t in found]


def _is_near_zero(border: Tensor, given: Sequence[Tensor]) -> bool:
    if not border.is_floating_point() or not border.numel():
        return False
    kinds = [t.dtype for t in (border, *given) if t.is_floating_point() and t.dtype.itemsize < 8]
    epsilon = max((torch.finfo(kind).eps for kind in kinds), default=1e-7)
    distance = border.detach().abs()
    near = (distance < 32 * epsilon * distance.max()) & (distance > 0)
    return bool(near.any())


def _accept(eager: Tensor, exact: Tensor, most: int) -> None:
    """Raise if a value is large, many, not finite, or far from fp64."""
    if eager.numel() > most or eager.dim() > MOST_DIMS or not eager.numel():
        raise Refused("size")
    a, r = eager.double(), exact.double()
    if not bool(torch.isfinite(a).all()) or float(a.abs().max()) > 1e4:
        raise Refused("magnitude")
    if float((a - r).norm()) > ERROR * float(r.norm()) + 1e-30:
        raise Refused("conditioning")


# -- comparing and shrinking -----------------------------------------------------------------------


def check_program(program: Program, backend: str | None = None, tol: float | None = None) -> None:
    """Assert that the compiled program does what eager does; see ``tests/support.py``."""
    first, *more = program.sizes()
    chosen = {"backend": backend} if backend else {}
    check(
        program.function(), *first, train=program.train, dynamic=program.dynamic, more=more,
        exact=_defined(program.exact_source(), program.seed), tol=tol or program.tolerance(),
        **chosen,
    )  # fmt: skip


def failure(program: Program, backend: str | None = None) -> Exception | None:
    """Return what a comparison raises; None if nothing, or if AOTAutograd alone raises, too.

    Where a program magnifies rounding errors, those of one order of sums may be a few times those
    of another: only what is off by more than ``MAGNIFIED`` times eager's own error counts.
    """
    error = _raised(program, backend)
    if error is None or _raised(program, "aot_eager"):
        return None
    loose = max(MAGNIFIED * _own_error(program), program.tolerance() or 0.0)
    if isinstance(error, AssertionError) and _raised(program, backend, loose) is None:
        return None
    return error


def _own_error(program: Program) -> float:
    """Return eager's largest root-mean-square error against fp64, relative, of all results."""
    worst = 0.0
    for given in program.sizes():
        runs = [_run(program, given, "", dtype) for dtype in (None, torch.float64)]
        for eager, exact in zip(*runs, strict=True):
            norm = float(exact.double().norm())
            if eager.is_floating_point() and norm:
                worst = max(worst, float((eager.double() - exact.double()).norm()) / norm)
    return worst


def _raised(program: Program, backend: str | None, tol: float | None = None) -> Exception | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_program(program, backend, tol)
    except Unsupported:  # by Dynamo
        return None
    except Exception as error:
        return error
    return None


def shrunk(program: Program, fails: Callable[[Program], bool], most: int = 80) -> Program:
    """Return a program that fails and no simpler form of which does, after ``most`` trials."""
    return shrink(program, lambda p: filter(_works_in_eager, simpler(p)), fails, most)


def simpler(program: Program) -> Iterator[Program]:
    """Yield programs with less in them, the shortest first."""
    for at, name in enumerate(program.outputs):
        if len(program.outputs) > 1:
            kept = (*program.outputs[:at], *program.outputs[at + 1 :])
            yield replace(program, outputs=kept)
        elif match := re.match(rf"{name} = .*?\b([av]\d+)\b", _line_of(program, name)):
            yield replace(program, outputs=(match[1],))
    for at, line in reversed(tuple(enumerate(program.lines))):
        rest = (*program.lines[:at], *program.lines[at + 1 :])
        made = line.partition(" = ")[0]
        for taken in dict.fromkeys(re.findall(r"\b[av]\d+\b", line.partition(" = ")[2])):
            renamed = [re.sub(rf"\b{made}\b", taken, text) for text in (*rest, *program.outputs)]
            lines, outputs = tuple(renamed[: len(rest)]), tuple(renamed[len(rest) :])
            yield replace(program, lines=lines, outputs=outputs)
        yield replace(program, lines=rest)
    for flag in ("dynamic", "train"):
        if getattr(program, flag):
            yield replace(program, **{flag: False})
    for at, one in enumerate(program.inputs):
        for plain in (replace(one, layout="contiguous"), replace(one, dtype="float32")):
            if plain != one:
                inputs = (*program.inputs[:at], plain, *program.inputs[at + 1 :])
                yield replace(program, inputs=inputs)


def _line_of(program: Program, name: str) -> str:
    return next((line for line in program.lines if line.startswith(f"{name} = ")), "")


def _works_in_eager(program: Program) -> bool:
    try:
        _probe(program, "")
    except Exception:
        return False
    return True


def as_file(program: Program, error: Exception, backend: str | None = None) -> str:
    """Return a Python file that shows the failure again, run from the root of the repository."""
    said = "\n".join(f"# {line}" for line in str(error).splitlines()[:12])
    chosen = f" backend={backend!r}," if backend else ""
    registering = "import tests.fuzz.lowered  # registers backends\n" if backend else ""
    calls = [f"({', '.join(_input_text(program, k, other) for k in range(len(program.inputs)))},)"
             for other in range(1 + program.dynamic)]  # fmt: skip
    return (
        f"# A program that fusec gets wrong (seed {program.seed}):\n{said}\n"
        "import torch\nimport torch.nn.functional as F\n\n"
        f"{registering}from tests.support import check, values, with_layout\n\n\n"
        f"{program.source()}\n\n{program.exact_source().replace('program', 'exact', 1)}\n\n"
        f"first = {calls[0]}\nmore = [{', '.join(calls[1:])}]\n"
        f"check(\n    program, *first, more=more, train={program.train},"
        f" dynamic={program.dynamic},\n    exact=exact, tol={program.tolerance()},{chosen}\n)\n"
    )


def _input_text(program: Program, k: int, other: int) -> str:
    one = program.inputs[k]
    shape = ", ".join(str(EXTENTS[letter][other]) for letter in one.dims)
    drawn = f"values({shape}, dtype=torch.{one.dtype}, seed={program.seed + k})"
    return f"with_layout({drawn}, {one.layout!r})" if one.layout != "contiguous" else drawn
