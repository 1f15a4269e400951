"""The printed form of every structure, as logs, docs, dumps and golden files show it.

The grammar is in the docstrings of ``index.py``, ``expr.py``, ``graph.py`` and ``program.py``.
"""

from __future__ import annotations

from fusec.errors import InternalError
from fusec.ir.dtype import NumberForm
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
    Scan,
    Select,
    Var,
    children,
    postorder,
)
from fusec.ir.graph import (
    Argument,
    CallStep,
    Comparison,
    Constant,
    Def,
    Extern,
    ForeachKernel,
    Graph,
    InputObject,
    Junction,
    Kernel,
    NodeConstant,
    OwnTensor,
    RowLoop,
    Schedule,
    SizeMinimum,
    SizeValue,
    Step,
    Store,
    View,
)
from fusec.ir.index import Axis, Index, Size
from fusec.ir.scalar import SCALAR_OPS

LONGEST_LINE = 10_000
"""Most characters of a printed sub-expression; a longer one is printed as ``...``."""
LONG_NODE = 80
"""A node that is used twice and has more characters than this gets a line of its own."""


def print_expr(root: Expr) -> str:
    """Return the expression on one line; nodes used twice are printed twice.

    Long sub-expressions are abbreviated, because shared nodes make the text grow exponentially.
    """
    text: dict[Expr, str] = {}
    for node in postorder((root,)):
        text[node] = _expr(node, text)
        if len(text[node]) > LONGEST_LINE and node is not root:
            text[node] = "..."
    return _strip(text[root])


def print_lines(roots: dict[str, Expr]) -> list[str]:
    """Return ``target = expr`` lines; large shared nodes get a line ``t<n>`` of their own."""
    uses: dict[Expr, int] = {}
    order = postorder(roots.values())
    for node in order:
        for child in children(node):
            uses[child] = uses.get(child, 0) + 1
    for root in roots.values():
        uses[root] = uses.get(root, 0) + 1
    text: dict[Expr, str] = {}
    lines: list[str] = []
    for node in order:
        text[node] = _expr(node, text)
        large = isinstance(node, Op | Select | Reduce) or len(text[node]) > LONG_NODE
        if uses[node] > 1 and large:
            axes = ", ".join(a.name for a in sorted(node.axes, key=lambda a: a.serial))
            name = f"t{len(lines)}"
            lines.append(f"{name}[{axes}] = {_strip(text[node])}")
            text[node] = name
    lines.extend(f"{target} = {_strip(text[root])}" for target, root in roots.items())
    return lines


