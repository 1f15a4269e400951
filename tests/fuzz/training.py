"""Random training programs: views, detach, writes under no_grad, results that share memory.

A `Training` is text, as a `programs.Program` is, over few small tensors, for what may go wrong is
not arithmetic: which results are views of each other, what a backward reads of memory that was
written since, which result a gradient belongs to. ``draw(seed)`` adds one random line after another
that eager accepts. `outcome.py` says what is compared.

A compile takes a second, whatever its size. So ``failures`` joins programs to one function, and
takes that apart only where it fails.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusec.tools.bisect.smaller import shrink
from tests.fuzz.outcome import Outcome, Plan, differences, outcome_of

SHAPES = ((2, 3), (3, 2), (6,), (3, 3), (1, 4))
KINDS = ("leaf", "leaf", "parameter", "buffer", "buffer", "computed", "view")
MOST = 64
"""Elements of a tensor, and a bound on values."""


@dataclass(frozen=True)
class Training:
    """A function as text; ``a0, a1, ...`` are its inputs, each of a kind (`tensors`)."""

    seed: int
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    lines: tuple[str, ...]
    result: str
    names: tuple[str, ...] = ()

    def source(self, name: str = "program") -> str:
        """Return the function's definition."""
        given = ", ".join(f"a{k}" for k in range(len(self.inputs)))
        body = "".join(f"    {text}\n" for line in self.lines for text in line.split("\n"))
        return f"def {name}({given}):\n{body}    return {self.result}\n"

    def function(self) -> Callable[..., Any]:
        """Return the function itself."""
        return _defined(self.source(), "program")


def _defined(source: str, name: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"torch": torch, "checkpoint": torch.utils.checkpoint.checkpoint}
    exec(compile(source, f"<{name}>", "exec"), scope)
    made: Callable[..., Any] = scope[name]
    return made


def tensors(program: Training) -> list[Tensor]:
    """Return fresh inputs.

    "leaf" and "parameter" have gradients, "buffer" has none. What is "computed" is no leaf, and
    may be written in place; a "view" is one of the input before it.
    """
    made: list[Tensor] = []
    for k, (kind, shape) in enumerate(program.inputs):
        generator = torch.Generator().manual_seed(program.seed * 31 + k)
        value = torch.rand(shape, generator=generator) + 0.25
        match kind:
            case "leaf":
                made.append(value.requires_grad_())
            case "parameter":
                made.append(torch.nn.Parameter(value))
            case "computed":
                leaf = value.requires_grad_()
                made.append(leaf * 1)
                made[-1].leaf = leaf  # type: ignore[attr-defined]
            case "view" if made and not made[-1].is_leaf:
                made.append(made[-1].view(-1))
            case _:
                made.append(value)
    return made


# -- lines -----------------------------------------------------------------------------------------

