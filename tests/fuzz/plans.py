"""Every plan that a race may choose for a random product, in the emulator, beside fp64.

What does not build, or computes something else, may not be offered.

A program is compiled once. Where it launches a kernel, each other plan of that kernel runs after
the first one, on the same memory, once for each PTX. What a plan stores is compared with eager's
kernels as the first one's is (``fusec/tools/verify/kernels.py``); what these say nothing of, as the
parts of a sum that is split, is compared with what the first plan stores.

A program is drawn by a seed, so that a seed stands for its shapes with all their plans. Shapes have
a few hundred elements along an axis, which is several tiles with a ragged one, and the machine has
two multiprocessors, so that programs with roles walk over several tiles.

Worked example, the part of a corpus that is kept in bench/results::

    python -m tests.fuzz --parts attention_plans_sm_90 --seeds 40 --resume --corpus PLANS.jsonl
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fusec.codegen.targets import Target, find_target
from fusec.driver.build import triton_source
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import Compiled, flat_kernels, generate
from fusec.driver.stages import offered_plans
from fusec.errors import BuildError, WrongKernel
from fusec.ir.graph import Kernel
from fusec.options import Options
from fusec.passes.schedule.plan import print_plan
from fusec.runtime.calls import executable
from fusec.runtime.calls.outside import of_graph
from fusec.runtime.calls.ranges import Ranges
from fusec.runtime.kernels.triton_kernel import TritonSource
from fusec.tools.emulator.faults import EmulationError
from fusec.tools.emulator.launch import Compiled as EmulatedCode
from fusec.tools.emulator.launch import EmulatedKernel, launch, span
from fusec.tools.report.comparison import compare
from fusec.tools.report.emulation import Emulator
from fusec.tools.verify.kernels import Verification
from tests.ops.test_block_scaled_products import (
    E4M3,
    E8M0,
    in_tiles,
    in_tiles_of_groups,
    powers,
    scaled,
)
from tests.support import seeded
from tests.tools.emulator.programs import row
from tests.tools.emulator.recorded import launched

TARGETS = "sm_90", "sm_100", "sm_120"
APART = 2**-5
"""How far two plans' elements may be apart, of their own and of the tensor's magnitude."""
STEPS_SPOILT = 20_000_000
"""Instructions of a launch with other bytes in one tensor, which may be the count of a loop."""


@dataclass(frozen=True, slots=True)
class Case:
    """A function, its inputs in each of some calls, and whether it is trained.

    Attributes:
        exact: returns its results in fp64, where eager has none on CPUs.
        machine: what the machine has besides two multiprocessors.
    """

    fn: Callable[..., Any]
    calls: list[list[Tensor]]
    train: bool = False
    exact: Callable[..., Tensor] | None = None
    machine: Mapping[str, float] = field(default_factory=dict)


# -- each plan of a kernel -------------------------------------------------------------------------


def further_plans(
    compiled: Compiled, context: CompileContext
) -> dict[str, dict[str, TritonSource]]:
    """Return each kernel by its further plans: kernel -> the printed plan -> what it makes."""
    context = replace(context, options=replace(context.options, verify=False))
    kernels = [step for step in compiled.schedule.steps if isinstance(step, Kernel)]
    flat = flat_kernels(kernels, context)
    counts = {name: len(offered_plans(kernel, context)) for name, kernel in flat.items()}
    found: dict[str, dict[str, TritonSource]] = {name: {} for name in counts}
    for number in range(1, max(counts.values(), default=0)):
        made = generate(compiled.schedule.map_kernels(partial(by_number, number)), context)
        for name in (name for name, count in counts.items() if number < count):
            plan = f"{number}: {print_plan(name, made.plans[name])}"
            found[name][plan] = triton_source(made, made.code[name])
    return found


def by_number(number: int, kernel: Kernel) -> tuple[Kernel]:
    """Return a kernel that is planned by the n-th of its plans, as the step that it is."""
    return (replace(kernel, configuration=number),)


Offer: TypeAlias = Callable[[Compiled, CompileContext], Mapping[str, Mapping[str, TritonSource]]]


# -- a case ----------------------------------------------------------------------------------------


def check(case: Case, seed: int, target: str, offer: Offer = further_plans) -> int:
    """Emulate a case with each plan of its kernels; return how many kernels that were.

    Args:
        offer: returns the further plans of each kernel of a graph.
    Raises:
        AssertionError: for a plan that does not build, or that is wrong.
    """
    torch._dynamo.reset()
    options = Options.from_compile(None, {"strict": True, "verify": True, "race": "fused"})
    run = Sweep(two_multiprocessors(target, **case.machine), options, seed, offer=offer)
    if case.exact is None:
        found = compare(case.fn, *case.calls, train=case.train, backend=run.backend)
        wrong = [f"{result.name}: {result.problem}" for result in found.faults]
    else:
        wrong = []
        compiled = torch.compile(case.fn, backend=run.backend, dynamic=False)
        for call in case.calls:
            said = unlike(compiled(*call), case.exact(*call))
            wrong += [f"the result: {said}"] if said else []
    wrong += [said for kernel in run.swept for said in kernel.unlike.values()]
    assert not wrong, "\n".join([str([tuple(x.shape) for x in case.calls[0]]), *wrong])
    assert run.swept, "no kernel has been launched"
    return sum(kernel.count for kernel in run.swept)


def two_multiprocessors(target: str, **machine: float) -> Target:
    """Return a target on which programs with roles take several tiles each."""
    known = find_target(target)
    return replace(known, machine=replace(known.machine, units=2, **machine))


@dataclass(slots=True)
class Sweep(Emulator):
    """An emulator that runs each launch by each plan of its kernel."""

    offer: Offer = field(kw_only=True)
    swept: list[SweptKernel] = field(default_factory=list)

    def _bound(
        self, graph: fx.GraphModule, name: str, compiled: Compiled, kernels: Mapping[str, Any]
    ) -> Callable[[list[Any]], Any]:
        others = self.offer(compiled, self.context(name))
        swept = {
            kernel: SweptKernel(
                f"{name} {kernel}",
                one,
                {
                    plan: EmulatedKernel(source, self.seed, self.target.name)
                    for plan, source in others.get(kernel, {}).items()
                },
                self.seed,
            )
            for kernel, one in kernels.items()
        }
        self.swept += swept.values()
        verification = Verification(graph, name, strict=True)

        def stored(kernel: str | None, held: Sequence[Any], tensors: Sequence[Tensor]) -> None:
            if kernel is not None:
                swept[kernel].check(verification, kernel, held, tensors)
            verification.stored(kernel, held, tensors)

        ranges = Ranges(name, compiled.statements(), dict)
        hooks = replace(verification.hooks(), stored=stored)
        cpu = torch.device("cpu")
        return executable.bind(compiled.wrapper, swept, of_graph(graph), cpu, ranges, [hooks])


@dataclass(slots=True)
class SweptKernel:
    """A kernel that is launched by its first plan, and then by each other one on the same memory.

    Attributes:
        first: the kernel by its first plan, which also has its name and faults.
        unlike: what a plan stores otherwise than the first: launch, plan and address -> how.
        count: kernels of unlike PTX that have run.
        memory, results: of the last launch: the bytes of its tensors, and by plan their contents
            after it; ``begun`` and ``made`` before it, and after the first plan.
    """

    name: str
    first: Any
    others: Mapping[str, EmulatedKernel]
    seed: int
    launches: int = 0
    unlike: dict[tuple[int, str, int], str] = field(default_factory=dict)
    ptx: set[str] = field(default_factory=set)
    memory: list[Tensor] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)
    results: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.ptx)

    def __call__(self, *args: Any) -> None:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        self.memory, self.results = [bytes_of(tensor) for tensor in tensors], {}
        self.launches += 1  # memory of one launch may be another's in the next
        begun = copies(self.memory)
        self.first(*args)
        self.made = copies(self.memory)
        if not self.others:
            self.ptx.add("")
            return
        begun = self.without_results(args, begun)
        seen = {instructions_of(launched(self.first.kernel, args).compiled)}
        for plan, kernel in self.others.items():
            try:
                one = launched(kernel, args)
                text = instructions_of(one.compiled)
                if text in seen:
                    continue
                seen.add(text)
                fill(self.memory, begun)
                launch(one.compiled.code, one.grid, one.compiled.arguments(args), self.seed)
            except (EmulationError, BuildError) as error:
                raise AssertionError(f"{self.name}, plan {plan}\n{error}") from error
            self.results[plan] = copies(self.memory)
            for tensor, *both in zip(tensors, self.results[plan], self.made, strict=True):
                if torch.equal(*both):
                    continue
                if said := unlike(*(contents.view(tensor.dtype) for contents in both)):
                    place = self.launches, plan, tensor.data_ptr()
                    self.unlike[place] = f"{self.name}, plan {plan}\n{said}"
        fill(self.memory, self.made)
        self.ptx |= seen

    def without_results(self, args: Sequence[Any], begun: Sequence[Tensor]) -> list[Tensor]:
        """Return the memory before a launch with other bytes where results are stored unread.

        The allocator may hand out the results of an equal launch, whole or but for the bytes where
        it keeps its lists: a plan that does not store all of its results would be right by chance.
        """
        one, found = launched(self.first.kernel, args), copies(begun)
        for position, stored in enumerate(self.made):
            fill(self.memory, begun)
            spoilt = self.memory[position].copy_(stored).bitwise_not_().clone()
            with suppress(EmulationError):
                values = one.compiled.arguments(args)
                launch(one.compiled.code, one.grid, values, self.seed, limit=STEPS_SPOILT)
                results = copies(self.memory)
                result = results[position]
                results[position] = torch.where(result == spoilt, stored, result)
                if all(map(torch.equal, results, self.made)):
                    found[position] = torch.where(result == stored, spoilt, begun[position])
        return found

    def check(
        self,
        verification: Verification,
        kernel: str,
        held: Sequence[Any],
        tensors: Sequence[Tensor],
    ) -> None:
        """Compare what each plan has stored with eager's kernels, which have the last word."""
        for plan, found in self.results.items():
            fill(self.memory, found)
            before = verification.tally.left_out
            try:
                verification.compare(kernel, held, tensors)
            except WrongKernel as error:
                raise AssertionError(f"{self.name}, plan {plan}\n{error}") from error
            if verification.tally.left_out == before:
                for tensor in tensors:
                    self.unlike.pop((self.launches, plan, tensor.data_ptr()), None)
        fill(self.memory, self.made)


