"""The prelude as a shared library: each operation a loop over lanes and one over scalars."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from fusec.codegen.cpp.prelude import prelude
from fusec.ir.dtype import F8

Array = np.ndarray[Any, Any]

MEMORY = {
    "f32": "f4", "f64": "f8", "bf16": "u2", "f16": "u2", "i64": "i8", "i32": "i4", "i16": "i2",
    "i8": "i1", "u8": "u1", "bool": "u1", **{dtype.name: "u1" for dtype in F8},
}  # fmt: skip
"""The NumPy type of each element type in memory."""
VALUES = ("f32", "f64", "i64", "i32", "bool")
"""The types that are computed with."""

_EXPORTS = r"""
typedef long long i64;
#define EXPORT extern "C" void
#define UNARY(f, A, B)                                                                           \
  EXPORT v_##f##_##A(const m_##A *x, m_##B *y, i64 n) {                                          \
    for (i64 i = 0; i < n; i += FUSEC_W) st_##B(y + i, f_##f(ld_##A(x + i)));                    \
  }                                                                                              \
  EXPORT s_##f##_##A(const m_##A *x, m_##B *y, i64 n) {                                          \
    for (i64 i = 0; i < n; i++) sts_##B(y + i, f_##f(lds_##A(x + i)));                           \
  }
#define BINARY(f, A, B)                                                                          \
  EXPORT v_##f##_##A(const m_##A *x, const m_##A *y, m_##B *z, i64 n) {                          \
    for (i64 i = 0; i < n; i += FUSEC_W) st_##B(z + i, f_##f(ld_##A(x + i), ld_##A(y + i)));     \
  }                                                                                              \
  EXPORT s_##f##_##A(const m_##A *x, const m_##A *y, m_##B *z, i64 n) {                          \
    for (i64 i = 0; i < n; i++) sts_##B(z + i, f_##f(lds_##A(x + i), lds_##A(y + i)));           \
  }
#define CONVERT(A, B)                                                                            \
  EXPORT v_to_##B##_##A(const m_##A *x, m_##B *y, i64 n) {                                       \
    for (i64 i = 0; i < n; i += FUSEC_W) st_##B(y + i, to_##B(ld_##A(x + i)));                   \
  }                                                                                              \
  EXPORT s_to_##B##_##A(const m_##A *x, m_##B *y, i64 n) {                                       \
    for (i64 i = 0; i < n; i++) sts_##B(y + i, to_##B(lds_##A(x + i)));                          \
  }
#define SELECT(D)                                                                                \
  EXPORT select_##D(const m_bool *c, const m_##D *x, const m_##D *y, m_##D *z, i64 n) {          \
    for (i64 i = 0; i < n; i += FUSEC_W)                                                         \
      st_##D(z + i, f_select(ld_bool(c + i), ld_##D(x + i), ld_##D(y + i)));                     \
  }
#define REDUCE(D)                                                                                \
  EXPORT reduce_##D(const m_##D *x, m_##D *y) {                                                  \
    auto v = ld_##D(x);                                                                          \
    y[0] = f_hsum(v), y[1] = f_hprod(v), y[2] = f_hmax(v), y[3] = f_hmin(v);                     \
  }
#define ROUND(D)                                                                                 \
  EXPORT v_round_##D(const float *x, float *y, i64 n) {                                          \
    for (i64 i = 0; i < n; i += FUSEC_W) st_f32(y + i, round_##D(ld_f32(x + i)));                \
  }                                                                                              \
  EXPORT s_round_##D(const float *x, float *y, i64 n) {                                          \
    for (i64 i = 0; i < n; i++) y[i] = round_##D(x[i]);                                          \
  }                                                                                              \
  EXPORT load_##D(const m_##D *x, float *lanes, float *scalars, i64 n) {                         \
    for (i64 i = 0; i < n; i += FUSEC_W) st_f32(lanes + i, ld_##D(x + i));                       \
    for (i64 i = 0; i < n; i++) scalars[i] = lds_##D(x + i);                                     \
  }                                                                                              \
  EXPORT store_##D(const float *x, m_##D *lanes, m_##D *scalars, i64 n) {                        \
    for (i64 i = 0; i < n; i += FUSEC_W) st_##D(lanes + i, ld_f32(x + i));                       \
    for (i64 i = 0; i < n; i++) sts_##D(scalars + i, x[i]);                                      \
  }
