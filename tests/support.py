"""Compare a compiled function with eager: values, dtypes, strides, gradients, mutation, aliasing.

`check` runs a function three times on equal inputs, eagerly, eagerly in fp64, and compiled, and
asserts what a user of `torch.compile` relies on:

* floating values: the rule of torch's own benchmark suite (`torch._dynamo.utils.same`), which is
  allclose, or a root-mean-square error against fp64 of at most twice eager's (three times for half
  types and small tensors). Tensors whose largest value is below one are scaled up first, so that
  small gradients are held to the same relative standard.
* NaN and infinities exactly where eager has them; integers and booleans exactly;
* shape, dtype, strides (of extents above one), device and requires_grad of each output;
* the whole storage of each input after the call, so that stray writes are seen;
* an output shares memory with an input if and only if it does in eager.

The compiled function is called twice and the first call's outputs are compared after the second
call, so that a buffer handed out twice is seen. What an interpreter runs is called once: wrappers
are those of compiled kernels, and kernels of a GPU take the interpreter most of a test's time.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch._dynamo.utils import same
from torch.utils import _pytree as pytree

from bench.workload import backend_of
from fusec.codegen import targets
from fusec.frontend.capture import capture
from fusec.runtime.kernels import cpp_kernel, processor
from fusec.runtime.race import agreement
from fusec.torch_interior import SCANS_HAVE_GRADIENTS
from tests import quick_build
from tests.calls import calls_of
from tests.frontend.tracing import Captured, CapturedAhead

BACKEND = os.environ.get("TEST_BACKEND", "fusec")

CAPTURED = "captured"
"""A backend that runs what the frontend captured by the NumPy interpreter; see `check_captured`."""
AHEAD = "captured ahead"
"""The same without Dynamo, for functions of static sizes that read no tensor but their inputs."""

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTS = (torch.int64, torch.int32, torch.uint8)

# The absolute and relative tolerance handed to `same`: that of a race, about one rounding step of
# half types; a tenth of it for the others, which tests sum over fewer terms than models do.
TOLERANCE = {
    dtype: tolerance if dtype in (torch.float16, torch.bfloat16) else tolerance / 10
    for dtype, tolerance in agreement.TOLERANCE.items()
}

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
TRITON = tuple(int(part) for part in version("triton").split(".")[:2])
since_2_13 = pytest.mark.skipif(
    TORCH < (2, 13), reason="torch 2.11 does otherwise, aot_eager too; see docs/numerics.md"
)
trains_scans = pytest.mark.skipif(
    not SCANS_HAVE_GRADIENTS, reason="torch 2.11 differentiates no scan: loops stay in training"
)
before_2_15 = pytest.mark.skipif(TORCH >= (2, 15), reason="torch 2.15 does otherwise, in eager")

FUSED = "fusec_fused"
"""fusec with every product that has something to fuse with in a kernel of its own."""
OPTIONS = {
    "fusec": {"strict": True},
    FUSED: {"strict": True, "verify": True, "race": "fused"},
}


@dataclass(frozen=True)
class Run:
    """What one call left behind: named outputs, named input storages, named gradients."""

    outputs: list[tuple[str, Any]]
    inputs: list[tuple[str, torch.Tensor]]
    gradients: list[tuple[str, torch.Tensor | None]]
    aliases: list[tuple[str, str]]


def compile_with(
    fn: Callable,
    backend: str = BACKEND,
    *,
    dynamic: bool | None = False,
    fullgraph: bool = True,
    cache: bool = True,
) -> Callable:
    """Compile under the backend; fusec in strict mode, where a fault inside it is an error.

    Args:
        cache: whether fusec may take what an earlier test has compiled.
    """
    if backend == AHEAD and not dynamic:
        return CapturedAhead(fn)
    if backend in (CAPTURED, AHEAD):
        return Captured(fn, dynamic=bool(dynamic))
    name, options = backend, None  # an option given here would hide what a variable says
    if backend in OPTIONS:
        name, options = "fusec", OPTIONS[backend] if cache else {**OPTIONS[backend], "cache": False}
    return torch.compile(
        fn, backend=backend_of(name), dynamic=dynamic, fullgraph=fullgraph, options=options
    )


def check(
    fn: Callable,
    *inputs: Any,
    train: bool = False,
    dynamic: bool = False,
    backend: str = BACKEND,
    fullgraph: bool = True,
    more: Sequence[tuple[Any, ...]] = (),
    exact: Callable | None = None,
    tol: float | None = None,
    left: Collection[str] | None = None,
) -> None:
    """Assert that the compiled function does what eager does; see the module docstring.

    Args:
        fn: a function or module; a module is copied for each run, so its buffers may change.
        more: further inputs, of other sizes say, for the same compiled function.
        exact: what the run in fp64 calls instead of ``fn``, if that names narrower types itself.
        train: floating inputs require gradients, which are compared too.
        tol: replaces the tolerance of each dtype, for functions that cancel by construction.
        left: the operations that may be left to eager kernels; all others must have a lowering.
    """
    torch._dynamo.reset()
    eager = run(_fresh(fn), inputs, train=train)
    exact = _fresh(fn if exact is None else exact, torch.float64)
    reference = run(_fresh(exact), inputs, train=train, dtype=torch.float64)
    module = _fresh(fn)
    compiled = compile_with(
        module, backend, dynamic=dynamic, fullgraph=fullgraph, cache=left is None
    )
    with calls_of(capture) as captures:
        runs = [run(compiled, inputs, train=train, state=module)]
    if left is not None and BACKEND == "fusec":
        assert captures, "nothing was captured"
        graphs = [graph for graph, _ in (call.result for call in captures)]
        calls = {call.target.removeprefix("aten.") for graph in graphs for call in graph.externs}
        assert calls <= {*left}, f"left to eager kernels: {sorted(calls.difference(left))}"
    if not str(backend).startswith((CAPTURED, "triton_")):
        runs.append(run(compiled, inputs, train=train, state=_reset(module, fn)))
        _check_views(eager, runs[0])
    for found in runs:
        compare(eager, found, reference, tol=tol)
    for given in more:
        eager = run(_fresh(fn), given, train=train)
        reference = run(_fresh(exact), given, train=train, dtype=torch.float64)
        found = run(compiled, given, train=train, state=_reset(module, fn))
        compare(eager, found, reference, tol=tol)


def _check_views(eager: Run, compiled: Run) -> None:
    """Assert that no output with memory of its own is a view: autograd may refuse to write one."""
    made = [b for _, b in compiled.outputs if isinstance(b, torch.Tensor)]
    owned = Counter(b.untyped_storage().data_ptr() for b in made if b.layout is torch.strided)
    for (name, a), (_, b) in zip(eager.outputs, compiled.outputs, strict=True):
        if isinstance(b, torch.Tensor) and b.layout is torch.strided and not a._is_view():
            alone = owned[b.untyped_storage().data_ptr()] == 1
            assert not (alone and b._is_view()), f"output {name} is a view"


def check_all(cases: Mapping[str, tuple[Any, ...]], **how: Any) -> None:
    """Assert of many functions, compiled as one, what `check` asserts; a failure names the case.

    A compile costs more than a small function in it. Each case has inputs of its own, so cases stay
    apart but for launches that they share. If they fail together, each is checked alone.

    Args:
        cases: by name, a function, which is no module, and its inputs.
        how: what `check` takes, the same for all.
    """
    functions = {name: fn for name, (fn, *_) in cases.items()}
    inputs = [tuple(given) for _, *given in cases.values()]

    def every(*inputs: tuple[Any, ...]) -> dict[str, Any]:
        named = zip(functions.items(), inputs, strict=True)
        return {name: fn(*given) for (name, fn), given in named}

    try:
        check(every, *inputs, **how)
    except Exception:
        for name, (fn, *given) in cases.items():
            try:
                check(fn, *given, **how)
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error
        raise  # each is right alone


class Cases:
    """A decorator for what returns a case of `check_all`, a function and its inputs."""

    def __init__(self) -> None:
        self.makers: dict[str, Callable[[], tuple[Any, ...]]] = {}

    def __call__(self, make: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
        assert make.__name__ not in self.makers, make.__name__
        self.makers[make.__name__] = make
        return make

    def each(self, given: Iterable[Any]) -> Callable[[Callable], Callable]:
        """Decorate what returns a case for each of some values."""

        def add(make: Callable) -> Callable:
            for value in given:
                self.makers[f"{make.__name__}[{value}]"] = functools.partial(make, value)
            return make

        return add

    def check(self, **how: Any) -> None:
        """Check all that were decorated, compiled as one."""
        check_all({name: make() for name, make in self.makers.items()}, **how)


def check_captured(fn: Callable, *inputs: Any, **how: Any) -> None:
    """Assert that what the frontend makes of a function means what eager does; see `check`.

    For what the frontend decides: values, special values, types, shapes and strides of operations
    and of their gradients. It runs in the NumPy interpreter, without passes, printer and compiler,
    so each family of operations has a test by `check` beside it.
    """
    check(fn, *inputs, backend=CAPTURED if BACKEND == "fusec" else BACKEND, **how)


def _check_ahead(fn: Callable, *inputs: Any, **how: Any) -> None:
    check(fn, *inputs, backend=AHEAD if BACKEND == "fusec" else BACKEND, **how)


def _in_both(mark: pytest.MarkDecorator) -> pytest.MarkDecorator:
    runs = (
        pytest.param(_check_ahead, id="captured"),
        pytest.param(check, id="compiled", marks=mark),
    )
    return pytest.mark.parametrize("check", runs)


in_both = _in_both(pytest.mark.first)
"""A sweep over types, values, shapes or layouts: all cases as captured, and the first one compiled;
with --slow all are compiled."""

as_captured = _in_both(pytest.mark.slow)
"""The same where the tests beside it compile the family: compiled with --slow alone."""


TRAINED = pytest.mark.parametrize(
    "train",
    (pytest.param(False, id="forward", marks=pytest.mark.slow), pytest.param(True, id="training")),
)
"""A test whose training step compares the results of its forward, too: alone with --slow."""


def compare(eager: Run, compiled: Run, reference: Run, tol: float | None = None) -> None:
    """Assert that two runs agree, given an fp64 run of the same function."""
    names = [name for name, _ in eager.outputs]
    assert names == [name for name, _ in compiled.outputs], "outputs have another structure"
    for (name, a), (_, b), (_, r) in zip(
        eager.outputs, compiled.outputs, reference.outputs, strict=True
    ):
        assert_agree(a, b, r, f"output {name}", tol=tol, strides=True)
    for (name, a), (_, b), (_, r) in zip(
        eager.inputs, compiled.inputs, reference.inputs, strict=True
    ):
        assert_agree(a, b, r, f"input {name} after the call", tol=tol)
    for (name, a), (_, b), (_, r) in zip(
        eager.gradients, compiled.gradients, reference.gradients, strict=True
    ):
        assert_agree(a, b, r, f"gradient of {name}", tol=tol)
    assert eager.aliases == compiled.aliases, "outputs share memory with other inputs than eager's"


def assert_agree(
    eager: Any,
    compiled: Any,
    reference: Any,
    name: str,
    *,
    tol: float | None = None,
    strides: bool = False,
) -> None:
    """Assert that one value agrees; anything but a tensor has to be equal."""
    if not isinstance(eager, torch.Tensor):
        assert type(eager) is type(compiled) and eager == compiled, (
            f"{name}: {compiled!r} instead of {eager!r}"
        )
        return
    assert isinstance(compiled, torch.Tensor), f"{name}: {type(compiled)} instead of a tensor"
    for attribute in ("shape", "dtype", "device", "requires_grad"):
        a, b = getattr(eager, attribute), getattr(compiled, attribute)
        assert a == b, f"{name}: {attribute} is {b} instead of {a}"
    if strides:
        a, b = significant_strides(eager), significant_strides(compiled)
        assert a == b, f"{name}: strides are {b} instead of {a} (shape {tuple(eager.shape)})"
        bits = [(t.is_conj(), t.is_neg()) for t in (eager, compiled)]
        assert bits[0] == bits[1], f"{name}: conjugate and negative bit are {bits[1]}"
    assert_values(*map(real, (eager, compiled, reference)), name, tol)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor, without a gradient: a complex one has an axis of the parts."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def assert_values(
    eager: torch.Tensor,
    compiled: torch.Tensor,
    reference: torch.Tensor,
    name: str,
    tol: float | None = None,
) -> None:
    """Assert equal integers, equal places of NaN and infinities, and close floating values."""
    if not eager.is_floating_point():
        wrong = eager != compiled
        assert not wrong.any(), _worst(name, eager, compiled, wrong)
        return
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = kind(eager) != kind(compiled)
        assert not wrong.any(), _worst(f"{name} ({kind.__name__})", eager, compiled, wrong)
    reference = reference.to(torch.float64)
    finite = torch.isfinite(eager) & torch.isfinite(reference)
    zero = torch.zeros((), dtype=eager.dtype, device=eager.device)
    a, b = (torch.where(finite, t, zero) for t in (eager, compiled))
    r = torch.where(finite, reference, zero.double())
    scale = _scale(r)
    tol = TOLERANCE[eager.dtype] if tol is None else tol
    a, b, r = a * scale, b * scale, r * scale
    ok = same(a, b, r, tol=tol, equal_nan=True, log_error=_silent)
    if ok and a.numel():
        # One wrong element drowns in the mean of a large tensor: bound the largest error as well.
        worst = (b.double() - r).abs().max()
        bound = 8 * (a.double() - r).abs().max() + 8 * tol * max(1.0, float(r.abs().max()))
        ok = bool(worst <= bound)
    if not ok:
        distance = (b.double() - r).abs()
        raise AssertionError(_worst(name, eager, compiled, distance == distance.max()))


def significant_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the extents above one; nothing for a tensor without elements."""
    if tensor.numel() == 0:
        return ()
    return tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)


