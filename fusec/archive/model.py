"""``fusec.load``: a model of an archive, called as it was called when it was built.

``fusec build`` writes an archive with one compiled graph for each target, its calling convention as
data (``archive/trees.py``), and the names of its weights. Loading imports torch and
``runtime``: no Dynamo, no AOTAutograd, no pass and no compiler.

Worked example::

    model = fusec.load("model.fusec", weights="model.safetensors")
    logits = model(tokens, mask=mask)
    for name, parameter in model.named_parameters(): ...     # if it was built with --train
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusec.archive import graph as loading
from fusec.archive import trees
from fusec.archive.graph import (
    UNKNOWN,
    BadArchive,
    Spec,
    Unpacked,
    WrongMachine,
    formulas_in,
    has_names,
    read_spec,
    spec_of,
    unpack,
    wanted_of,
)
from fusec.archive.sizes import SizeCondition, SizeFormula, bind_sizes, holds, names_in
from fusec.archive.sizes import shown as formula
from fusec.archive.trees import Tree
from fusec.errors import EnvironmentProblem, UsageError
from fusec.runtime.cache.entry import decode
from fusec.runtime.calls.executable import has_strides, with_strides

KEY = "fusec model"
CALLING = "calling.json"
HELD = "held/"
"""Prefix of the values of buffers that are in no ``state_dict``."""


@dataclass(frozen=True, slots=True)
class ArgumentSpec:
    """One argument of the model's call.

    Attributes:
        by: how it may be given: "order", "name" or "either".
        default: it may be left out: its value is the default of the model's parameter.
    """

    name: str
    by: str
    tree: Tree
    default: bool


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor among the arguments.

    Attributes:
        path: its name in messages: "batch['mask']".
        gradient: whether it may require a gradient.
    """

    path: str
    spec: Spec
    gradient: bool

    def __str__(self) -> str:
        return f"{self.path}: {shown(self.spec)}"

    def unlike(self, tensor: torch.Tensor, sizes: Mapping[str, int]) -> UsageError:
        """Return the error for a tensor that does not match.

        Args:
            sizes: the named sizes, as the call's tensors bind them.
        """
        known = ", ".join(f"{name} is {size}" for name, size in sizes.items())
        where = f", where {known}" if known else ""
        return UsageError(
            f"{self.path} is {shown(spec_of(tensor))}; {shown(self.spec)} is wanted{where}."
        )


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or a buffer.

    Attributes:
        names: its names in the model; several, if it is shared.
        parameter: whether it is trained.
        held: whether the archive has its value.
    """

    names: tuple[str, ...]
    spec: Spec
    parameter: bool
    held: bool

    def __str__(self) -> str:
        return f"{self.names[0]}: {shown(self.spec)}"


@dataclass(frozen=True, slots=True)
class Calling:
    """How a model is called, and what its graph takes and returns.

    Attributes:
        graph: of each argument of the graph the position among tensors and then weights; a size.
        conditions: the conditions on named sizes.
        result: a tree of tensors that the graph returns, and of arguments by the same positions.
    """

    arguments: tuple[ArgumentSpec, ...]
    tensors: tuple[Tensor, ...]
    weights: tuple[Weight, ...]
    graph: tuple[int | Spec, ...]
    conditions: tuple[SizeCondition, ...]
    result: Tree

    def bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Return the tensors of a call.

        Raises:
            UsageError: naming an argument that is missing, or not what it was built with.
        """
        given = self._given(args, named)
        tensors: list[Any] = []
        for argument in self.arguments:
            if argument.name in given:
                trees.take(argument.tree, given[argument.name], argument.name, tensors)
            elif not argument.default:
                raise UsageError(f"{argument.name} is missing. The model takes {self}.")
        return tensors

    def sizes(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """Return the named sizes, as the tensors of a call bind them.

        Raises:
            UsageError: for a tensor of another rank, and sizes that the model was not built for.
        """
        for of, tensor in zip(self.tensors, tensors, strict=True):
            if tensor.dim() != len(_shape(of.spec)):
                raise of.unlike(tensor, {})
        sizes = bind_sizes((_shape(of.spec), t.shape)
                           for of, t in zip(self.tensors, tensors, strict=True))  # fmt: skip
        for condition in self.conditions:
            if not holds(condition, sizes):
                of_them = dict.fromkeys(names_in(condition))
                known = ", ".join(f"{name} is {sizes[name]}" for name in of_them)
                raise UsageError(f"{known}; the model was built for {formula(condition)}.")
        return sizes

    def wanted(self, sizes: Mapping[str, int]) -> list[Any]:
        """Return type, shape and strides of each tensor."""
        return [wanted_of(tensor.spec, sizes) for tensor in self.tensors]

    def _given(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        ordered = [a.name for a in self.arguments if a.by != "name"]
        if len(args) > len(ordered):
            raise UsageError(f"{len(args)} arguments in order. The model takes {self}.")
        given = dict(zip(ordered, args, strict=False))
        known = {a.name for a in self.arguments if a.by != "order"}
        for name, value in named.items():
            if name in given or name not in known:
                twice = "is given twice" if name in given else "is none of its arguments"
                raise UsageError(f"{name} {twice}. The model takes {self}.")
            given[name] = value
        return given

    def __str__(self) -> str:
        values = [f"{a.name}={a.tree['value']!r}"
                  for a in self.arguments if "value" in a.tree and not a.default]  # fmt: skip
        return ", ".join([*map(str, self.tensors), *values]) or "nothing"


class Model:
    """A model of an archive.

    Attributes:
        target: what its kernels are for.
        trains: results have gradients: it was built with ``--train``.
    """

    def __init__(self, unpacked: Unpacked, calling: Calling) -> None:
        self._call, self._calling = unpacked.call, calling
        written = (calling.graph[k] for k in unpacked.convention.written)
        self._written = frozenset(k for k in written if isinstance(k, int))
        self._weights: list[torch.Tensor] = []
        specs = [tensor.spec for tensor in calling.tensors]
        self._fixed = None if has_names(specs) else [wanted_of(spec, {}) for spec in specs]
        self.target, self.device = unpacked.target, torch.device(unpacked.device)
        self.trains = unpacked.convention.training is not None

    @property
    def inputs(self) -> tuple[str, ...]:
        """What the model takes: ``("x: f32[4, 8]", ...)``."""
        return tuple(map(str, self._calling.tensors))

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the trained parameters by name."""
        for weight, tensor in zip(self._calling.weights, self._weights, strict=True):
            if weight.parameter:
                yield weight.names[0], tensor

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the trained parameters, as an optimizer takes them."""
        return (tensor for _, tensor in self.named_parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by name; they share memory with the model's."""
        rows = zip(self._calling.weights, self._weights, strict=True)
        return {name: t.detach() for weight, t in rows for name in weight.names}

    def load_weights(self, weights: Mapping[str, torch.Tensor] | nn.Module) -> None:
        """Take other weights, whose memory is used where device, type and strides are right.

        Raises:
            UsageError: naming weights that are missing, or of another type or shape than built for.
        """
        found = named_tensors(weights) if isinstance(weights, nn.Module) else weights
        chosen, problems = [], []
        for number, weight in enumerate(self._calling.weights):
            tensor: Any  # of a user
            tensor = next((found[name] for name in weight.names if name in found), None)
            if tensor is None and weight.held and self._weights:
                tensor = self._weights[number]
            if tensor is None:
                problems.append(f"{weight} is missing")
            elif not isinstance(tensor, torch.Tensor):
                problems.append(f"{weight} is wanted, a {type(tensor).__name__} was given")
            elif tensor.layout is not torch.strided or tensor.is_meta:
                problems.append(f"{weight} is wanted, one without plain memory was given")
            elif spec_of(tensor)[:2] != (weight.spec or ())[:2]:
                problems.append(f"{weight} is wanted, {shown(spec_of(tensor))} was given")
            else:
                chosen.append(self._placed(tensor, weight))
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise UsageError(f"The weights do not fit: {'; '.join(problems[:5])}{more}.")
        refuse_shared(chosen, [k - len(self._calling.tensors) for k in self._written])
        self._weights = chosen

    def _placed(self, tensor: torch.Tensor, weight: Weight) -> torch.Tensor:
        with torch.no_grad():
            plain = tensor.to(self.device).resolve_conj().resolve_neg()
            placed = with_strides(plain, wanted_of(weight.spec, {})[2])
        if weight.parameter and self.trains and not placed.requires_grad:
            placed = placed.detach().requires_grad_()
        return placed

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the model and return its result.

        Raises:
            UsageError: naming an argument that is not what the model was built for.
        """
        tensors = self._calling.bind(args, named)
        sizes = {} if self._fixed is not None else self._calling.sizes(tensors)
        wanted = enumerate(self._fixed or self._calling.wanted(sizes))
        fitting = [self._fitting(k, tensors[k], want, sizes) for k, want in wanted]
        if self._written:
            self._refuse_written(fitting)
        everything = [*fitting, *self._weights]
        if self.trains and not torch.is_grad_enabled():  # what it calls turns gradients on
            everything = [tensor.detach() for tensor in everything]
        given = (everything[k] if isinstance(k, int) else wanted_of(k, sizes)
                 for k in self._calling.graph)  # fmt: skip
        made = self._call(*given)
        return trees.put(self._calling.result, made, [*tensors, *self._weights])

    def _fitting(
        self, k: int, tensor: torch.Tensor, want: Any, sizes: Mapping[str, int]
    ) -> torch.Tensor:
        """Return a tensor in the layout that kernels read; copied if needed and not written."""
        of = self._calling.tensors[k]
        dtype, shape, strides = want
        if tensor.dtype != dtype or tensor.shape != shape or tensor.layout is not torch.strided:
            raise of.unlike(tensor, sizes)
        if tensor.device.type != self.device.type:
            raise UsageError(f"{of.path} is on {tensor.device}; {self.device.type} is wanted.")
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_neg() or tensor.is_conj():
            raise UsageError(f"{of.path} is a {type(tensor).__name__}; a plain tensor is wanted.")
        if tensor.requires_grad and not of.gradient and torch.is_grad_enabled():
            raise UsageError(
                f"{of.path} requires a gradient, which the model was not built to compute: detach "
                "it, or call the model within torch.no_grad()."
            )
        if tensor.stride() == strides:
            return tensor
        copied = tensor.numel() and not has_strides(tensor, strides)
        if copied and (k in self._written or 0 in strides):
            why = "is written to, and has" if k in self._written else "has"
            raise UsageError(f"{of.path} {why} strides {tensor.stride()}; {strides} are wanted.")
        return with_strides(tensor, strides)

    def _refuse_written(self, tensors: list[Any]) -> None:
        """Raise UsageError if the memory that a call writes to is also another argument's."""
        count = len(tensors)
        written = {
            k: (tensors[k] if k < count else self._weights[k - count]) for k in self._written
        }
        for k, tensor in enumerate(tensors):
            others = written if k not in written else dict(enumerate([*tensors, *self._weights]))
            if any(j != k and _overlap(tensor, other) for j, other in others.items()):
                path = self._calling.tensors[k].path
                raise UsageError(f"{path} shares memory with what the model writes to: copy it.")

    def __repr__(self) -> str:
        trained = "a training step" if self.trains else "inference"
        weights = f"{len(self._calling.weights)} weights"
        asked = ", ".join(map(formula, self._calling.conditions))
        lines = [f"{self.target}, {trained}", *self.inputs, weights]
        return "\n  ".join([*lines, f"for {asked}"] if asked else lines)


def load(
    path: str | Path,
    *,
    weights: str | Path | Mapping[str, torch.Tensor] | nn.Module | None = None,
    sha256: str | None = None,
    device: str | None = None,
) -> Model:
    """Return the model of an archive, which ``fusec build`` wrote. Nothing is compiled.

    Args:
        weights: a safetensors file, which is mapped; tensors by name; a module. By default the file
            beside the archive of the same name, with ``.safetensors`` at its end.
        sha256: the archive's digest, as ``sha256sum`` prints it: another file is refused.
        device: "cpu" or "cuda", where the archive is for both; by default what it names first.
    Raises:
        BadArchive: if the file is no archive, is damaged, or does not run here: it says why.
        UsageError: if weights do not fit.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from error
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256.lower():
        raise BadArchive(f"{path} has not the SHA-256 {sha256}.")
    model, held = _choose(content, device)
    beside = path.with_suffix(".safetensors")
    wanted = [w for w in model._calling.weights if not w.held]
    if weights is None and wanted:
        if not beside.exists():
            raise UsageError(
                f"The model has {len(wanted)} weights, and there is no {beside.name} beside it: "
                "pass weights= a safetensors file, tensors by name, or a module."
            )
        weights = beside
    found = mapped(Path(weights)) if isinstance(weights, str | Path) else weights
    named = named_tensors(found) if isinstance(found, nn.Module) else found
    model.load_weights({**held, **(named or {})})
    return model


def _choose(content: bytes, device: str | None) -> tuple[Model, dict[str, torch.Tensor]]:
    """Return the first variant of an archive that runs on this machine, and its held weights."""
    variants = decode(KEY, content)
    if not variants:
        raise BadArchive("The file is no archive of fusec build, or it is damaged.")
    reasons = []
    for name, variant in variants.items():
        try:
            unpacked = unpack(variant, device)
        except WrongMachine as reason:
            reasons.append(f"{name}: {reason}")
            continue
        return _read(unpacked)
    raise BadArchive("\n".join(reasons))


def _read(unpacked: Unpacked) -> tuple[Model, dict[str, torch.Tensor]]:
    try:
        calling = read_calling(json.loads(unpacked.beside[CALLING]), unpacked)
        held = {
            name: _held(weight.spec, unpacked.beside[f"{HELD}{weight.names[0]}"])
            for weight in calling.weights
            if weight.held
            for name in weight.names
        }
        return Model(unpacked, calling), held
    except UNKNOWN as error:
        raise BadArchive(f"The archive says nothing that this version knows: {error!r}") from error


def _held(spec: Spec, content: bytes) -> torch.Tensor:
    dtype, shape, strides = wanted_of(spec, {})
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0)
    return with_strides(flat.reshape(shape).to(dtype), strides)


def mapped(path: Path) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a safetensors file, memory-mapped: processes share its pages.

    Raises:
        EnvironmentProblem: if safetensors is not installed.
        UsageError: if it is no safetensors file.
    """
    try:
        # Local: only models with weights in a file need it.
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise EnvironmentProblem(
            "weights in a file need safetensors: pip install 'fusec[weights]'"
        ) from error
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} is no safetensors file: {error}.") from error


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters, buffers and tensors in attributes, by name.

    A shared tensor has several names.
    """
    found: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        own = {**vars(part), **part._parameters, **part._buffers}
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                found[f"{prefix}.{name}" if prefix else name] = value
    return found


def shown(spec: Spec) -> str:
    """Return a tensor's type as the command line spells it: "f32[4, 8]"."""
    return f"{spec[0]}[{', '.join(map(formula, _shape(spec)))}]" if spec else "another"


def _shape(spec: Spec) -> tuple[SizeFormula, ...]:
    assert spec is not None and len(spec) == 3
    return spec[1]


def refuse_shared(weights: Sequence[torch.Tensor], written: Sequence[int]) -> None:
    """Raise UsageError if a weight that is written to shares memory with another."""
    rows = sorted((t.data_ptr(), _end(t), k) for k, t in enumerate(weights) if t.numel())
    end, owner = 0, -1
    for start, behind, k in rows:
        if start < end and {k, owner} & set(written):
            raise UsageError("A buffer that the model writes to shares memory with another weight.")
        end, owner = max((end, owner), (behind, k))


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() < _end(other) and other.data_ptr() < _end(one)


def _end(tensor: torch.Tensor) -> int:
    """Return the address behind a tensor's last element."""
    if not tensor.numel():
        return tensor.data_ptr()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def conditions_of(content: bytes) -> tuple[SizeCondition, ...]:
    """Return the conditions on sizes of one target's graphs, without running any."""
    blobs = decode(loading.KEY, content) or {}
    wrappers = [blob.decode() for name, blob in blobs.items() if name.endswith("/wrapper.py")]
    asked = [one for source in wrappers for one in loading.read_contract(source).conditions]
    return tuple(dict.fromkeys(asked))


# -- from and to JSON ------------------------------------------------------------------------------


def read_calling(found: Any, unpacked: Unpacked) -> Calling:
    """Return the ``Calling`` that JSON holds.

    Raises:
        ValueError: for anything that ``fusec build`` does not write, and for arguments that are not
            those of the code's ``Contract``.
    """
    tensors = tuple(
        Tensor(str(t["path"]), _spec(t["spec"]), bool(t["gradient"])) for t in found["tensors"]
    )
    weights = tuple(
        Weight(tuple(map(str, w["names"])), _spec(w["spec"]), bool(w["parameter"]), bool(w["held"]))
        for w in found["weights"]
    )
    if has_names([w.spec for w in weights]):
        raise ValueError("weights with sizes of a call")
    count = len(tensors)
    arguments = tuple(
        ArgumentSpec(
            str(a["name"]), str(a["by"]), trees.checked(a["tree"], count), bool(a["default"])
        )
        for a in found["arguments"]
    )
    if any(a.default and "value" not in a.tree for a in arguments):
        raise ValueError("tensors that may be left out")
    kinds = (wanted_of(w.spec, {})[0] for w in weights if w.parameter)
    if not all(kind.is_floating_point or kind.is_complex for kind in kinds):
        raise ValueError("parameters that are no numbers with gradients")
    everything: tuple[Tensor | Weight, ...] = (*tensors, *weights)
    graph = tuple(_position(k, len(everything)) for k in found["graph"])
    wanted = [everything[k].spec if isinstance(k, int) else k for k in graph]
    if wanted != list(unpacked.arguments) or not all(weight.names for weight in weights):
        raise ValueError("other arguments than the code takes")
    results = len(unpacked.convention.outputs)
    result = trees.checked(found["result"], results, len(everything))
    if [k for a in arguments for k, _ in trees.tensors_of(a.tree)] != list(range(count)):
        raise ValueError("tensors in another order")
    conditions = unpacked.conditions
    named = {size for t in tensors for size in _shape(t.spec) if isinstance(size, str)}
    specs = [*(t.spec for t in tensors), *(k for k in graph if not isinstance(k, int))]
    formulas = [*conditions, *(size for spec in specs for size in formulas_in(spec))]
    if not named.issuperset(name for one in formulas for name in names_in(one)):
        raise ValueError("sizes that no tensor says")
    return Calling(arguments, tensors, weights, graph, conditions, result)


def _position(value: Any, end: int) -> int | Spec:
    if value is None:
        return None  # an unread argument
    if isinstance(value, list):
        return _of_kind(read_spec(value), 2)
    if type(value) is not int or not 0 <= value < end:
        raise ValueError(f"no position: {value!r}")
    return value


def _spec(found: Any) -> Spec:
    return _of_kind(read_spec(found), 3)


def _of_kind(spec: Spec, length: int) -> Spec:
    if spec is None or len(spec) != length:
        raise ValueError(f"no tensor, or no size: {spec!r}")
    return spec
