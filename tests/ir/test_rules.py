"""Every rewrite rule has an example: it alone rewrites it, and the values stay."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from fusec.codegen.lowering.values import uniform_comparison
from fusec.codegen.triton.rules import GPU_RULES
from fusec.ir.dtype import BF16, BOOL, F32, I8, I32, I64, U8, DType
from fusec.ir.expr import Cast, Const, Expr, Load, Reduce, Select, loads, op
from fusec.ir.graph import Def
from fusec.ir.index import Axis, IntoIndex, Runtime, index
from fusec.ir.monoid import ANY, MAX, SUM
from fusec.ir.online import ONLINE_RULES, SCALE_RULES
from fusec.ir.rewrite import Normalizer, Rules
from fusec.ir.verify import verify_graph
from fusec.passes.graph.reduction_rules import AXIS_RULES
from fusec.passes.graph.simplify import EAGER_RULES, LOAD_RULES, VALUE_RULES
from fusec.passes.kernel.masks import MASK_RULES
from fusec.tools.interpreter.graph import run_graph
from tests.docs.pages import ROOT
from tests.ir.graphs import axes, below, buffer, f32, graph, load, position
from tests.passes.pipelines import numbers

PAGE = ROOT / "docs" / "rules.md"
HEAD = """# Rewrite rules

