"""Names are identifiers, all different, and a thing keeps the one that it got."""

from __future__ import annotations

import pytest

from fusec.ir.index import Axis, index
from fusec.ir.names import LONGEST_FUNCTION, Names, function_name, identifier, operation_words


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("x.weight", "x_weight"), ("_x", "x"), ("3d", "v3d"), ("größe", "gr__e"), ("", "v")],
)
def test_any_text_becomes_an_identifier(text: str, wanted: str) -> None:
    assert identifier(text) == wanted


@pytest.mark.parametrize(
    ("ops", "wanted"),
    [
        (("add.Tensor", "native_layer_norm.default"), "add_layer_norm_k7"),
        (("_softmax.default", "mul.Tensor", "mul.Scalar"), "softmax_mul_k7"),
        (("mylib::3-scale.default",), "mylib__3_scale_k7"),
        (("mylib.scale.default",), "scale_k7"),
        (("sin",), "sin_k7"),
        ((), "k7"),
    ],
)
def test_a_function_is_called_by_operations_and_its_kernel(ops: tuple[str, ...], wanted: str):
    assert function_name("k7", ops) == wanted


def test_words_that_say_most_stand_first_where_there_are_many() -> None:
    few = ("add.Tensor", "_scaled_dot_product_flash_attention_for_cpu.default")
    assert operation_words(few) == ("add", "attention")
    backward = "_scaled_dot_product_efficient_attention_backward.default"
    many = ("le.Tensor", "add.Tensor", "add.Scalar", "where.self", backward, "tanh.default")
    assert operation_words(many) == ("attention_backward", "tanh", "le", "add", "where")
    assert function_name("k2", many) == "attention_backward_tanh_le_add_k2"


def test_a_long_function_name_keeps_the_first_whole_words() -> None:
    words = [f"operation{n}.default" for n in range(9)]
    assert function_name("k7", words) == "operation0_operation1_operation2_operation3_k7"
    assert len(function_name("k1234", words)) <= LONGEST_FUNCTION
    assert function_name("k7", ["x" * 60]) == "k7"


def test_a_name_that_is_taken_gets_the_first_free_number() -> None:
    names = Names(("for", "x_2"))
    assert [names.new(t) for t in ("x", "x", "x", "for", "x_1")] == [
        "x", "x_1", "x_3", "for_1", "x_1_1",
    ]  # fmt: skip
    assert [Names(("x",), "_v").new("x")] == ["x_v1"]


def test_a_thing_keeps_its_name() -> None:
    names = Names()
    a, b = Axis("i", index(3)), Axis("i", index(3))
    assert [names(a), names(b, "n_"), names(b), names(a)] == ["i", "n_i", "n_i", "i"]
    assert a in names and index(3) not in names
    assert names.all() == ("i", "n_i")
