"""Weights that are packed once: the calls that read them, what these compute, and what changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

import fusec
from fusec.driver.contests import convolution_contest, product_contest
from fusec.driver.race import RaceJudge, Races
from fusec.frontend.fx_passes import freezing
from fusec.frontend.fx_passes.memory_formats import format_choice
from fusec.frontend.fx_passes.packing import (
    PACKED,
    PACKED_MKL,
    PACKED_ONEDNN,
    PACKS,
    PANELS,
    convolve_packed,
    has_onednn,
    has_packing,
)
from fusec.ir.choice import Decided
from fusec.ir.graph import Extern
from fusec.ir.machine import RaceTuning
from fusec.passes.fusion.contract import LIBRARY
from fusec.passes.fusion.libraries import ATEN, library_choice
from fusec.processors import PROCESSORS
from fusec.runtime.cache.store import Cache
from fusec.runtime.calls.frozen import _frozen as frozen_graphs
from fusec.runtime.race.verdicts import Verdict
from fusec.tools.report import explain
from tests.calls import calls_of
from tests.support import on_processor, seeded, tune
from tests.verdicts import decide_products

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch is built without oneDNN")

CONVOLUTION = "mkldnn._convolution_pointwise.default"
CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Conv2d(8, 6, 3, bias=False),
    "strided": lambda: nn.Conv2d(8, 6, (3, 1), stride=2, padding=(1, 0), dilation=(2, 1)),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, padding=1, dilation=2, groups=8),
    "folded": lambda: nn.Sequential(nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6)),
}


def frozen(module: Callable[..., Any], *, dynamic: bool | None = None) -> Callable[..., Any]:
    torch._dynamo.reset()
    options = {"strict": True, "freeze": True}
    return torch.compile(module, backend="fusec", dynamic=dynamic, options=options)


def images(dtype: torch.dtype = torch.float32, side: int = 12) -> Tensor:
    with seeded(2):
        made = torch.randn(2, 8, side, side).to(dtype)
    return made.contiguous(memory_format=torch.channels_last)


def operations(module: nn.Module, x: Tensor) -> list[str]:
    with torch.no_grad():
        (graph,) = explain(module, x).graphs
    return [call.op for call in graph.externs]


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize(
    "dtype", (torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow))
)
def test_a_convolution_of_channels_last_images_reads_a_packed_weight(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_packing(torch.empty(0, dtype=dtype)):
        pytest.skip("oneDNN has no kernels of this type here")
    monkeypatch.setenv("FUSEC_FREEZE", "1")
    with seeded(0):
        module, x = CONVOLUTIONS[name]().eval().to(dtype), images(dtype)
    assert operations(module, x) == [CONVOLUTION]
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(x.double())
        eager, made = module(x), frozen(module)(x)
    assert made.stride() == eager.stride()
    worst, floor = (eager - exact).abs().max(), torch.finfo(dtype).eps * exact.abs().max()
    assert (made - exact).abs().max() <= 4 * worst + floor


def test_one_channel_of_the_whole_image_is_computed_by_the_plain_weight() -> None:
    """oneDNN computes something else with a packed one (torch 2.13)."""
    with seeded(0), torch.no_grad():
        module, x = nn.Conv2d(8, 1, 12).eval(), images()
        torch.testing.assert_close(frozen(module)(x), module(x), rtol=1e-4, atol=1e-5)


def test_changes_of_packed_weights_are_seen() -> None:
    with seeded(0):
        module, x = nn.Sequential(nn.Conv2d(8, 6, 3), nn.ReLU()).eval(), images()
    compiled = frozen(module)

    def agree() -> bool:
        with torch.no_grad():
            return torch.allclose(compiled(x), module(x), atol=1e-4)

    assert agree()
    with torch.no_grad():
        module[0].weight.mul_(2.0)
    assert agree(), "written in place"
    module[0].weight = nn.Parameter(torch.randn_like(module[0].weight))
    assert agree(), "another object"
    module[0].weight.data.mul_(2.0)
    assert not agree(), "past torch"
    assert fusec.refreeze(module) == 1
    assert agree()


def test_images_of_other_sizes_read_the_same_packed_weight() -> None:
    with seeded(0):
        module = nn.Conv2d(8, 6, 3).eval()
    compiled = frozen(module, dynamic=True)
    with torch.no_grad():
        for side in (12, 9, 31):
            x = images(side=side)
            torch.testing.assert_close(compiled(x), module(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("library", (PACKED_ONEDNN, PACKED_MKL, "oneDNN", None))
def test_a_product_may_read_a_packed_weight_which_no_other_way_computes(
    bias: bool, library: str | None, choose: Choose
) -> None:
    with seeded(0):
        layer, x = nn.Linear(24, 40, bias=bias), torch.randn(200, 24)  # too many for panels
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), -float("inf")

    def twice(x: Tensor) -> Tensor:
        return layer(layer(x)[:, :24])

    choose(library, lambda: frozen(twice)(x))
    compiled = frozen(twice)

    def agree() -> None:
        with torch.no_grad():
            made, wanted = compiled(x), layer(layer(x)[:, :24])
        torch.testing.assert_close(made, wanted, atol=1e-4, rtol=1e-4, equal_nan=True)
        assert made.stride() == wanted.stride()

    agree()
    for _ in range(2):
        with torch.no_grad():
            layer.weight.mul_(0.5)
        agree()
    readers = [graph for graph in frozen_graphs if graph.reads([layer.weight])]
    assert bool(readers) is (library in (PACKED_ONEDNN, PACKED_MKL))


Choose: TypeAlias = Callable[[str | None, Callable[[], Any]], None]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Choose:
    """Return a function that lets a library win the races of what a function compiles."""

    def choose(library: str | None, compile_all: Callable[[], Any]) -> None:
        if library == PACKED_MKL and not torch.backends.mkl.is_available():
            pytest.skip("this torch is built without MKL")
        tune(monkeypatch, "races", product=1)
        with torch.no_grad():
            decide_products(monkeypatch, tmp_path, library or ATEN, compile_all)

    return choose


class Tied(nn.Module):
    """Two products by one weight [inputs, hidden], as it is and transposed."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, hidden) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight) @ self.weight.t()


