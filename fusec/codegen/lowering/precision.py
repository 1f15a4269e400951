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

One restriction. The approximate erf has an absolute error, of 1.3e-6 on GPUs and 1e-5 near 0 on
CPUs: negligible beside the 1 of a GELU, but where x is 1e-8, it is all of ``erf(x) / x``.

The GPU printer uses the marks of all such values. The CPU printer uses those of erf and the normal
distribution, whose forms keep the digits of both tails (a GELU of 4 million elements in bf16 takes
1.8 ms instead of 2.6; AVX-512, 2026-11-29), and of exponentials in programs with products: their
form, of 2^-17, would show in an ``exp(x) - 1`` of f32 that is rounded then.

The CPU printer has a second cheaper form. The terms ``exp(s - m)`` of an online sum are relative to
the largest, which is 1, so one below 2^-126 counts as 0. A product with such a subnormal number
takes a microcode assist: masks of -100, as Swin has them, made an attention seven times as slow
(Xeon, 2026-11-26).

Worked example: in ``t = exp(x); s = sum(c: t); y = bf16(t / s)`` t, s and t / s are marked; with s
also stored as f32, s and t are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusec.ir.dtype import F32, HALF
from fusec.ir.expr import Cast, Const, Dot, Expr, Op, Reduce, Select, Var, children, is_op, reach
from fusec.ir.monoid import MAX, MIN, SUM
from fusec.ir.program import For, Let, Program, Put, Statement, Update, Zip, reads, statements

_Values = Mapping[Expr, Expr]
_Uses = Mapping[Expr, list[Statement]]


def rounded_to_16_bits(program: Program) -> frozenset[Var]:
    """Return the f32 values whose every use ends in a conversion to a 16-bit float."""
    exact: set[Expr] = set()
    feeds: dict[Expr, list[Expr]] = {}
    uses: dict[Expr, list[Statement]] = {}
    body = list(statements(program.body))
    named = [s for s in body if isinstance(s, Let | Update)]
    for statement in body:
        match statement:
            case Let(value=value) | Update(value=value):
                below = children(value)
                if _passes_on(value):
                    feeds.setdefault(statement.var, []).extend(below)
                elif not _rounds(value):
                    exact.update(below)
            case Put() | Zip():
                below = reads(statement)
                exact.update(below)
            case _:
                continue
        for value in below:
            uses.setdefault(value, []).append(statement)

    def sources(values: Iterable[Expr]) -> set[Expr]:
        return set(reach(values, lambda value: feeds.get(value, ())))

    seen = sources(exact)
    picked = sources(
        c for s in named if s.var in seen and _is_extremum(s.value) for c in children(s.value)
    )
    values: dict[Expr, Expr] = {s.var: s.value for s in named}
    weights = {s.var for s in named if _is_weight(s.var, values, uses)}
    if weights:
        weights |= {s.var for s in named if _rescales_sums(s.var, values, uses)}
    cheap = {s.var for s in named if s.var not in seen} | weights - exact - picked
    return frozenset(v for v in cheap if v.dtype is F32 and not _is_small_erf(v, values, uses))


def forms_of_tiles(program: Program) -> dict[Var, str]:
    """Return function's result -> the cheaper form of the function in a CPU's tiles."""
    forms = rounded_forms(program, "exp", "erf", "ndtr")
    for var in relative_to_maximum(program):
        forms[var] = "rounded_flushed" if var in forms else "flushed"
    return forms


def rounded_forms(program: Program, *functions: str) -> dict[Var, str]:
    """Return function's result -> the function's form for results that are rounded to 16 bits."""
    rounded = rounded_to_16_bits(program)
    lets = (s for s in statements(program.body) if isinstance(s, Let))
    found = (s.var for s in lets if s.var in rounded and is_op(s.value, *functions))
    return dict.fromkeys(found, "rounded")


