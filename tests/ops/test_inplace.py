"""Mutation against eager: what an input holds after the call, in which order, and who sees it.

`check` compares the whole storage of every input after the call and which outputs alias which
inputs, so that these tests only have to mutate.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from tests.support import LAYOUTS, TRAINED, Cases, check, compile_with, in_both, values, with_layout

in_inference, in_training = Cases(), Cases()


def add_one(x):
    x.add_(1)


def add_and_return(x):
    x.add_(1)
    return x


def return_a_copy_too(x):
    y = x * 2
    x.mul_(3)
    return y, x + y


def several(x):
    x.relu_()
    x.mul_(2).sub_(0.5)
    x.clamp_(max=1.5)
    return x.sum()


def write_a_slice(x):
    x[1:3] = 7
    x[:, ::2] *= 2
    return x.sum(1)


def write_a_row_from_a_row(x):
    x[0] = x[1] + x[2]
    x[1] = x[0] * 2
    return x * 1


def write_through_a_transpose(x):
    x.t()[1].add_(5)
    return x.t() * 2


def write_through_a_view_of_a_view(x):
    x.view(-1)[3:20].view(17).mul_(-1)
    return x


def fill_and_zero(x):
    y = x.clone()
    x.fill_(2.5)
    x[0].zero_()
    return y + x


def masked(x):
    x.masked_fill_(x > 0.5, 0)
    x[x < -0.5] = -9
    return x + 0


def copy_shifted(x):
    x[:, 1:].copy_(x[:, :-1].clone())
    return x.softmax(-1)


def read_then_write_then_read(x):
    before = x.sum(0)
    x.exp_()
    after = x.sum(0)
    x.neg_()
    return before, after, x.amax(0)


def set_an_element(x):
    x[2, 3] = 100.0
    x[-1, -1] += 1
    return x.amax()


def scatter_in_place(x):
    x.scatter_(1, torch.zeros(6, 1, dtype=torch.int64), 4.0)
    x.index_add_(0, torch.tensor([0, 0, 2]), x.new_ones(3, 9))
    x.index_put_((torch.tensor([1]),), x.new_tensor(8.0))
    return x * 2


MUTATIONS = [
    add_one,
    add_and_return,
    return_a_copy_too,
    several,
    write_a_slice,
    write_a_row_from_a_row,
    write_through_a_transpose,
    write_through_a_view_of_a_view,
    fill_and_zero,
    masked,
    copy_shifted,
    read_then_write_then_read,
    set_an_element,
    scatter_in_place,
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_mutated_input_holds_what_eager_leaves(mutate):
    check(mutate, values(6, 9))


@in_inference.each([name for name in LAYOUTS if name != "expanded"])
def mutated_strided_input_is_written_in_place_and_nowhere_else(layout):
    def mutate(x, y):
        x.add_(y).mul_(2)
        return x.sum(-1), y + x

    return mutate, with_layout(values(4, 6, 8), layout), values(4, 6, 8, seed=1)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
@in_both
def test_mutation_of_an_intermediate_matches_eager_and_its_gradients(mutate, check):
    def through(x):
        y = torch.sin(x) * 2
        result = mutate(y)
        return y if result is None else (y * 1, result)

    # What backward needs of these was overwritten: eager refuses their gradients.
    check(through, values(6, 9), train=mutate not in (several, read_then_write_then_read))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "dtype", (torch.bfloat16, torch.float64, torch.int32, torch.uint8), ids=str
)
def test_in_place_arithmetic_keeps_the_dtype_of_the_input(dtype):
    def mutate(x, y):
        x += 1
        x *= y
        x.clamp_(0, 50)
        return x * 2

    check(mutate, values(5, 9, dtype=dtype), values(5, 9, dtype=dtype, seed=1))


@in_inference
def in_place_arithmetic_casts_a_wider_operand():
    def mutate(x, h, y):
        x.add_(y)
        h.mul_(y)
        h.copy_(x)
        return x + h

    return (
        mutate,
        values(5, 9),
        values(5, 9, dtype=torch.float16),
        values(5, 9, dtype=torch.float64),
    )


@in_inference
def bits_and_truth_are_updated_in_place():
    def mutate(i, b):
        i.bitwise_and_(6).bitwise_or_(1)
        i <<= 2
        b.logical_not_()
        b &= i > 8
        return b.sum()

    return mutate, values(5, 9, dtype=torch.int64), values(5, 9, dtype=torch.bool)


@in_inference
def two_inputs_are_updated_from_each_other_in_order():
    def swap(x, y):
        x.add_(y)
        y.mul_(x)
        x.sub_(y)
        return x * y

    return swap, values(5, 9), values(5, 9, seed=1)


def test_an_input_and_its_view_passed_together_stay_one_memory():
    base = values(6, 9)

    def mutate(x, row):
        row.add_(1)
        y = x * 2
        x.mul_(3)
        return y, row + 0

    check(mutate, base, base[2])


@pytest.mark.parametrize("other", [torch.t, lambda x: x.view(-1, 2, x.shape[1])])
def test_an_input_and_its_view_may_have_other_sizes_in_the_next_call(other):
    def update(x, view):
        x.add_(1)
        return view * 2

    torch._dynamo.reset()
    call = compile_with(update)
    for n in (8, 10, 6):
        x = values(n, n)
        y = x.clone()
        assert torch.equal(call(x, other(x)), update(y, other(y)))
        assert torch.equal(x, y)


def test_the_same_tensor_passed_twice_stays_one_memory():
    base = values(6, 9)

    def mutate(x, y):
        x.add_(1)
        return x + y, y * 2

    check(mutate, base, base)


@in_training
def an_input_returned_as_it_is_stays_the_same_memory():
    return (lambda x, y: (x, x + y, y[1:], y.t()), values(6, 9), values(6, 9, seed=1))


@in_inference
def an_input_returned_twice_and_a_result_returned_twice_match_eager():
    def twice(x):
        y = x * 2
        return x, x, y, y, y[0]

    return twice, values(4, 5)


def test_outputs_do_not_share_memory_that_eager_keeps_apart():
    torch._dynamo.reset()
    compiled = compile_with(lambda x: (x + 1, x + 1, (x * 2).sum(0), (x * 2).sum(0)))
    a, b, c, d = compiled(torch.zeros(5, 5))
    a.fill_(7)
    c.fill_(7)
    assert torch.equal(b, torch.ones(5, 5))
    assert torch.equal(d, torch.zeros(5))


def test_a_result_mutated_by_the_caller_does_not_disturb_the_next_call():
    torch._dynamo.reset()
    compiled = compile_with(lambda x: x.relu() + 1)
    compiled(torch.ones(9)).fill_(100)
    assert torch.equal(compiled(torch.ones(9)), torch.full((9,), 2.0))


@in_inference
def running_statistics_are_updated_in_place():
    def update(mean, count, x):
        count += 1
        mean.lerp_(x.mean(0), 0.1)
        return (x - mean) / (x.std(0) + 1e-5)

    return update, values(9), torch.tensor(3), values(17, 9, seed=1)


@in_inference
def a_key_value_cache_is_written_at_a_position():
    def append(cache, key, position):
        cache[:, position] = key
        cache.index_copy_(1, position + 2, key * 2)
        return cache.sum(1), cache

    return append, torch.zeros(2, 8, 5), values(2, 1, 5), torch.tensor([3])


@in_inference
def out_arguments_are_written():
    def write(x, out):
        torch.add(x, 1, out=out)
        torch.mul(x, out, out=out)
        return out + 0

    return write, values(5, 9), torch.zeros(5, 9)


def test_buffers_of_a_module_are_updated():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(9))
            self.register_buffer("calls", torch.tensor(0))
            self.weight = torch.nn.Parameter(values(9, seed=4))

        def forward(self, x):
            self.calls += 1
            self.seen.add_(x.detach().abs().sum(0))
            return x * self.weight / (1 + self.seen)

    check(Counter(), values(5, 9), train=True)


@in_inference
def an_optimizer_step_written_by_hand_matches_eager():
    def adam(p, g, m, v):
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        p.addcdiv_(m / 0.1, (v / 0.001).sqrt_().add_(1e-8), value=-0.01)

    tensors = [values(5, 9, seed=s) for s in range(3)] + [values(5, 9, seed=3).abs()]
    return adam, *tensors


def test_mutation_between_graph_breaks_is_seen_on_both_sides():
    def broken(x):
        x.add_(1)
        y = x * 2
        torch._dynamo.graph_break()
        x.mul_(2)
        return y + x, x.sum()

    check(broken, values(5, 9), fullgraph=False)


@in_training
def relu_in_place_inside_a_network_matches_eager():
    def network(x, w):
        h = F.linear(x, w)
        F.relu(h, inplace=True)
        return F.dropout(h, 0.3, False) + x

    return network, values(5, 9), values(9, 9, seed=1)


@pytest.mark.parametrize("n", (4, 11))
def test_mutation_takes_dynamic_shapes(n):
    def mutate(x, y):
        x[1:] += y[:-1]
        x.mul_(x.shape[0])
        return x.sum(0)

    check(mutate, values(n, 5), values(n, 5, seed=1), dynamic=True)


def test_a_write_that_cannot_be_made_functional_runs_as_it_is(caplog):
    def windows(x):
        y = x.unfold(0, 2, 1)  # elements lie in two windows
        y[::2] += 3
        return y * 2

    a, b = values(5, 4), values(5, 4)
    torch._dynamo.reset()
    with caplog.at_level("INFO", "fusec.compile"):
        found = torch.compile(windows, backend="fusec")(a)
    assert torch.equal(found, windows(b))
    assert torch.equal(a, b)
    assert re.search("iadd runs as PyTorch runs it.*internal overlap", caplog.text)


def test_cases_match_eager():
    in_inference.check()


@TRAINED
def test_cases_match_eager_with_their_gradients(train):
    in_training.check(train=train)


def _count(step, x):
    step.add_(1.5)
    step.view(1).mul_(2)
    return x * step


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.int64))
def test_a_number_that_is_written_in_place_keeps_what_is_written(dtype):
    """AOTAutograd loses it in f64 on a CPU, of which it thinks as of a number of Python."""
    count = _count if dtype.is_floating_point else lambda step, x: step.add_(2) + x
    check(count, torch.ones((), dtype=dtype), torch.arange(3.0))


def test_a_copy_of_a_number_is_written_by_a_compiled_graph():
    def count(step, x):
        copy = step.clone()
        copy.add_(1.5)
        step.view(1).mul_(2)
        return copy * x, copy

    check(count, torch.ones((), dtype=torch.float64), torch.arange(3.0), left=("copy_.default",))


class Stepping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.step.add_(1.0)
        return x / self.step


def test_a_counter_of_a_module_in_f64_counts():
    module = Stepping()
    compiled = compile_with(module)
    found = [compiled(torch.ones(2))[0].item() for _ in range(3)]
    assert found == pytest.approx([1, 1 / 2, 1 / 3]) and module.step == 3


def set_rows_before(x, v):
    x[-2000:1] = v * 2
    return v + 1


def copy_rows_before(x, v):
    x[-2000:1].copy_(v)
    return v + 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("write", [set_rows_before, copy_rows_before], ids=lambda f: f.__name__)
def test_a_slice_that_begins_before_its_tensor_is_written_within_it(write, dynamic):
    for behind in (False, True):
        memories = [torch.zeros(4000, 6) for _ in range(2)]
        fns = (write, compile_with(write, dynamic=dynamic))
        for fn, memory in zip(fns, memories, strict=True):
            fn(memory[2000:2512] if behind else memory[:512], torch.ones(1, 6))
        assert torch.equal(*memories)
