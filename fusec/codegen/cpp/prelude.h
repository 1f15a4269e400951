// Vector types and functions for generated C++ kernels. Printed before them; includes nothing.
//
// Before it:  #define FUSEC_W 16      lanes of a vector: 16 (AVX-512), 8 (AVX2), 4 (SSE, NEON)
// Compiler:   g++ or clang (tested: g++ 11 and 12, clang 14); the flags of runtime/kernels/cpp_kernel.py.
//             Never -ffast-math: it breaks rounding by addition and NaN propagation.
// Unused functions are not excluded: they cost a few hundredths of a second in all.
//
// Grammar
//   value  ::= vf32 | vf64 | vi64 | vi32 | vm                   FUSEC_W lanes each
//            | float | double | long long | int | bool          the same without lanes
//   memory ::= m_f32 | m_f64 | m_bf16 | m_f16 | m_i64 | m_i32 | m_i16 | m_i8 | m_u8 | m_f4e2m1fn_x2 | m_bool
//   D      ::= f32 | f64 | bf16 | f16 | i64 | i32 | i16 | i8 | u8 | bool
//
//   bf16 and f16 compute as vf32; i16, i8, u8 compute as vi32 (to_i16, to_i8, to_u8 wrap to the
//   range of the type after arithmetic); bool in memory is one byte, 0 or 1, and computes as vm.
//   vf32 and vi32 are native vectors (all operators work, also against a scalar of the same
//   type); vf64 and vi64 are pairs of native vectors with operators; vm is a mask, a struct
//   around vi32 with 0 or -1 in each lane, so that `to_f32(mask)` and `to_f32(int)` differ. gcc
//   makes k registers of it on AVX-512. Comparisons are functions: f_lt(a, b). No function takes
//   a vector and a scalar: broadcast first.
//
// Names
//   v_f32(s) v_f64 v_i64 v_i32 v_bool      broadcast a scalar
//   v_iota() v_iota32() v_first(n)         lane numbers, as vi64 or vi32; the mask of lanes below n
//   ld_D(p)       st_D(p, v)               FUSEC_W adjacent elements at any alignment
//   ldm_D(p, m)   stm_D(p, v, m)           those where the mask is set; others read 0
//   ldg_D(p, s)   stg_D(p, s, v)           lane l at p[l * s];  ldgm_D(p, s, m)  stgm_D(p, s, v, m)
//   ldp_D<k>(p)   stp_D(p, v, w)           lane l at p[2 * l + k], of k = 0 and 1 for stores, from memory
//                                          that has all pairs;  ldpm_D<k>(p, m)  stpm_D(p, v, w, m)
//   ldi_D(p, o)   sti_D(p, o, v)           lane l at p[o[l]];   ldim_D(p, o, m)  stim_D(p, o, v, m)
//   called_ldim_D, called_floordiv, called_remainder    not inlined, for kernels with many of them
//   ldt_D(t, p, s, n)                      t[k * FUSEC_W + l] = p[l * s + k] for all l and k < n,
//   ldtm_D(t, p, s, n, m)                  n <= FUSEC_W: a block, transposed; 0 where the mask is not set;
//                                          t has FUSEC_W * FUSEC_W elements, the rest is undefined
//   lds_D(p)      sts_D(p, s)              one scalar
//   to_f32 to_f64 to_i64 to_i32 to_bool to_i16 to_i8 to_u8      from a value of any type
//   round_bf16(f32) round_f16(f32)         to that precision, and back
//   f_select(m, x, y)                      m a mask or a bool
//   f_<op>                                 every operation, for lanes and for scalars
//   f_<op>_<form>(f32)                     rounded, for results of 16 bits; flushed, 0 for subnormals
//   f_hsum f_hprod f_hmax f_hmin (numbers), f_hany f_hall (masks)      across lanes, as a tree
//
// Largest errors seen in f32 lanes, in ulp (10^7 samples each, with and without FMA): exp 1.0,
// exp2 1.0, expm1 1.6, log 0.9, log2 1.4, log10 1.9, log1p 0.9, erf 1.9, tanh 1.4, sigmoid 2.4 (it
// is 0 where exp(-x) overflows), sin and cos 1.6 at any argument, tan 3.4, pow, hypot and atan2
// 0.6, rsqrt 1.5.
// Functions of double, and rare functions, are libm's, lane by lane.

#define FUSEC_INLINE static inline __attribute__((always_inline, unused))
#define FUSEC_INLINE_MEMBER inline __attribute__((always_inline))
#define FUSEC_RARE static __attribute__((noinline, unused))
#define FUSEC_VEC(type, lanes) __attribute__((vector_size(sizeof(type) * (lanes)))) type
#define FUSEC_CONVERT __builtin_convertvector

#define FUSEC_H (FUSEC_W / 2)
typedef FUSEC_VEC(float, FUSEC_W) vf32;
typedef FUSEC_VEC(int, FUSEC_W) vi32;
typedef FUSEC_VEC(unsigned, FUSEC_W) vu32;
typedef FUSEC_VEC(short, FUSEC_W) vi16;
typedef FUSEC_VEC(unsigned short, FUSEC_W) vu16;
typedef FUSEC_VEC(unsigned char, FUSEC_W) vu8;
// Half the lanes: one register of a 64-bit type.
typedef FUSEC_VEC(double, FUSEC_H) hf64;
typedef FUSEC_VEC(long long, FUSEC_H) hi64;
typedef FUSEC_VEC(unsigned long long, FUSEC_H) hu64;
// Twice a register: only between a conversion and its split; gcc scalarises compares on them.
typedef FUSEC_VEC(double, FUSEC_W) wf64;
typedef FUSEC_VEC(long long, FUSEC_W) wi64;

typedef float m_f32;
typedef double m_f64;
typedef unsigned short m_bf16, m_f16;
typedef long long m_i64;
typedef int m_i32;
typedef short m_i16;
typedef signed char m_i8;
typedef unsigned char m_u8, m_f4e2m1fn_x2, m_bool;

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
#ifdef __clang__
#define FUSEC_SHUFFLE(x, y, index, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define FUSEC_SHUFFLE(x, y, index, ...) __builtin_shuffle(x, y, index{__VA_ARGS__})
#endif

