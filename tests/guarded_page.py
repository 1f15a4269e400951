"""Memory that ends where nothing may be touched."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np


class GuardedPage:
    """A page of bytes; the page behind it is not accessible."""

    def __init__(self) -> None:
        self.bytes = np.frombuffer(mmap.mmap(-1, 2 * mmap.PAGESIZE), "u1")
        end = ctypes.c_void_p(self.bytes.ctypes.data + mmap.PAGESIZE)
        assert ctypes.CDLL(None).mprotect(end, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
