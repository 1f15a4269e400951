// Floating arithmetic, comparisons and conversions.

template <class F>
static void with_float(int64_t type, F f) {
  switch (type) {
    case F16: f(Half{}); break;
    case BF16: f(Brain{}); break;
    case F64: f(double{}); break;
    default: f(float{});
  }
}

// What f32 and f64 are computed in; 16-bit numbers are computed in f64 and rounded once.
template <class T>
using Work = std::conditional_t<std::is_same_v<T, float>, float, double>;

template <class T>
static T finished(Work<T> x, const Instruction& i) {
  if (i.flags & FTZ) x = flush(x);
  if (i.flags & SAT) x = x > 0 ? std::min<Work<T>>(x, 1) : 0;
  T out;
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) out = x;
  else round_to(x, RN, out);
  return out;
}

template <class T>
static Work<T> started(T x, const Instruction& i) {
  Work<T> value = value_of(x);
  return i.flags & FTZ ? flush(value) : value;
}

// Sums in f32 may take all but their last term in 16 bits, of the type `source`.
template <class T>
static Lanes<T> fetch_term(const Warp& w, const Instruction& i, int64_t k) {
  if (i.source == 0 || k + 1 == i.operands) return fetch<T>(w, i, k);
  Lanes<uint16_t> bits = fetch<uint16_t>(w, i, k);
  Lanes<T> out;
  for (int l = 0; l < LANES; l++) {
    float value = i.source == F16 ? value_of(Half{bits[l]}) : value_of(Brain{bits[l]});
    if constexpr (std::is_same_v<T, float>) out[l] = value;
  }
  return out;
}

// d = f(a, b, c) for one type; packed pairs are two such operations.
template <class T, class F>
static void floats(Warp& w, const Instruction& i, F f) {
  Lanes<T> a = fetch_term<T>(w, i, 1), b{}, c{}, d;
  if (i.operands > 2) b = fetch_term<T>(w, i, 2);
  if (i.operands > 3) c = fetch_term<T>(w, i, 3);
  for (int l = 0; l < LANES; l++) {
    d[l] = finished<T>(f(started(a[l], i), started(b[l], i), started(c[l], i)), i);
  }
  put(w, i, 0, d);
}

template <class T, class F>
static void packed_floats(Warp& w, const Instruction& i, F f) {
  Lanes<uint32_t> in[3]{}, out{};
  for (int64_t k = 1; k < i.operands; k++) in[k - 1] = fetch<uint32_t>(w, i, k);
  for (int l = 0; l < LANES; l++) {
    for (int half = 0; half < 32; half += 16) {
      double x[3];
      for (int k = 0; k < 3; k++) x[k] = started(T{(uint16_t)(in[k][l] >> half)}, i);
      out[l] |= (uint32_t)finished<T>(f(x[0], x[1], x[2]), i).bits << half;
    }
  }
  put(w, i, 0, out);
}

template <class F>
static void packed_singles(Warp& w, const Instruction& i, F f) {
  Lanes<std::array<float, 2>> in[3]{}, out;
  for (int64_t k = 1; k < i.operands; k++) {
    Lanes<uint64_t> bits = fetch<uint64_t>(w, i, k);
    memcpy(&in[k - 1], &bits, sizeof(bits));
  }
  for (int l = 0; l < LANES; l++) {
    for (int h = 0; h < 2; h++) {
      float x[3];
      for (int k = 0; k < 3; k++) x[k] = started(in[k][l][h], i);
      out[l][h] = finished<float>(f(x[0], x[1], x[2]), i);
    }
  }
  Lanes<uint64_t> bits;
  memcpy(&bits, &out, sizeof(bits));
  put(w, i, 0, bits);
}

template <class F>
static void float_op(Warp& w, const Instruction& i, F f) {
  if (i.type == F32X2) return packed_singles(w, i, f);
  if (i.type == F16X2) return packed_floats<Half>(w, i, f);
  if (i.type == BF16X2) return packed_floats<Brain>(w, i, f);
  with_float(i.type, [&](auto tag) { floats<decltype(tag)>(w, i, f); });
}

