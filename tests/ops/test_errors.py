"""What eager refuses at run time, compiled code refuses, and nothing that eager computes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fusec
from fusec.driver.compiler import RECENT
from fusec.errors import IndexOutOfRange
from tests.support import INTS, before_2_15, check, compile_with

Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

DIVISIONS: dict[str, Binary] = {
    "floor_divide": lambda a, b: a // b,
    "remainder": lambda a, b: a % b,
    "fmod": torch.fmod,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "number by tensor": lambda a, b: 7 // b,
    "tensor by number": lambda a, b: a // 0,
    "summed": lambda a, b: (a % b).sum(-1),
    "padded": lambda a, b: F.pad(a // b, (-1, 1)),
    "not chosen": lambda a, b: torch.where(b == 0, a, a // b),
}


def same_error(fn: Callable[..., object], *inputs: torch.Tensor) -> None:
    """Assert that a compiled call fails as the eager one does: an error of that class."""
    with pytest.raises(Exception) as eager:
        fn(*inputs)
    with pytest.raises(type(eager.value)) as compiled:
        compile_with(fn)(*inputs)
    if type(eager.value) is RuntimeError and "Zero" in str(eager.value):
        assert str(compiled.value) == str(eager.value)


@pytest.mark.sampled(17)
@pytest.mark.parametrize("dtype", [*INTS, torch.int16], ids=str)
@pytest.mark.parametrize("name", DIVISIONS)
def test_an_integer_divided_by_zero_is_an_error(name: str, dtype: torch.dtype) -> None:
    a = torch.arange(3 * 37).reshape(3, 37).to(dtype)
    b = torch.ones_like(a)
    b[1, 20] = 0
    same_error(DIVISIONS[name], a, b)


GUARDED: dict[str, Binary] = {
    **{name: fn for name, fn in DIVISIONS.items() if name != "tensor by number"},
    "joined": lambda a, b: torch.cat([a // b, b, a % b], -1),
    "shifted": lambda a, b: F.pad(a // b, (2, -2)) + a,
    "shifted lanes": lambda a, b: F.pad(a % b, (2, -2)).sum(-1),
    "by position": lambda a, b: a // (a.shape[-1] - torch.arange(a.shape[-1])),
    "by row": lambda a, b: F.pad(a // b[:, :1], (1, -1)),
    "replaced": lambda a, b: torch.slice_scatter(a, (a // b)[:, 3:30], 1, 3, 30),
    "triangle": lambda a, b: torch.tril(a // b),
    "column sums": lambda a, b: (a % b).sum(0),
    "twice padded": lambda a, b: F.pad(F.pad(a // b, (2, -2)) % b, (-3, 3)),
}


@pytest.mark.sampled(17)
@pytest.mark.parametrize("n", [32, 37])
@pytest.mark.parametrize("name", GUARDED)
def test_no_padding_and_no_masked_lane_counts_as_a_zero(name: str, n: int) -> None:
    a = torch.arange(-n, 2 * n).reshape(3, n)
    b = torch.arange(1, 3 * n + 1).reshape(3, n)
    check(GUARDED[name], a, b)


def test_a_split_sum_of_remainders_meets_no_zero_behind_its_last_part() -> None:
    a = torch.arange(1003 * 5).reshape(1003, 5)
    check(lambda a, b: (a % b).sum(0), a, a + 1)


def test_a_known_divisor_is_not_checked() -> None:
    [kernel] = fusec.kernels(lambda a: a // 3 + a % -7, torch.arange(64))
    assert "nonzero" not in kernel.source
    [kernel] = fusec.kernels(lambda a, b: a // b, torch.arange(64), torch.arange(64))
    assert "fusec_nonzero(v_arg1_1, status)" in kernel.source


SHARED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "input": lambda x: x.add_(1),
    "input transposed": lambda x: x.t().mul_(2),
    "input assigned": lambda x: operator.iadd(x, 1),
    "input by inplace": lambda x: F.relu(x, inplace=True),
    "expanded inside": lambda x: x.clone()[:1].expand(4, 4).add_(1),
    "made inside": lambda x: torch.zeros(4, 1).expand(4, 4).add_(x),
    "all of it": lambda x: torch.Tensor.__setitem__(x, slice(None), 1.0),
    "as out": lambda x: torch.add(x, 1, out=torch.zeros(4, 1).expand(4, 4)),
}


ALLOWED_SINCE_2_15 = {"all of it"}
"""Torch 2.15 fills a tensor with one number whatever elements share."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=before_2_15) if name in ALLOWED_SINCE_2_15 else name
        for name in SHARED
    ],
)
def test_a_write_to_memory_that_elements_share_is_an_error(name: str) -> None:
    same_error(SHARED[name], torch.arange(4.0).expand(4, 4))


