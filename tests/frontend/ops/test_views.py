"""Views: what they read, and that they emit nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusec.frontend.ops.views import reshape_indices
from fusec.frontend.value import positions
from fusec.ir.graph import Def
from fusec.ir.index import Axis, Index, Size, index
from tests.frontend.tracing import body, check
from tests.support import compile_with

B, T, C = (index(Size(name, hint)) for name, hint in (("B", 4), ("T", 8), ("C", 6)))


def sizes(*extents: int | Index) -> tuple[Index, ...]:
    return tuple(map(index, extents))


def read_at(old: tuple[Index, ...], new: tuple[Index, ...]) -> str:
    """Return the indices into ``old`` at which its reshape to ``new`` reads."""
    axes = tuple(Axis(name, extent) for name, extent in zip("ijkl", new, strict=False))
    return ", ".join(map(repr, reshape_indices(old, new, positions(axes))))


@pytest.mark.parametrize(
    ("old", "new", "indices"),
    [
        ((4, 8, 6), (32, 6), "(i)//(8), (i)%(8), j"),
        ((32, 6), (4, 8, 6), "8*i + j, k"),
        ((4, 1, 6), (4, 6), "i, 0, j"),
        ((4, 6), (1, 4, 6, 1), "j, k"),
        ((4, 12), (4, 3, 4), "i, 4*j + k"),
        ((2, 3, 4), (24,), "(i)//(12), ((i)//(4))%(3), (i)%(4)"),
        ((6, 4), (8, 3), "(3*i + j)//(4), (3*i + j)%(4)"),
        ((), (1,), ""),
        ((1,), (), "0"),
    ],
)
def test_a_reshape_reads_the_digits_of_a_number(
    old: tuple[int, ...], new: tuple[int, ...], indices: str
) -> None:
    assert read_at(sizes(*old), sizes(*new)) == indices


@pytest.mark.parametrize(
    ("old", "new", "indices"),
    [
        ((B, T, C), (B * T, C), "(i)//(T), (i)%(T), j"),
        ((B * T, C), (B, T, C), "T*i + j, k"),
        ((B, T, 12), (B, T, 3, 4), "i, j, 4*k + l"),
        ((B, T), (T, B), "(B*i + j)//(T), (B*i + j)%(T)"),
    ],
)
def test_digits_of_symbolic_sizes_simplify(
    old: tuple[Any, ...], new: tuple[Any, ...], indices: str
) -> None:
    found = read_at(sizes(*old), sizes(*new))
    assert sorted(found) == sorted(indices)  # products print their factors in either order


def test_equal_hints_do_not_make_sizes_equal() -> None:
    """T and 8 are both 8 while tracing; only the whole is known to be equal."""
    found = read_at((T, index(8)), (index(8), T))
    assert sorted(found) == sorted("(T*i + j)//(8), (T*i + j)%(8)")


X = torch.arange(2 * 3 * 4, dtype=torch.float32).view(2, 3, 4)

VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(-1, 0),
    "view": lambda x: x.view(6, 4).view(2, 12),
    "squeeze": lambda x: x[:, :1].squeeze(1).unsqueeze(-1),
    "expand": lambda x: x[:, :, :1].expand(5, 2, 3, 4),
    "slice": lambda x: x[:, -2:, 1::2],
    "slice beyond": lambda x: x[:, 1:100],
    "select": lambda x: x[-1, :, -2],
    "split": lambda x: x.split([1, 2], dim=1),
    "chunk": lambda x: x.chunk(3, dim=-1),
    "unbind": lambda x: x.unbind(1),
    "flip": lambda x: x.flip(0, -1),
    "diagonal": lambda x: (x.diagonal(1, 1, 2), x.diagonal(-1, 0, 1)),
    "unfold": lambda x: x.unfold(2, 3, 1),
    "as_strided": lambda x: x.as_strided((3, 2), (2, 7)),
    "movedim": lambda x: x.movedim(0, -1).reshape(4, 6),
    "alias": lambda x: x.detach().view_as(x),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_reads_what_eager_reads(name: str) -> None:
    check(lambda x: torch.utils._pytree.tree_map(lambda v: v + 1, VIEWS[name](x)), X)


@pytest.mark.parametrize("name", sorted(set(VIEWS) - {"flip", "movedim"}))
def test_a_view_that_is_returned_is_a_window(name: str) -> None:
    graph = check(VIEWS[name], X)
    assert not graph.nodes


FIXED = {"as_strided", "diagonal", "unfold", "expand", "movedim"}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", sorted(set(VIEWS) - FIXED))
def test_a_view_of_symbolic_sizes_reads_what_eager_reads(name: str) -> None:
    x = torch.randn(4, 6, 8)
    shrunk = {"view": lambda x: x.view(24, 8).view(4, -1)}
    view = shrunk.get(name, VIEWS[name])
    if name == "split":
        view = lambda x: x.split([2, 4], dim=1)  # noqa: E731
    check(lambda x: torch.utils._pytree.tree_map(lambda v: v + 1, view(x)), x, dynamic=True)


def test_a_chain_of_views_is_one_index() -> None:
    graph = check(lambda x: x.transpose(0, 1).reshape(6, 4)[1:].t().exp(), X)
    assert body(graph)[0] == "clone[i0, i1, i2] = x_1[i1, i0, i2]"
    assert body(graph)[1] == (
        "exp[i0, i1] = exp(clone[(i1 + 1)//(2), i1 - 2*(i1 + 1)//(2) + 1, i0])"
    )


def test_reshapes_do_not_pile_up() -> None:
    x = torch.randn(4, 6, 8)
    graph = check(lambda x: x.view(-1, 8).view(4, 6, 8).view(24, 8) + 1, x, dynamic=True)
    (line,) = [n for n in graph.nodes if isinstance(n, Def)]
    assert repr(line.expr).count("//") == 1
    graph = check(lambda x: x.view(-1, 8).view(x.shape) + 1, x, dynamic=True)
    (line,) = [n for n in graph.nodes if isinstance(n, Def)]
    assert "//" not in repr(line.expr)


REINTERPRETED = {
    "int32": lambda y: y.view(torch.int32),
    "float16": lambda y: y.view(torch.float16),
    "complex": lambda y: torch.view_as_real(torch.view_as_complex(y)),
}


SAME: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x * 1, lambda x: x / 1, lambda x: x.flip(0).flip(0),
)  # fmt: skip
COPIED = {
    f"{name} of {k}": (view, same)
    for name, view in REINTERPRETED.items()
    for k, same in enumerate(SAME)
}
"""What looks at a copy in another type, and what the copy is of."""


def test_a_view_of_a_copy_that_has_no_memory_is_none_of_what_it_copies() -> None:
    def written(*inputs: torch.Tensor) -> list[torch.Tensor]:
        made = [view(same(x)) for (view, same), x in zip(COPIED.values(), inputs, strict=True)]
        for x in inputs:
            x.add_(1)
        return made

    def beside(*inputs: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        each = zip(COPIED.values(), [x + 1 for x in inputs], strict=True)
        return [(h, view(same(h))) for (view, same), h in each]

    def inputs() -> list[torch.Tensor]:
        return [torch.arange(6.0).reshape(3, 2) + k for k in range(len(COPIED))]

    torch.compiler.reset()
    made, expected = compile_with(written)(*inputs()), written(*inputs())
    for name, found, wanted in zip(COPIED, made, expected, strict=True):
        assert torch.equal(found, wanted), name
    results, others = compile_with(beside)(*inputs()), beside(*inputs())
    for name, (h, found), (_, wanted) in zip(COPIED, results, others, strict=True):
        h.zero_()
        assert torch.equal(found, wanted), name
