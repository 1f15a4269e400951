"""Lower a program to the form that is printed as a Triton kernel: all rewrites before the printer.

The rewrites preserve meaning, and make no choices that the plan has not made. They are stages
(``FORM``), so each is verified, dumped and tested like the stages before them.

Worked example: in ``y = x @ w`` values move to their first use, all tiles get rows and columns, and
the loads of x and w may become copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from fusec.codegen.lowering.orient import orient
from fusec.codegen.lowering.precision import rounded_to_16_bits
from fusec.codegen.triton.base_two import base_two
from fusec.codegen.triton.descriptors import Copies, Descriptor, find_copies
from fusec.codegen.triton.nested_specialization import split_nested
from fusec.codegen.triton.pairs import join_pairs
from fusec.codegen.triton.sink import sink
from fusec.codegen.triton.warp_specialization import RoleStatements, print_split, split
from fusec.ir.expr import Load, Var
from fusec.ir.index import Axis
from fusec.ir.program import Let, Program, Put, Update, print_program, statements
from fusec.ir.verify import check
from fusec.ir.verify_program import verify_program
from fusec.passes.stage import Stage, alone


@dataclass(frozen=True, slots=True)
class Form:
    """A program ready to be printed.

    Attributes:
        dimension: lane axis -> its dimension in every tile that has it.
        approximate: values that may be computed with 16-bit accuracy.
        copies: loads and stores of whole tiles by descriptor.
        roles: the statements of producer and consumer warps, if it is warp-specialized.
    """

    program: Program
    dimension: Mapping[Axis, int]
    approximate: frozenset[Var] = frozenset()
    copies: Copies = field(default_factory=dict)
    roles: RoleStatements | None = None

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """The descriptors of the copies, each once, in the order of first use."""
        return tuple(dict.fromkeys(copy.descriptor for copy in self.copies.values()))


def _base_two(program: Program) -> Program:
    return base_two(program, rounded_to_16_bits(program)) if program.multiplies else program


def _orient(program: Program) -> Form:
    if program.multiplies:
        return Form(*orient(program))
    return Form(program, {axis: position for position, axis in enumerate(program.lanes)})


def _copy_tiles(form: Form) -> Form:
    if not (form.program.copies_tiles and form.program.multiplies):
        return form
    program, copies = find_copies(form.program, form.dimension)
    return replace(form, program=program, copies=copies)


def _join_pairs(form: Form) -> Form:
    program = join_pairs(form.program)
    if program is form.program:
        return form
    *_, lane, both = program.lanes
    return replace(form, program=program, dimension={**form.dimension, both: form.dimension[lane]})


def _specialize_warps(form: Form) -> Form:
    if not form.program.roles:
        return form
    roles = split(form.program, form.copies) or split_nested(form.program, form.copies)
    return form if roles is None else replace(form, roles=roles)


_on_program = partial(Stage, takes="Program", gives="Program")
_on_form = partial(Stage, takes="Form", gives="Form")
FORM = (
    _on_program(
        "base_two",
        "turn exponentials into powers of two, with log2(e) in the scale",
        alone(_base_two),
        needs=("parametrize",),
    ),
    _on_program("sink", "move values to their first use", alone(sink)),
    Stage(
        "orient",
        "choose each tile's rows and columns",
        alone(_orient),
        "Program",
        "Form",
        needs=("sink",),
    ),
    _on_form(
        "copy_tiles",
        "load and store whole tiles by TMA descriptors, where the plan says so",
        alone(_copy_tiles),
        needs=("orient",),
    ),
    _on_form(
        "join_pairs",
        "load and store neighbours in memory together, where lanes are two elements apart",
        alone(_join_pairs),
        needs=("orient",),
    ),
    _on_form(
        "approximate",
        "mark values that reach memory only after rounding to 16 bits",
        lambda form, context: replace(form, approximate=rounded_to_16_bits(form.program)),
        needs=("copy_tiles",),
    ),
    _on_form(
        "specialize_warps",
        "split into producer and consumer warps, where the plan says so",
        alone(_specialize_warps),
        needs=("copy_tiles",),
    ),
)
"""The stages from a program to the form that ``codegen/triton/printer.py`` prints."""


def by_pointers(program: Program) -> Program:
    """Return the program without descriptors, and so without warp specialization."""
    return replace(program, descriptors=False, adds_tiles=False, roles="")


def verify_form(form: Form) -> None:
    """Check a form: its program, and that its tables refer to axes and accesses of the program.

    Raises:
        InvalidIR: naming the first violation.
    """
    program, head = form.program, f"form of {form.program.name}"
    verify_program(program, frozenset(form.copies))
    loose = [axis.name for axis in program.lanes if axis not in form.dimension]
    check(not loose, head, f"lane axes {', '.join(loose)} have no dimension")
    body = list(statements(program.body))
    values = {s.var for s in body if isinstance(s, Let | Update)}
    check(form.approximate <= values, head, "something that may be approximate is no value of it")
    loaded = {s.var for s in body if isinstance(s, Let) and isinstance(s.value, Load)}
    accesses = loaded | {s for s in body if isinstance(s, Put)}
    check(form.copies.keys() <= accesses, head, "something that is copied is no access of it")


def print_form(form: Form) -> str:
    """Return a form as text: the program, then its dimensions, approximate values and copies."""
    lanes = ", ".join(f"{axis.name}: {place}" for axis, place in form.dimension.items())
    lines = [print_program(form.program), f"dimensions {lanes or '-'}"]
    if form.approximate:
        lines.append(f"approximate {', '.join(sorted(v.name for v in form.approximate))}")
    lines += [f"copy {c.descriptor.name}" for c in form.copies.values()]
    lines += [] if form.roles is None else [print_split(form.roles)]
    return "\n".join(lines)
