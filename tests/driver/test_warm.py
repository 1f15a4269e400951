"""A start from the cache gives what AOTAutograd's wrapper gives, without AOTAutograd."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusec
from fusec.driver import backend
from fusec.driver.observers import observers_of
from fusec.options import Options
from fusec.runtime.cache.store import open_cache
from fusec.runtime.calls.convention import Convention
from tests.calls import calls_of
from tests.support import BACKEND, compare, run, values, without_compiler

pytestmark = pytest.mark.skipif(BACKEND != "fusec", reason="is about fusec's own cache")

OPTIONS = {"strict": True, "verify": False, "autotune": False}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a cache of its own."""
    monkeypatch.setitem(OPTIONS, "cache_dir", str(tmp_path))
    torch._dynamo.reset()


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="fusec", fullgraph=True, options=dict(OPTIONS))


def check_start(fn: Callable[..., Any], *inputs: Any, train: bool = False) -> None:
    """Assert that the second compile runs no AOTAutograd, and does what eager does."""
    eager = run(fn, inputs, train=train)
    exact = run(fn, inputs, train=train)
    compare(eager, run(compiled(fn), inputs, train=train), exact)
    with calls_of(backend.compile_with) as traces:
        started = compiled(fn)
        for _ in range(2):
            compare(eager, run(started, inputs, train=train), exact)
    assert not traces, "AOTAutograd runs"


@pytest.mark.parametrize("train", (False, True), ids=("inference", "training"))
def test_values_strides_and_gradients_are_eager_s(train: bool) -> None:
    def fn(x, w):
        y = F.gelu(x @ w).transpose(0, 1)
        return {"y": y, "sums": [y.sum(0), (y > 0)], "n": x.shape[0]}

    check_start(fn, values(6, 8), values(8, 4, seed=1), train=train)


def test_sizes_that_a_backward_takes_come_behind_what_is_saved() -> None:
    def fn(x, w):
        return (torch.relu(x.reshape(-1, 8) @ w) / x.shape[0]).sum()

    for rows in (3, 5, 9):
        x, w = (torch.randn(rows, 4, 8, requires_grad=True), torch.randn(8, 6, requires_grad=True))
        torch._dynamo.mark_dynamic(x, 0)
        check_start(fn, x, w, train=True)


def test_a_result_that_is_an_input_is_that_object() -> None:
    def fn(x, y):
        return x, x + y, y

    x, y = values(3, 4).requires_grad_(), values(3, 4, seed=1)
    compiled(fn)(x, y)[1].sum().backward()
    made = compiled(fn)(x, y)
    assert made[0] is x and made[2] is y and made[1].requires_grad


def test_a_view_that_is_returned_as_new_is_no_view() -> None:
    check_start(lambda x: (x * 2).view(-1), values(3, 4), train=True)


def test_results_that_share_memory_are_objects_of_their_own() -> None:
    def fn(x):
        y = torch.sin(x)
        return y.view(-1).detach(), y, y[0].detach()

    check_start(fn, values(2, 3), train=True)
    check_start(fn, values(2, 3))
    first, second, third = compiled(fn)(values(2, 3).requires_grad_())
    assert (first.requires_grad, second.requires_grad, third.requires_grad) == (False, True, False)
    with torch.no_grad():
        second.fill_(7)
    assert first.tolist() == [7] * 6 and first._version == second._version


def test_buffers_are_written_and_counted() -> None:
    def step(call: Callable[..., Any]) -> list[Any]:
        call(values(5, 8)).sum().backward()
        return [norm.running_mean.clone(), norm.num_batches_tracked.item(),
                norm.running_mean._version]  # fmt: skip

    norm, seen = nn.BatchNorm1d(8), []
    for _ in range(3):
        norm.reset_parameters()
        before = norm.running_mean._version
        mean, count, version = step(compiled(norm))
        seen.append((mean, count, version - before))
    torch.testing.assert_close(seen[2][0], seen[0][0])
    assert seen[0][1:] == seen[2][1:]


def test_dropout_has_a_seed_and_its_backward_has_the_mask() -> None:
    def fn(x):
        return F.dropout(x * 1.0, 0.5)

    for _ in range(2):
        call = compiled(fn)
        x = torch.ones(64, 64, requires_grad=True)
        y = call(x)
        y.sum().backward()
        torch.testing.assert_close(x.grad, y.detach())
        assert not torch.equal(call(x), y)