#define MEMORY(D)                                                                                \
  EXPORT get_##D(int how, const m_##D *p, m_##D *out, i64 k, const i64 *o, const m_bool *c) {    \
    vm m = ld_bool(c);                                                                           \
    vi64 at = ld_i64(o);                                                                         \
    switch (how) {                                                                               \
      case 0: return st_##D(out, ld_##D(p));                                                     \
      case 1: return st_##D(out, ldm_##D(p, m));                                                 \
      case 2: return st_##D(out, ldg_##D(p, k));                                                 \
      case 3: return st_##D(out, ldgm_##D(p, k, m));                                             \
      case 4: return st_##D(out, ldi_##D(p, at));                                                \
      case 5: return st_##D(out, ldim_##D(p, at, m));                                            \
      default: return sts_##D(out, lds_##D(p));                                                  \
    }                                                                                            \
  }                                                                                              \
  EXPORT turn_##D(const m_##D *p, m_##D *t, i64 s, i64 n, const m_bool *c) {                     \
    vm m = ld_bool(c);                                                                           \
    return f_hall(m) ? ldt_##D(t, p, s, n) : ldtm_##D(t, p, s, n, m);                            \
  }                                                                                              \
  EXPORT put_##D(int how, m_##D *p, const m_##D *in, i64 k, const i64 *o, const m_bool *c) {     \
    vm m = ld_bool(c);                                                                           \
    vi64 at = ld_i64(o);                                                                         \
    auto v = ld_##D(in);                                                                         \
    switch (how) {                                                                               \
      case 0: return st_##D(p, v);                                                               \
      case 1: return stm_##D(p, v, m);                                                           \
      case 2: return stg_##D(p, k, v);                                                           \
      case 3: return stgm_##D(p, k, v, m);                                                       \
      case 4: return sti_##D(p, at, v);                                                          \
      case 5: return stim_##D(p, at, v, m);                                                      \
      default: return sts_##D(p, lds_##D(in));                                                   \
    }                                                                                            \
  }
EXPORT masks(const m_bool *x, m_bool *y) {
  y[0] = f_hany(ld_bool(x)), y[1] = f_hall(ld_bool(x));
}
EXPORT v_random(i64 seed, const i64 *at, int *y, i64 n) {
  for (i64 i = 0; i < n; i += FUSEC_W) st_i32(y + i, f_random(v_i64(seed), ld_i64(at + i)));
}
EXPORT s_random(i64 seed, const i64 *at, int *y, i64 n) {
  for (i64 i = 0; i < n; i++) y[i] = f_random(seed, at[i]);
}
EXPORT pairs_random(i64 seed, i64 first, int *y) {
  st_i32(y, f_random_run2<0>(seed, first)), st_i32(y + FUSEC_W, f_random_run2<1>(seed, first));
}
EXPORT fours_random(i64 seed, i64 first, int *y) {
  st_i32(y, f_random_run4<0>(seed, first)), st_i32(y + FUSEC_W, f_random_run4<1>(seed, first));
  st_i32(y + 2 * FUSEC_W, f_random_run4<2>(seed, first));
  st_i32(y + 3 * FUSEC_W, f_random_run4<3>(seed, first));
}
EXPORT run_random(i64 seed, i64 first, int *y) { st_i32(y, f_random_run(seed, first)); }
EXPORT iota(i64 *y, i64 n, m_bool *first) { st_i64(y, v_iota() + n), st_bool(first, v_first(n)); }
"""


def source(width: int, exports: list[str]) -> str:
    """Return a translation unit that exports conversions, memory access, reductions and more.

    Args:
        exports: further lines, such as ``UNARY(exp, f32, f32)``.
    """
    lines = [prelude(width, floats8=F8), _EXPORTS, *exports]
    lines += [f"ROUND({d})" for d in ("bf16", "f16", *F8)]
    lines += [f"CONVERT({a}, {b})" for a in VALUES for b in (*VALUES, "i16", "i8", "u8")]
    lines += [f"SELECT({d})" for d in VALUES] + [f"REDUCE({d})" for d in VALUES[:4]]
    lines += [f"MEMORY({d})" for d in MEMORY]
    return "\n".join(lines) + "\n"


class Library:
    """A shared library, called with arrays and integers."""

    def __init__(self, path: Path, width: int) -> None:
        self.width = width
        self.library = ctypes.CDLL(str(path))

    def __call__(self, name: str, *arguments: Array | int) -> None:
        getattr(self.library, name)(
            *(
                ctypes.c_longlong(a) if isinstance(a, int) else ctypes.c_void_p(a.ctypes.data)
                for a in arguments
            )
        )

    def both(self, name: str, dtype: str, out: str, *inputs: Array) -> tuple[Array, Array]:
        """Return the results of the loop over lanes and of the one over scalars."""
        results = []
        for kind in "vs":
            result = np.empty(len(inputs[0]), MEMORY[out])
            self(f"{kind}_{name}_{dtype}", *inputs, result, len(result))
            results.append(result)
        return results[0], results[1]
