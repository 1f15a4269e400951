"""Linearity: the nodes that an expression is a sum of multiples of.

Worked example: where x varies and a and b do not, ``where(a > 0, x * b, 0) + -f32(x) / a`` is
linear in x. Its terms are two times x; the condition ``a > 0`` is held over the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from fusec.ir.expr import Buffer, Cast, Const, Expr, Load, Op, Reduce, Select, children, postorder
from fusec.ir.index import Axis
from fusec.ir.monoid import SUM


def dependents(roots: Iterable[Expr], sources: Collection[Expr]) -> set[Expr]:
    """Return the nodes of ``roots`` that depend on one of ``sources``, without these."""
    found = set(sources)
    for node in postorder(roots):
        if any(child in found for child in children(node)):
            found.add(node)
    return found.difference(sources)


def terms(root: Expr, varying: Collection[Expr]) -> Iterator[tuple[Expr, frozenset[Expr]]]:
    """Yield the nodes that an expression is a sum of multiples of, each with what it holds under.

    The multiples do not vary. A term that does not vary, unless it is 0, is yielded as well.
    """
    waiting = [(root, frozenset[Expr]())]
    seen = set(waiting)
    while waiting:
        node, held = waiting.pop()
        parts: tuple[Expr, ...] = ()
        match node:
            case Const(value=0):
                continue
            case Cast(arg=a) if a.dtype.is_float and node.dtype.is_float:
                parts = (a,)
            case Op(name="neg" | "round_f16" | "round_bf16", args=args):
                parts = args
            case _ if node not in varying:
                pass
            case Op(name="add" | "sub", args=args):
                parts = args
            case Op(name="mul", args=(a, b)) if (a in varying) is not (b in varying):
                parts = (a,) if a in varying else (b,)
            case Op(name="div", args=(a, b)) if b not in varying:
                parts = (a,)
            case Select(condition=c, then=a, other=b) if c not in varying:
                parts = (a, b)
                held = held if b in varying else held | {c}
        if not parts:
            yield node, held
        fresh = [(part, held) for part in parts if (part, held) not in seen]
        waiting += fresh
        seen.update(fresh)


def common_factor(root: Expr, inner: Collection[Axis]) -> tuple[Expr | None, Expr]:
    """Return a factor that all terms of a sum share and that varies along no ``inner`` axis, with
    the sum of the terms without it; None, and the sum itself, if there is none.

    ``x[k]*(c[k]*s) + y[k]*(d[k]*s)`` has the factor s along k, beside ``x[k]*c[k] + y[k]*d[k]``.
    """
    found: dict[Expr, tuple[Expr | None, Expr]] = {}

    def cut(node: Expr) -> tuple[Expr | None, Expr]:
        match node:
            case Op(name="mul", args=(a, b)) if node.dtype.is_float:
                for one, other in ((a, b), (b, a)):
                    if not isinstance(one, Const) and one.axes.isdisjoint(inner):
                        return one, other
                for one, other in ((a, b), (b, a)):
                    factor, rest = found[one]
                    if factor is not None:
                        return factor, Op("mul", (rest, other))
            case Op(name="add" | "sub" as name, args=(a, b)):
                (factor, first), (other_factor, second) = found[a], found[b]
                if factor is not None and factor is other_factor:
                    return factor, Op(name, (first, second))
        return None, node

    for node in postorder((root,)):
        found[node] = cut(node)
    return found[root]


def is_linear(root: Expr, sources: Collection[Buffer]) -> bool:
    """Return True if an expression is multiplied by k where all of ``sources`` are."""
    loaded = {n for n in postorder((root,)) if isinstance(n, Load) and n.buffer in sources}
    varying = loaded | dependents((root,), loaded)

    def multiplies(node: Expr) -> bool:
        match node:
            case Load():
                return node in loaded and varying.isdisjoint(node.children)
            case Reduce(monoid=monoid) if monoid is SUM:
                return all(multiplies(term) for term, _ in terms(node.body, varying))
        return False

    return all(multiplies(term) for term, _ in terms(root, varying))
