"""Options of one compile, and the only reader of the environment and of torch.compile's arguments.

Decides each option's name, type and default, and which source wins. From weak to strong:

    default of the field  <  environment variable  <  torch.compile(mode=...)  <  options={...}

The environment variable of field `cache_dir` is `FUSEC_CACHE_DIR`; the table of all of them is
`environment_variables()`, which `fusec --help` prints. One setting of torch is stronger than all:
`torch.use_deterministic_algorithms(True)` sets `deterministic`. To add an option, add a field to
`Options`: parsing, checking, help and the nearest-name message follow from its declaration.

    >>> Options.from_compile("reduce-overhead", None, environ={"FUSEC_THREADS": "1"}).cudagraphs
    True
"""

from __future__ import annotations

import functools
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from fusec.errors import UsageError, nearest

MODES: Mapping[str, Mapping[str, bool | float]] = {
    "default": {},
    "reduce-overhead": {"cudagraphs": True},
    "max-autotune": {"autotune": True, "race_budget_s": 300.0, "cudagraphs": True},
    "max-autotune-no-cudagraphs": {"autotune": True, "race_budget_s": 300.0, "cudagraphs": False},
}
"""The options that each mode of torch.compile sets; names and meaning are torch's."""


_RACE_SECONDS = {"cuda": 20.0, "cpu": 10.0}
"""On a CPU the number of races is limited (``fusec/driver/race.py``), and they take a second or
two: time ends races on busy machines alone."""