# As in `programs`: {x}, {y} are earlier values, {v} is a new one; {a} is an input, {k} a constant.
VALUES = (
    "{v} = torch.sin({x})", "{v} = {x} * {k}", "{v} = {x} + {y}", "{v} = {x} * {y}",
    "{v} = torch.tanh({x})", "{v} = {x}.sum(0)", "{v} = {x}.mean()", "{v} = torch.exp(-{x})",
    "{v} = {x} - {y}", "{v} = {x}.clone()", "{v} = torch.cat(({x}, {x} * {k}))", "{v} = {x} * {x}",
    "{v} = torch.stack(({x}, {y}))", "{v} = {x} @ {y}", "{v} = {x}.double().float()",
    "{v} = torch.where({y} > 0.5, {x}, {k})", "{v} = torch.zeros_like({x})",
    "{v} = torch.arange(6.0)", "{v} = torch.full((2, 3), {k})", "{v} = {x}.flip(0)",
)  # fmt: skip
VIEWS = (
    "{v} = {x}.view(-1)", "{v} = {x}.view({x}.shape)", "{v} = {x}.t()", "{v} = {x}[1:]",
    "{v} = {x}[:1]", "{v} = {x}[0]", "{v} = {x}.unsqueeze(0)", "{v} = {x}.expand(2, *{x}.shape)",
    "{v} = {x}.chunk(2)[1]", "{v} = {x}.unbind()[0]", "{v} = {x}.reshape(-1)",
    "{v} = {x}.squeeze()", "{v} = {x}.diagonal()", "{v} = {x}[..., 1:]", "{v} = {x}.view_as({x})",
    "{v} = {x}.narrow(0, 0, 1)", "{v} = {x}[...]", "{v} = {x}[::2]", "{v} = {x}.transpose(0, -1)",
    "{v} = {x}.unflatten(0, (-1, 1))", "{v}, {w} = {x}.split(1)[:2]",
    "{v}, {w} = torch.unbind({x})[:2]",
)  # fmt: skip
DETACHED = (
    "{v} = {x}.detach()", "{v} = {x}.detach()", "{v} = {x}.view(-1).detach()",
    "{v} = {x}.detach().view(-1)", "{v} = {x}[0].detach()", "{v} = {x}.detach() * {y}",
    "with torch.no_grad():\n    {v} = {x} * {k}", "with torch.no_grad():\n    {v} = {x}.view(-1)",
    "with torch.no_grad():\n    {v} = {x}.detach()[:1]",
)  # fmt: skip
WRITES = (
    "{x}.mul_({k})", "{x}[0] = {k}", "{x}.add_({y})", "{x}.view(-1)[1:].mul_({k})",
    "{x}.t().add_({k})", "{x}[:1].copy_({y})", "{x}.zero_()",
    "{x}.sin_()", "{x}[0].fill_({k})",
)  # fmt: skip
MEMORY = (
    "with torch.no_grad():\n    {a}.mul_({k})", "with torch.no_grad():\n    {a}.add_({x}.detach())",
    "with torch.no_grad():\n    {a}.copy_({x})", "with torch.no_grad():\n    {a}[0].mul_({k})",
    "with torch.no_grad():\n    {a}.view(-1)[1:].add_(1)", "{a}.detach().mul_({k})",
    "with torch.no_grad():\n    {a}.lerp_({x}, 0.5)", "with torch.no_grad():\n    {a}.zero_()",
)  # fmt: skip
"""Writes to inputs that autograd does not see: between what reads them and its gradient."""
OTHERS = (
    "{v} = checkpoint(lambda t: torch.sin(t) * t, {x}, use_reentrant=False)",
    "{v} = checkpoint(lambda t, u: (t * u).tanh(), {x}, {y}, use_reentrant=False)",
    "{x}.register_hook(lambda g: g * {k})",
)  # fmt: skip
RESULTS = ("{}, {}", "[{}, {}]", "({}, [{}, {}])", "{{'p': {}, 'q': ({}, {})}}", "{}, {}, {}, {}",
           "({}, ({}, {}), {})", "({},)", "{}, {}, {}, {}, {}, {}")  # fmt: skip


def draw(seed: int, *, memory: bool = True) -> Training:
    """Return the program of a seed: two to eight lines over one to three inputs.

    Args:
        memory: writes that autograd does not see are among the lines.
    """
    pick = random.Random(seed)
    shape = pick.choice(SHAPES)
    inputs = tuple(
        (pick.choice(KINDS), shape if pick.random() < 0.7 else pick.choice(SHAPES))
        for _ in range(pick.randint(1, 3))
    )
    names = tuple(f"a{k}" for k in range(len(inputs)))
    program = Training(seed, inputs, (), f"({', '.join(names)},)", names)
    kinds = (VALUES,) * 4 + (VIEWS,) * 4 + (DETACHED, WRITES, OTHERS) + (MEMORY,) * (2 * memory)
    lines = pick.randint(2, 8)
    for _ in range(8 * lines):
        if len(program.lines) < lines:
            longer = _longer(program, pick, pick.choice(kinds))
            program = longer if _is_accepted(longer) else program
    return _returning(program, pick)


def _longer(program: Training, pick: random.Random, kind: tuple[str, ...]) -> Training:
    names = program.names
    recent = names[-1 - min(int(pick.expovariate(0.6)), len(names) - 1)]
    v, w = (f"v{len(names) + k}" for k in range(2))
    line = pick.choice(kind).format(
        x=recent, y=pick.choice(names), a=f"a{pick.randrange(len(program.inputs))}", v=v, w=w,
        k=pick.choice((0.5, 1.5, 2)),
    )  # fmt: skip
    made = tuple(name for name in (v, w) if f"{name} =" in line or f"{name}, {w} =" in line)
    names = (*names, *made)
    result = f"({', '.join(names)},)"
    return replace(program, lines=(*program.lines, line), names=names, result=result)


