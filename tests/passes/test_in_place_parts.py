"""A position of a cache is written where it lies: what is launched and moved, what eager holds."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import fusec
from tests import triton_backend  # noqa: F401  (registers its backends)
from tests.support import check, values

LENGTH = 64
CACHE, TOKEN, QUERY = (
    values(2, 3, LENGTH, 4),
    values(2, 3, 1, 4, seed=1),
    values(2, 3, 1, 4, seed=2),
)
POSITION = torch.tensor([3])
TOKEN_BYTES = TOKEN.numel() * 4


def attend(cache, q):
    return (q @ cache.mT).softmax(-1)


def select(c, k, q, p):
    c[:, :, 3] = k[:, :, 0] * 2
    return attend(c, q)


def slices(c, k, q, p):
    c[:, :, 3:4] = k * 2
    return attend(c, q)


def from_the_end(c, k, q, p):
    c[:, :, -2] = k[:, :, 0] * 2
    return attend(c, q)


def every_other(c, k, q, p):
    c[:, :, 1:7:2] = k * 2
    return attend(c, q)


def turned(c, k, q, p):
    c[:, :, 3:5] = (k.expand(2, 3, 2, 4) * q).transpose(0, 1).contiguous().transpose(0, 1)
    return attend(c, q)


def an_input_itself(c, k, q, p):
    c[:, :, 3:4] = k
    return attend(c, q)


def position(c, k, q, p):
    c[:, :, p] = k
    return attend(c, q)


def index_copy(c, k, q, p):
    c.index_copy_(2, p, k)
    return attend(c, q)


def index_add(c, k, q, p):
    c.index_add_(2, p, k)
    return attend(c, q)


def index_put(c, k, q, p):
    c.index_put_((torch.arange(2)[:, None], torch.arange(3), p), k[:, :, 0])
    return attend(c, q)


def accumulated(c, k, q, p):
    c.index_put_((torch.arange(2)[:, None], torch.arange(3), p), k[:, :, 0], accumulate=True)
    return attend(c, q)


def scatter(c, k, q, p):
    c.scatter_(2, p.view(1, 1, 1, 1).expand(2, 3, 1, 4), k)
    return attend(c, q)


def twice(c, k, q, p):
    c[:, :, 3:4] = k * 2
    c.index_copy_(2, p + 2, k)
    c[:, :, 7] = k[:, :, 0] + 1
    return attend(c, q), c * 2


def one_over_another(c, k, q, p):
    both = k.exp()
    c.index_copy_(2, p, both + 1)
    c[:, :, 3:4] = both
    return attend(c, q)


def added_to(c, k, q, p):
    c[:, :, 3:4] += k
    return attend(c, q)


WRITES = {
    select: 0, slices: 0, from_the_end: 0, every_other: 0, turned: 0, an_input_itself: 0,
    position: 1, index_copy: 1, index_add: 1, index_put: 1, accumulated: 1, scatter: 1, twice: 2,
    one_over_another: 2, added_to: 1,
}  # fmt: skip
"""How many eager kernels are left that write a part; the others are stores of kernels."""
INPUTS = (CACHE, TOKEN, QUERY, POSITION)


def returned_before(c, k, q, p):
    old = c * 2
    c.index_copy_(2, p, k)
    return old, attend(c, q)


def returned_as_it_was(c, k, q, p):
    old = c.clone()
    c[:, :, 3:4] = k
    return old, c + old


def from_its_own_row(c, k, q, p):
    c[:, :, 3] = c[:, :, 2] * 2
    c[:, :, 4] = c[:, :, 3] + c[:, :, 5]
    return attend(c, q)


def most_of_it(c, k, q, p):
    c[:, :, 2:] = c[:, :, :-2] * 2
    return attend(c, q)


def masked(c, k, q, p):
    c[c > 0.5] = 0.5
    return attend(c, q)


def through_a_view(c, k, q, p):
    c[1][:, 3] = k[1, :, 0]
    return attend(c, q)


def shifted(c, k, q, p):
    c[:, :, 1:9] = c[:, :, :8].clone()
    return attend(c, q)


def from_another_position(c, k, q, p):
    c[:, :, 3:4] = c[:, :, 5:6]
    c.scatter_(2, p.view(1, 1, 1, 1).expand(2, 3, 1, 4), c[:, :, 7:8].clone())
    return attend(c, q)


def from_rows_that_were_written(c, k, q, p):
    c.index_copy_(2, p, k)
    c[:, :, 4:12] = c[:, :, 3:11] * 2
    return attend(c, q)


def of_a_copy(c, k, q, p):
    d = c.clone()
    d.index_copy_(2, p, k)
    return attend(d, q), c + 1


QUICK = (
    select, index_copy, twice, one_over_another, returned_before, shifted,
    from_rows_that_were_written,
)  # fmt: skip


def each(functions):
    """Return parameters, of which all but a few are slow."""
    slow = pytest.mark.slow
    return [pytest.param(f, marks=() if f in QUICK else slow, id=f.__name__) for f in functions]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("write", each(WRITES))
def test_a_part_of_an_input_is_written_in_place(write):
    check(write, *INPUTS)
    (graph,) = fusec.explain(write, *INPUTS).graphs
    reasons = [(e.op, e.reason) for e in graph.externs]
    parts = [op for op, reason in reasons if reason == "writes a part of an input in place"]
    assert len(parts) == WRITES[write], reasons
    assert not [op for op, reason in reasons if reason in ("copy into an input",)]


def test_kernels_of_gpus_write_parts_too():
    check(twice, *INPUTS, backend="triton_interpreter")


@pytest.mark.parametrize("write", (slices, index_copy), ids=lambda f: f.__name__)
def test_the_bytes_written_do_not_grow_with_the_cache(write):
    def only_write(c, k, q, p):
        write(c, k, q, p)

    def moved(length):
        cache = values(2, 3, length, 4)
        (graph,) = fusec.explain(only_write, cache, *INPUTS[1:]).graphs
        return graph.bytes_moved

    assert moved(LENGTH) == moved(8 * LENGTH) <= 3 * TOKEN_BYTES


READS_BEFORE = (
    returned_before, returned_as_it_was, from_its_own_row, most_of_it, masked, through_a_view,
    of_a_copy, shifted, from_another_position, from_rows_that_were_written,
)  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("write", each(READS_BEFORE))
def test_contents_that_are_read_before_stay_what_they_were(write):
    check(write, *INPUTS)


@pytest.mark.parametrize("layout", ("turned", "window"))
def test_caches_of_other_strides_are_written_in_place(layout):
    cache = {
        "turned": values(2, LENGTH, 3, 4).transpose(1, 2),
        "window": values(2, 3, LENGTH + 2, 8)[:, :, 1:-1, :4],
    }[layout]
    for write in (slices, index_copy):
        check(write, cache, *INPUTS[1:])


@pytest.mark.slow
def test_a_position_that_is_an_integer_compiles_once():
    def write(c, k, q, n):
        c[:, :, n : n + 1] = k * 2
        c[:, :, n] += 1
        return attend(c[:, :, : n + 1], q)

    def compiles(backend, **options):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(write, backend=backend, **options)
        with torch.no_grad():
            for n in (3, 4, 9, LENGTH - 1):
                ours, eager = CACHE.clone(), CACHE.clone()
                result, wanted = compiled(ours, TOKEN, QUERY, n), write(eager, TOKEN, QUERY, n)
                assert torch.allclose(result, wanted)
                assert torch.equal(ours, eager)
        return counters["stats"]["unique_graphs"]

    ours = compiles("fusec", options={"strict": True, "verify": True})
    assert ours == compiles("aot_eager")
