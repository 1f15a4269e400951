"""Indexing by tensors against eager: gathers, scatters, embeddings, masks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support import LAYOUTS, TRAINED, Cases, as_captured, check, in_both, values, with_layout

in_inference, in_training = Cases(), Cases()

INTS = (torch.int64, torch.int32)


def indices(*shape, below, seed=0):
    return values(*shape, dtype=torch.int64, low=0, high=below, seed=seed)


GATHERS = {
    "index_rows": lambda x, i: x[i],
    "index_columns": lambda x, i: x[:, i],
    "index_negative": lambda x, i: x[-i - 1],
    "index_select_rows": lambda x, i: x.index_select(0, i),
    "index_select_columns": lambda x, i: x.index_select(1, i),
    "gather_rows": lambda x, i: x.gather(0, i[:, None].expand(-1, 9)),
    "gather_columns": lambda x, i: x.gather(1, i[None, :4].expand(6, -1)),
    "take": lambda x, i: x.take(i * 3),
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i[:6, None], 1),
    "pairs": lambda x, i: x[i, i],
    "broadcast_pairs": lambda x, i: x[i[:, None], i[None, :3]],
    "with_slice": lambda x, i: x[i, 2:5],
    "with_new_axis": lambda x, i: x[None, i],
    "of_a_transpose": lambda x, i: x.t()[i],
    "two_dimensional": lambda x, i: x[i.view(4, 2)],
}


@as_captured
def test_gathers_match_eager(check):
    check(
        lambda x, i: {name: op(x, i) for name, op in GATHERS.items()},
        values(6, 9),
        indices(8, below=6),
        left=(),
    )


@in_training
def gathers_inside_a_chain_have_eager_gradients():
    return (
        lambda x, i: {name: op(x.exp(), i) * 2 + 1 for name, op in GATHERS.items()},
        values(6, 9),
        indices(8, below=6),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64, torch.int32, torch.bool), ids=str)
@in_both
def test_gathers_of_other_dtypes_match_eager(dtype, check):
    check(
        lambda x, i: {name: op(x, i) for name, op in GATHERS.items()},
        values(6, 9, dtype=dtype),
        indices(8, below=6),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@as_captured
def test_gathers_of_strided_tensors_match_eager(layout, check):
    def gather(x, i):
        return x[i] + 1, x[:, i, 1:3] * 2, x.gather(2, i[None, None, :].expand(4, 6, -1)), x[i, i]

    check(gather, with_layout(values(4, 6, 8), layout), indices(5, below=4))


@in_training
def advanced_indices_separated_by_a_slice_come_first_as_in_eager():
    def advanced(x, i, j):
        return (
            x[i, :, j] + 1,
            x[:, i, j] * 2,
            x[i[:, None], :, j[None, :]],
            x[..., i, j],
            x[:, i, :, j],
            x[i],
            x[:, :, j, 0],
            x[i, 1:, None, j],
        )

    return advanced, values(5, 4, 6, 7), indices(3, below=4), indices(3, below=5, seed=1)


@pytest.mark.parametrize("dtype", INTS, ids=str)
@as_captured
def test_index_tensors_of_both_widths_match_eager(dtype, check):
    i = indices(7, below=6).to(dtype)
    check(
        lambda x, i: (x[i] * 2, x.index_select(0, i), F.embedding(i, x), x[i // 2] - x[i]),
        values(6, 9),
        i,
    )


@in_training
def an_index_computed_in_the_graph_matches_eager():
    def computed(x, i):
        best = x.argmax(-1)
        return (
            x.gather(1, best[:, None]) * 2,
            x[torch.arange(6), best],
            x[(i * 2 + 1) % 6] + 1,
            x[i.clamp(max=3)].sum(0),
        )

    return computed, values(6, 9), indices(8, below=6)


@in_training
def embedding_with_positions_matches_eager():
    def embed(ids, table, positions):
        steps = torch.arange(ids.shape[1])
        h = F.embedding(ids, table) + F.embedding(steps, positions)
        return F.layer_norm(h, (16,)), h * 0.5

    return embed, indices(3, 7, below=50), values(50, 16), values(9, 16, seed=1)


@in_training.each((0, 3, -1))
def padded_embedding_has_no_gradient_in_its_padding_row(padding_idx):
    return (
        lambda i, w: F.embedding(i, w, padding_idx=padding_idx) * 2,
        indices(5, 6, below=8),
        values(8, 12),
    )


@in_training
def gradients_of_repeated_indices_accumulate():
    def repeated(x, i):
        return x[i] * torch.arange(40.0)[:, None], F.embedding(i, x).exp(), x.index_select(0, i)

    return repeated, values(3, 5), indices(40, below=3)


@TRAINED
def test_embedding_modules_match_eager(train):
    torch.manual_seed(0)
    bag = torch.nn.Embedding(11, 6, padding_idx=2)
    check(bag, indices(4, 5, below=11), train=train)


MASKS = {
    "masked_fill": lambda x, m: x.masked_fill(m, -1e9).softmax(-1),
    "masked_fill_tensor": lambda x, m: x.masked_fill(m, torch.tensor(2.0)),
    "where": lambda x, m: torch.where(m, x, torch.zeros(())),
    "product": lambda x, m: x * m,
    "masked_row": lambda x, m: x.masked_fill(m[0], 0.0) + 1,
    "inverted": lambda x, m: x.masked_fill(~m[:, :1], 3.0),
    "additive": lambda x, m: x + torch.zeros_like(x).masked_fill(m, torch.finfo(x.dtype).min),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@in_both
def test_masks_match_eager_and_its_gradients(dtype, check):
    table = {n: op for n, op in MASKS.items() if dtype != torch.float16 or n != "masked_fill"}
    check(
        lambda x, m: {name: op(x, m) for name, op in table.items()},
        values(6, 9, dtype=dtype),
        values(6, 9, dtype=torch.bool),
        train=True,
        left=(),
    )


@in_training
def causal_masks_built_from_positions_match_eager():
    def causal(x):
        n = x.shape[-1]
        triangle = torch.ones(n, n, dtype=torch.bool).tril()
        steps = torch.arange(n)
        ahead = steps[None, :] > steps[:, None]
        window = (steps[:, None] - steps[None, :]).abs() < 3
        return (
            x.masked_fill(~triangle, -torch.inf).softmax(-1),
            x.masked_fill(ahead, 0.0),
            torch.where(window, x, -1.0),
            x + torch.full((n, n), -torch.inf).triu(1),
        )

    return causal, values(2, 9, 9)


SCATTERS = {
    "scatter": lambda x, i, s: x.scatter(0, i, s),
    "scatter_value": lambda x, i, s: x.scatter(1, i % 9, 1.5),
    "scatter_add": lambda x, i, s: x.scatter_add(0, i, s),
    "scatter_reduce_sum": lambda x, i, s: x.scatter_reduce(0, i, s, "sum", include_self=False),
    "scatter_reduce_max": lambda x, i, s: x.scatter_reduce(0, i, s, "amax"),
    "index_add": lambda x, i, s: x.index_add(0, i[:, 0], s),
    "index_copy": lambda x, i, s: x.index_copy(0, torch.arange(6).flip(0), x * 2),
    "index_fill": lambda x, i, s: x.index_fill(0, i[:2, 0], -1.0),
    "index_fill_integer": lambda x, i, s: x.index_fill(0, i[:2, 0], torch.tensor(2)),
    "index_fill_double": lambda x, i, s: x.index_fill(1, i[:2, 0], torch.tensor(0.1).double()),
    "index_put": lambda x, i, s: x.index_put((torch.arange(6),), x + 1),
    "index_put_accumulate": lambda x, i, s: x.index_put((i[:, 0],), s, accumulate=True),
    "index_put_mask": lambda x, i, s: x.index_put((x > 0,), torch.tensor(0.5)),
    "slice_scatter": lambda x, i, s: torch.slice_scatter(x, x[:3] * 2, 0, 1, 4),
    "select_scatter": lambda x, i, s: torch.select_scatter(x, x[:, 0] + 1, 1, 4),
    "diagonal_scatter": lambda x, i, s: torch.diagonal_scatter(x, torch.ones(6)),
    "masked_scatter": lambda x, i, s: x.masked_scatter(x > 0, s),
}


def scatter_inputs(dtype=torch.float32):
    rows = torch.stack(
        [torch.randperm(6, generator=torch.Generator().manual_seed(c)) for c in range(9)], 1
    )
    return values(6, 9, dtype=dtype), rows, values(6, 9, dtype=dtype, seed=2)


@in_inference
def scatters_match_eager():
    return (lambda x, i, s: {name: op(x, i, s) for name, op in SCATTERS.items()}, *scatter_inputs())


@in_training
def scatters_between_pointwise_operations_have_eager_gradients():
    table = {n: op for n, op in SCATTERS.items() if n not in ("masked_scatter",)}
    return (
        lambda x, i, s: {name: op(x.sin(), i, s * 2) + 1 for name, op in table.items()},
        *scatter_inputs(),
    )


@in_inference
def scatters_of_half_precision_match_eager():
    names = ("scatter", "scatter_value", "scatter_add", "slice_scatter", "select_scatter")
    return (
        lambda x, i, s: {name: SCATTERS[name](x, i, s) for name in names},
        *scatter_inputs(torch.bfloat16),
    )


@in_inference
def repeated_scatter_indices_accumulate_every_value():
    def accumulate(x, i, s):
        return (
            x.scatter_add(0, i, s),
            x.new_zeros(4, 5).index_add(0, i[:, 0], s),
            x.new_zeros(4).scatter_add(0, i[:, 1], x.new_ones(60)),
        )

    return accumulate, values(4, 5), indices(60, 5, below=4), values(60, 5, seed=2)


@in_inference
def the_last_of_repeated_scatter_indices_replaces():
    def replace(x, i, s):
        line = x[:, 0]
        return (line.scatter(0, i, s), line.index_put((i - 4,), s), line.put(i, s),
                line.put(i, s, accumulate=True), x.index_copy(0, i, s[:, None].expand(-1, 5)),
                x.take(i), line.index_reduce(0, i, s, "mean", include_self=False))  # fmt: skip

    return replace, values(4, 5), indices(20, below=4), values(20, seed=2)


@in_inference
def one_hot_and_bucket_counts_match_eager():
    def encode(i):
        hot = F.one_hot(i, 7)
        return hot, hot.float() * 2, hot.sum(0), (i[..., None] == torch.arange(7)).to(torch.float32)

    return encode, indices(4, 5, below=7)


@in_inference
def searching_and_sorting_indices_match_eager_wherever_they_run():
    def search(x, edges):
        order = x.argsort(-1)
        return (
            torch.bucketize(x, edges),
            torch.searchsorted(edges, x),
            order,
            x.gather(-1, order) * 2,
            x.topk(2).values + 1,
        )

    return search, values(4, 9), torch.linspace(-2, 2, 7)


@in_training
def windows_of_keys_by_relative_position_match_eager():
    def relative(scores, table):
        n = scores.shape[-1]
        distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        bias = table[distance.clamp(-4, 4) + 4]
        return (scores + bias.permute(2, 0, 1)).softmax(-1)

    return relative, values(3, 11, 11), values(9, 3, seed=1)


@in_training
def rotary_tables_are_gathered_by_position():
    def rotate(q, positions, table):
        angles = positions[:, None].float() * table
        angles = torch.cat((angles, angles), -1)
        half = q.shape[-1] // 2
        turned = torch.cat((-q[..., half:], q[..., :half]), -1)
        return q * angles.cos() + turned * angles.sin()

    return (
        rotate,
        values(2, 3, 7, 8),
        torch.arange(7),
        values(
            4,
            seed=1,
        ),
    )


@TRAINED
def test_indexing_takes_dynamic_shapes(train):
    def index(x, i):
        return (
            x[i] * 2,
            x.gather(0, i[:, None].expand(-1, x.shape[1])) + 1,
            x[:, 1:][i],
            x[i].sum(0),
        )

    check(index, values(6, 9), indices(8, below=6), dynamic=True, train=train)


@in_inference
def indexing_with_no_index_gives_nothing():
    def nothing(x, i):
        return x[i], x[:, i] * 2, x.index_select(0, i).sum(0), F.embedding(i, x)

    return nothing, values(6, 9), indices(0, below=6)


@in_inference.each((float("nan"), -1.0))
def an_out_of_range_select_by_a_mask_is_never_read(fill):
    x = torch.full((4, 6), fill)

    def guarded(x, i):
        safe = i.clamp(0, 3)
        return torch.where((i >= 0)[:, None], x[safe], torch.zeros(()))

    return guarded, x, torch.tensor([-1, 0, 3, -7, 2])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("length", (2, 3, 7))
def test_a_size_that_is_the_larger_of_two_is_that_for_each_length(length):
    def padded(x, n):
        return F.pad(x, (0, max(1, n - 3))) * 2.0

    def marked(x, n):
        return torch.where(torch.arange(x.shape[-1]) < max(1, n - 3), x, -x) * x

    check(padded, values(6, 5), length, dynamic=True)
    check(marked, values(6, 5), length, dynamic=True)


@in_inference.each((torch.bool, torch.int64, torch.bfloat16))
def a_scatter_adds_what_its_type_adds(dtype):
    x, source = torch.zeros(3, 5).to(dtype), torch.ones(2, 5).to(dtype)
    i = torch.tensor([[0, 1, 2, 0, 0], [1, 1, 0, 2, 0]])
    return (lambda x, i, s: (x.scatter_add(0, i, s), x.scatter_add(0, i[:1], s)), x, i, source)


def test_cases_match_eager():
    in_inference.check()


@TRAINED
def test_cases_match_eager_with_their_gradients(train):
    in_training.check(train=train)
