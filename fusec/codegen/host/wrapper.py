"""The wrapper printer: the graph's ``call(args)`` as readable Python.

``runtime.executable`` binds the few names that it uses: ``empty`` (shape, strides, dtype),
``window`` (a strided view; ``strided`` where a call only reads it), ``restride`` (an eager kernel's
result with the traced strides), ``add_product`` (to a sum), ``constant`` (an argument that only the
FX graph has), the kernels by name, and ``extern_<node>`` for eager kernels. What it does, and where
memory is allocated, reused and freed, is the host program's (``ir/host.py``): this module prints
its statements.

Worked example::

    def call(args):
        x, w, b = args
        args.clear()
        mm = restride(aten.mm.default(x, strided(w, (64, 64), (1, 64), 0)), (64, 1))
        y = empty((8, 64), (64, 1), f32)
        k0(mm, b, y)
        return (y,)

The same statements are printed one by one, as JSON, for whoever watches a call: profilers,
``fusec.watch`` and ``verify`` (``runtime/calls/executable.py`` interprets them). There each launch
has its name, and each statement says whose values it stored. Kernels of a run (``runs.py``) are
launched one by one::

    {"call": [..., ["k0(mm, b, y)", "k3", "k3", {"y": ["add", null]}], ["(y,)", "", null, {}]]}
"""

from __future__ import annotations

import json
import keyword
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

from fusec.codegen.host.runs import RunCode, loop_numbers, run_codes
from fusec.errors import InternalError
from fusec.ir.atoms import Minimum
from fusec.ir.dtype import COMPLEX_OF, DTYPES, NumberForm
from fusec.ir.expr import Buffer
from fusec.ir.extern import AddProduct, NodeOfBuffer
from fusec.ir.graph import (
    Argument,
    Comparison,
    Constant,
    Extern,
    ForeachKernel,
    Graph,
    InputObject,
    Junction,
    Kernel,
    NodeConstant,
    OwnTensor,
    RowLoop,
    SizeMinimum,
    SizeValue,
    Step,
    View,
    sizes_in,
    whole_view,
)
from fusec.ir.host import (
    Allocation,
    FreeBuffers,
    HostLoop,
    HostProgram,
    HostStatement,
    NativeRun,
    steps_of,
)
from fusec.ir.index import FloorDiv, Index, Mod, Size, index, product
from fusec.ir.names import Names
from fusec.ir.program import Program

_BOUND = {
    "args", "call", "empty", "zeros", "window", "restride", "strided", "constant", "aten", "mkl",
    "mkldnn", "ops", "float", "min", "add_product", "_", "view_as_real", "view_as_complex",
    "unconjugated", "conjugated", "negated", "negative", "hooked", "relaid", "plain", "expected",
    "counted",
}  # fmt: skip
_RESERVED = _BOUND | set(DTYPES) | set(keyword.kwlist)
_LOOP = {"start", "rows", "part", "range", "turn"}


class PrintedStatement(NamedTuple):
    """One statement as Python, and as a row of JSON.

    Attributes:
        text: its lines; of the last statement, the expression that is returned.
        launch: the name under which a launch is timed; "" for anything else.
        kernel: what stored the values: a kernel, or a library; None for eager's own kernels.
        stored: variable -> the node whose value it holds now.
    """

    text: str
    launch: str
    kernel: str | None
    stored: Mapping[str, tuple[str, int | None]]


