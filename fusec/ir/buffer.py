"""Buffers: the tensors that definitions, kernels and programs read and write."""

from __future__ import annotations

import functools

from fusec.ir.dtype import DType, NumberForm
from fusec.ir.index import Index, index, sum_of_terms
from fusec.ir.strides import contiguous_strides


class Buffer:
    """A tensor in memory, by identity; ``shape`` and ``strides`` (in elements) may be symbolic.

    ``form`` is how torch has it. Where that is complex, the last axis here is that of the parts.
    """

    __slots__ = ("__weakref__", "_flat", "base", "dtype", "form", "name", "shape", "strides")

    def __init__(
        self,
        name: str,
        shape: tuple[Index, ...],
        strides: tuple[Index, ...],
        dtype: DType,
        form: NumberForm = NumberForm.PLAIN,
    ) -> None:
        self.name, self.form = name, form
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.base: Buffer = self
        self._flat: Buffer | None = None

    @classmethod
    def row_major(cls, name: str, shape: tuple[Index, ...], dtype: DType) -> Buffer:
        """Return a new tensor with row-major strides."""
        return cls(name, shape, contiguous_strides(shape), dtype)

    @property
    def is_row_major(self) -> bool:
        """Whether its strides are row-major."""
        return self.strides == contiguous_strides(self.shape)

    def flat(self) -> Buffer:
        """Return the storage as one axis of stride 1, for programs; ``flat().base is self``."""
        if self.base is not self:
            return self
        if self._flat is None:
            length = index(1)
            for extent, stride in zip(self.shape, self.strides, strict=True):
                length = length + (extent - 1) * stride
            self._flat = Buffer(self.name, (length,), (index(1),), self.dtype)
            self._flat.base = self
        return self._flat

    def offset(self, indices: tuple[Index, ...]) -> Index:
        """Return the element offset of ``self[indices]`` from the buffer's first element."""
        return _offset(self.strides, indices)

    def __repr__(self) -> str:
        return self.name


@functools.lru_cache(maxsize=1 << 14)
def _offset(strides: tuple[Index, ...], indices: tuple[Index, ...]) -> Index:
    parts = [p * stride for p, stride in zip(indices, strides, strict=True)]
    return sum_of_terms([term for p in parts for term in p.terms], sum(p.const for p in parts))
