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
from fusec.ir.expr import Const, Expr, cast, op, select


@dataclass(frozen=True, slots=True)
class Parts:
    """A number as its real and its imaginary part; ``im`` of a real number is None."""

    re: Expr
    im: Expr | None = None

    @property
    def both(self) -> tuple[Expr, Expr]:
        """Both parts, that of a real number being 0."""
        return self.re, Const(0.0, self.re.dtype) if self.im is None else self.im

    @property
    def turned(self) -> Parts:
        """The number times i."""
        re, im = self.both
        return Parts(-im, re)

    def plus(self, real: float) -> Parts:
        return Parts(self.re + real, self.both[1])

    def times(self, factor: float) -> Parts:
        return Parts(*(part * factor for part in self.both))


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


def _is_zero(x: Expr) -> Expr:
    return op("eq", x, 0.0)


def _is_infinite(x: Expr) -> Expr:
    return op("eq", op("abs", x), math.inf)


# -- sums and products ----------------------------------------------------------------------------


def _by_part(name: str, x: Parts, y: Parts) -> Parts:
    (a, b), (c, d) = x.both, y.both
    return Parts(op(name, a, c), op(name, b, d))


def _negative(z: Parts) -> Parts:
    return Parts(*(-part for part in z.both))


def product(x: Parts, y: Parts) -> Parts:
    (a, b), (c, d) = x.both, y.both
    return Parts(a * c - b * d, a * d + b * c)


def quotient(x: Parts, y: Parts) -> Parts:
    """Return x / y by Smith's method, with the quotient of y's parts that is at most 1.

    For y = 0 each part is infinite or NaN.
    """
    (a, b), (c, d) = x.both, y.both
    wide = op("ge", op("abs", c), op("abs", d))
    long, short = (c, d) if y.im is None else (select(wide, c, d), select(wide, d, c))
    zero = _is_zero(long)
    ratio = select(zero, 0.0, short / long)
    re, im = a + b * ratio, b - a * ratio
    if y.im is None:
        below = select(zero, op("abs", c), c)
        return Parts(select(zero, a, re) / below, select(zero, b, im) / below)
    re = select(wide, re, a * ratio + b)
    im = select(wide, im, b * ratio - a)
    length = select(zero, op("abs", long), long) + short * ratio
    scale = op("div", 1.0, length)
    return Parts(select(zero, a, re) * scale, select(zero, b, im) * scale)


def reciprocal(z: Parts) -> Parts:
    return quotient(Parts(Const(1.0, z.re.dtype)), z)


# -- size and angle -------------------------------------------------------------------------------


def argument(z: Parts) -> Parts:
    """Return the angle of a number, in (-pi, pi]."""
    re, im = z.both
    return Parts(op("atan2", im, re))


def from_polar(length: Expr, angle: Expr) -> Parts:
    return Parts(length * op("cos", angle), length * op("sin", angle))


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
        made = cls(z.both, op("gt", long, large), op("lt", long, small))
        factor, (re, im) = made.choice(0.25, 2.0**48, 1.0), z.both
        return replace(made, parts=(re * factor, im * factor))

    def choice(self, large: float, small: float, other: float) -> Expr:
        """Return one number for large sizes, one for small ones and one for others."""
        usual = select(self.is_small, Const(small, self.parts[0].dtype), other)
        return select(self.is_large, large, usual)


# -- exponentials, logarithms, powers -------------------------------------------------------------


def exponential(z: Parts) -> Parts:
    """Return exp(z): of re = -inf that is 0 for any angle, of im = 0 it is real."""
    re, im = z.both
    shift, factor = _shift(re)
    length, sine = op("exp", re - shift), op("sin", im)
    gone = op("isnan", sine) & op("eq", re, -math.inf)
    imaginary = select(gone, length, length * sine * factor)
    real = _directed(re, length, op("cos", im), factor)
    return Parts(real, select(_is_zero(im), im, imaginary))


def _directed(re: Expr, length: Expr, cosine: Expr, factor: Expr) -> Expr:
    """Return ``length * cosine * factor``; for an infinite ``re`` without direction, the length."""
    nowhere = _is_infinite(re) & op("isnan", cosine)
    return select(nowhere, length, length * cosine * factor)


def _shift(x: Expr) -> tuple[Expr, Expr]:
    """Return s and exp(s) such that exp(x - s) is in range: 0 and 1, unless exp(x) is not.

    For its product with something small, a cosine for one, may be in range.
    """
    end, step = (88.0, 64.0) if x.dtype is F32 else (709.0, 512.0)
    beyond = op("gt", x, end)
    return (
        select(beyond, Const(step, x.dtype), 0.0),
        select(beyond, Const(math.exp(step), x.dtype), 1.0),
    )


def exponential_less_one(z: Parts) -> Parts:
    re, im = z.both
    half = op("sin", im * 0.5)
    real = op("expm1", re) * op("cos", im) - half * half * 2.0
    return Parts(real, op("exp", re) * op("sin", im))


def logarithm(z: Parts) -> Parts:
    """Return log(z); near |z| = 1, where log(|z|) cancels, from |z|^2 - 1.

    Of f32 that difference is exact in f64, but for one rounding.
    """
    a, b = map(partial(op, "abs"), z.both)
    long, short = op("maximum", a, b), op("minimum", a, b)
    x, y = cast(long, F64), cast(short, F64)
    beyond = cast((x - 1.0) * (x + 1.0) + y * y, long.dtype)
    near = op("gt", long, 0.5) & op("lt", long, 1.5)
    close = op("log1p", select(near, beyond, 0.0)) * 0.5
    scaled = _InRange.of(z)
    added = scaled.choice(math.log(4), -48 * math.log(2), 0.0)
    far = op("log", op("hypot", *scaled.parts)) + added
    return Parts(select(near, close, far), argument(z).re)


