"""Print a warp-specialized program as a Triton kernel in Gluon, in which register layouts, shared
memory and barriers are explicit. For sm_90.

The module has a function for each role (``codegen/triton/warp_specialization.py``) and the kernel,
which allocates the rings and starts the roles. Everything but copies by descriptor and products is
printed as in ``printer.py``: Triton's operations are also Gluon's, and the layout of their result
follows from their operands. Only values without operands, such as lane axes, are given a layout:
that of the accumulators.

The kernel is persistent: each program loops over the grid, so that its loads run ahead of the tile
that is being multiplied. A ring has a *ready* and a *free* barrier for each slot. Producer and
consumers each count a ``step``: the slot is ``step % slots``, and the parity of ``step // slots``
is the phase of its barrier to wait for.

Worked example, the parts that other kernels do not have::

    slot = step % 3                                    producer warp
    mbarrier.wait(operands_free.index(slot), step // 3 & 1 ^ 1)
    mbarrier.expect(operands_ready.index(slot), 49152)
    load_tile(x_tiles, [mo * 128, ko * 64], operands_ready.index(slot), x_slots.index(slot))
    step += 1

    mbarrier.wait(operands_ready.index(slot), step // 3 & 1)        consumer warps
    acc = warpgroup_mma(x_slots.index(slot), w_slots.index(slot), acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    mbarrier.arrive(operands_free.index((step + 1) % 3), pred=ko > 0)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fusec.codegen.lowering.orient import ROWS
from fusec.codegen.triton.descriptors import Descriptor, DescriptorCopy
from fusec.codegen.triton.elementwise import Chain
from fusec.codegen.triton.form import Form
from fusec.codegen.triton.index import IndexText, lane_extent
from fusec.codegen.triton.joint_sums import JointSum
from fusec.codegen.triton.operations import text_of
from fusec.codegen.triton.printer import TritonPrinter
from fusec.codegen.triton.warp_specialization import MOST_COLUMNS, RoleStatements
from fusec.ir.dtype import DType
from fusec.ir.expr import Const, Dot, Expr, Reduce, Var, children
from fusec.ir.index import Axis
from fusec.ir.names import Named
from fusec.ir.program import (
    Await,
    Carry,
    Fill,
    Free,
    Halve,
    Let,
    Put,
    Statement,
    Take,
    Update,
    accessed,
    statements,
)

INSTRUCTION_ROWS = 16
"""Rows of a wgmma for each warp."""
FEWEST_COLUMNS = 8
"""Fewest columns of a wgmma."""
INSTRUCTION_BYTES = 32
"""Bytes of the terms that it sums."""


def print_kernel(form: Form, *, aligned: bool = True) -> str:
    """Return the source of a module with one kernel, in Gluon if it is warp-specialized.

    Args:
        aligned: for a foreach kernel, whether the table's addresses are multiples of 16 bytes.
    Raises:
        InternalError: for a statement or operation that the language does not have.
    """
    if form.roles is None:
        return TritonPrinter(form, aligned).module()
    return _GluonPrinter(form, form.roles).module()


@dataclass(frozen=True, slots=True)
class _SlotTile:
    """The memory of a tile in all slots, which copies by ``parts`` fill side by side."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class _RingNames:
    """Names of a ring's barriers, step counter and memory."""

    ready: str
    free: str
    step: str
    tiles: tuple[_SlotTile, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.ready, self.free, *(tile.name for tile in self.tiles))

    @property
    def boxes(self) -> tuple[Descriptor, ...]:
        return tuple(box for tile in self.tiles for box in tile.parts)

    @property
    def bytes(self) -> int:
        return sum(math.prod(d.tile) * d.buffer.dtype.itemsize for d in self.boxes)


