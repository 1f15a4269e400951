"""Print the native wrapper: a graph's call as one C++ function, for programs without Python.

It follows the kernels in the same translation unit, and so in the same library, and calls them in
order as the Python wrapper does. The caller provides the memory: arguments, results, and a
workspace in which each buffer has an offset (``arena.py``). A program loads and calls it by
``fusec/native/fusec.h``, which reads the function's parameters from the text ``fusec_signature``.

Worked example::

    extern "C" int fusec_run(void *const *arguments, void *const *results, char *workspace,
                             const long long *sizes, int threads) {
      const fusec_team team(threads);
      int status = 0;
      m_f32 *const x = (m_f32 *)arguments[0];
      m_f32 *const h = (m_f32 *)(workspace + 0);
      gelu_k0(x, h, &status);
      if (status) return status;
      m_f32 *const y = (m_f32 *)results[0];
      add_k1(h, y, &status);
      return status;
    }

and its signature::

    fusec native 2
    argument f32 8 128
    result f32 8 128

Symbolic sizes have a line each, in the order of the function's parameter ``sizes``, and so have
the conditions on them. ``y = x[1:]`` of a table of at most 64 rows::

    fusec native 2
    size s0
    check >= s0 2
    check <= s0 64
    argument f32 s0 128
    result f32 + s0 -1 128

A second function, ``fusec_bytes``, returns the bytes of the workspace (``native_code.py``).

The signature has types and sizes by position, because the library is compiled before any names are
known. Beside it is a text that names arguments and results, a line each::

    needs x86_64 avx avx2        the features of the processor
    size B                       of each dynamic size; several may have one name
    input 1 batch['mask']        an argument, numbered in the order of the model's call
    weight up.weight             a tensor of the weights' file
    or head.weight               another name of it
    held rope.frequencies        a value in the archive, the blob "held/" and the name
    unread                       an argument that is not read
    result result['logits']      the name of each result
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fusec.archive import trees
from fusec.archive.sizes import SizeCondition, names_in
from fusec.codegen.host.runs import RunCode, loop_numbers, run_codes
from fusec.codegen.targets import Target
from fusec.driver.pipeline import Compiled
from fusec.errors import InternalError, UsageError
from fusec.export.arena import Arena, plan_arena, verify_arena
from fusec.export.native_code import (
    NativeWrite,
    dense,
    print_extent,
    print_fixed_places,
    print_formula,
    print_places,
    print_size,
    print_write,
    write_of,
)
from fusec.ir.argument import View, argument_views, whole_view
from fusec.ir.definition import NOWHERE
from fusec.ir.expr import Buffer
from fusec.ir.extern import Extern
from fusec.ir.graph import Graph, Kernel, RowLoop, SizeMinimum, Step
from fusec.ir.host import (
    Allocation,
    FreeBuffers,
    HostLoop,
    HostProgram,
    HostStatement,
    NativeRun,
    steps_of,
)
from fusec.ir.index import Index, Size, index
from fusec.ir.names import Names
from fusec.ir.program import Program
from fusec.ir.strides import contiguous_strides
from fusec.passes.memory.buffers import plan_host

# -- names -----------------------------------------------------------------------------------------


NAMES = "names.txt"


def describe_native(
    calling: Mapping[str, Any], signature: str, returned: int, needed: str, sizes: Mapping[str, str]
) -> str:
    """Return the names for a signature.

    Args:
        calling: as ``archive.model.read_calling`` reads it.
        sizes: names of the signature's sizes.
        returned: how many results the graph has.
        needed: the features of the processor.
    Raises:
        UsageError: for written weights, results that are no tensors, and names that C cannot read.
    """
    rows = [line.split() for line in signature.splitlines()[1:]]
    arguments = [kind for kind, *_ in rows if kind in ("argument", "written", "unread")]
    lines = [f"needs {needed}"]
    # The graph's other arguments are sizes, which have lines of their own.
    lines += [f"size {sizes[rest[0]]}" for kind, *rest in rows if kind == "size"]
    given: list[Any] = [k for k in calling["graph"] if k is None or isinstance(k, int)]
    places = zip(given, arguments, strict=True)
    read = sorted(k for k, kind in places if kind != "unread" and k < len(calling["tensors"]))
    for position, kind in zip(given, arguments, strict=True):
        lines += _argument(calling, position, kind, read)
    paths = dict(trees.tensors_of(calling["result"], "result"))
    if returned != sum(kind == "result" for kind, *_ in rows):
        raise UsageError("a result that is no tensor, which C cannot be given.")
    lines += [f"result {paths.get(k, 'result')}" for k in range(returned)]
    for line in lines:
        if not line.isprintable() or not line.isascii() or set(line) & set('"\\'):
            raise UsageError(f"C reads no such name: {line!r}. Give it letters and digits.")
    return "".join(f"{line}\n" for line in lines)


def _argument(calling: Mapping[str, Any], position: int, kind: str, read: list[int]) -> list[str]:
    tensors = calling["tensors"]
    if kind == "unread":
        return ["unread"]
    if position < len(tensors):
        return [f"input {read.index(position)} {tensors[position]['path']}"]
    row = calling["weights"][position - len(tensors)]
    first, *others = row["names"]
    if kind == "written":
        raise UsageError(
            f"the model writes to {first}, and a model in C has no state that calls share: make it "
            "an input, or call eval()."
        )
    if row["held"]:
        return [f"held {first}"]
    return [f"weight {first}", *(f"or {name}" for name in others)]


# -- the wrapper -----------------------------------------------------------------------------------


FORMAT = "fusec native 2"
"""The first line of a signature: the version of the interface."""
SIGNATURE = "native.txt"
"""Name of the blob with the signature, which must equal the library's."""
SHOWN = 12
"""Greatest number of problems that an error message lists."""

