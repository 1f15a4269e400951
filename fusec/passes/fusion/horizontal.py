"""Horizontal fusion: one launch for independent kernels of one form, as in an optimizer's step.

Spec: ``schedule -> schedule``; the same kernels, some of them together in a ``ForeachKernel``.
After ``coalesce`` a pointwise kernel over contiguous tensors has one axis of n elements, whatever
their shapes, so that the updates of all parameters differ only in n and in their buffers.

Kernels have one form if their canonical forms are equal once their axes are replaced by axes with
symbolic extents: the *template*, over placeholders for buffers. They are independent if the longest
dependency chains before them have equal lengths: then no path joins them, and merging all kernels
of one length closes no cycle.

Worked example: ``p[i, j] = p[i, j] - g[i, j]`` over 3x4 and ``q[i] = q[i] - h[i]`` over 17 become
the template ``p[i] = p[i] - g[i]    i:n`` with the rows ``(p, g, 12)`` and ``(q, h, 17)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from fusec.ir.atoms import MAX_SIZE
from fusec.ir.canonical import canonical
from fusec.ir.decision import Decision
from fusec.ir.expr import Buffer, Expr, IndexValue, Load, index_exprs, substitute
from fusec.ir.graph import FlatKernel, ForeachKernel, Kernel, Schedule, Step, kernel_nodes
from fusec.ir.index import Axis, Index, Size, index
from fusec.ir.machine import Machine
from fusec.ir.program import MULTIPLE
from fusec.ir.rewrite import rewrite
from fusec.passes.dag import Dag, chain_lengths, dependencies, joined, sorted_steps
from fusec.passes.fusion.cost import buffer_bytes
from fusec.passes.kernel.coalesce import coalesce

KernelForm: TypeAlias = tuple[object, ...]


def fuse_horizontally(schedule: Schedule, machine: Machine) -> Schedule:
    """Return the schedule with independent kernels of one form merged into foreach kernels."""
    steps, least = schedule.steps, machine.fusion.foreach
    dag = dependencies(steps)
    lasting = schedule.graph.returned.union(schedule.graph.inputs)
    kinds: dict[int, KernelForm | None] = {}
    for position, length in chain_lengths(dag).items():
        step = steps[position]
        if isinstance(step, Kernel) and not _waits(step, lasting, machine):
            rough = _rough_kind(step)
            kinds[position] = None if rough is None else (length, *rough)
    made: dict[int, ForeachKernel] = {}
    count = itertools.count()
    for group in _alike(kinds, least):
        for positions, found in _foreach_kernels(steps, group, least):
            made.update(dict.fromkeys(positions, replace(found, name=f"b{next(count)}")))
    if not made:
        return schedule
    decisions = tuple(_decision(one, machine) for one in dict.fromkeys(made.values()))
    return replace(
        schedule, steps=_joined(steps, dag, made), decisions=(*schedule.decisions, *decisions)
    )


def _decision(made: ForeachKernel, machine: Machine) -> Decision:
    first, *others = (k.stores[0].buffer.name for k in made.kernels)
    saved = machine.launch_us * len(others)
    reason = f"{len(made.kernels)} kernels alike in one launch"
    return Decision(first, "+".join(others), True, reason, saved)


def _waits(kernel: Kernel, lasting: frozenset[object], machine: Machine) -> bool:
    """Return True if a kernel's temporary results are too large to live until a foreach ends.

    Writing them to new pages costs more than a launch: values that a backward recomputes just
    before their use would take as much memory as the ones that eager saves.
    """
    made = sum(buffer_bytes(b) for b in kernel.writes if b not in lasting)
    return made > machine.launch_us * machine.bytes_per_us


def _rough_kind(kernel: Kernel) -> KernelForm | None:
    """Return a cheap key that kernels of one form share; None if a kernel cannot be a member."""
    extents = [a.extent for a in kernel.axes]
    extents += [e for s in kernel.stores for e in (*s.buffer.shape, *s.buffer.strides)]
    if kernel.inside or not all(extent.is_constant for extent in extents):
        return None
    return tuple(store.buffer.dtype for store in kernel.stores)


def _alike(kinds: Mapping[int, KernelForm | None], least: int) -> list[list[int]]:
    """Return the positions of each kind but None, where there are at least ``least``."""
    groups: dict[KernelForm, list[int]] = {}
    for position, kind in kinds.items():
        if kind is not None:
            groups.setdefault(kind, []).append(position)
    return [group for group in groups.values() if len(group) >= least]


def _foreach_kernels(
    steps: tuple[Step, ...], group: list[int], least: int
) -> Iterator[tuple[list[int], ForeachKernel]]:
    """Yield the foreach kernels of a group of kernels, each with the positions of its members."""
    kernels = {p: k for p in group if isinstance(k := steps[p], Kernel)}
    flat = {position: coalesce(kernel) for position, kernel in kernels.items()}
    # Members must agree whether their extents are multiples that allow wide accesses.
    wholes = {
        p: tuple(a.extent.const % MULTIPLE == 0 for a in k.grid) if _is_simple(k) else None
        for p, k in flat.items()
    }
    for some in _alike(wholes, least):
        rank = len(flat[some[0]].grid)
        most = [max(flat[p].grid[n].extent.const for p in some) for n in range(rank)]
        sizes = tuple(Size(f"n{n}" if n else "n", hint) for n, hint in enumerate(most))
        axes = tuple(Axis(f"i{n}" if n else "i", index(size)) for n, size in enumerate(sizes))
        members = {p: m for p in some if (m := _member(flat[p], axes)) is not None}
        for rows in _alike({p: m.form for p, m in members.items()}, least):
            template, stands = _template(members[rows[0]])
            used = [sizes.index(size) for size in template.sizes]
            extents = {p: tuple(flat[p].grid[k].extent.const for k in used) for p in rows}
            table = tuple((tuple(members[p].places), extents[p]) for p in rows)
            together = tuple(kernels[p] for p in rows)
            yield rows, ForeachKernel("", together, template, stands, template.sizes, table)


def _is_simple(kernel: FlatKernel) -> bool:
    """Return True if a kernel's accesses are affine in its axes, with constant strides."""
    points = 1
    for axis in kernel.axes:
        if axis.limit is not None or not axis.extent.is_constant:
            return False
        points *= axis.extent.const
    places = [s.indices[0] for s in kernel.stores]
    for node in kernel_nodes(kernel):
        if isinstance(node, IndexValue):
            return False  # values computed from indices may contain the extents as constants
        if isinstance(node, Load):
            if node.guard is not None or any(True for _ in index_exprs(node.indices[0])):
                return False
            places.append(node.indices[0])
    return points <= MAX_SIZE and all(_is_affine(p, kernel.axes) for p in places)