class _GluonPrinter(TritonPrinter):
    """Prints one form as a module of several functions, which share their names.

    Attributes:
        wanted: layout of the value being printed, to which its operands are converted; "" if
            operands keep their layouts.
    """

    def __init__(self, form: Form, roles: RoleStatements) -> None:
        super().__init__(form, True)
        self.roles = roles
        self.copies = {**form.copies, **roles.copies}
        self.dimension = {**form.dimension, **roles.dimension}
        named = (s for s in statements(roles.multiply) if isinstance(s, Let | Update))
        first = next(s for s in named if isinstance(s.value, Dot))
        self.itemsize = children(first.value)[0].dtype.itemsize
        self.taken = {
            v for s in statements(roles.multiply) if isinstance(s, Take) for v in s.values
        }
        self.sum_of = self._multiplied_from_registers()
        self.layouts: dict[int, str] = {}
        self.lefts: dict[str, str] = {}
        self.wanted = ""
        self.index = IndexText(self._in_index, frozenset(self.program.lanes))
        self.rings = {fill.ring: self._places(fill) for fill in roles.fills}
        self.staged = self._staged()
        where = "triton.experimental.gluon"
        hopper = "fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait"
        self.imports = [
            "from triton.experimental import gluon",
            f"from {where} import language as gl",
            f"from {where}.language.nvidia.hopper import {hopper}",
            "from fusec.runtime.kernels.triton_interior import load_tile, store_tile",
        ]

    def _places(self, fill: Fill) -> _RingNames:
        whole = {first: tile for tile, (first, *_) in self.roles.sides.items()}
        inside = {v for _, *others in self.roles.sides.values() for v in others}
        taken = [whole.get(s.var, s.var) for s in fill.loads if s.var not in inside]
        tiles = tuple(map(self._slot_tile, taken))
        name = fill.ring.name
        ready, free, step = (self.names.new(f"{name}_{what}") for what in ("ready", "free", "step"))
        return _RingNames(ready, free, step, tiles)

    def _slot_tile(self, tile: Var) -> _SlotTile:
        box = self.copies[tile].descriptor
        parts = (self.copies[v].descriptor for v in self.roles.sides.get(tile, (tile,)))
        return _SlotTile(self.names.new(f"{box.buffer.name}_slots"), box.tile, tuple(parts))

    def _staged(self) -> dict[Descriptor, str]:
        """Return descriptor -> shared memory that stages stored tiles, one for each tile type."""
        memories: dict[tuple[DType, tuple[int, ...]], str] = {}
        found = {}
        for statement in statements(self.roles.multiply):
            if isinstance(statement, Put) and statement in self.copies:
                box = self.copies[statement].descriptor
                kind = box.buffer.dtype, box.tile
                memories[kind] = memories.get(kind) or self.names.new(f"staged_{len(memories)}")
                found[box] = memories[kind]
        return found

    def _multiplied_from_registers(self) -> dict[Expr, Var]:
        """Return left operand that is no tile in memory -> accumulator of its product."""
        found = (s for s in statements(self.roles.multiply) if isinstance(s, Update))
        products = {s.value.left: s.var for s in found if isinstance(s.value, Dot)}
        return {left: total for left, total in products.items() if left not in self.taken}

    # functions

    def _kernels(self) -> list[str]:
        name = self.program.name
        load, multiply = f"_{name}_load", f"_{name}_multiply"
        loaded, multiplied = (", ".join(passed) for passed in (self._loaded(), self._multiplied()))
        entry = self._entry(f"({multiply}, ({multiplied}, 0)),", f"({load}, ({loaded})),")
        return [
            self._role(f"{load}({loaded})", self.roles.load),
            self._role(f"{multiply}({multiplied}, who: gl.constexpr)", self.roles.multiply)
            + "\n    tma.store_wait(0)",
            "\n".join([*self._title(), *entry]),
        ]

    def _loaded(self) -> list[str]:
        """Return the arguments of the producer warp."""
        boxes = [self.names(box) for ring in self.rings.values() for box in ring.boxes]
        return [*dict.fromkeys(boxes), *self._shared()]

    def _multiplied(self) -> list[str]:
        """Return the arguments of the consumer group, except for its number."""
        by_pointers = (s for s in statements(self.roles.multiply) if s not in self.copies)
        accesses = map(accessed, by_pointers)
        buffers = dict.fromkeys(self.buffers[base] for base in accesses if base is not None)
        boxes = map(self.names, self.staged)
        return [*buffers, *boxes, *self._shared(), *dict.fromkeys(self.staged.values())]

    def _shared(self) -> list[str]:
        sizes = [self.names(size) for size in self.program.sizes]
        return [*sizes, *(name for ring in self.rings.values() for name in ring.names)]

    def _role(self, head: str, body: tuple[Statement, ...]) -> str:
        """Return the function of a role; printing its body finds the layouts."""
        lines = self._walk(body)
        steps = [f"{places.step} = 0" for places in self.rings.values()]
        start = _indented([*steps, *self._layouts()])
        return "\n".join(["@gluon.jit", f"def {head}:", *start, *lines])

    # layouts

    def _layouts(self) -> list[str]:
        """Define the layouts of a group's accumulators: each warp has some rows, all columns."""
        rows, terms = INSTRUCTION_ROWS, INSTRUCTION_BYTES // self.itemsize
        lines = []
        for columns, name in self.layouts.items():
            shape = f"[{rows}, {min(columns, MOST_COLUMNS)}, {terms}]"
            warps = f"warps_per_cta=[{self.program.warps}, 1]"
            made = f"gl.NVMMADistributedLayout(version=[3, 0], {warps}, instr_shape={shape})"
            lines.append(f"{name}: gl.constexpr = {made}")
        for layout, name in self.lefts.items():
            lines.append(f"{name}: gl.constexpr = gl.DotOperandLayout(0, {layout}, 2)")
        return lines

    def _left(self, weights: Var) -> str:
        """Return the name of the layout of a left operand that a product reads from registers."""
        layout = self._layout(self.sum_of[weights].axes)
        if layout not in self.lefts:
            self.lefts[layout] = self.names.new(f"left_of_{layout}")
        return self.lefts[layout]

    def _columns(self, axes: Iterable[Axis]) -> int:
        """Return the columns of the layout of a tile with these lanes.

        A value of each row has the fewest: in a wide layout a thread has it many times over, and
        LLVM does not always see that these are equal.
        """
        columns = (a for a in axes if self.dimension.get(a, ROWS) != ROWS)
        return max(FEWEST_COLUMNS, *map(lane_extent, columns), 0)

    def _layout(self, axes: Iterable[Axis]) -> str:
        """Return the name of the layout of tiles with these lanes."""
        columns = self._columns(axes)
        if columns not in self.layouts:
            self.layouts[columns] = self.names.new(f"columns_{columns}")
        return self.layouts[columns]

    def _converted(self, text: str, axes: Iterable[Axis], wanted: str) -> str:
        """Return a value converted to a layout; all layouts distribute rows in the same way."""
        scalar = not any(axis in self.dimension for axis in axes)
        same = scalar or not wanted or self._layout(axes) == wanted
        return text if same else f"gl.convert_layout({text}, {wanted})"

    def _entry(self, *starts: str) -> list[str]:
        """Return the lines of the kernel: it allocates rings and starts the roles."""
        lines: list[str] = []
        for ring, places in self.rings.items():
            for tile in places.tiles:
                lines.append(self._memory(tile.name, ring.slots, tile.shape, tile.parts[0]))
            for name in (places.ready, places.free):
                barriers = f"gl.int64, [{ring.slots}, 1], mbarrier.MBarrierLayout()"
                lines.append(f"{name} = gl.allocate_shared_memory({barriers})")
            lines.append(f"for slot in gl.static_range({ring.slots}):")
            for name in (places.ready, places.free):
                lines.append(f"    mbarrier.init({name}.index(slot), count=1)")
        memories = {name: box for box, name in self.staged.items()}
        lines += [self._memory(n, 1, box.tile, box) for n, box in memories.items()]
        lines += ["gl.warp_specialize(", "    [", *(f"        {one}" for one in starts)]
        lines += ["    ],", "    [1],", f"    [{self.program.code.loader_registers}],", ")"]
        head = ["@gluon.jit", f"def {self.program.name}({', '.join(self.arguments)}):"]
        return [*head, *_indented(lines)]

    def _memory(self, name: str, count: int, tile: tuple[int, ...], box: Descriptor) -> str:
        """Return the line that allocates tiles in the layout of a descriptor's."""
        shape = [count, *tile]
        return f"{name} = gl.allocate_shared_memory({box.kind}, {shape}, {self.names(box)}.layout)"

    # values

    def _arange(self, axis: Axis) -> str:
        kept = f"gl.SliceLayout({1 - self.dimension[axis]}, {self._layout((axis,))})"
        return f"gl.arange(0, {lane_extent(axis)}, {kept})"

    def _assigned(self, statement: Let | Update) -> str:
        var, value = statement.var, statement.value
        if var in self.sum_of:
            return f"gl.convert_layout({self._name(value)}, {self._left(var)})"
        if isinstance(value, Dot):
            return self._dot(value)
        if value in self.taken:
            same = value.axes == var.axes
            way = f"load({self._layout(var.axes)})" if same else "permute((1, 0))"
            return f"{self._name(value)}.{way}"
        self.wanted = self._layout(var.axes)
        return super()._assigned(statement)

    def _operand(self, value: Expr, typed: bool = False) -> str:
        return self._converted(super()._operand(value, typed), value.axes, self.wanted)

    def _of_one(self, chain: Chain) -> list[str]:
        self.wanted = ""
        lines = super()._of_one(chain)
        self.wanted = self._layout(chain.outputs[0].axes)
        return lines

    def _put(self, put: Put) -> str:
        self.wanted = self._layout(put.offset.axes | put.value.axes)
        return super()._put(put)

    def _given(self, value: Expr) -> str:
        return self._converted(self._name(value), value.axes, self.wanted)

    def _in_index(self, thing: Named) -> str:
        """Return the name of an index's axis, size or value, in the layout of the access."""
        axes = (thing,) if isinstance(thing, Axis) else thing.axes if isinstance(thing, Var) else ()
        return self._converted(self.names(thing), axes, self.wanted)

    def _reduce(self, reduce: Reduce) -> str:
        text = super()._reduce(reduce)
        same = self._layout(reduce.body.axes) == self._layout(reduce.axes)
        return text if same else f"gl.convert_layout({text}, {self._layout(reduce.axes)})"

    def _full(self, value: Const, lanes: Iterable[Axis]) -> str:
        lanes = tuple(lanes)
        filled = f"{self._shape(lanes)}, {self._literal(value)}, {text_of(value.dtype)}"
        return f"gl.full({filled}, {self._layout(lanes)})" if lanes else f"gl.full({filled})"

    def _dot(self, dot: Dot) -> str:
        operands = [self._name(side) for side in (dot.left, dot.right)]
        if dot.into is not None:
            return f"warpgroup_mma({', '.join(operands)}, {self._name(dot.into)}, is_async=True)"
        nothing = self._full(Const(0.0, dot.dtype), dot.axes)
        return f"warpgroup_mma({', '.join(operands)}, {nothing}, use_acc=False, is_async=True)"

    # synchronization of the roles

    def _statement(self, statement: Statement | Chain | JointSum) -> list[str]:
        match statement:
            case Fill():
                return self._fill(statement)
            case Take():
                return self._take(statement)
            case Await(sums=sums, pending=pending):
                names = ", ".join(map(self._name, sums))
                return [f"{names} = warpgroup_mma_wait({pending}, deps=[{names}])"]
            case Free():
                return [self._free(statement)]
            case Halve():
                return self._halve(statement)
            case Carry(var=var, initial=initial) if var in self.sum_of:
                filled = f"{self._shape(var.axes)}, {self._literal(initial)}, {text_of(var.dtype)}"
                return [f"{self.names(var)} = gl.full({filled}, {self._left(var)})"]
            case Put(value=Var() as value) if (copy := self.copies.get(statement)) is not None:
                return self._stage(copy, self._name(value))
            case _:
                return super()._statement(statement)

    def _fill(self, fill: Fill) -> list[str]:
        ring, places = fill.ring, self.rings[fill.ring]
        ready = f"{places.ready}.index(slot)"
        lines = [
            f"slot = {places.step} % {ring.slots}",
            f"mbarrier.wait({places.free}.index(slot), {places.step} // {ring.slots} & 1 ^ 1)",
            f"mbarrier.expect({ready}, {places.bytes})",
        ]
        into = [(tile, n) for tile in places.tiles for n in range(len(tile.parts))]
        for load, (tile, n) in zip(fill.loads, into, strict=True):
            box, start = self.names(tile.parts[n]), self._start(self.copies[load.var])
            where = f"{tile.name}.index(slot)"
            if len(tile.parts) > 1:
                shape, kind = list(tile.parts[n].tile), f"{box}.dtype, "
                count = ring.slots * len(tile.parts)
                where = f"{tile.name}._reinterpret({kind}{[count, *shape]}, {box}.layout)"
                where += f".index(slot * {len(tile.parts)} + {n})"
            lines.append(f"load_tile({box}, [{start}], {ready}, {where})")
        return [*lines, f"{places.step} += 1"]

    def _take(self, take: Take) -> list[str]:
        ring, places = take.ring, self.rings[take.ring]
        ahead = f"({places.step} + {ring.slots - take.before})" if take.before else places.step
        lines = [f"slot = {ahead} % {ring.slots}"]
        if not take.before:
            phase = f"{places.step} // {ring.slots} & 1"
            lines.append(f"mbarrier.wait({places.ready}.index(slot), {phase})")
        for value, tile in zip(take.values, places.tiles, strict=True):
            *outer, rows, columns = tile.shape
            text = f"{tile.name}.index(slot)"
            text += f".reshape(({rows}, {columns}))" if outer else ""
            text += ".permute((1, 0))" if self.copies[value].transposed else ""
            lines.append(f"{self._name(value)} = {text}")
        return lines if take.before else [*lines, f"{places.step} += 1"]

    def _free(self, free: Free) -> str:
        ring = free.ring
        ahead = ring.slots - 1 - free.before  # modulo slots: the last taken, or some before it
        step = self.rings[ring].step
        slot = f"({step} + {ahead})" if ahead else step
        pred = "" if free.after is None else f", pred={self.names(free.after)} > 0"
        return f"mbarrier.arrive({self.rings[ring].free}.index({slot} % {ring.slots}){pred})"

    def _halve(self, halve: Halve) -> list[str]:
        """Return the lines that name halves, which are in the registers of the whole."""
        names = list(map(self._name, halve.halves))
        axes = sorted(halve.halves[0].axes, key=self.dimension.__getitem__)
        rows, columns = map(lane_extent, axes)
        turned = f"reshape(({rows}, 2, {columns})).permute((0, 2, 1))"
        lines = [f"{', '.join(names)} = {self._name(halve.whole)}.{turned}.split()"]
        layout = self._layout(axes)
        return [*lines, *(f"{name} = gl.convert_layout({name}, {layout})" for name in names)]

    def _stage(self, copy: DescriptorCopy, value: str) -> list[str]:
        """Store a tile through shared memory, after the previous store has been read from it."""
        box, memory = copy.descriptor, f"{self.staged[copy.descriptor]}.index(who)"
        return [
            "tma.store_wait(0)",
            f"{memory}.store({self._as_box(copy, value)})",
            "fence_async_shared()",
            f"store_tile({self.names(box)}, [{self._start(copy)}], {memory})",
        ]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]
