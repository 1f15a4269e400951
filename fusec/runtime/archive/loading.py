"""Archives, read: a compiled graph from its bytes, with nothing of the compiler's.

An archive says what it was made for, and is refused where that differs: fusec and torch of the same
release, the device, and a processor with the features that its code may use. What it says of itself
is JSON, and names, counts or sizes in it that another hand wrote could lead native code out of
bounds. So the wrapper, which is code and trusted as such, has the last word (``contract``): it ends
with the digest of all that stands beside it, and with the shape of each argument, which is compared
at each call, as is what has to hold of sizes that have names (``sizes.py``).

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
from fusec.errors import UsageError
from fusec.runtime.archive.sizes import (
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
from fusec.runtime.cache.entry import decode
from fusec.runtime.cache.memory_file import as_file
from fusec.runtime.calls.convention import Convention
from fusec.runtime.calls.executable import DTYPES, BoxedCall, bind
from fusec.runtime.calls.outside import Outside, described
from fusec.runtime.calls.ranges import Ranges
from fusec.runtime.kernels import cpp_kernel
from fusec.runtime.kernels.processor import missing_features, needed_features

UNKNOWN = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError
)  # fmt: skip
"""What reading an archive ends with that says something which no ``fusec build`` writes."""
FORMAT = 5
KEY = "fusec archive"
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names of element types, by torch's."""

Spec: TypeAlias = (
    "tuple[str, tuple[SizeFormula, ...], tuple[SizeFormula, ...]] | tuple[str, SizeFormula] | None"
)
"""A tensor's element type, shape and strides; ("size", formula); None for what is not checked."""


class BadArchive(UsageError):
    """Bytes are no archive, or one that does not run here: the message says what is missing."""


class NotHere(BadArchive):
    """An archive was made for another machine, or other releases."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A compiled graph, and what it takes to bind it without its FX graph.

    Attributes:
        name: "forward", say.
        key: of its entry in the cache.
        titles: what traces call its launches.
        outside: what its wrapper takes of the graph.
    """

    name: str
    key: str
    device: torch.device
    titles: Mapping[str, str]
    outside: Outside


@dataclass(frozen=True, slots=True)
class Unpacked:
    """An archive that runs here.

    Attributes:
        target, device: what its kernels are for, and torch's name of the device type.
        call: is called with a graph's inputs, and returns its results in a list.
        convention: how that calls what was compiled.
        arguments: what the first graph takes.
        conditions: what has to hold of its sizes.
        beside: what else the archive holds, by name.
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
        device: torch's name of the type that is wanted, if not any.
    Raises:
        NotHere: saying what this machine lacks.
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
            raise NotHere(f"The archive's kernels are for {made_for['target']}, not for {device}.")
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


def read_parts(rows: Any, convention: Convention) -> list[Stored]:
    """Return what an entry of the cache, or an archive, says of its graphs.

    Raises:
        ValueError: for anything that ``warm`` does not write.
    """
    try:
        parts = [
            Stored(
                str(name),
                str(row["key"]),
                torch.device(row["device"]),
                {str(launch): str(title) for launch, title in row["titles"].items()},
                described(row["outside"]),
            )
            for name, row in rows.items()
        ]
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(repr(error)) from error
    expected = ["inference"] if convention.training is None else ["forward", "backward"]
    if [part.name for part in parts] != expected:
        raise ValueError(f"graphs {', '.join(part.name for part in parts)}")
    return parts


def load_kernels(
    blobs: Mapping[str, bytes], rows: list[dict[str, Any]], device: torch.device
) -> Mapping[str, Callable[..., None]]:
    """Return launchers by kernel name.

    Args:
        blobs: with a shared library, or code for a GPU.
        rows: of the manifest.
    """
    if not rows:
        return {}
    if "kernels.so" in blobs:
        return cpp_kernel.load(as_file(blobs["kernels.so"]), rows)
    # Local: Triton takes 0.2 s to import, and only GPU graphs need it.
    from fusec.runtime.kernels import triton_kernel

    index = torch.cuda.current_device() if device.index is None else device.index
    return triton_kernel.unpack(blobs, index)


def _bind(part: Stored, blobs: Mapping[str, bytes]) -> tuple[BoxedCall, Contract]:
    """Return what an archive's graph is called by, and what it takes."""
    own = blobs_of(part.name, blobs)
    if not {"wrapper.py", "named.py", "manifest.json"} <= own.keys():
        raise BadArchive(f"The archive has no whole graph {part.name!r}.")
    source = own["wrapper.py"].decode()
    found = read_contract(source)
    if found.beside != digest_beside(blobs):
        raise BadArchive(
            f"What the archive says of its graph {part.name!r} is not what its code was made with."
        )
    kernels = load_kernels(own, json.loads(own["manifest.json"])["kernels"], part.device)
    ranges = Ranges(f"fusec {part.name}", own["named.py"].decode(), lambda: part.titles)
    call = bind(source, kernels, part.outside, part.device, ranges=ranges)
    return _checked(call, found, part.name), found


