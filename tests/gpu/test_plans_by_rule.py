"""Plans that a rule chooses, on a device: no race sorts out what meets none of their conditions."""

from __future__ import annotations

import pytest
import torch

from fusec.driver.build import triton_source
from tests.calls import calls_of
from tests.gpu.products import linear_and_gelu, on_device, operands
from tests.support import HALF, check, compile_with

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a device whose plans by rule have roles: sm_90", allow_module_level=True)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def by_rule(monkeypatch):
    monkeypatch.setenv("FUSEC_RACE", "fused")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "shape", ((8192, 512, 4096), (8200, 520, 4104), (12608, 72, 3112)), ids=str
)
def test_a_product_by_rule_has_roles_and_is_right(shape, dtype):
    with calls_of(triton_source) as made:
        check(linear_and_gelu, *operands(*shape, dtype))
    assert any("warp_specialize" in call.result.source for call in made)


def test_a_product_by_rule_of_moved_memory_is_right():
    x, w, b = operands(8192, 512, 4096)
    moved = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert moved.data_ptr() % 16
    check(linear_and_gelu, moved, w, b)


def test_a_product_by_rule_runs_for_any_number_of_rows():
    _, w, b = operands(16, 512, 4096)
    compiled = compile_with(linear_and_gelu, dynamic=True)
    for rows in (8192, 8208, 130, 16, 1, 0):
        x = on_device(max(rows, 1), 512, seed=rows)[:rows]
        torch.testing.assert_close(
            compiled(x, w, b), linear_and_gelu(x, w, b), rtol=2e-2, atol=2e-2
        )


@pytest.mark.parametrize("depth", (64, 128))
@pytest.mark.parametrize("length", (1024, 1000))
def test_an_attention_by_rule_is_right(length, depth):
    def attend(q, k, v):
        scores = (q @ k.mT) * depth**-0.5
        place = torch.arange(length, device=q.device)
        return scores.masked_fill(place > place[:, None], float("-inf")).softmax(-1) @ v

    q, k, v = (on_device(4, 16, length, depth, seed=n) for n in range(3))
    check(attend, q, k, v)
    check(attend, q, k, v, train=True)