def _says_what_it_means(program: Training) -> bool:
    """Return False where the last line writes memory that it reads elsewhere, in eager's order."""
    *before, line = program.lines
    apart = re.sub(r"(copy_|add_|lerp_)\((\w+)(\.detach\(\))?", r"\1(\2.detach().clone()", line)
    if apart == line:
        return True
    other = replace(program, lines=(*before, apart))
    made, wanted = (p.function()(*tensors(p)) for p in (program, other))
    return all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


def _can_have_hook(program: Training) -> bool:
    """Return False where eager's process may die of the hook in the last line (torch 2.13).

    So it does of one on a view that was made under ``no_grad`` and says that it requires gradients,
    and on one of what another view has written since.
    """
    if not any(re.search(r"no_grad|_\(|\] = ", line) for line in program.lines[:-1]):
        return True
    before = replace(program, lines=program.lines[:-1])
    name = program.lines[-1].partition(".")[0]
    tensor: Tensor = before.function()(*tensors(program))[program.names.index(name)]
    return tensor._base is None


def _learns(tensor: Tensor) -> bool:
    """Return True if a leaf gets a gradient of a tensor that has a history.

    That of what eager computes of a view that was made under ``no_grad`` may end nowhere, though it
    says that it requires gradients; AOTAutograd's says that it requires none.
    """
    todo, seen = [tensor.grad_fn], set()
    while todo:
        function = todo.pop()
        if function is not None and function not in seen:
            if hasattr(function, "variable"):
                return True
            seen.add(function)
            todo += [source for source, _ in function.next_functions]
    return False


def _returning(program: Training, pick: random.Random) -> Training:
    """Return the program with random results in a random structure: one twice now and then.

    A view that was made under ``no_grad`` is none of them where eager says of it, as of its base,
    that it requires gradients: none gets there.
    """
    made = zip(program.names, program.function()(*tensors(program)), strict=True)
    names = [n for n, t in made if not (t.requires_grad and t.is_leaf and t._is_view())]
    form = pick.choice(RESULTS)
    weights = [1 + 2 * k for k in range(len(names))]
    chosen = pick.choices(names, weights, k=form.count("{}"))
    return replace(program, result=form.format(*chosen))


def _is_accepted(program: Training) -> bool:
    try:
        if ".register_hook" in program.lines[-1]:
            assert _can_have_hook(program)
        if program.lines[-1].startswith("with torch.no_grad"):
            assert _says_what_it_means(program)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = program.function()(*tensors(program))
            assert all(t.is_leaf or t._is_view() or _learns(t) for t in made)  # a view may raise
    except Exception:  # whatever eager raises, too: that line is none of this program
        return False
    return all(
        t.numel() <= MOST and t.numel() > 0 and bool((t.detach().abs() < MOST).all()) for t in made
    )


# -- comparing -------------------------------------------------------------------------------------


Backend: TypeAlias = "str | Callable[..., Any]"


def plan_of(program: Training, *, late: bool = False) -> Plan:
    """Return what is done with a program's results, by its seed."""
    return Plan(program.seed, rounds=1 + program.seed % 2, late=late)


def outcome(program: Training, fn: Callable[..., Any], plan: Plan) -> Outcome:
    """Return what a function leaves of a program's inputs."""
    return outcome_of(fn, tensors(program), plan)


def compiled(
    fn: Callable[..., Any], backend: Backend, *, dynamic: bool | None = None, **options: bool
) -> Callable[..., Any]:
    """Return a function compiled anew; by fusec with options."""
    torch._dynamo.reset()
    chosen = {"autotune": False, "strict": True, **options} if backend == "fusec" else None
    made: Callable[..., Any] = torch.compile(fn, backend=backend, dynamic=dynamic, options=chosen)  # type: ignore[call-overload]
    return made


def wrong(
    program: Training, backend: Backend = "fusec", *, strict: bool = True, **how: bool
) -> list[str]:
    """Return in what a compiled program differs from eager: at first, and from the cache.

    What AOTAutograd does not trace has to run as in eager where nobody is ``strict``.

    Args:
        how: as of `compiled`.
    """
    plan = plan_of(program)
    expected = outcome(program, program.function(), plan)
    found: list[str] = []
    for start in ("", "from the cache: "):
        try:
            made = compiled(program.function(), backend, strict=strict, **how)
            actual = outcome(program, made, plan)
        except Exception as error:
            if strict and backend == "fusec" and _raises(program, "aot_eager"):
                return wrong(program, strict=False, **how)
            return [f"{start}{type(error).__name__}: {error}"]
        found += [start + line for line in differences(expected, actual)]
    return found


