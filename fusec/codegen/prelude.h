// The vector vocabulary of generated C++ kernels. Pasted in front of them; includes nothing.
//
// Before it:  #define FUSEC_W 16      lanes of a vector: 16 (AVX-512), 8 (AVX2), 4 (SSE, NEON)
// Compiler:   g++ >= 8 or clang >= 10; -std=c++17 -O2 -march=native -fno-math-errno
//             -fno-trapping-math -ffp-contract=fast -fwrapv -Wno-psabi. Never -ffast-math.
//
// Grammar
//   value  ::= vf32 | vf64 | vi64 | vi32 | vm       FUSEC_W lanes each
//            | float | double | long long | int | bool           the same without lanes
//   memory ::= m_f32 | m_f64 | m_bf16 | m_f16 | m_i64 | m_i32 | m_i16 | m_i8 | m_u8 | m_bool
//   D      ::= f32 | f64 | bf16 | f16 | i64 | i32 | i16 | i8 | u8 | bool
//
//   bf16 and f16 compute as vf32; i16, i8, u8 compute as vi32 (to_i16, to_i8, to_u8 wrap to the
//   range of the type after arithmetic); bool in memory is one byte, 0 or 1, and computes as vm.
//   vf32 and vi32 are native vectors (all operators work, also against a scalar of the same
//   type); vf64 and vi64 are pairs of native vectors with operators; vm is a mask, a struct
//   around vi32 with 0 or -1 in each lane, so that `to_f32(mask)` and `to_f32(int)` differ.
//   gcc turns it into k registers by itself on AVX-512. Comparisons are functions: f_lt(a, b).
//
// Names
//   v_f32(s) ...                broadcast a scalar           v_iota() lane numbers (vi64)
//   ld_D(p)  st_D(p, v)         FUSEC_W neighbours at any alignment
//   ld_D_n(p, n)  st_D_n        the first n of them, 0 <= n <= FUSEC_W; other lanes read 0
//   ldm_D(p, m)   stm_D(p, v, m)           ... only where the mask is set
//   ldg_D(p, s)   stg_D(p, s, v)           lane l at p[l*s];  ldgm_D(p, s, m)  stgm_D(p, s, v, m)
//   ldi_D(p, o)   sti_D(p, o, v)           lane l at p[o[l]];  ldim_D(p, o, m)  stim_D(p, o, v, m)
//   lds_D(p)      sts_D(p, s)              one scalar
//   to_f32 to_f64 to_i64 to_i32 to_bool to_i16 to_i8 to_u8     from every value type
//   round_bf16(f32) round_f16(f32)         to that precision, and back
//   f_<op>                      every operation, overloaded for lanes and for scalars
//   f_hsum f_hprod f_hmax f_hmin f_hany f_hall       across the lanes of one vector, as a tree
#define FUSEC_INLINE static inline __attribute__((always_inline, unused))
#define FUSEC_INLINE_MEMBER inline __attribute__((always_inline))
#define FUSEC_RARE static __attribute__((noinline, unused))
#define FUSEC_VEC(type, lanes) __attribute__((vector_size(sizeof(type) * (lanes)))) type
#define FUSEC_CONVERT __builtin_convertvector
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define FUSEC_X86_BUILTINS 1  // gcc's names; clang takes the portable definitions below
#endif

#define FUSEC_H (FUSEC_W / 2)
typedef FUSEC_VEC(float, FUSEC_W) vf32;
typedef FUSEC_VEC(int, FUSEC_W) vi32;
typedef FUSEC_VEC(unsigned, FUSEC_W) vu32;
typedef FUSEC_VEC(short, FUSEC_W) vi16;
typedef FUSEC_VEC(unsigned short, FUSEC_W) vu16;
typedef FUSEC_VEC(signed char, FUSEC_W) vi8;
typedef FUSEC_VEC(unsigned char, FUSEC_W) vu8;
// Half the lanes: one register of a 64-bit type.
typedef FUSEC_VEC(double, FUSEC_H) hf64;
typedef FUSEC_VEC(long long, FUSEC_H) hi64;
typedef FUSEC_VEC(unsigned long long, FUSEC_H) hu64;
typedef FUSEC_VEC(float, FUSEC_H) hf32;
typedef FUSEC_VEC(int, FUSEC_H) hi32;
// Twice a register: only between a conversion and its split; gcc scalarises compares on them.
typedef FUSEC_VEC(double, FUSEC_W) wf64;
typedef FUSEC_VEC(long long, FUSEC_W) wi64;
typedef FUSEC_VEC(unsigned long long, FUSEC_W) wu64;

typedef float m_f32;
typedef double m_f64;
typedef unsigned short m_bf16, m_f16;
typedef long long m_i64;
typedef int m_i32;
typedef short m_i16;
typedef signed char m_i8;
typedef unsigned char m_u8, m_bool;

#if FUSEC_W == 16
#define FUSEC_LANES(e) e(0), e(1), e(2), e(3), e(4), e(5), e(6), e(7), e(8), e(9), e(10), e(11), \
    e(12), e(13), e(14), e(15)
#define FUSEC_HALF_LANES(e) e(0), e(1), e(2), e(3), e(4), e(5), e(6), e(7)
#elif FUSEC_W == 8
#define FUSEC_LANES(e) e(0), e(1), e(2), e(3), e(4), e(5), e(6), e(7)
#define FUSEC_HALF_LANES(e) e(0), e(1), e(2), e(3)
#else
#define FUSEC_LANES(e) e(0), e(1), e(2), e(3)
#define FUSEC_HALF_LANES(e) e(0), e(1)
#endif
#define FUSEC_SAME(l) l
#define FUSEC_TWICE(l) 2 * (l)
#define FUSEC_UPPER(l) (l) + FUSEC_H

// ---- 64-bit lanes: pairs of registers -----------------------------------------------------------
// The implicit constructor broadcasts, so that `v * 2.0` and `2.0 * v` both work.