@pytest.mark.parametrize("hidden", (64, 96))
@pytest.mark.parametrize("library", (PACKED_ONEDNN, PACKED_MKL))
def test_a_weight_is_packed_for_each_way_that_it_lies(
    library: str, hidden: int, choose: Choose
) -> None:
    with seeded(0):
        module, x = Tied(64, hidden).eval(), torch.randn(32, 64)
    choose(library, lambda: frozen(module)(x))
    with torch.no_grad():
        torch.testing.assert_close(frozen(module)(x), module(x), atol=1e-4, rtol=1e-4)


def asked(
    monkeypatch: pytest.MonkeyPatch,
    rows: int = 32,
    dtype: torch.dtype = torch.float32,
    dynamic: bool | None = None,
) -> list[Extern]:
    """Return the products of a frozen layer for which a library is asked for."""
    monkeypatch.setenv("FUSEC_CACHE", "0")
    tune(monkeypatch, "races", product=1)
    with seeded(0):
        layer, x = nn.Linear(24, 512).to(dtype), torch.randn(rows, 24).to(dtype)
    with torch.no_grad(), calls_of(RaceJudge.__call__) as choices:
        frozen(layer, dynamic=dynamic)(x)
    return [call.arguments["choice"].subject for call in choices]


@pytest.mark.slow
def test_the_race_times_each_library_with_its_own_packed_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (call,) = asked(monkeypatch, 8192)
    cpu = torch.device("cpu")
    contest = product_contest(cpu, RaceTuning(), library_choice(call))
    verdict = RaceJudge(Races(cpu, 20.0, "salt", None), {}).race(contest, ATEN, 20.0)
    assert set(verdict.times) == {ATEN, *call.alternatives} and PACKED_ONEDNN in verdict.times