class _Wrapper:
    def __init__(
        self,
        program: HostProgram,
        programs: dict[str, Program],
        code: dict[str, str],
        runs: Mapping[HostStatement, RunCode],
        watched: NodeOfBuffer,
    ) -> None:
        self.program, self.programs, self.code = program, programs, code
        self.runs, self.watched = runs, watched
        loops = {inner.loop.name for inner in program.loops}
        used = _RESERVED | set(programs) | loops | set(map(callee, program.externs))
        used |= {run.name for run in runs.values()}
        self.names = Names(used | _LOOP if loops else used)
        self.lines: list[str] = []
        self.printed: list[PrintedStatement] = []
        self.read = {b for step in program.steps for b in step.reads} | set(program.graph.returned)
        self.last_write = self._last_writes() if watched else {}

    def _last_writes(self) -> dict[Buffer, Step]:
        """Return buffer -> the last step that writes it, entirely or in part."""
        last: dict[Buffer, Step] = {}
        for step in self.program.steps:
            match step:
                case Kernel() | ForeachKernel():
                    last.update(dict.fromkeys(step.writes, step))
                case Extern() if step.written is not None:
                    last[step.written.buffer] = step
        return last

    # -- lines -------------------------------------------------------------------------------------

    def functions(self, name: str = "call") -> dict[str, list[PrintedStatement]]:
        """Return the statements of the bodies of loops, and of the call, by name of the function.

        A body of a loop has no runs, and its values are not watched.
        """
        found: dict[str, list[PrintedStatement]] = {}
        self._inputs(self.program.graph)
        self._end()
        for statement in self.program.statements:
            match statement:
                case Allocation():
                    self._allocate(statement)
                case FreeBuffers(buffers):  # of those that have a name; others were never bound
                    self.lines += [f"del {self.names(b)}" for b in buffers if b in self.names]
                case NativeRun() if statement in self.runs:
                    run = self.runs[statement]
                    self._launch(run.name, run.buffers, run.sizes)
                case HostLoop() if statement in self.runs:
                    self._native_loop(statement, self.runs[statement])
                case HostLoop(loop, body):
                    self._row_loop(loop)
                    self._end(loop)
                    inner = _Wrapper(body, self.programs, self.code, {}, {})
                    found |= inner.functions(loop.name)
                case _:
                    for step in steps_of(statement):
                        self._step(step)
                        self._end(step)
            self._end()
        self._return(self.program.graph)
        return found | {name: self.printed}

    def _end(self, step: Step | None = None) -> None:
        """End a statement, which has the lines that were printed since the last one."""
        if self.lines:
            launch, kernel, made = _described(step)
            known = [b for b in made if b in self.watched and b in self.names]
            last = [b for b in known if self.last_write.get(b, step) is step]
            stored = {self.names(b): self.watched[b] for b in last}
            self.printed.append(PrintedStatement("\n".join(self.lines), launch, kernel, stored))
            self.lines = []

    def _step(self, step: Step) -> None:
        match step:
            case Kernel():
                program = self.programs[step.name]
                self._launch(self.code[step.name], program.buffers, program.sizes)
            case ForeachKernel():
                self._foreach(step)
            case Extern():
                self._extern(step)
            case Constant():
                made = _received(step.buffer, f"constant({step.node!r}, ())")
                self.lines.append(f"{self.names(step.buffer)} = {made}")
            case SizeMinimum():
                self.lines.append(self._minimum(step.size))

    def _minimum(self, size: Minimum) -> str:
        args = ", ".join(print_size(a, self.names) for a in size.args)
        return f"{self.names(size)} = min({args})"

    def _inputs(self, graph: Graph) -> None:
        if graph.inputs:
            names = ["_" if item is None else self.names(item) for item in graph.inputs]
            self.lines.append(f"{_items(names)} = args")
        self.lines.append("args.clear()")
        self.lines += ["del _"] if None in graph.inputs else []
        for size, buffer, axis in graph.measured:
            self.lines.append(f"{self.names(size)} = {self.names(buffer)}.shape[{axis}]")
        tensors = [item for item in graph.inputs if isinstance(item, Buffer)]
        saved = [item for item in tensors if item not in graph.tangents]
        if graph.tangents and saved:
            traced = [f"({self.names(b)}, {self._traced(b)})" for b in saved]
            extents = (n for b in saved for n in (*b.shape, *b.strides))
            minima = [f"{self._minimum(size)}; " for size in dict.fromkeys(_minima(extents))]
            relaid = f"{_items(list(map(self.names, saved)))} = relaid({', '.join(traced)})"
            self.lines.append(f"if hooked(): {''.join(minima)}{relaid}")
        for item in tensors:
            name = self.names(item)
            if item in graph.tangents and item.form is not NumberForm.NEGATIVE:
                self.lines.append(f"{name} = plain({name})")
            if item.form is not NumberForm.PLAIN:
                self.lines.append(f"{name} = {_received(item, name)}")

    def _launch(self, name: str, buffers: Sequence[Buffer], sizes: Sequence[Size]) -> None:
        args = [self.names(b) for b in buffers] + [self.names(s) for s in sizes]
        self.lines.append(f"{name}({', '.join(args)})")

    def _foreach(self, foreach: ForeachKernel) -> None:
        """Print the launch of a foreach kernel: a tuple of tensors for each row, then the sizes."""
        program = self.programs[foreach.name]
        buffers = [foreach.buffers.index(b) for b in program.buffers]
        sizes = [foreach.extents.index(s) for s in program.sizes]
        self.lines.append(f"{self.code[foreach.name]}((")
        for row, _ in foreach.rows:
            self.lines.append(f"    ({', '.join(self.names(row[k]) for k in buffers)},),")
        values = tuple(tuple(row[k] for k in sizes) for _, row in foreach.rows)
        self.lines.append(f"), {values!r})")

    def _allocate(self, allocation: Allocation) -> None:
        buffer, over = allocation.buffer, allocation.over
        if over is None:
            made = f"{'zeros' if allocation.zeroed else 'empty'}({self._traced(buffer)})"
            made = _flipped(buffer.form, made) if buffer.form.has_bit else made
        elif (buffer.shape, buffer.strides) == (over.shape, over.strides):
            made = f"{self.names(over)}  # memory reused"
        else:
            layout, _, _ = self._traced(buffer).rpartition(", ")
            made = f"strided({self.names(over)}, {layout}, 0)  # memory reused"
        self.lines.append(f"{self.names(buffer)} = {made}")

    def _traced(self, buffer: Buffer) -> str:
        """Return a tensor's shape, strides and type."""
        shape, strides, _ = _layout(whole_view(buffer))
        dtype = COMPLEX_OF[buffer.dtype] if buffer.form.is_complex else buffer.dtype
        return f"{_tuple(shape, self.names)}, {_tuple(strides, self.names)}, {dtype}"

    def _extern(self, extern: Extern) -> None:
        reader = "window" if extern.may_alias or extern.written is not None else "strided"
        args = [self._argument(a, reader) for a in extern.args]
        if extern.written is not None:
            args[0] += ".data"  # has its own version counter: AOTAutograd counts the write itself
        args += [f"{k}={self._argument(v, reader)}" for k, v in extern.kwargs]
        made = extern.outputs
        call = f"{callee(extern)}({', '.join(args)})"
        if extern.bound_sizes:
            self._sized(extern, call)
            return
        used = [b for b in extern.writes if b in self.read]
        if not used:
            self.lines.append(call)
            return
        if not extern.many and len(made) == 1:
            assert made[0] is not None
            value = call if extern.is_pending else self._restride(made[0], call, extern)
            self.lines.append(f"{self.names(made[0])} = {value}")
            return
        unused = len(used) < len(made)
        targets = [self.names(b) if b is not None and b in used else "_" for b in made]
        call = f"counted({call}, {len(made)}, {extern.target!r})" if extern.is_custom else call
        self.lines.append(f"{_items(targets)} = {call}")
        self.lines += ["del _"] if unused else []
        for buffer in () if extern.is_pending else used:
            name = self.names(buffer)
            self.lines.append(f"{name} = {self._restride(buffer, name, extern)}")

    def _sized(self, extern: Extern, call: str) -> None:
        """Print a call with data-dependent result sizes, and bind these sizes."""
        results = [f"{self.names(b)}" if b is not None else "_" for b in extern.outputs] or ["_"]
        for bound in extern.bound_sizes:
            if bound.axis is None:
                results[bound.result] = self.names(bound.size)
        self.lines.append(f"{', '.join(results)}{',' if extern.many else ''} = {call}")
        for bound in extern.bound_sizes:
            if bound.axis is not None:
                name = self.names(bound.size)
                self.lines.append(f"{name} = {results[bound.result]}.shape[{bound.axis}]")
        for buffer, name in zip(extern.outputs, results, strict=False):
            if buffer is not None:
                self.lines.append(f"{name} = {self._restride(buffer, name, extern)}")

    def _native_loop(self, statement: HostLoop, run: RunCode) -> None:
        """Print the launch of all iterations of a loop, with what its body allocates around it."""
        loop = statement.loop
        new = [s for s in statement.body.statements if isinstance(s, Allocation)]
        for allocation in new:
            self._allocate(allocation)
        place = {inner: self._view(view, "strided") for inner, view in loop.outside.items()}
        buffers = [place.get(b) or self.names(b) for b in run.buffers]
        numbers = [print_size(number, self.names) for number in loop_numbers(loop, run)]
        self.lines.append(f"{run.name}({', '.join([*buffers, *numbers])})")
        self.lines += [f"del {self.names(allocation.buffer)}" for allocation in new]

    def _row_loop(self, loop: RowLoop) -> None:
        """Print a loop over chunks of rows: pass windows, copy results to their rows.

        ``turn`` is 0 for the iterations that write the final buffers of what is carried, else 1.
        Where the last one is found by a condition, it may have written the others, or nothing.
        """
        rows, ragged = print_size(loop.rows, self.names), not loop.count.is_constant
        count = "rows" if ragged else str(loop.chunk)
        pairs = [f"{self.names(one.final)}, {self.names(one.other)}" for one in loop.carried]
        starts = [self._view(one.initial) for one in loop.carried]
        if loop.while_true:
            self.lines.append("start, turn = 0, 1")
            self.lines.append(f"while ({pairs[0]})[turn] if start else {starts[0]}:")
        else:
            self.lines.append(f"for start in range(0, {rows}, {loop.chunk}):")
        if ragged:
            self.lines.append(f"    rows = min({loop.chunk}, {rows} - start)")
        sizes = [i for i in loop.graph.inputs if isinstance(i, Size)]
        args = ["rows" if index(s) is loop.count else self.names(s) for s in sizes]
        args += [self._rows_of(view, count) for view in loop.sliced]
        args += [self._view(view) for view in loop.whole]
        if loop.while_true:
            self.lines.append("    turn = 1 - turn")
        elif loop.carried:
            self.lines.append(f"    turn = ({rows} - 1 - start) // {loop.chunk} % 2")
        for pair, first in zip(pairs, starts, strict=True):
            args.append(f"({pair})[1 - turn] if start else {first}")
        args += [f"{self.names(b)}.data" for b in loop.added]
        outside = loop.outside
        places = {b: self._rows_of(outside[part], count) for b, part in loop.chunks.items()}
        args += [places[b] for b in loop.placed]
        args += [f"({pair})[turn]" for pair in pairs]
        self.lines.append(f"    part = {loop.name}([{', '.join(args)}])")
        for position, buffer in enumerate(loop.results):
            self.lines.append(f"    {places[buffer]}.data.copy_(part[{position}])")
        self.lines.append("    del part")
        if loop.while_true:
            self.lines.append("    start = 1")
            self.lines.append("if turn:")
            for one, first in zip(loop.carried, starts, strict=True):
                last = f"{self.names(one.other)} if start else {first}"
                self.lines.append(f"    {self.names(one.final)}.data.copy_({last})")

    def _rows_of(self, view: View, count: str) -> str:
        """Return the window of a chunk's rows: ``count`` rows from ``start`` on."""
        sizes = [count, *(print_size(extent, self.names) for extent in view.shape[1:])]
        step = view.strides[0]
        first = (
            f"start * {print_size(step, self.names)}"
            if step.is_constant
            else (f"start * ({print_size(step, self.names)})")
        )
        if view.offset is not index(0):
            first = f"{print_size(view.offset, self.names)} + {first}"
        strides = _tuple(view.strides, self.names)
        return f"window({self._base(view)}, ({', '.join(sizes)},), {strides}, {first})"

    def _restride(self, buffer: Buffer, value: str, extern: Extern) -> str:
        shape, strides, _ = _layout(whole_view(buffer))
        if extern.is_custom:
            dtype = COMPLEX_OF[buffer.dtype] if buffer.form.is_complex else buffer.dtype
            value = f"expected({value}, {_tuple(shape, self.names)}, {dtype}, {extern.target!r})"
        return _received(buffer, f"restride({value}, {_tuple(strides, self.names)})")

    def _return(self, graph: Graph) -> None:
        """Print the results; equal ones are returned as one object, bound to a name."""
        made = (o for o in graph.outputs if isinstance(o, OwnTensor) or _is_window(o))
        twice = {o: self.names.new("result") for o, count in Counter(made).items() if count > 1}
        self.lines += [f"{name} = {self._argument(o)}" for o, name in twice.items()]
        self._end()
        outputs = [twice[o] if o in twice else self._argument(o) for o in graph.outputs]
        self.lines.append(f"({_items(outputs)})")
        self._end()

    # -- arguments ---------------------------------------------------------------------------------

    def _argument(self, arg: Argument, window: str = "window") -> str:
        match arg:
            case View():
                return self._view(arg, window)
            case OwnTensor(detached=True):
                return f"{self._view(arg.view)}.detach()"
            case OwnTensor():
                return self._window(arg.view, window)
            case SizeValue():
                return print_size(arg.index, self.names)
            case Comparison():
                sides = (print_size(side, self.names) for side in (arg.left, arg.right))
                return f" {arg.sign} ".join(sides)
            case Junction():
                return f" {arg.sign} ".join(
                    f"({self._argument(part, window)})" for part in arg.parts
                )
            case InputObject():
                return self.names(arg)
            case NodeConstant():
                return f"constant({arg.node!r}, {arg.path!r})"
            case tuple():
                return f"[{', '.join(self._argument(a, window) for a in arg)}]"
            case float():
                return repr(arg) if arg == arg and abs(arg) != float("inf") else f"float('{arg}')"
            case _:
                return repr(arg)

    def _view(self, view: View, window: str = "window") -> str:
        return self.names(view.buffer) if view.is_buffer else self._window(view, window)

    def _window(self, view: View, window: str) -> str:
        had, wanted = view.buffer.form, view.form
        crossing = had.is_complex is not wanted.is_complex
        layout = _layout(replace(view, form=NumberForm.PLAIN) if crossing else view)
        shape, strides = (_tuple(part, self.names) for part in layout[:2])
        made = f"{window}({self._base(view)}, {shape}, {strides}, "
        made += f"{print_size(layout[2], self.names)})"
        if crossing and wanted.is_complex:
            made = f"view_as_complex({made})"
        return made if (had.has_bit and not crossing) is wanted.has_bit else _flipped(wanted, made)

    def _base(self, view: View) -> str:
        """Return the tensor that a window is taken of: real for a real window."""
        name, form = self.names(view.buffer), view.buffer.form
        if form.is_complex is view.form.is_complex:
            return name
        name = _flipped(form, name) if form.has_bit else name
        return f"view_as_real({name})" if form.is_complex else name


