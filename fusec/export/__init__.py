"""``fusec build``: a model as one file, which ``fusec.load`` calls without compiling.

The model is traced on fake tensors (``tracing``), once for each target, by Dynamo, which has to
capture one graph: it takes nested arguments and the module's tensors as the graph's arguments, and
AOTAutograd treats the graph as any other, gradients and written buffers included. (A graph of
``torch.export`` consists of ATen operations, to which fusec's rewrites of Dynamo's graphs do not
apply.) Tensors are then matched by identity: an argument of the graph is a tensor of the call or of
the module, and a tensor of the result is one that the graph returned.

The call is written as data by ``description``, and read by ``archive/model.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from fusec import backend  # noqa: F401  its observers look at these compiles, too
from fusec.archive.model import CALLING, KEY, named_tensors
from fusec.codegen.targets import Target, find_target
from fusec.errors import FusecError, ModelError, UsageError, describe_failure
from fusec.export.native import NAMES, SIGNATURE, describe_native
from fusec.export.packing import pack
from fusec.export.tracing import (
    Seen,
    alike,
    bound_arguments,
    compile_graph,
    describe,
    fake_module,
    faked,
    name_sizes,
    tracing,
)
from fusec.frontend.aliasing.overlap import memory_of
from fusec.options import Options
from fusec.runtime.cache.entry import encode
from fusec.runtime.kernels.processor import needed_features
from fusec.tools.report.arguments import fitting
from fusec.tools.report.breaks import break_lines, merge_breaks, read_break, unseen_lines
from fusec.tools.report.observe import new_fake_mode, observe
from fusec.tools.report.watching import watch
from fusec.torch_interior import FakeTensorMode, TorchDynamoException, maybe_mark_dynamic, pytree


@dataclass(frozen=True, slots=True)
class Call:
    """How a model is called: by order, by name, and whether results have gradients.

    Attributes:
        sizes: tensors among the arguments, and the names of their dynamic extents.
        may_fix: a name whose extent the model fixes is no error.
    """

    args: tuple[Any, ...]
    named: Mapping[str, Any] = field(default_factory=dict)
    train: bool = False
    sizes: Sequence[tuple[torch.Tensor, tuple[str | None, ...]]] = ()
    may_fix: bool = False


def build(
    fn: Callable[..., Any],
    call: Call,
    targets: Sequence[Options],
    mode: FakeTensorMode | None = None,
) -> bytes:
    """Return the archive of a module or function.

    Args:
        targets: the options of a compile for each; a machine takes the first that it can run, CPU
            targets with more features first.
        mode: to which the module's tensors belong, if they are fake.
    Raises:
        UsageError: for arguments and results that are no data, and a graph break: it lists lines.
        Unsupported: for what cannot be saved.
        ModelError: what the model itself raised.
    """
    bound_arguments(fn, call.args, call.named)
    variants: dict[str, bytes] = {}
    for options in _preferred(targets):
        name, content = _variant(fn, call, options, mode or new_fake_mode())
        variants[name] = content
    return encode(KEY, variants)


def _preferred(targets: Sequence[Options]) -> Iterator[Options]:
    """Yield targets in the order in which they are tried: CPUs with more features first."""
    cpus = [one for one in targets if _target_of(one).device == "cpu"]
    cpus.sort(key=lambda one: -len(needed_features(_target_of(one).name).split()))
    best = iter(cpus)
    for options in targets:
        yield next(best) if options in cpus else options


def _target_of(options: Options) -> Target:
    return find_target(options.target or "cpu")


def weights_of(fn: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that ``--with-weights`` writes, by their first names."""
    if not isinstance(fn, nn.Module):
        return {}
    first: dict[int, str] = {}
    named = named_tensors(fn)
    for name, tensor in named.items():
        first.setdefault(id(tensor), name)
    weights: dict[str, torch.Tensor] = {}
    places: set[int] = set()
    for name in first.values():
        tensor = named[name].detach().resolve_conj().resolve_neg().contiguous()
        place = tensor.untyped_storage().data_ptr()
        weights[name] = tensor.clone() if place in places else tensor  # no views in the file
        places.add(place)
    return weights


def _variant(
    fn: Callable[..., Any], call: Call, options: Options, mode: FakeTensorMode
) -> tuple[str, bytes]:
    """Return a target's name, and the archive of its graph."""
    if isinstance(fn, nn.Module):
        fn.train(call.train)
    target = _target_of(options)
    traced = target.device if torch.cuda.is_available() else "cpu"
    move = partial(faked, mode=mode, device=torch.device(traced))
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    tensors = named_tensors(fn).values() if isinstance(fn, nn.Module) else ()
    places = {memory_of(tensor) for tensor in tensors}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        """Return an argument's own fake: a call may give others for arguments that are one here."""
        fake = move(tensor, moved={})
        made.append((tensor, alike(fake, mode) if memory_of(tensor) in places else fake))
        places.add(memory_of(tensor))
        return made[-1][1]

    seen = Seen()
    with tracing(mode, call.train):
        fake = fake_module(fn, mode, partial(move, moved={}))
        args, named = pytree.tree_map_only(torch.Tensor, own, (list(call.args), dict(call.named)))
        sizes = {
            id(argument): names
            for tensor, names in call.sizes
            for given, argument in made
            if given is tensor
        }
        for argument in (argument for _, argument in made):
            for axis, name in enumerate(sizes.get(id(argument), ())):
                if name is not None:
                    maybe_mark_dynamic(argument, axis)
        compiled = torch.compile(
            fake, backend=partial(compile_graph, seen, options), fullgraph=True, dynamic=False
        )
        try:
            result = compiled(*args, **named)
        except TorchDynamoException as error:
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, FusecError):
                raise inner from error
            _explain(fn, call, error, mode)
            raise
    if seen.convention is None:
        raise UsageError("the model computes nothing with tensors.")
    named_sizes = name_sizes(seen, sizes, may_fix=call.may_fix)
    calling, held = describe(fn, fake, (args, named), result, seen, sizes)
    beside = {CALLING: json.dumps(calling).encode(), **held}
    if options.native:
        beside[NAMES] = _names(calling, seen, target, named_sizes)
    return target.name, pack(seen.convention, seen.parts, target, beside)


def _names(calling: dict[str, Any], seen: Seen, target: Target, sizes: Mapping[str, str]) -> bytes:
    signature = seen.parts[0].blobs[SIGNATURE].decode()
    needed = needed_features(target.name)
    return describe_native(calling, signature, len(seen.returned), needed, sizes).encode()


def _explain(fn: Callable[..., Any], call: Call, error: Exception, mode: FakeTensorMode) -> None:
    """Raise the error for a model that is not one graph."""
    with watch() as watched:
        try:
            inputs = fitting(fn, call.args, call.named)
            observe(fn, inputs, train=call.train, mode=mode)
        except ModelError:
            raise
        except Exception:  # report the breaks seen so far
            pass
    seen = watched.seen
    breaks = seen.breaks or merge_breaks([read_break(str(error))])
    if not any(one.place.path for one in breaks):
        raise UsageError(f"the model is not one graph: {describe_failure(error)}") from error
    lines = "\n".join((*break_lines(breaks), *unseen_lines(seen.unseen, "fusec explain --run")))
    raise UsageError(f"the model is not one graph, which an archive needs.\n{lines}") from error