// ---- instructions that gcc's vector extensions do not express -----------------------------------
// gcc's builtins for one register; macros left undefined have a portable definition further down.
// min and max give their second operand if either is NaN.
// Rounding: 8 nearest, 9 down, 10 up, 11 to 0.

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#if FUSEC_W == 16 && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define FUSEC_AVX512 1
#define FUSEC_SQRT_F32(x) __builtin_ia32_sqrtps512_mask(x, x, -1, 4)
#define FUSEC_SQRT_F64(x) __builtin_ia32_sqrtpd512_mask(x, x, -1, 4)
#define FUSEC_ROUND_F32(x, how) __builtin_ia32_rndscaleps_mask(x, how, x, -1, 4)
#define FUSEC_ROUND_F64(x, how) __builtin_ia32_rndscalepd_mask(x, how, x, -1, 4)
#define FUSEC_MIN_F32(x, y) __builtin_ia32_minps512_mask(x, y, x, -1, 4)
#define FUSEC_MAX_F32(x, y) __builtin_ia32_maxps512_mask(x, y, x, -1, 4)
#define FUSEC_SCALE_F32(x, n) __builtin_ia32_scalefps512_mask(x, n, x, -1, 4)
#define FUSEC_FROM_F16(h) __builtin_ia32_vcvtph2ps512_mask(h, vf32{}, -1, 4)
#define FUSEC_TO_F16(x) __builtin_ia32_vcvtps2ph512_mask(x, 0, vi16{}, -1)
#define FUSEC_WORDS_OF_HALVES(h) __builtin_ia32_pmovzxwd512_mask(h, vi32{}, -1)
#define FUSEC_HALVES_OF_WORDS(x) __builtin_ia32_pmovdw512_mask(x, vi16{}, -1)
#define FUSEC_WORDS_OF_BYTES(b) __builtin_ia32_pmovzxbd512_mask((c8x16)b, vi32{}, -1)
#define FUSEC_BYTES_OF_WORDS(x) __builtin_ia32_pmovdb512_mask(x, c8x16{}, -1)
#define FUSEC_WORDS_OF_SIGNED(b) __builtin_ia32_pmovsxbd512_mask((c8x16)b, vi32{}, -1)
#define FUSEC_EVEN_PRODUCTS(x, y) __builtin_ia32_pmuludq512_mask(x, y, hi64{}, -1)
#define FUSEC_MASK_BITS(m) __builtin_ia32_cvtd2mask512(m)
typedef char c8x16 __attribute__((vector_size(16)));
#elif FUSEC_W == 8 && defined(__AVX2__)
#define FUSEC_AVX2 1
#define FUSEC_SQRT_F32(x) __builtin_ia32_sqrtps256(x)
#define FUSEC_SQRT_F64(x) __builtin_ia32_sqrtpd256(x)
#define FUSEC_ROUND_F32(x, how) __builtin_ia32_roundps256(x, how)
#define FUSEC_ROUND_F64(x, how) __builtin_ia32_roundpd256(x, how)
#define FUSEC_MIN_F32(x, y) __builtin_ia32_minps256(x, y)
#define FUSEC_MAX_F32(x, y) __builtin_ia32_maxps256(x, y)
#ifdef __F16C__
#define FUSEC_FROM_F16(h) __builtin_ia32_vcvtph2ps256(h)
#define FUSEC_TO_F16(x) __builtin_ia32_vcvtps2ph256(x, 0)
#endif
#define FUSEC_WORDS_OF_HALVES(h) __builtin_ia32_pmovzxwd256(h)
#define FUSEC_WORDS_OF_BYTES(b) __builtin_ia32_pmovzxbd256(fusec_lower(b))
#define FUSEC_WORDS_OF_SIGNED(b) __builtin_ia32_pmovsxbd256(fusec_lower(b))
typedef char c8x16 __attribute__((vector_size(16)));
FUSEC_INLINE c8x16 fusec_lower(vu8 b) {
  typedef long long two __attribute__((vector_size(16)));
  return (c8x16)two{(long long)b, 0};
}
#define FUSEC_EVEN_PRODUCTS(x, y) __builtin_ia32_pmuludq256(x, y)
#define FUSEC_MASK_BITS(m) __builtin_ia32_movmskps256((vf32)(m))
#elif FUSEC_W == 4
#define FUSEC_SQRT_F32(x) __builtin_ia32_sqrtps(x)
#define FUSEC_SQRT_F64(x) __builtin_ia32_sqrtpd(x)
#ifdef __SSE4_1__
#define FUSEC_ROUND_F32(x, how) __builtin_ia32_roundps(x, how)
#define FUSEC_ROUND_F64(x, how) __builtin_ia32_roundpd(x, how)
#endif
#define FUSEC_MIN_F32(x, y) __builtin_ia32_minps(x, y)
#define FUSEC_MAX_F32(x, y) __builtin_ia32_maxps(x, y)
#define FUSEC_EVEN_PRODUCTS(x, y) __builtin_ia32_pmuludq128(x, y)
#define FUSEC_MASK_BITS(m) __builtin_ia32_movmskps((vf32)(m))
#endif
#endif

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
    FUSEC_INLINE_MEMBER V(scalar s) : a(s - half{}), b(a) {}                            \
    FUSEC_INLINE_MEMBER scalar operator[](int l) const {                                \
      return l < FUSEC_H ? a[l] : b[l - FUSEC_H];                                       \
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
FUSEC_INLINE vm v_first(long long n) {
  return vm{v_iota32() < (n < FUSEC_W ? (int)n : FUSEC_W)};
}

// The low words of 64-bit lanes, and the splitting of a wide conversion. gcc 12 lowers the
// conversion of a whole register better than that of two halves of it.
FUSEC_INLINE vi32 fusec_narrow(hi64 a, hi64 b) {
  return FUSEC_SHUFFLE((vi32)a, (vi32)b, vi32, FUSEC_LANES(FUSEC_TWICE));
}
FUSEC_INLINE vi64 fusec_split(wi64 w) { return vi64(((hi64 *)&w)[0], ((hi64 *)&w)[1]); }
FUSEC_INLINE vf64 fusec_split(wf64 w) { return vf64(((hf64 *)&w)[0], ((hf64 *)&w)[1]); }
FUSEC_INLINE vi64 fusec_widen(vi32 x) { return fusec_split(FUSEC_CONVERT(x, wi64)); }
template <class W, class V> FUSEC_INLINE W fusec_join(V x) {
  W w;
  __builtin_memcpy(&w, &x, sizeof w);
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
#define f_hits f_eq
#define f_until f_le
#define f_member(s, b, e) f_and(f_le(b, s), f_lt(s, e))
FUSEC_COMPARISON(f_ne, !=)
FUSEC_COMPARISON(f_lt, <)
FUSEC_COMPARISON(f_le, <=)
FUSEC_COMPARISON(f_gt, >)
FUSEC_COMPARISON(f_ge, >=)

template <class T> FUSEC_INLINE T f_select(bool c, T x, T y) { return c ? x : y; }
FUSEC_INLINE vf32 f_select(vm c, vf32 x, vf32 y) { return c.v ? x : y; }
FUSEC_INLINE vi32 f_select(vm c, vi32 x, vi32 y) { return c.v ? x : y; }
FUSEC_INLINE vm f_select(vm c, vm x, vm y) { return vm{c.v ? x.v : y.v}; }
template <class Pair> FUSEC_INLINE Pair f_select(vm c, Pair x, Pair y) {
  vi64 m = fusec_widen(c.v);
  return Pair(m.a ? x.a : y.a, m.b ? x.b : y.b);
}

// ---- conversions --------------------------------------------------------------------------------
// Float to integer truncates; to_bool is `!= 0`; a mask counts as 0 or 1.

template <class S> FUSEC_INLINE float to_f32(S x) { return (float)x; }
FUSEC_INLINE vf32 to_f32(vf32 x) { return x; }
FUSEC_INLINE vf32 to_f32(vi32 x) { return FUSEC_CONVERT(x, vf32); }
FUSEC_INLINE vf32 to_f32(vf64 x) { return FUSEC_CONVERT(fusec_join<wf64>(x), vf32); }
FUSEC_INLINE vf32 to_f32(vi64 x) { return FUSEC_CONVERT(fusec_join<wi64>(x), vf32); }
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
FUSEC_INLINE vi32 to_i32(vf64 x) { return FUSEC_CONVERT(fusec_join<wf64>(x), vi32); }
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

// bfloat16: round to nearest even on the bits; every NaN becomes a quiet one.
FUSEC_INLINE vu32 fusec_bf16_bits(vf32 x) {
  vu32 u = (vu32)x;
  vu32 rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return x != x ? vu32{} + 0x7fc0 : rounded;
}
// The float of 4 bits (two of exponent, one of mantissa) in the low bits; 0.5 is subnormal.
FUSEC_INLINE vf32 f_e2m1(vi32 code) {
  vi32 size = code & 7, bits = size == 1 ? vi32{} + 0x3f000000 : (size << 22) + 0x3f000000;
  return (vf32)((size == 0 ? vi32{} : bits) | (code & 8) << 28);
}
FUSEC_INLINE float f_e2m1(int code) { return f_e2m1(vi32{} + code)[0]; }
// Bits of x, which is less than 2^23, less `zero`. As the last bits of a float they count as whole
// numbers with one exponent: a mask leaves both, where all exponents' bits are set. Fields of one x
// share these; each takes a mask and a subtraction.
template <int mask, int zero> FUSEC_INLINE vf32 f_field(vi32 x) {
  constexpr int ones = 23 - __builtin_ctz(mask);
  return (vf32)((x + 0x7f800000) & (mask | (127 + ones) << 23)) - (float)((1 << ones) + zero);
}
template <int mask, int zero> FUSEC_INLINE float f_field(int x) {
  return (x & mask) / (mask & -mask) - zero;
}
FUSEC_INLINE vf32 round_bf16(vf32 x) {
  vu32 u = (vu32)x;
  return x != x ? x : (vf32)((u + 0x7fff + (u >> 16 & 1)) & 0xffff0000);
}
FUSEC_INLINE m_bf16 fusec_bf16_bits(float x) {
  unsigned u;
  __builtin_memcpy(&u, &x, 4);
  return x != x ? 0x7fc0 : (m_bf16)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
FUSEC_INLINE float fusec_bf16_value(m_bf16 h) {
  unsigned u = (unsigned)h << 16;
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}
FUSEC_INLINE float round_bf16(float x) { return fusec_bf16_value(fusec_bf16_bits(x)); }

// binary16: by hardware where gcc has it, otherwise on the bits: a multiplication by 2^112 moves
// the exponent and normalises subnormals; the addition of 0.5 rounds to multiples of 2^-24.
FUSEC_INLINE vf32 fusec_f16_value(vu16 h) {
#ifdef FUSEC_FROM_F16
  return FUSEC_FROM_F16((vi16)h);
#else
  vu32 u = FUSEC_CONVERT(h, vu32), magnitude = (u & 0x7fff) << 13;
  vu32 finite = (vu32)((vf32)magnitude * 0x1p112f);
  return (vf32)((magnitude >= 0x7c00 << 13 ? magnitude | 0x7f800000 : finite) |
                (u & 0x8000) << 16);
#endif
}
FUSEC_INLINE vu16 fusec_f16_bits(vf32 x) {
#ifdef FUSEC_TO_F16
  return (vu16)FUSEC_TO_F16(x);
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
FUSEC_INLINE float round_f16(float x) { return round_f16(v_f32(x))[0]; }

// ---- across lanes -------------------------------------------------------------------------------
// The two halves of a vector are combined until one lane is left.

// NaN if either operand is NaN: the comparison keeps a NaN x, the second line returns a NaN y.
template <class T> FUSEC_INLINE T fusec_max(T x, T y) {
  T r = x < y ? y : x;
  return y != y ? y : r;
}
template <class T> FUSEC_INLINE T fusec_min(T x, T y) {
  T r = y < x ? y : x;
  return y != y ? y : r;
}
#ifdef FUSEC_MAX_F32
FUSEC_INLINE vf32 fusec_max(vf32 x, vf32 y) { return y != y ? y : FUSEC_MAX_F32(y, x); }
FUSEC_INLINE vf32 fusec_min(vf32 x, vf32 y) { return y != y ? y : FUSEC_MIN_F32(y, x); }
#endif

template <class T> FUSEC_INLINE T fusec_sum(T x, T y) { return x + y; }
template <class T> FUSEC_INLINE T fusec_product(T x, T y) { return x * y; }
#define FUSEC_REDUCTION(f, of)                                                          \
  template <class T, int lanes, class V> FUSEC_INLINE T fusec_tree_##f(V v) {           \
    typedef T half __attribute__((vector_size(sizeof(T) * lanes / 2), may_alias));      \
    if constexpr (lanes == 2) return of((T)v[0], (T)v[1]);                              \
    else return fusec_tree_##f<T, lanes / 2>(of(((half *)&v)[0], ((half *)&v)[1]));     \
  }                                                                                     \
  FUSEC_INLINE float f(vf32 x) { return fusec_tree_##f<float, FUSEC_W>(x); }            \
  FUSEC_INLINE int f(vi32 x) { return fusec_tree_##f<int, FUSEC_W>(x); }                \
  FUSEC_INLINE double f(vf64 x) { return fusec_tree_##f<double, FUSEC_H>(of(x.a, x.b)); } \
  FUSEC_INLINE long long f(vi64 x) {                                                    \
    return fusec_tree_##f<long long, FUSEC_H>(of(x.a, x.b));                            \
  }
FUSEC_REDUCTION(f_hsum, fusec_sum)
FUSEC_REDUCTION(f_hprod, fusec_product)
FUSEC_REDUCTION(f_hmax, fusec_max)
FUSEC_REDUCTION(f_hmin, fusec_min)
#ifdef FUSEC_MASK_BITS
FUSEC_INLINE bool f_hany(vm x) { return FUSEC_MASK_BITS(x.v) != 0; }
FUSEC_INLINE bool f_hall(vm x) { return FUSEC_MASK_BITS(~x.v) == 0; }
#else  // a set lane is -1
FUSEC_INLINE bool f_hany(vm x) { return f_hmin(x.v) != 0; }
FUSEC_INLINE bool f_hall(vm x) { return f_hmax(x.v) != 0; }
#endif
// Each lane combined with all before it, and with the last one of ``start``: the second of two with the
// first, then the second two of four with the last of the first two, ... An extreme that no lane exceeds
// stays.
// All are templates, so that a unit without scans instantiates none.
#define FUSEC_LATER(l) (l) & step ? FUSEC_W + (l) / step * step - 1 : (l)
#define FUSEC_LATER_HALF(l) (l) & step ? FUSEC_H + (l) / step * step - 1 : (l)
template <int lanes, int step, class V> FUSEC_INLINE V fusec_later(V v, V none) {
  if constexpr (lanes == FUSEC_W) return FUSEC_SHUFFLE(none, v, vi32, FUSEC_LANES(FUSEC_LATER));
  else return FUSEC_SHUFFLE(none, v, hi64, FUSEC_HALF_LANES(FUSEC_LATER_HALF));
}
template <class T> constexpr T fusec_limit(int sign) {
  if constexpr ((T)0.5 != 0) return sign * __builtin_inff();
  else return sign < 0 ? (T)(1ULL << (8 * sizeof(T) - 1)) : ~(T)(1ULL << (8 * sizeof(T) - 1));
}
template <class T> constexpr bool fusec_is_pair = false;
template <> constexpr bool fusec_is_pair<vf64> = true;
template <> constexpr bool fusec_is_pair<vi64> = true;
template <class V> FUSEC_INLINE V fusec_last(V x) {
  if constexpr (fusec_is_pair<V>) return V(x.b[FUSEC_H - 1]);
  else return x[FUSEC_W - 1] - V{};
}
#define FUSEC_SCAN(f, of, none, stays)                                                  \
  template <int lanes, int step, class V> FUSEC_INLINE V fusec_steps_##f(V v) {         \
    typedef decltype(v[0] + v[0]) T;                                                    \
    if constexpr (step >= lanes) return v;                                              \
    else return fusec_steps_##f<lanes, step * 2>(of(fusec_later<lanes, step>(v, none - V{}), v)); \
  }                                                                                     \
  template <class V> FUSEC_INLINE V f(V x, V start) {                                   \
    V last = fusec_last(start);                                                         \
    if (stays) return last;                                                             \
    if constexpr (fusec_is_pair<V>) {                                                   \
      x.a = fusec_steps_##f<FUSEC_H, 1>(x.a);                                           \
      x.b = of(x.a[FUSEC_H - 1] - decltype(x.a){}, fusec_steps_##f<FUSEC_H, 1>(x.b));   \
      return V(of(last.a, x.a), of(last.b, x.b));                                       \
    } else return of(last, fusec_steps_##f<FUSEC_W, 1>(x));                             \
  }
FUSEC_SCAN(f_scansum, fusec_sum, (T)0, false)
FUSEC_SCAN(f_scanprod, fusec_product, (T)1, false)
FUSEC_SCAN(f_scanmax, fusec_max, fusec_limit<T>(-1), f_hall(f_le(x, last)))
FUSEC_SCAN(f_scanmin, fusec_min, fusec_limit<T>(1), f_hall(f_ge(x, last)))
// ---- memory -------------------------------------------------------------------------------------
// Raw bits are loaded and stored by element size, raw8 to raw64; FUSEC_ACCESS decodes and encodes.

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
  template <class At> FUSEC_INLINE R fusec_ld(const raw *p, At o) {                     \
    return R{FUSEC_LANES(FUSEC_AT_OFFSET)};                                             \
  }
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
#define FUSEC_UPPER_OFFSET(l) p[o[(l) + FUSEC_H]]
template <class At> FUSEC_INLINE vi64 fusec_ld(const raw64 *p, At o) {
  return vi64(hi64{FUSEC_HALF_LANES(FUSEC_AT_OFFSET)}, hi64{FUSEC_HALF_LANES(FUSEC_UPPER_OFFSET)});
}

// Strided and indexed stores, and access under a mask that is not all set, go lane by lane through
// a small array. ``o`` has the offset of each lane: a vector, or the multiples of a stride.
struct fusec_stride {
  long long s;
  FUSEC_INLINE_MEMBER long long operator[](int l) const { return l * s; }
};
#define FUSEC_SCATTERED(R, raw)                                                         \
  template <class At> FUSEC_RARE R fusec_ld_some(const raw *p, At o, vm m) {            \
    raw t[FUSEC_W] = {};                                                                \
    for (int l = 0; l < FUSEC_W; l++)                                                   \
      if (m.v[l]) t[l] = p[o[l]];                                                       \
    return fusec_ld(t);                                                                 \
  }                                                                                     \
  template <class At> FUSEC_RARE void fusec_st_some(raw *p, At o, R v, vm m) {          \
    raw t[FUSEC_W];                                                                     \
    fusec_st(t, v);                                                                     \
    for (int l = 0; l < FUSEC_W; l++)                                                   \
      if (m.v[l]) p[o[l]] = t[l];                                                       \
  }                                                                                     \
  template <class At> FUSEC_INLINE R fusec_ldm(const raw *p, At o, vm m) {              \
    return f_hall(m) ? fusec_ld(p, o) : fusec_ld_some(p, o, m);                         \
  }                                                                                     \
  template <class At> FUSEC_INLINE void fusec_st(raw *p, At o, R v) {                   \
    raw t[FUSEC_W];                                                                     \
    fusec_st(t, v);                                                                     \
    for (int l = 0; l < FUSEC_W; l++) p[o[l]] = t[l];                                   \
  }
FUSEC_SCATTERED(vu8, raw8)
FUSEC_SCATTERED(vu16, raw16)
FUSEC_SCATTERED(vi32, raw32)
FUSEC_SCATTERED(vi64, raw64)

// A stride; of -1, elements are adjacent, from the last one to the first.
#define FUSEC_FROM_END(l) FUSEC_W - 1 - (l)
#define FUSEC_HALF_FROM_END(l) FUSEC_H - 1 - (l)
template <class R> FUSEC_INLINE R fusec_reversed(R x) {
  if constexpr (sizeof x / sizeof x[0] == FUSEC_W && sizeof x[0] < 8)
    return FUSEC_SHUFFLE(x, x, R, FUSEC_LANES(FUSEC_FROM_END));
  else
    return R(FUSEC_SHUFFLE(x.b, x.b, hi64, FUSEC_HALF_LANES(FUSEC_HALF_FROM_END)),
             FUSEC_SHUFFLE(x.a, x.a, hi64, FUSEC_HALF_LANES(FUSEC_HALF_FROM_END)));
}
template <class raw> FUSEC_INLINE auto fusec_ldg(const raw *p, long long s) {
  bool adjacent = __builtin_constant_p(s) && s == -1;
  return adjacent ? fusec_reversed(fusec_ld(p - (FUSEC_W - 1))) : fusec_ld(p, fusec_stride{s});
}
template <class raw> FUSEC_INLINE auto fusec_ldgm(const raw *p, long long s, vm m) {
  return f_hall(m) ? fusec_ldg(p, s) : fusec_ld_some(p, fusec_stride{s}, m);
}
template <class R, class raw> FUSEC_INLINE void fusec_stg(raw *p, long long s, R v) {
  bool adjacent = __builtin_constant_p(s) && s == -1;
  return adjacent ? fusec_st(p - (FUSEC_W - 1), fusec_reversed(v)) : fusec_st(p, fusec_stride{s}, v);
}

// Adjacent elements under a mask.
#define FUSEC_MASKED(R, raw)                                                            \
  FUSEC_INLINE R fusec_ldm(const raw *p, vm m) {                                        \
    return f_hall(m) ? fusec_ld(p) : fusec_ld_some(p, fusec_stride{1}, m);              \
  }                                                                                     \
  FUSEC_INLINE void fusec_stm(raw *p, R v, vm m) {                                      \
    if (f_hall(m)) return fusec_st(p, v);                                               \
    fusec_st_some(p, fusec_stride{1}, v, m);                                            \
  }
#if FUSEC_AVX512
#define FUSEC_MASKED_BY_BITS(R, raw)                                                    \
  FUSEC_INLINE R fusec_ldm(const raw *p, vm m) { return fusec_ldk(p, FUSEC_MASK_BITS(m.v)); } \
  FUSEC_INLINE void fusec_stm(raw *p, R v, vm m) { fusec_stk(p, v, FUSEC_MASK_BITS(m.v)); }
FUSEC_INLINE vu8 fusec_ldk(const raw8 *p, unsigned k) {
  return (vu8)__builtin_ia32_loaddquqi128_mask((const char *)p, c8x16{}, k);
}
FUSEC_INLINE vu16 fusec_ldk(const raw16 *p, unsigned k) {
  return (vu16)__builtin_ia32_loaddquhi256_mask((const short *)p, vi16{}, k);
}
FUSEC_INLINE vi32 fusec_ldk(const raw32 *p, unsigned k) {
  return __builtin_ia32_loaddqusi512_mask((const int *)p, vi32{}, k);
}
FUSEC_INLINE vi64 fusec_ldk(const raw64 *p, unsigned k) {
  return vi64(__builtin_ia32_loaddqudi512_mask((const long long *)p, hi64{}, k),
              __builtin_ia32_loaddqudi512_mask((const long long *)p + FUSEC_H, hi64{}, k >> 8));
}
FUSEC_INLINE void fusec_stk(raw8 *p, vu8 v, unsigned k) {
  __builtin_ia32_storedquqi128_mask((char *)p, (c8x16)v, k);
}
FUSEC_INLINE void fusec_stk(raw16 *p, vu16 v, unsigned k) {
  __builtin_ia32_storedquhi256_mask((short *)p, (vi16)v, k);
}
FUSEC_INLINE void fusec_stk(raw32 *p, vi32 v, unsigned k) {
  __builtin_ia32_storedqusi512_mask((int *)p, v, k);
}
FUSEC_INLINE void fusec_stk(raw64 *p, vi64 v, unsigned k) {
  __builtin_ia32_storedqudi512_mask((long long *)p, v.a, k);
  __builtin_ia32_storedqudi512_mask((long long *)p + FUSEC_H, v.b, k >> 8);
}
FUSEC_MASKED_BY_BITS(vu8, raw8)
FUSEC_MASKED_BY_BITS(vu16, raw16)
FUSEC_MASKED_BY_BITS(vi32, raw32)
FUSEC_MASKED_BY_BITS(vi64, raw64)
#elif FUSEC_AVX2
// A masked store is microcode on AMD's processors, and few vectors are at an edge.
FUSEC_INLINE vi32 fusec_ldm(const raw32 *p, vm m) {
  return __builtin_ia32_maskloadd256((const vi32 *)p, m.v);
}
FUSEC_INLINE void fusec_stm(raw32 *p, vi32 v, vm m) {
  if (f_hall(m)) return fusec_st(p, v);
  __builtin_ia32_maskstored256((vi32 *)p, m.v, v);
}
FUSEC_INLINE vi64 fusec_ldm(const raw64 *p, vm m) {
  vi64 k = fusec_widen(m.v);
  return vi64(__builtin_ia32_maskloadq256((const hi64 *)p, k.a),
              __builtin_ia32_maskloadq256((const hi64 *)(p + FUSEC_H), k.b));
}
FUSEC_INLINE void fusec_stm(raw64 *p, vi64 v, vm m) {
  vi64 k = fusec_widen(m.v);
  __builtin_ia32_maskstoreq256((hi64 *)p, k.a, v.a);
  __builtin_ia32_maskstoreq256((hi64 *)(p + FUSEC_H), k.b, v.b);
}
FUSEC_MASKED(vu8, raw8)
FUSEC_MASKED(vu16, raw16)
#else
FUSEC_MASKED(vu8, raw8)
FUSEC_MASKED(vu16, raw16)
FUSEC_MASKED(vi32, raw32)
FUSEC_MASKED(vi64, raw64)
#endif

// Blocks of FUSEC_W x FUSEC_W, transposed in registers: each of log2(FUSEC_W) steps interleaves the
// first half of the rows with the second. Without masked loads, partial blocks are copied element
// by element.
#define FUSEC_LOW(l) (l) / 2 + (l) % 2 * FUSEC_W
#define FUSEC_HIGH(l) FUSEC_W / 2 + FUSEC_LOW(l)
#define FUSEC_HALF_LOW(l) (l) / 2 + (l) % 2 * FUSEC_H
#define FUSEC_HALF_HIGH(l) FUSEC_H / 2 + FUSEC_HALF_LOW(l)
#define FUSEC_INTERLEAVED(R)                                                            \
  FUSEC_INLINE R fusec_low(R x, R y) { return FUSEC_SHUFFLE(x, y, R, FUSEC_LANES(FUSEC_LOW)); } \
  FUSEC_INLINE R fusec_high(R x, R y) { return FUSEC_SHUFFLE(x, y, R, FUSEC_LANES(FUSEC_HIGH)); }
FUSEC_INTERLEAVED(vu8)
FUSEC_INTERLEAVED(vu16)
FUSEC_INTERLEAVED(vi32)
FUSEC_INLINE vi64 fusec_interleaved(hi64 x, hi64 y) {
  return vi64(FUSEC_SHUFFLE(x, y, hi64, FUSEC_HALF_LANES(FUSEC_HALF_LOW)),
              FUSEC_SHUFFLE(x, y, hi64, FUSEC_HALF_LANES(FUSEC_HALF_HIGH)));
}
FUSEC_INLINE vi64 fusec_low(vi64 x, vi64 y) { return fusec_interleaved(x.a, y.a); }
FUSEC_INLINE vi64 fusec_high(vi64 x, vi64 y) { return fusec_interleaved(x.b, y.b); }
// Pairs: the first elements of all, or the second.
#define FUSEC_ODD(l) 2 * (l) + 1
#define FUSEC_APART(R)                                                                  \
  template <int k> FUSEC_INLINE R fusec_apart(R x, R y) {                               \
    if constexpr (k) return FUSEC_SHUFFLE(x, y, R, FUSEC_LANES(FUSEC_ODD));             \
    else return FUSEC_SHUFFLE(x, y, R, FUSEC_LANES(FUSEC_TWICE));                       \
  }
FUSEC_APART(vu8)
FUSEC_APART(vu16)
FUSEC_APART(vi32)
template <int k> FUSEC_INLINE hi64 fusec_apart(hi64 x, hi64 y) {
  if constexpr (k) return FUSEC_SHUFFLE(x, y, hi64, FUSEC_HALF_LANES(FUSEC_ODD));
  else return FUSEC_SHUFFLE(x, y, hi64, FUSEC_HALF_LANES(FUSEC_TWICE));
}
template <int k> FUSEC_INLINE vi64 fusec_apart(vi64 x, vi64 y) {
  return vi64(fusec_apart<k>(x.a, x.b), fusec_apart<k>(y.a, y.b));
}
template <int k, class raw> FUSEC_INLINE auto fusec_ldp(const raw *p) {
  return fusec_apart<k>(fusec_ld(p), fusec_ld(p + FUSEC_W));
}
template <int k, class raw> FUSEC_INLINE auto fusec_ldpm(const raw *p, vm m) {
  return f_hall(m) ? fusec_ldp<k>(p) : fusec_ld_some(p + k, fusec_stride{2}, m);
}
template <class R, class raw> FUSEC_INLINE void fusec_stp(raw *p, R x, R y) {
  fusec_st(p, fusec_low(x, y));
  fusec_st(p + FUSEC_W, fusec_high(x, y));
}
template <class R, class raw> FUSEC_INLINE void fusec_stpm(raw *p, R x, R y, vm m) {
  if (f_hall(m)) return fusec_stp(p, x, y);
  fusec_st_some(p, fusec_stride{2}, x, m);
  fusec_st_some(p + 1, fusec_stride{2}, y, m);
}
template <class R, class raw> FUSEC_INLINE void fusec_turn(raw *t, R (&r)[FUSEC_W]) {
  R q[FUSEC_W];
#pragma GCC unroll 4
  for (int step = 1; step < FUSEC_W; step *= 2) {
#pragma GCC unroll 8
    for (int l = 0; l < FUSEC_H; l++) {
      q[2 * l] = fusec_low(r[l], r[l + FUSEC_H]);
      q[2 * l + 1] = fusec_high(r[l], r[l + FUSEC_H]);
    }
#pragma GCC unroll 16
    for (int l = 0; l < FUSEC_W; l++) r[l] = q[l];
  }
#pragma GCC unroll 16
  for (int k = 0; k < FUSEC_W; k++) fusec_st(t + k * FUSEC_W, r[k]);
}
template <class R, class raw>
FUSEC_RARE void fusec_ldt_some(raw *t, const raw *p, long long s, long long n, vm m) {
#if FUSEC_AVX512
  R r[FUSEC_W];
  unsigned k = n > 0 ? (1u << n) - 1 : 0, set = FUSEC_MASK_BITS(m.v);
#pragma GCC unroll 16
  for (int l = 0; l < FUSEC_W; l++) r[l] = fusec_ldk(p + l * s, set >> l & 1 ? k : 0);
  fusec_turn(t, r);
#else
  for (int l = 0; l < FUSEC_W; l++)
    for (int k = 0; k < n; k++) t[k * FUSEC_W + l] = m.v[l] ? p[l * s + k] : 0;
#endif
}
template <class R, class raw>
FUSEC_INLINE void fusec_ldt(raw *t, const raw *p, long long s, long long n) {
  if (n < FUSEC_W) return fusec_ldt_some<R>(t, p, s, n, v_bool(true));
  R r[FUSEC_W];
#pragma GCC unroll 16
  for (int l = 0; l < FUSEC_W; l++) r[l] = fusec_ld(p + l * s);
  fusec_turn(t, r);
}

// Bytes and halves to words and back. Portable: by a factor of two at a time, since gcc scalarises
// a conversion by four.
#ifdef FUSEC_WORDS_OF_HALVES
FUSEC_INLINE vu32 fusec_words(vu16 x) { return (vu32)FUSEC_WORDS_OF_HALVES((vi16)x); }
#else
FUSEC_INLINE vu32 fusec_words(vu16 x) { return FUSEC_CONVERT(x, vu32); }
#endif
#ifdef FUSEC_WORDS_OF_BYTES
FUSEC_INLINE vu32 fusec_words(vu8 x) { return (vu32)FUSEC_WORDS_OF_BYTES(x); }
FUSEC_INLINE vi32 fusec_signed_words(vu8 x) { return (vi32)FUSEC_WORDS_OF_SIGNED(x); }
#else
FUSEC_INLINE vu32 fusec_words(vu8 x) { return fusec_words(FUSEC_CONVERT(x, vu16)); }
FUSEC_INLINE vi32 fusec_signed_words(vu8 x) { return fusec_wrap((vi32)fusec_words(x), 24); }
#endif
#ifdef FUSEC_BYTES_OF_WORDS
FUSEC_INLINE vu16 fusec_halves(vu32 x) { return (vu16)FUSEC_HALVES_OF_WORDS((vi32)x); }
FUSEC_INLINE vu8 fusec_bytes(vu32 x) { return (vu8)FUSEC_BYTES_OF_WORDS((vi32)x); }
#else
FUSEC_INLINE vu16 fusec_halves(vu32 x) { return FUSEC_CONVERT(x, vu16); }
FUSEC_INLINE vu8 fusec_bytes(vu32 x) { return FUSEC_CONVERT(FUSEC_CONVERT(x, vu16), vu8); }
#endif

#if FUSEC_W == 16 && defined(__AVX512BF16__) && !defined(__clang__)
// The instruction takes subnormal numbers for 0. Clang has other names for both.
FUSEC_INLINE vu16 fusec_bf16_halves(vf32 x) {
  bool subnormal = __builtin_ia32_fpclassps512_mask(x, 0x20, -1) != 0;  // 0x20: the class of these
  if (__builtin_expect(subnormal, false)) return fusec_halves(fusec_bf16_bits(x));
  return (vu16)__builtin_ia32_cvtneps2bf16_v16sf(x);
}
#else
FUSEC_INLINE vu16 fusec_bf16_halves(vf32 x) { return fusec_halves(fusec_bf16_bits(x)); }
#endif

// FUSEC_ACCESS(D, element size, lanes type, scalar type, lanes of raw bits r -> value,
//              value v -> raw bits, scalar in memory s -> value, scalar value v -> memory)
#define FUSEC_DECODED(V, f, decode, parameters, call)                                   \
  FUSEC_INLINE V f parameters { auto r = call; return decode; }
#define FUSEC_ACCESS(D, raw, V, S, decode, encode, decode_scalar, encode_scalar)        \
  FUSEC_DECODED(V, ld_##D, decode, (const m_##D *p), fusec_ld((const raw *)p))          \
  FUSEC_DECODED(V, ldm_##D, decode, (const m_##D *p, vm m), fusec_ldm((const raw *)p, m)) \
  FUSEC_DECODED(V, ldg_##D, decode, (const m_##D *p, long long s),                      \
                fusec_ldg((const raw *)p, s))                                           \
  FUSEC_DECODED(V, ldgm_##D, decode, (const m_##D *p, long long s, vm m),               \
                fusec_ldgm((const raw *)p, s, m))                                       \
  template <int k>                                                                      \
  FUSEC_DECODED(V, ldp_##D, decode, (const m_##D *p), fusec_ldp<k>((const raw *)p))     \
  template <int k>                                                                      \
  FUSEC_DECODED(V, ldpm_##D, decode, (const m_##D *p, vm m), fusec_ldpm<k>((const raw *)p, m)) \
  FUSEC_DECODED(V, ldi_##D, decode, (const m_##D *p, vi64 o), fusec_ld((const raw *)p, o)) \
  FUSEC_DECODED(V, ldim_##D, decode, (const m_##D *p, vi64 o, vm m),                    \
                fusec_ldm((const raw *)p, o, m))                                        \
  FUSEC_RARE V called_ldim_##D(const m_##D *p, vi64 o, vm m) { return ldim_##D(p, o, m); } \
  FUSEC_INLINE void ldt_##D(m_##D *t, const m_##D *p, long long s, long long n) {       \
    using R = decltype(fusec_ld((const raw *)p));                                       \
    fusec_ldt<R>((raw *)t, (const raw *)p, s, n);                                       \
  }                                                                                     \
  FUSEC_INLINE void ldtm_##D(m_##D *t, const m_##D *p, long long s, long long n, vm m) { \
    using R = decltype(fusec_ld((const raw *)p));                                       \
    fusec_ldt_some<R>((raw *)t, (const raw *)p, s, n, m);                               \
  }                                                                                     \
  FUSEC_INLINE void st_##D(m_##D *p, V v) { fusec_st((raw *)p, encode); }               \
  FUSEC_INLINE void stm_##D(m_##D *p, V v, vm m) { fusec_stm((raw *)p, encode, m); }    \
  FUSEC_INLINE void stg_##D(m_##D *p, long long s, V v) {                               \
    fusec_stg((raw *)p, s, encode);                                                     \
  }                                                                                     \
  FUSEC_INLINE void stgm_##D(m_##D *p, long long s, V v, vm m) {                        \
    fusec_st_some((raw *)p, fusec_stride{s}, encode, m);                                \
  }                                                                                     \
  FUSEC_INLINE void stp_##D(m_##D *p, V x, V y) {                                       \
    auto encoded = [](V v) { return encode; };                                          \
    fusec_stp((raw *)p, encoded(x), encoded(y));                                        \
  }                                                                                     \
  FUSEC_INLINE void stpm_##D(m_##D *p, V x, V y, vm m) {                                \
    auto encoded = [](V v) { return encode; };                                          \
    fusec_stpm((raw *)p, encoded(x), encoded(y), m);                                    \
  }                                                                                     \
  FUSEC_INLINE void sti_##D(m_##D *p, vi64 o, V v) { fusec_st((raw *)p, o, encode); }  \
  FUSEC_INLINE void stim_##D(m_##D *p, vi64 o, V v, vm m) {                             \
    fusec_st_some((raw *)p, o, encode, m);                                              \
  }                                                                                     \
  FUSEC_INLINE S lds_##D(const m_##D *p) { m_##D s = *p; return decode_scalar; }        \
  FUSEC_INLINE void sts_##D(m_##D *p, S v) { *p = encode_scalar; }

FUSEC_ACCESS(f32, raw32, vf32, float, (vf32)r, (vi32)v, s, v)
FUSEC_ACCESS(f64, raw64, vf64, double, vf64((hf64)r.a, (hf64)r.b), vi64((hi64)v.a, (hi64)v.b),
             s, v)
FUSEC_ACCESS(i64, raw64, vi64, long long, r, v, s, v)
FUSEC_ACCESS(i32, raw32, vi32, int, r, v, s, v)
FUSEC_ACCESS(bf16, raw16, vf32, float, (vf32)(fusec_words(r) << 16),
             fusec_bf16_halves(v), fusec_bf16_value(s), fusec_bf16_bits(v))
// Of a pair in one word, either half is a float where the other is 0: no shuffles.
template <> inline __attribute__((always_inline)) vf32 ldp_bf16<0>(const m_bf16 *p) {
  return (vf32)((vu32)fusec_ld((const raw32 *)p) << 16);
}
template <> inline __attribute__((always_inline)) vf32 ldp_bf16<1>(const m_bf16 *p) {
  return (vf32)((vu32)fusec_ld((const raw32 *)p) & 0xffff0000);
}
FUSEC_ACCESS(f16, raw16, vf32, float, fusec_f16_value(r), fusec_f16_bits(v),
             fusec_f16_value(vu16{} + s)[0], (m_f16)fusec_f16_bits(v_f32(v))[0])
FUSEC_ACCESS(i16, raw16, vi32, int, fusec_wrap((vi32)fusec_words(r), 16), fusec_halves((vu32)v), s,
             (m_i16)v)
FUSEC_ACCESS(i8, raw8, vi32, int, fusec_signed_words(r), fusec_bytes((vu32)v), s, (m_i8)v)
FUSEC_ACCESS(u8, raw8, vi32, int, (vi32)fusec_words(r), fusec_bytes((vu32)v), s, (m_u8)v)
FUSEC_ACCESS(f4e2m1fn_x2, raw8, vi32, int, (vi32)fusec_words(r), fusec_bytes((vu32)v), s, (m_u8)v)
FUSEC_ACCESS(bool, raw8, vm, bool, vm{(vi32)fusec_words(r) != 0}, fusec_bytes((vu32)-v.v), s != 0,
             v)

// ---- arithmetic ---------------------------------------------------------------------------------
// FUSEC_LIFT* make f of all types from a g over scalars and native vectors (vf32, hf64, vi32 and
// hi64); FUSEC_BY_LANE* make the overloads of f for lanes from the scalar f.

#define FUSEC_LIFT1(f, g)                                                               \
  template <class T> FUSEC_INLINE T f(T x) {                                            \
    if constexpr (fusec_is_pair<T>) return T(g(x.a), g(x.b));                           \
    else return g(x);                                                                   \
  }
#define FUSEC_LIFT2(f, g)                                                               \
  template <class T> FUSEC_INLINE T f(T x, T y) {                                       \
    if constexpr (fusec_is_pair<T>) return T(g(x.a, y.a), g(x.b, y.b));                 \
    else return g(x, y);                                                                \
  }
#define FUSEC_BY_LANE1(f, V, S)                                                         \
  FUSEC_RARE V f(V x) {                                                                 \
    S t[FUSEC_W];                                                                       \
    for (int l = 0; l < FUSEC_W; l++) t[l] = f((S)x[l]);                                \
    __builtin_memcpy(&x, t, sizeof t);                                                  \
    return x;                                                                           \
  }
#define FUSEC_BY_LANE2(name, f, V, S)                                                   \
  FUSEC_RARE V name(V x, V y) {                                                         \
    S t[FUSEC_W];                                                                       \
    for (int l = 0; l < FUSEC_W; l++) t[l] = f((S)x[l], (S)y[l]);                       \
    __builtin_memcpy(&x, t, sizeof t);                                                  \
    return x;                                                                           \
  }
#define FUSEC_FLOATS_BY_LANE1(f) FUSEC_BY_LANE1(f, vf32, float) FUSEC_BY_LANE1(f, vf64, double)
#define FUSEC_FLOATS_BY_LANE2(f)                                                        \
  FUSEC_BY_LANE2(f, f, vf32, float) FUSEC_BY_LANE2(f, f, vf64, double)
// libm functions under names that compilers do not recognise: gcc simplifies sin(atan(x)) to an
// expression that is 1 where x is NaN.
#define FUSEC_LIBM1(name)                                                               \
  __attribute__((const)) float fusec_libm_##name(float) __asm__(#name "f");             \
  __attribute__((const)) double fusec_libm_##name(double) __asm__(#name);
#define FUSEC_LIBM2(name)                                                               \
  __attribute__((const)) float fusec_libm_##name(float, float) __asm__(#name "f");      \
  __attribute__((const)) double fusec_libm_##name(double, double) __asm__(#name);
// Seconds, of a clock that takes a few nanoseconds to read.
long fusec_time(long *) __asm__("time");
// A scalar f32 is computed by the vector function, so that both give equal bits; double is computed
// by libm.
#define FUSEC_SCALAR_BY_LANES1(name)                                                    \
  FUSEC_INLINE float f_##name(float x) { return f_##name(v_f32(x))[0]; }                \
  FUSEC_INLINE double f_##name(double x) { return fusec_libm_##name(x); }               \
  FUSEC_BY_LANE1(f_##name, vf64, double)

FUSEC_LIFT2(f_maximum, fusec_max)
FUSEC_LIFT2(f_minimum, fusec_min)

template <class T> FUSEC_INLINE T f_reciprocal(T x) { return 1 / x; }

FUSEC_INLINE vf32 fusec_sign_bit(vf32 x) { return (vf32)((vu32)x & 0x80000000u); }
FUSEC_INLINE hf64 fusec_sign_bit(hf64 x) { return (hf64)((hu64)x & 1ull << 63); }
FUSEC_INLINE vf32 fusec_or(vf32 x, vf32 y) { return (vf32)((vi32)x | (vi32)y); }
FUSEC_INLINE hf64 fusec_or(hf64 x, hf64 y) { return (hf64)((hi64)x | (hi64)y); }
FUSEC_INLINE vf32 fusec_abs(vf32 x) { return (vf32)((vu32)x & 0x7fffffffu); }
FUSEC_INLINE hf64 fusec_abs(hf64 x) { return (hf64)((hu64)x & ~(1ull << 63)); }
FUSEC_INLINE float fusec_abs(float x) { return __builtin_fabsf(x); }
FUSEC_INLINE double fusec_abs(double x) { return __builtin_fabs(x); }
template <class T> FUSEC_INLINE T fusec_abs(T x) { return x < 0 ? -x : x; }
FUSEC_LIFT1(f_abs, fusec_abs)
template <class T> FUSEC_INLINE T fusec_copysign(T x, T y) {
  return fusec_or(fusec_abs(x), fusec_sign_bit(y));
}
FUSEC_INLINE float fusec_copysign(float x, float y) { return __builtin_copysignf(x, y); }
FUSEC_INLINE double fusec_copysign(double x, double y) { return __builtin_copysign(x, y); }
FUSEC_LIFT2(f_copysign, fusec_copysign)

// The sign of zero and of NaN is 0, as in torch.
template <class T> FUSEC_INLINE T fusec_sign(T x) {
  T zero = {}, one = zero + 1, negative = x < 0 ? -one : zero;
  return x > 0 ? one : negative;
}
FUSEC_LIFT1(f_sign, fusec_sign)

template <class T> FUSEC_INLINE auto f_isnan(T x) { return f_ne(x, x); }
template <class T> FUSEC_INLINE auto f_isinf(T x) { return f_and(f_eq(x, x), f_ne(x - x, x - x)); }

// ---- square root, rounding ----------------------------------------------------------------------

FUSEC_INLINE float f_sqrt(float x) { return __builtin_sqrtf(x); }
FUSEC_INLINE double f_sqrt(double x) { return __builtin_sqrt(x); }
#ifdef FUSEC_SQRT_F32
FUSEC_INLINE vf32 f_sqrt(vf32 x) { return FUSEC_SQRT_F32(x); }
FUSEC_INLINE vf64 f_sqrt(vf64 x) { return vf64(FUSEC_SQRT_F64(x.a), FUSEC_SQRT_F64(x.b)); }
#else
#define FUSEC_SQRT_LANE(l) __builtin_sqrtf(x[l])
#define FUSEC_SQRT_LOWER(l) __builtin_sqrt(x.a[l])
#define FUSEC_SQRT_UPPER(l) __builtin_sqrt(x.b[l])
FUSEC_INLINE vf32 f_sqrt(vf32 x) { return vf32{FUSEC_LANES(FUSEC_SQRT_LANE)}; }
FUSEC_INLINE vf64 f_sqrt(vf64 x) {
  return vf64(hf64{FUSEC_HALF_LANES(FUSEC_SQRT_LOWER)}, hf64{FUSEC_HALF_LANES(FUSEC_SQRT_UPPER)});
}
#endif
template <class T> FUSEC_INLINE T f_rsqrt(T x) { return 1 / f_sqrt(x); }

#ifdef FUSEC_ROUND_F32
FUSEC_INLINE vf32 fusec_round(vf32 x) { return FUSEC_ROUND_F32(x, 8); }
FUSEC_INLINE hf64 fusec_round(hf64 x) { return FUSEC_ROUND_F64(x, 8); }
FUSEC_INLINE vf32 fusec_floor(vf32 x) { return FUSEC_ROUND_F32(x, 9); }
FUSEC_INLINE hf64 fusec_floor(hf64 x) { return FUSEC_ROUND_F64(x, 9); }
FUSEC_INLINE vf32 fusec_ceil(vf32 x) { return FUSEC_ROUND_F32(x, 10); }
FUSEC_INLINE hf64 fusec_ceil(hf64 x) { return FUSEC_ROUND_F64(x, 10); }
FUSEC_INLINE vf32 fusec_trunc(vf32 x) { return FUSEC_ROUND_F32(x, 11); }
FUSEC_INLINE hf64 fusec_trunc(hf64 x) { return FUSEC_ROUND_F64(x, 11); }
#else
// From 2^23 (2^52) on every float is an integer; adding that rounds anything smaller.
FUSEC_INLINE vf32 fusec_all_integers_from(vf32) { return v_f32(0x1p23f); }
FUSEC_INLINE hf64 fusec_all_integers_from(hf64) { return 0x1p52 + hf64{}; }
template <class V> FUSEC_INLINE V fusec_round(V x) {
  V big = fusec_all_integers_from(x), magnitude = fusec_abs(x);
  return magnitude < big ? fusec_copysign(magnitude + big - big, x) : x;
}
template <class V> FUSEC_INLINE V fusec_floor(V x) {
  V r = fusec_round(x);
  return r > x ? r - 1 : r;
}
template <class V> FUSEC_INLINE V fusec_ceil(V x) { return -fusec_floor(-x); }
template <class V> FUSEC_INLINE V fusec_trunc(V x) {
  return fusec_copysign(fusec_floor(fusec_abs(x)), x);
}
#endif
#define FUSEC_ROUNDING(name, libm)                                                      \
  FUSEC_INLINE float fusec_##name(float x) { return __builtin_##libm##f(x); }           \
  FUSEC_INLINE double fusec_##name(double x) { return __builtin_##libm(x); }            \
  FUSEC_LIFT1(f_##name, fusec_##name)
FUSEC_ROUNDING(round, rint)
FUSEC_ROUNDING(floor, floor)
FUSEC_ROUNDING(ceil, ceil)
FUSEC_ROUNDING(trunc, trunc)

// ---- division of integers, shifts ---------------------------------------------------------------
// x / 0 is 0 (nothing traps), the smallest integer by -1 wraps.

template <bool floored, bool remainder, class S> FUSEC_INLINE S fusec_divide(S x, S y) {
  if (y == 0) return 0;
  S q = y == -1 ? -x : x / y, r = x - q * y;
  S below = floored && r != 0 && (r ^ y) < 0;
  return remainder ? r + below * y : q - below;
}
// 32 bits: the quotient of two doubles, truncated, is exact.
template <bool floored, bool remainder> FUSEC_INLINE vi32 fusec_divide(vi32 x, vi32 y) {
  vi32 q = to_i32(to_f64(x) / to_f64(y == 0 ? v_i32(1) : y)), r = x - q * y;
  vi32 below = floored ? (r != 0) & ((r ^ y) < 0) : vi32{};
  return y == 0 ? vi32{} : remainder ? r + (below & y) : q + below;
}
// 64 bits, all below 2^50: the integer nearest to the quotient of two doubles is the quotient
// or one more; the remainder that it leaves is exact and tells which.
FUSEC_INLINE hf64 fusec_exact_f64(hi64 x) { return (hf64)(x + 0x4338000000000000) - 0x1.8p52; }
FUSEC_INLINE hi64 fusec_exact_i64(hf64 x) { return (hi64)(x + 0x1.8p52) - 0x4338000000000000; }
template <bool floored, bool remainder> FUSEC_INLINE hi64 fusec_divide(hi64 x, hi64 y) {
  hf64 a = fusec_exact_f64(x), b = fusec_exact_f64(y), c = fusec_abs(b);
  hf64 q = fusec_abs(a) / c + 0x1.8p52 - 0x1.8p52, r = fusec_abs(a) - q * c;
  q = r < 0 ? q - 1 : q;
  r = fusec_copysign(r < 0 ? r + c : r, a);
  q = (hf64)((hi64)q ^ (hi64)fusec_sign_bit(a) ^ (hi64)fusec_sign_bit(b));
  hi64 below = r * b < 0;
  if (floored) q = below ? q - 1 : q;
  if (floored) r = below ? r + b : r;
  return y == 0 ? hi64{} : fusec_exact_i64(remainder ? r : q);
}
#define FUSEC_INT_DIVISION(f, floored, remainder)                                       \
  FUSEC_INLINE int f(int x, int y) { return fusec_divide<floored, remainder>(x, y); }   \
  FUSEC_INLINE long long f(long long x, long long y) {                                  \
    return fusec_divide<floored, remainder>(x, y);                                      \
  }                                                                                     \
  FUSEC_INLINE vi32 f(vi32 x, vi32 y) { return fusec_divide<floored, remainder>(x, y); } \
  FUSEC_BY_LANE2(fusec_by_lane_##f, f, vi64, long long)                                 \
  FUSEC_INLINE vi64 f(vi64 x, vi64 y) {                                                 \
    vi64 least(-(1ll << 50)), most(1ll << 50);                                          \
    vm small = f_gt(x, least) & f_gt(y, least) & f_lt(x, most) & f_lt(y, most);         \
    if (__builtin_expect(!f_hall(small), 0)) return fusec_by_lane_##f(x, y);            \
    return vi64(fusec_divide<floored, remainder>(x.a, y.a),                             \
                fusec_divide<floored, remainder>(x.b, y.b));                            \
  }
FUSEC_INT_DIVISION(f_floordiv, true, false)
FUSEC_INT_DIVISION(f_remainder, true, true)
FUSEC_INT_DIVISION(f_truncdiv, false, false)
FUSEC_INT_DIVISION(f_fmod, false, true)
FUSEC_RARE vi64 called_floordiv(vi64 x, vi64 y) { return f_floordiv(x, y); }
FUSEC_RARE vi64 called_remainder(vi64 x, vi64 y) { return f_remainder(x, y); }

// A shift count out of range shifts all bits out, as in torch.
template <class T> FUSEC_INLINE T fusec_shl(T x, T y) {
  int top = sizeof(x[0]) * 8 - 1;
  return ((y < 0) | (y > top)) ? T{} : x << (y & top);
}
template <class T> FUSEC_INLINE T fusec_shr(T x, T y) {
  int top = sizeof(x[0]) * 8 - 1;
  return x >> (((y < 0) | (y > top)) ? T{} + top : y);
}
#define FUSEC_SHIFT_SCALAR(S, V)                                                        \
  FUSEC_INLINE S fusec_shl(S x, S y) { return fusec_shl(V{} + x, V{} + y)[0]; }         \
  FUSEC_INLINE S fusec_shr(S x, S y) { return fusec_shr(V{} + x, V{} + y)[0]; }
FUSEC_SHIFT_SCALAR(int, vi32)
FUSEC_SHIFT_SCALAR(long long, hi64)
FUSEC_LIFT2(f_shl, fusec_shl)
FUSEC_LIFT2(f_shr, fusec_shr)

// ---- exponential and friends, f32 ---------------------------------------------------------------
// Polynomials are minimax fits with float coefficients made for this file: a comment names the
// function, the interval, and the error relative to the function's value. Range reduction: Cody and
// Waite, Software Manual for the Elementary Functions (1980); Muller, Elementary Functions, ch. 11.

// limit where x is beyond it, else x, NaN included.
#ifdef FUSEC_MIN_F32
FUSEC_INLINE vf32 fusec_at_most(vf32 x, float limit) { return FUSEC_MIN_F32(v_f32(limit), x); }
FUSEC_INLINE vf32 fusec_at_least(vf32 x, float limit) { return FUSEC_MAX_F32(v_f32(limit), x); }
#else
FUSEC_INLINE vf32 fusec_at_most(vf32 x, float limit) { return x > limit ? v_f32(limit) : x; }
FUSEC_INLINE vf32 fusec_at_least(vf32 x, float limit) { return x < limit ? v_f32(limit) : x; }
#endif

// x = n ln 2 + r, |r| <= ln 2 / 2: t carries n + more in its low bits, by rounding at 1.5 * 2^23.
// n times the upper part of ln 2 is exact: 15 bits times 9.
#define FUSEC_ROUNDER 0x1.8p23f
FUSEC_INLINE vf32 fusec_exp_reduce(vf32 x, vf32 &t, float more = 0) {
  t = x * 0x1.715476p0f + (FUSEC_ROUNDER + more);
  vf32 n = t - (FUSEC_ROUNDER + more);
  return x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;
}
// exp(r) - 1, by (exp(r) - 1 - r) / r^2 on |r| <= 0.348, 2^-28 of exp(r). Evaluated in pairs
// (Estrin): Horner's chain of dependent steps would be bound by latency.
FUSEC_INLINE vf32 fusec_expm1_reduced(vf32 r) {
  vf32 r2 = r * r;
  vf32 p = (0.49999994f + r * 0.16666521f) + r2 * ((0.04166829f + r * 0.008368704f) +
           r2 * 0.0013818939f);
  return r + r2 * p;
}
// y 2^n, in two factors so that the result may overflow or be subnormal.
FUSEC_INLINE vf32 fusec_scale(vf32 y, vf32 t) {
#ifdef FUSEC_SCALE_F32
  return FUSEC_SCALE_F32(y, t - FUSEC_ROUNDER);
#else
  vi32 n = (vi32)t - (vi32)v_f32(FUSEC_ROUNDER), half = n >> 1;
  return y * (vf32)((half + 127) << 23) * (vf32)((n - half + 127) << 23);
#endif
}
// Results of 0 are selected: to scale down to 0 takes a microcode assist, 150 cycles, and a masked
// softmax has many of them.
FUSEC_INLINE vf32 f_exp(vf32 x) {
  vi32 none = x < -104;
  vf32 t, r = fusec_exp_reduce(fusec_at_most(none ? vf32{} : x, 89), t);
  return none ? vf32{} : fusec_scale(1 + fusec_expm1_reduced(r), t);
}
FUSEC_INLINE vf32 f_exp2(vf32 x) {
  vi32 none = x < -151;
  x = fusec_at_most(none ? vf32{} : x, 129);
  vf32 t = x + FUSEC_ROUNDER, r = (x - (t - FUSEC_ROUNDER)) * 0x1.62e43p-1f;
  return none ? vf32{} : fusec_scale(1 + fusec_expm1_reduced(r), t);
}
// exp(x) / 2 for x from -87 to 89.5, infinite above 89.07. The low bits of t are the exponent of
// 2^(n - 1).
FUSEC_INLINE vf32 fusec_half_exp(vf32 x) {
  vf32 t, r = fusec_exp_reduce(x, t, 126);
  return (1 + fusec_expm1_reduced(r)) * (vf32)((vi32)t << 23);
}
// 2^n expm1(r) + (2^n - 1), at half the scale so that 2^128 exists. x = n ln 2 + r as above.
FUSEC_INLINE vf32 f_expm1(vf32 x) {
  vf32 t, r = fusec_exp_reduce(fusec_at_least(fusec_at_most(x, 89), -25), t);
  vf32 p = fusec_expm1_reduced(r);
  vf32 half = (vf32)(((vi32)t - (vi32)v_f32(FUSEC_ROUNDER) + 126) << 23);
  vf32 y = 2 * (half * p + (half - 0.5f));
  return fusec_abs(x) < 0x1p-30f ? x : t == FUSEC_ROUNDER ? p : y;
}

// x = m 2^e with m in [sqrt(1/2), sqrt(2)), from the bits; subnormals are scaled first.
FUSEC_INLINE vf32 fusec_log_reduce(vf32 x, vf32 &e) {
  vi32 small = x < 0x1p-126f;
  vi32 bits = (vi32)(small ? x * 0x1p24f : x) - 0x3f3504f3;
  e = FUSEC_CONVERT((bits >> 23) - (small & 24), vf32);
  return (vf32)((bits & 0x7fffff) + 0x3f3504f3);
}
// log1p(f) - f, by (log1p(f) - f + f^2 / 2) / f^3 on [sqrt(1/2) - 1, sqrt(2) - 1], 2^-30.
FUSEC_INLINE vf32 fusec_log1p_tail(vf32 f) {
  vf32 p = 0.33333313f + f * (-0.2500001f + f * (0.20002072f + f * (-0.16667989f +
           f * (0.1422036f + f * (-0.124062404f + f * (0.11883538f +
           f * (-0.11670016f + f * 0.06749175f)))))));
  return f * f * (f * p - 0.5f);
}
// The logarithm of x if x is zero, negative, infinite or NaN; else y.
FUSEC_INLINE vf32 fusec_log_special(vf32 x, vf32 y) {
  y = x < __builtin_inff() ? y : x;
  y = x < 0 ? v_f32(__builtin_nanf("")) : y;
  return x == 0 ? v_f32(-__builtin_inff()) : y;
}
FUSEC_INLINE vf32 f_log(vf32 x) {
  vf32 e, f = fusec_log_reduce(x, e) - 1;
  vf32 tail = fusec_log1p_tail(f) + e * 0x1.7f7d1cp-20f;
  return fusec_log_special(x, e * 0x1.62e4p-1f + (f + tail));
}
FUSEC_INLINE vf32 f_log2(vf32 x) {
  vf32 e, f = fusec_log_reduce(x, e) - 1;
  vf32 tail = f * 0x1.c551dap-2f + fusec_log1p_tail(f) * 0x1.715476p0f;  // log2(e) is 1.44
  return fusec_log_special(x, e + (f + tail));
}
FUSEC_INLINE vf32 f_log10(vf32 x) {
  vf32 e, f = fusec_log_reduce(x, e) - 1;
  vf32 tail = fusec_log1p_tail(f) * 0x1.bcb7b2p-2f + f * -0x1.5b235ep-27f + e * 0x1.3509f8p-18f;
  return fusec_log_special(x, e * 0x1.344p-2f + (f * 0x1.bcb7b2p-2f + tail));
}
// u = 1 + x rounds; the rounding error over u corrects log(u). Near 0, f is x itself.
FUSEC_INLINE vf32 f_log1p(vf32 x) {
  vf32 u = 1 + x, e, m = fusec_log_reduce(u, e);
  vf32 lost = (x > 1 ? 1 - (u - x) : x - (u - 1)) / u;
  vf32 f = e == 0 ? x : m - 1;
  vf32 tail = fusec_log1p_tail(f) + (e == 0 ? vf32{} : lost + e * 0x1.7f7d1cp-20f);
  vf32 y = fusec_log_special(u, e * 0x1.62e4p-1f + (f + tail));
  return x == 0 ? x : y;
}

// Below 0.625 x + x^3 p(x^2), p fits (tanh(x) - x) / x^3 to 2^-27.6; above, 1 - 2 / (e^2x + 1).
FUSEC_INLINE vf32 f_tanh(vf32 x) {
  vf32 a = fusec_abs(x), s = x * x;
  vf32 low = a + a * s * (-0.33333278f + s * (0.13331322f + s * (-0.053729363f +
             s * (0.020604275f + s * -0.005665036f))));
  vf32 high = 1 - 1 / (fusec_half_exp(fusec_at_most(a + a, 89.5f)) + 0.5f);
  return fusec_or(a < 0.625f ? low : high, fusec_sign_bit(x));
}

// 1 - exp(-q(x)): q = x + x p(x) fits -log(erfc(x)) on [0, 3.95] to 2^-27 of erf, and from there on
// the result rounds to 1. For small x, exp(-q) - 1 keeps all digits.
FUSEC_INLINE vf32 f_erf(vf32 x) {
  vf32 a = fusec_at_most(fusec_abs(x), 3.95f), a2 = a * a, a4 = a2 * a2;
  vf32 p = (0.12837917f + a * 0.6366194f) + a2 * (0.10277783f + a * -0.019153064f) +
           a4 * ((-0.00016039662f + a * 0.0016670281f) +
                 a2 * ((-0.0006328372f + a * 0.00011764137f) + a2 * -9.256278e-06f));
  vf32 q = -a - a * p, t = q * 0x1.715476p0f + FUSEC_ROUNDER;
  vf32 r = q - (t - FUSEC_ROUNDER) * 0x1.62e43p-1f;
  vf32 scale = (vf32)(((vi32)t << 23) + 0x3f800000);  // 2^n, -25 <= n <= 0
  return fusec_or((1 - scale) - scale * fusec_expm1_reduced(r), fusec_sign_bit(x));
}

// The tail of the normal distribution beyond |x|, to 1e-5 of it, for results that are rounded to 16
// bits: exp(-q(a)) / 2, where q fits -log(2 * tail) on [0, 6], in powers of two; 0 beyond 6.
FUSEC_INLINE vf32 fusec_normal_tail(vf32 x) {
  vf32 a = fusec_at_most(fusec_abs(x), 6), a2 = a * a, a4 = a2 * a2;
  vf32 q = a * ((-1.1512144f + a * -0.45854157f) + a2 * (-0.053890944f + a * 0.00847685f) +
                a4 * ((-0.0009231865f + a * 6.0726255e-05f) + a2 * -1.7937851e-06f));
  vf32 t = q + FUSEC_ROUNDER, r = q - (t - FUSEC_ROUNDER);
  vf32 r2 = r * r, p = 0.120120496f + r * 0.027953215f + r2 * 0.004791427f;
  p = (0.5f + r * 0.3465621f) + r2 * p;
  vf32 tail = p * (vf32)(((vi32)t << 23) + 0x3f800000);  // 2^n, -30 <= n <= 0
  return fusec_abs(x) > 6 ? vf32{} : tail;
}
FUSEC_INLINE vf32 f_ndtr_rounded(vf32 x) {
  vf32 tail = fusec_normal_tail(x);
  return x < 0 ? tail : 1 - tail;
}
FUSEC_INLINE vf32 f_erf_rounded(vf32 x) {
  return fusec_or(1 - 2 * fusec_normal_tail(x * 1.4142135f), fusec_sign_bit(x));
}
FUSEC_INLINE float f_ndtr_rounded(float x) { return f_ndtr_rounded(v_f32(x))[0]; }
FUSEC_INLINE float f_erf_rounded(float x) { return f_erf_rounded(v_f32(x))[0]; }

// ---- sine, cosine, tangent, f32 -----------------------------------------------------------------
// x = n pi/2 + r in double: the first 33 bits of pi/2 times n are exact. |x| > 1e6 goes to libm.

FUSEC_INLINE hf64 fusec_quarter_turns(hf64 x, hf64 &r) {
  hf64 t = x * 0x1.45f306dc9c883p-1 + 0x1.8p52, n = t - 0x1.8p52;
  r = x - n * 0x1.921fb544p0 - n * 0x1.0b4611a626331p-34;
  return t;
}
// Sine and cosine of r; returns the quarter turns n. On |r| <= 0.79, p fits (sin(r) - r) / r^3 to
// 2^-27.8 and q fits (cos(r) - 1 + r^2 / 2) / r^4 to 2^-32.9.
FUSEC_INLINE vi32 fusec_sincos(vf32 x, vf32 &sine, vf32 &cosine) {
  vf64 d = to_f64(x), reduced;
  hf64 ta = fusec_quarter_turns(d.a, reduced.a), tb = fusec_quarter_turns(d.b, reduced.b);
  vf32 r = to_f32(reduced), s = r * r;
  vf32 p = -0.16666654f + s * (0.008332106f + s * -0.00019507877f);
  vf32 q = 0.041666646f + s * (-0.0013887305f + s * 2.4431425e-05f);
  sine = s == 0 ? r : r + r * s * p;  // keeps the sign of zero
  cosine = 1 + s * (s * q - 0.5f);
  return fusec_narrow((hi64)ta, (hi64)tb);
}
FUSEC_LIBM1(sin)
FUSEC_LIBM1(cos)
FUSEC_LIBM1(tan)
#define FUSEC_TRIGONOMETRIC(name, of)                                                   \
  FUSEC_RARE vf32 fusec_large_##name(vf32 x, vf32 y, vm large) {                        \
    for (int l = 0; l < FUSEC_W; l++)                                                   \
      if (large.v[l]) y[l] = fusec_libm_##name((float)x[l]);                            \
    return y;                                                                           \
  }                                                                                     \
  FUSEC_INLINE vf32 f_##name(vf32 x) {                                                  \
    vm large = ~f_le(fusec_abs(x), v_f32(1e6f));                                        \
    vf32 sine, cosine;                                                                  \
    vi32 turns = fusec_sincos(x, sine, cosine);                                         \
    vf32 y = of;                                                                        \
    return __builtin_expect(f_hany(large), 0) ? fusec_large_##name(x, y, large) : y;    \
  }                                                                                     \
  FUSEC_SCALAR_BY_LANES1(name)
FUSEC_INLINE vf32 fusec_flip_sign(vf32 x, vi32 odd) { return (vf32)((vi32)x ^ odd << 31); }
FUSEC_TRIGONOMETRIC(sin, fusec_flip_sign(turns & 1 ? cosine : sine, turns >> 1))
FUSEC_TRIGONOMETRIC(cos, fusec_flip_sign(turns & 1 ? sine : cosine, (turns + 1) >> 1))
FUSEC_TRIGONOMETRIC(tan, turns & 1 ? -cosine / sine : sine / cosine)

// ---- power, f32 ---------------------------------------------------------------------------------
// 2^(y log2 |x|) in double, some 45 bits, so that the float result is rounded nearly once.

// log2 of m 2^e by atanh((m - 1) / (m + 1)); p fits (atanh(s) / s - 1) / s^2 * 2 / ln 2.
FUSEC_INLINE hf64 fusec_log2(hf64 x) {
  hu64 u = (hu64)x + (0x3ff0000000000000 - 0x3fe6a09e667f3bcd);
  hf64 e = (hf64)(u >> 52 | 0x4330000000000000) - (0x1p52 + 1023);
  hf64 m = (hf64)((u & 0xfffffffffffff) + 0x3fe6a09e667f3bcd);
  hf64 s = (m - 1) / (m + 1), z = s * s;
  hf64 p = 0.9617966939259879 + z * (0.5770780163454509 + z * (0.4121985859590422 +
           z * (0.32059851714647547 + z * (0.26233546424574555 + z * (0.22088121005070935 +
           z * 0.21400400298343822)))));
  hf64 y = e + (s * 2.885390081777927 + s * z * p);
  y = x == 0 ? -__builtin_inf() + hf64{} : y;
  return x < __builtin_inf() ? y : x;
}
// 2^x; the coefficients fit (exp(r) - 1 - r) / r^2 on |r| <= 0.3466 to 2^-45.8.
FUSEC_INLINE hf64 fusec_exp2(hf64 x) {
  x = x > 200 ? 200 + hf64{} : x;
  x = x < -200 ? -200 + hf64{} : x;
  hf64 t = x + 0x1.8p52, r = (x - (t - 0x1.8p52)) * 0.6931471805599453;
  hf64 p = 0.4999999999966441 + r * (0.16666666667265106 + r * (0.04166666696218697 +
           r * (0.00833333309511078 + r * (0.001388881115364447 + r * (0.00019841539089271467 +
           r * (2.488080549932092e-05 + r * 2.749305599765846e-06))))));
  return (1 + (r + r * r * p)) * (hf64)(((hi64)t << 52) + 0x3ff0000000000000);
}
FUSEC_INLINE vf32 f_pow(vf32 x, vf32 y) {
  vf32 magnitude = fusec_abs(x);
  vf64 m = to_f64(magnitude), d = to_f64(y);
  vf32 z = to_f32(vf64(fusec_exp2(d.a * fusec_log2(m.a)), fusec_exp2(d.b * fusec_log2(m.b))));
  vf32 half = y * 0.5f;
  vi32 integer = fusec_floor(y) == y, odd = integer & (fusec_floor(half) != half);
  vi32 one = magnitude == 1, root = (x < 0) & ~integer & (magnitude < __builtin_inff());
  z = one ? v_f32(1) : z;
  z = root ? v_f32(__builtin_nanf("")) : z;
  z = f_select(f_isnan(x) | f_isnan(y), x + y, z);
  z = odd ? fusec_or(z, fusec_sign_bit(x)) : z;
  return f_select(f_eq(x, v_f32(1)) | f_eq(y, v_f32(0)), v_f32(1), z);
}

// ---- scalars, and functions left to libm --------------------------------------------------------
// exp, log, erf, tanh ... of double, and rare functions.

#define FUSEC_F64_BY_LIBM(name) FUSEC_LIBM1(name) FUSEC_SCALAR_BY_LANES1(name)
FUSEC_F64_BY_LIBM(exp)
FUSEC_F64_BY_LIBM(exp2)
FUSEC_F64_BY_LIBM(expm1)
FUSEC_F64_BY_LIBM(log)
FUSEC_F64_BY_LIBM(log2)
FUSEC_F64_BY_LIBM(log10)
FUSEC_F64_BY_LIBM(log1p)
FUSEC_F64_BY_LIBM(tanh)
FUSEC_F64_BY_LIBM(erf)
// Each lane's sum of w * exp(x - m), where m is the greatest x so far; a product of the factors by
// which the sums shrink as m grows, and a sum of terms, are scanned together.
template <int lanes, int step, class V> FUSEC_INLINE void fusec_recur(V &a, V &b) {
  if constexpr (step < lanes) {
    b += a * fusec_later<lanes, step>(b, V{});
    a *= fusec_later<lanes, step>(a, 1 - V{});
    fusec_recur<lanes, step * 2>(a, b);
  }
}
#define FUSEC_BEFORE(l) (l) ? FUSEC_W + (l) - 1 : 0
template <class V> FUSEC_INLINE vf64 f_scanexpsum(V x, vf64 w, V top, vf64 start) {
  V m = f_scanmax(x, top), first = fusec_last(top);
  V before = FUSEC_SHUFFLE(first, m, vi32, FUSEC_LANES(FUSEC_BEFORE));
  vf64 a = to_f64(f_exp(f_select(f_eq(before, m), V{}, before - m)));
  vf64 b = to_f64(f_exp(f_select(f_eq(x, m), V{}, x - m))) * w;
  fusec_recur<FUSEC_H, 1>(a.a, b.a);
  fusec_recur<FUSEC_H, 1>(a.b, b.b);
  b.a += a.a * fusec_last(start).a;
  b.b += a.b * (b.a[FUSEC_H - 1] - decltype(b.a){});
  return b;
}
template <class T> FUSEC_INLINE T f_sigmoid(T x) { return 1 / (1 + f_exp(-x)); }
FUSEC_INLINE vf32 f_sigmoid(vf32 x) {  // 0 where exp(-x) overflows, as eager's
  vf32 y = fusec_at_least(-x, -87);
  return 0.5f / (0.5f + fusec_half_exp(y > 0x1.62e42ep6f ? v_f32(89.5f) : y));
}
FUSEC_INLINE float f_sigmoid(float x) { return f_sigmoid(v_f32(x))[0]; }
#define FUSEC_NDTR(V, S)                                                                \
  FUSEC_INLINE V f_ndtr(V x) { return (1 + f_erf(x * (S)0.7071067811865476)) * (S)0.5; }
FUSEC_NDTR(vf32, float) FUSEC_NDTR(float, float)
FUSEC_NDTR(vf64, double) FUSEC_NDTR(double, double)

#define FUSEC_BY_LIBM(name)                                                             \
  FUSEC_LIBM1(name)                                                                     \
  FUSEC_INLINE float f_##name(float x) { return fusec_libm_##name(x); }                 \
  FUSEC_INLINE double f_##name(double x) { return fusec_libm_##name(x); }               \
  FUSEC_FLOATS_BY_LANE1(f_##name)
FUSEC_BY_LIBM(asin)
FUSEC_BY_LIBM(acos)
FUSEC_BY_LIBM(atan)
FUSEC_BY_LIBM(sinh)
FUSEC_BY_LIBM(cosh)
FUSEC_BY_LIBM(asinh)
FUSEC_BY_LIBM(acosh)
FUSEC_BY_LIBM(atanh)
FUSEC_BY_LIBM(erfc)
FUSEC_BY_LIBM(lgamma)
#define FUSEC_BY_LIBM2(name)                                                            \
  FUSEC_LIBM2(name)                                                                     \
  FUSEC_INLINE float f_##name(float x, float y) { return fusec_libm_##name(x, y); }     \
  FUSEC_INLINE double f_##name(double x, double y) { return fusec_libm_##name(x, y); }  \
  FUSEC_FLOATS_BY_LANE2(f_##name)
// In double, whose squares of floats neither overflow nor vanish, and round below a float's digits.
FUSEC_INLINE vf32 f_hypot(vf32 x, vf32 y) {
  vf64 a = to_f64(x), b = to_f64(y);
  vm infinite = f_isinf(x) | f_isinf(y);
  return f_select(infinite, v_f32(__builtin_inff()), to_f32(f_sqrt(a * a + b * b)));
}
// atan(t) / t on [0, 1] in double, of t^2, to 2^-28.7; the quotient of the smaller by the larger.
FUSEC_INLINE hf64 fusec_atan2(hf64 y, hf64 x) {
  hf64 a = fusec_abs(x), b = fusec_abs(y);
  hi64 steep = b > a;
  hf64 low = steep ? a : b, high = steep ? b : a, one = 1 + hf64{};
  hf64 t = low / (high == 0 ? one : high);
  t = low == __builtin_inf() ? one : t;
  hf64 z = t * t;
  hf64 p = 0.9999999976305658 + z * (-0.33333283640678113 + z * (0.19998266014229718 +
           z * (-0.1426193282399925 + z * (0.10942029207853661 + z * (-0.08377311209284607 +
           z * (0.05755202962042234 + z * (-0.03080452514672163 + z * (0.010726905506627997 +
           z * -0.0017539215554931366))))))));
  hf64 r = t * p;
  r = steep ? 0x1.921fb54442d18p0 - r : r;
  r = (hi64)fusec_sign_bit(x) ? 0x1.921fb54442d18p1 - r : r;
  r = (x != x) | (y != y) ? x + y : r;
  return fusec_or(fusec_abs(r), fusec_sign_bit(y));
}
FUSEC_INLINE vf32 f_atan2(vf32 y, vf32 x) {
  vf64 b = to_f64(y), a = to_f64(x);
  return to_f32(vf64(fusec_atan2(b.a, a.a), fusec_atan2(b.b, a.b)));
}
#define FUSEC_F64_BY_LIBM2(name)                                                        \
  FUSEC_LIBM2(name)                                                                     \
  FUSEC_INLINE float f_##name(float x, float y) { return f_##name(v_f32(x), v_f32(y))[0]; } \
  FUSEC_INLINE double f_##name(double x, double y) { return fusec_libm_##name(x, y); }  \
  FUSEC_BY_LANE2(f_##name, f_##name, vf64, double)
FUSEC_F64_BY_LIBM2(hypot)
FUSEC_F64_BY_LIBM2(atan2)
FUSEC_BY_LIBM2(nextafter)
FUSEC_BY_LIBM2(fmod)
FUSEC_LIBM2(pow)
FUSEC_RARE float f_pow(float x, float y) { return f_pow(v_f32(x), v_f32(y))[0]; }
FUSEC_INLINE double f_pow(double x, double y) { return fusec_libm_pow(x, y); }
FUSEC_BY_LANE2(f_pow, f_pow, vf64, double)

// Division of floats as in torch: the remainder has the sign of the divisor, and x equals
// floordiv(x, y) y + remainder(x, y).
template <class S> FUSEC_INLINE S fusec_float_remainder(S x, S y) {
  S r = f_fmod(x, y);
  return r != 0 && (y < 0) != (r < 0) ? r + y : r;
}
template <class S> FUSEC_INLINE S fusec_float_floordiv(S x, S y) {
  if (y == 0) return x / y;
  S q = (x - fusec_float_remainder(x, y)) / y, nearest = f_round(q);
  return q == 0 ? f_copysign(q, x / y) : nearest;
}
#define FUSEC_FLOAT_DIVISION(name)                                                      \
  FUSEC_INLINE float f_##name(float x, float y) { return fusec_float_##name(x, y); }    \
  FUSEC_INLINE double f_##name(double x, double y) { return fusec_float_##name(x, y); } \
  FUSEC_FLOATS_BY_LANE2(f_##name)
FUSEC_FLOAT_DIVISION(remainder)
FUSEC_FLOAT_DIVISION(floordiv)
template <class T> FUSEC_INLINE T fusec_float_truncdiv(T x, T y) { return fusec_trunc(x / y); }
FUSEC_LIFT2(f_truncdiv, fusec_float_truncdiv)

// Integer powers by squaring; a negative exponent leaves only 1, -1 and 0.
template <class S> FUSEC_INLINE S fusec_int_pow(S x, S n) {
  if (n < 0) return x == 1 ? 1 : x == -1 ? (n & 1 ? -1 : 1) : 0;
  S y = 1;
  for (; n; n >>= 1, x *= x)
    if (n & 1) y *= x;
  return y;
}
FUSEC_INLINE int f_pow(int x, int n) { return fusec_int_pow(x, n); }
FUSEC_INLINE long long f_pow(long long x, long long n) { return fusec_int_pow(x, n); }
FUSEC_BY_LANE2(f_pow, f_pow, vi32, int)
FUSEC_BY_LANE2(f_pow, f_pow, vi64, long long)

// erfinv: Winitzki's estimate (2008), then Halley's iteration, on erfc where 1 - |x| is exact.
FUSEC_RARE double f_erfinv(double x) {
  double p = f_abs(x), ln = f_log1p(-p * p), c = 4.3307467508 + ln / 2;
  if (!(p < 1)) return p == 1 ? x * __builtin_inf() : __builtin_nan("");
  double y = f_sqrt(f_sqrt(c * c - ln / 0.147) - c);
  for (int i = 0; i < 3; i++) {
    double error = p < 0.5 ? f_erf(y) - p : (1 - p) - f_erfc(y);
    double step = error * 0.886226925452758 * f_exp(y * y);
    y -= step / (1 + y * step);
  }
  return f_copysign(y, x);
}
FUSEC_INLINE float f_erfinv(float x) { return (float)f_erfinv((double)x); }
FUSEC_FLOATS_BY_LANE1(f_erfinv)

// exp for terms relative to the largest, 1: 0 below 2^-126. Subnormal factors of a product take a
// microcode assist each.
FUSEC_INLINE vf32 f_exp_flushed(vf32 x) { return x < -87 ? vf32{} : f_exp(x < -87 ? vf32{} : x); }
FUSEC_INLINE float f_exp_flushed(float x) { return x < -87 ? 0 : f_exp(x); }

// exp for results that are rounded to 16 bits: to 2^-17 of it, exp(0) exactly. On |r| <= 0.347 the
// coefficients fit (exp(r) - 1 - r) / r^2.
FUSEC_INLINE vf32 fusec_exp_rounded(vf32 x) {
  x = fusec_at_most(x, 89);
  vf32 t = x * 0x1.715476p0f + FUSEC_ROUNDER, r = x - (t - FUSEC_ROUNDER) * 0x1.62e43p-1f;
  vf32 p = (1 + r) + r * r * ((0.50005116f + r * 0.16753515f) + r * r * 0.04127774f);
  return fusec_scale(p, t);
}
FUSEC_INLINE vf32 f_exp_rounded(vf32 x) {
  vi32 none = x < -104;
  return none ? vf32{} : fusec_exp_rounded(none ? vf32{} : x);
}
FUSEC_INLINE float f_exp_rounded(float x) { return f_exp_rounded(v_f32(x))[0]; }
FUSEC_INLINE vf32 f_exp_rounded_flushed(vf32 x) { return x < -87 ? vf32{} : fusec_exp_rounded(x); }
FUSEC_INLINE float f_exp_rounded_flushed(float x) { return f_exp_rounded_flushed(v_f32(x))[0]; }

// ---- random numbers -----------------------------------------------------------------------------
// Philox 4x32-10: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011). The key is
// the seed, the counter index / 4, and the result are the upper 24 bits of word index % 4.

#define FUSEC_MIRRORED(l) (l) ^ 3
FUSEC_INLINE vu32 fusec_mirror_words(hu64 x) {
  return FUSEC_SHUFFLE((vu32)x, (vu32)x, vu32, FUSEC_LANES(FUSEC_MIRRORED));
}
// x in the even 64-bit lanes and y in the odd ones.
FUSEC_INLINE hu64 fusec_alternate(hu64 x, hu64 y) {
  hi64 odd = -(hi64{FUSEC_HALF_LANES(FUSEC_SAME)} & 1);
  return (x & ~(hu64)odd) | (y & (hu64)odd);
}
// The words of counters first, first + 1, ...: four lanes are the state of one, so that a round's
// two products are one multiplication of 64-bit lanes.
FUSEC_INLINE vu32 fusec_philox(long long seed, long long first) {
  hu64 zero = {}, lanes = (hu64)hi64{FUSEC_HALF_LANES(FUSEC_SAME)};
  vu32 state = (vu32)fusec_alternate((lanes >> 1) + (unsigned long long)first, zero);
  vu32 key = (vu32)fusec_alternate(zero + (unsigned)seed,
                                   zero + (unsigned)((unsigned long long)seed >> 32));
  vu32 step = (vu32)fusec_alternate(zero + 0x9e3779b9u, zero + 0xbb67ae85u);
  hu64 factors = fusec_alternate(zero + 0xd2511f53u, zero + 0xcd9e8d57u);
#pragma GCC unroll 10
  for (int i = 0; i < 10; i++) {
#ifdef FUSEC_EVEN_PRODUCTS
    hu64 products = (hu64)FUSEC_EVEN_PRODUCTS((vi32)state, (vi32)factors);
#else
    hu64 products = ((hu64)state & 0xffffffff) * factors;
#endif
    state = fusec_mirror_words(products) ^ (vu32)((hu64)state >> 32) ^ key;
    key += step;
  }
  return state;
}
FUSEC_INLINE int f_random(long long seed, long long index) {
  return (int)(fusec_philox(seed, index >> 2)[index & 3] >> 8);
}
FUSEC_INLINE void fusec_wide_product(vu32 x, unsigned k, vu32 &high, vu32 &low) {
  hu64 even = (hu64)x, odd = even >> 32;
#ifdef FUSEC_EVEN_PRODUCTS
  even = (hu64)FUSEC_EVEN_PRODUCTS((vi32)even, v_i32((int)k));
  odd = (hu64)FUSEC_EVEN_PRODUCTS((vi32)odd, v_i32((int)k));
#else
  even = (even & 0xffffffff) * k, odd *= k;
#endif
  high = (vu32)(even >> 32 | (odd & 0xffffffff00000000));
  low = (vu32)((even & 0xffffffff) | odd << 32);
}
FUSEC_INLINE vu32 fusec_low_words(vi64 x) { return (vu32)fusec_narrow(x.a, x.b); }
FUSEC_INLINE vu32 fusec_high_words(vi64 x) { return (vu32)fusec_narrow(x.a >> 32, x.b >> 32); }
// A counter for each lane.
FUSEC_RARE vi32 f_random(vi64 seed, vi64 index) {
  vi64 counter(index.a >> 2, index.b >> 2);
  vu32 c0 = fusec_low_words(counter), c1 = fusec_high_words(counter), c2 = {}, c3 = {};
  vu32 key0 = fusec_low_words(seed), key1 = fusec_high_words(seed);
  for (int i = 0; i < 10; i++) {
    vu32 high0, low0, high2, low2;
    fusec_wide_product(c0, 0xd2511f53u, high0, low0);
    fusec_wide_product(c2, 0xcd9e8d57u, high2, low2);
    c0 = high2 ^ c1 ^ key0, c1 = low2;
    c2 = high0 ^ c3 ^ key1, c3 = low0;
    key0 += 0x9e3779b9u, key1 += 0xbb67ae85u;
  }
  vu32 word = fusec_low_words(index) & 3, odd = word & 1;
  vu32 lower = odd == 1 ? c1 : c0, upper = odd == 1 ? c3 : c2;
  return (vi32)((word > 1 ? upper : lower) >> 8);
}
// Lane l has index first + l.
FUSEC_INLINE vi32 f_random_run(long long seed, long long first) {
  vu32 words = fusec_philox(seed, first >> 2);
  if (__builtin_expect(first & 3, 0)) {
    m_i32 both[2 * FUSEC_W];
    st_i32(both, (vi32)words);
    st_i32(both + FUSEC_W, (vi32)fusec_philox(seed, (first >> 2) + FUSEC_W / 4));
    words = (vu32)ld_i32(both + (first & 3));
  }
  return (vi32)(words >> 8);
}
#define FUSEC_TWICE_AND_ONE(l) 2 * (l) + 1
FUSEC_INLINE vi32 fusec_every_second(vi32 a, vi32 b, bool odd) {
  return odd ? FUSEC_SHUFFLE(a, b, vi32, FUSEC_LANES(FUSEC_TWICE_AND_ONE))
             : FUSEC_SHUFFLE(a, b, vi32, FUSEC_LANES(FUSEC_TWICE));
}
// Lane l has index first + odd + 2 * l, with first even; or first + which + 4 * l, with first a
// multiple of 4: for elements with 2 or 4 random numbers. Calls for one element share counters.
template <int odd> FUSEC_INLINE vi32 f_random_run2(long long seed, long long first) {
  return fusec_every_second(f_random_run(seed, first), f_random_run(seed, first + FUSEC_W), odd);
}
template <int which> FUSEC_INLINE vi32 f_random_run4(long long seed, long long first) {
  vi32 a = f_random_run2<which & 1>(seed, first);
  return fusec_every_second(a, f_random_run2<which & 1>(seed, first + 2 * FUSEC_W), which & 2);
}

// -- indices and errors ----------------------------------------------------------------------------

FUSEC_INLINE long long fusec_least(long long a, long long b) { return a < b ? a : b; }

// Memory of a program's own, aligned to a cache line: malloc's blocks start 16 bytes into one, and
// each second vector of theirs lies in two. The block's address is in front.
FUSEC_INLINE void *fusec_allocate(unsigned long long bytes) {
  char *block = (char *)__builtin_malloc(bytes + 64);
  char *start = block + 64 - (unsigned long long)block % 64;
  ((void **)start)[-1] = block;
  return start;
}
FUSEC_INLINE void fusec_free(void *start) { __builtin_free(((void **)start)[-1]); }
FUSEC_INLINE long long fusec_floordiv(long long a, long long b) {
  long long q = a / b;
  return q - (a % b != 0 && (a < 0) != (b < 0));
}
FUSEC_INLINE long long fusec_mod(long long a, long long b) { return a - b * fusec_floordiv(a, b); }
FUSEC_INLINE bool fusec_in_range(long long i, long long n) { return i >= 0 && i < n; }
FUSEC_INLINE vm fusec_in_range(vi64 i, long long n) {
  return f_ge(i, v_i64(0)) & f_lt(i, v_i64(n));
}
FUSEC_INLINE bool fusec_some(bool x) { return x; }
FUSEC_INLINE bool fusec_some(vm x) { return f_hany(x); }
// The lanes to read: wanted and in range. A wanted lane out of range sets *status.
template <class T> FUSEC_INLINE T fusec_checked(T ok, T wanted, int *status) {
  if (fusec_some(f_and(wanted, f_not(ok)))) *status = 1;
  return f_and(ok, wanted);
}
// A divisor; zero in any lane sets *status.
template <class T> FUSEC_INLINE T fusec_nonzero(T y, int *status) {
  if (__builtin_expect(fusec_some(f_eq(y, T{})), 0)) *status = 2;
  return y;
}
// A probability; one outside [0, 1] in any lane, or a NaN, sets *status.
template <class T> FUSEC_INLINE T fusec_probability(T x, int *status) {
  auto outside = f_not(f_and(f_ge(x, T{}), f_le(x, T{} + 1)));
  if (__builtin_expect(fusec_some(outside), 0)) *status = 3;
  return x;
}
// An index; one outside 0 <= k < n in any lane sets *status: either k or n - 1 - k is negative.
template <class T> FUSEC_INLINE T fusec_within(T k, T n, int *status) {
  if (__builtin_expect(fusec_some(f_lt(k | (n - 1 - k), T{})), 0)) *status = 1;
  return k;
}

// A pointer of any type, for a function that only passes it on.
struct any {
  void *address;
  template <class T> operator T *() const { return (T *)address; }
};