def _minima(values: Iterable[Index]) -> Iterator[Minimum]:
    """Yield the minima in some sizes, each behind those in its arguments."""
    for size in sizes_in(values):
        if isinstance(size, Minimum):
            yield from _minima(size.args)
            yield size


def _layout(view: View) -> tuple[tuple[Index, ...], tuple[Index, ...], Index]:
    """Return shape, strides and offset of a view in numbers of its form."""
    if not view.form.is_complex:
        return view.shape, view.strides, view.offset
    return view.shape[:-1], tuple(s // 2 for s in view.strides[:-1]), view.offset // 2


def _flipped(form: NumberForm, text: str) -> str:
    """Return a tensor with its conjugate or negative bit flipped."""
    return f"{text}.conj()" if form.is_complex else f"negative({text})"


def _received(buffer: Buffer, text: str) -> str:
    """Return a tensor that comes from outside with the bit that was traced, set or not."""
    match buffer.form:
        case NumberForm.PLAIN:
            return text
        case NumberForm.NEGATIVE:
            return f"negated({text})"
        case NumberForm.COMPLEX:
            return f"unconjugated({text})"
        case NumberForm.CONJUGATE:
            return f"conjugated({text})"


def _described(step: Step | None) -> tuple[str, str | None, tuple[Buffer, ...]]:
    """Return a step's launch, the kernel or library behind it, and the buffers it writes."""
    match step:
        case Kernel() | ForeachKernel():
            return step.name, step.name, step.writes
        case RowLoop():
            return "", step.name, step.writes
        case Extern():
            launch = step.node if step.is_launch else ""
            return launch, step.library, () if step.is_pending else step.writes
        case _:
            return "", None, ()


def _is_window(argument: Argument) -> bool:
    return isinstance(argument, View) and not argument.is_buffer


def callee(extern: Extern) -> str:
    """Return the callee of an extern: the library's name if it has one, or a bound name."""
    if extern.effect == AddProduct():
        return "add_product"
    if extern.target.startswith(("aten.", "mkl.", "mkldnn.")):
        return extern.target
    return f"ops.{extern.target}" if extern.library else f"{_EXTERN}{extern.node}"


def taken(program: HostProgram) -> dict[str, list[Any]]:
    """Return the parts of the FX graph that a program's wrapper refers to.

    Returns:
        "calls": nodes whose callables it calls; "constants": nodes, with paths in their arguments.
    """
    calls: list[str] = []
    constants: list[tuple[str, tuple[str | int, ...]]] = []
    for statement in program.statements:
        match statement:
            case HostLoop():
                inner = taken(statement.body)
                calls += inner["calls"]
                constants += inner["constants"]
            case Constant():
                constants.append((statement.node, ()))
            case Extern():
                calls += [statement.node] * callee(statement).startswith(_EXTERN)
                constants += [(one.node, one.path) for one in _constants(statement.arguments)]
    return {"calls": list(dict.fromkeys(calls)), "constants": list(dict.fromkeys(constants))}


def _constants(arguments: Iterable[Argument]) -> Iterator[NodeConstant]:
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _constants(argument)
        elif isinstance(argument, NodeConstant):
            yield argument


_EXTERN = "extern_"


def _tuple(values: tuple[Index, ...], names: Callable[[Size], str]) -> str:
    return f"({_items([print_size(v, names) for v in values])})"


def _items(texts: Sequence[str]) -> str:
    """Return the items of a Python tuple: ``x, y``, and ``x,`` for one alone."""
    return f"{texts[0]}," if len(texts) == 1 else ", ".join(texts)


def print_size(value: Index, names: Callable[[Size], str]) -> str:
    """Return an index without axes as a Python expression."""
    parts: list[str] = []
    for monomial, coefficient in value.terms:
        factors = [_print_atom(atom, names) for atom in monomial]
        if coefficient != 1:
            factors.insert(0, str(coefficient))
        parts.append(" * ".join(factors))
    if value.const or not parts:
        parts.append(str(value.const))
    return " + ".join(parts)


def _print_atom(atom: object, names: Callable[[Size], str]) -> str:
    match atom:
        case Size():
            return names(atom)
        case FloorDiv() | Mod():
            sign = "//" if isinstance(atom, FloorDiv) else "%"
            dividend, divisor = print_size(atom.dividend, names), print_size(atom.divisor, names)
            return f"(({dividend}) {sign} ({divisor}))"
        case _:
            raise InternalError(atom, stage="codegen.wrapper")


def print_blocks(program: Program) -> str:
    """Return the blocks of a table's row, which are the grid's, over its sizes ``s0``, ``s1``..."""
    names = {size: f"s{position}" for position, size in enumerate(program.sizes)}
    return print_size(product(axis.extent for axis in program.grid), names.__getitem__)


def print_wrapper(program: HostProgram, programs: dict[str, Program], code: dict[str, str]) -> str:
    """Return the source of ``call(args)`` for a host program.

    Args:
        programs: kernel name -> program.
        code: kernel name -> name of the kernel whose code it runs.
    """
    runs = run_codes(program, programs, code)
    functions = _Wrapper(program, programs, code, runs, {}).functions()
    return "\n\n".join(starmap(partial(_print_function, program.graph.name), functions.items()))


def _print_function(graph: str, name: str, printed: Sequence[PrintedStatement]) -> str:
    *statements, result = (one.text for one in printed)
    lines = [*"\n".join(statements).splitlines(), f"return {result}"]
    title = f"graph {graph}" if name == "call" else "a chunk of rows"
    return "\n".join([f"# {title}", f"def {name}(args):", *(f"    {s}" for s in lines), ""])


def print_statements(
    program: HostProgram, programs: dict[str, Program], code: dict[str, str], watched: NodeOfBuffer
) -> str:
    """Return the statements of ``call``, and of the bodies of loops, for the interpreter.

    Args:
        programs, code: as of ``print_wrapper``.
        watched: buffer -> the node whose value it holds, for buffers that are to be compared.
    """
    return json.dumps(_Wrapper(program, programs, code, {}, watched).functions())
