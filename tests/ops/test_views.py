"""Views and rearrangements against eager: as results, inside chains, and through gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support import LAYOUTS, TRAINED, Cases, as_captured, check, in_both, values, with_layout

in_inference, in_training = Cases(), Cases()

# On a tensor of shape [4, 6, 10]; each is a view in eager wherever strides allow.
VIEWS = {
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "mT": lambda x: x.mT,
    "movedim": lambda x: x.movedim(0, -1),
    "swapaxes": lambda x: x.swapaxes(1, 2),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze_last": lambda x: x[..., None],
    "squeeze": lambda x: x[:1].squeeze(),
    "squeeze_dim": lambda x: x[:, :1].squeeze(1),
    "expand": lambda x: x[:, :1].expand(4, 6, -1),
    "expand_new_axis": lambda x: x.expand(2, 4, 6, 10),
    "expand_as": lambda x: x[:1].expand_as(x),
    "select": lambda x: x.select(1, 2),
    "select_negative": lambda x: x[-1],
    "slice": lambda x: x[1:3],
    "slice_step": lambda x: x[:, ::2],
    "slice_negative": lambda x: x[:, :, -4:-1],
    "slice_beyond_the_end": lambda x: x[:, 3:100],
    "slice_empty": lambda x: x[2:2],
    "narrow": lambda x: x.narrow(2, 3, 5),
    "several_slices": lambda x: x[1:, ::3, 2:-2],
    "unflatten": lambda x: x.unflatten(2, (2, 5)),
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2),
    "diagonal_offset": lambda x: x.diagonal(offset=2, dim1=0, dim2=2),
    "unfold": lambda x: x.unfold(2, 4, 3),
    "unfold_overlapping": lambda x: x.unfold(1, 3, 1),
    "as_strided": lambda x: x.as_strided((3, 4), (7, 2), 5),
    "broadcast_to": lambda x: torch.broadcast_to(x[0, 0], (3, 10)),
    "detach": lambda x: x.detach(),
    "alias": lambda x: x.view_as(x),
}
# These copy where strides do not allow a view, or always.
REARRANGEMENTS = {
    "reshape_merge": lambda x: x.reshape(24, 10),
    "reshape_split": lambda x: x.reshape(2, 2, 3, 2, 10),
    "reshape_across": lambda x: x.reshape(8, 30),
    "reshape_flat": lambda x: x.reshape(-1),
    "flatten": lambda x: x.flatten(1),
    "transpose_then_reshape": lambda x: x.transpose(1, 2).reshape(4, 60),
    "heads": lambda x: x.reshape(4, 6, 2, 5).transpose(1, 2),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "clone": lambda x: x.permute(2, 1, 0).clone(),
    "flip": lambda x: x.flip(0),
    "flip_two": lambda x: x.flip((1, 2)),
    "fliplr": lambda x: torch.fliplr(x),
    "roll": lambda x: x.roll(2, 1),
    "roll_two": lambda x: x.roll((-1, 3), (0, 2)),
    "roll_flat": lambda x: x.roll(7),
    "rot90": lambda x: torch.rot90(x, 1, (1, 2)),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat_new_axis": lambda x: x[0, 0].repeat(3, 2),
    "tile": lambda x: x.tile((2, 2)),
    "repeat_interleave": lambda x: x.repeat_interleave(3, dim=1),
    "pad": lambda x: F.pad(x, (1, 2)),
    "pad_value": lambda x: F.pad(x, (0, 3, 2, 1), value=1.5),
    "pad_negative": lambda x: F.pad(x, (-2, 1, 3, -1)),
    "pad_reflect": lambda x: F.pad(x, (2, 3), mode="reflect"),
    "pad_replicate": lambda x: F.pad(x, (1, 1), mode="replicate"),
    "pad_circular": lambda x: F.pad(x, (3, 1), mode="circular"),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(2),
    "tril_negative": lambda x: x.tril(-1),
    "diag_embed": lambda x: torch.diag_embed(x[0]),
    "cat_with_itself": lambda x: torch.cat((x, x * 2), 1),
    "stack": lambda x: torch.stack((x, x + 1, -x), 1),
    "rotate_half": lambda x: torch.cat((-x[..., 5:], x[..., :5]), -1),
    "interleave": lambda x: torch.stack((x[..., ::2], -x[..., 1::2]), -1).flatten(-2),
    "channel_shuffle": lambda x: F.channel_shuffle(x[None], 2),
}


# Their elements share memory; test_overlapping_windows_... compiles them.
OVERLAPPING = ("unfold", "unfold_overlapping")
# Pads by what is inside, of rows that the library copies.
OF_THE_LIBRARY = {
    f"{kind}_pad1d{step}.default"
    for kind in ("reflection", "replication")
    for step in ("", "_backward")
}


def chain(table):
    """Each view between two pointwise operations, so that it moves through a kernel."""

    def apply(x):
        return {name: op(x * 2 + 1).relu() - 0.5 for name, op in table.items()}

    return apply


def bare(table):
    def apply(x):
        return {name: op(x) for name, op in table.items()}

    return apply


def part(table, start):
    """A third of a table: a table of a hundred outputs says little when it fails to compile."""
    return dict(list(table.items())[start::3])


@pytest.mark.parametrize("start", range(3))
@as_captured
def test_views_returned_alias_the_input_as_in_eager(start, check):
    # A part without elements is left as it is, and so is a window at a place in memory.
    left = {"slice.Tensor", "as_strided.default"}
    check(bare(part(VIEWS, start)), values(4, 6, 10), left=left)


@pytest.mark.parametrize("start", range(3))
@as_captured
def test_rearrangements_returned_match_eager(start, check):
    check(bare(part(REARRANGEMENTS, start)), values(4, 6, 10), left=OF_THE_LIBRARY)


@pytest.mark.parametrize("start", range(3))
@in_both
def test_views_inside_a_chain_match_eager_and_its_gradients(start, check):
    skipped = ("as_strided", "slice_empty", *OVERLAPPING)
    table = {name: op for name, op in part(VIEWS, start).items() if name not in skipped}
    check(chain(table), values(4, 6, 10), train=True, left=())


@pytest.mark.parametrize("start", range(3))
@in_both
def test_rearrangements_inside_a_chain_match_eager_and_its_gradients(start, check):
    check(chain(part(REARRANGEMENTS, start)), values(4, 6, 10), train=True, left=OF_THE_LIBRARY)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
@as_captured
def test_views_of_strided_inputs_match_eager(layout, check):
    names = ("transpose", "expand", "slice_step", "select", "diagonal", "unsqueeze")
    others = ("reshape_across", "flip", "roll", "heads", "pad", "cat_with_itself", "tril")
    table = {n: VIEWS[n] for n in names} | {n: REARRANGEMENTS[n] for n in others}
    check(chain(table), with_layout(values(4, 6, 10), layout), train=True)
    check(bare(table), with_layout(values(4, 6, 10), layout))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64, torch.int32, torch.bool), ids=str)
@pytest.mark.parametrize("start", range(3))
def test_all_views_of_every_layout_and_dtype_match_eager(layout, dtype, start):
    x = with_layout(values(4, 6, 10, dtype=dtype), layout)
    skipped = ("as_strided", "stack", "rotate_half", "interleave", "pad_value")
    if dtype == torch.bool:
        skipped += ("pad_reflect", "pad_replicate", "cat_with_itself")
    table = VIEWS | REARRANGEMENTS
    table = {name: op for name, op in part(table, start).items() if name not in skipped}
    if dtype == torch.bool:
        check(lambda x: {n: op(x) & True for n, op in table.items()}, x)
    else:
        check(lambda x: {n: op(x) + 1 for n, op in table.items()}, x)


SPLITS = {
    "split": lambda x: x.split(4, -1),
    "split_sizes": lambda x: x.split((1, 3, 6), -1),
    "chunk": lambda x: x.chunk(3, -1),
    "chunk_rows": lambda x: x.chunk(2, 0),
    "unbind": lambda x: x.unbind(1),
    "tensor_split": lambda x: torch.tensor_split(x, (2, 5), 2),
    "hsplit": lambda x: torch.hsplit(x, 2),
}


@pytest.mark.parametrize("train", (False, True), ids=("forward", "training"))
@as_captured
def test_splits_match_eager(train, check):
    def split(x):
        return {name: [p * 2 for p in op(x + 1)] for name, op in SPLITS.items()}

    check(split, values(4, 6, 10), train=train)


@in_training
def parts_of_a_fused_projection_are_combined():
    def gates(x):
        q, k, v = x.chunk(3, -1)
        a, b = x.split((12, 18), -1)
        return F.silu(q) * k + v, a.sum(-1) + b.amax(-1), q.softmax(-1) @ k.mT

    return gates, values(3, 5, 30)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dim", (0, 1, -1))
@in_both
def test_cat_of_unequal_parts_matches_eager(dim, check):
    shapes = [[3, 4, 5] for _ in range(4)]
    for i, shape in enumerate(shapes):
        shape[dim] = (2, 1, 7, 0)[i]
    parts = [values(*shape, seed=i) for i, shape in enumerate(shapes)]
    check(
        lambda *xs: (
            torch.cat(xs, dim) * 2,
            torch.cat([x.exp() for x in xs], dim),
            torch.cat(xs, dim).sum(dim),
        ),
        *parts,
        train=True,
    )


@as_captured
def test_cat_promotes_dtypes_and_takes_expanded_parts(check):
    x, i = values(3, 4), values(3, 2, dtype=torch.int64)

    def join(x, i, h):
        return (
            torch.cat((x, i), 1),
            torch.cat((h, x), 1),
            torch.cat((x[:, :1].expand(3, 5), x), 1),
            torch.stack((i[:, 0], i[:, 1])),
            torch.hstack((x, x)),
            torch.vstack((x, h)),
            torch.cat((x.t(), x.t()), 1),
            torch.column_stack((x[:, 0], x)),
        )

    check(join, x, i, values(3, 4, dtype=torch.float16, seed=1))


@as_captured
def test_cat_of_many_parts_matches_eager(check):
    parts = [values(3, 1 + i % 3, seed=i) for i in range(20)]
    check(lambda *xs: torch.cat([x.sin() for x in xs], 1) * 3, *parts, train=True)


@in_inference
def cat_of_channels_last_images_keeps_their_layout():
    x, y = (with_layout(values(2, 3, 4, 5, seed=s), "channels_last") for s in (0, 1))
    return (lambda x, y: (torch.cat((x, y), 1), F.pad(x, (1, 1, 1, 1)) + 1, x.flip(2)), x, y)


PADS = [(1, 1), (0, 3), (4, 0), (-1, -2), (2, -3), (1, 2, 3, 4), (-1, 0, 0, 2), (1, 0, 0, 1, 2, 2)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("train", (False, True), ids=("forward", "training"))
@in_both
def test_constant_pads_match_eager(train, check):
    check(
        lambda x: [F.pad(x.relu(), pad, value=0.5 * i) + 1 for i, pad in enumerate(PADS)],
        values(2, 5, 7),
        train=train,
    )


@in_inference
def padding_of_a_masked_score_does_not_leak_into_a_row_reduction():
    def leak(x):
        padded = F.pad(x, (0, 3), value=-torch.inf)
        return padded.softmax(-1), F.pad(x, (2, 1)).exp().sum(-1), F.pad(x, (0, 1)).amax(-1)

    return leak, values(5, 13) - 5


@in_training
def axes_merged_and_split_again_match_eager():
    def rows(x, w):
        flat = x.reshape(-1, 12)
        y = (flat * w).reshape(3, 5, 12)
        z = y.reshape(3, 5, 4, 3).transpose(1, 2)
        return y + x, z * 2, z.sum(-1), (flat.softmax(-1)).view(3, 5, 12) - x

    return rows, values(3, 5, 12), values(12, seed=1)


@in_training.each(((60,), (4, 15)))
def reshape_between_incompatible_factorisations_matches_eager(shape):
    def refold(x):
        return x.reshape(6, 10).sum(1), (x * 2).reshape(4, 15) + 1, (x + 1).view(5, 12).amax(0)

    return refold, values(*shape)


@in_training
def transposed_layouts_are_kept_through_a_chain():
    return (
        lambda x: (x.t() + 1, (x.t() * 2).contiguous(), x.t().exp().t(), x.t().sum(0)),
        values(7, 33),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("train", (False, True), ids=("forward", "training"))
@in_both
def test_image_rearrangements_match_eager(train, check):
    def image(x):
        return {
            "pixel_shuffle": F.pixel_shuffle(x, 2) * 2,
            "pixel_unshuffle": F.pixel_unshuffle(x, 2) * 2,
            "nearest": F.interpolate(x, scale_factor=2, mode="nearest") + 1,
            "nearest_down": F.interpolate(x, size=(3, 2), mode="nearest") + 1,
            "nearest_exact": F.interpolate(x, size=(5, 7), mode="nearest-exact") + 1,
            "unfold": F.unfold(x, 2),
            "patches": x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2).sum(-1),
            "flatten": x.flatten(2).transpose(1, 2) * 2,
            "bilinear": F.interpolate(x, scale_factor=2, mode="bilinear"),
            "average": F.avg_pool2d(x, 2),
            "largest": F.max_pool2d(x, 2),
            "adaptive": F.adaptive_avg_pool2d(x, 1),
        }

    check(image, values(2, 8, 6, 4), train=train)


EINSUMS = {
    "matmul": "bij,bjk->bik",
    "outer": "bij,bjk->bijk",
    "row_sums": "bij,bjk->bi",
    "total": "bij,bjk->",
    "transposed": "bij,bjk->kib",
}


@in_training
def einsum_matches_eager():
    def contract(x, y):
        found = {name: torch.einsum(eq, x, y) for name, eq in EINSUMS.items()}
        return found, torch.einsum("bii->bi", x), torch.einsum("bij->ji", x)

    return contract, values(2, 5, 5), values(2, 5, 7, seed=1)


@as_captured
def test_sizes_one_and_zero_pass_through_views(check):
    def views(a, b):
        return (
            a.squeeze(),
            a.expand(4, 1, 6),
            a.permute(2, 1, 0) * 2,
            b.transpose(0, 1) + 1,
            b.reshape(0, 3),
            torch.cat((b, b + 1), 1),
            F.pad(b, (1, 1)),
            a.reshape(6) + 1,
            b.flip(0),
            b.sum(0),
        )

    check(views, values(1, 1, 6), values(0, 5))


@in_training
def a_view_taken_of_a_view_of_an_intermediate_is_right():
    def nested(x):
        h = (x * 2)[1:].transpose(0, 1)[::2].unsqueeze(0).expand(3, -1, -1)
        return h[:, 1:] + 1, h.reshape(-1)[5:20] * 2, h[0].t().flip(0)

    return nested, values(5, 8)


@pytest.mark.parametrize("train", [False, True])
def test_the_size_of_a_window_may_be_a_tensor(train):
    def chunks(x):  # as Longformer has it
        count = torch.div(x.shape[0], 4, rounding_mode="trunc")
        return x.sin().as_strided((count * 2 - 1, 4, 3), (6, 3, 1)) * 2

    check(chunks, values(8, 3), train=train)


@in_training
def overlapping_windows_are_read_and_their_gradients_accumulated():
    return (
        lambda x: (x.unfold(0, 5, 2) * 2, x.unfold(0, 3, 1).amax(-1), x.unfold(0, 4, 4).sum(0)),
        values(33),
    )


@pytest.mark.sampled(7)
@pytest.mark.parametrize("train", (False, True), ids=("forward", "training"))
@in_both
def test_views_take_dynamic_shapes(train, check):
    def rearrange(x):
        b, t, c = x.shape
        heads = x.view(b, t, 2, c // 2).transpose(1, 2)
        return (
            heads * 2,
            heads.reshape(b * 2, t, -1) + 1,
            x[:, 1:] - x[:, :-1],
            x.flip(1) * 2,
            torch.cat((x, x[:, :1]), 1),
            F.pad(x, (0, 2)) + 1,
            x.reshape(b * t, c).sum(0),
        )

    check(rearrange, values(3, 5, 8), dynamic=True, train=train)


@in_inference
def bits_reinterpreted_as_another_dtype_match_eager():
    return (
        lambda x: (x.view(torch.int32), (x * 2).view(torch.int32) & 0xFF, x.view(torch.uint8)),
        values(4, 8),
    )


def test_cases_match_eager():
    in_inference.check()


@TRAINED
def test_cases_match_eager_with_their_gradients(train):
    in_training.check(train=train)