@dataclass(frozen=True, slots=True)
class About:
    """The declaration of an option beyond its type and default.

    Attributes:
        help: one line for `fusec --help`.
        keeps_code: not part of `Options.key()`: generated code does not depend on it.
        also_read: further environment variables, read when fusec's own is unset.
        choices: the values that a text may have; empty: any.
        most: the largest value of a float.
    """

    help: str
    keeps_code: bool = False
    also_read: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    most: float = math.inf


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the table of environment variables."""

    name: str
    type: str
    default: str
    help: str


def _option(default: Any, help: str, **more: Any) -> Any:
    """Declare a field of ``Options``; further arguments are those of ``About``."""
    return field(default=default, metadata={"about": About(help, **more)})


@dataclass(frozen=True, slots=True)
class Options:
    """Everything a user can choose about a compile. Plain `Options()` is all defaults."""

    strict: bool = _option(
        False, "raise errors inside fusec instead of falling back to eager kernels", keeps_code=True
    )
    cache: bool = _option(True, "keep compiled kernels on disk", keeps_code=True)
    cache_dir: str | None = _option(
        None, "directory of the cache; default: the user's cache directory", keeps_code=True
    )
    cache_size_mb: int = _option(
        2048,
        "size limit of the cache in MiB; the least recently used entries go first",
        keeps_code=True,
    )
    threads: int = _option(
        0, "number of kernels compiled in parallel; 0: one per core", keeps_code=True
    )
    cudagraphs: bool = _option(False, "record each graph's launches as one CUDA graph")
    autotune: bool = _option(
        True, "time candidates on the device and keep the fastest; off: the cost model decides"
    )
    race: str = _option(
        "auto",
        "products by fused kernels, by the library, or auto: whichever is faster",
        choices=("auto", "fused", "library"),
    )
    native: bool = _option(
        False, "compile every operation to a kernel, so that C can call the graph without torch"
    )
    deterministic: bool = _option(
        False, "choose by rule, time nothing: each compile of a program makes the same code"
    )
    batch_invariant: bool = _option(
        False, "the same bits for all values of a size that fusec.name_size names, a batch's (CPU)"
    )
    # A larger budget may find another winner, which an entry of a smaller one would hide.
    race_budget_s: float | None = _option(
        None, "seconds for timing the candidates of one graph; default: 20 on a GPU, 10 on a CPU"
    )
    descriptors: str = _option(
        "auto",
        "copy tiles by TMA descriptors: always, never, or auto, where a rule or a race prefers it",
        choices=("auto", "always", "never"),
    )
    roles: str = _option(
        "auto",
        "warp specialization (sm_90): cooperative, never, or auto, by a rule or a race",
        choices=("auto", "cooperative", "never"),
    )
    dependent_launches: str = _option(
        "auto",
        "start a kernel while the one before it ends (sm_90 on): always, never, or auto, by a race",
        choices=("auto", "always", "never"),
    )
    fusion: bool = _option(
        True, "fuse definitions; off: each is a kernel of its own, for debugging"
    )
    channels_last: bool = _option(
        True, "run convolutions channels-last where that is faster (CPU); off: in the given format"
    )
    merge_limit: int = _option(
        1 << 30, "stop after this many merges in a graph, to bisect for a wrong one"
    )
    passes: str = _option(
        "", "passes of yours (fusec.register_pass) to run behind capture, as 'name, another'"
    )
    fallback_random: bool = _option(
        False, "draw random numbers by eager kernels, from eager's stream; off: inside kernels"
    )
    chunk_bytes: int = _option(
        1 << 27,
        "run products of at least this many bytes that are then reduced in chunks; 0: never",
    )
    precision: str = _option(
        "best",
        "16-bit values between operations: best keeps f32, eager rounds (and chooses) as eager",
        choices=("best", "eager"),
    )
    memory_budget: float = _option(
        1.0,
        "share of the default saved activations that training may keep; less recomputes more",
        most=1.0,
    )
    freeze: bool = _option(
        False,
        "at inference, compute what depends on weights alone once, and again if these change",
        keeps_code=True,
    )
    verify: bool = _option(
        False, "check the IR after each pass, and each kernel and graph against eager when it runs"
    )
    dump_dir: str | None = _option(
        None, "write every stage of every compile to this directory", keeps_code=True
    )
    cxx: str | None = _option(
        None,
        "C++ compiler; default: CXX, else g++, else clang++",
        also_read=("CXX",),
        keeps_code=True,
    )
    target: str | None = _option(None, "compile for this target, not the inputs' device")

    def __post_init__(self) -> None:
        for declared in fields(self):
            value = getattr(self, declared.name)
            if _checked(declared, value, f"option {declared.name!r}") is not value:
                raise UsageError(
                    f"option {declared.name!r}: {value!r} must be given as {_kind(declared)}"
                )

        if self.batch_invariant and (self.race == "library" or not self.fusion):
            raise UsageError(
                "batch_invariant: products are kernels of fusec's own, which race='library' and "
                "fusion=False leave to libraries: leave these out."
            )
        if self.batch_invariant and self.precision == "eager":
            raise UsageError(
                "batch_invariant: precision='eager' leaves biased products in 16 bits to eager's "
                "kernels: leave it out."
            )

    @classmethod
    def from_compile(
        cls,
        mode: str | None,
        options: Mapping[str, object] | None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> Options:
        """Return the options that torch.compile's `mode=` and `options=` and the environment give.

        `torch.use_deterministic_algorithms` is asked here, for every way into the compiler: where
        a model's file may call it, options are made after that file has run.

        Args:
            environ: read in place of `os.environ`.
        Raises:
            UsageError: for an unknown mode or option (the nearest valid name is in the message),
                and for a value of the wrong type, wherever it came from.
        """
        declared = {option.name: option for option in fields(cls)}
        chosen: dict[str, Any] = _from_environment(os.environ if environ is None else environ)
        chosen.update(_from_mode(mode))
        for name, value in (options or {}).items():
            if name not in declared:
                raise UsageError.unknown("option", str(name), declared)
            chosen[name] = _checked(declared[name], value, f"option {name!r}")
        if _torch_is_deterministic():
            chosen["deterministic"] = True
        return cls(**chosen)

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> dict[str, Any]:
        """Return the options in texts such as "fusion=0": option -> value.

        Raises:
            UsageError: for an unknown option, and for a value of the wrong type.
        """
        declared = {option.name: option for option in fields(cls)}
        chosen: dict[str, Any] = {}
        for text in texts:
            name, _, value = text.partition("=")
            if name not in declared:
                raise UsageError.unknown("option", name, declared)
            parsed = _parsed(declared[name], value.strip(), f"option {name!r}")
            chosen[name] = _checked(declared[name], parsed, f"option {name!r}")
        return chosen

    @property
    def alone(self) -> bool:
        """Whether products and convolutions are kernels of fusec's own, never a library's calls."""
        return self.native or self.batch_invariant

    @property
    def by_rule(self) -> bool:
        """Whether nothing that a run, or a setting of the process, may change decides a choice."""
        return self.deterministic or self.batch_invariant

    @property
    def times(self) -> bool:
        """Whether candidates may be timed."""
        return self.autotune and self.race == "auto" and not self.alone and not self.by_rule

    @property
    def pass_names(self) -> tuple[str, ...]:
        """The names of the user's passes, in their order."""
        return tuple(name for part in self.passes.split(",") if (name := part.strip()))

    def race_seconds(self, device: str) -> float:
        """Return the seconds that the races of one graph may take on a kind of device."""
        if self.race_budget_s is not None:
            return self.race_budget_s
        return _RACE_SECONDS.get(device, 20.0)

    def key(self) -> str:
        """Return the fields that change generated code, as stable text for cache keys.

        `cxx` is not among them: the build adds the compiler's identity, which a path is not.
        """
        parts = [o.name for o in fields(self) if not _declared(o).keeps_code]
        return ",".join(f"{name}={getattr(self, name)!r}" for name in sorted(parts))


