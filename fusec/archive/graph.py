"""Read archives: load a compiled graph from its bytes, without importing the compiler.

An archive names what it was built for, and is refused elsewhere: the releases of fusec and torch,
the device, and the processor features that its code may use. Its metadata is JSON, and forged
names, counts or sizes in it could lead native code out of bounds. So the wrapper, which is code and
trusted as such, ends with a ``Contract``: the digest of everything beside it, and type, shape and
strides of each argument, which are compared at each call, as are the conditions on named sizes
(``sizes.py``).

Worked example, the end of a wrapper::

    # described: 9f86d081...
    # arguments: [["size", "B"], ["f32", ["B", 8], [8, 1]], ["f32", [16, 8], [8, 1]]]
    # conditions: [["<=", "B", 64]]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

import fusec
from fusec.archive.sizes import (
    SizeCondition,
    SizeFormula,
    bind_sizes,
    extent,
    holds,
    names_in,
    read_condition,
    read_size,
    shown,
)
from fusec.errors import UsageError
from fusec.runtime.cache.entry import decode
from fusec.runtime.calls.convention import Convention
from fusec.runtime.calls.executable import DTYPES, BoxedCall, bind, has_strides
from fusec.runtime.calls.ranges import Ranges
from fusec.runtime.calls.stored import Stored, load_kernels, read_parts
from fusec.runtime.kernels.processor import missing_features, needed_features

UNKNOWN = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError
)  # fmt: skip
"""Exceptions of reading content that no ``fusec build`` writes."""
FORMAT = 6
KEY = "fusec archive"
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names of element types, by torch's."""

Spec: TypeAlias = (
    "tuple[str, tuple[SizeFormula, ...], tuple[SizeFormula, ...]] | tuple[str, SizeFormula] | None"
)
"""A tensor's element type, shape and strides; ("size", formula); None for an unchecked argument."""


class BadArchive(UsageError):
    """Bytes are no archive, or one that does not run here: the message says what is missing."""


class WrongMachine(BadArchive):
    """The archive was built for another machine, or for other releases."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """An archive that was loaded on this machine.

    Attributes:
        target, device: the target of its kernels, and torch's name of the device type.
        call: is called with a graph's inputs, and returns its results in a list.
        convention: the calling convention of ``call``.
        arguments: the specs of the first graph's arguments.
        conditions: the conditions on its sizes.
        beside: the archive's blobs, by name.
    """

    target: str
    device: str
    call: Callable[..., Any]
    convention: Convention
    arguments: tuple[Spec, ...]
    conditions: tuple[SizeCondition, ...]
    beside: Mapping[str, bytes]


def unpack(content: bytes, device: str | None = None) -> Unpacked:
    """Return a compiled graph from an archive's bytes.

    Args:
        device: torch's name of the device type that is wanted; None: any.
    Raises:
        WrongMachine: saying what this machine lacks.
        BadArchive: saying what is wrong with the bytes.
    """
    blobs = decode(KEY, content)
    if blobs is None:
        raise BadArchive("These bytes are no archive of fusec, or they are damaged.")
    try:
        about = json.loads(blobs["about.json"])
        made_for = about["machine"]
        check_machine(about["format"], made_for)
        if device not in (None, made_for["device"]):
            raise WrongMachine(
                f"The archive's kernels are for {made_for['target']}, not for {device}."
            )
        convention = Convention.from_json(blobs["convention.json"])
        parts = read_parts(about["parts"], convention)
        calls, taken = zip(*(_bind(part, blobs) for part in parts), strict=True)
    except OSError as error:
        raise BadArchive(f"The archive's kernels cannot be loaded: {error}") from error
    except UNKNOWN as error:
        raise BadArchive(f"The archive says nothing that this version knows: {error!r}") from error
    return Unpacked(
        made_for["target"],
        made_for["device"],
        convention.around(*calls),
        convention,
        taken[0].arguments,
        taken[0].conditions,
        blobs,
    )


def _bind(part: Stored, blobs: Mapping[str, bytes]) -> tuple[BoxedCall, Contract]:
    """Return the callable of an archive's graph, and its contract."""
    own = blobs_of(part.name, blobs)
    if not {"wrapper.py", "statements.json", "manifest.json"} <= own.keys():
        raise BadArchive(f"The archive has no whole graph {part.name!r}.")
    source = own["wrapper.py"].decode()
    found = read_contract(source)
    if found.beside != digest_beside(blobs):
        raise BadArchive(
            f"What the archive says of its graph {part.name!r} is not what its code was made with."
        )
    kernels = load_kernels(own, json.loads(own["manifest.json"])["kernels"], part.device)
    ranges = Ranges(f"fusec {part.name}", own["statements.json"].decode(), lambda: part.titles)
    call = bind(source, kernels, part.outside, part.device, ranges=ranges)
    return _checked(call, found, part.name), found