struct vm {
  vi32 v;
};
#define FUSEC_PAIR(V, half, scalar)                                                     \
  struct V {                                                                            \
    half a, b;                                                                          \
    V() = default;                                                                      \
    FUSEC_INLINE_MEMBER V(half x, half y) : a(x), b(y) {}                               \
    FUSEC_INLINE_MEMBER V(scalar s) : a(s - half{}), b(a) {}          \
    FUSEC_INLINE_MEMBER scalar operator[](int l) const {              \
      return l < FUSEC_H ? a[l] : b[l - FUSEC_H];                                                   \
    }                                                                                   \
  };                                                                                    \
  FUSEC_PAIR_OP(V, +) FUSEC_PAIR_OP(V, -) FUSEC_PAIR_OP(V, *)                           \
  FUSEC_INLINE V operator-(V x) { return V(-x.a, -x.b); }
#define FUSEC_PAIR_OP(V, op)                                                            \
  FUSEC_INLINE V operator op(V x, V y) { return V(x.a op y.a, x.b op y.b); }            \
  FUSEC_INLINE V &operator op##=(V &x, V y) { return x = x op y; }
FUSEC_PAIR(vf64, hf64, double)
FUSEC_PAIR(vi64, hi64, long long)
FUSEC_PAIR_OP(vf64, /)
FUSEC_PAIR_OP(vi64, &)
FUSEC_PAIR_OP(vi64, |)
FUSEC_PAIR_OP(vi64, ^)
FUSEC_INLINE vi64 operator~(vi64 x) { return vi64(~x.a, ~x.b); }

FUSEC_INLINE vf32 v_f32(float s) { return s - vf32{}; }
FUSEC_INLINE vi32 v_i32(int s) { return s - vi32{}; }
FUSEC_INLINE vf64 v_f64(double s) { return vf64(s); }
FUSEC_INLINE vi64 v_i64(long long s) { return vi64(s); }
FUSEC_INLINE vm v_bool(bool s) { return vm{v_i32(-(int)s)}; }
FUSEC_INLINE vi32 v_iota32() { return vi32{FUSEC_LANES(FUSEC_SAME)}; }
FUSEC_INLINE vi64 v_iota() {
  return vi64(hi64{FUSEC_HALF_LANES(FUSEC_SAME)}, hi64{FUSEC_HALF_LANES(FUSEC_UPPER)});
}
// The first n lanes.
FUSEC_INLINE vm v_first(long long n) { return vm{v_iota32() < (int)n}; }

// The low words of 64-bit lanes, and the splitting of a wide conversion. gcc 12 lowers the
// conversion of a whole register better than that of two halves of it.
FUSEC_INLINE vi32 fusec_narrow(hi64 a, hi64 b) {
#ifdef __clang__
  return __builtin_shufflevector((vi32)a, (vi32)b, FUSEC_LANES(FUSEC_TWICE));
#else
  return __builtin_shuffle((vi32)a, (vi32)b, vi32{FUSEC_LANES(FUSEC_TWICE)});
#endif
}
FUSEC_INLINE vi64 fusec_split(wi64 w) { return vi64(((hi64 *)&w)[0], ((hi64 *)&w)[1]); }
FUSEC_INLINE vf64 fusec_split(wf64 w) { return vf64(((hf64 *)&w)[0], ((hf64 *)&w)[1]); }
FUSEC_INLINE vi64 fusec_widen(vi32 x) { return fusec_split(FUSEC_CONVERT(x, wi64)); }
FUSEC_INLINE wf64 fusec_join(vf64 x) {
  wf64 w;
  ((hf64 *)&w)[0] = x.a, ((hf64 *)&w)[1] = x.b;
  return w;
}
FUSEC_INLINE wi64 fusec_join(vi64 x) {
  wi64 w;
  ((hi64 *)&w)[0] = x.a, ((hi64 *)&w)[1] = x.b;
  return w;
}

// ---- masks, comparisons, selection --------------------------------------------------------------

FUSEC_INLINE vm operator&(vm x, vm y) { return vm{x.v & y.v}; }
FUSEC_INLINE vm operator|(vm x, vm y) { return vm{x.v | y.v}; }
FUSEC_INLINE vm operator^(vm x, vm y) { return vm{x.v ^ y.v}; }
FUSEC_INLINE vm operator~(vm x) { return vm{~x.v}; }
FUSEC_INLINE vm operator!(vm x) { return vm{~x.v}; }
template <class T> FUSEC_INLINE T f_and(T x, T y) { return x & y; }
template <class T> FUSEC_INLINE T f_or(T x, T y) { return x | y; }
template <class T> FUSEC_INLINE T f_xor(T x, T y) { return x ^ y; }
template <class T> FUSEC_INLINE T f_not(T x) { return ~x; }
FUSEC_INLINE bool f_not(bool x) { return !x; }

#define FUSEC_COMPARISON(f, op)                                                         \
  template <class S> FUSEC_INLINE bool f(S x, S y) { return x op y; }                   \
  FUSEC_INLINE vm f(vf32 x, vf32 y) { return vm{x op y}; }                              \
  FUSEC_INLINE vm f(vi32 x, vi32 y) { return vm{x op y}; }                              \
  FUSEC_INLINE vm f(vf64 x, vf64 y) { return vm{fusec_narrow(x.a op y.a, x.b op y.b)}; } \
  FUSEC_INLINE vm f(vi64 x, vi64 y) { return vm{fusec_narrow(x.a op y.a, x.b op y.b)}; } \
  FUSEC_INLINE vm f(vm x, vm y) { return vm{-x.v op - y.v}; }
FUSEC_COMPARISON(f_eq, ==)
FUSEC_COMPARISON(f_ne, !=)
FUSEC_COMPARISON(f_lt, <)
FUSEC_COMPARISON(f_le, <=)
FUSEC_COMPARISON(f_gt, >)
FUSEC_COMPARISON(f_ge, >=)