def _is_affine(place: Index, axes: tuple[Axis, ...]) -> bool:
    for axis in axes:
        step = place.coefficient(axis)
        if step is None or not step.is_constant or step.const < 0:
            return False
        place = place - step * index(axis)
    return place.is_constant


@dataclass(frozen=True, slots=True)
class _Member:
    """A kernel rewritten to the axes of a template.

    Attributes:
        form: canonical form, equal for the members of one foreach kernel.
        places: buffer -> the offset of its accesses, in the order of the form's leaves.
    """

    kernel: FlatKernel
    form: tuple[object, ...]
    places: dict[Buffer, Index]


def _member(kernel: FlatKernel, axes: tuple[Axis, ...]) -> _Member | None:
    """Return a kernel as a candidate member; None if it accesses one buffer at two offsets."""
    mapping = {old: index(new) for old, new in zip(kernel.grid, axes, strict=True)}
    kernel = FlatKernel(kernel.substitute(mapping))
    accesses = [(n.buffer, n.indices[0]) for n in kernel.loads]
    accesses += [(s.buffer, s.indices[0]) for s in kernel.stores]
    places: dict[Buffer, Index] = {}
    for buffer, at in accesses:
        if places.setdefault(buffer.base, at) is not at:
            return None
    values = tuple(s.expr for s in kernel.stores)
    found = canonical(values, tuple((s.buffer, s.indices) for s in kernel.stores))
    return _Member(kernel, found.form, {b: places[b] for b in found.of_kind(Buffer)})


def _template(member: _Member) -> tuple[FlatKernel, tuple[Buffer, ...]]:
    """Return the template over placeholder buffers, each just long enough, and these buffers."""
    stands: dict[Buffer, Buffer] = {}
    for buffer, place in member.places.items():
        last = substitute(place, {axis: axis.extent - 1 for axis in member.kernel.grid})
        stands[buffer] = Buffer(buffer.name, (last + 1,), (index(1),), buffer.dtype)

    def replaced(node: Expr) -> Expr:
        if isinstance(node, Load) and node.buffer.base in stands:
            return Load(stands[node.buffer.base].flat(), node.indices, None)
        return node

    kernel = member.kernel.map(lambda exprs: rewrite(exprs, replaced))
    stores = tuple(replace(s, buffer=stands[s.buffer.base].flat()) for s in kernel.stores)
    return FlatKernel(replace(kernel, stores=stores)), tuple(stands.values())


def _joined(steps: tuple[Step, ...], dag: Dag, made: dict[int, ForeachKernel]) -> tuple[Step, ...]:
    """Return the steps with members replaced by their foreach kernels, in topological order."""
    first: dict[ForeachKernel, int] = {}
    for position, one in sorted(made.items(), key=lambda item: item[0]):
        first.setdefault(one, position)
    place = {p: first[made[p]] if p in made else p for p in range(len(steps))}
    return tuple(made.get(p, steps[p]) for p in sorted_steps(joined(dag, place)))
