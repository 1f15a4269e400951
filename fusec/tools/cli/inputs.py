"""``--input SPEC``: the type and shape of one argument.

Grammar::

    INPUT  ::= [name '='] SPEC | '@' file                           input_ids=i64[2,16]<1000
    SPEC   ::= dtype '[' [sizes (',' sizes)*] ']' ['<' bound]       a tensor: bf16[8,128,768]
             | integer | float | 'true' | 'false' | 'none'          a number, or nothing
             | '[' SPEC,* ']' | '(' SPEC,* ')'                      a list, a tuple of them
             | '{' (name ':' SPEC),* '}'                            a dictionary
    sizes  ::= extent ('|' extent)*                                 one for each call: f32[8,16|24]
             | name ['=' extent]                                    each call's own: f32[B,T=64,768]
    dtype  ::= 'f32' | 'bf16' | 'f16' | 'f64' | 'i64' | 'i32' | 'i16' | 'i8' | 'u8' | 'bool'
             | 'c64' | 'c128' | 'f8e4m3fn' | 'f8e4m3fnuz' | 'f8e5m2' | 'f8e5m2fnuz' | 'f8e8m0fnu'

A bound is the exclusive upper limit of indices: ``i64[8,128]<50257``. Tracing needs no values, so
the bound is only checked and kept. Several extents are for several calls of one model, in turn; the
model is traced with the first. A name is for ``fusec build``: each call of the archive chooses the
extent, equal for equal names; tracing takes the extent behind the name, or one that fusec picks. A
file is from ``torch.save``, loaded with ``weights_only``: a tensor, a sequence of arguments, or a
dictionary of arguments by name.
"""

from __future__ import annotations

import argparse
import itertools
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fusec.errors import UsageError
from fusec.ir.dtype import DTYPES as ELEMENT_TYPES
from fusec.ir.dtype import F8

if TYPE_CHECKING:
    import torch

_KINDS = "f32 bf16 f16 f64 i64 i32 i16 i8 u8 bool c64 c128"
DTYPES = {name: ELEMENT_TYPES[name] for name in (*_KINDS.split(), *(kind.name for kind in F8))}
_TORCH_NAMES = {dtype.torch_name: name for name, dtype in DTYPES.items()}
"""Names of element types here -> in torch."""
EXAMPLES = "bf16[8,128,768], i64[8,128]<50257, f32[], or a number such as 3, 0.5, true, none"
MOST_ELEMENTS = (1 << 60) - 1
"""At 8 bytes an element, a signed 64-bit integer counts their bytes; extents of 0 are ignored."""
_NAMED = re.compile(r"([A-Za-z_]\w*)\s*=(?!=)(.*)", re.DOTALL)
_TENSOR = re.compile(r"(?:torch\.)?(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:<(?P<bound>.*))?")
_EXTENT = re.compile(r"[\[,]\s*([A-Za-z_]\w*)\s*=\s*(\d+)")
"""A size by name, with the extent that it is traced with."""
_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor argument: ``dtype`` as fusec spells it; indices less than ``bound``, if given.

    Attributes:
        later: the shapes of further calls, if those have others.
        names: of its axes, None for an axis without one; () if no axis has one.
    """

    dtype: str
    shape: tuple[int, ...]
    bound: int | None = None
    later: tuple[tuple[int, ...], ...] = ()
    names: tuple[str | None, ...] = ()

    def make(self) -> torch.Tensor:
        """Return an uninitialised tensor of this type; under a fake mode it has no memory."""
        # Local: parsing a command line shall not take the second that torch's import takes.
        import torch

        return torch.empty(self.shape, dtype=getattr(torch, DTYPES[self.dtype].torch_name))

    def random(self) -> torch.Tensor:
        """Return a tensor of this type: normal, integers from 0 to the bound (2 if there is none).

        Small integers are safe where they are indices.
        """
        import torch  # as above

        dtype = getattr(torch, DTYPES[self.dtype].torch_name)
        if dtype.is_complex:
            return torch.randn(self.shape, dtype=dtype)
        if dtype.is_floating_point:
            return torch.randn(self.shape).to(dtype)
        high = 2 if self.bound is None else self.bound
        return torch.randint(0, 2 if self.dtype == "bool" else high, self.shape).to(dtype)


Spec: TypeAlias = (
    "TensorInput | int | float | bool | list[Spec] | tuple[Spec, ...] | dict[str, Spec] | None"
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of a call: in order, by name, and files with more of both."""

    specs: tuple[Spec, ...] = ()
    named: Mapping[str, Spec] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    def __len__(self) -> int:
        return len(self.specs) + len(self.named) + len(self.files)

    def read(self) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments in order and by name, with those from the files.

        Raises:
            UsageError: if a file holds something else.
        """
        specs: list[Any] = list(self.specs)
        named: dict[str, Any] = dict(self.named)
        for path in self.files:
            saved = _load(path)
            if isinstance(saved, dict):
                named.update(saved)
            else:
                specs.extend(saved if isinstance(saved, list | tuple) else [saved])
        return specs, named


def _load(path: Path) -> Any:
    import torch  # as above

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"input '@{path}' is no file of torch.save, or holds more than tensors, numbers, "
            "strings, lists and dictionaries, which is all that is read."
        ) from error
    except Exception as error:
        raise UsageError(
            f"input '@{path}' is no file of torch.save: {str(error) or type(error).__name__}."
        ) from error


def add_inputs(parser: argparse.ArgumentParser, text: str) -> None:
    """Declare ``--input`` of a command, with its line of help."""
    parser.add_argument(
        "--input", metavar="SPEC", action="extend", nargs="+", default=[], help=text
    )


def parse_named_sizes(texts: Sequence[str]) -> Inputs:
    """Parse all ``--input``, in which sizes may have names; raises as ``parse_inputs`` does."""
    extents: dict[str, int] = {}
    for name, extent in _EXTENT.findall(" ".join(texts)):
        if extents.setdefault(name, int(extent)) != int(extent):
            raise UsageError(f"the size {name} is given two extents.")
    return parse_inputs(texts, extents)


def parse_inputs(texts: Sequence[str], extents: dict[str, int] | None = None) -> Inputs:
    """Parse all ``--input``.

    Args:
        extents: of sizes by name; missing names are added. None: sizes have no names.
    Raises:
        UsageError: as in ``parse_spec``; for a file that does not exist, or a name given twice.
    """
    specs: list[Spec] = []
    named: dict[str, Spec] = {}
    files: list[Path] = []
    for text in texts:
        match = _NAMED.fullmatch(text.strip())
        if text.startswith("@"):
            files.append(Path(text[1:]))
            if not files[-1].is_file():
                raise UsageError(f"input {text!r}: there is no file {text[1:]!r}.")
        elif match is None:
            specs.append(parse_spec(text, extents))
        elif match[1] in named:
            raise UsageError(f"input {match[1]!r} is given twice.")
        else:
            named[match[1]] = parse_spec(match[2], extents)
    return Inputs(tuple(specs), named, tuple(files))


def leaves(spec: Spec) -> Iterator[Spec]:
    """Yield the parts of a SPEC that are neither lists, tuples nor dictionaries."""
    match spec:
        case list() | tuple():
            for part in spec:
                yield from leaves(part)
        case dict():
            yield from leaves(list(spec.values()))
        case _:
            yield spec


def parse_spec(text: str, extents: dict[str, int] | None = None) -> Spec:
    """Parse a SPEC.

    Args:
        extents: as in ``parse_inputs``.
    Raises:
        UsageError: with the grammar, and the nearest dtype.
    """
    text = text.strip()
    if text[:1] in _CLOSING and text.endswith(_CLOSING[text[:1]]):
        return _nested(text, extents)
    match = _TENSOR.fullmatch(text.replace(" ", ""))
    if match is not None:
        return _tensor(text, match, extents)
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise UsageError(f"input {text!r} is no SPEC. Write it as {EXAMPLES}.")


_CLOSING = {"[": "]", "(": ")", "{": "}"}


def _nested(text: str, extents: dict[str, int] | None) -> Spec:
    """Parse a list, tuple or dictionary of SPECs."""
    parts = _parts(text[1:-1])
    if text[0] == "[":
        return [parse_spec(part, extents) for part in parts]
    if text[0] == "(":
        return tuple(parse_spec(part, extents) for part in parts)
    pairs = [part.partition(":") for part in parts]
    if not all(name.strip().isidentifier() and colon for name, colon, _ in pairs):
        raise UsageError(f"input {text!r}: a dictionary is {{name: SPEC, ...}}.")
    return {name.strip(): parse_spec(spec, extents) for name, _, spec in pairs}


def _parts(text: str) -> list[str]:
    """Split a text at the commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in _CLOSING) - (letter in _CLOSING.values())
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts if any(map(str.strip, parts)) else []