def test_a_write_to_one_row_of_an_expanded_input_is_eager_s() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x[0].add_(1)
        x[1] = x[2] * 2
        return x * 2

    check(fn, torch.arange(4.0).expand(4, 4))


def test_writes_beside_an_expanded_input_are_compiled() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y).relu_() + y.add_(1)

    x, y = torch.arange(4.0).expand(4, 4), torch.ones(4, 4)
    check(fn, x, y)
    torch.compiler.reset()
    compile_with(fn)(x, y.clone())
    assert [trace.name for trace in RECENT] == ["inference"]


OUT_OF_RANGE: dict[str, Binary] = {
    "index": lambda x, i: x[i] + 1,
    "gather": lambda x, i: x.gather(0, i) + 1,
    "take": lambda x, i: torch.take(x, i) + 1,
    "index_select": lambda x, i: x.index_select(0, i) + 1,
    "embedding": lambda x, i: F.embedding(i, x[:, None]) + 1,
    "cross_entropy": lambda x, i: F.cross_entropy(x.expand(3, 10), i),
}


@pytest.mark.sampled(3)  # a diagonal
@pytest.mark.parametrize("wrong", [10, -11])
@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_an_index_out_of_range_is_an_error_of_eager_s_class(name: str, wrong: int) -> None:
    same_error(OUT_OF_RANGE[name], torch.arange(10.0), torch.tensor([wrong, 1, 2]))


LITERALS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    **OUT_OF_RANGE,
    "index of a column": lambda x, i: x[None, :, None][0, i],
    "index of none": lambda x, i: x[:0][i % 3] + 1,
    "index of a window": lambda x, i: x[2:7][i] + 1,
    "index of positions": lambda x, i: torch.arange(10)[i] + x[:1],
    "index of ones": lambda x, i: torch.ones(10)[i] + x[:1],
    "index of an index": lambda x, i: x[torch.tensor([1, 2])[i]] + 1,
    "index of one for all": lambda x, i: x[:1].expand(10)[i] + 1,
    "index of a pad": lambda x, i: F.pad(x[:4], (3, 3))[i] + 1,
    "index of a cat": lambda x, i: torch.cat([x[:4], x[4:]])[i] + 1,
    "index of a computed value": lambda x, i: (x[:1] * 2).expand(10)[i] + 1,
    "take of one": lambda x, i: x[None, :1].take(i) + 1,
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i * 3) + 1,
    "nll_loss": lambda x, i: F.nll_loss(x.expand(i.numel(), 10), i, reduction="none"),
    "scatter": lambda x, i: x.scatter(0, i, 2.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i, x[:1].expand(i.numel())),
    "index_put": lambda x, i: x.index_put((i,), x[:1]),
    "index_add": lambda x, i: x.index_add(0, i, x[:1].expand(i.numel())),
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0),
    "put": lambda x, i: x.put(i, x[:1].expand(i.numel())),
}
"""What a function that calls them by numbers of the program knows to be out of range."""


@pytest.mark.sampled(9)
@pytest.mark.parametrize("wrong", [[10], [-11], [2**40], [1, 10], [-(2**63)]], ids=str)
@pytest.mark.parametrize("name", LITERALS)
def test_a_number_out_of_range_as_an_index_is_an_error(name: str, wrong: list[int]) -> None:
    torch.compiler.reset()
    x = torch.arange(10.0)
    if name == "cross_entropy":
        same_error(lambda x: F.cross_entropy(x.expand(len(wrong), 10), torch.tensor(wrong)), x)
    else:
        same_error(lambda x: LITERALS[name](x, torch.tensor(wrong)), x)
        same_error(LITERALS[name], x, torch.tensor(wrong))