def _scale(reference: torch.Tensor) -> float:
    """A power of two that brings the largest value into [1, 2), or one where it is larger."""
    largest = float(reference.abs().max()) if reference.numel() else 1.0
    if largest >= 1.0 or largest < 2.0**-40:
        return 1.0
    return 2.0 ** -int(torch.tensor(largest, dtype=torch.float64).log2().floor())


def _worst(name: str, eager: torch.Tensor, compiled: torch.Tensor, wrong: torch.Tensor) -> str:
    place = tuple(int(i) for i in wrong.nonzero()[0])
    return (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} differ most, first at {place}: "
        f"compiled {compiled[place].item()!r}, eager {eager[place].item()!r} "
        f"({eager.dtype}, shape {tuple(eager.shape)})"
    )


def _silent(*_: Any) -> None:
    """`same` logs each miss; the assertion says more."""


# ---------------------------------------------------------------------------------------------
# Running


def _fresh(fn: Callable, dtype: torch.dtype | None = None) -> Callable:
    if not isinstance(fn, torch.nn.Module):
        return fn
    module = copy.deepcopy(fn)
    return module if dtype is None else module.to(dtype)


def _reset(module: Callable, fn: Callable) -> Callable:
    """Give a module the state it had before its first call."""
    if isinstance(module, torch.nn.Module):
        module.load_state_dict(fn.state_dict())
        module.zero_grad(set_to_none=True)
    return module