template <class T> FUSEC_INLINE T f_select(bool c, T x, T y) { return c ? x : y; }
FUSEC_INLINE vf32 f_select(vm c, vf32 x, vf32 y) { return c.v ? x : y; }
FUSEC_INLINE vi32 f_select(vm c, vi32 x, vi32 y) { return c.v ? x : y; }
FUSEC_INLINE vm f_select(vm c, vm x, vm y) { return vm{c.v ? x.v : y.v}; }
FUSEC_INLINE vf64 f_select(vm c, vf64 x, vf64 y) {
  vi64 m = fusec_widen(c.v);
  return vf64(m.a ? x.a : y.a, m.b ? x.b : y.b);
}
FUSEC_INLINE vi64 f_select(vm c, vi64 x, vi64 y) {
  vi64 m = fusec_widen(c.v);
  return vi64(m.a ? x.a : y.a, m.b ? x.b : y.b);
}

// ---- conversions --------------------------------------------------------------------------------
// Float to integer truncates; to_bool is `!= 0`; a mask counts as 0 or 1.

template <class S> FUSEC_INLINE float to_f32(S x) { return (float)x; }
FUSEC_INLINE vf32 to_f32(vf32 x) { return x; }
FUSEC_INLINE vf32 to_f32(vi32 x) { return FUSEC_CONVERT(x, vf32); }
FUSEC_INLINE vf32 to_f32(vf64 x) { return FUSEC_CONVERT(fusec_join(x), vf32); }
FUSEC_INLINE vf32 to_f32(vi64 x) { return FUSEC_CONVERT(fusec_join(x), vf32); }
FUSEC_INLINE vf32 to_f32(vm x) { return (vf32)(x.v & (vi32)v_f32(1)); }

template <class S> FUSEC_INLINE double to_f64(S x) { return (double)x; }
FUSEC_INLINE vf64 to_f64(vf64 x) { return x; }
FUSEC_INLINE vf64 to_f64(vf32 x) { return fusec_split(FUSEC_CONVERT(x, wf64)); }
FUSEC_INLINE vf64 to_f64(vi32 x) { return fusec_split(FUSEC_CONVERT(x, wf64)); }
FUSEC_INLINE vf64 to_f64(vi64 x) {
  return vf64(FUSEC_CONVERT(x.a, hf64), FUSEC_CONVERT(x.b, hf64));
}
FUSEC_INLINE vf64 to_f64(vm x) { return to_f64(-x.v); }

template <class S> FUSEC_INLINE long long to_i64(S x) { return (long long)x; }
FUSEC_INLINE vi64 to_i64(vi64 x) { return x; }
FUSEC_INLINE vi64 to_i64(vi32 x) { return fusec_widen(x); }
FUSEC_INLINE vi64 to_i64(vf32 x) { return fusec_split(FUSEC_CONVERT(x, wi64)); }
FUSEC_INLINE vi64 to_i64(vf64 x) {
  return vi64(FUSEC_CONVERT(x.a, hi64), FUSEC_CONVERT(x.b, hi64));
}
FUSEC_INLINE vi64 to_i64(vm x) { return fusec_widen(-x.v); }

template <class S> FUSEC_INLINE int to_i32(S x) { return (int)x; }
FUSEC_INLINE vi32 to_i32(vi32 x) { return x; }
FUSEC_INLINE vi32 to_i32(vi64 x) { return fusec_narrow(x.a, x.b); }
FUSEC_INLINE vi32 to_i32(vf32 x) { return FUSEC_CONVERT(x, vi32); }
FUSEC_INLINE vi32 to_i32(vf64 x) { return FUSEC_CONVERT(fusec_join(x), vi32); }
FUSEC_INLINE vi32 to_i32(vm x) { return -x.v; }

template <class S> FUSEC_INLINE bool to_bool(S x) { return x != 0; }
FUSEC_INLINE vm to_bool(vm x) { return x; }
FUSEC_INLINE vm to_bool(vf32 x) { return vm{x != 0}; }
FUSEC_INLINE vm to_bool(vi32 x) { return vm{x != 0}; }
FUSEC_INLINE vm to_bool(vf64 x) { return f_ne(x, vf64(0)); }
FUSEC_INLINE vm to_bool(vi64 x) { return f_ne(x, vi64(0)); }

FUSEC_INLINE int fusec_wrap(int x, int unused_bits) {
  return (int)((unsigned)x << unused_bits) >> unused_bits;
}
FUSEC_INLINE vi32 fusec_wrap(vi32 x, int unused_bits) { return x << unused_bits >> unused_bits; }
template <class T> FUSEC_INLINE auto to_i16(T x) { return fusec_wrap(to_i32(x), 16); }
template <class T> FUSEC_INLINE auto to_i8(T x) { return fusec_wrap(to_i32(x), 24); }
template <class T> FUSEC_INLINE auto to_u8(T x) { return to_i32(x) & 255; }

// bfloat16: round to nearest even on the bits; every NaN becomes the quiet one.
FUSEC_INLINE vu32 fusec_bf16_bits(vf32 x) {
  vu32 u = (vu32)x;
  vu32 rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return x != x ? vu32{} + 0x7fc0 : rounded;
}
FUSEC_INLINE vf32 round_bf16(vf32 x) { return (vf32)(fusec_bf16_bits(x) << 16); }

