"""Tensors in memory: complex ones as real numbers in pairs, and torch's bits computed away."""

from __future__ import annotations

import pytest
import torch

from fusec.frontend.forms import form_of, in_memory, interleaved, of_memory, part, without_bit
from fusec.frontend.value import ComplexValue, Value, is_whole, whole
from fusec.ir.dtype import F32, NumberForm
from fusec.ir.index import index
from tests.ir.graphs import buffer

Z = torch.arange(8.0).sin() + 1j * torch.arange(8.0).cos()


def shown(value: Value | ComplexValue) -> list[str]:
    return list(map(repr, value.exprs))


def test_form_is_read_off_a_tensor() -> None:
    tensors = (Z.real.clone(), Z.conj().imag, Z, Z.conj(), Z.conj().conj())
    assert list(map(form_of, tensors)) == [*NumberForm, NumberForm.COMPLEX]


def test_value_under_a_bit_is_computed_from_memory() -> None:
    memory = whole(buffer("z", 8, 2))
    assert shown(of_memory(memory, NumberForm.PLAIN)) == ["z[i0, i1]"]
    assert shown(of_memory(memory, NumberForm.NEGATIVE)) == ["neg(z[i0, i1])"]
    assert shown(of_memory(memory, NumberForm.COMPLEX)) == ["z[i0, 0]", "z[i0, 1]"]
    assert shown(of_memory(memory, NumberForm.CONJUGATE)) == ["z[i0, 0]", "neg(z[i0, 1])"]


@pytest.mark.parametrize("form", NumberForm)
def test_memory_of_a_value_is_what_it_is_computed_from(form: NumberForm) -> None:
    memory = whole(buffer("z", 8, 2))
    assert is_whole(in_memory(of_memory(memory, form), form))


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
