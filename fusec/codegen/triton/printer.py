"""Print a ``Program`` as a Triton kernel: the source of one Python module.

The kernel's parameters are those of ``codegen/triton/arguments.py``; everything else is a literal.
The launch grid is ``grid_exprs(program)``.

Grid axes become program ids, lane axes ``tl.arange``. With n lane axes a value with lanes is a tile
of rank n whose extent is 1 along the lane axes that it lacks; a value without lanes is a scalar.
Names are those of the program's values, axes, sizes and buffers, made unique.

Indices are computed in 32 bits where their bounds fit and in 64 bits elsewhere. Bounds use extents,
and ``MAX_SIZE`` for a symbolic size, which is therefore a 32-bit argument: a launch checks that.
The lane-free part of an offset is added to the pointer first, as a scalar, so that a large buffer
costs 64-bit arithmetic once and not in each lane.

A program with ``Dot``s has tiles of rank 2 instead (see ``orient.py``).

Requires a verified program: one operation a ``Let``, carries of constant type, no ``Scratch``.

Worked example::

    @triton.jit
    def k0(x, y, M):
        m = tl.program_id(0)
        c = tl.arange(0, 1024)
        t0 = tl.load(x + m.to(tl.int64) * 1024 + c)
        t1 = tl.maximum(t0, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y + m.to(tl.int64) * 1024 + c, t1)
"""

from __future__ import annotations

from collections.abc import Iterable

from fusec.codegen.triton import floats8
from fusec.codegen.triton.arguments import (
    GRID_CONTROL,
    TABLE,
    grid_exprs,
    is_direct,
    name_arguments,
)
from fusec.codegen.triton.descriptors import DescriptorCopy
from fusec.codegen.triton.elementwise import Chain, find_chains, readers
from fusec.codegen.triton.form import Form
from fusec.codegen.triton.index import IndexText, fits_32_bits, is_plain, lane_extent, narrow_values
from fusec.codegen.triton.joint_sums import JointSum, find_joint_sums
from fusec.codegen.triton.load_widths import narrowed
from fusec.codegen.triton.loops import longer_towards_the_end, shares_operands, unread_sums
from fusec.codegen.triton.operations import (
    FUNCTIONS,
    LIBDEVICE,
    PTX_FUNCTIONS,
    STAGE,
    names_in,
    number_text,
    template,
    text_of,
)
from fusec.errors import InternalError
from fusec.ir.dtype import BOOL, F8, F32, I32, DType, compute_type
from fusec.ir.expr import (
    Buffer,
    Cast,
    Const,
    Dot,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Select,
    Var,
    children,
)
from fusec.ir.index import Axis, Index, index
from fusec.ir.monoid import Monoid
from fusec.ir.program import (
    MULTIPLE,
    Carry,
    For,
    Let,
    Put,
    Statement,
    Unzip,
    Update,
    Zip,
    is_product,
)

# -- the walk ------------------------------------------------------------------------------------