// binary16: by hardware where gcc has it, otherwise on the bits: a multiplication by 2^112 moves
// the exponent and normalises subnormals; the addition of 0.5 rounds to multiples of 2^-24.
FUSEC_INLINE vf32 fusec_f16_value(vu16 h) {
#if FUSEC_X86_BUILTINS && defined(__AVX512F__) && FUSEC_W == 16
  return __builtin_ia32_vcvtph2ps512_mask((vi16)h, vf32{}, -1, 4);
#elif FUSEC_X86_BUILTINS && defined(__F16C__) && FUSEC_W == 8
  return __builtin_ia32_vcvtph2ps256((vi16)h);
#else
  vu32 u = FUSEC_CONVERT(h, vu32), magnitude = (u & 0x7fff) << 13;
  vu32 finite = (vu32)((vf32)magnitude * 0x1p112f);
  return (vf32)((magnitude >= 0x7c00 << 13 ? magnitude | 0x7f800000 : finite) |
                (u & 0x8000) << 16);
#endif
}
FUSEC_INLINE vu16 fusec_f16_bits(vf32 x) {
#if FUSEC_X86_BUILTINS && defined(__AVX512F__) && FUSEC_W == 16
  return (vu16)__builtin_ia32_vcvtps2ph512_mask(x, 0, vi16{}, -1);
#elif FUSEC_X86_BUILTINS && defined(__F16C__) && FUSEC_W == 8
  return (vu16)__builtin_ia32_vcvtps2ph256(x, 0);
#else
  vu32 u = (vu32)x, magnitude = u & 0x7fffffff;
  vu32 normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  vu32 subnormal = (vu32)((vf32)magnitude + 0.5f) - (126u << 23);
  vu32 special = magnitude > 0x7f800000u ? vu32{} + 0x7e00 : vu32{} + 0x7c00;
  vu32 h = magnitude < 113u << 23 ? subnormal : magnitude < 143u << 23 ? normal : special;
  return FUSEC_CONVERT(h | (u >> 16 & 0x8000), vu16);
#endif
}
FUSEC_INLINE vf32 round_f16(vf32 x) { return fusec_f16_value(fusec_f16_bits(x)); }
FUSEC_INLINE float round_bf16(float x) { return round_bf16(v_f32(x))[0]; }
FUSEC_INLINE float round_f16(float x) { return round_f16(v_f32(x))[0]; }

// ---- memory -------------------------------------------------------------------------------------
// Access is by size of the element (raw8 .. raw64), meaning by fusec_decode and fusec_encode.

typedef unsigned char raw8 __attribute__((may_alias));
typedef unsigned short raw16 __attribute__((may_alias));
typedef int raw32 __attribute__((may_alias));
typedef long long raw64 __attribute__((may_alias));
typedef vu8 vu8_any __attribute__((may_alias, aligned(1)));
typedef vu16 vu16_any __attribute__((may_alias, aligned(1)));
typedef vi32 vi32_any __attribute__((may_alias, aligned(1)));
typedef hi64 hi64_any __attribute__((may_alias, aligned(1)));