// An f32 sum with a rounding of its own: the sum in f64 and what that lost say which way to go.
static float directed(double a, double b, int64_t rounding) {
  double sum = a + b, part = sum - a, lost = (a - (sum - part)) + (b - part);
  float near = (float)sum;
  bool above = near > sum || (near == sum && lost < 0);
  bool below = near < sum || (near == sum && lost > 0);
  bool down = rounding == RM || (rounding == RZ && near > 0);
  bool up = rounding == RP || (rounding == RZ && near < 0);
  if (down && above) return std::nextafterf(near, -HUGE_VALF);
  if (up && below) return std::nextafterf(near, HUGE_VALF);
  return near;
}

template <class F>
static void directed_op(Warp& w, const Instruction& i, F f) {
  floats<float>(w, i, [&](float a, float b, float c) {
    auto [x, y] = f((double)a, (double)b, (double)c);
    return directed(x, y, i.choice);
  });
}

using Terms = std::pair<double, double>;

static void run_fadd(Warp& w, const Instruction& i) {
  if (i.choice != RN) {
    return directed_op(w, i, [](double a, double b, double) { return Terms{a, b}; });
  }
  float_op(w, i, [](auto a, auto b, auto) { return a + b; });
}
static void run_fsub(Warp& w, const Instruction& i) {
  if (i.choice != RN) {
    return directed_op(w, i, [](double a, double b, double) { return Terms{a, -b}; });
  }
  float_op(w, i, [](auto a, auto b, auto) { return a - b; });
}
static void run_fmul(Warp& w, const Instruction& i) {
  if (i.choice != RN) {
    return directed_op(w, i, [](double a, double b, double) { return Terms{a * b, 0}; });
  }
  float_op(w, i, [](auto a, auto b, auto) { return a * b; });
}
static void run_ffma(Warp& w, const Instruction& i) {
  if (i.choice != RN) {
    return directed_op(w, i, [](double a, double b, double c) { return Terms{a * b, c}; });
  }
  float_op(w, i, [](auto a, auto b, auto c) { return std::fma(a, b, c); });
}
static void run_fdiv(Warp& w, const Instruction& i) {
  float_op(w, i, [](auto a, auto b, auto) { return a / b; });
}
static void run_fneg(Warp& w, const Instruction& i) {
  float_op(w, i, [](auto a, auto, auto) { return -a; });
}
static void run_fabs(Warp& w, const Instruction& i) {
  float_op(w, i, [](auto a, auto, auto) { return std::fabs(a); });
}
static void run_copysign(Warp& w, const Instruction& i) {  // the sign comes from the first
  float_op(w, i, [](auto a, auto b, auto) { return std::copysign(b, a); });
}
static void run_sqrt(Warp& w, const Instruction& i) {
  float_op(w, i, [](auto a, auto, auto) { return std::sqrt(a); });
}
static void run_rsqrt(Warp& w, const Instruction& i) {
  float_op(w, i, [](auto a, auto, auto) { return (decltype(a))(1 / std::sqrt((double)a)); });
}
static void run_rcp(Warp& w, const Instruction& i) {
  float_op(w, i, [](auto a, auto, auto) { return 1 / a; });
}
static void run_ex2(Warp& w, const Instruction& i) {
  float_op(w, i, [](auto a, auto, auto) { return std::exp2(a); });
}
static void run_lg2(Warp& w, const Instruction& i) {
  float_op(w, i, [](auto a, auto, auto) { return std::log2(a); });
}
static void run_sin(Warp& w, const Instruction& i) {
  float_op(w, i, [](auto a, auto, auto) { return std::sin(a); });
}
static void run_cos(Warp& w, const Instruction& i) {
  float_op(w, i, [](auto a, auto, auto) { return std::cos(a); });
}
static void run_tanh(Warp& w, const Instruction& i) {
  float_op(w, i, [](auto a, auto, auto) { return std::tanh(a); });
}