def test_mkl_packs_f32_for_one_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    (call,) = asked(monkeypatch, 256)
    assert (PACKED_MKL in call.alternatives) is torch.backends.mkl.is_available()
    halves = asked(monkeypatch, dtype=torch.bfloat16)  # a group where they are widened
    assert not any(PACKED_MKL in c.alternatives for c in halves if isinstance(c, Extern))
    (dynamic,) = asked(monkeypatch, dynamic=True)
    assert PACKED_MKL not in dynamic.alternatives
    assert PACKED_ONEDNN in dynamic.alternatives


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("library", (PACKED_ONEDNN, "oneDNN", None))
def test_one_graph_multiplies_any_number_of_rows(
    library: str | None, dtype: torch.dtype, choose: Choose
) -> None:
    """None, one, a prime number, and far more than was seen when a library was chosen."""
    if library is not None and not has_packing(torch.empty(0, dtype=dtype)):
        pytest.skip("oneDNN has no kernels of this type here")
    with seeded(0):
        module = Residual().eval().to(dtype)

    def given(rows: int) -> Tensor:
        x = torch.randn(rows, 24).to(dtype)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        return x

    choose(library, lambda: frozen(module)(given(5)))
    compiled, exact = frozen(module), copy.deepcopy(module).double()
    traced = counters["stats"]["unique_graphs"]
    for rows in (5, 0, 1, 37, 2048):
        x = given(rows)
        with torch.no_grad():
            made, eager, wanted = compiled(x), module(x), exact(x.double())
        assert (made.shape, made.stride()) == (eager.shape, eager.stride())
        worst = (eager - wanted).abs().amax() if rows else 0.0
        floor = torch.finfo(dtype).eps * 4
        torch.testing.assert_close(made.double(), wanted, rtol=0.0, atol=float(2 * worst + floor))
    assert counters["stats"]["unique_graphs"] == traced + 1


def test_sizes_of_other_classes_call_what_was_compiled(choose: Choose) -> None:
    module = Residual().eval()

    def compiled_once() -> Callable[[Tensor], Tensor]:
        torch._dynamo.reset()
        return torch.compile(module, backend="fusec", dynamic=True, options={"strict": True})

    choose("oneDNN", lambda: compiled_once()(torch.randn(4, 24)))
    compiled = compiled_once()
    traced = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for rows in (4, 7, 100, 3, 5000):
            x = torch.randn(rows, 24)
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == traced + 1


# -- panels ----------------------------------------------------------------------------------------


class Gated(nn.Module):
    """A gated layer behind a norm, with a residual: what a step of decoding multiplies."""

    def __init__(self, width: int = 48, hidden: int = 96) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width + 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y = self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return y + x.repeat(1, 2)[:, : y.shape[1]]


class Steps(nn.Module):
    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(width, width, bias=False), steps

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps):
            x = self.layer(x).tanh()
        return x