#define FUSEC_WHOLE(R, raw)                                                             \
  FUSEC_INLINE R fusec_ld(const raw *p) { return *(const R##_any *)p; }                 \
  FUSEC_INLINE void fusec_st(raw *p, R v) { *(R##_any *)p = v; }                        \
  FUSEC_INLINE R fusec_ldg(const raw *p, long long s) {                                 \
    return R{FUSEC_LANES(FUSEC_AT_STRIDE)};                                             \
  }                                                                                     \
  FUSEC_INLINE R fusec_ldi(const raw *p, vi64 o) { return R{FUSEC_LANES(FUSEC_AT_OFFSET)}; }
#define FUSEC_AT_STRIDE(l) p[(l) * s]
#define FUSEC_AT_OFFSET(l) p[o[l]]
FUSEC_WHOLE(vu8, raw8)
FUSEC_WHOLE(vu16, raw16)
FUSEC_WHOLE(vi32, raw32)
FUSEC_INLINE vi64 fusec_ld(const raw64 *p) {
  return vi64(*(const hi64_any *)p, *(const hi64_any *)(p + FUSEC_H));
}
FUSEC_INLINE void fusec_st(raw64 *p, vi64 v) {
  *(hi64_any *)p = v.a, *(hi64_any *)(p + FUSEC_H) = v.b;
}
#define FUSEC_UPPER_STRIDE(l) p[((l) + FUSEC_H) * s]
#define FUSEC_UPPER_OFFSET(l) p[o[(l) + FUSEC_H]]
FUSEC_INLINE vi64 fusec_ldg(const raw64 *p, long long s) {
  return vi64(hi64{FUSEC_HALF_LANES(FUSEC_AT_STRIDE)}, hi64{FUSEC_HALF_LANES(FUSEC_UPPER_STRIDE)});
}
FUSEC_INLINE vi64 fusec_ldi(const raw64 *p, vi64 o) {
  return vi64(hi64{FUSEC_HALF_LANES(FUSEC_AT_OFFSET)}, hi64{FUSEC_HALF_LANES(FUSEC_UPPER_OFFSET)});
}

// Partial access, portable: lane by lane through a small array.
#define FUSEC_PARTIAL(R, raw)                                                           \
  FUSEC_INLINE R fusec_ldn(const raw *p, long long n) {                                 \
    raw t[FUSEC_W] = {};                                                                      \
    for (int l = 0; l < n; l++) t[l] = p[l];                                            \
    return fusec_ld(t);                                                                 \
  }                                                                                     \
  FUSEC_INLINE void fusec_stn(raw *p, R v, long long n) {                               \
    raw t[FUSEC_W];                                                                           \
    fusec_st(t, v);                                                                     \
    for (int l = 0; l < n; l++) p[l] = t[l];                                            \
  }                                                                                     \
  FUSEC_INLINE R fusec_ldm(const raw *p, vm m) { return fusec_ldgm(p, 1, m); }          \
  FUSEC_INLINE void fusec_stm(raw *p, R v, vm m) { fusec_stgm(p, 1, v, m); }
// Strided and indexed access under a mask.
#define FUSEC_SCATTERED(R, raw)                                                         \
  FUSEC_INLINE R fusec_ldgm(const raw *p, long long s, vm m) {                          \
    raw t[FUSEC_W] = {};                                                                      \
    for (int l = 0; l < FUSEC_W; l++)                                                         \
      if (m.v[l]) t[l] = p[l * s];                                                      \
    return fusec_ld(t);                                                                 \
  }                                                                                     \
  FUSEC_INLINE void fusec_stgm(raw *p, long long s, R v, vm m) {                        \
    raw t[FUSEC_W];                                                                           \
    fusec_st(t, v);                                                                     \
    for (int l = 0; l < FUSEC_W; l++)                                                         \
      if (m.v[l]) p[l * s] = t[l];                                                      \
  }                                                                                     \
  FUSEC_INLINE R fusec_ldim(const raw *p, vi64 o, vm m) {                               \
    raw t[FUSEC_W] = {};                                                                      \
    for (int l = 0; l < FUSEC_W; l++)                                                         \
      if (m.v[l]) t[l] = p[o[l]];                                                       \
    return fusec_ld(t);                                                                 \
  }                                                                                     \
  FUSEC_INLINE void fusec_stim(raw *p, vi64 o, R v, vm m) {                             \
    raw t[FUSEC_W];                                                                           \
    fusec_st(t, v);                                                                     \
    for (int l = 0; l < FUSEC_W; l++)                                                         \
      if (m.v[l]) p[o[l]] = t[l];                                                       \
  }                                                                                     \
  FUSEC_INLINE void fusec_stg(raw *p, long long s, R v) {                               \
    raw t[FUSEC_W];                                                                           \
    fusec_st(t, v);                                                                     \
    for (int l = 0; l < FUSEC_W; l++) p[l * s] = t[l];                                        \
  }                                                                                     \
  FUSEC_INLINE void fusec_sti(raw *p, vi64 o, R v) {                                    \
    raw t[FUSEC_W];                                                                           \
    fusec_st(t, v);                                                                     \
    for (int l = 0; l < FUSEC_W; l++) p[o[l]] = t[l];                                         \
  }
FUSEC_SCATTERED(vu8, raw8)
FUSEC_SCATTERED(vu16, raw16)
FUSEC_SCATTERED(vi32, raw32)
FUSEC_SCATTERED(vi64, raw64)
FUSEC_PARTIAL(vu8, raw8)
FUSEC_PARTIAL(vu16, raw16)
FUSEC_PARTIAL(vi32, raw32)
FUSEC_PARTIAL(vi64, raw64)

// Bytes and halves to words, one at a time: gcc scalarises a conversion by a factor of four.
FUSEC_INLINE vu32 fusec_words(vu16 x) { return FUSEC_CONVERT(x, vu32); }
FUSEC_INLINE vu32 fusec_words(vu8 x) { return FUSEC_CONVERT(FUSEC_CONVERT(x, vu16), vu32); }
FUSEC_INLINE vu16 fusec_halves(vu32 x) { return FUSEC_CONVERT(x, vu16); }
FUSEC_INLINE vu8 fusec_bytes(vu32 x) { return FUSEC_CONVERT(FUSEC_CONVERT(x, vu16), vu8); }

FUSEC_INLINE float fusec_bf16_scalar(unsigned short s) {
  unsigned bits = (unsigned)s << 16;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// FUSEC_ACCESS(D, element size, lanes type, scalar type, lanes of raw bits r -> value,
//              value v -> raw bits, scalar in memory s -> value, scalar value v -> memory)
#define FUSEC_ACCESS(D, raw, V, S, decode, encode, decode_scalar, encode_scalar)        \
  FUSEC_INLINE V ld_##D(const m_##D *p) { auto r = fusec_ld((const raw *)p); return decode; } \
  FUSEC_INLINE V ld_##D##_n(const m_##D *p, long long n) {                              \
    auto r = fusec_ldn((const raw *)p, n);                                              \
    return decode;                                                                      \
  }                                                                                     \
  FUSEC_INLINE V ldm_##D(const m_##D *p, vm m) {                                        \
    auto r = fusec_ldm((const raw *)p, m);                                              \
    return decode;                                                                      \
  }                                                                                     \
  FUSEC_INLINE V ldg_##D(const m_##D *p, long long s) {                                 \
    auto r = fusec_ldg((const raw *)p, s);                                              \
    return decode;                                                                      \
  }                                                                                     \
  FUSEC_INLINE V ldgm_##D(const m_##D *p, long long s, vm m) {                          \
    auto r = fusec_ldgm((const raw *)p, s, m);                                          \
    return decode;                                                                      \
  }                                                                                     \
  FUSEC_INLINE V ldi_##D(const m_##D *p, vi64 o) {                                      \
    auto r = fusec_ldi((const raw *)p, o);                                              \
    return decode;                                                                      \
  }                                                                                     \
  FUSEC_INLINE V ldim_##D(const m_##D *p, vi64 o, vm m) {                               \
    auto r = fusec_ldim((const raw *)p, o, m);                                          \
    return decode;                                                                      \
  }                                                                                     \
  FUSEC_INLINE void st_##D(m_##D *p, V v) { fusec_st((raw *)p, encode); }               \
  FUSEC_INLINE void st_##D##_n(m_##D *p, V v, long long n) {                            \
    fusec_stn((raw *)p, encode, n);                                                     \
  }                                                                                     \
  FUSEC_INLINE void stm_##D(m_##D *p, V v, vm m) { fusec_stm((raw *)p, encode, m); }    \
  FUSEC_INLINE void stg_##D(m_##D *p, long long s, V v) { fusec_stg((raw *)p, s, encode); } \
  FUSEC_INLINE void stgm_##D(m_##D *p, long long s, V v, vm m) {                        \
    fusec_stgm((raw *)p, s, encode, m);                                                 \
  }                                                                                     \
  FUSEC_INLINE void sti_##D(m_##D *p, vi64 o, V v) { fusec_sti((raw *)p, o, encode); }  \
  FUSEC_INLINE void stim_##D(m_##D *p, vi64 o, V v, vm m) {                             \
    fusec_stim((raw *)p, o, encode, m);                                                 \
  }                                                                                     \
  FUSEC_INLINE S lds_##D(const m_##D *p) { m_##D s = *p; return decode_scalar; }        \
  FUSEC_INLINE void sts_##D(m_##D *p, S v) { *p = encode_scalar; }

FUSEC_ACCESS(f32, raw32, vf32, float, (vf32)r, (vi32)v, s, v)
FUSEC_ACCESS(f64, raw64, vf64, double, vf64((hf64)r.a, (hf64)r.b), vi64((hi64)v.a, (hi64)v.b),
             s, v)
