// Integer arithmetic, logic, moves and comparisons.

template <class F>
static void with_integer(int64_t type, F f) {
  switch (type) {
    case U8: f(uint8_t{}); break;
    case S8: f(int8_t{}); break;
    case U16: f(uint16_t{}); break;
    case S16: f(int16_t{}); break;
    case U32: f(uint32_t{}); break;
    case S32: f(int32_t{}); break;
    case U64: f(uint64_t{}); break;
    default: f(int64_t{});
  }
}

// d = f(a, b), lane by lane, of both halves of registers.
template <class T, class F>
static void packed_pairs(Warp& w, const Instruction& i, F f) {
  Lanes<uint32_t> a = fetch<uint32_t>(w, i, 1), b = fetch<uint32_t>(w, i, 2), d;
  for (int l = 0; l < LANES; l++) {
    uint16_t low = (uint16_t)f((T)a[l], (T)b[l]);
    uint16_t high = (uint16_t)f((T)(a[l] >> 16), (T)(b[l] >> 16));
    d[l] = low | (uint32_t)high << 16;
  }
  put(w, i, 0, d);
}

// d = f(a, b), lane by lane.
template <class F>
static void integer_pairs(Warp& w, const Instruction& i, F f) {
  if (i.type == U16X2) return packed_pairs<uint16_t>(w, i, f);
  if (i.type == S16X2) return packed_pairs<int16_t>(w, i, f);
  with_integer(i.type, [&](auto tag) {
    using T = decltype(tag);
    Lanes<T> a = fetch<T>(w, i, 1), b = fetch<T>(w, i, 2), d;
    for (int l = 0; l < LANES; l++) d[l] = (T)f(a[l], b[l]);
    put(w, i, 0, d);
  });
}

template <class F>
static void integer_each(Warp& w, const Instruction& i, F f) {
  with_integer(i.type, [&](auto tag) {
    using T = decltype(tag);
    Lanes<T> a = fetch<T>(w, i, 1), d;
    for (int l = 0; l < LANES; l++) d[l] = (T)f(a[l]);
    put(w, i, 0, d);
  });
}

// The sum of two terms and a carry, and whether it overflows its type as an unsigned number.
static void add_with_carry(Warp& w, const Instruction& i, bool subtract) {
  with_integer(i.type, [&](auto tag) {
    using T = Bits<decltype(tag)>;
    Lanes<T> a = fetch<T>(w, i, 1), b = fetch<T>(w, i, 2), d;
    Mask carry = 0;
    for (int l = 0; l < LANES; l++) {
      unsigned in = i.flags & CARRY_IN ? w.carry >> l & 1 : 0;
      unsigned __int128 sum = subtract ? (unsigned __int128)a[l] - b[l] - in
                                       : (unsigned __int128)a[l] + b[l] + in;
      d[l] = (T)sum;
      carry |= (Mask)(sum >> (8 * sizeof(T)) & 1) << l;
    }
    put(w, i, 0, d);
    if (i.flags & CARRY_OUT) w.carry = (w.carry & ~w.running) | (carry & w.running);
  });
}

