"""The code of a kernel that runs for each row of a table: wide accesses, no spills."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

import fusec
from fusec.runtime.kernels.table import find_places

pytest.importorskip("triton")


def step(count, dtype, sizes):
    shapes = [sizes[k % len(sizes)] for k in range(count)]
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(params, foreach=True)
    optimizer.step()
    return optimizer.step


def accesses(kernel):
    """Count loads and stores by their width: "LDG.128", "STG", and those of local memory."""
    found = re.findall(r"\b(LDG|STG|LDL|STL)(\.[.A-Z0-9]*)?", kernel.assembly("sass"))
    return Counter(f"{name}.128" if ".128" in rest else name for name, rest in found)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_parameters_move_16_bytes_at_a_time(dtype, target):
    kernel, _ = fusec.kernels(step(4, dtype, [(64, 64), (768,)]), target=target)
    found = accesses(kernel)
    tensors = 4 + 3  # p, g, m, v are read; p, m, v written
    assert found["LDG.128"] + found["STG.128"] == 2 * tensors
    assert not found["LDL"] and not found["STL"]


def test_sizes_that_are_no_multiples_of_16_are_right_but_narrow():
    kernel, _ = fusec.kernels(step(4, torch.float32, [(17,), (33,)]), target="sm_90")
    assert "multiple_of(n," not in kernel.source
    assert accesses(kernel)["STG"] > 0


def test_places_are_rows_and_their_blocks():
    places = find_places(((3000,), (100,)), "(s0 + 1023) // 1024")
    assert places.places.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0]]
    assert (places.count, places.work, places.sizes.tolist()) == (4, 3100, [3000, 100])


def test_places_of_rows_without_sizes():
    places = find_places(((), (), ()), "1")
    assert places.places.tolist() == [[0, 0], [1, 0], [2, 0]]
    assert (places.count, places.work) == (3, 3)