def test_a_number_in_range_as_an_index_is_not_checked() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x[[3]] + x[[-1]] + x.take(torch.tensor([2])) + torch.arange(5)[[4]]

    check(fn, torch.arange(5.0))
    [kernel] = fusec.kernels(fn, torch.arange(5.0))
    assert "fusec_checked" not in kernel.source
    assert "fusec_within" not in kernel.source


def test_an_index_of_what_reads_nothing_is_checked_where_it_is_computed_again() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        steady = x[:1].expand(50) + 1  # the same for all 50
        return steady[i] + (torch.arange(50) * x[1])[i] + F.pad(x * 2, (25, 25 - x.numel() + 0))[i]

    x, i = torch.arange(5.0), torch.tensor([0, 3, 49])
    check(fn, x, i[:2])
    same_error(fn, x, torch.tensor([0, 3, 50]))
    same_error(fn, x, torch.tensor([0, -51, 3]))


def test_no_sources_and_no_rows_are_no_error() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> list[torch.Tensor]:
        written = [x.index_copy(0, i, s), x.index_put((i,), s), x.index_put((i,), x[0, 0])]
        return [*written, F.pad(x[i], (0, 0, 1, 2)), x[i].sum(0), F.pad(s[i % 4], (2, 1))]

    x, s = torch.arange(12.0).view(4, 3), torch.ones(2, 3)
    compiled = compile_with(fn, dynamic=True)
    for i in (torch.tensor([1, 0]), torch.zeros(0, dtype=torch.long)):
        for a, b in zip(fn(x, i, s[: len(i)]), compiled(x, i, s[: len(i)]), strict=True):
            assert torch.equal(a, b)


WINDOWS: dict[str, Callable[[torch.Tensor], object]] = {
    "starts too late": lambda x: x.as_strided((3,), (1,), 6) + 1,
    "is too long": lambda x: x.as_strided((4, 4), (4, 1)) + 1,
    "of a result": lambda x: (x * 2).as_strided((9,), (1,)) + 1,
    "of a result, returned": lambda x: (x * 2).as_strided((9,), (1,)),
    "of a part": lambda x: torch.as_strided(x[4:], (5,), (1,), 4) + 1,
    "copied": lambda x: torch.as_strided_copy(x, (9,), (1,)) + 1,
    "by symbolic sizes": lambda x: x.as_strided((x.shape[0] + 1,), (1,)) + 1,
    "by a tensor": lambda x: (x * 2).as_strided(
        (torch.div(x.shape[0], 1, rounding_mode="trunc") + 1,), (1,)
    ),
    "by what a tensor holds": lambda x: x.sin().as_strided((x.argmax() + 2,), (1,)) + 1,
    "select_scatter": lambda x: torch.select_scatter(x, x[0], 0, int(x.argmax()) + 1) + 1,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_beyond_the_memory_is_an_error(name: str, dynamic: bool) -> None:
    x = torch.arange(8.0)
    with pytest.raises(Exception) as eager:
        WINDOWS[name](x)
    with pytest.raises(type(eager.value)):
        compile_with(WINDOWS[name], dynamic=dynamic)(x)


def test_a_window_into_memory_around_a_tensor_is_eager_s() -> None:
    big = torch.arange(16.0)
    check(lambda x: x.as_strided((8,), (2,)) + 1, big[:4])
    check(lambda x: (x.as_strided((8,), (1,), 8) + 1, (x * 2).as_strided((2, 3), (1, 1), 1)), big)
    check(lambda x: x.as_strided((0,), (1,), 99), big)


ONES = torch.ones(3)
SCATTERS: dict[str, Binary] = {
    "scatter": lambda x, i: x.scatter(0, i, ONES) + 1,
    "scatter a number": lambda x, i: x.scatter(0, i, 2.0) + 1,
    "scatter one a line": lambda x, i: x.expand(3, 10).scatter(1, i[:, None], 1.0) + 1,
    "scatter one a column": lambda x, i: x[:, None].expand(10, 3).scatter(0, i[None], 1.0) + 1,
    "scatter into a scalar": lambda x, i: x[0].scatter(0, i[0], 1.0) + 1,
    "scatter and sum": lambda x, i: x.expand(3, 10).scatter(1, i[:, None], 1.0).sum(1),
    "scatter few": lambda x, i: x.reshape(2, 5).repeat(1, 2).scatter(1, i[None], 1.0) + 1,
    "scatter_add": lambda x, i: x.scatter_add(0, i, ONES) + 1,
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i, ONES, "amax", include_self=False),
    "scatter_reduce mean": lambda x, i: x.scatter_reduce(0, i, ONES, "mean") + 1,
    "index_put": lambda x, i: x.index_put((i,), ONES) + 1,
    "index_put accumulate": lambda x, i: x.index_put((i,), ONES, accumulate=True) + 1,
    "index_put of two": lambda x, i: x[None].index_put((torch.zeros(3).long(), i), ONES) + 1,
    "index_add": lambda x, i: x.index_add(0, i, ONES, alpha=3) + 1,
    "index_copy": lambda x, i: x.index_copy(0, i, ONES) + 1,
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0) + 1,
    "index_reduce": lambda x, i: x.index_reduce(0, i, ONES, "prod") + 1,
    "put": lambda x, i: x.put(i, ONES) + 1,
}
FROM_THE_END = {"index_put", "index_put accumulate", "index_put of two", "index_fill", "put"}


