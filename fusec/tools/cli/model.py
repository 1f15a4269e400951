"""Load the model that a TARGET on the command line names: ``path.py:name`` or ``module:name``.

The name is a module instance, a module class or a function without arguments that makes one, either
with arguments (``Block(64, bias=False)``), or a function to compile. The user's code runs under a
fake mode, so that a model needs no memory for its weights; where it reads the values of tensors, it
runs again with real ones. Functions that it compiles itself run eagerly meanwhile.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from fusec.errors import ModelError, UsageError
from fusec.tools.cli.inputs import Inputs, TensorInput
from fusec.tools.cli.line import EXPORTED, FORM, check_file, constructed
from fusec.tools.cli.output import progress
from fusec.tools.report.arguments import Arguments, described, fitting
from fusec.tools.report.observe import Observed, observe
from fusec.tools.report.run_script import package_of
from fusec.torch_interior import FakeTensorMode, converting_fakes, pytree

_Made = TypeVar("_Made")


def observe_call(
    fn: Callable[..., Any], given: Inputs, mode: FakeTensorMode, train: bool, **how: Any
) -> tuple[Observed, ...]:
    """Return the graphs that a call with inputs of these types compiles to.

    A module whose parameters all have another floating type than the inputs, and which does not
    run with them, is converted; progress says so.

    Args:
        mode: the fake mode of the module's tensors, if they are fake.
        how: further arguments of ``report.observe``.
    Raises:
        UsageError: if the inputs do not fit the signature.
        ModelError: if the model fails by itself.
    """
    specs = _fitting(fn, given)
    with mode:
        inputs = specs.mapped(lambda spec: spec.make() if isinstance(spec, TensorInput) else spec)
    fn = fn.train(train) if isinstance(fn, nn.Module) else fn
    attempt = partial(observe, fn, inputs, train=train, mode=mode, **how)
    try:
        return attempt()
    except ModelError:
        dtype = _common_dtype(inputs)
        if dtype is None or not isinstance(fn, nn.Module):
            raise
        if dtype is _common_dtype(fn.parameters()):
            raise
        with mode:
            _convert(fn, dtype)
        seen = attempt()
        progress(f"the model's parameters were converted to {dtype}, the inputs' type")
        return seen


def load_callable(
    target: str, inputs: int, mode: AbstractContextManager[Any]
) -> Callable[..., Any]:
    """Return the module or function that a TARGET names.

    Args:
        inputs: how many inputs the call will get.
        mode: in which the user's code runs, such as a fake mode.
    Raises:
        UsageError: if the name does not exist, or cannot be called with tensors.
        ModelError: if the user's code fails.
    """
    if target.endswith(EXPORTED):
        return _Exported(target)  # with real tensors: torch reads no fake ones
    head, bracket, arguments = target.partition("(")
    place, colon, name = head.rpartition(":")
    name += bracket + arguments
    if not colon or not place or not name:
        raise UsageError(f"target {target!r} names nothing in a file or module. {FORM}.")
    module = _run_in(mode, lambda: _import(place))
    called = constructed(name)
    if called is not None:
        name, args, kwargs = called
        return _construct(_find(module, name, place), name, args, kwargs, mode)
    found = _find(module, name, place)
    if isinstance(found, nn.Module):
        return found
    if inspect.isclass(found):
        _refuse_class(found, name)
        build: Callable[[], Any] = found
        made: Callable[..., Any] = _run_in(mode, build)
        return made
    if not callable(found):
        raise UsageError(
            f"{name!r} in {place} is of type {type(found).__name__}. Name a torch.nn.Module, its "
            "class, a function, or a function without arguments that returns a module."
        )
    factory: Callable[..., Any] = _call_factory(found, mode, inputs)
    return factory


def load_with_inputs(
    target: str, given: Inputs, train: bool, device: torch.device
) -> tuple[Callable[..., Any], list[Arguments]]:
    """Load a TARGET with real memory, and random inputs for each call, on a device.

    A module whose parameters all have another floating type than the inputs, and which does not
    run with them, is converted; progress says so.
    """
    torch.manual_seed(0)
    fn = load_callable(target, len(given), nullcontext())

    def make(spec: Any) -> Any:
        made = spec.random() if isinstance(spec, TensorInput) else spec
        _refuse_sparse(made)
        return made.to(device) if isinstance(made, torch.Tensor) else made

    calls = [call.mapped(make) for call in each_call(_fitting(fn, given))]
    if not isinstance(fn, nn.Module):
        return fn, calls
    fn = fn.train(train).to(device)
    dtype, own = _common_dtype(calls[0]), _common_dtype(fn.parameters())
    if dtype is not None and own is not None and dtype is not own and not _runs(fn, calls[0]):
        progress(f"the model's parameters were converted to {dtype}, the inputs' type")
        fn = fn.to(dtype)
    return fn, calls


def _refuse_sparse(value: Any) -> None:
    """Raise UsageError for a tensor in a layout that ``torch.compile`` does not take."""
    if isinstance(value, torch.Tensor) and str(value.layout).startswith("torch.sparse"):
        raise UsageError(
            f"an input has the layout {value.layout}, which torch.compile does not take: calls "
            "with such tensors run eagerly, and there is nothing to compare."
        )


def _runs(fn: nn.Module, inputs: Arguments) -> bool:
    """Return whether a copy of a module runs with copies of some inputs."""
    try:
        with torch.no_grad():
            copy.deepcopy(inputs).call(copy.deepcopy(fn))
    except Exception:
        return False
    return True


class _Exported(nn.Module):
    """A program that ``torch.export.save`` wrote, as a module; its example inputs are defaults."""

    def __init__(self, path: str) -> None:
        super().__init__()
        try:
            exported = torch.export.load(path)
        except Exception as error:
            raise UsageError(f"{path!r} is no file of torch.export.save: {error}.") from error
        self.program = exported.module()
        args, kwargs = exported.example_inputs or ((), {})
        self.example_inputs = Arguments(tuple(args), dict(kwargs))

    def train(self, mode: bool = True) -> _Exported:
        """Return itself: a program was exported in one of the modes."""
        return self

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.program(*args, **named)


# -- the module ------------------------------------------------------------------------------------


def _import(place: str) -> ModuleType:
    if place.endswith(".py") or "/" in place or os.sep in place:
        return _import_file(Path(place))
    _search_first(os.getcwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            hint = f" For a file, write {place}.py:NAME." if Path(f"{place}.py").is_file() else ""
            raise UsageError(f"there is no module {error.name!r}.{hint} {FORM}.") from error
        raise


def _import_file(path: Path) -> ModuleType:
    check_file(path, FORM)
    _search_first(str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{str(path)!r} is no Python file. {FORM}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        if "relative import with no known parent" not in str(error):
            raise
        package, folder = package_of(path)
        name = f"{package}.{path.stem}" if package else path.stem
        raise UsageError(
            f"{str(path)!r} imports from its package: write {name}:NAME, in the folder {folder}."
        ) from error
    return module


def _search_first(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _find(module: ModuleType, name: str, place: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            members = vars(found).items() if hasattr(found, "__dict__") else ()
            names = [n for n, v in members if callable(v) and not n.startswith("_")]
            own = [n for n in names if getattr(vars(found)[n], "__module__", "") == module.__name__]
            raise UsageError.unknown(f"name in {place},", name, own or names)
        found = getattr(found, part)
    return found


# -- what the name stands for ----------------------------------------------------------------------


def _run_in(mode: AbstractContextManager[Any], make: Callable[[], _Made]) -> _Made:
    """Return ``make()`` in a mode, or without it if that fails: fake tensors have no values."""
    with torch.compiler.set_stance("force_eager"):
        try:
            with mode, converting_fakes():
                return make()
        except UsageError:
            raise
        except Exception:
            try:
                return make()
            except Exception as error:
                raise ModelError.raised(error) from error


def _construct(
    found: Any,
    name: str,
    args: list[Any],
    kwargs: dict[str, Any],
    mode: AbstractContextManager[Any],
) -> Callable[..., Any]:
    """Call a class or function with arguments, and return the callable that it makes.

    Raises:
        UsageError: if they do not fit, or the result cannot be called.
    """
    try:
        inspect.signature(found).bind(*args, **kwargs)
    except ValueError:  # it has no signature
        pass
    except TypeError as error:
        raise UsageError(f"{name!r} cannot be called so: {error}.") from error
    made = _run_in(mode, partial(found, *args, **kwargs))
    if not callable(made):
        raise UsageError(
            f"{name}(...) makes a {type(made).__name__}, which cannot be called. Name what makes a "
            "torch.nn.Module or a function."
        )
    result: Callable[..., Any] = made
    return result


def _refuse_class(found: type, name: str) -> None:
    if not issubclass(found, nn.Module):
        raise UsageError(f"class {name!r} is no torch.nn.Module. {FORM}.")
    needed = _required(found)
    if needed:
        raise UsageError(
            f"class {name!r} needs arguments ({', '.join(needed)}). Give them, as in "
            f"'{name}(64)', or name a function without arguments that returns {name}(...)."
        )


def _required(fn: Callable[..., Any]) -> list[str]:
    """Return the names of a function's required arguments."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in fixed]