static void run_iadd(Warp& w, const Instruction& i) {
  if (i.flags & (CARRY_IN | CARRY_OUT)) return add_with_carry(w, i, false);
  integer_pairs(w, i, [](auto a, auto b) { return (Bits<decltype(a)>)a + (Bits<decltype(b)>)b; });
}
static void run_isub(Warp& w, const Instruction& i) {
  if (i.flags & (CARRY_IN | CARRY_OUT)) return add_with_carry(w, i, true);
  integer_pairs(w, i, [](auto a, auto b) { return (Bits<decltype(a)>)a - (Bits<decltype(b)>)b; });
}
static void run_imin(Warp& w, const Instruction& i) {
  integer_pairs(w, i, [](auto a, auto b) { return a < b ? a : b; });
}
static void run_imax(Warp& w, const Instruction& i) {
  integer_pairs(w, i, [](auto a, auto b) { return a > b ? a : b; });
}
static void run_idiv(Warp& w, const Instruction& i) {
  integer_pairs(w, i, [](auto a, auto b) {
    using T = decltype(a);
    if (b == 0) return (T)-1;
    if (std::is_signed_v<T> && b == (T)-1) return (T)(0 - (Bits<T>)a);
    return (T)(a / b);
  });
}
static void run_irem(Warp& w, const Instruction& i) {
  integer_pairs(w, i, [](auto a, auto b) {
    using T = decltype(a);
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == (T)-1) return (T)0;
    return (T)(a % b);
  });
}
static void run_ineg(Warp& w, const Instruction& i) {
  integer_each(w, i, [](auto a) { return 0 - (Bits<decltype(a)>)a; });
}
static void run_iabs(Warp& w, const Instruction& i) {
  integer_each(w, i, [](auto a) { return a < 0 ? 0 - (Bits<decltype(a)>)a : (Bits<decltype(a)>)a; });
}
static void run_popc(Warp& w, const Instruction& i) {
  Lanes<uint64_t> a = fetch<uint64_t>(w, i, 1);
  Lanes<uint32_t> d;
  for (int l = 0; l < LANES; l++) d[l] = (uint32_t)__builtin_popcountll(a[l]);
  put(w, i, 0, d);
}
static void run_clz(Warp& w, const Instruction& i) {
  Lanes<uint64_t> a = fetch<uint64_t>(w, i, 1);
  Lanes<uint32_t> d;
  uint32_t bits = i.type == U64 ? 64 : 32;
  for (int l = 0; l < LANES; l++) {
    d[l] = a[l] ? (uint32_t)__builtin_clzll(a[l]) - (64 - bits) : bits;
  }
  put(w, i, 0, d);
}
static void run_brev(Warp& w, const Instruction& i) {
  integer_each(w, i, [](auto a) {
    Bits<decltype(a)> in = (Bits<decltype(a)>)a, out = 0;
    for (size_t k = 0; k < 8 * sizeof(a); k++) out = (Bits<decltype(a)>)(out << 1 | (in >> k & 1));
    return out;
  });
}

// -- products ----------------------------------------------------------------------------------------

// The low, the high or both halves of a product, and what a mad adds to it.
static void run_imul(Warp& w, const Instruction& i) {
  with_integer(i.type, [&](auto tag) {
    using T = decltype(tag);
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    Lanes<T> a = fetch<T>(w, i, 1), b = fetch<T>(w, i, 2), d;
    Lanes<uint64_t> c{}, whole;
    if (i.operands > 3) c = fetch<uint64_t>(w, i, 3);
    Mask carry = 0;
    for (int l = 0; l < LANES; l++) {
      Wide product = (Wide)a[l] * (Wide)b[l];
      Bits<T> half = (Bits<T>)(i.flags & HIGH ? product >> (8 * sizeof(T)) : product);
      unsigned in = i.flags & CARRY_IN ? w.carry >> l & 1 : 0;
      unsigned __int128 sum = (unsigned __int128)half + (Bits<T>)c[l] + in;
      d[l] = (T)sum;
      carry |= (Mask)(sum >> (8 * sizeof(T)) & 1) << l;
      whole[l] = (uint64_t)product + c[l];
    }
    if (i.flags & WIDE) put(w, i, 0, whole);
    else put(w, i, 0, d);
    if (i.flags & CARRY_OUT) w.carry = (w.carry & ~w.running) | (carry & w.running);
  });
}

// -- bits --------------------------------------------------------------------------------------------

template <class F>
static void predicate_pairs(Warp& w, const Instruction& i, F f) {
  Mask a = fetch_predicate(w, i, 1), b = i.operands > 2 ? fetch_predicate(w, i, 2) : 0;
  put_predicate(w, i, 0, f(a, b));
}

template <class F>
static void logic(Warp& w, const Instruction& i, F f) {
  if (i.type == PRED) return predicate_pairs(w, i, f);
  integer_pairs(w, i, f);
}