def test_a_scatter_out_of_range_is_an_error_of_eager_s_class() -> None:
    x, fine = torch.arange(10.0), torch.arange(3)

    def fn(x: torch.Tensor, *places: torch.Tensor) -> list[torch.Tensor]:
        return [scatter(x, i) for scatter, i in zip(SCATTERS.values(), places, strict=True)]

    compiled = compile_with(fn)
    places = [fine.clone() for _ in SCATTERS]  # the same one twice would be another compile
    for found, wanted in zip(compiled(x, *places), fn(x, *places), strict=True):
        assert torch.equal(found, wanted)
    for k, (name, scatter) in enumerate(SCATTERS.items()):
        for wrong in (10, -11) if name in FROM_THE_END else (10, -11, -1):
            i = torch.tensor([wrong, 1, 2])
            with pytest.raises((IndexError, RuntimeError)) as eager:
                scatter(x, i)
            with pytest.raises(type(eager.value)) as raised:
                compiled(x, *places[:k], i, *places[k + 1 :])
            assert isinstance(raised.value, IndexOutOfRange), f"{name} runs as an eager kernel"


GIVEN = {"floats": torch.tensor([0.5, 1.5]), "0.5": 0.5, "1j": 1j, "integers": torch.ones(2).long()}
FORMS: dict[str, Callable[..., object]] = {
    "of none": lambda write, y: write(),
    "of one": lambda write, y: write(y),
    "of two": lambda write, y: write(y, y),
    "of one by name": lambda write, y: write(other=y),
    "of two by name": lambda write, y: write(tensor1=y, tensor2=y),
    "times a number": lambda write, y: write(GIVEN["integers"], GIVEN["integers"], value=y),
}
ELSEWHERE = {"apply_", "map_", "map2_", "rename_", "share_memory_", "swap_", "set_", "resize_"}
IN_PLACE = sorted(n for n in dir(torch.Tensor) if n.endswith("_") and n[0] != "_")


def refused_writes(name: str) -> list[tuple[Callable[..., object], torch.Tensor]]:
    """Return the writes of a method, with what they write, that eager refuses for the types."""
    found = []
    for form, given in itertools.product(FORMS.values(), GIVEN.values()):
        write = partial(lambda form, given, x: form(getattr(x, name), given), form, given)
        for start in (torch.arange(2), torch.ones(2), torch.tensor([True, False])):
            try:
                write(start.clone())
            except Exception as error:  # also that there is no such form
                if "be cast to" in str(error) or "no longer supported" in str(error):
                    found.append((write, start))
    return found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", [n for n in IN_PLACE if n not in ELSEWHERE])
