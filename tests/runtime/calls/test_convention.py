"""A calling convention as data. What it does when it is called: tests/driver/test_warm.py."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusec.runtime.calls.convention import Convention, Tangent, Training

TRAINING = Training(
    differentiable=(True, False),
    tangents=(Tangent(0, "", (2, 3), (3, 1)), Tangent(1, "channels_last")),
    saved=2, unchecked=1, sizes=1, detached=(3,),
    any_gradient=True, deterministic=False,
)  # fmt: skip
CONVENTIONS = [
    Convention((None, 2), ()),
    Convention((None, None), (1, 4), TRAINING),
]


@pytest.mark.parametrize("convention", CONVENTIONS, ids=("inference", "training"))
def test_json_gives_it_back(convention: Convention) -> None:
    assert Convention.from_json(convention.to_json()) == convention


BAD = {
    "no JSON": b"{",
    "a list": b"[]",
    "a position below zero": CONVENTIONS[0].to_json().replace(b"2]", b"-2]"),
    "a position that is true": CONVENTIONS[0].to_json().replace(b"2]", b"true]"),
    "no flag": CONVENTIONS[1].to_json().replace(b"false", b"0"),
    "another memory format": CONVENTIONS[1].to_json().replace(b"channels_last", b"rows_last"),
    "a tangent of no result": replace(
        CONVENTIONS[1], training=replace(TRAINING, tangents=(Tangent(2, "contiguous"),))
    ).to_json(),
    "a flag for each of three results": replace(
        CONVENTIONS[1], training=replace(TRAINING, differentiable=(True, True, True))
    ).to_json(),
}


@pytest.mark.parametrize("name", BAD)
def test_anything_else_is_an_error(name: str) -> None:
    with pytest.raises(ValueError):
        Convention.from_json(BAD[name])


def mutated(value: Any, draw: random.Random) -> Any:
    """Return JSON with one thing in it replaced."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        return {**value, key: mutated(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return [*value[:at], mutated(value[at], draw), *value[at + 1 :]]
    return draw.choice([None, -1, 0, 7, 1.5, "x", True, [], {}, [[]]])


def test_what_is_read_is_sound_or_refused() -> None:
    draw, read = random.Random(0), 0
    for _ in range(500):
        text = json.dumps(mutated(json.loads(CONVENTIONS[1].to_json()), draw)).encode()
        try:
            made = Convention.from_json(text)
        except ValueError:
            continue
        read += 1
        assert Convention.from_json(made.to_json()) == made
    assert 0 < read < 500


@pytest.mark.parametrize("laid_out", [Tangent(0, "channels_last"), Tangent(0, "contiguous")])
def test_a_tangent_is_copied_only_if_it_lies_otherwise(laid_out: Tangent) -> None:
    images = torch.randn(2, 3, 4, 5)
    for given in (images, images.to(memory_format=torch.channels_last)):
        made = laid_out.laid_out(given)
        torch.testing.assert_close(made, given)
        formats = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
        assert made.is_contiguous(memory_format=formats[laid_out.format])
        assert (made is given) == given.is_contiguous(memory_format=formats[laid_out.format])


def test_a_tangent_of_a_subclass_is_an_error() -> None:
    class Own(torch.Tensor):
        pass

    with pytest.raises(TypeError, match="result 0 is a Own"):
        Tangent(0, "contiguous").laid_out(torch.ones(2).as_subclass(Own))


def test_a_graph_runs_without_autocast_wherever_it_is_called() -> None:
    """A loaded model has no guard: its products would give 16 bits to kernels of f32."""
    call = Convention((None,), ()).around(lambda args: (torch.mm(*args),))
    with torch.autocast("cpu", torch.bfloat16):
        (made,) = call(torch.ones(2, 3), torch.ones(3, 2))
    assert made.dtype is torch.float32
