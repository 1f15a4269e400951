// Floats of 8 bits in memory: they compute as vf32. Printed after prelude.h.
//
// FUSEC_FLOAT8(D, bits of the mantissa, bias, code of the largest number, of NaN, of what is too
// large, whether there is an infinity) defines ld_D, st_D and their kin, and round_D. The
// formats are those of `FloatFormat` in ir/dtype.py; conversions are on the bits, to nearest even.
// No intermediate number is subnormal: processors take a hundred cycles for one.

template <int M, unsigned bias, unsigned largest, unsigned nan, unsigned too_large, bool infinite>
struct fusec_float8 {
  static constexpr int dropped = 23 - M;
  static constexpr unsigned rebias = (127 - bias) << 23, implicit = 1u << 23;
  static constexpr unsigned sign_bit = M ? 0x80 : 0;
  static constexpr bool has_minus_zero = nan != sign_bit;

  FUSEC_INLINE vu32 code(vf32 x) {
    vu32 u = (vu32)x, magnitude = u & 0x7fffffff;
    // The last bit that is kept; without a mantissa it is the one that normal numbers leave out.
    vu32 last = M ? magnitude >> dropped & 1 : (vu32)(magnitude >= implicit) & 1;
    vu32 c = (magnitude + ((1u << (dropped - 1)) - 1) + last - rebias) >> dropped;
    if constexpr (M) {
      // Added to 2^23 times the least number, what is below the normal ones is a multiple of it.
      constexpr unsigned shift = (127 + 24 - bias - M) << 23;
      vu32 small = (vu32)((vf32)magnitude + (vf32)(vu32{} + shift)) - shift;
      c = magnitude < rebias + implicit ? small : c;
    }
    c = c > largest ? vu32{} + too_large : c;
    c = x != x ? vu32{} + nan : c;
    vu32 sign = u >> 24 & sign_bit;
    return c | (has_minus_zero ? sign : c != 0 ? sign : vu32{});
  }

  FUSEC_INLINE vf32 value(vu32 c) {
    if constexpr (!M) {
      vu32 u = c == 0 ? vu32{} + implicit / 2 : c << 23;
      return (vf32)(c == nan ? vu32{} + 0x7fc00000 : u);
    }
    vu32 m = c & 0x7f, u = (m << dropped) + rebias;
    // Below the normal numbers: m of the least, as the excess over the least normal number.
    vf32 small = (vf32)(u + implicit) - (vf32)(vu32{} + rebias + implicit);
    u = m < (1u << M) ? (vu32)small : u;
    vu32 above = vu32{} + (infinite ? 0x7f800000 : 0x7fc00000);
    if constexpr (has_minus_zero) u = m > largest ? above : u;
    if constexpr (infinite) u = m > largest + 1 ? vu32{} + 0x7fc00000 : u;
    if constexpr (!has_minus_zero) u = c == nan ? vu32{} + 0x7fc00000 : u;
    return (vf32)(u | (c & sign_bit) << 24);
  }
};

#define FUSEC_FLOAT8(D, ...)                                                            \
  typedef unsigned char m_##D;                                                          \
  typedef fusec_float8<__VA_ARGS__> fusec_##D;                                          \
  FUSEC_ACCESS(D, raw8, vf32, float, fusec_##D::value(fusec_words(r)),                  \
               fusec_bytes(fusec_##D::code(v)), fusec_##D::value(vu32{} + s)[0],        \
               (m_##D)fusec_##D::code(v_f32(v))[0])                                     \
  FUSEC_INLINE vf32 round_##D(vf32 x) { return fusec_##D::value(fusec_##D::code(x)); }  \
  FUSEC_INLINE float round_##D(float x) { return round_##D(v_f32(x))[0]; }
