"""The rules of complex numbers beside eager: errors against complex128, and special values.

Eager's own functions differ between a vector and its tail where zeros have signs, so signs of zeros
are not compared; ``docs/numerics.md`` says which of them matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fusec.frontend.complex_numbers import Parts, computed
from fusec.ir.dtype import F32, F64
from fusec.ir.expr import Const, op
from tests.frontend.tracing import Captured

Function = Callable[..., torch.Tensor]

INF, NAN = math.inf, math.nan
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1e-30, 1e-40, 1e30, 3e38, 88.0, -100.0, INF, -INF, NAN)
NAMES = (
    "abs exp exp2 expm1 log log2 log10 sqrt rsqrt sin cos tan sinh cosh tanh sigmoid angle "
    "reciprocal"
)
UNARY: dict[str, Function] = {name: getattr(torch, name) for name in NAMES.split()}
UNARY |= {f"pow {p}": lambda z, p=p: z**p for p in (0, 2, 3, -1, 0.5, -0.5)}
UNARY |= {"over 0": lambda z: z / 0, "3 over": lambda z: 3 / z, "times -1": lambda z: z * -1}
BINARY: dict[str, Function] = {"mul": torch.mul, "div": torch.div}

OVERFLOWS = ("mul", "pow 2", "pow 3", "sin", "sinh")
"""Functions with sums of infinities that are NaN or not by how terms are rounded and ordered."""


def pairs(numbers: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor([complex(*pair) for pair in itertools.product(numbers, repeat=2)]).to(
        torch.complex64
    )


def parts(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x) if x.is_complex() else x[..., None]


def kinds(x: torch.Tensor) -> torch.Tensor:
    """Return 3 for NaN, +-2 for infinities, 0 for other parts."""
    infinite = torch.where(x.isinf(), 2 * x.sign(), torch.zeros_like(x))
    return torch.where(x.isnan(), torch.full_like(x, 3), infinite)


def results(functions: dict[str, Function], *args: torch.Tensor) -> dict[str, torch.Tensor]:
    captured = Captured(lambda *args: {name: fn(*args) for name, fn in functions.items()})
    with np.errstate(all="ignore"):
        found = captured(*args)
    assert not captured.externs
    return found


def distance(x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the error of each number relative to its size, in units of 2^-24."""
    size = parts(exact).norm(dim=-1).clamp_min(1e-37)
    return (parts(x).double() - parts(exact)).norm(dim=-1) / size * 2**24


def check(functions: dict[str, Function], *args: torch.Tensor, most: float = 4.0) -> None:
    """Assert that errors are at most four times eager's, and below ``most`` units at least."""
    found = results(functions, *args)
    for name, fn in functions.items():
        eager, exact = fn(*args), fn(*(a.to(torch.complex128) for a in args))
        finite = (parts(eager).isfinite() & parts(exact).isfinite()).all(-1)
        ours, theirs = (distance(x, exact)[finite] for x in (found[name], eager))
        bad = ours > 4 * theirs.clamp_min(most / 4)
        assert not bad.any(), f"{name}: {float(ours[bad].max())} units, eager {theirs[bad].max()}"


@pytest.mark.parametrize("scale", (1e-3, 1.0, 20.0))
def test_errors_are_of_the_size_of_eagers(scale: float) -> None:
    torch.manual_seed(0)
    z, w = torch.randn(2, 500, dtype=torch.complex64) * scale
    check(UNARY, z)
    check(BINARY, z, w)


def test_logarithm_near_the_unit_circle_keeps_its_real_part() -> None:
    torch.manual_seed(0)
    z = torch.polar(1 + 1e-4 * torch.randn(500), 3 * torch.randn(500))
    found = results({"log": torch.log}, z)["log"].real.double()
    exact = z.to(torch.complex128).log().real
    assert ((found - exact).abs() <= 2**-22 * exact.abs()).all()


def test_sizes_at_the_ends_of_the_range() -> None:
    z = pairs((1e-40, 3e-39, 1e-30, 1.0, 1e30, 3e38))
    check({name: UNARY[name] for name in ["abs", "log", "sqrt", "rsqrt", "angle"]}, z)


def test_special_values_are_those_of_eager() -> None:
    z = pairs(SPECIAL)
    found = results(UNARY, z)
    wrong = {}
    for name, fn in UNARY.items():
        ours, eager = kinds(parts(found[name])), kinds(parts(fn(z)))
        if name in OVERFLOWS:
            ours, eager = (x[parts(z).abs().amax(-1) < 1e20] for x in (ours, eager))
        if (ours != eager).any():
            at = int((ours != eager).any(-1).nonzero()[0])
            wrong[name] = f"{z[at].item()}: {found[name][at].item()}, eager {fn(z)[at].item()}"
    assert not wrong


def test_special_quotients_are_those_of_eager() -> None:
    z, w = (x.reshape(-1) for x in torch.broadcast_tensors(pairs(SPECIAL)[:, None], pairs(SPECIAL)))
    found = results({"div": torch.div}, z, w)["div"]
    assert torch.equal(kinds(parts(found)), kinds(parts(z / w)))


@pytest.mark.parametrize("sign", (1.0, -1.0))
def test_real_factors_keep_the_branch_of_a_root(sign: float) -> None:
    z = torch.tensor([complex(4, 0), complex(4, -0.0)]) * sign

    def fn(z: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(-1.0 * z) + torch.sqrt(z / -2.0) + torch.sqrt(z + 0.5)

    torch.testing.assert_close(results({"root": fn}, z)["root"], fn(z))


def test_numbers_of_f64_have_its_range() -> None:
    z = torch.tensor([1e300 + 1e300j, 1e-310 + 1e-310j, 709.5 + 1e-9j], dtype=torch.complex128)
    named = {name: UNARY[name] for name in ("abs", "sqrt", "log", "exp")}
    for name, found in results(named, z).items():
        torch.testing.assert_close(found, UNARY[name](z), rtol=1e-13, atol=0)


def test_real_number_has_no_imaginary_part() -> None:
    x = Const(2.0, F32)
    assert Parts(x).both == (x, Const(0.0, F32))
    assert computed("eq", (Parts(x), Parts(x, x))).im is None
    assert computed("exp", (Parts(Const(1.0, F64), Const(0.0, F64)),)).re.dtype is F64
    assert computed("neg", (Parts(x, x),)).im is op("neg", x)
