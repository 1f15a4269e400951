"""The C++ printer: one function a program, over the vocabulary of ``prelude.h``.

A value with the program's lane axis is a vector of ``FUSEC_W`` lanes, any other a scalar. In
registers, 16-bit floats are f32 and small integers i32: a load widens, ``Put`` rounds or wraps, and
a value cast down and used again is rounded by its cast. Grid axes are OpenMP loops, run by torch's
own threads; a kernel of little work stays on one.

An index loaded from memory is checked: out of range it touches no memory and sets ``*status`` to 1,
as does an index that a scatter compares; an integer divisor of 0 sets it to 2. The caller turns
them into eager's errors.

Worked example::

    extern "C" void k0(const m_f32 *x, m_f32 *y, int *status) {
      #pragma omp parallel for schedule(static)
      for (long long m = 0; m < 8; ++m) {
        const float v_x = lds_f32(x + m);
        sts_f32(y + m, v_x);
      }
    }
"""

from __future__ import annotations

from fusec.codegen.cpp.fields import fields
from fusec.codegen.cpp.gathers import steady_gathers
from fusec.codegen.cpp.index import IndexPrinter
from fusec.codegen.cpp.pairs import half_of_pair, paired_puts
from fusec.codegen.cpp.prefetches import (
    iterations_ahead,
    lines_apart,
    lines_of,
    next_tile,
    own_loads,
    points_ahead,
)
from fusec.codegen.cpp.text import comment, literal
from fusec.codegen.cpp.threads import omp_schedule, read_ahead
from fusec.codegen.cpp.transposed import Block, transposed_block
from fusec.codegen.cpp.unrolling import has_many_gathers, is_unrolled
from fusec.errors import InternalError
from fusec.ir.dtype import BF16, BOOL, F32, F64, I32, I64, Kind, compute_type
from fusec.ir.expr import Buffer, Cast, Const, Expr, IndexValue, Load, Op, Reduce, Scan, Select, Var
from fusec.ir.index import Axis, Index, Runtime, Size, floordiv, index, most
from fusec.ir.names import Names
from fusec.ir.program import (
    PACKED,
    Carry,
    For,
    Let,
    Matrix,
    Multiply,
    Program,
    Put,
    Scratch,
    Statement,
    Update,
    statements,
    stored_alone,
)
from fusec.ir.scalar import CHECKED, COARSE_TERMS, ROUND

_VALUE = {F32: "f32", F64: "f64", I64: "i64", I32: "i32", BOOL: "bool"}
_SCALAR = {F32: "float", F64: "double", I64: "long long", I32: "int", BOOL: "bool"}
_VECTOR = {F32: "vf32", F64: "vf64", I64: "vi64", I32: "vi32", BOOL: "vm"}
_INFIX = {"add": "+", "sub": "-", "div": "/", **dict.fromkeys(COARSE_TERMS, "*")}


def print_kernel(program: Program) -> str:
    """Return the C++ function of a program."""
    return CppPrinter(program).print()