A rule is a function from an expression's node to what replaces it, whose children are rewritten
already. `Rules` lists rules with the nodes that each may rewrite; `Normalizer` applies a list until
nothing changes, `rewrite` once (`ir/rewrite.py`). To add a rule: the function, its row in a list,
and its example in `tests/ir/test_rules.py`, which also writes this page (`--update-goldens`)."""

M, J, R, K = axes("m j r k", 8, 4, 16, 16)
(NONE,) = axes("none", 0)
BUFFERS = {
    "x": buffer("x", 8, 16),
    "y": buffer("y", 4, 16),
    "h": buffer("h", 8, 16, dtype=BF16),
    "n": buffer("n", 8, dtype=I64),
    "q": buffer("q", 8, dtype=BOOL),
    "seed": buffer("seed", 1, dtype=I64),
}
LISTS = {
    "VALUE_RULES": VALUE_RULES,
    "AXIS_RULES": AXIS_RULES,
    "LOAD_RULES": LOAD_RULES,
    "EAGER_RULES": EAGER_RULES,
    "MASK_RULES": MASK_RULES,
    "ONLINE_RULES": ONLINE_RULES,
    "SCALE_RULES": SCALE_RULES,
    "tile rules": Rules((partial(uniform_comparison, lanes=(J,)), "lt", "ge")),
    "GPU_RULES": GPU_RULES,
}


def at(name: str, *where: IntoIndex, guard: Expr | None = None) -> Load:
    return load(BUFFERS[name], *where, guard=guard)


def const(value: float, dtype: DType) -> Const:
    return Const(value, dtype)


def above(score: Expr, top: Expr) -> Expr:
    return op("exp", op("sub", score, top))


X, H, N, Q = at("x", M, R), Cast(at("h", M, R), F32), at("n", M), at("q", M)
HIDDEN = op("lt", position(R), position(index(M) + 1))
SCORE = Reduce(SUM, (J,), op("mul", at("x", M, J), at("y", J, R)))
LEAST = f32(-3e38)
RANDOM = Cast(op("random", at("seed", 0), position(M)), F32)
TOP = Reduce(MAX, (R,), X)
TOTAL = Reduce(SUM, (R,), above(X, TOP))
WEIGHT = above(X, Select(op("isinf", TOP), f32(0), TOP))
PLAIN = ONLINE_RULES(Reduce(SUM, (R,), WEIGHT))
ONE_HOT = Select(op("eq", position(R), N), at("x", M, 3), f32(0))

EXAMPLES: dict[str, Expr] = {
    "implicit_rounding": Cast(Cast(X, BF16), F32),
    "fitting_integer": Cast(Cast(op("and", Cast(N, I32), const(15, I32)), I8), I32),
    "known_integer": Cast(const(4, U8), I32),
    "chosen_truth": Cast(Select(Q, f32(0), f32(5)), BOOL),
    "own_type": Cast(Q, BOOL),
    "repeated_rounding": op("round_bf16", op("round_bf16", X)),
    "rounded_integer": op("round_bf16", Cast(Cast(at("n", M), I8), F32)),
    "decided_comparison": op("lt", position(M, I32), position(8, I32)),
    "narrow_comparison": below(M, 5),
    "random_comparison": op("lt", op("mul", RANDOM, f32(2.0**-24)), f32(0.3)),
    "known_condition": op("and", Q, const(True, BOOL)),
    "double_negation": op("neg", op("neg", X)),
    "negation": op("not", op("lt", N, const(3, I64))),
    "index_arithmetic": op("add", position(M), const(3, I64)),
    "neutral_operand": op("mul", f32(1), X),
    "masked_number": op("mul", Cast(Q, F32), f32(-2)),
    "power_of_two_divisor": op("div", X, f32(8)),
    "known_selection": Select(const(True, BOOL), X, H),
    "equal_branches": Select(Q, X, X),
    "nested_selection": Select(Q, op("neg", Select(Q, X, H)), H),
    "place_in_range": op("within", position(M), const(8, I64)),
    "guard_of_other_axes": at("x", M, 0, guard=below(R, 4)),
    "guarded_indices": at("x", index(M) // 4, R, guard=below(M, 4)),
    "empty_reduction": Reduce(SUM, (NONE,), at("x", M, NONE)),
    "row_and_one_more": Reduce(MAX, (R,), op("add", Select(below(R, 15), X, at("y", 0, 0)), TOP)),
    "repeated_body": Reduce(SUM, (R,), at("x", M, 0)),
    "one_hot_sum": Reduce(SUM, (R,), ONE_HOT),
    "steady_and_one_hot_sum": Reduce(SUM, (R,), op("add", at("x", M, 0), ONE_HOT)),
    "question_of_extreme": Reduce(ANY, (R,), op("ne", X, f32(-math.inf))),
    "loaded_rounding": op("round_bf16", H),
    "eager_rounding": H,
    "masked_maximum": Reduce(MAX, (R,), Select(HIDDEN, SCORE, LEAST)),
    "masked_exponential": above(Select(HIDDEN, SCORE, LEAST), Reduce(MAX, (K,), at("x", M, K))),
    "difference_outside_maximum": Reduce(
        MAX, (R,), op("sub", X, op("maximum", TOP, at("y", 0, 0)))
    ),
    "factor_outside_sum": Reduce(SUM, (R,), op("mul", op("div", above(X, TOP), TOTAL), H)),
    "weights_outside_quotient": op("div", Reduce(SUM, (R,), op("mul", WEIGHT, H)), PLAIN),
    "scale_outside_mask": Select(HIDDEN, op("mul", X, f32(0.3)), f32(-math.inf)),
    "scale_outside_maximum": Reduce(MAX, (R,), op("mul", X, f32(0.3))),
    "uniform_comparison": below(index(M) * 4 + J, 12),
    "unguarded_gather": at("x", index(Runtime(N, index(8))), R),
}


ROUNDS = {"implicit_rounding", "factor_outside_sum", "weights_outside_quotient"}
"""Rules that change how a value is rounded."""
CHECKED = {"unguarded_gather"}
"""Rules that give a value to what is an error before."""


def name_of(rule: Callable[[Expr], Expr]) -> str:
    return (rule.func if isinstance(rule, partial) else rule).__name__


RULES = [(name_of(row[0]), name) for name, rules in LISTS.items() for row in rules.rows]


def arrays() -> dict[str, np.ndarray]:
    made = {name: numbers(*(a.const for a in b.shape)) / 2 for name, b in BUFFERS.items()}
    made["n"] = np.array([0, 7, 3, 15, -2, 16, 100, 5])
    made["q"] = made["n"] > 4
    made["seed"] = np.array([9])
    return made


def value(expr: Expr, free: tuple[Axis, ...]) -> np.ndarray:
    """Return the value of an expression at all points of some axes."""
    out = buffer("out", *(a.extent for a in free), dtype=expr.dtype)
    read = tuple(dict.fromkeys(node.buffer for node in loads((expr,))))
    example = graph(read, (Def(out, free, expr),), out)
    verify_graph(example)
    (found,) = run_graph(example, [arrays()[b.name] for b in read])
    return found


@pytest.mark.parametrize(("rule", "name"), RULES)
def test_a_rule_alone_rewrites_its_example_to_equal_values(rule: str, name: str) -> None:
    before, rules = EXAMPLES[rule], LISTS[name]
    fired = [name_of(row[0]) for row in rules.rows if Rules(row)(before) is not before]
    assert fired == [rule]
    after = rules(before)
    assert after.dtype is before.dtype
    if rule in CHECKED:
        return
    free = tuple(a for a in (M, J, R) if a in before.axes)
    with np.errstate(all="ignore"):
        error = 2.0**-8 if rule in ROUNDS else 0
        np.testing.assert_allclose(value(after, free), value(before, free), rtol=error)


@pytest.mark.parametrize("expr", EXAMPLES.values(), ids=EXAMPLES)
def test_no_value_rule_applies_to_what_they_all_have_made(expr: Expr) -> None:
    (once,) = Normalizer(VALUE_RULES)((expr,))
    assert Normalizer(VALUE_RULES)((once,)) == (once,)


def test_every_example_is_of_a_rule() -> None:
    assert EXAMPLES.keys() == {rule for rule, _ in RULES}


def page() -> str:
    """Return docs/rules.md: each list, and what each of its rules does."""
    parts = [HEAD]
    for name, rules in LISTS.items():
        parts.append(f"\n## {name}\n\n| rule | what it does |\n|---|---|")
        for function, *_ in rules.rows:
            documented = function.func if isinstance(function, partial) else function
            does = inspect.getdoc(documented).split("\n\n")[0].replace("\n", " ")
            does = does.replace("``", "`").replace("|", "\\|")
            parts.append(f"| `{name_of(function)}` | {does} |")
    return "\n".join(parts) + "\n"


def test_the_page_is_what_the_rules_say(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-goldens"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page()
