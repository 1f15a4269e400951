// Numbers of 8 and 16 bits, and roundings that the processor's registers do not offer.

struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };


// Round to `digits` significant bits with exponents from `least` on; overflow is the caller's.
static double round_bits(double x, int digits, int least, int rounding) {
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent;
  std::frexp(x, &exponent);  // x = f * 2^exponent, f in [0.5, 1)
  int step = std::max(exponent - digits, least);
  double scaled = std::ldexp(x, -step);
  switch (rounding) {
    case RZ: scaled = std::trunc(scaled); break;
    case RM: scaled = std::floor(scaled); break;
    case RP: scaled = std::ceil(scaled); break;
    case RNA: scaled = std::round(scaled); break;
    default: scaled = std::nearbyint(scaled);
  }
  return std::ldexp(scaled == 0 ? std::copysign(0.0, x) : scaled, step);
}

static double overflowed(double x, double largest, int rounding) {
  if (!(std::fabs(x) > largest) || std::isinf(x)) return x;
  bool inward = rounding == RZ || (rounding == RM && x > 0) || (rounding == RP && x < 0);
  return std::copysign(inward ? largest : HUGE_VAL, x);
}

static float to_single(double x, int rounding) {
  if (rounding == RN) return (float)x;
  return (float)overflowed(round_bits(x, 24, -149, rounding), 3.4028234663852886e38, rounding);
}

static float value_of(Brain b) {
  uint32_t bits = (uint32_t)b.bits << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

static float value_of(Half h) {
  uint32_t sign = (uint32_t)(h.bits & 0x8000) << 16, body = h.bits & 0x7fff;
  if (body >= 0x7c00) {
    uint32_t bits = sign | 0x7f800000u | (body & 0x3ff) << 13;
    float f;
    memcpy(&f, &bits, 4);
    return f;
  }
  float size = body < 0x400 ? std::ldexp((float)body, -24)
                            : std::ldexp((float)(0x400 | (body & 0x3ff)), (int)(body >> 10) - 25);
  return sign ? -size : size;
}

static float value_of(float f) { return f; }
static double value_of(double f) { return f; }

static void round_to(double x, int rounding, float& out) { out = to_single(x, rounding); }
static void round_to(double x, int, double& out) { out = x; }

static void round_to(double x, int rounding, Brain& out) {
  if (std::isnan(x)) { out.bits = 0x7fff; return; }
  if (rounding == RN && (double)(float)x == x) {  // by far the most frequent case
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    out.bits = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    return;
  }
  float f = (float)overflowed(round_bits(x, 8, -133, rounding), 3.3895313892515355e38, rounding);
  uint32_t bits;
  memcpy(&bits, &f, 4);
  out.bits = (uint16_t)(bits >> 16);
}

static void round_to(double x, int rounding, Half& out) {
  uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) { out.bits = 0x7fff; return; }
  double size = std::fabs(overflowed(round_bits(x, 11, -24, rounding), 65504.0, rounding));
  int exponent;
  double fraction = std::frexp(size, &exponent);
  if (std::isinf(size)) out.bits = sign | 0x7c00;
  else if (size < 0x1p-14) out.bits = sign | (uint16_t)std::ldexp(size, 24);
  else out.bits = sign | (uint16_t)(((exponent + 14) << 10) + ((int)std::ldexp(fraction, 11) - 1024));
}

// 8 bits: e4m3 has no infinities, its largest number is 448; e5m2 is the upper half of a Half.
static float value_of_e4m3(uint8_t b) {
  int exponent = b >> 3 & 15, mantissa = b & 7;
  if ((b & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  float size = exponent ? std::ldexp((float)(8 + mantissa), exponent - 10)
                        : std::ldexp((float)mantissa, -9);
  return b & 0x80 ? -size : size;
}

static float value_of_e5m2(uint8_t b) { return value_of(Half{(uint16_t)(b << 8)}); }

static uint8_t round_to_e4m3(double x) {
  uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return 0x7f;
  double size = std::min(std::fabs(round_bits(x, 4, -9, RN)), 448.0);
  if (size < 0x1p-6) return sign | (uint8_t)std::ldexp(size, 9);
  int exponent;
  double fraction = std::frexp(size, &exponent);
  return sign | (uint8_t)(((exponent + 6) << 3) + ((int)std::ldexp(fraction, 4) - 8));
}

static uint8_t round_to_e5m2(double x) {
  Half h;
  if (std::isnan(x)) return 0x7f;
  double size = std::min(std::fabs(round_bits(x, 3, -16, RN)), 57344.0);
  round_to(std::copysign(size, x), RN, h);
  return (uint8_t)(h.bits >> 8);
}

// tf32 keeps 10 bits of the mantissa.
static float to_tf32(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits &= 0xffffe000u;
  memcpy(&x, &bits, 4);
  return x;
}

template <class T>
static T flush(T x) {
  return std::fabs(x) < std::numeric_limits<T>::min() ? std::copysign((T)0, x) : x;
}