// The other operand wins over a NaN, unless the operation keeps NaNs. There may be three of them.
template <class F>
static void extremum(Warp& w, const Instruction& i, F better) {
  bool keeps = i.flags & NANS;
  auto of_two = [&](auto a, auto b) {
    if (std::isnan(a) || std::isnan(b)) {
      if (keeps) return std::numeric_limits<decltype(a)>::quiet_NaN();
      return std::isnan(a) ? b : a;
    }
    if (a == b) return better(std::copysign(1, a), std::copysign(1, b)) ? a : b;
    return better(a, b) ? a : b;
  };
  float_op(w, i, [&](auto a, auto b, auto c) {
    return i.operands > 3 ? of_two(of_two(a, b), c) : of_two(a, b);
  });
}
static void run_fmin(Warp& w, const Instruction& i) {
  extremum(w, i, [](auto a, auto b) { return a < b; });
}
static void run_fmax(Warp& w, const Instruction& i) {
  extremum(w, i, [](auto a, auto b) { return a > b; });
}

// -- comparisons -------------------------------------------------------------------------------------

template <class T>
static bool compares(T a, T b, int64_t choice) {
  switch (choice) {
    case EQ: return a == b;
    case NE: return a < b || a > b;
    case LT: return a < b;
    case LE: return a <= b;
    case GT: return a > b;
    case GE: return a >= b;
    case EQU: return !(a < b || a > b);
    case NEU: return !(a == b);
    case LTU: return !(a >= b);
    case LEU: return !(a > b);
    case GTU: return !(a <= b);
    case GEU: return !(a < b);
    case NUM: return a == a && b == b;
    default: return a != a || b != b;  // UNORDERED
  }
}

template <class T>
static void compare_pairs(Warp& w, const Instruction& i, Mask& low, Mask& high) {
  Lanes<uint32_t> a = fetch<uint32_t>(w, i, 2), b = fetch<uint32_t>(w, i, 3);
  auto compared = [&](int l, int half) {
    auto x = started(T{(uint16_t)(a[l] >> half)}, i), y = started(T{(uint16_t)(b[l] >> half)}, i);
    return (Mask)compares(x, y, i.choice) << l;
  };
  for (int l = 0; l < LANES; l++) low |= compared(l, 0), high |= compared(l, 16);
}

// The second result is the opposite, or of pairs that of the high halves; a third argument is
// combined as `count` says.
static void run_setp(Warp& w, const Instruction& i) {
  Mask found = 0, other = 0;
  auto compare = [&](auto tag) {
    using T = decltype(tag);
    Lanes<T> a = fetch<T>(w, i, 2), b = fetch<T>(w, i, 3);
    for (int l = 0; l < LANES; l++) {
      if constexpr (std::is_integral_v<T>) found |= (Mask)compares(a[l], b[l], i.choice) << l;
      else found |= (Mask)compares(started(a[l], i), started(b[l], i), i.choice) << l;
    }
  };
  if (i.type == F16X2) compare_pairs<Half>(w, i, found, other);
  else if (i.type == BF16X2) compare_pairs<Brain>(w, i, found, other);
  else {
    if (i.type < F16) with_integer(i.type, compare);
    else with_float(i.type, compare);
    other = ~found;
  }
  if (i.operands > 4) {
    Mask c = fetch_predicate(w, i, 4);
    auto combine = [&](Mask m) { return i.count == 1 ? m & c : i.count == 2 ? m | c : m ^ c; };
    found = combine(found), other = combine(other);
  }
  put_predicate(w, i, 0, found);
  put_predicate(w, i, 1, other);
}

static void run_testp(Warp& w, const Instruction& i) {
  Mask found = 0;
  with_float(i.type, [&](auto tag) {
    using T = decltype(tag);
    Lanes<T> a = fetch<T>(w, i, 1);
    for (int l = 0; l < LANES; l++) {
      auto x = value_of(a[l]);
      bool yes = i.choice == 0 ? std::isfinite(x) : i.choice == 1 ? std::isinf(x) : std::isnan(x);
      found |= (Mask)yes << l;
    }
  });
  put_predicate(w, i, 0, found);
}

// -- conversions -------------------------------------------------------------------------------------

static double rounded_to_integer(double x, int64_t rounding) {
  switch (rounding) {
    case RZ: return std::trunc(x);
    case RM: return std::floor(x);
    case RP: return std::ceil(x);
    default: return std::nearbyint(x);
  }
}