def _strip(text: str) -> str:
    """Drop one pair of parentheses around the whole text."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for position, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0 and position < len(text) - 1:
            return text
    return text[1:-1]


def _expr(node: Expr, text: dict[Expr, str]) -> str:
    match node:
        case Load():
            body = f"{node.buffer.name}[{', '.join(map(repr, node.indices))}]"
            return body if node.guard is None else f"({body} if {text[node.guard]})"
        case Const():
            return repr(node.value)
        case IndexValue():
            return f"({node.index}):{node.dtype}"
        case Op():
            row = SCALAR_OPS[node.name]
            args = [text[a] for a in node.args]
            if row.infix is not None:
                return f"({args[0]} {row.infix} {args[1]})"
            return f"{node.name}({', '.join(map(_strip, args))})"
        case Cast():
            return f"{node.dtype}({_strip(text[node.arg])})"
        case Select():
            parts = (node.condition, node.then, node.other)
            return f"where({', '.join(_strip(text[p]) for p in parts)})"
        case Reduce() | Scan() | Dot():
            over = ", ".join(a.name for a in node.over)
            operands = ", ".join(_strip(text[c]) for c in children(node))
            return f"{_folding(node)}({over}: {operands})"
        case Var():
            return node.name
        case _:
            raise InternalError(node, stage="ir.text")


def _folding(node: Reduce | Scan | Dot) -> str:
    if isinstance(node, Dot):
        return "tf32" if node.tf32 else "dot"
    return f"{node.monoid}{'_scan' * isinstance(node, Scan)}"


def print_type(buffer: Buffer) -> str:
    """Return ``dtype[shape]``, with the strides where they are not row-major."""
    shape = ", ".join(map(repr, buffer.shape))
    kind = _formed(buffer.form, str(buffer.dtype))
    if buffer.is_row_major:
        return f"{kind}[{shape}]"
    return f"{kind}[{shape} : {', '.join(map(repr, buffer.strides))}]"


def _formed(form: NumberForm, text: str) -> str:
    return text if form is NumberForm.PLAIN else f"{form.value} {text}"


def print_axes(axes: tuple[Axis, ...]) -> str:
    return "  ".join(f"{a.name}:{a.extent}" for a in axes) or "-"


def print_argument(arg: Argument) -> str:
    match arg:
        case View():
            if arg.shape == arg.buffer.shape and arg.strides == arg.buffer.strides:
                return _formed(arg.form, arg.buffer.name)
            shape = ", ".join(map(repr, arg.shape))
            strides = ", ".join(map(repr, arg.strides))
            return _formed(arg.form, f"{arg.buffer.name}[{shape} : {strides} + {arg.offset}]")
        case OwnTensor():
            return f"{'detached' if arg.detached else 'view of'} {print_argument(arg.view)}"
        case SizeValue():
            return repr(arg.index)
        case Comparison():
            return f"{arg.left} {arg.sign} {arg.right}"
        case Junction():
            return f" {arg.sign} ".join(f"({print_argument(part)})" for part in arg.parts)
        case NodeConstant():
            return f"<{'.'.join(map(str, arg.path))} of {arg.node}>"
        case InputObject():
            return arg.name
        case tuple():
            return f"[{', '.join(map(print_argument, arg))}]"
        case _:
            return repr(arg)


def print_call(line: CallStep) -> str:
    match line:
        case Constant():
            names, args = [line.buffer.name], []
        case SizeMinimum():
            names, args = [line.size.name], [repr(size) for size in line.size.args]
        case Extern():
            args = [print_argument(a) for a in line.args]
            args += [f"{k}={print_argument(v)}" for k, v in line.kwargs]
            names = ["_" if b is None else b.name for b in line.outputs]
            for bound in (b for b in line.bound_sizes if b.axis is None):
                names[bound.result] = bound.size.name
    return f"{', '.join(names)} = extern {line.target}({', '.join(args)})    # {line.reason}"


def print_def(line: Def) -> str:
    """Return a definition on one line, with its type."""
    target = f"{line.buffer.name}[{', '.join(a.name for a in line.axes)}]"
    return f"{target} = {line.expr!r}    : {print_type(line.buffer)}"


def print_graph(graph: Graph) -> str:
    """Return the text of a graph, with one line for each definition."""
    inputs = []
    for item in graph.inputs:
        match item:
            case Buffer():
                inputs.append(f"{item.name}: {print_type(item)}")
            case Size():
                inputs.append(f"{item.name}: size")
            case InputObject():
                inputs.append(f"{item.name}: object")
            case None:
                inputs.append("_")
    lines = [f"graph {graph.name}({', '.join(inputs)})"]
    for node in graph.nodes:
        match node:
            case Def():
                lines.append(f"  {print_def(node)}")
            case RowLoop():
                lines += [f"  {line}" for line in print_row_loop(node).splitlines()]
            case _:
                lines.append(f"  {print_call(node)}")
    lines.append(f"  return {', '.join(map(print_argument, graph.outputs))}")
    return "\n".join(lines)


def print_kernel(kernel: Kernel) -> str:
    """Return the text of a kernel: its axes, then its stores with shared sub-expressions named."""
    outputs = ", ".join(dict.fromkeys(_result(s.buffer) for s in kernel.stores))
    head = f"kernel {kernel.name} -> {outputs}    grid {print_axes(kernel.grid)}"
    head += f"    inside {print_axes(kernel.inside)}"
    roots = {_stored(store): store.expr for store in kernel.stores}
    return "\n".join([head, *(f"  {line}" for line in print_lines(roots))])


def _result(buffer: Buffer) -> str:
    """Return a buffer's name, with its type where its strides are not row-major."""
    return buffer.name if buffer.is_row_major else f"{buffer.name}: {print_type(buffer)}"