def test_a_write_of_another_kind_is_an_error(name: str) -> None:
    for write, start in refused_writes(name):
        with pytest.raises(Exception):  # noqa: B017  # of Dynamo, where its trace refuses them
            compile_with(write)(start.clone())


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "imul": lambda x: operator.imul(x, 0.5),
    "__imul__": lambda x: x.__imul__(0.5),
    "mul_ by name": lambda x: x.mul_(other=GIVEN["floats"]),
    "multiply_": lambda x: x.multiply_(0.5),
    "addcmul_ by name": lambda x: x.addcmul_(tensor1=GIVEN["floats"], tensor2=x),
    "addcmul_ times 1": lambda x: x.addcmul_(GIVEN["floats"], x, value=1),
    "addcdiv_": lambda x: x.addcdiv_(x, x),
    "floats by a scaled quotient": lambda x: (x + 0.5).addcdiv_(x, x + 1, value=2),
    "floats by a scaled quotient of bools": lambda x: (x + 0.5).addcdiv_(x > 0, x > -1, value=0.5),
    "logit_": lambda x: torch.logit_(input=x),
    "an overload": lambda x: torch.ops.aten.mul_.Scalar(x, 0.5),
    "of a list": lambda x: torch._foreach_mul_([x], 0.5),
    "of a list by lists": lambda x: torch._foreach_addcmul_([x], [GIVEN["floats"]], [x]),
    "floats by a complex number": lambda x: (x + 0.5).mul_(1j),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_of_another_kind_is_an_error_in_each_form(name: str) -> None:
    same_error(WRITES[name], torch.arange(2))


def test_writes_that_convert_are_those_of_eager() -> None:
    floats, integers = torch.rand(3), torch.arange(3)
    check(lambda x, y: (x.mul_(y), x.addcmul_(y, 2 * y)), floats, integers)
    scaled = torch.compile(lambda i: i.addcmul_(i, i, value=0.5), backend="fusec")
    assert torch.equal(scaled(integers.clone()), integers), "eager scales integers by 0"
    check(lambda x, i: x.addcdiv_(i, x + 1, value=0.5), floats, integers)
    check(lambda x, i: torch.sum(x + 0.75, 0, out=i.sum()), floats, integers)
    check(lambda x, i: torch.select_scatter(i.expand(3, 3), x * 3, 0, 1), floats, integers)
    check(lambda x, i: torch.slice_scatter(i, x[:2] * 3, 0, 1) + 1, floats, integers)
    check(lambda x, i: torch.diagonal_scatter(i.expand(3, 3), x * 3) + 1, floats, integers)