template <class T>
static T saturated(double x) {
  if (std::isnan(x)) return 0;
  // The bounds of 64 bits are no doubles: compare with powers of two.
  double top = std::ldexp(1.0, (int)(8 * sizeof(T)) - std::is_signed_v<T>);
  if (x >= top) return std::numeric_limits<T>::max();
  if (x < (std::is_signed_v<T> ? -top : 0.0)) return std::numeric_limits<T>::min();
  return (T)x;
}

template <class To, class From>
static To converted(From value, const Instruction& i) {
  if constexpr (std::is_integral_v<From> && std::is_integral_v<To>) {
    if (!(i.flags & SAT)) return (To)value;
    using Limits = std::numeric_limits<To>;
    if ((__int128)value > (__int128)Limits::max()) return Limits::max();
    return (__int128)value < (__int128)Limits::min() ? Limits::min() : (To)value;
  } else if constexpr (std::is_integral_v<From>) {
    To out;
    if constexpr (std::is_same_v<To, float>) {
      if (i.choice == RN) return (float)value;
    }
    round_to((double)value, (int)i.choice, out);
    return out;
  } else {
    double x = value_of(value);
    if (i.flags & FTZ && std::fabs(x) < 0x1p-126) x = std::copysign(0.0, x);
    if constexpr (std::is_integral_v<To>) {
      return saturated<To>(rounded_to_integer(x, i.choice));
    } else {
      if (i.flags & TO_INTEGER) x = rounded_to_integer(x, i.choice);
      if (i.flags & SAT) x = x > 0 ? std::min(x, 1.0) : 0;
      if (i.flags & RELU) x = x > 0 || std::isnan(x) ? x : 0;
      To out;
      round_to(x, i.flags & TO_INTEGER ? RN : (int)i.choice, out);
      return out;
    }
  }
}

template <class F>
static void with_any(int64_t type, F f) {
  if (type < F16) with_integer(type, f);
  else with_float(type, f);
}

static void run_cvt(Warp& w, const Instruction& i) {
  with_any(i.source, [&](auto from) {
    using From = decltype(from);
    Lanes<From> a = fetch<From>(w, i, 1);
    with_any(i.type, [&](auto to) {
      using To = decltype(to);
      Lanes<To> d;
      for (int l = 0; l < LANES; l++) d[l] = converted<To, From>(a[l], i);
      put(w, i, 0, d);
    });
  });
}

template <class T>
static uint16_t pair_bits(double x, const Instruction& i) {
  if (i.flags & RELU && x < 0) x = 0;
  T out;
  round_to(x, (int)i.choice, out);
  return out.bits;
}

// Two f32 become a pair, the first one its upper half.
static void run_cvt_pair(Warp& w, const Instruction& i) {
  Lanes<float> high = fetch<float>(w, i, 1), low = fetch<float>(w, i, 2);
  Lanes<uint32_t> d;
  for (int l = 0; l < LANES; l++) {
    auto bits = [&](float x) -> uint32_t {
      switch (i.type) {
        case F16X2: return pair_bits<Half>(x, i);
        case BF16X2: return pair_bits<Brain>(x, i);
        case E4M3X2: return round_to_e4m3(x);
        default: return round_to_e5m2(x);
      }
    };
    int half = i.type == F16X2 || i.type == BF16X2 ? 16 : 8;
    d[l] = bits(high[l]) << half | bits(low[l]);
  }
  put(w, i, 0, d);
}

static void run_cvt_from_fp8(Warp& w, const Instruction& i) {
  Lanes<uint16_t> a = fetch<uint16_t>(w, i, 1);
  Lanes<uint32_t> d;
  auto value = i.source == E4M3X2 ? value_of_e4m3 : value_of_e5m2;
  for (int l = 0; l < LANES; l++) {
    d[l] = (uint32_t)pair_bits<Half>(value((uint8_t)(a[l] >> 8)), i) << 16 |
           pair_bits<Half>(value((uint8_t)a[l]), i);
  }
  put(w, i, 0, d);
}

static void run_cvt_tf32(Warp& w, const Instruction& i) {
  Lanes<float> a = fetch<float>(w, i, 1), d;
  for (int l = 0; l < LANES; l++) d[l] = (float)round_bits(a[l], 11, -136, (int)i.choice);
  put(w, i, 0, d);
}
