"""``--input SPEC``: the type and shape of one argument.

Grammar::

    SPEC   ::= dtype '[' [extent (',' extent)*] ']' ['<' bound]     a tensor: bf16[8,128,768]
             | integer | float | 'true' | 'false' | 'none'          a number, or nothing
    dtype  ::= 'f32' | 'bf16' | 'f16' | 'f64' | 'i64' | 'i32' | 'i16' | 'i8' | 'u8' | 'bool'

A bound says what indices are less than: ``i64[8,128]<50257``. Tracing needs no values, so that it
is checked and kept, no more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from fusec.errors import UsageError

if TYPE_CHECKING:
    import torch

DTYPES = {
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "f64": "float64",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "bool": "bool",
}
"""Names of element types here -> in torch."""

EXAMPLES = "bf16[8,128,768], i64[8,128]<50257, f32[], or a number such as 3, 0.5, true"
_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:<(?P<bound>.*))?")
_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor argument: ``dtype`` as fusec spells it; indices less than ``bound``, if given."""

    dtype: str
    shape: tuple[int, ...]
    bound: int | None = None

    def make(self) -> torch.Tensor:
        """Return an uninitialised tensor of this type; under a fake mode it has no memory."""
        # Local: parsing a command line shall not take the second that torch's import takes.
        import torch

        return torch.empty(self.shape, dtype=getattr(torch, DTYPES[self.dtype]))

    def random(self) -> torch.Tensor:
        """Return a tensor of this type: normal, integers from 0 to the bound (2 if there is none).

        Small integers are safe where they are indices.
        """
        import torch  # as above

        dtype = getattr(torch, DTYPES[self.dtype])
        if dtype.is_floating_point:
            return torch.randn(self.shape).to(dtype)
        high = 2 if self.bound is None else self.bound
        return torch.randint(0, 2 if self.dtype == "bool" else high, self.shape).to(dtype)


Spec: TypeAlias = "TensorSpec | int | float | bool | None"


def parse_spec(text: str) -> Spec:
    """Return what a SPEC says.

    Raises:
        UsageError: with the grammar, and the nearest dtype.
    """
    text = text.strip()
    match = _TENSOR.fullmatch(text.replace(" ", ""))
    if match is not None:
        return _tensor(text, match)
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise UsageError(f"input {text!r} is no SPEC. Write it as {EXAMPLES}.")


def _tensor(text: str, match: re.Match[str]) -> TensorSpec:
    dtype, bound = match["dtype"], match["bound"]
    if dtype not in DTYPES:
        near = next((ours for ours, torchs in DTYPES.items() if torchs == dtype), None)
        if near is not None:
            raise UsageError(f"input {text!r}: unknown dtype {dtype!r}. Did you mean {near!r}?")
        raise UsageError.unknown("dtype", dtype, DTYPES)
    shape = match["shape"].split(",") if match["shape"] else []
    if not all(extent.isascii() and extent.isdigit() for extent in shape):
        raise UsageError(
            f"input {text!r}: extents are integers, 0 or more. Write it as {EXAMPLES}."
        )
    if bound is not None and (dtype[0] not in "iu" or not bound.isdigit() or int(bound) < 1):
        raise UsageError(
            f"input {text!r}: a bound is a positive integer, and for indices only, as in "
            "i64[8,128]<50257."
        )
    return TensorSpec(dtype, tuple(map(int, shape)), None if bound is None else int(bound))