def blobs_of(name: str, blobs: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the blobs of one graph of an archive."""
    prefix = f"{name}/"
    return {n.removeprefix(prefix): blob for n, blob in blobs.items() if n.startswith(prefix)}


# -- contracts at the end of wrappers --------------------------------------------------------------


_DESCRIBED, _ARGUMENTS, _CONDITIONS = "\n# described: ", "\n# arguments: ", "\n# conditions: "


@dataclass(frozen=True, slots=True)
class Contract:
    """The archive and the arguments that a graph's code was generated for.

    Attributes:
        beside: the digest that ``digest_beside`` returns.
    """

    beside: str
    arguments: tuple[Spec, ...]
    conditions: tuple[SizeCondition, ...] = ()

    def __str__(self) -> str:
        """Return the lines that end a wrapper in an archive."""
        rows = (self.beside, json.dumps(self.arguments), json.dumps(self.conditions))
        titles = (_DESCRIBED, _ARGUMENTS, _CONDITIONS)
        return "".join(f"{title}{row}" for title, row in zip(titles, rows, strict=True)) + "\n"


def read_contract(source: str) -> Contract:
    """Return the contract at the end of a wrapper, without running anything.

    Raises:
        ValueError: if there is none.
    """
    end = source.rpartition(_DESCRIBED)[2]
    beside, known, rest = end.partition(_ARGUMENTS)
    arguments, too, conditions = rest.partition(_CONDITIONS)
    if not known or not too:
        raise ValueError("a wrapper that does not say what it takes")
    rows = tuple(None if row is None else read_spec(row) for row in json.loads(arguments))
    return Contract(beside, rows, tuple(map(read_condition, json.loads(conditions))))


def read_spec(found: Any) -> Spec:
    """Return the spec of an argument, from JSON.

    Raises:
        ValueError: for anything but a size or a tensor of a type that kernels support.
    """
    match found:
        case ["size", formula]:
            return "size", read_size(formula)
        case [str() as dtype, list() as shape, list() as strides] if dtype in DTYPES:
            if len(shape) == len(strides):
                return dtype, tuple(map(read_size, shape)), tuple(map(read_size, strides))
    raise ValueError(f"no argument: {found!r}")


def digest_beside(blobs: Mapping[str, bytes]) -> str:
    """Return the digest of an archive's blobs except its wrappers, which contain it."""
    digest = hashlib.sha256()
    for name in sorted(blobs):
        if not name.endswith("/wrapper.py"):
            digest.update(f"{name}\0{len(blobs[name])}\0".encode())
            digest.update(hashlib.sha256(blobs[name]).digest())
    return digest.hexdigest()


def spec_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return a tensor's type, shape and strides."""
    return NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), tensor.stride()


def _checked(call: BoxedCall, contract: Contract, name: str) -> BoxedCall:
    """Return ``call`` with a check that its arguments match its contract."""
    specs = contract.arguments
    fixed = None if has_names(specs) else [wanted_of(spec, {}) for spec in specs]

    def run(args: list[Any]) -> Any:
        if len(args) != len(specs):
            raise BadArchive(f"graph {name!r} takes {len(specs)} arguments, not {len(args)}")
        wanted = fixed if fixed is not None else _wanted(contract, args, name)
        for k, (arg, want) in enumerate(zip(args, wanted, strict=True)):
            if want is None or arg is want:
                continue
            if isinstance(want, int):
                if arg != want:
                    raise BadArchive(f"argument {k} of graph {name!r} is {arg}, made for {want}")
            elif (arg.dtype, arg.shape, arg.stride()) != want and not _same(arg, want):
                raise BadArchive(
                    f"argument {k} of graph {name!r} is {spec_of(arg)}, made for {specs[k]}"
                )
        return call(args)

    return run


