"""Models as files: built by ``fusec build``, called by ``fusec.load``."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import fusec
from fusec.archive import graph as loading
from fusec.archive.graph import BadArchive, digest_beside, read_contract
from fusec.archive.model import CALLING, HELD, KEY, Model
from fusec.errors import ModelError, Unsupported, UsageError
from fusec.export import Call, build, weights_of
from fusec.options import Options
from fusec.runtime.cache.entry import decode, encode
from fusec.tools.cli import main
from fusec.tools.report.observe import new_fake_mode
from fusec.tools.terminal import format_bytes
from tests.export.test_packing import python
from tests.support import BACKEND, on_processor, values

pytestmark = pytest.mark.skipif(BACKEND != "fusec", reason="is about fusec's own archives")


class Net(nn.Module):
    """A norm with statistics, a buffer that no state_dict has, nested inputs and results."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.full((16,), 2.0), persistent=False)

    def forward(
        self, x: torch.Tensor, *, more: dict[str, list[torch.Tensor]], flag: bool = True
    ) -> dict[str, Any]:
        y = F.gelu(self.norm(self.up(x))) * self.scale + more["a"][0]
        return {"y": y, "rest": (y.sum(), None, 3, x)}


COUNTS = (50, pytest.param(1000, marks=pytest.mark.slow))
HERE = [Options.from_compile(None, None)]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def arguments(seed: int = 1) -> tuple[torch.Tensor, dict[str, Any]]:
    return values(4, 8, seed=seed), {"more": {"a": [values(4, 16, seed=seed + 1)]}}


def content_of(train: bool) -> bytes:
    torch._dynamo.reset()
    x, named = arguments()
    return build(net(), Call((x,), named, train), HERE)


@pytest.fixture(scope="module")
def inference() -> bytes:
    return content_of(False)


@pytest.fixture(scope="module")
def training() -> bytes:
    return content_of(True)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Model]:
    def from_bytes(content: bytes, **how: Any) -> Model:
        path = tmp_path / "net.fusec"
        path.write_bytes(content)
        return fusec.load(path, **how)

    return from_bytes


def test_a_loaded_model_does_what_the_model_does(inference: bytes, load: Any) -> None:
    model = load(inference, weights=net())
    x, named = arguments(seed=5)
    found, expected = model(x, **named), net().eval()(x, **named)
    torch.testing.assert_close(found["y"], expected["y"])
    torch.testing.assert_close(found["rest"][0], expected["rest"][0])
    assert found["rest"][1:3] == (None, 3)
    assert found["rest"][3] is x
    assert model.inputs == ("x: f32[4, 8]", "more['a'][0]: f32[4, 16]")
    assert repr(model).startswith("cpu, inference\n  x: f32[4, 8]")


def test_it_trains_as_the_model_does(training: bytes, load: Any) -> None:
    own, expected = net(), net()
    model = load(training, weights=own)
    for step in range(2):
        x, named = arguments(seed=7 + step)
        for call in (model, expected):
            call(x, **named)["rest"][0].backward()
    for (name, wanted), (same, parameter) in zip(
        expected.named_parameters(), sorted(model.named_parameters(), key=order), strict=True
    ):
        assert (name, parameter is own.get_parameter(name)) == (same, True)
        torch.testing.assert_close(parameter.grad, wanted.grad)
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(own.get_buffer(name), buffer)
    assert own.norm.num_batches_tracked == 2


