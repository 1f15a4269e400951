"""Write the functions of a module out where they are called, as LLVM would have inlined them.

LLVM calls what is long and rare: the reduction of large angles, of f64. Registers, labels and
arrays of the function are the call's own; its parameters and its result are arrays of the caller's
local memory, which ``parse`` declares; a return is a branch behind its last instruction.

Worked example: of ``call.uni (retval0), f, (param0);``, the first call::

    ld.param.b64 %rd1, [f_param_0];      becomes      ld.param.b64 %f1_rd1, [param0_3];
    @%p1 ret;                                         @%f1_p1 bra.uni $f1_end;
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

CALL = re.compile(r"call(?:\.uni)?\s+(?:\((\w*)\),\s*)?([\w$]+)(?:,\s*\(([^)]*)\))?")
_FUNCTION = re.compile(
    r"^\.(?:visible\s+|weak\s+)?func\s+(?:\(([^)]*)\)\s*)?([\w$]+)\s*\(([^)]*)\)"
    r"(?:\s|//[^\n]*)*\{(.*?)^\}",
    re.S | re.M,
)
_NAME = re.compile(r"([\w$]+)\s*(?:\[\d+\]\s*)?(?:,|$)")
_SPECIAL = r"n?(?:tid|ctaid|warpid)\b|laneid|lanemask|clock|globaltimer|cluster"
_OWN = re.compile(rf"%(?!{_SPECIAL})(?=[a-zA-Z])|\$(?=L)")
_RETURN = re.compile(r"(?<![\w.$%])ret(?:\.uni)?\s*;")
_ARRAY = re.compile(r"__local_depot\d+")


@dataclass(frozen=True, slots=True)
class Function:
    """A function's text.

    Attributes:
        names: of its result, if it has one, then of its parameters.
        line: of the PTX where the text begins.
    """

    names: tuple[str, ...]
    text: str
    line: int


def split_functions(ptx: str) -> tuple[dict[str, Function], str]:
    """Return the functions of a module, and its text with empty lines in their place."""
    found: dict[str, Function] = {}

    def blank(match: re.Match[str]) -> str:
        result, name, parameters, text = match.groups()
        names = (*_NAME.findall(result or ""), *_NAME.findall(parameters))
        found[name] = Function(names, text, ptx.count("\n", 0, match.start(4)) + 1)
        return "\n" * match[0].count("\n")

    rest = _FUNCTION.sub(blank, ptx)
    return found, rest


def inlined(function: Function, given: Sequence[str], call: int) -> str:
    """Return a function's text with arrays for result and parameters; ``call`` is its number."""
    text = _OWN.sub(lambda m: f"{m[0]}f{call}_", function.text)
    text = _ARRAY.sub(lambda m: f"f{call}_{m[0]}", text)
    for name, array in zip(function.names, given, strict=True):
        text = re.sub(rf"\b{name}\b", array, text)
    return f"{_RETURN.sub(f'bra.uni $f{call}_end;', text)}\n$f{call}_end:\n"