def test_autocast_is_in_the_graph() -> None:
    layer = nn.Linear(8, 8)

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    def outside(call: Callable[..., Any]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made = call(values(4, 8))
            made.float().sum().backward()
            return made

    for given in (fn, layer):
        first, second = (outside(compiled(given)) for _ in range(2))
        assert first.dtype is second.dtype is torch.bfloat16
        torch.testing.assert_close(first, second)


def test_a_backward_under_autocast_is_that_of_its_forward() -> None:
    x, w = values(8, 8), values(8, 8, seed=1)
    for _ in range(2):  # AOTAutograd's wrapper, then the cache's
        given = x.clone().requires_grad_()
        made = compiled(torch.matmul)(given, w)
        with torch.autocast("cpu", torch.bfloat16):
            made.sum().backward()
        torch.testing.assert_close(given.grad, torch.ones(8, 8) @ w.t())


def test_a_gradient_is_laid_out_as_it_was_traced() -> None:
    def fn(x):
        return torch.exp(x)

    compiled(fn)(values(4, 6).requires_grad_()).sum().backward()
    x = values(4, 6).requires_grad_()
    (compiled(fn)(x).t() * values(6, 4, seed=1)).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp() * values(6, 4, seed=1).t())


def test_a_backward_runs_again_and_a_second_derivative_is_an_error() -> None:
    def fn(x):
        return torch.sin(x) * x

    for _ in range(2):
        x = values(4, 6).requires_grad_()
        y = compiled(fn)(x).sum()
        y.backward(retain_graph=True)
        y.backward()
        torch.testing.assert_close(x.grad, 2 * (x.cos() * x + x.sin()).detach())
        (first,) = torch.autograd.grad(compiled(fn)(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            first.sum().backward()


def test_an_input_written_after_the_forward_is_noticed() -> None:
    for _ in range(2):
        x = values(4, 6).requires_grad_()
        other = values(4, 6, seed=1)
        y = compiled(lambda x, w: x * w)(x, other)
        other.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_saved_tensors_are_free_after_the_backward() -> None:
    for _ in range(2):
        x = values(4, 6).requires_grad_()
        y = compiled(lambda x: torch.sin(x))(x).sum()
        y.backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()


def test_a_gradient_that_nobody_needs_leads_nowhere() -> None:
    def fn(x, y):
        return x.detach() * 2 + y

    for _ in range(2):
        leaf = values(3, 4).requires_grad_()
        x, y = leaf * 1, values(3, 4, seed=1).requires_grad_()
        compiled(fn)(x, y).sum().backward()
        assert leaf.grad is None and y.grad is not None


def test_deterministic_algorithms_after_the_forward_are_an_error() -> None:
    for _ in range(2):
        y = compiled(lambda x: torch.sin(x))(values(3, 4).requires_grad_())
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(RuntimeError, match="deterministic"):
                y.sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)


def test_an_entry_has_the_forward_s_choice_of_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        for at_the_backward in (False, True):
            y = compiled(lambda x: torch.sin(x))(values(3, 4).requires_grad_())
            torch.use_deterministic_algorithms(at_the_backward)
            y.sum().backward()
            torch.use_deterministic_algorithms(True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_call_with_fake_tensors_goes_to_the_graph_itself() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fn(x):
        return torch.sin(x) * 2

    for _ in range(2):
        call = compiled(fn)
        call(values(3, 4))
        with FakeTensorMode() as mode:
            assert call(mode.from_tensor(values(3, 4))).shape == (3, 4)


def entries(prefix: str) -> list[str]:
    return open_cache(Options.from_compile(None, OPTIONS)).keys(prefix)


def test_a_backward_that_never_ran_leaves_no_entry() -> None:
    call = compiled(lambda x: torch.sin(x))
    y = call(values(3, 4).requires_grad_())
    assert entries("start ") == []
    y.sum().backward()
    assert len(entries("start ")) == 1


@torch.library.custom_op("fusec_test_warm::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: gradient * 2)


@pytest.mark.parametrize("own", (False, True))
@pytest.mark.parametrize("train", (False, True))
def test_once_compiled_a_graph_is_called_by_its_convention(own: bool, train: bool) -> None:
    """In training from the step after the first backward; with operations of the user's, too."""
    call = compiled(lambda x: (twice(x) if own else x * 2).sin())
    x = values(3, 4).requires_grad_(train)
    with calls_of(Convention._around) as bound:
        for _ in range(3):
            y = call(x)
            torch.testing.assert_close(y, (x * 2).sin())
            if train:
                x.grad = None
                y.backward(y.detach())
                torch.testing.assert_close(x.grad, 2 * (x * 2).cos().detach() * y.detach())
                call(x)
    (convention,) = bound
    with calls_of(convention.result) as run_by:
        call(x)
    assert len(run_by) == 1


@pytest.mark.parametrize("broken", ["no convention", "no such graph", "another form"])
def test_an_entry_that_is_not_whole_goes_the_long_way(broken: str) -> None:
    def fn(x):
        return torch.sin(x) + 1

    x = values(3, 4)
    compiled(fn)(x)
    cache = open_cache(Options.from_compile(None, OPTIONS))
    (key,) = entries("start ")
    blobs = cache.load(key)
    assert blobs is not None
    if broken == "no convention":
        blobs["convention.json"] = b'{"outputs": [-1]}'
    elif broken == "another form":
        blobs["parts.json"] = b"[]"
    else:
        rows = json.loads(blobs["parts.json"])
        rows["inference"]["key"] = "0" * 64
        blobs["parts.json"] = json.dumps(rows).encode()
    cache.store(key, blobs)
    torch.testing.assert_close(compiled(fn)(x), fn(x))
    assert cache.load(key) != blobs, "the long way writes it anew"


@pytest.mark.parametrize("option", ({"freeze": True}, {"cudagraphs": True}), ids=str)
def test_what_needs_its_graphs_leaves_no_entry(
    option: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in option.items():
        monkeypatch.setitem(OPTIONS, name, value)
    with torch.no_grad():
        compiled(lambda x: x + 1)(values(3))
    assert entries("start ") == []


def test_what_somebody_looks_at_goes_the_long_way_and_leaves_an_entry() -> None:
    def fn(x):
        return torch.sin(x) + 1

    for _ in range(2):
        with fusec.watch() as seen:
            compiled(fn)(values(3))
        assert "graphs: 1" in str(seen)
    assert len(entries("start ")) == 1


def test_other_options_have_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x):
        return torch.sin(x) + 1

    compiled(fn)(values(3))
    monkeypatch.setitem(OPTIONS, "fusion", False)
    compiled(fn)(values(3))
    assert len(entries("start ")) == 2


def test_without_a_cache_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONS, "cache", False)
    compiled(lambda x: x + 1)(values(3))
    monkeypatch.setitem(OPTIONS, "cache", True)
    assert entries("") == []


def test_who_listens_gets_the_long_way(caplog: pytest.LogCaptureFixture) -> None:
    options = Options.from_compile(None, OPTIONS)
    assert not observers_of(options)
    with fusec.watch():
        assert observers_of(options)
    with caplog.at_level("INFO", logger="fusec.compile"):
        assert observers_of(options)


@pytest.mark.parametrize("option", [("fallback_random", True), ("memory_budget", 0.5)], ids=str)
def test_what_decides_how_a_graph_is_traced_or_cut_has_a_start_of_its_own(
    option: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fn(x):
        return F.dropout(x * 2, 0.5)

    compiled(fn)(values(3, 4))
    monkeypatch.setitem(OPTIONS, *option)
    with calls_of(backend.compile_with) as traces:
        compiled(fn)(values(3, 4))
    assert traces


def test_without_a_compiler_kernels_of_the_last_one_are_used() -> None:
    def fn(x):
        return torch.sin(x) + 1

    x = values(3, 4)
    compiled(fn)(x)
    with without_compiler(), calls_of(backend.compile_with) as traces:
        torch.testing.assert_close(compiled(fn)(x), fn(x))
    assert not traces


SCRIPT = """
import sys, torch
layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
torch.compile(layer, backend=sys.argv[1])(torch.ones(4, 8)).sum().backward()
heavy = ("torch._inductor", "triton", "sympy", "torch._functorch._aot_autograd")
print("\\n".join(name for name in sys.modules if name.startswith(heavy)))
"""


@pytest.mark.slow
def test_a_second_process_imports_no_more_than_dynamo_does(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path))

    def modules(backend: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, backend], capture_output=True, text=True, check=True
        )
        return set(done.stdout.split())

    cold, start, dynamo = modules("fusec"), modules("fusec"), modules("eager")
    assert start - dynamo == set() and cold - dynamo != set()


def test_threads_may_each_compile_the_backward() -> None:
    """AOTAutograd compiles it when it is first called, without a lock."""

    def fn(x, w):
        return F.gelu(x @ w).square()

    ready = threading.Barrier(4, timeout=60)
    call = compiled(fn)
    given = [(values(6, 8, seed=seed), values(8, 4)) for seed in range(4)]
    for v in itertools.chain.from_iterable(given):
        v.requires_grad_()
    call(*given[0])

    def gradients(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        y = call(*inputs)
        ready.wait()
        return torch.autograd.grad(y.sum(), inputs)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(gradients, given))
    for inputs, made in zip(given, found, strict=True):
        torch.testing.assert_close(made, torch.autograd.grad(fn(*inputs).sum(), inputs))
    (key,) = entries("start")
    stored = open_cache(Options.from_compile(None, OPTIONS)).load(key)
    assert stored is not None and {*json.loads(stored["parts.json"])} == {"forward", "backward"}