def environment_variables() -> tuple[Variable, ...]:
    """Return the environment variables that fusec reads, one row for each option."""
    return tuple(
        Variable(
            _variable(option),
            _kind(option),
            "" if option.default is None else _shown(option.default),
            _declared(option).help,
        )
        for option in fields(Options)
    )


def _torch_is_deterministic() -> bool:
    """Return torch's setting: errors or warnings for eager kernels; False before torch is there."""
    torch = sys.modules.get("torch")  # not imported, which `fusec --help` shall not wait for
    return torch is not None and torch.are_deterministic_algorithms_enabled()


def _from_mode(mode: str | None) -> Mapping[str, bool | float]:
    if mode is None:
        return {}
    if mode not in MODES:
        raise UsageError.unknown("mode", str(mode), MODES)
    return MODES[mode]


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    known = {variable.name for variable in environment_variables()}
    for name in environ:
        if name.startswith("FUSEC_") and name not in known:
            _warn_of_variable(name)
    chosen: dict[str, Any] = {}
    for option in fields(Options):
        # An empty variable counts as unset, so that `FUSEC_CACHE= command` means the default.
        for variable in (_variable(option), *_declared(option).also_read):
            if text := environ.get(variable, "").strip():
                where = f"environment variable {variable}"
                chosen[option.name] = _checked(option, _parsed(option, text, where), where)
                break
    return chosen


@functools.cache
def _warn_of_variable(name: str) -> None:
    """Warn once per process that fusec has no environment variable of this name."""
    near = nearest(name.removeprefix("FUSEC_"), [option.name for option in fields(Options)])
    hint = f" Did you mean FUSEC_{near.upper()}?" if near is not None else ""
    warnings.warn(
        f"fusec: there is no environment variable {name}.{hint} `fusec --help` lists them all.",
        stacklevel=2,
    )


def _checked(option: Field[Any], value: object, where: str) -> Any:
    """Return `value` in the type of `option`'s field; raise UsageError, naming `where`, if not."""
    match str(option.type), value:
        case "bool", bool():
            return value
        case "int", int() if not isinstance(value, bool):
            if value < 0:
                raise UsageError(f"{where}: {value} is negative; give 0 or more.")
            return value
        case (("float" | "float | None"), int() | float()) if not isinstance(value, bool):
            most = _declared(option).most
            if not 0 <= value <= most or value == math.inf:
                known = "no duration; give 0 or more" if most == math.inf else "not in [0, 1]"
                raise UsageError(f"{where}: {value} is {known}.")
            return value if isinstance(value, float) else float(value)
        case "str", str():
            choices = _declared(option).choices
            if choices and value not in choices:
                raise UsageError.unknown(f"value of {where}:", value, choices)
            return value
        case (("str | None" | "float | None"), None):
            return value
        case "str | None", str():
            return value
        case "str | None", os.PathLike():
            return os.fspath(value)
        case _:
            raise UsageError(
                f"{where}: {value!r} ({type(value).__name__}) is not accepted; give "
                f"{_accepted(option)}. {option.name} means: {_declared(option).help}."
            )


def _accepted(option: Field[Any]) -> str:
    """Return in words which values an option takes."""
    if choices := _declared(option).choices:
        return f"one of {', '.join(map(repr, choices))}"
    return _ACCEPTED[str(option.type)]


_ACCEPTED: Mapping[str, str] = {
    "bool": "True or False",
    "int": "a whole number",
    "float": "a number",
    "float | None": "a number or None",
    "str": "a text",
    "str | None": "a text or None",
}
_BOOLS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)
_PARSERS: Mapping[str, tuple[Callable[[str], object], str]] = {
    "bool": (lambda text: _BOOLS[text.lower()], "not 1 or 0"),
    "int": (int, "no integer"),
    "float": (float, "no number"),
}
"""By the field's type without None; `from __future__ import annotations` keeps it as text."""


def _parsed(option: Field[Any], text: str, where: str) -> object:
    parse, otherwise = _PARSERS.get(_kind(option), (str, ""))
    try:
        return parse(text)
    except (ValueError, KeyError):
        raise UsageError(f"{where}: {text!r} is {otherwise}.") from None


def _declared(option: Field[Any]) -> About:
    about = option.metadata["about"]
    assert isinstance(about, About)
    return about


def _kind(option: Field[Any]) -> str:
    return str(option.type).removesuffix(" | None")


def _variable(option: Field[Any]) -> str:
    return f"FUSEC_{option.name.upper()}"


def _shown(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