static void run_and(Warp& w, const Instruction& i) {
  logic(w, i, [](auto a, auto b) { return a & b; });
}
static void run_or(Warp& w, const Instruction& i) {
  logic(w, i, [](auto a, auto b) { return a | b; });
}
static void run_xor(Warp& w, const Instruction& i) {
  logic(w, i, [](auto a, auto b) { return a ^ b; });
}
static void run_not(Warp& w, const Instruction& i) {
  if (i.type == PRED) return predicate_pairs(w, i, [](Mask a, Mask) { return ~a; });
  integer_each(w, i, [](auto a) { return ~a; });
}

template <class F>
static void shift(Warp& w, const Instruction& i, F f) {
  Lanes<uint32_t> by = fetch<uint32_t>(w, i, 2);
  with_integer(i.type, [&](auto tag) {
    using T = decltype(tag);
    Lanes<T> a = fetch<T>(w, i, 1), d;
    for (int l = 0; l < LANES; l++) d[l] = (T)f(a[l], by[l]);
    put(w, i, 0, d);
  });
}
static void run_shl(Warp& w, const Instruction& i) {
  shift(w, i, [](auto a, uint32_t n) {
    return n < 8 * sizeof(a) ? (Bits<decltype(a)>)((Bits<decltype(a)>)a << n) : 0;
  });
}
static void run_shr(Warp& w, const Instruction& i) {
  shift(w, i, [](auto a, uint32_t n) {
    using T = decltype(a);
    if (n < 8 * sizeof(a)) return (T)(a >> n);
    return std::is_signed_v<T> && a < 0 ? (T)-1 : (T)0;
  });
}

// Shift a pair of words; `flags` says to the right, and whether the amount wraps at 32.
static void run_shf(Warp& w, const Instruction& i) {
  Lanes<uint32_t> low = fetch<uint32_t>(w, i, 1), high = fetch<uint32_t>(w, i, 2);
  Lanes<uint32_t> by = fetch<uint32_t>(w, i, 3), d;
  for (int l = 0; l < LANES; l++) {
    uint64_t pair = (uint64_t)high[l] << 32 | low[l];
    uint32_t n = i.flags & WRAP ? by[l] & 31 : std::min(by[l], 32u);
    d[l] = i.flags & RIGHT ? (uint32_t)(pair >> n) : (uint32_t)(pair >> (32 - n));
  }
  put(w, i, 0, d);
}

static void run_bfe(Warp& w, const Instruction& i) {
  Lanes<uint32_t> start = fetch<uint32_t>(w, i, 2), length = fetch<uint32_t>(w, i, 3);
  with_integer(i.type, [&](auto tag) {
    using T = decltype(tag);
    constexpr int BITS = 8 * sizeof(T);
    Lanes<T> a = fetch<T>(w, i, 1), d;
    for (int l = 0; l < LANES; l++) {
      int from = start[l] & 255, n = length[l] & 255;
      int last = std::min(from + n - 1, BITS - 1);
      bool sign = std::is_signed_v<T> && n && ((uint64_t)a[l] >> last & 1);
      uint64_t bits = sign ? ~0ull : 0;
      for (int k = 0; k < n && k < BITS; k++) {
        if (from + k >= BITS) break;
        uint64_t bit = (uint64_t)a[l] >> (from + k) & 1;
        bits = (bits & ~(1ull << k)) | bit << k;
      }
      d[l] = (T)bits;
    }
    put(w, i, 0, d);
  });
}

static void run_bfi(Warp& w, const Instruction& i) {
  Lanes<uint32_t> start = fetch<uint32_t>(w, i, 3), length = fetch<uint32_t>(w, i, 4);
  Lanes<uint64_t> a = fetch<uint64_t>(w, i, 1), b = fetch<uint64_t>(w, i, 2), d;
  int bits = i.type == U64 ? 64 : 32;
  for (int l = 0; l < LANES; l++) {
    int from = start[l] & 255, n = length[l] & 255;
    d[l] = b[l];
    for (int k = 0; k < n && from + k < bits; k++) {
      d[l] = (d[l] & ~(1ull << (from + k))) | (a[l] >> k & 1) << (from + k);
    }
  }
  put(w, i, 0, d);
}

