"""Constants of a graph belong to the weights of the call that reads them, in each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusec.runtime.calls.frozen import Frozen


def keeping(constant: Tensor) -> Callable[[Sequence[Tensor]], None]:
    def keep(values: Sequence[Tensor]) -> None:
        constant.copy_(values[0])

    return keep


def test_constants_are_not_computed_again_while_another_thread_reads_them() -> None:
    reading, other_is_waiting = threading.Event(), threading.Event()
    found: dict[int, float] = {}

    def call(args: list[Any]) -> None:
        weight = args[0]
        if weight is first:
            reading.set()
            other_is_waiting.wait(1.0)  # time for the other thread to do harm
        found[id(weight)] = constant.item()

    constant = torch.zeros(())
    first, second = torch.tensor(1.0), torch.tensor(2.0)
    frozen = Frozen(call, lambda weight: (weight,), (0,), keeping(constant))

    def run(weight: Tensor) -> None:
        if weight is second:
            reading.wait()
        frozen([weight])
        other_is_waiting.set()

    threads = [threading.Thread(target=run, args=(weight,)) for weight in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {id(first): 1.0, id(second): 2.0}


def test_a_weight_in_the_place_of_one_that_is_gone_is_another() -> None:
    """A new tensor may be at the address of an old one, in memory and often as an object."""
    constant, memory = torch.zeros(64), np.zeros(64, np.float32)
    frozen = Frozen(lambda args: None, lambda weight: (weight,), (0,), keeping(constant))
    places = set()
    for number in range(50):
        memory[:] = number  # unseen by torch: only the tensor is new
        weight = torch.from_numpy(memory)
        places.add(weight.data_ptr())
        frozen([weight])
        assert torch.equal(constant, weight)
        del weight
    assert len(places) == 1


def test_a_call_that_fails_leaves_the_constants_to_others() -> None:
    def call(args: list[Any]) -> None:
        raise RuntimeError("no memory")

    constant = torch.zeros(())
    frozen = Frozen(call, lambda weight: (weight,), (0,), keeping(constant))
    for weight in (torch.tensor(1.0), torch.tensor(2.0)):
        try:
            frozen([weight])
        except RuntimeError:
            assert constant == weight