FUSEC_ACCESS(i64, raw64, vi64, long long, r, v, s, v)
FUSEC_ACCESS(i32, raw32, vi32, int, r, v, s, v)
FUSEC_ACCESS(bf16, raw16, vf32, float, (vf32)(fusec_words(r) << 16),
             fusec_halves(fusec_bf16_bits(v)), fusec_bf16_scalar(s),
             (m_bf16)fusec_bf16_bits(v_f32(v))[0])
FUSEC_ACCESS(f16, raw16, vf32, float, fusec_f16_value(r), fusec_f16_bits(v),
             fusec_f16_value(vu16{} + s)[0], (m_f16)fusec_f16_bits(v_f32(v))[0])
FUSEC_ACCESS(i16, raw16, vi32, int, fusec_wrap((vi32)fusec_words(r), 16), fusec_halves((vu32)v), s,
             (m_i16)v)
FUSEC_ACCESS(i8, raw8, vi32, int, fusec_wrap((vi32)fusec_words(r), 24), fusec_bytes((vu32)v), s,
             (m_i8)v)
FUSEC_ACCESS(u8, raw8, vi32, int, (vi32)fusec_words(r), fusec_bytes((vu32)v), s, (m_u8)v)
FUSEC_ACCESS(bool, raw8, vm, bool, vm{(vi32)fusec_words(r) != 0}, fusec_bytes((vu32)-v.v), s != 0,
             v)

// ---- arithmetic ---------------------------------------------------------------------------------
// FUSEC_PAIRS* lift a template over native vectors and scalars to the paired types.

#define FUSEC_LIFT1(f, g)                                                               \
  FUSEC_INLINE float f(float x) { return g(x); }                                        \
  FUSEC_INLINE double f(double x) { return g(x); }                                      \
  FUSEC_INLINE vf32 f(vf32 x) { return g(x); }                                          \
  FUSEC_INLINE vf64 f(vf64 x) { return vf64(g(x.a), g(x.b)); }
#define FUSEC_LIFT1_INT(f, g)                                                           \
  FUSEC_INLINE int f(int x) { return g(x); }                                            \
  FUSEC_INLINE long long f(long long x) { return g(x); }                                \
  FUSEC_INLINE vi32 f(vi32 x) { return g(x); }                                          \
  FUSEC_INLINE vi64 f(vi64 x) { return vi64(g(x.a), g(x.b)); }
#define FUSEC_LIFT2(f, g)                                                               \
  FUSEC_INLINE float f(float x, float y) { return g(x, y); }                            \
  FUSEC_INLINE double f(double x, double y) { return g(x, y); }                         \
  FUSEC_INLINE vf32 f(vf32 x, vf32 y) { return g(x, y); }                               \
  FUSEC_INLINE vf64 f(vf64 x, vf64 y) { return vf64(g(x.a, y.a), g(x.b, y.b)); }
#define FUSEC_LIFT2_INT(f, g)                                                           \
  FUSEC_INLINE int f(int x, int y) { return g(x, y); }                                  \
  FUSEC_INLINE long long f(long long x, long long y) { return g(x, y); }                \
  FUSEC_INLINE vi32 f(vi32 x, vi32 y) { return g(x, y); }                               \
  FUSEC_INLINE vi64 f(vi64 x, vi64 y) { return vi64(g(x.a, y.a), g(x.b, y.b)); }

// If either is NaN, NaN: the comparison lets a NaN x through, the second line a NaN y.
template <class T> FUSEC_INLINE T fusec_max(T x, T y) {
  T r = x < y ? y : x;
  return y != y ? y : r;
}
template <class T> FUSEC_INLINE T fusec_min(T x, T y) {
  T r = y < x ? y : x;
  return y != y ? y : r;
}
FUSEC_LIFT2(f_maximum, fusec_max)
FUSEC_LIFT2_INT(f_maximum, fusec_max)
FUSEC_LIFT2(f_minimum, fusec_min)
FUSEC_LIFT2_INT(f_minimum, fusec_min)

// A scalar of bits broadcast to the integer vector that goes with x.
FUSEC_INLINE vf32 fusec_and_bits(vf32 x, unsigned m) { return (vf32)((vu32)x & m); }
FUSEC_INLINE hf64 fusec_and_bits(hf64 x, unsigned long long m) { return (hf64)((hu64)x & m); }
FUSEC_INLINE vf32 fusec_sign_of(vf32 x) { return fusec_and_bits(x, 0x80000000u); }
FUSEC_INLINE hf64 fusec_sign_of(hf64 x) { return fusec_and_bits(x, 1ull << 63); }
FUSEC_INLINE vf32 fusec_abs(vf32 x) { return fusec_and_bits(x, 0x7fffffffu); }
FUSEC_INLINE hf64 fusec_abs(hf64 x) { return fusec_and_bits(x, ~(1ull << 63)); }
FUSEC_INLINE float fusec_abs(float x) { return __builtin_fabsf(x); }
FUSEC_INLINE double fusec_abs(double x) { return __builtin_fabs(x); }
FUSEC_LIFT1(f_abs, fusec_abs)
template <class T> FUSEC_INLINE T fusec_int_abs(T x) { return x < 0 ? -x : x; }
FUSEC_LIFT1_INT(f_abs, fusec_int_abs)

// magnitude >= 0 with the sign bits of x.
FUSEC_INLINE vf32 fusec_with_sign(vf32 magnitude, vf32 x) {
  return (vf32)((vi32)magnitude | (vi32)fusec_sign_of(x));
}
FUSEC_INLINE hf64 fusec_with_sign(hf64 magnitude, hf64 x) {
  return (hf64)((hi64)magnitude | (hi64)fusec_sign_of(x));
}

template <class T> FUSEC_INLINE T f_fma(T x, T y, T z) { return x * y + z; }

