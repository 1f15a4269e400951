"""The wrapper: which memory each kernel gets, when it is free again, and that the text runs.

A *slot* stands in for a tensor: it remembers which buffer was written to it last. A kernel that
reads another buffer from a slot than its own finds memory that was handed out too early.
"""

from __future__ import annotations

import gc
import json
import math
import weakref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusec.codegen.host.wrapper import callee, print_statements, print_wrapper
from fusec.codegen.targets import find_target
from fusec.errors import InvalidIR
from fusec.ir.dtype import BF16, F32, DType, NumberForm
from fusec.ir.expr import Buffer, Cast, Op
from fusec.ir.extern import Effect, Fresh, Unknown
from fusec.ir.graph import Def, Extern, Graph, Kernel, Schedule, Store, View
from fusec.ir.index import Axis, Size, index
from fusec.ir.program import Program
from fusec.passes.fusion.fuse import fuse, separate
from fusec.passes.memory.buffers import plan_host
from fusec.runtime.calls.executable import (
    add_product,
    bind,
    conjugated,
    negated,
    restride,
    unconjugated,
    with_strides,
)
from fusec.runtime.calls.outside import NOTHING
from tests.fuzz.graphs import Example
from tests.fuzz.pipeline import lower_all, small_target
from tests.ir.graphs import axes, buffer, f32, graph, load, whole
from tests.passes.pipelines import BOUNDED, random_graphs
from tests.support import values


@dataclass(eq=False)
class Slot:
    """Memory of one layout, and the buffer that was written to it last."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    holds: Buffer | None = None


class Slots:
    """Runs a printed wrapper over slots; each kernel checks what it reads."""

    def __init__(self, schedule: Schedule, programs: dict[str, Program]) -> None:
        self.graph = schedule.graph
        self.text = print_wrapper(plan_host(schedule), programs, {k: k for k in programs})
        self.made = 0
        self.sizes: dict[Size, int] = {}
        names: dict[str, Any] = {
            "empty": self.empty,
            "window": lambda slot, *_: slot,
            "restride": lambda slot, strides: slot,
            "expected": lambda slot, *_: slot,
            "counted": lambda slots, *_: slots,
            "strided": self.again,
            **{d: d for d in ("bool", "i32", "i64", "f16", "bf16", "f32", "f64")},
        }
        for step in schedule.steps:
            if isinstance(step, Extern):
                names[callee(step)] = self.extern(step)
            else:
                names[step.name] = self.kernel(step, programs[step.name])
        exec(compile(self.text, "<wrapper>", "exec"), names)
        self.call = names["call"]

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Slot:
        self.made += 1
        return Slot(shape, strides, dtype)

    def again(
        self, slot: Slot, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> Slot:
        """Lay memory out anew, under another name."""
        assert math.prod(shape) == math.prod(slot.shape) and offset == 0
        slot.shape, slot.strides = shape, strides
        return slot

    def laid_out(self, held: Buffer) -> Slot:
        values = (tuple(self.value(i) for i in part) for part in (held.shape, held.strides))
        return Slot(*values, str(held.dtype), held)

    def value(self, extent: Any) -> int:
        """Return the value of an extent over the sizes of the call."""
        total = extent.const
        for monomial, coefficient in extent.terms:
            for atom in monomial:
                coefficient *= self.sizes[atom]
            total += coefficient
        return total

    def kernel(self, kernel: Kernel, program: Program) -> Any:
        written = {s.buffer.base for s in kernel.stores}

        def run(*args: Any) -> None:
            slots = dict(zip(program.buffers, args[: len(program.buffers)], strict=True))
            assert len({id(s) for s in slots.values()}) == len(slots), f"{kernel.name}: two in one"
            for held, slot in slots.items():
                expected = self.laid_out(held.base)
                layout = (slot.shape, slot.strides, slot.dtype)
                assert layout == (expected.shape, expected.strides, expected.dtype), held
                assert held.base in written or slot.holds is held.base, f"{held} was overwritten"
            for held in written:
                slots[held].holds = held

        return run

    def extern(self, extern: Extern) -> Any:
        (view,) = (a for a in extern.args if isinstance(a, View))
        (made,) = extern.outputs

        def run(slot: Slot) -> Slot:
            assert slot.holds is view.buffer, f"{view.buffer} was overwritten"
            assert made is not None
            return self.laid_out(made)

        return run

    def run(self, sizes: dict[Size, int] | None = None) -> tuple[Any, ...]:
        """Call the wrapper; assert that what it returns holds what the graph returns."""
        self.sizes = sizes or {}
        inputs = self.graph.inputs
        args: list[Any] = [
            self.laid_out(i) if isinstance(i, Buffer) else self.sizes.get(i) for i in inputs
        ]
        results = self.call(args)
        assert args == [], "the caller's list keeps inputs alive"
        for output, slot in zip(self.graph.outputs, results, strict=True):
            assert isinstance(output, View)
            assert slot.holds is output.buffer, f"output {output.buffer} was overwritten"
        return results


def slots_of(before: Graph) -> Slots:
    """Return a graph's wrapper, each definition a kernel of its own."""
    schedule = separate(before)
    return Slots(schedule, lower_all(schedule, find_target("cpu")))