class TritonPrinter:
    """Prints one form: its names, the lines so far, and the functions that they call.

    ``gluon.py`` extends it by warp specialization: layouts, rings and barriers.
    """

    def __init__(self, form: Form, aligned: bool) -> None:
        program = form.program
        self.program = program
        self.aligned = aligned
        self.dimension = form.dimension
        self.rank = 1 + max(form.dimension.values(), default=-1)
        self.approximate = form.approximate
        self.copies = form.copies
        self.names = name_arguments(program, form.descriptors)
        self.arguments = tuple(TABLE) if program.table else self.names.all()
        for axis in (*program.grid, *program.lanes):
            self.names(axis)
        self.index = IndexText(self.names, frozenset(program.lanes))
        self.buffers = {b.base: self.names(b) for b in program.buffers}
        self.narrow = narrow_values(program)
        self.masks = {} if program.multiplies else narrowed(program)
        self.longer = longer_towards_the_end(program)
        self.unread: set[Expr] = set()
        self.needs: set[str] = set()
        self.lines: list[str] = []
        self.chains: list[str] = []
        self.imports: list[str] = []
        self.readers = readers(program) if program.multiplies else None
        self.floats8 = floats8.multiplied(program)

    def module(self) -> str:
        kernels = self._kernels()
        known = FUNCTIONS | floats8.functions(by_hardware=self.program.code.converts_float8)
        known |= PTX_FUNCTIONS if self.program.code.ptx else {}
        functions = [f"@triton.jit\n{known[f]}" for f in self._functions()]
        imports = ["import triton", "import triton.language as tl"]
        if LIBDEVICE in self.needs:
            imports.append("from triton.language.extra import libdevice")
        if self.program.dependent:
            imports.append(f"from triton.language.extra.cuda import {', '.join(GRID_CONTROL)}")
        imports += self.imports
        return "\n\n\n".join(["\n".join(imports), *functions, *self.chains, *kernels]) + "\n"

    def _kernels(self) -> list[str]:
        """Return the kernel, preceded by its own functions if it has any."""
        lines = ["@triton.jit", f"def {self.program.name}({', '.join(self.arguments)}):"]
        return ["\n".join([*self._title(), *lines, *self._walk(self.program.body)])]

    def _title(self) -> list[str]:
        """Return comment lines; a user's file name may have unprintable characters."""
        texts = (*self.program.notation, *self.program.source)
        lines = ("".join(c if c.isprintable() else " " for c in text) for text in texts)
        return [f"# {line.rstrip()}" for line in lines]

    def _walk(self, body: tuple[Statement, ...]) -> list[str]:
        """Return the body of a function that runs statements for its iterations of the grid."""
        self.lines, self.index.used = [], set()
        self._block(body, 2 if self.program.programs else 1)
        lines = self.lines or ["    pass"]
        start = [f"{name}()" for name in GRID_CONTROL] if self.program.dependent else []
        if not self.program.programs:
            return [*(f"    {line}" for line in (*start, *self._grid(), *self._lanes())), *lines]
        count = " * ".join(self.index.factor(a.extent) for a in self.program.grid)
        turns = f"for pid in range(tl.program_id(0), {count}, tl.num_programs(0)):"
        before = (*start, *self._lanes(), turns)
        return [*(f"    {x}" for x in before), *(f"        {x}" for x in self._grid()), *lines]

    def _functions(self) -> list[str]:
        """Return the functions of ``FUNCTIONS`` that the kernels call, or that these call."""
        self.needs |= self.index.needs
        for name in self.needs & FUNCTIONS.keys():
            self.needs.update(names_in(FUNCTIONS[name]))
        return [name for name in FUNCTIONS if name in self.needs]

    # axes

    def _grid(self) -> list[str]:
        used = [a for a in self.program.grid if a in self.index.used]
        if self.program.table:
            return [*self._row(), *self._flat_grid(used)]
        if self.program.group:
            return self._grouped_grid()
        if is_direct(self.program.grid) and not self.program.programs:
            ids = {a: i for i, a in enumerate(reversed(self.program.grid))}
            return [self._grid_axis(a, f"tl.program_id({ids[a]})") for a in used]
        return [*self._pid(bool(used)), *self._flat_grid(used)]

    def _pid(self, used: bool) -> list[str]:
        """Assign ``pid``, the flattened index in the grid, unless a persistent loop does so."""
        return ["pid = tl.program_id(0)"] if used and not self.program.programs else []

    def _row(self) -> list[str]:
        """Load a foreach kernel's arguments from its row (``runtime/kernels/table.py``)."""
        lines = ["place = tl.program_id(0)", "row = tl.load(places + 2 * place)"]
        if self.program.grid:
            lines.append("pid = tl.load(places + 2 * place + 1)")
        for position, buffer in enumerate(self.program.buffers):
            name, kind = self.names(buffer), text_of(buffer.dtype)
            at = f"addresses + row * {len(self.program.buffers)} + {position}"
            lines.append(f"{name} = tl.load({at}).to(tl.pointer_type({kind}))")
            if self.aligned:
                lines.append(f"{name} = tl.multiple_of({name}, {MULTIPLE})")
        for position, size in enumerate(self.program.sizes):
            name, count = self.names(size), len(self.program.sizes)
            lines.append(f"{name} = tl.load(sizes + row * {count} + {position})")
            if size.hint % MULTIPLE == 0:
                lines.append(f"{name} = tl.multiple_of({name}, {MULTIPLE})")
        return lines

    def _flat_grid(self, used: list[Axis]) -> list[str]:
        """Assign the used grid axes from ``pid``."""
        lines = []
        inner = index(1)
        for axis in reversed(self.program.grid):
            if axis in used:
                text = "pid" if inner is index(1) else f"pid // {self.index.points(inner)}"
                if axis is not self.program.grid[0]:
                    text += f" % {self.index.factor(axis.extent)}"
                lines.append(self._grid_axis(axis, text))
            inner = inner * axis.extent
        return lines

    def _grid_axis(self, axis: Axis, number: str) -> str:
        """Assign a grid axis, in reverse order if its last iterations take longest.

        So the programs that start last, while others have finished, are short ones.
        """
        if axis in self.longer:
            number = f"{self.index.factor(axis.extent - 1)} - {number}"
        return f"{self.names(axis)} = {number}"

    def _grouped_grid(self) -> list[str]:
        """Assign tiles in groups of ``group`` rows, which share the columns they read in cache."""
        *outer, rows, columns = self.program.grid
        m, n = self.names(rows), self.names(columns)
        height, width = (self.index.factor(a.extent) for a in (rows, columns))
        group = self.program.group
        lines = [*self._pid(True), *self._flat_grid(outer)]
        if outer:
            lines.append(f"pid = pid % {self.index.points(rows.extent * columns.extent)}")
        return [
            *lines,
            f"first = pid // ({group} * {width}) * {group}",
            f"size = tl.minimum({height} - first, {group})",
            f"{m} = first + pid % ({group} * {width}) % size",
            f"{n} = pid % ({group} * {width}) // size",
        ]

    def _lanes(self) -> list[str]:
        lines = []
        for axis in self.program.lanes:
            if axis in self.index.used:
                here = self.dimension[axis]
                dims = [":" if d == here else "None" for d in range(self.rank)]
                view = f"[{', '.join(dims)}]" if len(dims) > 1 else ""
                lines.append(f"{self.names(axis)} = {self._arange(axis)}{view}")
        return lines

    def _arange(self, axis: Axis) -> str:
        return f"tl.arange(0, {lane_extent(axis)})"

    def _shape(self, lanes: Iterable[Axis]) -> str:
        """Return the shape of a tile with these lanes as a tuple, ``()`` for a scalar."""
        extents = {self.dimension[a]: lane_extent(a) for a in lanes}
        if not extents:
            return "()"
        dims = [str(extents.get(d, 1)) for d in range(self.rank)]
        return f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"

    # statements

    def _block(self, body: tuple[Statement, ...], depth: int) -> None:
        pad = "    " * depth
        uses, least = self.readers, self.program.code.chain
        items = find_joint_sums(body) if uses is None else find_chains(body, uses, least)
        for statement in items:
            if isinstance(statement, For):
                self._loop(statement, depth)
            else:
                self.lines += [pad + line for line in self._statement(statement)]

    def _statement(self, statement: Statement | Chain | JointSum) -> list[str]:
        match statement:
            case Chain():
                return [self._chain(statement)]
            case JointSum():
                return [self._joint(statement)]
            case Let() | Update():
                name = self.names(statement.var)
                used = f"{name} = {name}.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)"
                line = f"{name} = {self._assigned(statement)}"
                return [line, used] if statement.var in self.unread else [line]
            case Carry():
                lanes, var = statement.var.axes, statement.var
                return [f"{self.names(var)} = {self._full(statement.initial, lanes)}"]
            case Put():
                return [self._put(statement)]
            case Unzip(halves=halves, whole=whole):
                shape = self._shape(halves[0].axes)[:-1].rstrip(",")
                names = ", ".join(map(self.names, halves))
                return [f"{names} = tl.split(tl.reshape({self.names(whole)}, {shape}, 2)))"]
            case Zip(whole=whole, halves=halves):
                pair = f"tl.join({', '.join(map(self.names, halves))})"
                return [f"{self.names(whole)} = tl.reshape({pair}, {self._shape(whole.axes)})"]
            case _:
                raise InternalError(statement, stage=STAGE)

    def _chain(self, chain: Chain) -> str:
        """Print a chain of operations as a function of one element, and return its call."""
        function = f"_{self.program.name}_tile{len(self.chains) or ''}"
        inputs, outputs = (", ".join(map(self._name, v)) for v in (chain.inputs, chain.outputs))
        body = "\n    ".join((*self._of_one(chain), f"return {outputs}"))
        self.chains.append(f"@triton.jit\ndef {function}({inputs}):\n    {body}")
        given = ", ".join(map(self._given, chain.inputs))
        return f"{outputs} = tl.map_elementwise({function}, {given})"

    def _of_one(self, chain: Chain) -> list[str]:
        """Return the lines that compute one element."""
        return [f"{self._name(n.var)} = {self._value(n.var, n.value)}" for n in chain.lets]

    def _joint(self, joint: JointSum) -> str:
        """Print sums of several tiles along the same lanes, and the function that adds them."""
        places = range(len(joint.lets))
        function = f"_sum{len(places)}"
        operands = ", ".join((*(f"a{n}" for n in places), *(f"b{n}" for n in places)))
        added = ", ".join(f"a{n} + b{n}" for n in places)
        text = f"@triton.jit\ndef {function}({operands}):\n    return {added}"
        self.chains += [text] if text not in self.chains else []
        tiles = ", ".join(map(self._name, joint.tiles))
        call = f"({tiles})"
        for where in self._reduced(joint.over, joint.tiles[0].axes):
            call = f"tl.reduce({call}, {where.format(function)})"
        return f"{', '.join(self._name(let.var) for let in joint.lets)} = {call}"

    def _given(self, value: Expr) -> str:
        """Return an operand whose layout ``gluon.py`` converts to that of its consumer."""
        return self._name(value)

    def _loop(self, loop: For, depth: int) -> None:
        start = self.index.text(loop.start)
        stop, *others = (self.index.text(s) for s in loop.stops)
        for other in others:
            stop = f"tl.minimum({stop}, {other})"
        if self._would_unroll(loop):
            stop = f"{stop} * tl.num_programs(2)"  # times 1, which ptxas cannot know
        elif self._would_peel(loop):
            stop = f"{stop} + tl.program_id(0) // tl.num_programs(0)"  # plus 0, likewise
        bounds = stop if start == "0" else f"{start}, {stop}"
        self.index.loops.add(loop.axis)
        call = f"range({bounds})"
        if self.program.added and loop.is_around_one:  # two loops spill 112 bytes (sm_90)
            call = f"tl.range({bounds}, flatten=True)"
        elif self._loads_ahead(loop):
            call = f"tl.range({bounds}, num_stages={self.program.stages})"
        elif self.program.stages > 1 and shares_operands(loop):
            call = f"tl.range({bounds}, num_stages=1)"
        if least_rows := self.program.code.asynchronous_rows:
            self.unread |= unread_sums(loop, least_rows)
        self.lines.append(f"{'    ' * depth}for {self.names(loop.axis)} in {call}:")
        self._block(loop.body, depth + 1)

    def _loads_ahead(self, loop: For) -> bool:
        """Return True for an innermost loop whose loads Triton pipelines only on request.

        Loops of products it pipelines by itself, by the kernel's number of stages.
        """
        inner = any(isinstance(s, For) for s in loop.body)
        return self.program.stages > 1 and self.readers is None and not inner

    def _would_unroll(self, loop: For) -> bool:
        """Return True for a loop of products whose constant trip count ptxas would fully unroll.

        A product over 2048 elements in steps of 64 took it 16 s instead of 1 s, and the 2762
        instructions exceed the instruction cache, which 363 fit (sm_90, 2026-11). The stop is
        hidden, not the start: where a loop may run 0 times, ptxas of Triton 3.6 serialises wgmma.
        """
        fixed = loop.start is index(0) and all(stop.is_constant for stop in loop.stops)
        flat = self.readers is not None and grid_exprs(self.program)[2] is index(1)
        return fixed and flat and any(is_product(s) for s in loop.body)

    def _would_peel(self, loop: For) -> bool:
        """Return True for a loop of products of at most one iteration: over a tile on the diagonal,
        or over a group's rows or terms that one tile holds.

        LLVM makes straight code of it, with which ptxas serialises the products of the loop beside
        it, too (its C7515, sm_90, Triton 3.6 to 3.9, 2026-11); one that adds to memory would spill.
        """
        once = any(index(1) in (stop, stop - loop.start) for stop in loop.stops)
        return once and not self.program.added and any(map(is_product, loop.body))

    def _put(self, put: Put) -> str:
        if (copy := self.copies.get(put)) is not None:
            value = self._as_box(copy, self._name(put.value))
            kind = "atomic_add" if put.adds else "store"
            return f"{self.names(copy.descriptor)}.{kind}([{self._start(copy)}], {value})"
        lanes = put.offset.axes & set(self.program.lanes)
        guard_lanes = frozenset() if put.guard is None else put.guard.axes
        pointer = self._pointer(put.buffer, put.offset, lanes | put.value.axes | guard_lanes)
        value = self._literal(put.value) if isinstance(put.value, Const) else self._name(put.value)
        mask = "" if put.guard is None else f", mask={self._given(put.guard)}"
        if put.adds:  # nothing else of the launch reads it
            return f'tl.atomic_add({pointer}, {value}{mask}, sem="relaxed")'
        return f"tl.store({pointer}, {value}{mask})"

    def _pointer(self, buffer: Buffer, offset: Index, lanes: frozenset[Axis]) -> str:
        """Return the pointers to ``buffer[offset]``, as a tile with ``lanes``."""
        text = self.buffers[buffer.base]
        if offset is not index(0):
            text = f"{text} + {self.index.text(offset)}"
        if offset.axes & set(self.program.lanes) == lanes:
            return text
        return f"tl.broadcast_to({text}, {self._shape(lanes)})"

    # values

    def _assigned(self, statement: Let | Update) -> str:
        var, value = statement.var, statement.value
        text = self._value(var, value)
        lanes = value.axes & set(self.program.lanes)
        if isinstance(value, Var) and value.axes != var.axes and len(value.axes) == len(var.axes):
            return f"tl.trans({text})"
        if isinstance(value, Var) and isinstance(statement, Let) and self.program.packed:
            return self._call("_again", text)
        return text if lanes == var.axes else f"tl.broadcast_to({text}, {self._shape(var.axes)})"

    def _value(self, var: Var, value: Expr) -> str:
        match value:
            case Var():
                return self._name(value)
            case Const():
                return self._full(value, ())
            case IndexValue():
                return self._index_value(value, var in self.narrow)
            case Load() if (copy := self.copies.get(var)) is not None:
                return self._load_tile(copy)
            case Load():
                return self._load(value, var in self.floats8)
            case Cast():
                return self._cast(value)
            case Select():
                return self._select(value)
            case Op():
                return self._op(value, var in self.approximate)
            case Reduce():
                return self._reduce(value)
            case Dot():
                return self._dot(value)
            case _:
                raise InternalError(value, stage=STAGE)

    def _name(self, value: Expr) -> str:
        if not isinstance(value, Var):
            raise InternalError(value, stage=STAGE)
        return self.names(value)

    def _load(self, load: Load, multiplied: bool) -> str:
        offset = load.indices[0]
        pointer = self._pointer(load.buffer, offset, load.axes & set(self.program.lanes))
        if multiplied:
            kind = floats8.HARDWARE[load.dtype.name]
            pointer = f"({pointer}).to(tl.pointer_type({kind}), bitcast=True)"
        if (lanes := self.masks.get(load)) is not None:
            axis, together = lanes
            run = [together if self.dimension[axis] == d else 1 for d in range(self.rank)]
            pointer = f"tl.max_contiguous({pointer}, {run})"
        if load.guard is None:
            return f"tl.load({pointer})"
        is_float = load.dtype.is_float and (multiplied or load.dtype not in F8)
        other = number_text(False if load.dtype is BOOL else 0.0 if is_float else 0)
        return f"tl.load({pointer}, mask={self._given(load.guard)}, other={other})"

    def _load_tile(self, copy: DescriptorCopy) -> str:
        text = f"{self.names(copy.descriptor)}.load([{self._start(copy)}])"
        *outer, rows, columns = copy.descriptor.tile
        if outer:
            text = f"tl.reshape({text}, ({rows}, {columns}))"
        return f"tl.trans({text})" if copy.transposed else text

    def _as_box(self, copy: DescriptorCopy, value: str) -> str:
        """Return a tile of the program in the shape of a descriptor's box."""
        tile = copy.descriptor.tile
        value = f"tl.trans({value})" if copy.transposed else value
        return f"tl.reshape({value}, ({', '.join(map(str, tile))}))" if len(tile) > 2 else value

    def _start(self, copy: DescriptorCopy) -> str:
        return ", ".join(map(self.index.text, copy.start))

    def _index_value(self, value: IndexValue, narrow: bool) -> str:
        text = self.index.text(value.index)
        dtype = I32 if narrow else value.dtype
        if dtype is I32 and fits_32_bits(value.index) and not value.index.is_constant:
            return text
        return f"tl.cast({text}, {text_of(dtype)})"

    def _cast(self, cast: Cast) -> str:
        if isinstance(cast.arg, Const):
            return self._full(Const(cast.arg.value, cast.dtype), ())
        name = self._name(cast.arg)
        if cast.arg.dtype in F8:
            name = self._call(f"_of_{cast.arg.dtype}", name)
        if cast.dtype in F8:
            name = name if cast.arg.dtype is F32 else f"{name}.to(tl.float32)"
            return self._call(f"_to_{cast.dtype}", name)
        if cast.dtype is BOOL:
            return f"{name} != 0"
        if cast.arg.dtype.is_float and cast.dtype.is_integer and cast.dtype.itemsize < 4:
            name = f"{name}.to(tl.int32)"  # so that a value out of range wraps, as in PyTorch
        return f"{name}.to({text_of(cast.dtype)})"

    def _call(self, function: str, argument: str) -> str:
        self.needs.add(function)
        return f"{function}({argument})"

    def _select(self, select: Select) -> str:
        condition = self._operand(select.condition)
        branches = (select.then, select.other)
        typed = all(isinstance(branch, Const) for branch in branches)
        then, other = (self._operand(branch, typed) for branch in branches)
        return f"tl.where({condition}, {then}, {other})"

    def _op(self, op: Op, approximate: bool) -> str:
        kind = op.args[0].dtype
        wide = compute_type(kind) if kind.is_float else kind
        found = template(op.name, wide, approximate=approximate)
        self.needs.update(names_in(found))
        typed = all(isinstance(arg, Const) for arg in op.args)
        operands = [self._operand(arg, typed) for arg in op.args]
        if wide is not kind:
            operands = [f"{text}.to(tl.float32)" for text in operands]
        text = found.format(*operands, t=text_of(wide))
        return f"({text}).to({text_of(kind)})" if wide is not kind is op.dtype else text

    def _operand(self, value: Expr, typed: bool = False) -> str:
        if not isinstance(value, Const):
            return self._name(value)
        if typed or not is_plain(value):
            return self._full(value, ())
        return self._literal(value)

    def _literal(self, value: Const) -> str:
        return number_text(value.value)

    def _full(self, value: Const, lanes: Iterable[Axis]) -> str:
        if value.dtype in F8:
            return self._call(f"_to_{value.dtype}", self._full(Const(value.value, F32), lanes))
        dtype = text_of(value.dtype)
        return f"tl.full({self._shape(lanes)}, {self._literal(value)}, {dtype})"

    def _dot(self, dot: Dot) -> str:
        if dot.scales:
            return floats8.scaled_product(dot, self._name)
        operands = [self._name(child) for child in children(dot)]
        if dot.left.dtype is F32:
            operands.append(f'input_precision="{"tf32" if dot.tf32 else "ieee"}"')
        if dot.left.dtype in F8:
            operands[:2] = self._factors(dot)
        if dot.dtype is I32:
            operands.append("out_dtype=tl.int32")
        return f"tl.dot({', '.join(operands)})"

    def _factors(self, dot: Dot) -> list[str]:
        """Return the operands of a product of 8 bits; in bf16, exactly, where no GPU has it."""
        sides = dot.left, dot.right
        known = all(side.dtype.name in floats8.HARDWARE for side in sides)
        if self.program.code.converts_float8 and known:
            return [floats8.operand(side, self._name) for side in sides]
        of = (self._call(f"_of_{side.dtype}", self._name(side)) for side in sides)
        return [f"{value}.to(tl.bfloat16)" for value in of]

    def _reduce(self, reduce: Reduce) -> str:
        over = set(reduce.over)
        held = reduce.body.axes
        if isinstance(reduce.body, Const):
            body = self._full(reduce.body, over)
        else:
            body = self._name(reduce.body)
            if not over <= held:
                body = f"tl.broadcast_to({body}, {self._shape(held | over)})"
        # Triton would sum in a wider type of its own choice, and combines 16-bit floats in f32.
        narrow = reduce.dtype.itemsize < 4 and reduce.dtype is not BOOL
        if narrow:
            body = f"{body}.to({text_of(compute_type(reduce.dtype))})"
        for where in self._reduced(reduce.over, held):
            body = self._reduce_dim(reduce.monoid, body, reduce.dtype, where)
        return f"{body}.to({text_of(reduce.dtype)})" if narrow else body

    def _reduced(self, over: Iterable[Axis], held: frozenset[Axis]) -> list[str]:
        """Return the arguments of the reductions of a tile, one for each dimension.

        Their extent becomes 1; where no lanes are left, the result is a scalar.
        """
        lanes = set(over)
        if held <= lanes:
            return ["None, {}"]
        dimensions = [self.dimension[a] for a in self.program.lanes if a in lanes]
        return [f"{dimension}, {{}}, keep_dims=True" for dimension in dimensions]

    def _reduce_dim(self, monoid: Monoid, text: str, dtype: DType, where: str) -> str:
        """Return a tile reduced by the arguments ``where``, which lack the function."""
        if monoid.name == "sum":
            rest = where.replace("None, {}", "").replace("{}, ", "")
            return f"tl.sum({text}, {rest})" if rest else f"tl.sum({text})"
        name = monoid.name
        if dtype is BOOL:
            name = {"max": "any", "min": "all"}.get(name, name)
        self.needs.add(f"_{name}")
        return f"tl.reduce({text}, {where.format(f'_{name}')})"