def fused(module: nn.Module, **more: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    options = {"strict": True, "freeze": True, "race": "fused", "verify": True, **more}
    return torch.compile(module, backend="fusec", dynamic=False, options=options)


def kernels_of(module: nn.Module, x: Tensor) -> list[str]:
    """Return the sources of a frozen module's kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEC_FREEZE", "1")
        return [kernel.source for kernel in fusec.kernels(module, x, race="fused")]


def panels_held(module: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of the panels that compiled graphs read for a module."""
    weights = [module.gate.weight]
    assert isinstance(weights[0], Tensor)
    (graph,) = (graph for graph in frozen_graphs if graph.reads(weights))
    made = graph.compute(*(p for p in module.parameters() if graph.reads([p])))
    return [tuple(m.shape) for m in made]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("rows", (1, 3, 14))
def test_products_of_few_rows_read_panels_and_see_changed_weights(
    rows: int, dtype: torch.dtype
) -> None:
    if not has_packing(torch.empty(0, dtype=dtype)):
        pytest.skip("oneDNN has no kernels of this type here")
    with seeded(0):
        module, x = Gated().eval().to(dtype), torch.randn(rows, 48).to(dtype)
    compiled = fused(module)
    for _ in range(2):
        exact = copy.deepcopy(module).double()(x.double())
        with torch.no_grad():
            made, eager = compiled(x), module(x)
        assert (made.dtype, made.stride()) == (eager.dtype, eager.stride())
        worst = (eager - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
        assert (made - exact).abs().max() <= 2 * worst
        with torch.no_grad():
            module.gate.weight.mul_(0.5)
    assert (3, 48, 32) in panels_held(module)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("race", ("fused", "auto"))
@pytest.mark.parametrize("rows", (17, 25, 96, 100, 192))
def test_products_of_more_rows_read_panels_in_f32(rows: int, race: str) -> None:
    """The kernel's error is at most twice eager's beside fp64, and changed weights are seen."""
    with seeded(0):
        module, x = Gated(48, 320).eval(), torch.randn(rows, 48)
    compiled = fused(module, race=race)
    for _ in range(2):
        exact = copy.deepcopy(module).double()(x.double())
        with torch.no_grad():
            made, eager = compiled(x), module(x)
        assert (made.dtype, made.stride()) == (eager.dtype, eager.stride())
        worst = (eager - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
        assert (made - exact).abs().max() <= 2 * worst
        with torch.no_grad():
            module.gate.weight.mul_(0.5)
    assert (10, 48, 32) in panels_held(module)


@pytest.mark.parametrize("outputs", (33, 47, 80, 127))
@pytest.mark.parametrize(("rows", "terms"), [(20, 48), (150, 48), (150, 300), (150, 65)])
def test_the_last_panel_may_be_padded(outputs: int, rows: int, terms: int) -> None:
    """Also where terms do not fill their tiles: panels are read in place, within the weight."""
    with seeded(0):
        module = nn.Sequential(nn.Linear(terms, outputs), nn.GELU()).eval()
        x = torch.randn(rows, terms)
    x[3, 5] = float("nan")
    with torch.no_grad():
        made, eager = fused(module)(x), module(x)
        torch.testing.assert_close(made, eager, equal_nan=True, rtol=1e-4, atol=1e-5)
        (kernel,) = kernels_of(module, x)
    assert "f_multiply<DENSE>(" in kernel and "a_frozen" not in kernel


def test_rows_of_16_bits_are_widened_once_beside_panels_in_f32() -> None:
    """And not for each panel: the product would be no tile."""
    module = nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.GELU()).bfloat16()
    x = torch.empty(32, 2048, dtype=torch.bfloat16)
    with torch.no_grad(), on_processor(PROCESSORS["cpu:avx2"].features):
        rows, product = fusec.kernels(module, x, options={"freeze": True})
    assert "ld_bf16(" in rows.source
    assert "f_multiply<DENSE>(" in product.source and "ndtr" in product.source


def test_weights_that_lie_along_their_outputs_have_panels() -> None:
    """As those of GPT-2's layers, which multiply ``x @ w``; rows may be a view of another order."""
    with seeded(0):
        w, x = nn.Parameter(torch.randn(64, 96)), torch.randn(2, 4, 20, 16)

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = w

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x.transpose(1, 2).reshape(40, 64) @ self.w)

    module = Heads()
    compiled = fused(module)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", [(0, 0), (99, 47)])
def test_a_number_that_is_none_stays_in_its_row_of_a_tile(where: tuple[int, int]) -> None:
    with seeded(0):
        module, x = Gated().eval(), torch.randn(100, 48)
    x[where] = float("nan")
    with torch.no_grad():
        made, eager = fused(module)(x), module(x)
    torch.testing.assert_close(made, eager, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_a_weight_has_panels_for_each_way_that_it_lies() -> None:
    with seeded(0):
        module, x = Tied(128, 128).eval().bfloat16(), torch.randn(4, 128).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(fused(module)(x), module(x), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("rows", (1, 2))
def test_a_number_that_is_none_stays_in_its_row(rows: int) -> None:
    with seeded(0):
        module, x = Gated().eval().bfloat16(), torch.randn(rows, 48).bfloat16()
    x[0, 0] = float("nan")
    with torch.no_grad():
        made, eager = fused(module)(x), module(x)
    torch.testing.assert_close(made, eager, equal_nan=True)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="oneDNN multiplies no bf16 on this processor, so nothing is packed",
)
@pytest.mark.parametrize(
    ("columns", "rows", "dtype", "offered"),
    [
        (96, 3, torch.bfloat16, True),
        (96, 3, torch.float32, False),
        (96, 17, torch.float32, True),
        (96, 192, torch.float32, True),
        (96, 193, torch.float32, False),
        (80, 64, torch.float32, True),
        (80, 14, torch.float32, False),
        (80, 3, torch.bfloat16, False),
        (32, 3, torch.bfloat16, False),
        (96, 64, torch.bfloat16, False),
        (96, None, torch.bfloat16, False),
        (96, None, torch.float32, False),
    ],
)
def test_panels_are_for_rows_that_read_their_weights_once(
    columns: int,
    rows: int | None,
    dtype: torch.dtype,
    offered: bool,
) -> None:
    layer = nn.Linear(24, columns, bias=False).to(dtype)
    with torch.no_grad(), calls_of(freezing.pack_products) as packed:
        frozen(layer, dynamic=rows is None)(torch.randn(rows or 3, 24).to(dtype))
    (call,) = packed
    gm, *_ = call.arguments.values()
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert (PANELS in node.meta[PACKED]) is offered


@pytest.mark.parametrize(
    ("width", "steps", "offered"), [(96, 1, False), (96, 3, True), (1024, 3, False)]
)
def test_a_weight_in_f32_has_panels_where_steps_read_it_again_from_a_cache(
    width: int, steps: int, offered: bool
) -> None:
    module, x = Steps(width, steps), torch.randn(14, width)
    with torch.no_grad(), calls_of(freezing.pack_products) as packed:
        torch.testing.assert_close(fused(module)(x), module(x))
    (call,) = packed
    gm, *_ = call.arguments.values()
    nodes = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert [PANELS in node.meta[PACKED] for node in nodes] == [offered] * steps


def test_the_race_gives_kernels_the_panels_of_the_weights_that_the_library_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tune(monkeypatch, "races", clear=float("inf"))
    monkeypatch.setenv("FUSEC_RACE_BUDGET_S", "60")
    monkeypatch.setenv("FUSEC_CACHE", "0")
    with seeded(0):
        module, x = Gated(512, 1024).eval().bfloat16(), torch.randn(4, 512).bfloat16()
    with torch.no_grad(), calls_of(RaceJudge.race) as races:
        fused(module, race="auto", verify=False)(x)
    seen: list[Verdict] = [c.result for c in races if c.arguments["reference"] == LIBRARY]
    assert len(seen) == 2
    for verdict in seen:
        assert not any(lap.dropped and "wrong" in lap.dropped for lap in verdict.laps), verdict
        assert {"library", "fused #0"} <= verdict.times.keys()


def test_the_race_of_formats_times_the_weight_that_is_packed(tmp_path) -> None:
    """Else channels-last images paid for the order that each call makes: 1.2 of a ResNet's time."""
    module = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3, bias=False)).eval()
    kept = Decided("contiguous", "", -1.0)
    with torch.no_grad(), calls_of(RaceJudge.__call__) as choices:
        for freezes in (True, False):
            torch._dynamo.reset()
            compiled = torch.compile(module, backend="fusec", options={"freeze": freezes})
            compiled(images().contiguous())
    seen: list[fx.Node] = [call.arguments["choice"].subject for call in choices]
    assert [node.meta.get(PACKS, False) for node in seen] == [True, True, False, False]
    races = Races(torch.device("cpu"), 60.0, "salt", Cache(tmp_path, limit_bytes=1 << 20))
    judge = RaceJudge(
        races, {"convolution": partial(convolution_contest, races.device, RaceTuning())}
    )
    for node, packs in zip(seen, (True, True, False, False), strict=True):
        with calls_of(convolve_packed) as convolutions:
            assert "channels-last" in judge(format_choice(node, kept)).reason
        weights = [list(call.arguments.values())[1] for call in convolutions]
        assert bool(weights) is packs and all(w.layout is torch._mkldnn for w in weights)