FUSEC_INLINE float fusec_sqrt(float x) { return __builtin_sqrtf(x); }
FUSEC_INLINE double fusec_sqrt(double x) { return __builtin_sqrt(x); }
#if FUSEC_X86_BUILTINS && FUSEC_W == 16 && defined(__AVX512F__)
FUSEC_INLINE vf32 fusec_sqrt(vf32 x) { return __builtin_ia32_sqrtps512_mask(x, x, -1, 4); }
FUSEC_INLINE hf64 fusec_sqrt(hf64 x) { return __builtin_ia32_sqrtpd512_mask(x, x, -1, 4); }
#elif FUSEC_X86_BUILTINS && FUSEC_W == 8 && defined(__AVX__)
FUSEC_INLINE vf32 fusec_sqrt(vf32 x) { return __builtin_ia32_sqrtps256(x); }
FUSEC_INLINE hf64 fusec_sqrt(hf64 x) { return __builtin_ia32_sqrtpd256(x); }
#elif FUSEC_X86_BUILTINS && FUSEC_W == 4
FUSEC_INLINE vf32 fusec_sqrt(vf32 x) { return __builtin_ia32_sqrtps(x); }
FUSEC_INLINE hf64 fusec_sqrt(hf64 x) { return __builtin_ia32_sqrtpd(x); }
#else
#define FUSEC_SQRT_LANE(l) __builtin_sqrtf(x[l])
#define FUSEC_SQRT_HALF_LANE(l) __builtin_sqrt(x[l])
FUSEC_INLINE vf32 fusec_sqrt(vf32 x) { return vf32{FUSEC_LANES(FUSEC_SQRT_LANE)}; }
FUSEC_INLINE hf64 fusec_sqrt(hf64 x) { return hf64{FUSEC_HALF_LANES(FUSEC_SQRT_HALF_LANE)}; }
#endif
FUSEC_LIFT1(f_sqrt, fusec_sqrt)
template <class T> FUSEC_INLINE T fusec_rsqrt(T x) { return 1 / fusec_sqrt(x); }
FUSEC_LIFT1(f_rsqrt, fusec_rsqrt)
template <class T> FUSEC_INLINE T fusec_reciprocal(T x) { return 1 / x; }
FUSEC_LIFT1(f_reciprocal, fusec_reciprocal)

// ---- exponential and friends, f32 ---------------------------------------------------------------
// Coefficients are minimax fits with float coefficients, made for this file; each comment names
// the fitted function, its interval and the relative error. Range reductions: Cody and Waite,
// Software Manual for the Elementary Functions (1980); Muller, Elementary Functions, ch. 11.

// x = n ln 2 + r, |r| <= ln 2 / 2: the float t carries n in its low bits, by rounding at 1.5 * 2^23.
// n ln2_high is exact: 15 bits of ln 2 times 9 bits of n.
#define FUSEC_ROUNDER 0x1.8p23f
FUSEC_INLINE vf32 fusec_exp_reduce(vf32 x, vf32 &t) {
  t = x * 0x1.715476p0f + FUSEC_ROUNDER;
  vf32 n = t - FUSEC_ROUNDER;
  return x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;
}
// (exp(r) - 1 - r) / r^2 on |r| <= 0.348: 2^-28 of exp(r).
FUSEC_INLINE vf32 fusec_exp_tail(vf32 r) {
  return 0.49999994f + r * (0.16666521f + r * (0.04166829f +
         r * (0.008368704f + r * 0.0013818939f)));
}
// y 2^n, in two factors so that the result may overflow or be subnormal.
FUSEC_INLINE vf32 fusec_scale(vf32 y, vf32 t) {
#if FUSEC_X86_BUILTINS && FUSEC_W == 16 && defined(__AVX512F__)
  return __builtin_ia32_scalefps512_mask(y, t - FUSEC_ROUNDER, y, -1, 4);
#else
  vi32 n = (vi32)t - (vi32)v_f32(FUSEC_ROUNDER), half = n >> 1;
  vf32 s1 = (vf32)((half + 127) << 23), s2 = (vf32)((n - half + 127) << 23);
  return y * s1 * s2;
#endif
}
FUSEC_INLINE vf32 f_exp(vf32 x) {
  x = 89.0f < x ? v_f32(89) : x;
  x = x < -104.0f ? v_f32(-104) : x;
  vf32 t, r = fusec_exp_reduce(x, t);
  return fusec_scale(1 + (r + r * r * fusec_exp_tail(r)), t);
}

// x = m 2^e with m in [sqrt(1/2), sqrt(2)), from the bits; subnormals are scaled first.
FUSEC_INLINE vf32 fusec_log_reduce(vf32 x, vf32 &e) {
  vi32 small = x < 0x1p-126f;
  vi32 bits = (vi32)(small ? x * 0x1p24f : x) - 0x3f3504f3;
  e = FUSEC_CONVERT((bits >> 23) - (small & 24), vf32);
  return (vf32)((bits & 0x7fffff) + 0x3f3504f3);
}
// (log1p(f) - f + f^2 / 2) / f^3 on [sqrt(1/2) - 1, sqrt(2) - 1]: 2^-30 of log1p(f).
FUSEC_INLINE vf32 fusec_log_tail(vf32 f) {
  return 0.33333313f + f * (-0.2500001f + f * (0.20002072f + f * (-0.16667989f +
         f * (0.1422036f + f * (-0.124062404f + f * (0.11883538f +
         f * (-0.11670016f + f * 0.06749175f)))))));
}
// Zero, negative, infinite, NaN arguments of a logarithm.
FUSEC_INLINE vf32 fusec_log_special(vf32 x, vf32 y) {
  y = x < __builtin_inff() ? y : x;
  y = x < 0 ? v_f32(__builtin_nanf("")) : y;
  return x == 0 ? v_f32(-__builtin_inff()) : y;
}
FUSEC_INLINE vf32 f_log(vf32 x) {
  vf32 e, f = fusec_log_reduce(x, e) - 1;
  vf32 tail = f * f * (f * fusec_log_tail(f) - 0.5f) + e * 0x1.7f7d1cp-20f;
  return fusec_log_special(x, e * 0x1.62e4p-1f + (f + tail));
}

