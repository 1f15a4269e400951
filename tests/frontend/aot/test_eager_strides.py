"""What is traced has eager's strides, and so has all that follows from it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from fusec.frontend.aot import eager_strides, trials
from fusec.frontend.aot.eager_strides import tracing_as_eager
from fusec.torch_interior import FakeTensorMode, pytree
from tests.calls import calls_of
from tests.support import check

aten = torch.ops.aten


def last(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


def transposed(*shape: int) -> torch.Tensor:
    return torch.rand(shape[::-1]).t()


IMAGE = last(2, 3, 4, 5)
MATRIX, ROW_MAJOR = transposed(5, 3), torch.rand(5, 3) + 1
CHAINS = {
    "roll": (lambda x: torch.roll(x, -1, 0), IMAGE),
    "as_strided": (lambda x: torch.roll(x, -1, 0).as_strided((6,), (2,)) * 2, IMAGE),
    "reshape": (lambda x: torch.roll(x, 1, 0).reshape(-1), IMAGE),
    "write_to_a_reshape": (lambda x: written(torch.roll(x, 1, 0), (2, 60)), IMAGE),
    "write_to_a_contiguous": (lambda x: doubled(torch.roll(x, 1, 0)), IMAGE),
    "xlogy": (lambda x, y: torch.xlogy(x, y).as_strided((4,), (3,)), MATRIX, ROW_MAJOR),
    "copysign": (lambda x, y: torch.copysign(x, y).t().reshape(-1) + 1, MATRIX, ROW_MAJOR),
    "floor": (lambda x, y: torch.div(x, y, rounding_mode="floor"), MATRIX, ROW_MAJOR),
    "addr": (lambda x: torch.addr(x, x[:, 0], x[0], beta=0).as_strided((4,), (3,)), MATRIX),
}


def written(x: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    part = x.reshape(shape)
    part.mul_(2)
    return part, x + 0


def doubled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dense = x.contiguous()
    dense.mul_(2)
    return dense, x + 0


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.sampled(3)
def test_what_follows_an_operation_sees_eager_strides(name, dynamic):
    fn, *inputs = CHAINS[name]
    check(fn, *inputs, dynamic=dynamic)


def test_gradients_see_eager_strides():
    check(lambda x: torch.roll(x * 2, 1, 0).as_strided((6,), (2,)) * 2, IMAGE, train=True)


def test_strides_after_a_graph_break_are_eager_ones():
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.roll(x, 1, 0)
        torch._dynamo.graph_break()
        return y * y.stride(1) if not y.is_contiguous() else y

    check(broken, IMAGE, fullgraph=False)


def traced(func, *args):
    """Return the strides of what a call of tensors without memory makes."""
    mode = FakeTensorMode()
    with tracing_as_eager(mode), mode:
        fakes = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype)
            if isinstance(a, torch.Tensor)
            else a
            for a in args
        ]
        return func(*fakes).stride()


@pytest.mark.parametrize("shift", [1, 101])
def test_calls_with_many_elements_are_tried_with_fewer_where_no_number_may_be_an_extent(shift):
    image = last(2, 64, 70, 90)
    trials._known.clear()
    with calls_of(trials._Zeros.make) as made:
        assert traced(aten.roll.default, image, [shift], [0]) == image.stride()
    assert [call.arguments["self"].shape for call in made] == [
        (2, 9, 10, 11) if shift == 1 else (2, 64, 70, 90)
    ]


def test_gaps_and_equal_strides_stay_where_a_call_is_tried_with_fewer_elements():
    x = torch.empty(40, 1, 100)[..., ::2].transpose(0, 2)
    zeros = trials._Zeros.like(x).shrunk({40: 9, 50: 10})
    assert (zeros.shape, zeros.strides) == ((10, 1, 9), (2, 20, 20))


def test_integers_are_divided_by_ones():
    x = torch.ones((3, 5), dtype=torch.int64).t()
    assert traced(aten.floor_divide.default, x, torch.ones_like(x).contiguous()) == x.stride()


@torch.library.custom_op("fusec_test::noted_once", mutates_args=())
def noted_once(x: torch.Tensor) -> torch.Tensor:
    RUNS.append(x.stride())
    return x.clone()


noted_once.register_fake(torch.empty_like)
RUNS: list[tuple[int, ...]] = []


NOT_TRIED = {
    "draw": (aten.normal.Tensor_Tensor, lambda x: (x, x)),
    "custom": (noted_once._opoverload, lambda x: (x,)),
    "by_data": (aten.nonzero.default, lambda x: (x,)),
    "no_result": (aten._assert_tensor_metadata.default, lambda x: (x,)),
    "view": (aten.t.default, lambda x: (x,)),
}


@pytest.mark.parametrize("case", NOT_TRIED)
def test_calls_that_do_more_or_trust_their_data_are_not_tried(case):
    func, args = NOT_TRIED[case]
    with FakeTensorMode() as mode:
        spread = torch.empty_strided((5, 3), (1, 5))
    with (
        calls_of(eager_strides.outcome) as tried,
        tracing_as_eager(mode),
        mode,
        contextlib.suppress(DynamicOutputShapeException, NotImplementedError, RuntimeError),
    ):
        func(*args(spread))
    assert func not in [call.arguments["func"] for call in tried]
    assert RUNS == []


def test_kernels_that_write_where_their_data_say_are_not_tried():
    assert not trials.may_be_tried(aten.segment_reduce.default)
    assert not trials.may_be_tried(aten._segment_reduce_backward.default)


def test_kernels_that_read_another_kernels_workspace_are_not_tried():
    assert not trials.may_be_tried(aten.mkldnn_rnn_layer_backward.default)
    assert not trials.may_be_tried(aten.fbgemm_linear_int8_weight.default)


def test_types_are_tried_with_the_extents_that_numbers_name():
    with FakeTensorMode():
        x = torch.empty(6, 5)
    with calls_of(trials._try) as tried:
        assert trials.has_kernel(aten.renorm.default, (x, 2, 0, 1), {})
        assert trials.has_kernel(aten.renorm.default, (x, 2, 0, 7), {})
    assert [call.arguments["leaves"][0].shape for call in tried] == [(2, 2), (6, 5)]


def test_other_devices_calls_are_not_tried():
    with FakeTensorMode() as mode, contextlib.ExitStack() as stack:
        spread = torch.empty_strided((5, 3), (1, 5), device="cuda")
        stack.enter_context(tracing_as_eager(mode))
        tried = stack.enter_context(calls_of(trials._tried))
        row_major = torch.empty_strided((5, 3), (3, 1), device="cuda")
        assert aten.copysign.Tensor(spread, row_major).device.type == "cuda"
    assert not tried


def test_a_call_that_eager_refuses_keeps_its_traced_strides():
    """Zeros have no Cholesky factor."""
    x = torch.empty(3, 3, 2).permute(2, 0, 1)
    factor, how = aten.linalg_cholesky_ex.default, {"check_errors": True}
    leaves, spec = pytree.tree_flatten(((trials._Zeros.like(x),), how))
    assert isinstance(trials._try(factor, leaves, spec), RuntimeError)
    assert len(traced(lambda x: factor(x, **how)[0], x)) == 3


def test_transforms_see_eager_strides():
    def rolled(x: torch.Tensor) -> torch.Tensor:
        return torch.roll(x, 1, 0)

    check(lambda x: torch.func.vmap(rolled)(x), IMAGE)
    check(torch.func.grad(lambda x: (rolled(x * 2) ** 2).sum()), IMAGE)


def test_row_major_calls_are_not_tried():
    with calls_of(trials._tried) as tried:
        traced(aten.roll.default, torch.rand(3, 4), [1], [0])
    assert not tried