class CppPrinter:
    """Prints one program; ``kind`` is the function's linkage and return type."""

    def __init__(self, program: Program, kind: str = 'extern "C" void') -> None:
        self.kind = kind
        self.program, self.code = program, program.code
        self.lane = program.lanes[0] if program.lanes else None
        self.lines: list[str] = []
        self.depth = 0
        self.names = Names(("status",))
        self.frees: list[str] = []
        self.loops: list[Axis] = []
        self.tiles: Axis | None = None  # of the innermost open loop with a product
        self.place = 0  # line at which quotients of sizes are defined: before all loops
        self.unrounded = stored_alone(program.body)
        self.forms = dict(program.approximate)
        self.positions: dict[Expr, Index] = {}
        self.fetched: dict[Load, Index | None] = {}
        self.fields = fields(program.body)
        self.calls = has_many_gathers(program.body, self.lane, self.code.gathers)
        self.index = IndexPrinter(self.name, self.operand, self.lane, calls=self.calls)
        arrays = (s.buffer for s in statements(program.body) if isinstance(s, Scratch))
        self.operands = {b for b in arrays if b.dtype is BF16 and program.multiplies}

    def name(self, item: Axis | Buffer | Size) -> str:
        """Return the C++ name of an axis, buffer or size."""
        if isinstance(item, Buffer):
            return self.names(item.base, "p_")
        return self.names(item, "i_" if isinstance(item, Axis) else "n_")

    def emit(self, line: str) -> None:
        self.lines.append("  " * self.depth + line)

    # -- structure ---------------------------------------------------------------------------------

    def print(self) -> str:
        program = self.program
        for line in (*program.notation, *program.source):
            self.emit(f"// {comment(line)}")
        self.emit(f"{self.head()} {{")
        self.depth += 1
        if program.table:
            self.open_places()
        else:
            self.open_grid()
        products = (s for s in statements(program.body) if isinstance(s, Multiply))
        if any(product.right.buffer.dtype in PACKED for product in products):
            self.emit("const fusec_tiles_in_use tiles;")
        self.block(program.body)
        indent = "  " * (2 if program.table else 1)
        self.lines[self.place : self.place] = [indent + q for q in self.index.definitions()]
        self.depth -= 1
        self.emit("}")
        self.depth -= 1
        self.emit("}")
        return "\n".join(self.lines) + "\n"

    def head(self) -> str:
        """Return the declaration of the function."""
        return f"{self.kind} {self.program.name}({', '.join(self.parameters())})"

    def open_grid(self) -> None:
        self.place = len(self.lines)
        if self.program.grid:
            self.emit(self.pragma())
        for axis in self.program.grid:
            i = self.name(axis)
            self.emit(f"for (long long {i} = 0; {i} < {self.index.scalar(axis.extent)}; ++{i})")
        self.emit("{")
        self.depth += 1

    def open_places(self) -> None:
        """Open the loop over the blocks of a foreach kernel (``runtime/kernels/table.py``)."""
        program = self.program
        least = self.code.parallel_work
        self.emit(f"#pragma omp parallel for schedule(static) if (work >= {least})")
        self.emit("for (long long place = 0; place < count; ++place) {")
        self.depth += 1
        self.emit("const long long row = places[2 * place];")
        for position, parameter in enumerate(self.pointers()):
            address = f"addresses[row * {len(program.buffers)} + {position}]"
            self.emit(f"{parameter} = ({parameter.partition('*')[0]}*){address};")
        for position, size in enumerate(program.sizes):
            value = f"sizes[row * {len(program.sizes)} + {position}]"
            self.emit(f"const long long {self.name(size)} = {value};")
        self.place = len(self.lines)
        rest = "places[2 * place + 1]"
        for axis in reversed(program.grid):
            i, extent = self.name(axis), self.index.scalar(axis.extent)
            part = rest if axis is program.grid[0] else f"{rest} % ({extent})"
            self.emit(f"const long long {i} = {part};")
            rest = f"{rest} / ({extent})"

    def parameters(self) -> list[str]:
        if self.program.table:
            arrays = ["void *const *addresses", "const int *sizes", "const int *places"]
            return [*arrays, "long long count", "long long work", "int *status"]
        sizes = [f"const long long {self.name(s)}" for s in self.program.sizes]
        return [*self.pointers(), *sizes, "int *status"]

    def pointers(self) -> list[str]:
        """Return the declarations of the program's buffers."""
        written = set(self.program.writes)
        found = []
        for buffer in self.program.buffers:
            qualifier = "" if buffer in written else "const "
            alone = "" if buffer in self.program.overlaid else "__restrict "
            found.append(f"{qualifier}m_{buffer.dtype} *{alone}{self.name(buffer)}")
        return found

    def pragma(self) -> str:
        axes = len(self.program.grid)
        collapse = f" collapse({axes})" if axes > 1 else ""
        text = f"#pragma omp parallel for{collapse} schedule({omp_schedule(self.program)})"
        work = self.program.work
        if work is not None and not work.is_constant:
            return f"{text} if ({self.index.scalar(work)} >= {self.code.parallel_work})"
        if work is not None and work.const < self.code.parallel_work:
            return f"{text} if (0)"
        return text

    def block(self, body: tuple[Statement, ...]) -> None:
        """Print statements, then the frees of the arrays that they allocate."""
        around, self.frees = self.frees, []
        pairs = paired_puts(body, self.lane)
        for position, statement in enumerate(body):
            if position not in pairs:
                self.statement(statement)
            elif (pair := pairs[position]) is not None:
                self.put_pair(*pair)
        for line in self.frees:
            self.emit(line)
        self.frees = around

    def statement(self, statement: Statement) -> None:
        match statement:
            case Let(var=var) if self.fields.get(var, var) is None:
                pass  # the fields that read it are made of the word itself
            case Let():
                self.let(statement)
            case Carry():
                var = statement.var
                start = self.operand(statement.initial, self.is_vector(var))
                self.emit(f"{self.type_of(var)} {var.name} = {start};")
            case Update():
                var = statement.var
                self.emit(f"{var.name} = {self.expression(statement.value, self.is_vector(var))};")
            case Put():
                self.put(statement)
            case Scratch():
                self.scratch(statement)
            case For():
                self.loop(statement)
            case Multiply():
                self.multiply(statement)
            case _:
                raise InternalError(statement, stage="codegen.cpp")

    def multiply(self, product: Multiply) -> None:
        into, left, right = product.into, product.left, product.right
        columns = self.least(tuple(panels * product.width for panels in product.panels))
        rows, terms, around = self.least(product.rows), self.least(product.terms), self.index.safe
        places = (a for m in (left, right) for a in m.start.atoms() if isinstance(a, Runtime))
        self.index.safe = dict(around)
        for gather in (a for a in places if a not in around):
            self.index.safe[gather] = self.check(gather, f"{rows} > 0 && {terms} > 0")
        packed = right.buffer.dtype in PACKED
        sides = (
            self.matrix(into, into.row, into.panel),
            self.matrix(left, left.row, left.column),
            self.matrix(right, right.row, right.column if packed else right.panel),
        )
        ahead = read_ahead(product, self.program)
        function = f"f_multiply_{right.buffer.dtype}" if packed else f"f_multiply{ahead}"
        adds = f"{self.index.scalar(product.adds)} != 0"
        if product.adds.is_constant:
            adds = "true" if product.adds.const else "false"
        self.emit(f"{function}({', '.join(sides)}, {rows}, {columns}, {terms}, {adds});")
        self.index.safe = around

    def matrix(self, matrix: Matrix, *steps: Index) -> str:
        """Return the arguments for a matrix: a pointer to its start, and the given strides."""
        start = f"{self.name(matrix.buffer)} + {self.index.scalar(matrix.start)}"
        if matrix.pairs:
            start = f"(const m_pair *)({start})"
            steps = tuple(floordiv(step, index(2)) for step in steps)
        return ", ".join((start, *map(self.index.scalar, steps)))

    def loop(self, loop: For) -> None:
        block = transposed_block(loop, self.lane)
        if block is not None:
            self.transposed(block)
            return
        i = self.name(loop.axis)
        stop = self.least(loop.stops)
        start = self.index.scalar(loop.start)
        around = self.index.safe
        steady = (g for g in steady_gathers(loop, self.lane) if g not in around)
        self.index.safe = {**around, **{gather: self.check(gather) for gather in steady}}
        if not self.loops:
            self.fetched = points_ahead(loop, self.program, self.lane)
        if is_unrolled(loop, self.lane, self.code):
            self.emit(f"#pragma GCC unroll {self.code.unrolled}")
        if len(loop.stops) > 1 or loop.start.axes:
            self.emit(f"for (long long {i} = {start}, {i}_end = {stop}; {i} < {i}_end; ++{i}) {{")
        else:
            self.emit(f"for (long long {i} = {start}; {i} < {stop}; ++{i}) {{")
        self.depth += 1
        self.loops.append(loop.axis)
        tiles = self.tiles
        if any(isinstance(statement, Multiply) for statement in loop.body):
            self.tiles = loop.axis
        if self.program.stages > 1 or self.tiles:
            self.prefetch(own_loads(loop))
        self.block(loop.body)
        self.loops.pop()
        self.tiles = tiles
        self.depth -= 1
        self.emit("}")
        self.index.safe = around

    def check(self, gather: Runtime, wanted: str = "true") -> str:
        """Print a check of an index; return the name of the index, 0 where it is out of range.

        Args:
            wanted: whether anything is read there.
        """
        place, name = self.operand(gather.expr, False), f"at_{len(self.lines)}"
        inside = f"fusec_in_range({place}, {self.index.scalar(gather.extent)})"
        self.emit(
            f"const long long {name} = fusec_checked({inside}, {wanted}, status) ? {place} : 0;"
        )
        return name

    def least(self, stops: tuple[Index, ...]) -> str:
        text = self.index.scalar(stops[0])
        for other in stops[1:]:
            text = f"fusec_least({text}, {self.index.scalar(other)})"
        return text

    def transposed(self, block: Block) -> None:
        """Print a loop that copies a block into an array as one call."""
        memory = self.name(block.memory)
        at = f"{memory} + {self.index.scalar(block.start)}, {self.index.scalar(block.step)}"
        m, mask = ("", "") if block.guard is None else ("m", f", {block.guard.name}")
        array = self.name(block.array)
        dtype = block.array.dtype
        self.emit(f"ldt{m}_{dtype}({array}, {at}, {self.least(block.counts)}{mask});")

    def scratch(self, statement: Scratch) -> None:
        buffer = statement.buffer
        name = self.name(buffer)
        length = most(statement.length)
        kind = f"m_{buffer.dtype}"
        if length is not None and length * buffer.dtype.itemsize <= self.code.stack_bytes:
            self.emit(f"alignas(64) {kind} {name}[{length}];")
            return
        size = f"sizeof({kind}) * ({self.index.scalar(statement.length)})"
        self.emit(f"{kind} *{name} = ({kind} *)fusec_allocate({size});")
        self.frees.append(f"fusec_free({name});")

    def prefetch(self, loads: list[Load]) -> None:
        """Print prefetches of a later iteration's loads, once for each line of a cache."""
        places: dict[Load, Index | None] = {}
        for load in loads:
            if self.tiles is not None:
                places[load] = next_tile(load, self.tiles, self.lane)
            elif load in self.fetched:
                places[load] = self.fetched[load]
            else:
                places[load] = iterations_ahead(load, self.loops, self.program, self.lane)
        outside = self.loops.index(self.tiles) + 1 if self.tiles else len(self.loops) - 1
        inside = self.loops[outside:]
        for load, at in lines_of(places, self.code.cache_line).items():
            line = self.code.cache_line // load.buffer.dtype.itemsize
            apart = ((self.name(loop), lines_apart(at, loop, line)) for loop in inside)
            once = " && ".join(f"{i} % {every} == 0" for i, every in apart if every > 1)
            place = f"{self.name(load.buffer)} + {self.index.scalar(at)}"
            self.emit(f"{f'if ({once}) ' if once else ''}__builtin_prefetch({place});")

    # -- values ------------------------------------------------------------------------------------

    def is_vector(self, node: Expr) -> bool:
        return self.lane is not None and self.lane in node.axes

    def type_of(self, node: Expr) -> str:
        table = _VECTOR if self.is_vector(node) else _SCALAR
        return table[compute_type(node.dtype)]

    def let(self, let: Let) -> None:
        match let.value:
            case IndexValue(index=position):
                self.positions[let.var] = position
        value = self.expression(let.value, self.is_vector(let.var), let.var)
        self.emit(f"const {self.type_of(let.var)} {let.var.name} = {value};")

    def operand(self, node: Expr, vector: bool) -> str:
        """Return an operand, broadcast if the result has lanes and the operand has none."""
        match node:
            case Const():
                text = literal(node)
            case Var():
                text = node.name
            case _:
                raise InternalError(node, stage="codegen.cpp")
        if vector and not self.is_vector(node):
            return f"v_{_VALUE[compute_type(node.dtype)]}({text})"
        return text

    def expression(self, node: Expr, vector: bool, var: Var | None = None) -> str:
        match node:
            case Load():
                return self.load(node, vector)
            case Op(name=name, args=(arg,)) if var in self.forms:
                return f"f_{name}_{self.forms[var]}({self.operand(arg, vector)})"
            case Op():
                return self.operation(node, vector)
            case Cast():
                return self.cast(node, vector, var)
            case Select():
                then, other = self.operand(node.then, vector), self.operand(node.other, vector)
                return f"f_select({self.operand(node.condition, False)}, {then}, {other})"
            case IndexValue():
                if not vector:
                    text = self.index.scalar(node.index)
                    return text if node.dtype is I64 else f"(int)({text})"
                return self.index.vector(node.index, node.dtype)
            case Reduce() | Scan():
                how = "h" if isinstance(node, Reduce) else "scan"
                values = ", ".join(self.operand(value, True) for value in node.children)
                return f"f_{how}{node.monoid}({values})"
            case Const() | Var():
                return self.operand(node, vector)
            case _:
                raise InternalError(node, stage="codegen.cpp")

    def operation(self, node: Op, vector: bool) -> str:
        args = [self.operand(a, vector) for a in node.args]
        if (symbol := _INFIX.get(node.name)) is not None:
            return f"{args[0]} {symbol} {args[1]}"
        if node.name == "neg":
            return f"-{args[0]}"
        if node.name in CHECKED:
            return f"fusec_{node.name}({', '.join(args)}, status)"
        if node.name == "random" and vector:
            return self.random(node)
        prefix = "" if node.name.startswith("round_") else "f_"
        return f"{prefix}{node.name}({', '.join(args)})"

    def random(self, node: Op) -> str:
        """Return random bits for the lanes; at strides 1, 2 and 4, four elements a counter."""
        seed, position = node.args
        base, by = self.index.along_lane(self.positions.get(position, index(0)))
        step = by.const if by is not None and by.is_constant else 0
        which = base % max(step, 1)
        if step in (1, 2, 4) and which.is_constant and not self.is_vector(seed):
            kind = f"run{step}<{which.const}>" if step > 1 else "run"
            first = self.index.scalar(base - which)
            return f"f_random_{kind}({self.operand(seed, False)}, {first})"
        return f"f_random({self.operand(seed, True)}, {self.operand(position, True)})"

    def cast(self, node: Cast, vector: bool, var: Var | None) -> str:
        if var is not None and (field := self.fields.get(var)) is not None:
            return f"f_field<{field.mask}, {field.zero}>({self.operand(field.word, vector)})"
        arg = self.operand(node.arg, vector)
        source, target = compute_type(node.arg.dtype), compute_type(node.dtype)
        text = arg if source is target else f"to_{_VALUE[target]}({arg})"
        if node.dtype in ROUND:
            if var is not None and var in self.unrounded:
                return text  # the store rounds
            return f"round_{node.dtype}({text})"
        if node.dtype.itemsize < 4 and node.dtype.kind in (Kind.SIGNED, Kind.UNSIGNED):
            return f"to_{node.dtype}({text})"
        return text

    # -- memory ------------------------------------------------------------------------------------

    def load(self, node: Load, vector: bool) -> str:
        buffer, offset = node.buffer, node.indices[0]
        guard = self.guarded(node.guard, offset)
        kind = compute_type(buffer.dtype)
        zero = literal(Const(0, kind))
        masked = guard is not None and guard[1]
        if not vector or (self.index.along_lane(offset)[1] is index(0) and not masked):
            text = f"lds_{buffer.dtype}({self.name(buffer)} + {self.index.scalar(offset)})"
            text = text if guard is None else f"({guard[0]} ? {text} : {zero})"
            return f"v_{_VALUE[kind]}({text})" if vector else text
        if guard is not None and not masked:
            loaded = self.lanes("ld", buffer, offset)
            return f"({guard[0]} ? {loaded} : v_{_VALUE[kind]}({zero}))"
        return self.lanes("ld", buffer, offset, mask=None if guard is None else guard[0])

    def put(self, statement: Put) -> None:
        buffer, offset, guard = statement.buffer, statement.offset, statement.guard
        if self.lane is None or self.lane not in offset.axes:
            line = f"sts_{buffer.dtype}({self.name(buffer)} + {self.index.scalar(offset)}, "
            line += f"{self.operand(statement.value, False)});"
            self.emit(line if guard is None else f"if ({guard.name}) {line}")
            return
        mask = None if guard is None else self.operand(guard, True)
        value = self.operand(statement.value, True)
        self.emit(f"{self.lanes('st', buffer, offset, value, mask=mask)};")

    def put_pair(self, low: Put, high: Put) -> None:
        """Print two vector stores, each of every other element, as one."""
        buffer, guard = low.buffer, low.guard
        base = self.index.scalar(self.index.along_lane(low.offset)[0])
        values = ", ".join(self.operand(put.value, True) for put in (low, high))
        m = "" if guard is None else "m"
        mask = "" if guard is None else f", {self.operand(guard, True)}"
        m = "_operand" if guard is None and buffer.base in self.operands else m
        self.emit(f"stp{m}_{buffer.dtype}({self.name(buffer)} + {base}, {values}{mask});")

    def lanes(
        self, verb: str, buffer: Buffer, offset: Index, *value: str, mask: str | None = None
    ) -> str:
        """Return a vector load or store: contiguous, strided, or by an index vector."""
        pointer, (base, by) = self.name(buffer), self.index.along_lane(offset)
        tail = "".join(f", {text}" for text in (*value, mask) if text is not None)
        kind = f"{'' if mask is None else 'm'}_{buffer.dtype}"
        if by is index(1):
            if verb == "st" and mask is None and buffer.base in self.operands:
                verb = "st_operand"
            return f"{verb}{kind}({pointer} + {self.index.scalar(base)}{tail})"
        half = half_of_pair(buffer, offset, self.lane) if verb == "ld" else None
        if half is not None:
            at = f"{pointer} + {self.index.scalar(base - half)}"
            return f"ldp{kind}<{half}>({at}{tail})"
        if by is not None:
            at = f"{pointer} + {self.index.scalar(base)}, {self.index.scalar(by)}"
            return f"{verb}g{kind}({at}{tail})"
        called = "called_" if self.calls and verb == "ld" and mask is not None else ""
        return f"{called}{verb}i{kind}({pointer}, {self.index.vector(offset, I64)}{tail})"

    def guarded(self, guard: Expr | None, offset: Index) -> tuple[str, bool] | None:
        """Return a load's guard, and whether it has lanes, after range checks of its gathers."""
        text = None if guard is None else self.operand(guard, False)
        vector = guard is not None and self.is_vector(guard)
        gathers = (atom for atom in offset.atoms() if isinstance(atom, Runtime))
        for gather in (g for g in gathers if g not in self.index.safe):
            expr = gather.expr
            wide = self.is_vector(expr)
            place = self.operand(expr, False)
            name = place if expr.dtype is I64 else f"to_i64({place})"
            extent = self.index.scalar(gather.extent)
            ok = f"fusec_in_range({name}, {extent})"
            if text is not None and vector != wide:
                text = text if vector else f"v_bool({text})"
                ok = ok if wide else f"v_bool({ok})"
            vector = vector or wide
            checked = f"ok_{len(self.lines)}"
            kind = "vm" if vector else "bool"
            wanted = text if text is not None else ("v_bool(true)" if vector else "true")
            self.emit(f"const {kind} {checked} = fusec_checked({ok}, {wanted}, status);")
            text = checked
        return None if text is None else (text, vector)