def _stored(store: Store) -> str:
    guard = "" if store.guard is None else f" if {store.guard!r}"
    return f"{store.buffer.name}[{', '.join(map(repr, store.indices))}]{guard}"


def print_schedule(schedule: Schedule) -> str:
    """Return the text of all steps, in execution order."""
    return "\n\n".join(map(print_step, schedule.steps))


def print_step(step: Step) -> str:
    match step:
        case Kernel():
            return print_kernel(step)
        case RowLoop():
            return print_row_loop(step)
        case ForeachKernel():
            return print_foreach(step)
        case _:
            return print_call(step)


def print_template(foreach: ForeachKernel) -> str:
    """Return the text of a foreach kernel's template, without its members."""
    head, *lines = print_kernel(foreach.template).splitlines()
    axes = head.partition("    ")[2]
    head = f"foreach {foreach.name} of {len(foreach.kernels)} kernels    {axes}"
    return "\n".join([head, *lines])


def print_foreach(foreach: ForeachKernel) -> str:
    """Return the text of the template, then a line for each member."""
    lines = [print_template(foreach)]
    for kernel, (buffers, sizes) in zip(foreach.kernels, foreach.rows, strict=True):
        pairs = [f"{s.name}={n}" for s, n in zip(foreach.extents, sizes, strict=True)]
        names = ", ".join((*(b.name for b in buffers), *pairs))
        lines.append(f"  {kernel.name}({names})")
    return "\n".join(lines)


def print_row_loop(loop: RowLoop) -> str:
    """Return the text of a row loop: its operands and results, then its body, indented."""
    inner = [i for i in loop.graph.inputs if isinstance(i, Buffer)]
    sliced = [
        f"{i.name}: {print_type(i)} of {print_argument(v)}"
        for i, v in zip(inner, loop.sliced, strict=False)
    ]
    rows = f"{loop.chunk} of {loop.rows} at a time"
    if loop.while_true:
        rows = f"while {loop.carried[0].final.name}"
    lines = [
        f"rows {loop.name} -> {', '.join(b.name for b in loop.writes)}    {rows}",
        f"  sliced {'; '.join(sliced) or '-'}",
        f"  whole {', '.join(map(print_argument, loop.whole)) or '-'}",
    ]
    if loop.added:
        lines.append(f"  added up {', '.join(b.name for b in loop.added)}")
    for one, (read, made) in zip(loop.carried, loop.states, strict=True):
        into = f"{read}: {print_type(read)} from {print_argument(one.initial)}"
        lines.append(f"  carried {into}, then {made} into {one.final} and {one.other} in turn")
    if loop.placed:
        lines.append(f"  stored by the body {', '.join(b.name for b in loop.placed)}")
    match loop.body:
        case Graph():
            body = print_graph(loop.body)
        case Schedule():
            body = print_schedule(loop.body)
    lines += [f"  {line}" if line else "" for line in body.splitlines()]
    return "\n".join(lines)


def print_index(value: Index) -> str:
    """Return the index as a sum; the grammar is in the docstring of ``index.py``."""
    parts: list[str] = []
    for monomial, coefficient in value.terms:
        body = "*".join(repr(atom) for atom in monomial)
        if coefficient == 1:
            parts.append(f"+ {body}")
        elif coefficient == -1:
            parts.append(f"- {body}")
        else:
            parts.append(f"{'-' if coefficient < 0 else '+'} {abs(coefficient)}*{body}")
    if value.const or not parts:
        parts.append(f"{'-' if value.const < 0 else '+'} {abs(value.const)}")
    text = " ".join(parts)
    return text[2:] if text.startswith("+ ") else "-" + text[2:]