def _tensor(text: str, match: re.Match[str], extents: dict[str, int] | None) -> TensorInput:
    dtype, bound = _TORCH_NAMES.get(match["dtype"], match["dtype"]), match["bound"]
    if dtype not in DTYPES:
        raise UsageError.unknown("dtype", dtype, DTYPES)
    axes = [axis.split("|") for axis in match["shape"].split(",")] if match["shape"] else []
    names = () if extents is None else tuple(_named(axis, extents) for axis in axes)
    if not all(extent.isascii() and extent.isdigit() for axis in axes for extent in axis):
        raise UsageError(
            f"input {text!r}: extents are integers, 0 or more. Write it as {EXAMPLES}."
        )
    is_bound = bound and bound.isascii() and bound.isdigit() and 1 <= int(bound) < 1 << 63
    if bound is not None and (dtype[0] not in "iu" or not is_bound):
        raise UsageError(
            f"input {text!r}: a bound is a positive integer, and for indices only, as in "
            "i64[8,128]<50257."
        )
    counts = {len(axis) for axis in axes if len(axis) > 1} or {1}
    if len(counts) > 1:
        raise UsageError(f"input {text!r}: axes have different numbers of sizes.")
    first, *later = (
        tuple(int(axis[number if len(axis) > 1 else 0]) for axis in axes)
        for number in range(counts.pop())
    )
    if any(math.prod(filter(None, shape)) > MOST_ELEMENTS for shape in (first, *later)):
        raise UsageError(f"input {text!r}: no tensor has more than {MOST_ELEMENTS} elements.")
    own = names if any(names) else ()
    return TensorInput(dtype, first, None if bound is None else int(bound), tuple(later), own)


def _named(axis: list[str], known: dict[str, int]) -> str | None:
    """Return the name of a size and replace it in ``axis`` by its extent; None if it has none."""
    name = axis[0].partition("=")[0]
    if len(axis) > 1 or not (name.isascii() and name.isidentifier()):
        return None
    if name not in known:
        # Distinct, or a trace would take two sizes for one; multiples of 8 suit many kernels.
        known[name] = next(8 * n for n in itertools.count(2) if 8 * n not in known.values())
    axis[0] = str(known[name])
    return name
