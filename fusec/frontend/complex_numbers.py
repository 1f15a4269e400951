"""Scalar operations on complex numbers, as expressions of their parts.

Each rule has the range of the function that eager calls: |z|^2 is formed only where it cannot
overflow, a quotient is scaled (Smith, Algorithm 116: Complex division, 1962), and zeros, infinities
and NaN are those of C99's annex G where eager's are. A real operand has the imaginary part 0, as
eager promotes it: ``-1 * (4 + 0i)`` is ``-4 + 0i``, not ``-4 - 0i``, whose root is another one.

Worked example: ``exp(z)`` is ``exp(re) * cos(im)`` and ``exp(re) * sin(im)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from fusec.errors import Unsupported
from fusec.ir.dtype import F32, F64
from fusec.ir.expr import Const, Expr, Select, cast, op


@dataclass(frozen=True, slots=True)
class Parts:
    """A number as its real and its imaginary part; ``im`` of a real number is None."""

    re: Expr
    im: Expr | None = None

    @property
    def both(self) -> tuple[Expr, Expr]:
        """Both parts, that of a real number being 0."""
        return self.re, _like(0.0, self.re) if self.im is None else self.im


Function = Callable[..., Parts]


def computed(name: str, args: tuple[Parts, ...]) -> Parts:
    """Return a scalar operation of numbers of which some are complex.

    Raises:
        Unsupported: if it has no rule here.
    """
    rule = _RULES.get(name)
    if rule is None:
        raise Unsupported(f"{name} of complex numbers")
    return rule(*args)


def _like(value: float, x: Expr) -> Expr:
    return Const(value, x.dtype)


def _add(a: Expr, b: Expr) -> Expr:
    return op("add", a, b)


def _sub(a: Expr, b: Expr) -> Expr:
    return op("sub", a, b)


def _mul(a: Expr, b: Expr) -> Expr:
    return op("mul", a, b)


def _div(a: Expr, b: Expr) -> Expr:
    return op("div", a, b)


def _scaled(x: Expr, factor: float) -> Expr:
    return op("mul", x, _like(factor, x))


def _is_zero(x: Expr) -> Expr:
    return op("eq", x, _like(0.0, x))


def _is_infinite(x: Expr) -> Expr:
    return op("eq", op("abs", x), _like(math.inf, x))


# -- sums and products ----------------------------------------------------------------------------


def _by_part(name: str, x: Parts, y: Parts) -> Parts:
    (a, b), (c, d) = x.both, y.both
    return Parts(op(name, a, c), op(name, b, d))


def negative(z: Parts) -> Parts:
    re, im = z.both
    return Parts(op("neg", re), op("neg", im))


def product(x: Parts, y: Parts) -> Parts:
    (a, b), (c, d) = x.both, y.both
    return Parts(_sub(_mul(a, c), _mul(b, d)), _add(_mul(a, d), _mul(b, c)))


def quotient(x: Parts, y: Parts) -> Parts:
    """Return x / y by Smith's method, with the quotient of y's parts that is at most 1.

    For y = 0 each part is infinite or NaN.
    """
    (a, b), (c, d) = x.both, y.both
    wide = op("ge", op("abs", c), op("abs", d))
    long, short = (c, d) if y.im is None else (Select(wide, c, d), Select(wide, d, c))
    zero = _is_zero(long)
    ratio = Select(zero, _like(0.0, c), _div(short, long))
    re, im = _add(a, _mul(b, ratio)), _sub(b, _mul(a, ratio))
    if y.im is None:
        below = Select(zero, op("abs", c), c)
        return Parts(_div(Select(zero, a, re), below), _div(Select(zero, b, im), below))
    re = Select(wide, re, _add(_mul(a, ratio), b))
    im = Select(wide, im, _sub(_mul(b, ratio), a))
    length = _add(Select(zero, op("abs", long), long), _mul(short, ratio))
    scale = _div(_like(1.0, c), length)
    return Parts(_mul(Select(zero, a, re), scale), _mul(Select(zero, b, im), scale))


def reciprocal(z: Parts) -> Parts:
    return quotient(Parts(_like(1.0, z.re)), z)


# -- size and angle -------------------------------------------------------------------------------


def modulus(z: Parts) -> Parts:
    return Parts(op("hypot", *z.both))


def argument(z: Parts) -> Parts:
    """Return the angle of a number, in (-pi, pi]."""
    re, im = z.both
    return Parts(op("atan2", im, re))


def from_polar(length: Expr, angle: Expr) -> Parts:
    return Parts(_mul(length, op("cos", angle)), _mul(length, op("sin", angle)))


@dataclass(frozen=True, slots=True)
class _InRange:
    """A number times a power of two, so that its size neither overflows nor is subnormal."""

    parts: tuple[Expr, Expr]
    is_large: Expr
    is_small: Expr

    @classmethod
    def of(cls, z: Parts) -> _InRange:
        long = op("maximum", *map(partial(op, "abs"), z.both))
        small, large = (2.0**-100, 2.0**125) if long.dtype is F32 else (2.0**-970, 2.0**1021)
        made = cls(z.both, op("gt", long, _like(large, long)), op("lt", long, _like(small, long)))
        factor, (re, im) = made.choice(0.25, 2.0**48, 1.0), z.both
        return replace(made, parts=(_mul(re, factor), _mul(im, factor)))

    def choice(self, large: float, small: float, other: float) -> Expr:
        """Return one number for large sizes, one for small ones and one for others."""
        of_large, of_small, of_others = (_like(x, self.parts[0]) for x in (large, small, other))
        return Select(self.is_large, of_large, Select(self.is_small, of_small, of_others))


# -- exponentials, logarithms, powers -------------------------------------------------------------


def exponential(z: Parts) -> Parts:
    """Return exp(z): of re = -inf that is 0 for any angle, of im = 0 it is real."""
    re, im = z.both
    shift, factor = _shift(re)
    length, sine = op("exp", _sub(re, shift)), op("sin", im)
    gone = op("and", op("isnan", sine), op("eq", re, _like(-math.inf, re)))
    imaginary = Select(gone, length, _mul(_mul(length, sine), factor))
    real = _directed(re, length, op("cos", im), factor)
    return Parts(real, Select(_is_zero(im), im, imaginary))


def _directed(re: Expr, length: Expr, cosine: Expr, factor: Expr) -> Expr:
    """Return ``length * cosine * factor``; for an infinite ``re`` without direction, the length."""
    nowhere = op("and", _is_infinite(re), op("isnan", cosine))
    return Select(nowhere, length, _mul(_mul(length, cosine), factor))


def _shift(x: Expr) -> tuple[Expr, Expr]:
    """Return s and exp(s) such that exp(x - s) is in range: 0 and 1, unless exp(x) is not.

    For its product with something small, a cosine for one, may be in range.
    """
    end, step = (88.0, 64.0) if x.dtype is F32 else (709.0, 512.0)
    beyond = op("gt", x, _like(end, x))
    return (
        Select(beyond, _like(step, x), _like(0.0, x)),
        Select(beyond, _like(math.exp(step), x), _like(1.0, x)),
    )


def exponential_less_one(z: Parts) -> Parts:
    re, im = z.both
    half = op("sin", _scaled(im, 0.5))
    real = _sub(_mul(op("expm1", re), op("cos", im)), _scaled(_mul(half, half), 2.0))
    return Parts(real, _mul(op("exp", re), op("sin", im)))


def logarithm(z: Parts) -> Parts:
    """Return log(z); near |z| = 1, where log(|z|) cancels, from |z|^2 - 1.

    Of f32 that difference is exact in f64, but for one rounding.
    """
    a, b = map(partial(op, "abs"), z.both)
    long, short = op("maximum", a, b), op("minimum", a, b)
    x, y = cast(long, F64), cast(short, F64)
    one = _like(1.0, x)
    beyond = cast(_add(_mul(_sub(x, one), _add(x, one)), _mul(y, y)), long.dtype)
    near = op("and", op("gt", long, _like(0.5, long)), op("lt", long, _like(1.5, long)))
    close = _scaled(op("log1p", Select(near, beyond, _like(0.0, long))), 0.5)
    scaled = _InRange.of(z)
    added = scaled.choice(math.log(4), -48 * math.log(2), 0.0)
    far = _add(op("log", op("hypot", *scaled.parts)), added)
    return Parts(Select(near, close, far), argument(z).re)


def logarithm_of_one_more(z: Parts) -> Parts:
    """Return log(1 + z), for small z from |1 + z|^2 - 1."""
    re, im = z.both
    x, y = cast(re, F64), cast(im, F64)
    beyond = cast(_add(_mul(x, _add(x, _like(2.0, x))), _mul(y, y)), re.dtype)
    near = op("lt", modulus(z).re, _like(0.5, re))
    close = _scaled(op("log1p", Select(near, beyond, _like(0.0, re))), 0.5)
    close = Select(_is_zero(beyond), re, close)  # it has underflowed
    whole = logarithm(Parts(_add(re, _like(1.0, re)), im))
    return Parts(Select(near, close, whole.re), whole.im)


def power(x: Parts, y: Parts) -> Parts:
    return exponential(product(y, logarithm(x)))


def root(z: Parts) -> Parts:
    """Return the square root with a real part that is not negative."""
    re, im = z.both
    scaled = _InRange.of(z)
    a, b = scaled.parts
    size = op("abs", b)
    half = op("sqrt", _scaled(_add(op("abs", a), op("hypot", a, b)), 0.5))
    rest = Select(_is_zero(half), half, _div(size, _scaled(half, 2.0)))
    endless, back = _is_infinite(im), scaled.choice(2.0, 2.0**-24, 1.0)
    long, short = (_mul(Select(endless, size, x), back) for x in (half, rest))
    right = op("ge", re, _like(0.0, re))
    return Parts(Select(right, long, short), op("copysign", Select(right, short, long), im))


# -- trigonometric and hyperbolic functions -------------------------------------------------------


def _turned(rule: Function, z: Parts) -> Parts:
    """Return -i f(i z), which is the sine if f is the hyperbolic sine, and so on."""
    re, im = z.both
    turned, back = rule(Parts(op("neg", im), re)).both
    return Parts(back, op("neg", turned))


def hyperbolic_sine(z: Parts) -> Parts:
    re, im = z.both
    sine, cosine, factor = _hyperbolic(re)
    real = _directed(re, sine, op("cos", im), factor)
    imaginary = _mul(_mul(cosine, op("sin", im)), factor)
    return Parts(Select(_is_zero(re), re, real), Select(_is_zero(im), im, imaginary))


def hyperbolic_cosine(z: Parts) -> Parts:
    re, im = z.both
    sine, cosine, factor = _hyperbolic(re)
    real = _directed(re, cosine, op("cos", im), factor)
    imaginary = _mul(_mul(sine, op("sin", im)), factor)
    flat = op("or", _is_zero(re), _is_zero(im))
    zero = op("copysign", _like(0.0, re), _mul(op("copysign", _like(1.0, re), re), im))
    return Parts(real, Select(flat, zero, imaginary))


def _hyperbolic(x: Expr) -> tuple[Expr, Expr, Expr]:
    """Return the hyperbolic sine and cosine of a real number over a factor, and the factor."""
    size = op("abs", x)
    shift, factor = _shift(size)
    usual, far = _is_zero(shift), _scaled(op("exp", _sub(size, shift)), 0.5)
    sine, cosine = (Select(usual, op(name, x), far) for name in ("sinh", "cosh"))
    return op("copysign", sine, x), cosine, factor


def cosine(z: Parts) -> Parts:
    """Return cosh(i z)."""
    re, im = z.both
    return hyperbolic_cosine(Parts(op("neg", im), re))


def hyperbolic_tangent(z: Parts) -> Parts:
    """Return tanh(z) by e = exp(-2 |re|): no term overflows, and none of the sums cancels.

    The real part is (1 - e^2) / n, the imaginary one 4 e sin(im) cos(im) / n, where
    n = (1 - e)^2 + 4 e cos(im)^2.
    """
    re, im = z.both
    exponent = _scaled(op("abs", re), -2.0)
    less, four = op("expm1", exponent), _scaled(op("exp", exponent), 4.0)  # e - 1, 4 e
    sine, cosine = op("sin", im), op("cos", im)
    across, beside = (
        Select(_is_infinite(re), _like(0.0, re), _mul(four, _mul(factor, cosine)))
        for factor in (sine, cosine)
    )
    below = _add(_mul(less, less), beside)
    size = _div(_mul(op("neg", less), _add(less, _like(2.0, less))), below)
    real, imaginary = op("copysign", size, re), _div(across, below)
    return Parts(Select(_is_zero(re), re, real), Select(_is_zero(im), im, imaginary))


def logistic(z: Parts) -> Parts:
    re, im = exponential(negative(z)).both
    return reciprocal(Parts(_add(re, _like(1.0, re)), im))


# -- comparisons ----------------------------------------------------------------------------------


def compared(name: str, both: str, x: Parts, y: Parts) -> Parts:
    (a, b), (c, d) = x.both, y.both
    return Parts(op(both, op(name, a, c), op(name, b, d)))


def any_part(test: str, z: Parts) -> Parts:
    re, im = z.both
    return Parts(op("or", op(test, re), op(test, im)))


def truth(z: Parts) -> Parts:
    """Return whether a number is not 0."""
    return compared("ne", "or", z, Parts(_like(0.0, z.re)))


def _after(outer: Function, inner: Function, z: Parts) -> Parts:
    return outer(inner(z))


def _multiple(factor: float, z: Parts) -> Parts:
    re, im = z.both
    return Parts(_scaled(re, factor), _scaled(im, factor))


_RULES: dict[str, Function] = {
    "add": partial(_by_part, "add"),
    "sub": partial(_by_part, "sub"),
    "mul": product,
    "div": quotient,
    "neg": negative,
    "reciprocal": reciprocal,
    "abs": modulus,
    "exp": exponential,
    "exp2": partial(_after, exponential, partial(_multiple, math.log(2))),
    "expm1": exponential_less_one,
    "log": logarithm,
    "log2": partial(_after, partial(_multiple, 1 / math.log(2)), logarithm),
    "log10": partial(_after, partial(_multiple, 1 / math.log(10)), logarithm),
    "log1p": logarithm_of_one_more,
    "pow": power,
    "sqrt": root,
    "rsqrt": partial(_after, reciprocal, root),
    "sin": partial(_turned, hyperbolic_sine),
    "cos": cosine,
    "tan": partial(_turned, hyperbolic_tangent),
    "sinh": hyperbolic_sine,
    "cosh": hyperbolic_cosine,
    "tanh": hyperbolic_tangent,
    "sigmoid": logistic,
    "eq": partial(compared, "eq", "and"),
    "ne": partial(compared, "ne", "or"),
    "isnan": partial(any_part, "isnan"),
    "isinf": partial(any_part, "isinf"),
}
"""By the names of ``ir/scalar.py``."""