class Turned(nn.Module):
    """A product with complex weights; the result has the conjugate bit."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(values(8, dtype=torch.complex64))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return (z * self.turn).conj()


def test_complex_weights_and_arguments_are_those_of_the_model(load: Any) -> None:
    torch._dynamo.reset()
    z, own, expected = values(4, 8, dtype=torch.complex64), Turned(), Turned()
    model = load(build(Turned(), Call((z,), {}, True), HERE), weights=own)
    found, wanted = model(z), expected(z)
    assert found.is_conj()
    torch.testing.assert_close(found, wanted)
    for result in (found, wanted):
        result.abs().sum().backward()
    torch.testing.assert_close(own.turn.grad, expected.turn.grad)


def test_arguments_that_were_one_tensor_may_be_others(load: Any) -> None:
    """Also a weight that is an argument, and a view of an argument that is written to."""

    def step(c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        c.add_(1)
        return d * 2

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(values(4))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * self.w + y

    scaled, x, y = Scaled(), values(4), values(4, seed=1)
    torch._dynamo.reset()
    model = load(build(lambda q, k: q * 2 + k, Call((x, x)), HERE))
    torch.testing.assert_close(model(x, y), x * 2 + y)
    model = load(build(scaled, Call((x, scaled.w)), HERE), weights=scaled)
    torch.testing.assert_close(model(x, y), scaled(x, y))
    pairs = values(4, 4)
    model = load(build(step, Call((pairs, pairs[0])), HERE))
    torch.testing.assert_close(model(pairs.clone(), y), y * 2)
    with pytest.raises(UsageError, match="shares memory with what the model writes to"):
        model(pairs, pairs[0])


@pytest.mark.parametrize("name", ["N-1", "1a", "\u00df"])
def test_what_is_no_name_of_a_size_is_refused(name: str) -> None:
    torch._dynamo.reset()
    x = values(4, 3)
    with pytest.raises(UsageError, match="is no name of a size"):
        build(lambda x: x * 2, Call((x,), sizes=((x, (name, None)),)), HERE)


def test_a_model_that_trains_has_no_gradient_where_none_is_wanted(load: Any) -> None:
    linear, x = nn.Linear(6, 3), values(5, 6)
    torch._dynamo.reset()
    model = load(build(linear, Call((x,), {}, True), HERE), weights=linear)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = model(x)
        assert not found.requires_grad
        torch.testing.assert_close(found, linear(x).detach())
    assert model(x).requires_grad


@pytest.mark.parametrize(("built", "others"), [(0.0, (-0.0, 1.0)), (math.nan, (0.0,))])
def test_a_number_is_the_one_that_it_was_built_with(
    load: Any, built: float, others: tuple[float, ...]
) -> None:
    def scaled(x: torch.Tensor, s: float = 0.0) -> torch.Tensor:
        return torch.full_like(x, s).reciprocal()

    torch._dynamo.reset()
    x = values(3)
    model = load(build(scaled, Call((x, built)), HERE))
    torch.testing.assert_close(model(x, built), scaled(x, built), equal_nan=True)
    for other in others:
        with pytest.raises(UsageError, match="which it was built with"):
            model(x, other)


class Shift(nn.Module):
    def __init__(self, shift: torch.Tensor, *, kept: bool) -> None:
        super().__init__()
        self.register_buffer("shift", shift, persistent=kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


@pytest.mark.parametrize("kept", (True, False))
@pytest.mark.parametrize(
    "shift", [torch.ones(1).expand(4), torch._neg_view(torch.ones(4))], ids=("expanded", "negative")
)
def test_buffers_of_any_layout_are_those_of_the_model(
    load: Any, tmp_path: Path, shift: torch.Tensor, *, kept: bool
) -> None:
    torch._dynamo.reset()
    module, x = Shift(shift, kept=kept), values(3, 4)
    content = build(module, Call((x,)), HERE)
    for weights in (module, weights_of(module)):
        torch.testing.assert_close(load(content, weights=weights)(x), module(x))


def test_weights_without_plain_memory_are_refused(load: Any) -> None:
    torch._dynamo.reset()
    content = build(Shift(torch.ones(4), kept=True), Call((values(3, 4),)), HERE)
    for other in (torch.ones(4).to_sparse(), torch.ones(4, device="meta"), torch.ones(4).numpy()):
        with pytest.raises(UsageError, match="shift: f32\\[4\\] is wanted"):
            load(content, weights={"shift": other})


def test_a_written_buffer_in_the_memory_of_another_weight_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(values(4), requires_grad=False)
            self.register_buffer("first", self.w.data[:2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first.add_(1)
            return x * self.w

    torch._dynamo.reset()
    with pytest.raises(UsageError, match="shares memory with another weight"):
        build(Counting(), Call((values(3, 4),)), HERE)


def order(row: tuple[str, torch.Tensor]) -> int:
    return [name for name, _ in net().named_parameters()].index(row[0])


def test_weights_are_exchanged_and_may_come_from_a_mapped_file(
    inference: bytes, load: Any, tmp_path: Path
) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    other = net()
    with torch.no_grad():
        other.up.weight.mul_(3)
    save_file(weights_of(other), tmp_path / "net.safetensors")
    model, (x, named) = load(inference), arguments()
    expected = other.eval()(x, **named)["y"]
    torch.testing.assert_close(model(x, **named)["y"], expected)
    assert "net.safetensors" in Path("/proc/self/maps").read_text()
    model.load_weights(net())
    assert not torch.allclose(model(x, **named)["y"], expected)
    torch.testing.assert_close(model.state_dict()["up.weight"], net().up.weight.detach())


def wrong(**changed: Any) -> Callable[[Model], object]:
    x, named = arguments()
    given = {"x": x, **named, **changed}
    return lambda model: model(**given)


WRONG = {
    "a size": (wrong(x=values(5, 8)), r"x is f32\[5, 8\]; f32\[4, 8\] is wanted"),
    "a type": (wrong(x=values(4, 8).double()), r"x is f64\[4, 8\]; f32"),
    "nested": (wrong(more={"a": [3]}), r"more\['a'\]\[0\] is 3; a tensor is wanted"),
    "a key": (wrong(more={"b": []}), "more is a dictionary of b; a dictionary of a is wanted"),
    "keys": (wrong(more={1: [], "a": []}), "more is a dictionary of 1, a; a dictionary of a is"),
    "a length": (wrong(more={"a": []}), r"more\['a'\] is a list of 0; a list of 1 is wanted"),
    "a name": (wrong(y=1), "y is none of its arguments"),
    "a gradient": (wrong(x=values(4, 8).requires_grad_()), "x requires a gradient"),
    "none": (lambda model: model(), "x is missing. The model takes x: f32"),
    "many": (lambda model: model(1, 2, 3), "3 arguments in order"),
    "twice": (lambda model: model(values(4, 8), x=values(4, 8)), "x is given twice"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_named_with_what_is_wanted(
    inference: bytes, load: Any, case: str
) -> None:
    call, said = WRONG[case]
    with pytest.raises(UsageError, match=said):
        call(load(inference, weights=net()))


def test_arguments_with_other_strides_are_copied(inference: bytes, load: Any) -> None:
    x, named = arguments()
    model, other = load(inference, weights=net()), x.t().contiguous().t()
    assert other.stride() != x.stride()
    assert torch.equal(model(other, **named)["y"], model(x, **named)["y"])


def one_row(seed: int = 1) -> torch.Tensor:
    """Return a row that is cut from a longer one: its stride along the axis of rows says so."""
    return values(1, 100, seed=seed)[:, :8]


def looks(*tensors: torch.Tensor) -> list[tuple[tuple[int, ...], int]]:
    return [(tensor.stride(), tensor._version) for tensor in tensors]


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(values(1, 8, seed=2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * self.row


@pytest.mark.parametrize("train", (False, True))
def test_a_call_leaves_the_tensors_of_its_caller_as_they_are(load: Any, train: bool) -> None:
    torch._dynamo.reset()
    module, traced = Row(), values(1, 8).requires_grad_(train)
    content = build(module, Call((traced,), {}, train), HERE)
    module.row = nn.Parameter(one_row(seed=3))
    leaf = values(1, 100).requires_grad_()
    base = leaf * 1
    x, squares = base[:, :8], base.square()  # whose gradient reads the memory that x is cut from
    before = looks(x, module.row)
    model = load(content, weights=module)
    with contextlib.nullcontext() if train else torch.no_grad():
        made = model(x)
    assert looks(x, module.row) == before
    torch.testing.assert_close(made, module(x))
    (squares.sum() + (made.sum() if train else 0)).backward()
    wanted = 2 * base.detach()
    if train:
        wanted[:, :8] += (1 - torch.tanh(x) ** 2) * module.row
    torch.testing.assert_close(leaf.grad, wanted)


class Counts(nn.Module):
    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return x * 2


def test_what_is_written_may_not_share_memory(load: Any) -> None:
    torch._dynamo.reset()
    model = load(build(Counts(), Call((values(4), values(4))), HERE))
    total, x = torch.zeros(8), values(4)
    model(x, total[:4])
    assert torch.equal(total[:4], x)
    with pytest.raises(UsageError, match="shares memory with what the model writes to"):
        model(total[1:5], total[:4])
    with pytest.raises(UsageError, match="total is written to, and has strides"):
        model(x, total[::2])


def test_an_expanded_argument_cannot_be_made_of_another(load: Any) -> None:
    torch._dynamo.reset()
    model = load(build(Row(), Call((values(1, 8).expand(4, 8),)), HERE), weights=Row())
    assert model(values(1, 8).expand(4, 8)).shape == (4, 8)
    with pytest.raises(UsageError, match=r"x has strides \(8, 1\); \(0, 1\) are wanted"):
        model(values(4, 8))


class Returned(nn.Module):
    def forward(self, x: torch.Tensor, total: torch.Tensor) -> Any:
        return total.add_(x), x


def test_what_is_written_or_returned_is_the_tensor_that_was_given(load: Any) -> None:
    torch._dynamo.reset()
    model = load(build(Returned(), Call((values(1, 8), values(1, 8))), HERE))
    x, total = one_row(), one_row(seed=2)
    before, wanted = looks(x, total), total + x
    made = model(x, total)
    assert made[0] is total and made[1] is x and torch.equal(total, wanted)
    (_, version), (strides, written) = before
    assert looks(x, total) == [(strides, version), (strides, written + 1)]


def test_weights_that_do_not_fit_are_named(inference: bytes, load: Any) -> None:
    with pytest.raises(UsageError, match=r"up.weight: f32\[16, 8\] is missing"):
        load(inference, weights={})
    with pytest.raises(UsageError, match=r"wanted, f32\[3, 8\] was given"):
        load(inference, weights={**weights_of(net()), "up.weight": values(3, 8)})
    with pytest.raises(UsageError, match=r"there is no net[.]safetensors beside it"):
        load(inference)


def test_a_digest_pins_a_file(inference: bytes, load: Any) -> None:
    digest = hashlib.sha256(inference).hexdigest()
    load(inference, weights=net(), sha256=digest)
    with pytest.raises(BadArchive, match="has not the SHA-256"):
        load(inference, weights=net(), sha256=digest[::-1])


def test_another_machine_is_told_what_it_lacks(inference: bytes, load: Any) -> None:
    lacks = r"cpu: .*that this one lacks: .*avx"
    with on_processor("x86_64 sse2"), pytest.raises(BadArchive, match=lacks):
        load(inference, weights=net())


# -- sizes that a call chooses ---------------------------------------------------------------------


class Heads(nn.Module):
    """An attention with a table of positions: what is asked of its sizes is a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)
        self.places = nn.Parameter(torch.randn(12, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, steps, _ = x.shape
        h = self.up(x + self.places[:steps]).view(rows, steps, 3, 2, 4)
        z = F.scaled_dot_product_attention(*h.permute(2, 0, 3, 1, 4), is_causal=True)
        return z.transpose(1, 2).reshape(rows, steps, 8) * y, x.repeat(2, 1, 1)


def heads() -> Heads:
    torch.manual_seed(0)
    return Heads().eval()


def dynamic(
    fn: Callable[..., Any],
    *shapes: tuple[int | str, ...],
    may_fix: bool = False,
    train: bool = False,
    options: Sequence[Options] = HERE,
) -> bytes:
    """Build a function of tensors whose extents are numbers or names."""
    extents: dict[str, int] = {}
    given, sizes = [], []
    for shape in shapes:
        own = [extents.setdefault(n, 8 + 2 * len(extents)) if isinstance(n, str) else n
               for n in shape]  # fmt: skip
        given.append(values(*own))
        sizes.append((given[-1], tuple(n if isinstance(n, str) else None for n in shape)))
    torch._dynamo.reset()
    call = Call(tuple(given), sizes=sizes, may_fix=may_fix, train=train)
    return build(fn, call, options)


@pytest.fixture(scope="module")
def sized() -> bytes:
    return dynamic(heads(), ("B", "T", 8), ("B", "T", 8))


def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return values(*shape, seed=3), values(*shape, seed=4)


@pytest.mark.parametrize("sizes", [(3, 5), (1, 12), (7, 1)])
def test_a_call_chooses_sizes(sized: bytes, load: Any, sizes: tuple[int, int]) -> None:
    x, y = pair(*sizes, 8)
    for made, expected in zip(load(sized, weights=heads())(x, y), heads()(x, y), strict=True):
        torch.testing.assert_close(made, expected)


SIZES = {
    "none": (pair(2, 0, 8), "T is 0; the model was built for T >= 1"),
    "a bound": (pair(2, 13, 8), "T is 13; the model was built for T <= 12"),
    "two of one": ((values(2, 3, 8), values(3, 3, 8)), r"y is f32\[3, 3, 8\]; f32\[B, T, 8\] is "
                   "wanted, where B is 2, T is 3"),
    "a number": (pair(2, 3, 9), r"x is f32\[2, 3, 9\]; f32\[B, T, 8\] is wanted"),
    "axes": (pair(3, 8), r"x is f32\[3, 8\]; f32\[B, T, 8\] is wanted"),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_it_was_not_built_for_are_named(sized: bytes, load: Any, case: str) -> None:
    given, said = SIZES[case]
    with pytest.raises(UsageError, match=said):
        load(sized, weights=heads())(*given)


def test_the_code_s_own_conditions_have_the_last_word(sized: bytes, load: Any) -> None:
    model = load(sized, weights=heads())
    model._calling = dataclasses.replace(model._calling, conditions=())
    with pytest.raises(BadArchive, match="'inference' was made for T <= 12"):
        model(*pair(2, 13, 8))


def evens(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 2).sum(1) if x.shape[0] % 2 == 0 else x * 2


def test_what_the_model_asks_of_a_size_is_checked(load: Any) -> None:
    model = load(dynamic(evens, ("N",)))
    torch.testing.assert_close(model(values(6)), evens(values(6)))
    with pytest.raises(UsageError, match="N is 5; the model was built for N%2 == 0"):
        model(values(5))


def test_a_size_that_the_model_fixes_or_returns_is_refused(load: Any) -> None:
    def fixed(x: torch.Tensor) -> torch.Tensor:
        return x.view(8, 4) + 1

    with pytest.raises(UsageError, match="the model runs for N = 8 alone"):
        dynamic(fixed, ("N", 4))
    assert load(dynamic(fixed, ("N", 4), may_fix=True)).inputs == ("x: f32[8, 4]",)
    with pytest.raises(UsageError, match="a result that is a size"):
        dynamic(lambda x: (x + 1, x.shape[0]), ("N", 4))


ASKED = {
    "the last": (lambda x: x[:, -1] * 2, (2, 0), "T is 0; the model was built for T >= 1"),
    "a difference": (lambda x: (x[:, 1:] - x[:, :-1])[:, -1], (2, 1), "T is 1; .* for T >= 2"),
    "a spread": (lambda x: x.var(1), (2, 0), "T is 0; the model was built for T >= 1"),
    "the last ones": (lambda x: x[:, -3:] * 2, (2, 2), "T is 2; the model was built for T >= 3"),
    "one that goes": (lambda x: x.squeeze(1) * 2, (2, 1), "T is 1; the model was built for T != 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", ASKED)
def test_what_the_trace_does_not_ask_of_a_size_is_checked(load: Any, case: str) -> None:
    function, shape, said = ASKED[case]
    model = load(dynamic(function, ("B", "T")))
    torch.testing.assert_close(model(values(1, 3)), function(values(1, 3)))
    with pytest.raises(UsageError, match=said):
        model(values(*shape))


def test_convolutions_take_any_number_of_images(load: Any) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3, padding=1).eval()
    loaded = load(dynamic(model, ("B", 3, "H", 8)), weights=model)
    for count in (1, 17):
        x = values(count, 3, 5, 8)
        torch.testing.assert_close(loaded(x), model(x).detach())


def test_a_tensor_that_nothing_reads_has_its_sizes_checked(load: Any) -> None:
    model = load(dynamic(lambda x, y: x * 2, ("N", 4), ("N", 3)))
    model(values(5, 4), values(5, 3))
    with pytest.raises(UsageError, match=r"y is f32\[6, 3\]; f32\[N, 3\] is wanted"):
        model(values(5, 4), values(6, 3))


def test_sizes_that_no_tensor_has_are_named(load: Any) -> None:
    x, y = values(6), values(12)
    given = Call((x, y), sizes=((x, ("N",)), (y, ("M",))))
    torch._dynamo.reset()
    model = load(build(lambda x, y: torch.cat([x, x]) + y, given, HERE))
    with pytest.raises(UsageError, match=r"2[*]N is 9223372036854775808, which is no size"):
        model(torch.empty(1).expand(1 << 62), torch.empty(2))


# -- what is frozen --------------------------------------------------------------------------------


class Folded(nn.Module):
    """A norm that goes into a convolution's weights, and a weight that is also read itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.gain = nn.Parameter(torch.rand(4))
        self.norm.running_mean.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.conv(x)).relu().mean((2, 3))
        return h * self.gain + h @ torch.outer(self.gain.exp(), self.gain)


def folded() -> Folded:
    torch.manual_seed(0)
    return Folded().eval()


@pytest.fixture(scope="module")
def frozen() -> bytes:
    torch._dynamo.reset()
    options = [Options.from_compile(None, {"freeze": True})]
    return build(folded(), Call((values(2, 3, 6, 6),)), options)


def test_what_was_frozen_is_in_the_archive_and_its_weights_are_not_asked_for(
    frozen: bytes, load: Any
) -> None:
    model, x = load(frozen, weights={}), values(2, 3, 6, 6, seed=4)
    torch.testing.assert_close(model(x), folded()(x).detach())
    assert {name.partition(" ")[0] for name in model.state_dict()} == {"frozen"}
    model.load_weights({"gain": torch.zeros(4)})
    torch.testing.assert_close(model(x), folded()(x).detach())


class Summed(nn.Module):
    """Its backward never learns how many steps there were."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.up(x.sum(1)) * y.mean(),)


class Normal(Summed):
    """Rows of all batches as one axis, statistics that are kept, results of other sizes, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(24)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = F.gelu(self.norm(self.up(x.reshape(-1, 8))))
        z = h.view(x.shape[0], x.shape[1], 24)
        return F.mse_loss(z[..., :8], y), z[:, 1:] * z[:, :-1], h.softmax(0)


TRAINED: dict[str, Callable[[], nn.Module]] = {
    "attention": Heads, "a sum": Summed, "a norm": Normal
}  # fmt: skip


def trained_step(model: Any, given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return gradients, buffers and results of a step with a loss that weighs all elements."""
    made = [one for one in model(*given) if one.requires_grad]
    loss = sum((one * values(*one.shape, seed=k)).sum() for k, one in enumerate(made))
    names, weights = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, weights)
    kept = {name: b for name, b in model.state_dict().items() if "running" in name}
    results = {f"result {k}": one.detach() for k, one in enumerate(made)}
    return dict(zip(names, gradients, strict=True)) | kept | results


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step_s_calls_choose_sizes(load: Any, name: str) -> None:
    torch.manual_seed(0)
    own = TRAINED[name]().train()
    shapes = ("B", "T", 8), ("B", "T", 8)
    trained = load(dynamic(own, *shapes, train=True), weights=copy.deepcopy(own))
    for sizes in ((3, 5), (1, 12), (40, 2)):
        given = pair(*sizes, 8)
        found, wanted = trained_step(trained, given), trained_step(own, given)
        assert found.keys() == wanted.keys()
        for what, expected in wanted.items():
            torch.testing.assert_close(found[what], expected, rtol=1e-4, atol=1e-4)
    if name == "attention":
        with pytest.raises(UsageError, match="T is 13; the model was built for T <= 12"):
            trained(*pair(2, 13, 8))


def test_a_backward_that_is_told_another_size_is_an_error(load: Any) -> None:
    trained = load(dynamic(heads().train(), *[("B", "T", 8)] * 2, train=True), weights=heads())
    z, _ = trained(*pair(3, 5, 8))
    assert {*z.grad_fn.sizes} == {3, 5}
    z.grad_fn.sizes = tuple(n + 1 for n in z.grad_fn.sizes)
    with pytest.raises(BadArchive, match="graph 'backward'"):
        z.sum().backward()


def test_a_frozen_model_s_calls_choose_sizes(load: Any) -> None:
    options = [Options.from_compile(None, {"freeze": True})]
    model = load(dynamic(folded(), ("B", 3, 6, 6), options=options), weights={})
    x = values(5, 3, 6, 6)
    torch.testing.assert_close(model(x), folded()(x).detach())


def test_freezing_needs_the_weights() -> None:
    options = [Options.from_compile(None, {"freeze": True})]
    mode = new_fake_mode()
    with mode:
        model, x = Folded().eval(), torch.empty(2, 3, 6, 6)
    torch._dynamo.reset()
    with pytest.raises(UsageError, match="freeze computes with weights"):
        build(model, Call((x,)), options, mode)


@pytest.mark.parametrize("count", COUNTS)
def test_lies_about_what_was_frozen_are_errors_or_right_answers(
    frozen: bytes, load: Any, count: int
) -> None:
    draw, x = random.Random(3), values(2, 3, 6, 6)
    expected, answers = folded()(x).detach(), 0
    for _ in range(count):
        lie = remade(frozen, draw, trusted=False)
        try:
            result = load(lie, weights={})(x)
        except UsageError:
            continue
        answers += 1
        torch.testing.assert_close(result, expected)
    assert answers < count


# -- what is built ---------------------------------------------------------------------------------


def breaks(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    print("seen")
    y = y * 2
    torch._dynamo.graph_break()
    return y * 3


def test_graph_breaks_are_an_error_that_lists_lines() -> None:
    with pytest.raises(
        UsageError, match=r"(?s)graph breaks: 2.*print\(\"seen\"\).*graph_break\(\)"
    ):
        build(breaks, Call((values(4),)), HERE)


def branches(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        x = x + 1
    print("not seen")
    return x * 2


def test_where_a_list_of_graph_breaks_ends_is_said() -> None:
    torch._dynamo.reset()
    with pytest.raises(
        UsageError, match=r"(?s)graph breaks: 1.*not seen: .*in branches.*fusec explain --run"
    ):
        build(branches, Call((values(4),)), HERE)


def scaled(x: torch.Tensor, y: Any = None, how: Any = torch.relu, z: Any = None, by: float = 2.0,
           *, n: int = 3) -> torch.Tensor:  # fmt: skip
    return how(x) * by + z * n


def test_a_tensor_of_many_numbers_is_named_with_its_line() -> None:
    class Shifted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - torch.tensor([float(k) for k in range(20)])

    torch._dynamo.reset()
    with pytest.raises(Unsupported, match=r"\.py:\d+ in forward: .*register_buffer"):
        build(Shifted(), Call((values(2, 20),)), HERE)


def test_short_ones_are_in_the_kernels(load: Any) -> None:
    class Shifted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - torch.tensor([0.5, 0.25])

    torch._dynamo.reset()
    model, x = load(build(Shifted(), Call((values(3, 2),)), HERE)), values(3, 2, seed=5)
    assert torch.equal(model(x), Shifted()(x))


def test_what_is_left_out_is_the_model_s_default(load: Any) -> None:
    x, z = values(4), values(4, seed=2)
    torch._dynamo.reset()
    model = load(build(scaled, Call((x,), {"z": z, "by": 0.5}), HERE))
    expected = scaled(x, z=z, by=0.5)
    for more in ({}, {"y": None}, {"n": 3}):
        torch.testing.assert_close(model(x, z=z, by=0.5, **more), expected)
    for args, named, said in (
        ((x,), {"z": z}, "by is missing. The model takes x: f32.*, z: f32.*, by=0.5"),
        ((x, z), {"by": 0.5}, "y is a Tensor; None, which it was built with"),
        ((x, None, z), {"by": 0.5}, "3 arguments in order"),
        ((x,), {"z": z, "by": 0.5, "n": 4}, "n is 4; 3, which it was built with"),
    ):
        with pytest.raises(UsageError, match=said):
            model(*args, **named)


def test_what_is_no_data_is_named() -> None:
    with pytest.raises(UsageError, match="result is a set"):
        build(lambda x: {x + 1}, Call((values(4),)), HERE)
    with pytest.raises(UsageError, match="the inputs do not fit"):
        build(net(), Call((values(4, 8), values(4))), HERE)
    with pytest.raises(ModelError, match=r"same reduction dim|cannot be multiplied"):
        build(nn.Linear(3, 4), Call((values(4, 8),)), HERE)


def test_the_module_and_its_statistics_stay_as_they_are() -> None:
    own, before = net(), copy.deepcopy(net().state_dict())
    x, named = arguments()
    build(own, Call((x,), named, train=True), HERE)
    assert all(torch.equal(own.state_dict()[name], value) for name, value in before.items())


@pytest.mark.slow
def test_a_file_for_a_gpu_is_built_without_one(load: Any) -> None:
    x, named = arguments()
    gpu = Options.from_compile(None, {"target": "sm_90"})
    content = build(net(), Call((x,), named, train=True), [gpu, *HERE])
    variants = decode(KEY, content)
    assert variants is not None
    assert list(variants) == ["sm_90", "cpu"]
    inner = decode(loading.KEY, variants["sm_90"])
    assert inner is not None
    assert inner["backward/triton.json"]
    if not torch.cuda.is_available():
        assert load(content, weights=net()).target == "cpu"
        with pytest.raises(BadArchive, match="for sm_90, and there is no CUDA device"):
            load(content, weights=net(), device="cuda")


MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x, mask=None):
        y = self.up(x).relu()
        return y if mask is None else y * mask
"""


def test_the_command_writes_a_file_and_weights_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    (tmp_path / "model.py").write_text(MODEL)
    line = [f"{tmp_path / 'model.py'}:Block", "--input", "f32[4,8]", "mask=f32[4,16]"]
    assert main(["build", *line, "--with-weights", "-o", str(tmp_path / "b.fusec")]) == 0
    content = (tmp_path / "b.fusec").read_bytes()
    out = capsys.readouterr().out
    assert hashlib.sha256(content).hexdigest() in out
    model = fusec.load(tmp_path / "b.fusec")
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert f"b.safetensors: {format_bytes(size)}\n" in out
    assert model(values(4, 8), mask=values(4, 16)).shape == (4, 16)


def test_the_command_takes_sizes_by_name_or_all_that_are_open(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    (tmp_path / "model.py").write_text(MODEL)
    line = ["build", f"{tmp_path / 'model.py'}:Block", "--with-weights"]
    for number, given in enumerate((["f32[B,8]", "f32[B,16]"], ["f32[5,8]", "--dynamic"])):
        path = tmp_path / f"{number}.fusec"
        assert main([*line, "-o", str(path), "--input", *given]) == 0
        model = fusec.load(path)
        masks = [values(3, 16)] if number == 0 else []
        assert model.inputs[0] == f"x: f32[{('B', 'n5')[number]}, 8]"
        assert model(values(3, 8), *masks).shape == (3, 16)
    path = tmp_path / "train.fusec"
    assert main([*line, "--input", "f32[B,8]", "--train", "-o", str(path)]) == 0
    model = fusec.load(path)
    model(values(3, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    path = tmp_path / "native.fusec"
    assert main([*line, "--input", "f32[B,8]", "--native", "-o", str(path)]) == 0
    assert fusec.load(path)(values(3, 8)).shape == (3, 16)


HALVES = """
def half(x):
    return x[:, x.shape[1] // 2] * 2
"""


def test_what_the_model_asks_of_sizes_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An index that was computed of a size holds for few of them: whoever builds it is told."""
    (tmp_path / "model.py").write_text(HALVES)
    path = tmp_path / "half.fusec"
    line = ["build", f"{tmp_path / 'model.py'}:half", "--input", "f32[B=8,T=24]", "-o", str(path)]
    assert main(line) == 0
    asked = "T//2 == 12"
    assert asked in capsys.readouterr().out.splitlines()[-1]
    model = fusec.load(path)
    assert asked in repr(model)
    x = values(3, 25)
    assert torch.equal(model(x), x[:, 12] * 2)
    with pytest.raises(UsageError, match=f"T is 26; the model was built for {asked}"):
        model(values(3, 26))


@pytest.fixture
def torch_s_setting() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def recorded(content: bytes) -> bool:
    """Return what an archive for training says of its kernels."""
    inner = decode(loading.KEY, (decode(KEY, content) or {})["cpu"])
    assert inner is not None
    said: bool = json.loads(inner["convention.json"])["training"]["deterministic"]
    return said


@pytest.mark.parametrize("option", (False, True))
def test_an_archive_records_what_its_options_are(option: bool) -> None:
    x, named = arguments()
    options = [Options(deterministic=option)]
    assert recorded(build(net(), Call((x,), named, train=True), options)) is option


def test_the_file_s_setting_of_torch_is_that_of_its_kernels_and_of_the_record(
    tmp_path: Path, torch_s_setting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Options] = []

    def note(fn: Any, call: Call, targets: Sequence[Options], mode: Any) -> bytes:
        seen.extend(targets)
        return build(fn, call, targets, mode)

    monkeypatch.setattr("fusec.export.build", note)
    path = tmp_path / "m.fusec"
    line = ["build", "--input", "f32[4,8]", "--train", "-o", str(path), "--with-weights"]
    for more in ("", "torch.use_deterministic_algorithms(True)"):
        (tmp_path / f"model{len(more)}.py").write_text(MODEL + more)
        assert main([*line, f"{tmp_path / f'model{len(more)}.py'}:Block"]) == 0
        assert recorded(path.read_bytes()) is bool(more)
    assert [one.deterministic for one in seen] == [False, True]


# -- who runs it, and who wrote it -----------------------------------------------------------------

RUN = """
import sys, torch
before = set(sys.modules)
import fusec
model = fusec.load(sys.argv[1])
model(torch.ones(4, 8), more={"a": [torch.ones(4, 16)]})["rest"][0]
added = {name for name in sys.modules if name not in before}
heavy = ("torch._dynamo", "torch._functorch", "torch._inductor", "sympy", "triton", "networkx",
         "transformers", "filelock")
print(sorted(name for name in added if name.startswith(heavy)))
assert not any(name.startswith(heavy) for name in added)
own = {name for name in added if name.startswith("fusec.")}
allowed = ("fusec.archive", "fusec.runtime", "fusec.errors", "fusec.options", "fusec.processors")
assert all(name.startswith(allowed) for name in own), own
"""


@pytest.mark.slow
@pytest.mark.parametrize("train", (False, True))
def test_loading_imports_no_compiler(
    inference: bytes, training: bytes, train: bool, tmp_path: Path
) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    (tmp_path / "net.fusec").write_bytes(training if train else inference)
    save_file(weights_of(net()), tmp_path / "net.safetensors")
    nothing = str(tmp_path / "cache")
    python(RUN, tmp_path / "net.fusec", FUSEC_CACHE_DIR=nothing, FUSEC_CXX="/bin/false")


def changed(found: Any, draw: random.Random) -> Any:
    """Return JSON with one thing in it changed."""
    if isinstance(found, dict) and found and draw.random() < 0.95:
        key = draw.choice(list(found))
        if draw.random() < 0.1:
            return {name: value for name, value in found.items() if name != key}
        return {**found, key: changed(found[key], draw)}
    if isinstance(found, list) and found and draw.random() < 0.9:
        k = draw.randrange(len(found))
        if draw.random() < 0.2:
            return found[:k] + found[k + 1 :]
        if draw.random() < 0.2:
            return [*found, found[k]]
        return [*found[:k], changed(found[k], draw), *found[k + 1 :]]
    if type(found) is int and draw.random() < 0.7:
        return draw.choice((found + 1, found - 1, found * 1000, -found, 1 << 70))
    return draw.choice((None, True, 3, -1, 0.5, "f64", "k9", [], {}, [3], "aten.mm.default"))


def blobs_of(content: bytes) -> dict[str, bytes]:
    variants = decode(KEY, content)
    assert variants is not None
    blobs = decode(loading.KEY, variants["cpu"])
    assert blobs is not None
    return blobs


def packed(blobs: dict[str, bytes]) -> bytes:
    return encode(KEY, {"cpu": encode(loading.KEY, blobs)})


def signed(blobs: dict[str, bytes]) -> bytes:
    """Return an archive whose code says that it was made with what stands beside it."""
    for wrapper in (name for name in blobs if name.endswith("/wrapper.py")):
        source = blobs[wrapper].decode()
        end = dataclasses.replace(read_contract(source), beside=digest_beside(blobs))
        blobs[wrapper] = (source.partition("\n# described: ")[0] + str(end)).encode()
    return packed(blobs)


def remade(content: bytes, draw: random.Random, *, trusted: bool) -> bytes:
    """Return an archive with one change in what it says of itself, its digests made right again.

    Args:
        trusted: also those that the code has, which only who writes code can make right.
    """
    blobs = blobs_of(content)
    described = [name for name in blobs if name.endswith(".json")]
    name = CALLING if trusted else draw.choice(described)
    blobs[name] = json.dumps(changed(json.loads(blobs[name]), draw)).encode()
    return signed(blobs) if trusted else packed(blobs)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("trusted", (False, True))
@pytest.mark.parametrize("train", (False, True))
def test_lies_about_sizes_are_errors_or_right_answers(
    sized: bytes, load: Any, train: bool, trusted: bool, count: int
) -> None:
    draw, own, given = random.Random(2), heads(), pair(2, 12, 8)
    if train:
        sized = dynamic(heads().train(), *[("B", "T", 8)] * 2, train=True)
    expected = own(*given)[0]
    answers = 0
    for k in range(count):
        lie = remade(sized, draw, trusted=trusted)
        try:
            model = load(lie, weights=own)
            if k % 2:
                with pytest.raises(UsageError):
                    model(*pair(2, 13, 8))
            result = model(*given)
            for made in tree_leaves(result):  # what is signed anew may name other results
                if isinstance(made, torch.Tensor) and made.requires_grad:
                    made.sum().backward(retain_graph=True)
        except UsageError:
            continue
        answers += 1
        if not trusted:
            torch.testing.assert_close(result[0], expected)
    assert answers < count


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("trusted", (False, True))
def test_lies_are_errors_or_right_answers(
    training: bytes, load: Any, trusted: bool, count: int
) -> None:
    draw, own = random.Random(0), net()
    x, named = arguments()
    expected = copy.deepcopy(own)(x, **named)["y"]
    answers = 0
    for _ in range(count):
        lie = remade(training, draw, trusted=trusted)
        try:
            result = load(lie, weights=copy.deepcopy(own))(x, **named)
        except UsageError:
            continue
        answers += 1
        if not trusted:
            torch.testing.assert_close(result["y"], expected)
    assert answers < count


@pytest.mark.parametrize("part", (slice(32), slice(0), slice(1, None)))
def test_a_value_of_another_length_is_an_error(inference: bytes, load: Any, part: slice) -> None:
    blobs = blobs_of(inference)
    blobs[f"{HELD}scale"] = blobs[f"{HELD}scale"][part]
    with pytest.raises(BadArchive):
        load(signed(blobs), weights=net())


@pytest.mark.parametrize("count", COUNTS)
def test_damaged_files_are_errors(inference: bytes, load: Any, count: int) -> None:
    draw, end = random.Random(1), len(inference)
    for _ in range(count):
        damaged = bytearray(inference)
        damaged[draw.randrange(end)] ^= 1 << draw.randrange(8)
        if draw.random() < 0.3:
            del damaged[draw.randrange(end) :]
        with pytest.raises(BadArchive):
            load(bytes(damaged), weights=net())