static void run_prmt(Warp& w, const Instruction& i) {
  Lanes<uint32_t> a = fetch<uint32_t>(w, i, 1), b = fetch<uint32_t>(w, i, 2);
  Lanes<uint32_t> select = fetch<uint32_t>(w, i, 3), d;
  for (int l = 0; l < LANES; l++) {
    uint64_t pair = (uint64_t)b[l] << 32 | a[l];
    d[l] = 0;
    for (int k = 0; k < 4; k++) {
      uint32_t nibble = select[l] >> (4 * k) & 15;
      uint8_t byte = (uint8_t)(pair >> (8 * (nibble & 7)));
      if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
      d[l] |= (uint32_t)byte << (8 * k);
    }
  }
  put(w, i, 0, d);
}

static void run_lop3(Warp& w, const Instruction& i) {
  Lanes<uint32_t> a = fetch<uint32_t>(w, i, 1), b = fetch<uint32_t>(w, i, 2);
  Lanes<uint32_t> c = fetch<uint32_t>(w, i, 3), d{};
  uint32_t table = (uint32_t)uniform(w, i, 4);
  for (int k = 0; k < 8; k++) {
    if (!(table >> k & 1)) continue;
    for (int l = 0; l < LANES; l++) {
      d[l] |= (k & 4 ? a[l] : ~a[l]) & (k & 2 ? b[l] : ~b[l]) & (k & 1 ? c[l] : ~c[l]);
    }
  }
  put(w, i, 0, d);
}

// -- moves -------------------------------------------------------------------------------------------

// A value that moves is as old as it was: LLVM copies registers behind a wgmma.fence, and ptxas has
// one register for both (attention's backward in 64 rows, Triton 3.7.1).
static void run_mov(Warp& w, const Instruction& i) {
  if (i.type == PRED) return put_predicate(w, i, 0, fetch_predicate(w, i, 1));
  with_integer(i.type, [&](auto tag) { put(w, i, 0, fetch<decltype(tag)>(w, i, 1)); });
  int64_t to = operand(w, i, 0).number, from = operand(w, i, 1).number;
  if (to >= 0 && from >= 0) w.changed_at[to] = w.changed_at[from];
}

// One register becomes `count` narrower ones, the lowest bits first.
static void run_unpack(Warp& w, const Instruction& i) {
  Lanes<uint64_t> whole = fetch<uint64_t>(w, i, i.count);
  int bits = (int)(i.choice / i.count);
  for (int64_t k = 0; k < i.count; k++) {
    if (operand(w, i, k).width == 0) continue;  // the sink "_"
    Lanes<uint64_t> part;
    for (int l = 0; l < LANES; l++) part[l] = whole[l] >> (bits * k) & ((1ull << bits) - 1);
    put(w, i, k, part);
  }
}

static void run_pack(Warp& w, const Instruction& i) {
  Lanes<uint64_t> whole{};
  int bits = (int)(i.choice / i.count);
  for (int64_t k = 0; k < i.count; k++) {
    Lanes<uint64_t> part = fetch<uint64_t>(w, i, 1 + k);
    for (int l = 0; l < LANES; l++) whole[l] |= (part[l] & ((1ull << bits) - 1)) << (bits * k);
  }
  put(w, i, 0, whole);
}

static void run_selp(Warp& w, const Instruction& i) {
  Mask chosen = fetch_predicate(w, i, 3);
  with_integer(i.type, [&](auto tag) {
    using T = decltype(tag);
    Lanes<T> a = fetch<T>(w, i, 1), b = fetch<T>(w, i, 2);
    for (int l = 0; l < LANES; l++) a[l] = chosen >> l & 1 ? a[l] : b[l];
    put(w, i, 0, a);
  });
}
