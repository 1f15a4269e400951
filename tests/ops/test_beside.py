"""Whatever stands beside an ordinary chain of operations, the chain is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from fusec.driver.compiler import RECENT
from tests.ops.operations_page import recorded_rows
from tests.support import values

CPU = torch.device("cpu")


def compiled_beside(fn: Callable[..., Any], *inputs: Any, **how: Any) -> tuple[Any, Any]:
    """Return what ``fn`` returns beside a chain, compiled; assert that the chain is a kernel."""

    def both(x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, Any]:
        return ((x * 2).sin() + 1).exp(), fn(*given)

    torch._dynamo.reset()
    RECENT.clear()
    x = values(6, 5)
    options = {"strict": True, "cache": False}
    made, beside = torch.compile(both, backend="fusec", options=options, **how)(x, *inputs)
    torch.testing.assert_close(made, ((x * 2).sin() + 1).exp())
    kernels = sum(b'"kernels": [{' in t.manifest for t in RECENT if not t.problem)
    assert kernels, [(t.name, t.problem) for t in RECENT]
    return made, beside


def _first_sample(op: Any) -> Any:
    dtypes = op.supported_dtypes("cpu")
    dtype = next((t for t in (torch.float32, torch.int64, torch.bool) if t in dtypes), None)
    if dtype is None:
        pytest.skip("no type that a CPU has")
    try:
        return next(iter(op.sample_inputs(CPU, dtype)))
    except StopIteration:
        pytest.skip("no sample")


@pytest.mark.slow
@pytest.mark.parametrize("name", recorded_rows())
def test_a_chain_is_compiled_whatever_stands_beside_it(name: str) -> None:
    _check_beside(_operation(name))


@pytest.mark.slow
def test_a_chain_is_compiled_beside_operations_of_higher_order(subtests: Any) -> None:
    from torch.testing._internal.hop_db import hop_db  # local: it takes seconds to import

    for op in hop_db:
        if op.name == "invoke_quant":
            continue  # an option of Inductor's, as an object in the graph: it runs as eager, whole
        with subtests.test(op.full_name):
            _check_beside(op)


@pytest.mark.parametrize("name", ("nonzero", "unique", "svd", "item", "fft.fft", "masked_select"))
def test_a_chain_is_compiled_beside_what_depends_on_data(name: str) -> None:
    _check_beside(_operation(name))


def _operation(name: str) -> Any:
    pytest.importorskip("expecttest", reason="the table imports it")
    from tests.ops import op_db  # local: the table takes 4 s to import

    found = op_db.find_op(name)
    return (
        found if found is not None else pytest.skip("this version of torch has no such operation")
    )


def _check_beside(op: Any) -> None:
    sample = _first_sample(op)
    leaves, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(tensor.layout is not torch.strided for tensor in tensors):
        pytest.skip("Dynamo traces no frame that has a sparse tensor, under any backend")

    def fn(*given: torch.Tensor) -> Any:
        rest = iter(given)
        again = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        first, args, kwargs = pytree.tree_unflatten(again, tree)
        return op.op(first, *args, **kwargs)

    try:
        fn(*tensors)
    except Exception as error:
        pytest.skip(f"eager raises: {error}")
    compiled_beside(fn, *tensors)


ONE, ROW = torch.tensor(2), torch.tensor([1])
INDEXED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "element": (lambda x, i: x[1, i] * 2, (values(4, 5), ONE)),
    "row of what was made": (lambda x, i: torch.stack([x, x + 1, x * 3])[i], (values(4, 5), ONE)),
    "negative": (lambda x, i: x[i, 1], (values(4, 5), torch.tensor(-1))),
    "int32": (lambda x, i: x[i] + 1, (values(4, 5), torch.tensor(1, dtype=torch.int32))),
    "uint8": (lambda x, i: x[i] + 1, (values(4, 5), torch.tensor(1, dtype=torch.uint8))),
    "bool": (lambda x, i: x[i] + 1, (values(4, 5), torch.tensor(True))),
    "slice": (lambda x, i: x[:, i:] * 2, (values(4, 5), ONE)),
    "narrow": (lambda x, i: x.narrow(0, i, 1) + 1, (values(4, 5), ONE)),
    "select": (lambda x, i: torch.select(x, 0, i) + 1, (values(4, 5), ONE)),
    "length": (lambda x, i: torch.arange(i) + x.sum(), (values(4, 5), ONE)),
    "roll": (lambda x, i: torch.roll(x, i) + 1, (values(4, 5), ONE)),
    "write": (lambda x, i: x.clone().index_put((torch.tensor(1), i), x[0, 0]), (values(4, 5), ONE)),
    "read of a vector": (lambda x, i: x[1, i[0]] * 2, (values(4, 5), ROW)),
    "number": (lambda x, i: x * i.item(), (values(4, 5), ONE)),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", INDEXED)
def test_an_index_that_an_input_holds_is_compiled(name: str, dynamic: bool) -> None:
    fn, inputs = INDEXED[name]
    _, made = compiled_beside(fn, *inputs, dynamic=dynamic)
    torch.testing.assert_close(made, fn(*inputs))


@pytest.mark.parametrize("cached", (True, False), ids=("cached", "anew"))
def test_another_number_is_another_result(cached: bool) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[1, i] * 2 + torch.stack([x, x + 1, x, x])[i].sin().sum()

    x = values(4, 5)
    for _ in range(2):  # from the cache the second time
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="fusec", options={"strict": True, "cache": cached})
        for k in (1, 3, 1, 2):
            i = torch.tensor(k)
            torch.testing.assert_close(compiled(x, i), fn(x, i))


def test_a_write_by_an_index_and_a_mask_stand_in_one_graph() -> None:
    def fn(y: torch.Tensor, i: list[torch.Tensor], m: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = y.clone()
        y[1, i[0]] = 0
        return y.sin(), (y * m)[m].sum()

    given = values(4, 5), [torch.tensor(2)], values(4, 5) > 0
    _, made = compiled_beside(fn, *given)
    torch.testing.assert_close(made, fn(*given))
