"""Identifiers for what is printed: each thing has one, and no two have the same.

Worked example: ``names.new("x.weight")`` is ``x_weight``, then ``x_weight_1``. A kernel's printed
function is called by its operations and its name, ``add_layer_norm_k7``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol


class Named(Protocol):
    """Something with a name, which others may have, too."""

    @property
    def name(self) -> str: ...


def identifier(text: str) -> str:
    """Return a text as an identifier of any language: letters, digits, ``_``, a letter first."""
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
"""Operations that say little of a kernel that has others."""


def operation_words(ops: Iterable[str]) -> tuple[str, ...]:
    """Return operations as people call them, each once: "layer_norm", "softmax", "attention".

    An operation of a library, "fusec.random_seeds.default", is called without its name.

    Where there are more than ``SHOWN_OPERATIONS``, those that say most stand first.
    """
    plain = (op.split(".")[-2] if "." in op else op for op in ops)
    names = (name.lstrip("_").removeprefix("native_") for name in plain)
    words = list(dict.fromkeys(_ATTENTION.sub("attention", name) for name in names))
    return tuple(
        words if len(words) <= SHOWN_OPERATIONS else sorted(words, key=_PLAIN.__contains__)
    )


def function_name(kernel: str, ops: Iterable[str]) -> str:
    """Return what the printed function of a kernel is called: ``add_layer_norm_k7``.

    It is what traces of a GPU show, and what they add up by. It has ``SHOWN_OPERATIONS`` at most,
    and those at the end are left out where it becomes longer than ``LONGEST_FUNCTION``.
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
    """The names in use.

    Args:
        reserved: those that nothing gets.
        separator: stands in front of the number of a name that was taken.
    """

    def __init__(self, reserved: Iterable[str] = (), separator: str = "_") -> None:
        self._separator = separator
        self._counts = dict.fromkeys(reserved, 0)
        self._given: dict[object, str] = {}

    def new(self, wanted: str) -> str:
        """Return ``wanted`` as an identifier, with the first free number if that is taken."""
        name = base = identifier(wanted)
        count = self._counts.get(base, 0)
        while name in self._counts:
            count += 1
            name = f"{base}{self._separator}{count}"
        self._counts[base] = count
        self._counts[name] = 0 if name != base else count
        return name

    def __call__(self, thing: Named, prefix: str = "") -> str:
        """Return the name of a thing; if it has none yet, its own after a prefix."""
        name = self._given.get(thing)
        if name is None:
            name = self._given[thing] = self.new(prefix + thing.name)
        return name

    def __contains__(self, thing: object) -> bool:
        return thing in self._given

    def all(self) -> tuple[str, ...]:
        """Return the names of things in the order in which they were given."""
        return tuple(self._given.values())