def logarithm_of_one_more(z: Parts) -> Parts:
    """Return log(1 + z), for small z from |1 + z|^2 - 1."""
    re, im = z.both
    x, y = cast(re, F64), cast(im, F64)
    beyond = cast(x * (x + 2.0) + y * y, re.dtype)
    near = op("lt", op("hypot", re, im), 0.5)
    close = op("log1p", select(near, beyond, 0.0)) * 0.5
    close = select(_is_zero(beyond), re, close)  # it has underflowed
    whole = logarithm(z.plus(1.0))
    return Parts(select(near, close, whole.re), whole.im)


def root(z: Parts) -> Parts:
    """Return the square root with a real part that is not negative."""
    re, im = z.both
    scaled = _InRange.of(z)
    a, b = scaled.parts
    size = op("abs", b)
    half = op("sqrt", (op("abs", a) + op("hypot", a, b)) * 0.5)
    rest = select(_is_zero(half), half, size / (half * 2.0))
    endless, back = _is_infinite(im), scaled.choice(2.0, 2.0**-24, 1.0)
    long, short = (select(endless, size, x) * back for x in (half, rest))
    right = op("ge", re, 0.0)
    return Parts(select(right, long, short), op("copysign", select(right, short, long), im))


# -- trigonometric and hyperbolic functions -------------------------------------------------------


def _turned(rule: Function, z: Parts) -> Parts:
    """Return -i f(i z), which is the sine if f is the hyperbolic sine, and so on."""
    turned, back = rule(z.turned).both
    return Parts(back, -turned)


def hyperbolic_sine(z: Parts) -> Parts:
    re, im = z.both
    sine, cosine, factor = _hyperbolic(re)
    real = _directed(re, sine, op("cos", im), factor)
    imaginary = cosine * op("sin", im) * factor
    return Parts(select(_is_zero(re), re, real), select(_is_zero(im), im, imaginary))


def hyperbolic_cosine(z: Parts) -> Parts:
    re, im = z.both
    sine, cosine, factor = _hyperbolic(re)
    real = _directed(re, cosine, op("cos", im), factor)
    imaginary = sine * op("sin", im) * factor
    flat = _is_zero(re) | _is_zero(im)
    zero = op("copysign", 0.0, op("copysign", 1.0, re) * im)
    return Parts(real, select(flat, zero, imaginary))


def _hyperbolic(x: Expr) -> tuple[Expr, Expr, Expr]:
    """Return the hyperbolic sine and cosine of a real number over a factor, and the factor."""
    size = op("abs", x)
    shift, factor = _shift(size)
    usual, far = _is_zero(shift), op("exp", size - shift) * 0.5
    sine, cosine = (select(usual, op(name, x), far) for name in ("sinh", "cosh"))
    return op("copysign", sine, x), cosine, factor


def hyperbolic_tangent(z: Parts) -> Parts:
    """Return tanh(z) by e = exp(-2 |re|): no term overflows, and none of the sums cancels.

    The real part is (1 - e^2) / n, the imaginary one 4 e sin(im) cos(im) / n, where
    n = (1 - e)^2 + 4 e cos(im)^2.
    """
    re, im = z.both
    exponent = op("abs", re) * -2.0
    less, four = op("expm1", exponent), op("exp", exponent) * 4.0  # e - 1, 4 e
    sine, cosine = op("sin", im), op("cos", im)
    across, beside = (
        select(_is_infinite(re), 0.0, four * (factor * cosine)) for factor in (sine, cosine)
    )
    below = less * less + beside
    size = -less * (less + 2.0) / below
    real, imaginary = op("copysign", size, re), across / below
    return Parts(select(_is_zero(re), re, real), select(_is_zero(im), im, imaginary))


# -- comparisons ----------------------------------------------------------------------------------


def compared(name: str, both: str, x: Parts, y: Parts) -> Parts:
    (a, b), (c, d) = x.both, y.both
    return Parts(op(both, op(name, a, c), op(name, b, d)))


def truth(z: Parts) -> Parts:
    """Return whether a number is not 0."""
    return compared("ne", "or", z, Parts(Const(0.0, z.re.dtype)))


_RULES: dict[str, Function] = {
    "add": partial(_by_part, "add"),
    "sub": partial(_by_part, "sub"),
    "mul": product,
    "div": quotient,
    "neg": _negative,
    "reciprocal": reciprocal,
    "abs": lambda z: Parts(op("hypot", *z.both)),
    "exp": exponential,
    "exp2": lambda z: exponential(z.times(math.log(2))),
    "expm1": exponential_less_one,
    "log": logarithm,
    "log2": lambda z: logarithm(z).times(1 / math.log(2)),
    "log10": lambda z: logarithm(z).times(1 / math.log(10)),
    "log1p": logarithm_of_one_more,
    "pow": lambda x, y: exponential(product(y, logarithm(x))),
    "sqrt": root,
    "rsqrt": lambda z: reciprocal(root(z)),
    "sin": partial(_turned, hyperbolic_sine),
    "cos": lambda z: hyperbolic_cosine(z.turned),
    "tan": partial(_turned, hyperbolic_tangent),
    "sinh": hyperbolic_sine,
    "cosh": hyperbolic_cosine,
    "tanh": hyperbolic_tangent,
    "sigmoid": lambda z: reciprocal(exponential(_negative(z)).plus(1.0)),
    "eq": partial(compared, "eq", "and"),
    "ne": partial(compared, "ne", "or"),
    "isnan": lambda z: Parts(op("or", *(op("isnan", part) for part in z.both))),
    "isinf": lambda z: Parts(op("or", *(op("isinf", part) for part in z.both))),
}
"""By the names of ``ir/scalar.py``."""