NUMBER, ONE_PLACE = torch.tensor(3.0), torch.tensor([1])
REFUSED = {
    "gather of a number": lambda x: NUMBER.gather(0, ONE_PLACE[0]) + x,
    "gather of a number by a line": lambda x: NUMBER.gather(0, ONE_PLACE) + x[0, :1],
    "index_select of a number": lambda x: torch.index_select(NUMBER, 0, ONE_PLACE) + x,
    "index_select of one row": lambda x: torch.index_select(x[:1], 0, ONE_PLACE) + 1,
    "too short a row": lambda x: torch.select_scatter(x, x[0, :3] * 2, 0, 1) + 1,
    "too short a diagonal": lambda x: torch.diagonal_scatter(x, x[0, :3] * 2) + 1,
    "too long a diagonal": lambda x: torch.diagonal_scatter(x, x[0] * 2, 1) + 1,
    "too few rows": lambda x: torch.slice_scatter(x, x[:2] * 2, 0, 0, 3) + 1,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_place_of_a_number_and_a_part_of_another_shape_are_errors(name: str) -> None:
    same_error(REFUSED[name], torch.ones(4, 4))


WINDOWS: dict[str, Binary] = {
    "row": lambda x, s: torch.select_scatter(x, s[0] * 2, 0, 1) + 1,
    "diagonal": lambda x, s: torch.diagonal_scatter(x, s[0] * 2) + 1,
    "later diagonal": lambda x, s: torch.diagonal_scatter(x, s[0] * 2, 1) + 1,
    "first rows": lambda x, s: torch.slice_scatter(x, s * 2, 0, 0, 3) + 1,
    "every other row": lambda x, s: torch.slice_scatter(x, s * 2, 0, 1, None, 2) + 1,
}


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("name", WINDOWS)
def test_a_part_that_fits_once_is_an_error_where_it_does_not_fit(name: str, dynamic: bool) -> None:
    fn = WINDOWS[name]
    compiled = compile_with(fn, dynamic=dynamic)
    fits = {"later diagonal": (4, 5, 4), "diagonal": (3, 6, 3)}.get(name, (6, 7, 7))
    for rows, columns, given in (fits, (4, 6, 3), (4, 6, 5), (5, 6, 4), (7, 7, 4)):
        x = torch.ones(rows, columns)
        source = torch.ones(3 if "rows" in name else rows // 2, given)
        try:
            expected = fn(x, source)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                compiled(x, source)
        else:
            assert torch.equal(compiled(x, source), expected)


@pytest.mark.parametrize("wrong", (9, -1, -5))
def test_a_scatter_of_what_changes_nothing_refuses_places_out_of_range(wrong: int) -> None:
    def fn(x: torch.Tensor, n: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = x.index_reduce(0, i, torch.ones_like(x[:3]), "prod")
        return product, n.index_add(0, i, torch.zeros(3, 6, dtype=torch.int64))

    x, n, i = torch.rand(4, 6), torch.arange(24).view(4, 6), torch.tensor([0, 2, 1])
    check(fn, x, n, i)
    i[1] = wrong
    same_error(fn, x, n, i)
    same_error(lambda x, i: fn(x, n, i)[0], x, i)
    same_error(lambda n, i: fn(x, n, i)[1], n, i)


@pytest.mark.parametrize("wrong", (-1, 16, 2**31 + 1))
def test_an_unpooling_refuses_places_that_are_not_in_its_image(wrong: int) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return F.max_unpool2d(x, i, 2) + 1

    x, i = torch.rand(1, 3, 2, 2), torch.arange(4).expand(1, 3, 4).reshape(1, 3, 2, 2).clone()
    check(fn, x, i)
    i[0, 1, 0, 1] = wrong
    same_error(fn, x, i)


@pytest.mark.parametrize("name", sorted(FROM_THE_END))
def test_a_negative_place_counts_from_the_end_where_it_does_in_eager(name: str) -> None:
    x, i = torch.arange(10.0), torch.tensor([-1, 1, -10])
    assert torch.equal(compile_with(SCATTERS[name])(x, i), SCATTERS[name](x, i))


def test_no_padding_and_no_unused_part_of_an_index_counts_as_out_of_range() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        places = 40 - i  # out of range where a guarded load of i is 0
        few = x[:, :20].scatter(1, places[:2, :5], x + 1)
        one = x.scatter(1, places[:, :1], 1.0)
        columns = x.t().scatter(0, places[:, :1].t(), 1.0).t()
        return [few, F.pad(few, (-1, 3)), F.pad(one, (3, 3, 1, 1)), F.pad(columns, (3, 3)),
                torch.cat([x, one]).sum(0), few.sum(0)]  # fmt: skip

    i = 30 + torch.arange(3 * 37).reshape(3, 37) % 8
    i[2, 5] = 500
    check(fn, torch.arange(3 * 37.0).reshape(3, 37), i)


SYMBOLIC: dict[str, Binary] = {
    "positions": lambda x, i: torch.arange(x.shape[0])[i] * 2,
    "cross_entropy": lambda x, i: F.cross_entropy(x[:, : i.shape[0]], i),
    "nll_loss": lambda x, i: F.nll_loss(x.tanh(), i, reduction="none"),
    "take": lambda x, i: (x + 1).take(i).sum(0),
    "scatter": lambda x, i: x.scatter(1, i[:, None], 1.0).sum(0),
    "embedding": lambda x, i: F.embedding(i, x).exp(),
    "roll": lambda x, i: x.flip(0)[i] + x[i],
}


def test_an_extent_that_is_a_symbol_bounds_an_index_in_ragged_lanes() -> None:
    def every(x: torch.Tensor, *places: torch.Tensor) -> list[torch.Tensor]:
        return [fn(x, i) for fn, i in zip(SYMBOLIC.values(), places, strict=True)]

    torch.compiler.reset()
    compiled = compile_with(every, dynamic=True)
    for length in (37, 8, 21):
        x = torch.arange(length * 40.0).reshape(length, 40).cos()
        places = [torch.arange(length) for _ in SYMBOLIC]
        torch.testing.assert_close(compiled(x, *places), every(x, *places))
        for (name, fn), i in zip(SYMBOLIC.items(), places, strict=True):
            i[3] = 40 * 40
            with pytest.raises((IndexError, RuntimeError)):
                fn(x, i)
            with pytest.raises((IndexError, RuntimeError)):
                compiled(x, *places)
                pytest.fail(name)
            i[3] = 3


def test_a_place_known_to_be_in_range_is_not_checked() -> None:
    [kernel] = fusec.kernels(lambda x: x.index_fill(0, torch.arange(8, 16), 1.0), torch.ones(64))
    assert "within" not in kernel.source