def _call_factory(found: Callable[..., Any], mode: AbstractContextManager[Any], inputs: int) -> Any:
    """Return the module that a function without arguments makes, or else the function itself."""
    if _required(found) or not hasattr(found, "__code__"):
        return found
    kinds = [p.kind for p in inspect.signature(found).parameters.values()]
    any_number = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} & {*kinds}
    if inputs and (any_number or len(kinds) >= inputs):
        try:
            made = _run_in(mode, found)
        except ModelError:
            return found
    else:
        made = _run_in(mode, found)
    return made if isinstance(made, nn.Module) or inspect.isfunction(made) else found


# -- its arguments ---------------------------------------------------------------------------------


def each_call(given: Arguments) -> list[Arguments]:
    """Return the inputs of each call: as many as the specs give sizes for.

    Raises:
        UsageError: if two specs give several sizes, and not as many.
    """
    found = pytree.tree_leaves((given.args, dict(given.named)))
    tensors = [spec for spec in found if isinstance(spec, TensorInput)]
    counts = {1 + len(spec.later) for spec in tensors if spec.later} or {1}
    if len(counts) > 1:
        raise UsageError(
            f"inputs have {' and '.join(map(str, sorted(counts)))} sizes: give as many for each."
        )

    def of_call(spec: Any, number: int) -> Any:
        if not isinstance(spec, TensorInput) or not spec.later:
            return spec
        return replace(spec, shape=(spec.shape, *spec.later)[number], later=())

    return [given.mapped(partial(of_call, number=number)) for number in range(counts.pop())]


def _fitting(fn: Callable[..., Any], given: Inputs) -> Arguments:
    """Return the arguments of a call.

    Raises:
        UsageError: if the inputs do not fit the signature.
    """
    specs, named = given.read()
    if isinstance(fn, _Exported) and not (specs or named):
        return fn.example_inputs
    try:
        return fitting(fn, specs, named)
    except TypeError as error:
        raise UsageError(
            f"the inputs do not fit the model, which takes ({described(fn)}): {error}. "
            "Give one --input for each, in order or as NAME=SPEC."
        ) from error


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert a model's floating parameters and buffers to a type; shared ones stay shared.

    ``Module.to`` swaps a fake parameter's contents, which fails where something refers to it.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is None or not old.is_floating_point():
                    continue
                if old not in made:
                    new = old.detach().to(dtype)
                    made[old] = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
                table[name] = made[old]  # type: ignore[assignment]


def _common_dtype(values: Any) -> torch.dtype | None:
    """Return the floating type of the tensors among values; None if there is not exactly one."""
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
    dtypes = {tensor.dtype for tensor in tensors}
    return dtypes.pop() if len(dtypes) == 1 else None