def run(
    call: Callable,
    inputs: tuple[Any, ...],
    *,
    train: bool,
    dtype: torch.dtype | None = None,
    state: Callable | None = None,
) -> Run:
    """Call on private copies of the inputs; `state` is the module behind a compiled one."""
    state = call if state is None else state
    leaves, spec = pytree.tree_flatten(copy_inputs(inputs, dtype=dtype, train=train))
    args = pytree.tree_unflatten(leaves, spec)
    tensors = [(str(i), leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    with torch.set_grad_enabled(train):
        outputs = named_leaves(call(*args))
    parameters: list[tuple[str, torch.Tensor]] = []
    buffers: list[tuple[str, torch.Tensor]] = []
    if isinstance(state, torch.nn.Module):
        parameters, buffers = list(state.named_parameters()), list(state.named_buffers())
    gradients = _gradients(outputs, tensors + parameters) if train else []
    return Run(
        outputs=outputs,
        inputs=[(n, whole_storage(t)) for n, t in tensors]
        + [(n, b.detach().clone()) for n, b in buffers],
        gradients=gradients,
        aliases=_aliases(outputs, tensors + parameters + buffers),
    )


def copy_inputs(inputs: Any, *, dtype: torch.dtype | None = None, train: bool = False) -> Any:
    """Copy every tensor with its strides, offset and the memory it shares with other inputs.

    Args:
        dtype: what floating tensors become, and the parts of complex ones; None keeps each dtype.
        train: floating and complex copies require gradients.
    """
    storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def copy_one(tensor: torch.Tensor) -> torch.Tensor:
        floating = tensor.is_floating_point() or tensor.is_complex()
        key = (tensor.untyped_storage().data_ptr(), tensor.dtype)
        if key not in storages or key[0] == 0:
            flat = whole_storage(tensor)
            wanted = dtype.to_complex() if dtype and tensor.is_complex() else dtype
            storages[key] = flat.to(wanted) if dtype and floating else flat
        storage = storages[key].untyped_storage()
        result = storages[key].new_empty(0)  # not a view: most inputs of a model are none
        result.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return result.requires_grad_(train and floating)

    return pytree.tree_map_only(torch.Tensor, copy_one, inputs)


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A flat copy of everything in the memory a tensor looks at."""
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(tensor.detach().untyped_storage()).clone()


def named_leaves(value: Any) -> list[tuple[str, Any]]:
    """Flatten an output into pairs of a readable path and a leaf."""
    leaves, _ = pytree.tree_flatten_with_path(value)
    return [(pytree.keystr(path) or "result", leaf) for path, leaf in leaves]


def _gradients(
    outputs: list[tuple[str, Any]], wanted: list[tuple[str, torch.Tensor]]
) -> list[tuple[str, torch.Tensor | None]]:
    """Backpropagate the same random cotangents in every run."""
    roots = [out for _, out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
    leaves = [(name, t) for name, t in wanted if t.requires_grad]
    assert roots, "no output requires a gradient: the test would compare nothing"
    generator = torch.Generator().manual_seed(7)
    cotangents = []
    for root in roots:
        kind = torch.complex64 if root.is_complex() else torch.float32
        values = torch.randn(root.shape, generator=generator, dtype=kind)
        rounded = real(values).to(torch.bfloat16).float()  # exact in every floating dtype
        rounded = torch.view_as_complex(rounded) if root.is_complex() else rounded
        cotangents.append(rounded.to(root.dtype).to(root.device))
    found = torch.autograd.grad(roots, [t for _, t in leaves], cotangents, allow_unused=True)
    return [(name, gradient) for (name, _), gradient in zip(leaves, found, strict=True)]


def _aliases(
    outputs: list[tuple[str, Any]], inputs: list[tuple[str, torch.Tensor]]
) -> list[tuple[str, str]]:
    """Pairs of an output and the first input whose memory it shares."""
    owners: dict[int, str] = {}
    for name, tensor in inputs:
        owners.setdefault(tensor.untyped_storage().data_ptr(), name)
    owners.pop(0, None)
    pairs = []
    for name, out in outputs:
        if isinstance(out, torch.Tensor):
            owner = owners.get(out.untyped_storage().data_ptr())
            if owner is not None:
                pairs.append((name, owner))
    return pairs


# ---------------------------------------------------------------------------------------------
# Inputs


def values(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    low: float | None = None,
    high: float | None = None,
) -> torch.Tensor:
    """Reproducible random values: normal, or uniform in [low, high); integers in [-9, 9]."""
    generator = torch.Generator().manual_seed(1 + seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_complex:
        parts = [values(*shape, seed=2 * seed + k, low=low, high=high) for k in (0, 1)]
        return torch.complex(*parts).to(dtype)
    if not dtype.is_floating_point:
        start = 0 if dtype == torch.uint8 else -9
        bounds = (start if low is None else int(low), 10 if high is None else int(high))
        return torch.randint(*bounds, shape, generator=generator).to(dtype)
    if low is None or high is None:
        return torch.randn(shape, generator=generator).to(dtype)
    return (torch.rand(shape, generator=generator) * (high - low) + low).to(dtype)


LAYOUTS = ("contiguous", "transposed", "expanded", "stepped", "offset", "padded_rows")


def with_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values (rows repeat when expanded) behind other strides and offsets."""
    shape = tuple(tensor.shape)
    match layout:
        case "contiguous":
            return tensor.contiguous()
        case "transposed":
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        case "expanded":
            return tensor[:1].contiguous().expand(shape)
        case "stepped":
            return tensor.new_zeros(*shape[:-1], 2 * shape[-1])[..., ::2].copy_(tensor)
        case "offset":
            flat = tensor.new_zeros(tensor.numel() + 3)
            return flat[3:].view(shape).copy_(tensor)
        case "padded_rows":
            return tensor.new_zeros(*shape[:-1], shape[-1] + 5)[..., : shape[-1]].copy_(tensor)
        case "channels_last":
            return tensor.contiguous(memory_format=torch.channels_last)
        case _:
            raise ValueError(layout)


def tune(monkeypatch: pytest.MonkeyPatch, group: str, **sizes: float) -> None:
    """Compile from here on by other sizes of a group of a machine's: "fusion", "races"."""
    for name, row in targets.TARGETS.items():
        changed = dataclasses.replace(getattr(row.machine, group), **sizes)
        machine = dataclasses.replace(row.machine, **{group: changed})
        monkeypatch.setitem(targets.TARGETS, name, dataclasses.replace(row, machine=machine))


@contextmanager
def on_processor(features: str) -> Iterator[None]:
    """Run as on a processor with other features, whatever kernels are built for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "cpu_features", lambda: features)
        cpp_kernel.vector_width.cache_clear()
        try:
            yield
        finally:
            cpp_kernel.vector_width.cache_clear()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with a number of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Run as on a machine without a C++ compiler: none is on its path."""
    quick_build.prepare()
    known = (cpp_kernel.find_compiler, cpp_kernel.compiler_identity)
    with pytest.MonkeyPatch.context() as patch:
        for found in known:
            found.cache_clear()
        patch.setenv("PATH", "")
        yield
    for found in known:
        found.cache_clear()


def externs(fn: Callable, *inputs: Any, train: bool = False) -> list[tuple[str, str]]:
    """What fusec left to eager kernels, as (operation, reason), from `fusec.explain`."""
    import fusec  # the other backends' runs do not need it

    report = fusec.explain(fn, *inputs, train=train)
    return [(extern.op, extern.reason) for graph in report.graphs for extern in graph.externs]


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Run with torch's generators seeded and restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