FUSEC_INLINE vf32 f_sigmoid(vf32 x) { return 1 / (1 + f_exp(-x)); }

// Below 0.625 x + x^3 p(x^2), p fits (tanh(x) - x) / x^3 to 2^-27.6; above, 1 - 2 / (e^2x + 1).
FUSEC_INLINE vf32 f_tanh(vf32 x) {
  vf32 a = fusec_abs(x), s = x * x;
  vf32 low = x + x * s * (-0.33333278f + s * (0.13331322f + s * (-0.053729363f +
             s * (0.020604275f + s * -0.005665036f))));
  vf32 high = 1 - 2 / (f_exp(a + a) + 1);
  return a < 0.625f ? low : fusec_with_sign(high, x);
}

// Below 0.75 x + x p(x^2), p fits erf(x) / x - 1 to 2^-29; above, 1 - exp(-q(x)), q fits
// -log(erfc(x)) on [0.75, 4] to 2^-28 of erf; from 4 on the result is exactly 1.
FUSEC_INLINE vf32 f_erf(vf32 x) {
  vf32 a = fusec_abs(x), s = x * x;
  vf32 low = x + x * (0.12837917f + s * (-0.3761262f + s * (0.11283379f +
             s * (-0.026834335f + s * (0.005113157f + s * -0.0006737584f)))));
  a = 4.0f < a ? v_f32(4) : a;
  vf32 q = 2.1405562e-05f + a * (1.1284335f + a * (0.6358418f + a * (0.10516453f +
           a * (-0.022848235f + a * (0.0032057348f + a * -0.00021316553f)))));
  vf32 t, r = fusec_exp_reduce(-q, t);
  vf32 high = 1 - fusec_scale(1 + (r + r * r * fusec_exp_tail(r)), t);
  return a < 0.75f ? low : fusec_with_sign(high, x);
}

// ---- functions left to libm, lane by lane -------------------------------------------------------

#define FUSEC_LIBM_SCALAR(name)                                                         \
  FUSEC_INLINE float f_##name(float x) { return __builtin_##name##f(x); }               \
  FUSEC_INLINE double f_##name(double x) { return __builtin_##name(x); }
#define FUSEC_LIBM_F64(name)                                                            \
  FUSEC_RARE vf64 f_##name(vf64 x) {                                                    \
    for (int l = 0; l < FUSEC_H; l++)                                                   \
      x.a[l] = __builtin_##name(x.a[l]), x.b[l] = __builtin_##name(x.b[l]);             \
    return x;                                                                           \
  }
#define FUSEC_LIBM_F32(name)                                                            \
  FUSEC_RARE vf32 f_##name(vf32 x) {                                                    \
    for (int l = 0; l < FUSEC_W; l++) x[l] = __builtin_##name##f(x[l]);                 \
    return x;                                                                           \
  }
#define FUSEC_LIBM(name) FUSEC_LIBM_SCALAR(name) FUSEC_LIBM_F64(name)
FUSEC_LIBM(exp)
FUSEC_LIBM(log)
FUSEC_LIBM(erf)
FUSEC_LIBM(tanh)
template <class T> FUSEC_INLINE T fusec_logistic(T x) { return 1 / (1 + f_exp(-x)); }
FUSEC_INLINE float f_sigmoid(float x) { return fusec_logistic(x); }
FUSEC_INLINE double f_sigmoid(double x) { return fusec_logistic(x); }
FUSEC_INLINE vf64 f_sigmoid(vf64 x) { return 1.0 / (1.0 + f_exp(-x)); }

// ---- across lanes -------------------------------------------------------------------------------
// Halves fold onto each other until one lane is left.

struct fusec_sum {
  template <class T> static FUSEC_INLINE_MEMBER T of(T x, T y) { return x + y; }
};
struct fusec_prod {
  template <class T> static FUSEC_INLINE_MEMBER T of(T x, T y) { return x * y; }
};
struct fusec_largest {
  template <class T> static FUSEC_INLINE_MEMBER T of(T x, T y) { return fusec_max(x, y); }
};
struct fusec_smallest {
  template <class T> static FUSEC_INLINE_MEMBER T of(T x, T y) { return fusec_min(x, y); }
};
template <class Op, class T, int lanes> struct fusec_tree {
  typedef T half __attribute__((vector_size(sizeof(T) * lanes / 2)));
  template <class V> static FUSEC_INLINE_MEMBER T of(V v) {
    return fusec_tree<Op, T, lanes / 2>::of(Op::of(((half *)&v)[0], ((half *)&v)[1]));
  }
};
template <class Op, class T> struct fusec_tree<Op, T, 2> {
  template <class V> static FUSEC_INLINE_MEMBER T of(V v) { return Op::of(v[0], v[1]); }
};
#define FUSEC_REDUCTION(f, Op)                                                          \
  FUSEC_INLINE float f(vf32 x) { return fusec_tree<Op, float, FUSEC_W>::of(x); }        \
  FUSEC_INLINE int f(vi32 x) { return fusec_tree<Op, int, FUSEC_W>::of(x); }            \
  FUSEC_INLINE double f(vf64 x) {                                                       \
    return fusec_tree<Op, double, FUSEC_H>::of(Op::of(x.a, x.b));                       \
  }                                                                                     \
  FUSEC_INLINE long long f(vi64 x) {                                                    \
    return fusec_tree<Op, long long, FUSEC_H>::of(Op::of(x.a, x.b));                    \
  }
FUSEC_REDUCTION(f_hsum, fusec_sum)
FUSEC_REDUCTION(f_hprod, fusec_prod)
FUSEC_REDUCTION(f_hmax, fusec_largest)
FUSEC_REDUCTION(f_hmin, fusec_smallest)
// A set lane is -1, so the smallest lane tells whether any is set.
FUSEC_INLINE bool f_hany(vm x) { return f_hmin(x.v) != 0; }
FUSEC_INLINE bool f_hall(vm x) { return f_hmax(x.v) != 0; }
