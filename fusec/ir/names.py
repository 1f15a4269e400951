"""Unique identifiers in printed code, one for each object.

Worked example: ``names.new("x.weight")`` is ``x_weight``, then ``x_weight_1``. A kernel's printed
function is named after its operations and the kernel, ``add_layer_norm_k7``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol


class Named(Protocol):
    """An object with a name that need not be unique."""

    @property
    def name(self) -> str: ...


def identifier(text: str) -> str:
    """Return a text as an identifier in any language: letters, digits, ``_``, a letter first."""
    safe = re.sub(r"[^A-Za-z0-9_]", "_", text).lstrip("_")
    return safe if safe[:1].isalpha() else f"v{safe}"


SHOWN_OPERATIONS = 4
_ATTENTION = re.compile(r"scaled_dot_product_\w*?attention(_for_cpu)?(?=_backward|$)")
_PLAIN = {
    "add", "sub", "rsub", "mul", "div", "neg", "reciprocal", "pow", "sum", "maximum", "minimum",
    "clamp", "clamp_min", "eq", "ne", "lt", "le", "gt", "ge", "where", "masked_fill",
    "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not",
    "index", "select", "slice", "cat", "constant_pad_nd", "select_backward", "slice_backward",
    "clone", "copy", "to_copy", "convert_element_type", "alias", "detach", "expand", "full",
    "scalar_tensor", "arange",
}  # fmt: skip
"""Operations that say little about a kernel; others are named before them."""


def operation_words(ops: Iterable[str]) -> tuple[str, ...]:
    """Return the common names of operations, each once: "layer_norm", "softmax", "attention".

    Namespace and overload are dropped: "fusec.random_seeds.default" becomes "random_seeds".

    Where there are more than ``SHOWN_OPERATIONS``, the plain ones (``_PLAIN``) come last.
    """
    plain = (op.split(".")[-2] if "." in op else op for op in ops)
    names = (name.lstrip("_").removeprefix("native_") for name in plain)
    words = list(dict.fromkeys(_ATTENTION.sub("attention", name) for name in names))
    return tuple(
        words if len(words) <= SHOWN_OPERATIONS else sorted(words, key=_PLAIN.__contains__)
    )


def function_name(kernel: str, ops: Iterable[str]) -> str:
    """Return the name of a kernel's printed function: ``add_layer_norm_k7``.

    GPU profiles show kernels, and sum their times, by this name. It has ``SHOWN_OPERATIONS`` at
    most; the last ones are left out where it becomes longer than ``LONGEST_FUNCTION``.
    """
    name = ""
    for word in operation_words(ops)[:SHOWN_OPERATIONS]:
        longer = f"{name}_{word}" if name else word
        if len(longer) + len(kernel) >= LONGEST_FUNCTION:
            break
        name = longer
    return identifier(f"{name}_{kernel}") if name else kernel


LONGEST_FUNCTION = 48


class Names:
    """The identifiers in use, and the objects that have them.

    Args:
        reserved: names that are never returned.
        separator: text in front of the number that is appended to a name in use.
    """

    def __init__(self, reserved: Iterable[str] = (), separator: str = "_") -> None:
        self._separator = separator
        self._counts = dict.fromkeys(reserved, 0)
        self._given: dict[object, str] = {}

    def new(self, wanted: str) -> str:
        """Return ``wanted`` as an identifier, with the first free number if it is in use."""
        name = base = identifier(wanted)
        count = self._counts.get(base, 0)
        while name in self._counts:
            count += 1
            name = f"{base}{self._separator}{count}"
        self._counts[base] = count
        self._counts[name] = 0 if name != base else count
        return name

    def release(self, name: str) -> None:
        """Let another object have a name that ``new`` has returned, and nothing has used."""
        del self._counts[name]

    def __call__(self, thing: Named, prefix: str = "") -> str:
        """Return the identifier of an object; at the first call, a new one from prefix and name."""
        name = self._given.get(thing)
        if name is None:
            name = self._given[thing] = self.new(prefix + thing.name)
        return name

    def __contains__(self, thing: object) -> bool:
        return thing in self._given

    def all(self) -> tuple[str, ...]:
        """Return the identifiers of objects, in the order in which they were made."""
        return tuple(self._given.values())
