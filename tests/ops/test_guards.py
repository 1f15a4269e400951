"""Reads outside a tensor are 0 or the padding, also where no axis of the read is cut."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support import check, values


def test_padding_beside_an_expanded_axis_is_padding():
    check(lambda x: F.pad(x.expand(4, 7), (0, 0, 1, 2)), values(1, 7))
    check(lambda x: F.pad(x[None, :].expand(4, 7), (0, 0, 1, 2), value=3.0) * 2, values(7))


def test_cat_of_expanded_rows_keeps_each_piece():
    check(
        lambda x, y: torch.cat([x.expand(3, 7), y.expand(2, 7)], 0) + 1,
        values(1, 7),
        values(7, seed=1),
    )


def test_a_row_statistic_read_under_a_guard_is_read_once():
    def rotated(x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return torch.cat([-y[..., 16:], y[..., :16]], -1) + y

    check(rotated, values(5, 32), train=True)