def instructions_of(compiled: EmulatedCode) -> str:
    """Return all by which a launch of a kernel differs from another's: no names, no lines."""
    code, *_ = compiled.code.ptx.partition("\t.section")
    left_out = (".file", ".loc", "//")
    lines = (s for line in code.splitlines() if not (s := line.lstrip()).startswith(left_out))
    launch = f"{compiled.code.shared_bytes} {compiled.kernel.grid} {compiled.tiles}"
    return "\n".join((launch, *lines))


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory from a tensor's first element to its last as bytes."""
    _, count = span(tensor)
    elements = count // tensor.element_size()
    flat = tensor.detach().as_strided((elements,), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def copies(memory: Sequence[Tensor]) -> list[Tensor]:
    return [one.clone() for one in memory]


@torch.no_grad()
def fill(memory: Sequence[Tensor], contents: Sequence[Tensor]) -> None:
    for one, content in zip(memory, contents, strict=True):
        one.copy_(content)


def unlike(found: Tensor, wanted: Tensor) -> str:
    """Return how elements are further apart than two orders of sums make them, or ""."""
    if not wanted.is_floating_point():
        count = int((found != wanted).sum())
        return f"{count} integers differ" if count else ""
    a, b = found.detach().double(), wanted.detach().double()
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
        return "NaN or infinities at other places"
    finite = b.isfinite()
    a, b = a[finite], b[finite]
    if not b.numel():
        return ""
    apart = (a - b).abs() / (b.abs() + b.square().mean().sqrt()).clamp(min=1e-30)
    return f"apart by {float(apart.max()):.3g}" if apart.max() > APART else ""


# -- attentions ------------------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return causal(q, k, v) * torch.sigmoid(gate)


def scored(q: Tensor, k: Tensor, v: Tensor, change: Callable[..., Tensor]) -> Tensor:
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = change((q @ k.mT).float() * q.shape[-1] ** -0.5, i, j)
    return torch.softmax(scores, -1).to(q.dtype) @ v


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def change(scores: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where((j <= i) & (i - j < 40), scores, float("-inf"))

    return scored(q, k, v, change)


def sloped(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """ALiBi: scores fall with the distance."""

    def change(scores: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(j <= i, scores + slopes[:, None, None] * (j - i), float("-inf"))

    return scored(q, k, v, change)


def attention(seed: int) -> Case:
    """Return an attention of up to 160 queries and keys."""
    draw = random.Random(seed)
    fn = draw.choice((plain, causal, biased, gated, windowed, sloped))
    depth = draw.choice((16, 32, 64, 64, 72, 128, 128, 256))
    few, shared = draw.choice((1, 1, 2)), draw.choice((1, 1, 2, 3))
    heads, batch = few * shared, draw.choice((1, 2))
    queries = draw.choice((1, draw.randint(2, 40), draw.randint(41, 160), draw.randint(41, 160)))
    keys = draw.randint(24, 160) if fn in (plain, biased) else queries
    dtype = draw.choice((torch.bfloat16, torch.float16))
    q, k, v = (
        row(n, batch, h, t, depth, dtype=dtype)
        for n, (h, t) in enumerate(((heads, queries), (few, keys), (few, keys)))
    )
    extra = {
        biased: lambda: [row(3, 1, 1, queries, keys, dtype=dtype)],
        gated: lambda: [row(3, batch, heads, queries, depth, dtype=dtype)],
        sloped: lambda: [torch.arange(1, heads + 1) / heads],
    }.get(fn, list)()
    train = fn is not biased and draw.random() < 0.2
    return Case(fn, [[q, k, v, *extra]], train)


def gradients(seed: int) -> Case:
    """Return an attention whose backward adds one gradient to memory, on `sm_90`.

    On a machine where launches cost nothing and products much, few heads are worth it.
    """
    draw = random.Random(seed)
    fn = draw.choice((plain, causal, causal))
    depth = draw.choice((64, 64, 96, 128))
    few, shared = draw.choice(((2, 1), (1, 2), (2, 2)))
    queries = draw.randint(200, 260)
    keys = draw.randint(200, 260) if fn is plain else queries
    dtype = draw.choice((torch.bfloat16, torch.float16))
    heads = ((few * shared, queries), (few, keys), (few, keys))
    inputs = [row(n, 1, h, t, depth, dtype=dtype) for n, (h, t) in enumerate(heads)]
    return Case(fn, [inputs], True, machine={"launch_us": 0.0, "products_per_us": 3e4})


# -- products --------------------------------------------------------------------------------------


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w, b) + r
    return y, torch.tanh(y.float())


def swiglu(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(x @ w.t()) * (x @ v.t())


def chunked(x: Tensor, w: Tensor) -> Tensor:
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


def by_columns(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Both weights have their columns side by side in memory."""
    return torch.relu(x.t() @ w) * (x.t() @ v)


def batches(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(x @ w)


def product(seed: int) -> Case:
    """Return a product of up to 300 rows, columns and terms."""
    draw = random.Random(seed)
    fn = draw.choice((linear, residual, swiglu, chunked, by_columns, batches))
    m = draw.choice((1, draw.randint(2, 16), draw.randint(17, 300), draw.randint(100, 300)))
    k, n = (8 * draw.randint(2, 37) + draw.choice((0, 0, 0, 1)) for _ in range(2))
    dtype = draw.choice((torch.bfloat16, torch.float16))

    def made(number: int, *shape: int, scale: float = 1.0) -> Tensor:
        return row(number, *shape, dtype=dtype, scale=scale)

    small = k**-0.5
    inputs = {
        linear: lambda: [made(0, m, k), made(1, n, k, scale=small), made(2, n)],
        residual: lambda: [made(0, m, k), made(1, n, k, scale=small), made(2, n), made(3, m, n)],
        swiglu: lambda: [made(0, m, k), *(made(i, n, k, scale=small) for i in (1, 2))],
        chunked: lambda: [made(0, m, k), made(1, 2 * n, k, scale=small)],
        by_columns: lambda: [made(0, k, m), *(made(i, k, n, scale=small) for i in (1, 2))],
        batches: lambda: [made(0, 3, m, k), made(1, 3, k, n, scale=small)],
    }[fn]()
    return Case(fn, [inputs], draw.random() < 0.25)


# -- products of groups ----------------------------------------------------------------------------


def experts(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return F.silu(torch._grouped_mm(x, w.transpose(1, 2), offs=ends))


def gated_experts(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    gate, up = torch._grouped_mm(x, w.transpose(1, 2), offs=ends).chunk(2, -1)
    return F.silu(gate) * up


def scaled_experts(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, ends: Tensor) -> Tensor:
    """With a scale for each row and column of e4m3, or for 32 terms of each."""
    y = torch._scaled_grouped_mm(x, w.transpose(1, 2), sx, sw, ends, out_dtype=torch.bfloat16)
    return F.silu(y)


def of_groups(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Return each row's product with the matrix of its group; 0 for rows in no group."""
    found, begin = x.new_zeros(x.shape[0], w.shape[1]), 0
    for end, matrix in zip(ends.tolist(), w, strict=True):
        found[begin:end], begin = x[begin:end] @ matrix.t(), end
    return found


def split(draw: random.Random, groups: int, rows: int) -> Tensor:
    """Return where groups end, one of them empty where there are two, some rows in none."""
    cuts = sorted(draw.randint(0, rows) for _ in range(groups))
    if groups > 1:
        empty = draw.randrange(groups)
        cuts[empty] = cuts[empty - 1] if empty else 0
    return torch.tensor(cuts, dtype=torch.int32)


def grouped(seed: int) -> Case:
    """Return a product of groups in 16 bits, e4m3 or mxfp8, with two splits of its rows."""
    draw = random.Random(seed)
    kind = draw.choice((experts, gated_experts, "e4m3", "mxfp8", "mxfp8"))
    groups = draw.choice((1, 2, 2, 3, 6))
    rows = min(groups * draw.choice((draw.randint(1, 24), draw.randint(25, 140), 140, 280)), 560)
    columns, terms = 16 * draw.randint(1, 9), 32 * draw.randint(1, 6)
    ends = [split(draw, groups, rows) for _ in range(2)]
    with seeded(seed):
        if callable(kind):
            x = torch.randn(rows, terms).bfloat16()
            w = (torch.randn(groups, columns, terms) * terms**-0.5).bfloat16()
            # Eager leaves rows in no group as they were in memory.
            calls = [[x, w, torch.cat((e[:-1], e.new_tensor([rows])))] for e in ends]
            return Case(kind, calls, draw.random() < 0.25)
        x, w = torch.randn(rows, terms).to(E4M3), torch.randn(groups, columns, terms).to(E4M3)
        if kind == "mxfp8":
            sx, sw = powers(rows, terms // 32), powers(groups * columns, terms // 32)
            left, right = scaled(x.double(), sx), scaled(w.double().flatten(0, 1), sw)
            least = 128 * (groups + rows // 128 + 1)
            tiles = torch.stack([in_tiles(s).view(torch.uint8) for s in sw.chunk(groups)])
            given = [(in_tiles_of_groups(sx, e.tolist(), least), tiles.view(E8M0)) for e in ends]
        else:
            sx, sw = torch.rand(rows), torch.rand(groups, columns) / 8
            left, right = x.double() * sx[:, None], w.double() * sw[..., None].double()
            given = [(sx, sw)] * 2
    right = right.view(groups, columns, terms)

    def exact(*call: Tensor) -> Tensor:
        return F.silu(of_groups(left, right, call[-1]))

    calls = [[x, w, *scales, e] for scales, e in zip(given, ends, strict=True)]
    return Case(scaled_experts, calls, exact=exact)


KINDS: Mapping[str, Callable[[int], Case]] = {
    "attention": attention,
    "gradients": gradients,
    "product": product,
    "grouped": grouped,
}


def check_seed(seed: int, kind: str, target: str) -> int:
    """Check the program of a seed; return how many kernels that were."""
    return check(KINDS[kind](seed), seed, target)
