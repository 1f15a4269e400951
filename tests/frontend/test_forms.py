"""Tensors in memory: complex ones as real numbers in pairs, and torch's bits computed away."""

from __future__ import annotations

import pytest
import torch

from fusec.errors import Unsupported
from fusec.frontend.forms import (
    form_of,
    interleaved,
    memory_of_value,
    part,
    value_of_memory,
    without_bit,
)
from fusec.frontend.value import ComplexValue, Value, is_whole, whole
from fusec.ir.dtype import F32, NumberForm
from fusec.ir.graph import Extern, OwnTensor, View
from fusec.ir.index import index
from tests.frontend.tracing import body, check, lowered
from tests.ir.graphs import buffer

Z = torch.arange(8.0).sin() + 1j * torch.arange(8.0).cos()


def shown(value: Value | ComplexValue) -> list[str]:
    return list(map(repr, value.exprs))


def test_form_is_read_off_a_tensor() -> None:
    tensors = (Z.real.clone(), Z.conj().imag, Z, Z.conj(), Z.conj().conj())
    assert list(map(form_of, tensors)) == [*NumberForm, NumberForm.COMPLEX]


def test_complex_tensors_have_no_negative_bit() -> None:
    with pytest.raises(Unsupported, match="a complex tensor with the negative bit"):
        form_of(torch._neg_view(Z))


def test_value_under_a_bit_is_computed_from_memory() -> None:
    memory = whole(buffer("z", 8, 2))
    assert shown(value_of_memory(memory, NumberForm.PLAIN)) == ["z[i0, i1]"]
    assert shown(value_of_memory(memory, NumberForm.NEGATIVE)) == ["neg(z[i0, i1])"]
    assert shown(value_of_memory(memory, NumberForm.COMPLEX)) == ["z[i0, 0]", "z[i0, 1]"]
    assert shown(value_of_memory(memory, NumberForm.CONJUGATE)) == ["z[i0, 0]", "neg(z[i0, 1])"]


@pytest.mark.parametrize("form", NumberForm)
def test_memory_of_a_value_is_what_it_is_computed_from(form: NumberForm) -> None:
    memory = whole(buffer("z", 8, 2))
    assert is_whole(memory_of_value(value_of_memory(memory, form), form))


def test_parts_of_any_axis_of_pairs_are_interleaved_in_place() -> None:
    x = buffer("x", 3, 16)
    memory = Value(
        (index(3), index(8), index(2)), F32, whole(buffer("a", 3, 8, 2)).axes, whole(x).expr
    )
    i0, i1, i2 = map(index, memory.axes)
    memory = Value(memory.shape, F32, memory.axes, whole(x).at((i0, i1 * 2 + i2)))
    assert shown(interleaved(part(memory, 0), part(memory, 1))) == ["x[i0, 2*i1 + i2]"]


def test_other_parts_are_chosen_between() -> None:
    re, im = whole(buffer("re", 8)), whole(buffer("im", 8))
    assert shown(interleaved(re, im)) == ["where((i1):i64 < (1):i64, re[i0], im[i0])"]
    assert interleaved(part(whole(buffer("z", 8, 2)), 1), re).buffer is None


def test_form_without_its_bit_has_the_same_values() -> None:
    plain, whole = NumberForm.PLAIN, NumberForm.COMPLEX
    assert list(map(without_bit, NumberForm)) == [plain, plain, whole, whole]


# -- arguments and results ------------------------------------------------------------------------


def test_transform_is_read_in_place_and_its_argument_is_written_in_its_form() -> None:
    graph = lowered(lambda x: torch.fft.ifft(torch.fft.fft(x) * 2j), Z)
    assert [line for line in body(graph) if "extern" in line or "complex" in line] == [
        "fft_c2c = extern aten._fft_c2c.default(complex x_1, [0], 0, True)",
        "fft_c2c_1 = extern aten._fft_c2c.default(complex mul, [0], 2, False)",
        "return complex fft_c2c_1",
    ]


def test_eager_kernel_takes_a_conjugate_as_a_bit() -> None:
    z, w = torch.ones(2, 64, 64, dtype=torch.complex64)
    (call,) = lowered(lambda z, w: z @ w.mH, z, w).nodes
    assert isinstance(call, Extern)
    assert [view.form for view in call.views] == [NumberForm.COMPLEX, NumberForm.CONJUGATE]


def test_views_of_one_memory_are_results_of_one_buffer() -> None:
    def fn(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = z * 2
        return y, y.conj(), torch.view_as_real(y), y.real, y.conj().imag

    graph = lowered(fn, Z)
    views = [o.view if isinstance(o, OwnTensor) else o for o in graph.outputs]
    assert len({v.buffer for v in views if isinstance(v, View)}) == 1
    assert [v.form.value for v in views if isinstance(v, View)] == [
        *("complex", "conjugate", "plain", "plain", "negative")
    ]


def test_unaligned_pairs_are_copied_for_an_eager_kernel() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(torch.complex(x[1:-1:2], x[2::2]))

    check(fn, torch.arange(18.0).sin(), externs=1)


def test_numbers_of_complex_inputs_are_in_memory_as_given() -> None:
    check(lambda z: (z * 2, z.t().conj().imag), Z.reshape(2, 4))
    check(lambda z: z + 1, Z.conj())
    check(lambda x: x + 1, Z.conj().imag)