def wanted_of(spec: Spec, sizes: Mapping[str, int]) -> Any:
    """Return a tensor's type, shape and strides, or a size, as they are compared in a call.

    Raises:
        UsageError: as ``extent`` does.
    """
    match spec:
        case None:
            return None
        case (_, formula):
            return extent(formula, sizes)
        case (dtype, shape, strides):
            dims = [tuple(extent(n, sizes) for n in each) for each in (shape, strides)]
            return DTYPES[dtype], torch.Size(dims[0]), dims[1]


def has_names(specs: Iterable[Spec]) -> bool:
    """Return True if some size is named, and so known only at a call."""
    return any(any(names_in(size)) for spec in specs for size in formulas_in(spec))


def formulas_in(spec: Spec) -> tuple[SizeFormula, ...]:
    """Return the formulas of an argument's spec."""
    match spec:
        case (_, tuple() as shape, tuple() as strides):
            return (*shape, *strides)
        case (_, formula):
            return (formula,)
    return ()


def _wanted(contract: Contract, args: Sequence[Any], name: str) -> list[Any]:
    """Return type, shape and strides of a call's arguments, for the sizes that they bind."""
    pairs = zip(contract.arguments, args, strict=True)
    sizes = bind_sizes(
        (spec[1], arg.shape) if len(spec) == 3 else (spec[1:], (arg,))
        for spec, arg in pairs
        if spec is not None
    )
    for condition in contract.conditions:
        if not holds(condition, sizes):
            raise BadArchive(f"graph {name!r} was made for {shown(condition)}: {sizes}")
    return [wanted_of(spec, sizes) for spec in contract.arguments]


def _same(arg: torch.Tensor, want: tuple[torch.dtype, torch.Size, tuple[int, ...]]) -> bool:
    """Return True if a tensor differs at most in strides along axes of extent one."""
    dtype, shape, strides = want
    same = (arg.dtype, arg.shape) == (dtype, shape)
    return same and (arg.numel() == 0 or has_strides(arg, strides))


# -- what this machine is --------------------------------------------------------------------------


def machine(target: str, device: str) -> dict[str, str]:
    """Return the requirements of an archive that is built here.

    Args:
        target: what its kernels are for: "cpu:avx2", "sm_90".
        device: torch's name of the device type.
    """
    return {
        "fusec": fusec.__version__,
        "torch": torch.__version__.partition("+")[0],
        "target": target,
        "device": device,
        "processor": needed_features(target) if device == "cpu" else "",
    }


def check_machine(version: Any, made_for: Mapping[str, str]) -> None:
    """Raise WrongMachine if an archive was built for another machine or other releases."""
    if version != FORMAT:
        raise WrongMachine(f"The archive has format {version!r}, this fusec reads {FORMAT}.")
    target, device = made_for["target"], made_for["device"]
    here = machine(target, device)
    for name in ("fusec", "torch"):
        if made_for[name] != here[name]:
            raise WrongMachine(
                f"The archive was made with {name} {made_for[name]}, and {here[name]} is installed."
            )
    if device != "cpu":
        _check_device(target)
    missing = missing_features(made_for["processor"])
    if missing:
        raise WrongMachine(
            "The archive's kernels use features of a processor that this one lacks: "
            f"{missing}. Build it for this one, too: --target cpu:avx2, say."
        )


def _check_device(target: str) -> None:
    if not torch.cuda.is_available():
        raise WrongMachine(f"The archive's kernels are for {target}, and there is no CUDA device.")
    major, minor = torch.cuda.get_device_capability()
    here = f"sm_{major}{minor}"
    if target != here:
        raise WrongMachine(f"The archive's kernels are for {target}; this device is {here}.")
