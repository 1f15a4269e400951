"""Find the f32 values whose every use is rounded to 16 bits, for cheaper approximate forms.

Such a value may be computed by a form with an error of 1e-5 instead of 1e-7: the rounding, of 4e-3
for bf16 and 5e-4 for f16, hides it. PyTorch's eager kernels round after every operation, and so are
further from the exact value still.

One extension. ``exp(s - m)`` of a tile and its rows, rounded for a product and summed in f32, is
approximate, too: the approximate form's error is |s - m| * 1e-7 of the term; ``t * exp(-t)`` is
at most 0.4. So the sum keeps its accuracy, and the weights of a product agree with the sum they are
divided by. Otherwise, a logsumexp kept for a backward would make each exponential of an attention
expensive. An exponential that is only summed in f32 is approximate if its score was in 16 bits: the
score's rounding is larger than the error that the form adds to the exponent (a cross-entropy). The
factor that rescales the sums when their maximum grows is as approximate as the weights. Operands of
a maximum stay exact: a value may be compared with its recomputation in another loop.

One restriction. The approximate erf has an absolute error, 1.3e-6: negligible beside the 1 of a
GELU, but where x is 1e-8, it is all of ``erf(x) / x``.

The GPU printer uses the marks (``Program.rounded``) of all such values, the CPU printer those of
exponentials in programs with products: other CPU programs are bound by memory.

Worked example: in ``t = exp(x); s = sum(c: t); y = bf16(t / s)`` t, s and t / s are marked; with s
also stored as f32, s and t are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusec.ir.dtype import BF16, F16, F32
from fusec.ir.expr import (
    Cast,
    Const,
    Dot,
    Expr,
    Op,
    Reduce,
    Select,
    Var,
    children,
    index_exprs,
    reach,
)
from fusec.ir.monoid import MAX, MIN, SUM
from fusec.ir.program import Let, Program, Put, Statement, Update, reads, statements


def rounded_to_16_bits(program: Program) -> frozenset[Var]:
    """Return the f32 values whose every use ends in a conversion to a 16-bit float."""
    values: set[Var] = set()
    exact: set[Expr] = set()
    feeds: dict[Expr, list[Expr]] = {}
    body = list(statements(program.body))
    for statement in body:
        match statement:
            case Let() | Update():
                values.add(statement.var)
                if _passes_on(statement.value):
                    feeds.setdefault(statement.var, []).extend(children(statement.value))
                elif not _rounds(statement.value):
                    exact.update(children(statement.value))
            case Put():
                exact.add(statement.value)
                exact.update(index_exprs(statement.offset))
    seen = _sources(exact, feeds)
    picked = (
        child
        for s in body
        if isinstance(s, Let | Update) and s.var in seen and _is_extremum(s.value)
        for child in children(s.value)
    )
    weights = _weights(body) - exact - _sources(picked, feeds)
    found = (v for v in values if v.dtype is F32 and (v not in seen or v in weights))
    return frozenset(found) - _erf_near_zero(body)


def _erf_near_zero(body: list[Statement]) -> frozenset[Var]:
    """Return erf values used other than in a sum with a constant: near 0 they must be exact."""
    named = [s for s in body if isinstance(s, Let | Update)]
    erfs = {s.var for s in named if isinstance(s.value, Op) and s.value.name == "erf"}
    return frozenset(v for s in named if not _adds_constant(s.value) for v in erfs if v in reads(s))


def _adds_constant(value: Expr) -> bool:
    sums = isinstance(value, Op) and value.name in ("add", "sub")
    return sums and any(isinstance(arg, Const) for arg in children(value))


def _sources(values: Iterable[Expr], feeds: Mapping[Expr, list[Expr]]) -> set[Expr]:
    """Return values and their transitive operands in ``feeds``."""
    return set(reach(values, lambda value: feeds.get(value, ())))


def _is_extremum(value: Expr) -> bool:
    """Return True for a maximum or minimum: its result may be compared for exact equality."""
    if isinstance(value, Reduce):
        return value.monoid in (MAX, MIN)
    return isinstance(value, Op) and value.name in ("maximum", "minimum")


def _weights(body: list[Statement]) -> set[Expr]:
    """Return each approximable ``exp(s - m)``, and the factors that rescale their sums."""
    named: dict[Expr, Expr] = {}
    readers: dict[Expr, list[Statement]] = {}
    weights: set[Expr] = set()
    rounded: set[Expr] = set()
    factors: set[Expr] = set()
    others: set[Expr] = set()
    for statement in body:
        if isinstance(statement, Let | Update | Put):
            read = statement.value
            for value in (read,) if isinstance(statement, Put) else children(read):
                readers.setdefault(value, []).append(statement)
        match statement:
            case Update(var=sum_, value=Op(name="mul", args=(old, factor))) if old is sum_:
                factors.add(factor)
            case Let() | Update():
                named[statement.var] = statement.value
                (rounded if _rounds(statement.value) else others).update(children(statement.value))
                if _is_weight(statement.value, named):
                    weights.add(statement.var)
    weights = {
        w for w in weights if w in rounded or (_is_narrow(w, named) and _is_summed(w, readers))
    }
    grown = {f for f in factors - others if isinstance(v := named.get(f), Op) and v.name == "exp"}
    return weights | grown if weights else set()


def _is_weight(value: Expr, named: Mapping[Expr, Expr]) -> bool:
    """Return True for ``exp(s - m)`` where m has fewer lanes than s."""
    match value:
        case Op(name="exp", args=(power,)):
            match named.get(power):
                case Op(name="sub", args=(score, base)):
                    return base.axes < score.axes
    return False


def _is_narrow(weight: Expr, named: Mapping[Expr, Expr]) -> bool:
    """Return True for ``exp(s - m)`` whose s, possibly below selections, had 16 bits."""
    power = named[weight]
    assert isinstance(power, Op)
    (score, _) = children(named[power.args[0]])
    while isinstance(value := named.get(score), Select):
        score = value.then
    return isinstance(value, Cast) and value.arg.dtype in (F16, BF16)


def _is_summed(value: Expr, readers: Mapping[Expr, list[Statement]]) -> bool:
    """Return True if every use of a value, masked or not, is a term of a sum."""
    for statement in readers.get(value, ()):
        match statement:
            case Update(var=total, value=Op(name="add", args=(old, _))) if old is total:
                continue
            case Let(value=Reduce(monoid=monoid)) if monoid is SUM:
                continue
            case Let(var=masked, value=Select(condition=c)) if c is not value:
                if not _is_summed(masked, readers):
                    return False
            case _:
                return False
    return True


def _rounds(value: Expr) -> bool:
    if isinstance(value, Op):
        return value.name in ("round_f16", "round_bf16")
    return isinstance(value, Cast) and value.dtype in (F16, BF16)


def _passes_on(value: Expr) -> bool:
    """Return True for an f32 value whose operands need no more accuracy than itself."""
    if _rounds(value) or value.dtype is not F32:
        return False
    return isinstance(value, Op | Cast | Select | Reduce | Var | Dot)