def relative_to_maximum(program: Program) -> frozenset[Var]:
    """Return the exponentials ``exp(s - m)`` beside the loop's running maximum m of the scores s.

    A running maximum has meaning only to the sums of its loop (``ir/online.py``): no exponential of
    something else refers to it there.
    """
    found: set[Expr] = set()
    for loop in statements(program.body):
        if not isinstance(loop, For):
            continue
        maxima = {s.var for s in loop.body if isinstance(s, Update) and is_op(s.value, "maximum")}
        values: dict[Expr, Expr] = {s.var: s.value for s in loop.body if isinstance(s, Let)}

        for var, value in values.items():
            _, base = _difference(value, values)
            if base is not None and not maxima.isdisjoint(_sources(base, values)):
                found.add(var)
    return frozenset(v for v in found if isinstance(v, Var) and v.dtype is F32)


def _is_small_erf(var: Var, values: _Values, uses: _Uses) -> bool:
    """Return True for an erf used other than in a sum with a constant: it is exact near 0."""
    others = (s.value for s in uses.get(var, ()) if isinstance(s, Let | Update))
    return is_op(values[var], "erf") and not all(
        is_op(x, "add", "sub") and any(isinstance(arg, Const) for arg in children(x))
        for x in others
    )


def _is_extremum(value: Expr) -> bool:
    """Return True for a maximum or minimum: its result may be compared for exact equality."""
    picks = isinstance(value, Reduce) and value.monoid in (MAX, MIN)
    return picks or is_op(value, "maximum", "minimum")


def _is_weight(var: Var, values: _Values, uses: _Uses) -> bool:
    """Return True for an ``exp(s - m)``, where m has fewer lanes than s, that may be approximate.

    It is rounded, or it is only summed and its s had 16 bits.
    """
    score, base = _difference(values[var], values)
    if score is None or base is None or not base.axes < score.axes:
        return False
    named = (s for s in uses.get(var, ()) if isinstance(s, Let | Update))
    rounded = any(_rounds(s.value) for s in named)
    return rounded or (_is_narrow(score, values) and _is_summed(var, uses))


def _sources(value: Expr, values: _Values) -> set[Expr]:
    """Return a value and all that it is computed from."""
    return set(reach((value,), lambda v: children(values[v]) if v in values else ()))


def _difference(value: Expr, values: _Values) -> tuple[Expr, Expr] | tuple[None, None]:
    """Return a and b of ``exp(a - b)``."""
    match value:
        case Op(name="exp", args=(power,)):
            match values.get(power):
                case Op(name="sub", args=(a, b)):
                    return a, b
    return None, None


def _rescales_sums(var: Var, values: _Values, uses: _Uses) -> bool:
    """Return True for the exponential by which sums are rescaled when their maximum grows."""
    if not is_op(values[var], "exp"):
        return False
    for statement in uses.get(var, ()):
        match statement:
            case Update(var=total, value=Op(name="mul", args=(old, _))) if old is total:
                continue
        return False
    return var in uses


def _is_narrow(score: Expr, values: _Values) -> bool:
    """Return True for a value that, possibly below selections, had 16 bits."""
    while isinstance(value := values.get(score), Select):
        score = value.then
    return isinstance(value, Cast) and value.arg.dtype in HALF


def _is_summed(value: Expr, uses: _Uses) -> bool:
    """Return True if every use of a value, masked or not, is a term of a sum."""
    for statement in uses.get(value, ()):
        match statement:
            case Update(var=total, value=Op(name="add", args=(old, _))) if old is total:
                continue
            case Let(value=Reduce(monoid=monoid)) if monoid is SUM:
                continue
            case Let(var=masked, value=Select(condition=c)) if c is not value:
                if _is_summed(masked, uses):
                    continue
        return False
    return True


def _rounds(value: Expr) -> bool:
    narrows = isinstance(value, Cast) and value.dtype in HALF
    return narrows or is_op(value, "round_f16", "round_bf16")


def _passes_on(value: Expr) -> bool:
    """Return True for an f32 value whose operands need no more accuracy than itself."""
    if _rounds(value) or value.dtype is not F32:
        return False
    return isinstance(value, Op | Cast | Select | Reduce | Var | Dot)