def unary(name: str, source: Buffer, *, dtype: DType = F32) -> Def:
    own = axes("i j"[: 2 * len(source.shape) - 1], *source.shape)
    value = load(source, *own) if source.dtype is F32 else Cast(load(source, *own), F32)
    result = Op("neg", (value,))
    made = buffer(name, *source.shape, dtype=dtype)
    return Def(made, own, result if dtype is F32 else Cast(result, dtype))


def chain(*dtypes: DType) -> tuple[Graph, list[Def]]:
    """x -> t0 -> t1 -> ...: each a kernel that reads the one before."""
    x = buffer("x", 4, 6)
    lines: list[Def] = []
    for k, dtype in enumerate(dtypes):
        lines.append(unary(f"t{k}", lines[-1].buffer if lines else x, dtype=dtype))
    return graph((x,), tuple(lines), lines[-1].buffer), lines


# -- reuse -----------------------------------------------------------------------------------------


def test_a_chain_of_any_length_runs_in_two_buffers() -> None:
    slots = slots_of(chain(*[F32] * 7)[0])
    slots.run()
    assert slots.made == 2
    assert slots.text.count("memory reused") == 5


def test_memory_of_another_type_is_not_written_again() -> None:
    slots = slots_of(chain(F32, BF16, BF16)[0])  # t0 is free when t2 is made
    slots.run()
    assert slots.made == 3
    assert "memory reused" not in slots.text


def test_memory_of_another_size_is_not_written_again() -> None:
    x = buffer("x", 4, 6)
    first = unary("t0", x)
    m, n = axes("m n", 4, 3)
    half = Def(buffer("t1", 4, 3), (m, n), Op("neg", (load(first.buffer, m, n),)))
    last = unary("t2", half.buffer)
    slots = slots_of(graph((x,), (first, half, last), last.buffer))
    slots.run()
    assert "memory reused" not in slots.text


