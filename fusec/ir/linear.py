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


def multiples(root: Expr, inner: Collection[Axis]) -> dict[Expr | None, Expr]:
    """Return the terms that an expression is a sum of multiples of, by their factors, which vary
    along no ``inner`` axis; the expression itself, by None, if there are none.

    ``x[k]*(c[k]*s + z) + y[k]*(d[k]*s + z)`` is s times ``x[k]*c[k] + y[k]*d[k]`` and z times
    ``x[k] + y[k]`` along k, in this order. A sum whose terms have other factors each is left whole.
    """
    found: dict[Expr, dict[Expr | None, Expr]] = {}

    def is_steady(node: Expr) -> bool:
        return node.axes.isdisjoint(inner) and not isinstance(node, Const)

    def times(node: Expr, other: Expr) -> dict[Expr | None, Expr]:
        if is_steady(other):
            return {_product(factor, other): term for factor, term in found[node].items()}
        return {factor: _product(term, other) for factor, term in found[node].items()}

    def cut(node: Expr) -> dict[Expr | None, Expr]:
        match node:
            case _ if node.axes.isdisjoint(inner):
                pass
            case Op(name="mul", args=(a, b)) if node.dtype.is_float:
                for one, other in ((a, b), (b, a)):
                    if not is_steady(one) and (is_steady(other) or found[one].keys() != {None}):
                        return times(one, other)
            case Op(name="add" | "sub" as name, args=(a, b)) if node.dtype.is_float:
                a, b = (b, a) if name == "add" and is_steady(a) else (a, b)
                steady = b if name == "add" else Op("neg", (b,))
                if is_steady(b) and steady not in found[a]:
                    return {**found[a], steady: Const(1, b.dtype)}
                if found[a].keys() == found[b].keys():
                    return {f: Op(name, (term, found[b][f])) for f, term in found[a].items()}
        return {None: node}

    for node in postorder((root,)):
        found[node] = cut(node)
    alone = any(isinstance(term, Const) for term in found[root].values())
    return {None: root} if alone else found[root]


def _product(a: Expr | None, b: Expr) -> Expr:
    """Return a product, where None and a constant 1 are one."""
    return b if a is None or (isinstance(a, Const) and a.value == 1) else Op("mul", (a, b))


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
