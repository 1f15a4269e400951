"""Operations of complex tensors in index notation: captured graphs compute what eager does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusec.frontend.ops.complex_tensors import complex_lowering
from fusec.ir.expr import reductions
from fusec.ir.graph import Def, Extern
from fusec.ir.machine import FusionTuning
from tests.frontend.tracing import body, check, lowered

aten = torch.ops.aten
torch.manual_seed(0)
Z, W = torch.randn(2, 4, 6, dtype=torch.complex64)
X = torch.randn(4, 6)

CASES: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "view_as_real": (lambda z: torch.view_as_real(z * 2) + 1, (Z,)),
    "view_as_complex": (lambda x: torch.view_as_complex(x.view(4, 3, 2)) * 2j, (X,)),
    "parts of parts": (lambda z: torch.view_as_real(torch.view_as_real(z).sum(0).cfloat()), (Z,)),
    "complex": (lambda x, y: torch.complex(x, y[0].expand(4, 6)) + 1, (X, X + 1)),
    "polar": (lambda x, y: torch.polar(x.abs(), y), (X, X + 1)),
    "conjugates": (lambda z, w: (z.conj() * w, z.conj_physical().conj() + w, z.conj().t()), (Z, W)),
    "negative": (lambda z: (z.conj().imag * 2, z.conj().imag.conj() + 1), (Z,)),
    "angle": (lambda z: (z.angle(), z.real.angle()), (Z,)),
    "as_strided": (lambda z: torch.as_strided(z, (2, 3), (7, 2)) * 2, (Z,)),
    "conversions": (lambda z: (z.bool(), z.real.to(torch.complex128) * 1j, z.cdouble()), (Z,)),
    "copies": (lambda z, x: (aten.copy(z, x), aten.copy(z, z[0] + 1), aten.copy(x, x[0])), (Z, X)),
    "norms": (lambda z: [torch.linalg.vector_norm(z, p, 1) for p in (2, 1, 3, torch.inf, 0)], (Z,)),
    "variances": (lambda z: (z.var(1), z.std(), *torch.var_mean(z, 0)), (Z,)),
    "full": (lambda z: (torch.full_like(z, 1 + 2j) * z, torch.zeros_like(z), z.new_ones(2)), (Z,)),
    "products": (lambda z, w: (z @ w.mT, z[None] @ w.mH, z.mv(w[0]), z[0].vdot(w[0])), (Z, W)),
    "biased product": (lambda z, w: torch.addmm(w[:, :4], z, w.mT, beta=2j, alpha=1 - 1j), (Z, W)),
    "sums": (lambda z: (z.sum(), z.mean(1), z.cumsum(0), z.any(1), z.all()), (Z,)),
    "scatters": (lambda z, w: (z.slice_scatter(w[1:], 0, 1), z.select_scatter(w[0], 0, 1)), (Z, W)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_captured_graph_computes_what_eager_does(name: str) -> None:
    check(*(CASES[name][0], *CASES[name][1]))


@pytest.mark.filterwarnings("ignore:Casting complex")
def test_imaginary_part_is_dropped_where_eager_drops_it() -> None:
    def fn(z: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return z.to(torch.float64), z.to(torch.int32), aten.copy(x, z)

    check(fn, Z, X)


def test_symbolic_sizes() -> None:
    check(lambda z, w: (z.conj() * w, torch.view_as_real(z).flatten(1)), Z, W, dynamic=True)


def test_views_emit_nothing() -> None:
    graph = lowered(lambda z: torch.view_as_real(z[1:].mT).select(2, 1), Z)
    assert graph.nodes == ()
    assert body(graph) == ["return z_1[6, 3 : 2, 12 + 13]"]


def test_small_product_is_a_sum_and_a_large_one_the_library_s() -> None:
    def product(terms: int, width: int) -> Def | Extern:
        ones = torch.ones(width, terms, dtype=torch.complex64)
        (*_, line) = lowered(lambda z, w: (z @ w.mT).real + 0, ones, ones).nodes[:-1]
        return line

    few = FusionTuning().small_product[1]
    assert reductions(product(few, 512).expr) and reductions(product(64, 16).expr)
    assert product(64, 64).reason == "contraction: runs in the library"


def test_operation_without_a_rule_has_no_lowering() -> None:
    assert complex_lowering(aten._fft_c2c.default, None, ()) is None