_TEAM = """
extern "C" int omp_get_max_threads(void);
extern "C" void omp_set_num_threads(int);

// So many threads run the kernels of one call: a setting of the thread that calls, put back.
struct fusec_team {
  const int before;
  explicit fusec_team(int threads) : before(omp_get_max_threads()) { omp_set_num_threads(threads); }
  ~fusec_team() { omp_set_num_threads(before); }
};
"""
_HEAD = """\
extern "C" int fusec_run(void *const *arguments, void *const *results, char *workspace,
                         const long long *{sizes}, int threads) {{
  const fusec_team team(threads);
  int status = 0;
"""
_RESERVED = (
    "arguments", "results", "workspace", "sizes", "threads", "team", "status", "at", "places", "all"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Native:
    """The native wrapper of a graph.

    Attributes:
        signature: the text of ``fusec_signature``.
        source: the C++ source that follows the kernels.
    """

    signature: str
    source: str


def add_native(
    asked: Sequence[SizeCondition], target: Target, compiled: Compiled
) -> tuple[Compiled, Mapping[str, bytes]]:
    """Return a compiled graph with the function that C calls, and the blob of its signature.

    Args:
        asked: as of ``print_native``.
    Raises:
        UsageError: as ``print_native`` does.
    """
    # C needs no runs, which take memory; those of one byte have none, and loops are calls.
    program = plan_host(compiled.schedule, target.codegen.overwritable, run_bytes=1)
    native = print_native(program, compiled.programs, compiled.code, asked)
    return replace(compiled, added=native.source), {SIGNATURE: native.signature.encode()}


def print_native(
    program: HostProgram,
    programs: Mapping[str, Program],
    code: Mapping[str, str],
    asked: Sequence[SizeCondition] = (),
) -> Native:
    """Return the C++ function of a host program.

    Args:
        programs, code: as of ``wrapper.print_wrapper``.
        asked: conditions on symbolic sizes, as trees (``archive/sizes.py``).
    Raises:
        UsageError: listing the steps that need torch.
    """
    _refuse_others(program)
    runs = run_codes(program, programs, code)
    program = replace(program, statements=tuple(_around_loops(program)))
    views = argument_views(program.graph.outputs)
    direct = _direct(program.graph, views)
    arena = plan_arena(program, direct)
    verify_arena(program, arena)
    used = {buffer for step in program.steps for buffer in (*step.reads, *step.writes)}
    used.update(program.graph.returned)
    inputs = [
        item if isinstance(item, Buffer) and item in used else None
        for item in program.graph.inputs
        if not isinstance(item, Size)
    ]
    sizes = _sizes(program.graph, asked)
    signature = _signature(program, inputs, views, sizes, asked)
    function = _Function(program, inputs, views, sizes, arena, programs, code, runs)
    return Native(signature, function.print(signature))


def _around_loops(program: HostProgram) -> Iterator[HostStatement]:
    """Yield the statements of a program, with what bodies of loops allocate around the loops."""
    for statement in program.statements:
        if not isinstance(statement, HostLoop):
            yield statement
            continue
        new = [s for s in statement.body.statements if isinstance(s, Allocation)]
        yield from new
        yield statement
        yield FreeBuffers(tuple(allocation.buffer for allocation in new))


def _sizes(graph: Graph, asked: Sequence[SizeCondition]) -> tuple[str, ...]:
    """Return the names of the symbolic sizes: the graph's, and others that conditions mention."""
    given = [size.name for size in graph.given_sizes]
    mentioned = {name for condition in asked for name in names_in(condition)}
    return tuple(dict.fromkeys((*given, *sorted(mentioned))))


def _refuse_others(program: HostProgram) -> None:
    """Raise UsageError if a step is no kernel or an input no dense tensor, listing all of them."""
    steps = [step for statement in program.statements for step in _called(statement)]
    problems = [_problem(step) for step in steps if _needs_torch(step)]
    for item in program.graph.inputs:
        if isinstance(item, Buffer) and not _is_dense(item.shape, item.strides):
            problems.append(f"{item.name}: its elements are not one after another in memory")
        elif item is not None and not isinstance(item, Buffer | Size):
            problems.append(f"{item.name}: an input that is no tensor")
    for held in (*program.graph.inputs, *argument_views(program.graph.outputs)):
        if isinstance(held, Buffer | View) and held.form.has_bit:
            problems.append(
                f"a {held.form.value} view as input or result: resolve it (resolve_conj())"
            )
    if problems:
        lines = [f"  {problem}" for problem in dict.fromkeys(problems)]
        lines[SHOWN:] = [f"  and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN)
        raise UsageError(
            "the model cannot run without Python. What needs torch:\n" + "\n".join(lines)
        )


def _called(statement: HostStatement) -> tuple[Step, ...]:
    """Return the steps of a statement: of a loop those of its body, unless C cannot run it."""
    match statement:
        case HostLoop(loop, body, native):
            return body.steps if native or body.kernels != body.steps else (loop,)
        case _:
            return steps_of(statement)


def _needs_torch(step: Step) -> bool:
    match step:
        case Kernel() | SizeMinimum():
            return False
        case Extern():
            return write_of(step) is None
        case _:
            return True


def _problem(step: Step) -> str:
    """Describe why a step needs torch, with the user's source line."""
    match step:
        case RowLoop():
            what, reason = "a loop", "C runs loops of kernels alone, within no other loop"
            sources = (getattr(inner, "origin", NOWHERE).source for inner in step.schedule.steps)
            source = next(filter(None, sources), ())
        case _:
            what = getattr(step, "target", type(step).__name__)
            reason = getattr(step, "reason", "")
            source = getattr(step, "origin", NOWHERE).source
    place = f", at {source[-1]}" if source else ""
    return f"{what}: {reason}{place}" if reason else f"{what}{place}"


def _is_dense(shape: tuple[Index, ...], strides: tuple[Index, ...]) -> bool:
    """Return True if strides are contiguous in row-major order."""
    if any(extent.is_constant and extent.const == 0 for extent in shape):
        return True
    return all(
        stride is wanted or (extent.is_constant and extent.const == 1)
        for extent, stride, wanted in zip(shape, strides, contiguous_strides(shape), strict=True)
    )


def _direct(graph: Graph, views: Sequence[View]) -> dict[Buffer, int]:
    """Return buffer -> number of the result whose memory it can use directly.

    Other results are copied: views of a part, inputs, and the second of two equal results.
    """
    inputs = set(graph.inputs)
    found: dict[Buffer, int] = {}
    for number, view in enumerate(views):
        whole = view.is_whole and _is_dense(view.shape, view.strides)
        if whole and view.buffer not in inputs:
            found.setdefault(view.buffer, number)
    return found


def _signature(
    program: HostProgram,
    inputs: Sequence[Buffer | None],
    views: Sequence[View],
    sizes: Sequence[str],
    asked: Sequence[SizeCondition],
) -> str:
    written = {buffer for step in program.steps for buffer in step.writes}
    written |= {call.written.buffer for call in program.externs if call.written is not None}
    lines = [FORMAT, *(f"size {name}" for name in sizes)]
    lines += [f"check {print_formula(condition)}" for condition in asked]
    for buffer in inputs:
        kind = "written" if buffer in written else "argument"
        lines.append("unread" if buffer is None else f"{kind} {_type(buffer, buffer.shape)}")
    lines += [f"result {_type(view.buffer, view.shape)}" for view in views]
    return "".join(f"{line}\n" for line in lines)


def _type(buffer: Buffer, shape: tuple[Index, ...]) -> str:
    return " ".join((str(buffer.dtype), *map(print_extent, shape)))


class _Function:
    """Prints ``fusec_run``, after the signature and the functions that compute offsets."""

    def __init__(
        self,
        program: HostProgram,
        inputs: Sequence[Buffer | None],
        views: Sequence[View],
        sizes: Sequence[str],
        arena: Arena,
        programs: Mapping[str, Program],
        code: Mapping[str, str],
        runs: Mapping[HostStatement, RunCode],
    ) -> None:
        self.program, self.inputs, self.views, self.arena = program, inputs, views, arena
        self.programs, self.code, self.sizes, self.runs = programs, code, sizes, runs
        called = (*(p.name for p in programs.values()), *(run.name for run in runs.values()))
        self.names = Names((*_RESERVED, *called))
        known = {s.name: self.names(s) for s in program.graph.given_sizes}
        self.named = {name: known.get(name) or self.names.new(name) for name in sizes}
        self.size = partial(print_size, name=self.named.__getitem__)
        self.lines: list[str] = []
        self.launched = False

    def print(self, signature: str) -> str:
        functions, self.places = self._find_places()
        for k, buffer in enumerate(self.inputs):
            if buffer is not None:
                self._declare(buffer, f"arguments[{k}]")
        for statement in self.program.statements:
            self._print(statement)
        for k, view in enumerate(self.views):
            if self.arena.results.get(view.buffer) != k:
                result = f"((m_{view.buffer.dtype} *)results[{k}])"
                made = NativeWrite(dense(view), view)
                self.lines += print_write(made, result, self.names, self.size)
        body = "".join(f"  {line}\n" for line in self.lines)
        text = "".join(f'\n    "{line}\\n"' for line in signature.splitlines())
        declared = 'extern "C" const char fusec_signature[];'
        said = f"{declared}\nconst char fusec_signature[] ={text};\n"
        head = _HEAD.format(sizes="sizes" if self.sizes else "")
        return f"{_TEAM}\n{said}\n{functions}\n{head}{body}{_TAIL}"

    def _print(self, statement: HostStatement) -> None:
        match statement:
            case Allocation() | FreeBuffers():
                pass
            case NativeRun(kernels):
                for kernel in kernels:
                    self._launch(kernel)
            case Kernel():
                self._launch(statement)
            case HostLoop(loop):
                self._run_loop(loop, self.runs[statement])
            case Extern():
                self._write(statement)
            case SizeMinimum(size):
                self.lines.append(f"const long long {self.names(size)} = {self.size(index(size))};")
            case _:
                raise InternalError(statement, stage="export.native")

    def _find_places(self) -> tuple[str, Mapping[Buffer, str]]:
        """Return the C++ functions that compute offsets, and each buffer's offset; binds sizes."""
        if not self.sizes:
            return print_fixed_places(self.arena)
        functions, places = print_places(self.arena, self.sizes, self.named.__getitem__)
        for k, name in enumerate(self.sizes):
            self.lines.append(f"const long long {self.named[name]} = sizes[{k}];")
        count = len(set(places.values()))
        if count:
            self.lines += [f"long long places[{count}];", "fusec_places(sizes, places);"]
        return functions, places

    def _declare(self, buffer: Buffer, place: str) -> None:
        kind = f"m_{buffer.dtype} *"
        self.lines.append(f"{kind}const {self.names(buffer)} = ({kind}){place};")

    def _launch(self, kernel: Kernel) -> None:
        program = self.programs[kernel.name]
        self._return_if_failed()
        arguments = [self._pointer(buffer) for buffer in program.buffers]
        arguments += [self.names(size) for size in program.sizes]
        self._call(self.programs[self.code[kernel.name]].name, arguments)

    def _run_loop(self, loop: RowLoop, run: RunCode) -> None:
        """Print the call that runs all iterations of a loop."""
        outside = loop.outside
        self._return_if_failed()
        arguments: list[str] = []
        for buffer in run.buffers:
            view = outside.get(buffer, whole_view(buffer))
            place = f"{self._pointer(view.buffer)} + {self.size(view.offset)}"
            arguments.append(f"any{{(void *)({place})}}")
        arguments += map(self.size, loop_numbers(loop, run))
        self._call(run.name, arguments)
        if loop.while_true:  # it returns now and then, for Python's sake
            self.lines[-1] = f"do {self.lines[-1]} while (status == 4);"

    def _pointer(self, buffer: Buffer) -> str:
        """Return the pointer to a buffer, which is declared before its first use."""
        if buffer.base not in self.names:
            self._declare(buffer.base, self._place(buffer.base))
        return self.names(buffer.base)

    def _return_if_failed(self) -> None:
        self.lines += ["if (status) return status;"] * self.launched
        self.launched = True

    def _call(self, function: str, arguments: list[str]) -> None:
        self.lines.append(f"{function}({', '.join(arguments)}, &status);")

    def _place(self, buffer: Buffer) -> str:
        number = self.arena.results.get(buffer)
        if number is not None:
            return f"results[{number}]"
        return f"(workspace + {self.places[buffer]})"

    def _write(self, call: Extern) -> None:
        write = write_of(call)
        assert write is not None
        target = self.names(write.into.buffer)
        self.lines += print_write(write, target, self.names, self.size)


_TAIL = "  return status;\n}\n"