def test_memory_is_written_again_in_another_shape() -> None:
    x = buffer("x", 4, 6)
    first = unary("t0", x)
    second = unary("t1", first.buffer)
    (i,) = axes("i", 24)
    row = Def(buffer("t2", 24), (i,), load(second.buffer, index(i) // 6, index(i) % 6))
    slots = slots_of(graph((x,), (first, second, row), row.buffer))
    slots.run()
    assert slots.made == 2
    assert "t2 = strided(t0, (24,), (1,), 0)  # memory reused\n    k2(t1, t2)" in slots.text


def test_what_is_returned_is_never_handed_out_again() -> None:
    before, lines = chain(*[F32] * 5)
    both = graph((before.inputs[0],), before.nodes, lines[0].buffer, lines[-1].buffer)
    slots = slots_of(both)
    first, last = slots.run()
    assert first is not last


def test_inputs_belong_to_the_caller() -> None:
    slots = slots_of(chain(F32, F32)[0])
    slots.run()
    assert slots.made == 2 and "= x" not in slots.text


def schedule_with_extern(effect: Effect) -> Schedule:
    """x -> t0 -> extern -> e -> t1 -> t2; t1 has t0's layout."""
    x, e = buffer("x", 4, 6), buffer("e", 4, 6)
    first = unary("t0", x)
    middle = Extern("e", "aten.f", (whole(first.buffer),), (), (e,), "", effect=effect)
    second = unary("t1", e)
    last = unary("t2", second.buffer)
    return separate(graph((x,), (first, middle, second, last), last.buffer, e))


def text_with_extern(effect: Effect) -> str:
    schedule = schedule_with_extern(effect)
    programs = lower_all(schedule, find_target("cpu"))
    return print_wrapper(plan_host(schedule), programs, {k: k for k in programs})


@pytest.mark.parametrize(("effect", "reused"), [(Fresh(), True), (Unknown(), False)], ids=repr)
def test_what_an_eager_kernel_may_have_kept_is_not_written_again(
    effect: Effect, reused: bool
) -> None:
    assert ("t1 = t0  # memory reused" in text_with_extern(effect)) == reused


@BOUNDED
@given(drawn=random_graphs(symbols=True))
def test_kernels_of_random_graphs_read_what_was_written_for_them(drawn: Example) -> None:
    sizes = {
        item: int(value)
        for item, value in zip(drawn.graph.inputs, drawn.inputs, strict=True)
        if isinstance(item, Size)
    }
    with np.errstate(all="ignore"):
        target = small_target("cpu")
        apart = separate(drawn.graph)
        fused = fuse(drawn.graph, target.machine, target.accepts)
        for schedule in (apart, fused):
            try:
                programs = lower_all(schedule, target)
            except InvalidIR as error:  # the prover's limits, on some gathers below divisions
                assert "not provably" in str(error)
                continue
            Slots(schedule, programs).run(sizes)


def test_statements_are_the_wrapper_with_the_names_of_its_launches() -> None:
    schedule = schedule_with_extern(Fresh())
    programs, host = lower_all(schedule, find_target("cpu")), plan_host(schedule)
    code = dict.fromkeys(programs, "k0")  # all kernels run the code of the first
    made = {buffer: (buffer.name, None) for step in host.steps for buffer in step.writes}
    *rows, (result, *_) = json.loads(print_statements(host, programs, code, made))["call"]
    launches = [(text.partition("(")[0], launch) for text, launch, *_ in rows if launch]
    assert launches == [("k0", "k0"), ("e = restride", "e"), ("k0", "k1"), ("k0", "k2")]
    stored = [(kernel, values) for *_, kernel, values in rows if values]
    assert stored == [
        ("k0", {"t0": ["t0", None]}),
        (None, {"e": ["e", None]}),
        ("k1", {"t1": ["t1", None]}),
        ("k2", {"t2": ["t2", None]}),
    ]
    lines = [line for text, *_ in rows for line in text.splitlines()]
    assert print_wrapper(host, programs, code).splitlines()[2:] == [
        *(f"    {line}" for line in lines),
        f"    return {result}",
    ]


def test_statements_launch_the_kernels_of_a_run_one_by_one() -> None:
    schedule = separate(chain(F32, F32, F32)[0])
    programs = lower_all(schedule, find_target("cpu"))
    host = plan_host(schedule, run_bytes=1 << 18)
    rows = json.loads(print_statements(host, programs, {k: k for k in programs}, {}))["call"]
    assert [text for text, launch, *_ in rows if launch] == [
        "k0(x, t0)",
        "k1(t0, t1)",
        "k2(t1, t2)",
    ]


# -- real tensors ----------------------------------------------------------------------------------


def bound(before: Graph, kernels: dict[str, Any]) -> Any:
    schedule = separate(before)
    programs = lower_all(schedule, find_target("cpu"))
    text = print_wrapper(plan_host(schedule), programs, {k: k for k in programs})
    return bind(text, kernels, NOTHING, torch.device("cpu"))


def test_the_text_runs_and_calls_kernels_in_order() -> None:
    def negate(x: torch.Tensor, y: torch.Tensor) -> None:
        torch.neg(x, out=y)

    call = bound(chain(F32, F32, F32)[0], {"k0": negate, "k1": negate, "k2": negate})
    x = torch.randn(4, 6)
    (result,) = call([x])
    assert torch.equal(result, -x)
    (again,) = call([x])
    assert again.data_ptr() != result.data_ptr()


def test_an_input_is_free_after_its_last_kernel() -> None:
    seen: list[bool] = []
    x = torch.randn(4, 6)
    alive = weakref.ref(x)

    def note(*_: torch.Tensor) -> None:
        gc.collect(1)
        seen.append(alive() is not None)

    call = bound(chain(F32, F32)[0], {"k0": note, "k1": note})
    args = [x]
    del x
    call(args)
    assert seen == [True, False]


def test_an_output_has_the_strides_of_its_buffer() -> None:
    x = buffer("x", 4, 6)
    shape, strides = (index(4), index(6)), (index(1), index(4))
    y = Buffer("y", shape, strides, F32)
    own = axes("i j", 4, 6)
    before = graph((x,), (Def(y, own, Op("neg", (load(x, *own),))),), y)
    (result,) = bound(before, {"k0": lambda *_: None})([torch.zeros(4, 6)])
    assert (result.shape, result.stride()) == ((4, 6), (1, 4))


def test_a_view_is_returned_as_a_window_of_its_buffer() -> None:
    x = buffer("x", 4, 6)
    line = unary("y", x)
    row = View(line.buffer, (index(3),), (index(2),), index(12))
    before = Graph("g", (x,), (line,), (row, 7, None))
    call = bound(before, {"k0": lambda x, y: y.copy_(x)})
    values = torch.arange(24.0).view(4, 6)
    result, number, empty = call([values])
    assert result.tolist() == [12.0, 14.0, 16.0]
    assert (number, empty) == (7, None)


@pytest.mark.parametrize(
    "names",
    [("call", "args"), ("k0", "empty"), ("a.b", "a_b"), ("1x", "extern_e"), ("f32", "lambda")],
    ids=str,
)
def test_names_of_a_model_never_hide_those_of_the_wrapper(names: tuple[str, str]) -> None:
    x, y = buffer(names[0], 4), buffer(names[1], 4)
    (i,) = axes("i", 4)
    out = Def(buffer("aten", 4), (i,), Op("add", (load(x, i), load(y, i))))
    before = graph((x, y), (out,), out.buffer)
    call = bound(before, {"k0": lambda a, b, c: torch.add(a, b, out=c)})
    (result,) = call([torch.ones(4), torch.full((4,), 2.0)])
    assert result.tolist() == [3.0] * 4


def test_extents_known_at_launch_are_arguments() -> None:
    n = Size("N", 4)
    x = buffer("x", n, 6)
    i, j = Axis("i", index(n)), Axis("j", index(6))
    line = Def(buffer("y", n, 6), (i, j), Op("neg", (load(x, i, j),)))
    call = bound(graph((n, x), (line,), line.buffer), {"k0": lambda x, y, n: y.fill_(6 * n)})
    (result,) = call([5, torch.zeros(5, 6)])
    assert (result.shape == (5, 6) and (result == 30).all()) or (result == 5).all()


# -- strides of eager kernels ----------------------------------------------------------------------


def test_a_result_with_the_traced_strides_is_not_copied() -> None:
    x = torch.randn(4, 6)
    assert restride(x, (6, 1)) is x
    row = torch.randn(1, 6)
    assert restride(row, (1, 1)) is row  # the stride of an extent of one is no matter
    assert restride(x[:0], (99, 7)).shape == (0, 6)


def test_a_result_with_other_strides_is_copied() -> None:
    x = torch.randn(4, 6)
    found = restride(x, (1, 4))
    assert found.stride() == (1, 4) and torch.equal(found, x)


def test_an_expanded_result_cannot_be_made_dense_in_place() -> None:
    with pytest.raises(RuntimeError, match="were traced"):
        restride(torch.randn(4, 6), (0, 1))


# -- sums of products ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_a_product_is_added_to_a_sum_of_its_type_or_a_wider_one(dtype: torch.dtype) -> None:
    a, b = torch.randn(8, 16).to(dtype), torch.randn(16, 4).to(dtype)
    total = torch.ones(8, 4)
    add_product(total, a, b)
    share = 0.0 if dtype is torch.float32 else torch.finfo(dtype).eps  # rounded before it is added
    exact = 1 + a.double() @ b.double()
    torch.testing.assert_close(total.double(), exact, rtol=1e-5 + share, atol=1e-5 + share)


class Called(TorchDispatchMode):
    """Notes the operations of ATen that are called, and runs none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if str(func).startswith("prim"):  # a fake tensor is asked for its device
            return func(*args, **(kwargs or {}))
        self.names.append(str(func))
        assert (kwargs or {}).get("out", args[0]) is args[0]  # else it would be copied first
        return args[0]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_a_gpu_adds_to_a_wider_sum_in_one_call(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        total = torch.empty(8, 4, device="cuda")
        a, b = (torch.empty(*s, device="cuda", dtype=dtype) for s in ((8, 16), (16, 4)))

    def called() -> list[str]:
        with Called() as seen:
            add_product(total, a, b)
        return seen.names

    assert called() == ["aten.addmm.dtype_out"]
    settings = torch.backends.cuda.matmul
    settings.allow_fp16_accumulation = True
    try:  # torch refuses to sum in f16 for f32
        assert len(called()) == (1 if dtype is torch.bfloat16 else 2)
    finally:
        settings.allow_fp16_accumulation = False


# -- forms of tensors ------------------------------------------------------------------------------


def seen(memory: torch.Tensor, form: NumberForm) -> torch.Tensor:
    """Return memory as torch has it in a form."""
    if form.is_complex:
        made = torch.view_as_complex(memory)
        return made.conj() if form.has_bit else made
    return torch._neg_view(memory) if form.has_bit else memory


def returned(had: NumberForm, *outputs: View) -> Any:
    """Return the ``call`` of a graph that returns views of its only input."""
    (held,) = {view.buffer for view in outputs}
    program = plan_host(Schedule(Graph("g", (held,), (), outputs), ()))
    return bind(print_wrapper(program, {}, {}), {}, NOTHING, torch.device("cpu"))


@pytest.mark.parametrize("wanted", NumberForm)
@pytest.mark.parametrize("had", NumberForm)
def test_view_in_another_form_is_the_same_memory(had: NumberForm, wanted: NumberForm) -> None:
    z = Buffer("z", (index(4), index(6), index(2)), (index(12), index(2), index(1)), F32, had)
    window = View(z, (index(3), index(2)), (index(4), index(1)), index(14), wanted)
    memory = torch.arange(48.0).sin().view(4, 6, 2)
    x = seen(memory, had)
    for made, expected in zip(
        returned(had, replace(whole(z), form=wanted), window)([x]),
        (seen(memory, wanted), seen(memory.as_strided((3, 2), (4, 1), 14), wanted)),
        strict=True,
    ):
        assert made.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        assert (made.is_conj(), made.is_neg()) == (expected.is_conj(), expected.is_neg())
        assert made.stride() == expected.stride()
        torch.testing.assert_close(made, expected, rtol=0, atol=0)


@pytest.mark.parametrize("form", NumberForm)
def test_input_without_the_traced_bit_gets_it(form: NumberForm) -> None:
    z = Buffer("z", (index(6), index(2)), (index(2), index(1)), F32, form)
    call = returned(form, View(z, z.shape, z.strides, index(0), form))
    values = torch.arange(12.0).sin().view(6, 2)
    x = torch.view_as_complex(values) if form.is_complex else values
    (made,) = call([x])
    assert (made.is_conj() or made.is_neg()) is form.has_bit
    torch.testing.assert_close(made, x, rtol=0, atol=0)
    if form is NumberForm.COMPLEX:
        assert not call([x.conj()])[0].is_conj()


@pytest.mark.parametrize("change", (conjugated, unconjugated, negated))
def test_tensor_whose_bit_is_changed_keeps_its_strides(change: Any) -> None:
    every_other = values(4, 6, dtype=torch.complex64)[:, ::2]
    x = {conjugated: every_other, unconjugated: every_other.conj(), negated: every_other.real}
    made = change(x[change])
    assert made.stride() == x[change].stride()
    assert (made.is_conj(), made.is_neg()) == (change is conjugated, change is negated)
    torch.testing.assert_close(made, x[change], rtol=0, atol=0)


def test_memory_of_a_complex_result_is_complex() -> None:
    z = Buffer("z", (index(6), index(2)), (index(2), index(1)), F32, NumberForm.CONJUGATE)
    a, p = axes("a p", 6, 2)
    kernel = Kernel("k0", (a, p), (), (Store(z, (index(a), index(p)), f32(1)),))
    schedule = Schedule(graph((), (), z), (kernel,))
    programs = lower_all(schedule, small_target("cpu"))
    text = print_wrapper(plan_host(schedule), programs, {"k0": "k0"})
    assert "z = empty((6,), (1,), c64).conj()" in text


def test_a_call_s_own_result_gets_its_strides_in_place_and_a_view_does_not() -> None:
    own = torch.empty_strided((1, 8), (100, 1))
    base = values(1, 100)
    cut = base[:, :8]
    assert restride(own, (8, 1)) is own
    for change in (restride, with_strides):
        made = change(cut, (8, 1))
        assert made.stride() == (8, 1) and made.data_ptr() == base.data_ptr()
        assert cut.stride() == (100, 1) and base._version == 0