def blobs_of(name: str, blobs: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return what belongs to one graph of an archive."""
    prefix = f"{name}/"
    return {n.removeprefix(prefix): blob for n, blob in blobs.items() if n.startswith(prefix)}


# -- what code says of its arguments ---------------------------------------------------------------


_DESCRIBED, _ARGUMENTS, _CONDITIONS = "\n# described: ", "\n# arguments: ", "\n# conditions: "


@dataclass(frozen=True, slots=True)
class Contract:
    """What the code of a graph says that it was made with.

    Attributes:
        beside: as of ``digest_beside``.
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
    """Return what ends a wrapper, without running anything.

    Raises:
        ValueError: if it is not there.
    """
    end = source.rpartition(_DESCRIBED)[2]
    beside, known, rest = end.partition(_ARGUMENTS)
    arguments, too, conditions = rest.partition(_CONDITIONS)
    if not known or not too:
        raise ValueError("a wrapper that does not say what it takes")
    rows = tuple(None if row is None else read_spec(row) for row in json.loads(arguments))
    return Contract(beside, rows, tuple(map(read_condition, json.loads(conditions))))


def conditions_of(content: bytes) -> tuple[SizeCondition, ...]:
    """Return what the graphs of one target ask of sizes, without running any."""
    blobs = decode(KEY, content) or {}
    wrappers = [blob.decode() for name, blob in blobs.items() if name.endswith("/wrapper.py")]
    asked = [condition for source in wrappers for condition in read_contract(source).conditions]
    return tuple(dict.fromkeys(asked))


def read_spec(found: Any) -> Spec:
    """Return what an argument is, from JSON.

    Raises:
        ValueError: for what is neither a size nor a tensor of a type that kernels have.
    """
    match found:
        case ["size", formula]:
            return "size", read_size(formula)
        case [str() as dtype, list() as shape, list() as strides] if dtype in DTYPES:
            if len(shape) == len(strides):
                return dtype, tuple(map(read_size, shape)), tuple(map(read_size, strides))
    raise ValueError(f"no argument: {found!r}")


def digest_beside(blobs: Mapping[str, bytes]) -> str:
    """Return the digest of all that an archive holds but its wrappers, which name it."""
    digest = hashlib.sha256()
    for name in sorted(blobs):
        if not name.endswith("/wrapper.py"):
            digest.update(f"{name}\0{len(blobs[name])}\0".encode())
            digest.update(hashlib.sha256(blobs[name]).digest())
    return digest.hexdigest()


def spec_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return what a tensor is."""
    return NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), tensor.stride()


def _checked(call: BoxedCall, contract: Contract, name: str) -> BoxedCall:
    """Return ``call``, which refuses arguments that its kernels were not made for."""
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
        UsageError: for what is no size of a tensor.
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
    """Return True if sizes are known only at a call."""
    return any(any(names_in(size)) for spec in specs for size in formulas_in(spec))


def formulas_in(spec: Spec) -> tuple[SizeFormula, ...]:
    """Return the sizes of an argument."""
    match spec:
        case (_, tuple() as shape, tuple() as strides):
            return (*shape, *strides)
        case (_, formula):
            return (formula,)
    return ()


def names_bound_by(specs: Iterable[Spec]) -> frozenset[str]:
    """Return the sizes that arguments say: those that are one, or an extent, by itself."""
    known = ((spec[1],) if len(spec) == 2 else spec[1] for spec in specs if spec is not None)
    return frozenset(n for formulas in known for n in formulas if isinstance(n, str))


def _wanted(contract: Contract, args: Sequence[Any], name: str) -> list[Any]:
    """Return what the arguments of a call have to be, by the sizes that some of them are."""
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
    """Return True if a tensor differs but in strides along axes of extent one."""
    dtype, shape, strides = want
    if (arg.dtype, arg.shape) != (dtype, shape):
        return False
    return arg.numel() == 0 or all(
        n == 1 or a == b for n, a, b in zip(shape, arg.stride(), strides, strict=True)
    )


# -- what this machine is --------------------------------------------------------------------------


def machine(target: str, device: str) -> dict[str, str]:
    """Return what an archive made here needs.

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
    """Raise BadArchive where an archive was made for another machine."""
    if version != FORMAT:
        raise NotHere(f"The archive has format {version!r}, this fusec reads {FORMAT}.")
    target, device = made_for["target"], made_for["device"]
    here = machine(target, device)
    for name in ("fusec", "torch"):
        if made_for[name] != here[name]:
            raise NotHere(
                f"The archive was made with {name} {made_for[name]}, and {here[name]} is installed."
            )
    if device != "cpu":
        _check_device(target)
    missing = missing_features(made_for["processor"])
    if missing:
        raise NotHere(
            "The archive's kernels use features of a processor that this one lacks: "
            f"{missing}. Build it for this one, too: --target cpu:avx2, say."
        )


def _check_device(target: str) -> None:
    if not torch.cuda.is_available():
        raise NotHere(f"The archive's kernels are for {target}, and there is no CUDA device.")
    major, minor = torch.cuda.get_device_capability()
    here = f"sm_{major}{minor}"
    if target != here:
        raise NotHere(f"The archive's kernels are for {target}; this device is {here}.")