def _raises(program: Training, backend: str) -> bool:
    try:
        outcome(program, compiled(program.function(), backend), plan_of(program))
    except Exception:
        return True
    return False


def wrong_together(programs: Sequence[Training], backend: str = "fusec") -> bool:
    """Return True if the programs, joined to one function, do not do what each does by itself."""
    parts = [program.function() for program in programs]
    counts = [len(program.inputs) for program in programs]

    def joined(*given: Tensor) -> list[Any]:
        made, at = [], 0
        for part, count in zip(parts, counts, strict=True):
            made.append(part(*given[at : at + count]))
            at += count
        return made

    plan = Plan(programs[0].seed)
    inputs = lambda: [t for program in programs for t in tensors(program)]  # noqa: E731
    expected = outcome_of(joined, inputs(), plan)
    if expected.refusal:
        return True
    try:
        return any(
            differences(expected, outcome_of(compiled(joined, backend), inputs(), plan))
            for _ in range(1 + programs[0].seed % 2)
        )
    except Exception:
        return True


def is_refused(program: Training) -> bool:
    """Return True if eager has no gradients: what they need was written since."""
    return bool(outcome(program, program.function(), plan_of(program)).refusal)


def failures(programs: Sequence[Training]) -> Iterator[tuple[Training, list[str]]]:
    """Yield the programs that fail, and in what."""
    sound = [program for program in programs if not is_refused(program)]
    alone = [program for program in programs if program not in sound]
    if sound and wrong_together(sound):
        alone += sound
    for program in alone:
        found = wrong(program)
        if found:
            yield program, found


def is_as_torch(program: Training, found: Sequence[str]) -> bool:
    """Return True where AOTAutograd raises or copies where eager does not, and all else is right.

    Its backward raises where the program has written an input that the gradient needs, or has put a
    hook on one that gets none. Of what eager says that it requires gradients, and that has none to
    give (a view made under ``no_grad``), it may say that it requires none. And it hides that the
    parts of a ``split`` of an input are views: where that input is written, they lie elsewhere.

    What it does not trace runs as Dynamo's graph says. There a checkpoint saves its inputs, where
    eager would compute again from what they are by then: that a saved one was written is said, too.
    """
    words = (": memory is", ": offset is", " after writes is", "the backward raises:",
             ": requires_grad is")  # fmt: skip
    if not all(any(word in line for word in words) for line in found):
        return False
    torchs = wrong(program, "aot_eager")
    said = [line for line in found if "modified by an inplace operation" in line]
    return found == torchs or (said == found and "modified by an inplace operation" in torchs[0])


def shrunk(program: Training, fails: Callable[[Training], bool], most: int = 60) -> Training:
    """Return a program that fails and no simpler form of which does, after ``most`` trials."""
    return shrink(program, lambda p: filter(_works, simpler(p)), fails, most)


def simpler(program: Training) -> Iterator[Training]:
    """Yield programs with a line less, or the results of one name less."""
    for at in reversed(range(len(program.lines))):
        yield replace(program, lines=program.lines[:at] + program.lines[at + 1 :])
    used = [name for name in program.names if name in program.result]
    for name in used:
        for other in used:
            if other != name:
                yield replace(program, result=program.result.replace(name, other))
    if not program.result.startswith("(") and used:
        yield replace(program, result=f"({', '.join(used)},)")


def _works(program: Training) -> bool:
    try:
        outcome(program, program.function(), plan_of(program))
    except Exception:
        return False
    return True


def as_file(program: Training, found: Sequence[str]) -> str:
    """Return a Python file that shows the failure again, run from the root of the repository."""
    said = "".join(f"# {line}\n" for text in found for line in text.splitlines()[:6])
    source = "".join(f"# {line}\n" for line in program.source().splitlines())
    return (
        f"# A training program that fusec gets wrong (seed {program.seed}):\n{said}#\n{source}"
        "from tests.fuzz.training import Training, wrong\n\n"
        f"found = wrong({program!r})\nassert not found, found\n"
    )
