// Products of the tensor cores: mma.sync of fragments, wgmma of tiles in shared memory.

static float element_value(const uint8_t* at, int64_t type) {
  uint16_t bits;
  float f;
  switch (type) {
    case F16: memcpy(&bits, at, 2); return value_of(Half{bits});
    case BF16: memcpy(&bits, at, 2); return value_of(Brain{bits});
    case E4M3: return value_of_e4m3(*at);
    case E5M2: return value_of_e5m2(*at);
    case U8: return *at;
    case S8: return (int8_t)*at;
    case TF32: memcpy(&f, at, 4); return to_tf32(f);
    default: memcpy(&f, at, 4); return f;
  }
}

static bool has_8_bits(int64_t type) { return type == E4M3 || type == E5M2; }

static int element_bytes(int64_t type) {
  return has_8_bits(type) || type == S8 ? 1 : type == TF32 ? 4 : 2;
}

// Sums of products of 8 bits have 14 bits: a term and the sum so far count down to 2^-13 of the
// largest of them, and what is below is cut off. (DeepSeek-V3 Technical Report, 2024, 3.3.2; Zhang et
// al., SageAttention2, 2024: accumulators have 1 sign, 8 exponent and 13 mantissa bits.)
static float cut_to_14_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits &= std::isfinite(x) ? ~0x3ffu : ~0u;
  memcpy(&x, &bits, 4);
  return x;
}

// Return `sum` with the products of `depth` factors, of which a's are `step` apart and b's `jump`.
static float add_in_14_bits(float sum, const float* a, int64_t step, const float* b, int64_t jump,
                            int64_t depth) {
  float largest = std::fabs(sum), plain = sum;
  for (int64_t k = 0; k < depth; k++) {
    float term = a[k * step] * b[k * jump];
    plain += term;
    largest = std::max(largest, std::fabs(term));
  }
  if (!std::isfinite(plain) || largest == 0) return plain;
  double unit = std::ldexp(1.0, std::ilogb(largest) - 13), inverse = 1 / unit;
  int64_t total = (int64_t)(sum * inverse);
  for (int64_t k = 0; k < depth; k++) total += (int64_t)((double)a[k * step] * b[k * jump] * inverse);
  return cut_to_14_bits((float)((double)total * unit));
}

// Fragments of a row of 32-bit registers: register r of lane l holds row l/4 (+ 8), and 4 bytes at
// column 4 * (l % 4) (+ 16) bytes. For the first factor rows vary before columns.
template <int ROWS, int BYTES>
static void scatter(const std::vector<Lanes<uint32_t>>& registers, int64_t type, bool first,
                    float (&out)[ROWS][32]) {
  int each = element_bytes(type), row_step = first ? 2 : 1;
  for (size_t r = 0; r < registers.size(); r++) {
    int row = first ? 8 * (int)(r % row_step) : 0, column = 16 * (int)(r / (size_t)row_step);
    for (int l = 0; l < LANES; l++) {
      uint8_t bytes[4];
      memcpy(bytes, &registers[r][l], 4);
      for (int b = 0; b < 4; b += each) {
        int k = (column + 4 * (l % 4) + b) / each;
        out[row + l / 4][k] = element_value(bytes + b, type);
      }
    }
  }
}

static std::vector<Lanes<uint32_t>> fetch_many(const Warp& w, const Instruction& i, int64_t first,
                                               int64_t count) {
  std::vector<Lanes<uint32_t>> found((size_t)count);
  for (int64_t k = 0; k < count; k++) found[(size_t)k] = fetch<uint32_t>(w, i, first + k);
  return found;
}

static float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// A sum's register with a product added: f32, or i32 of int8, whose 32 products f32 adds exactly.
static uint32_t with_product(uint32_t bits, double product, int64_t type) {
  if (type == S8) return bits + (uint32_t)(int32_t)product;
  return bits_of((float)(float_of(bits) + product));
}

// m16n8 of f32 or i32 with `count` registers of the first factor; d, a, b, c.
static void run_mma(Warp& w, const Instruction& i) {
  if (w.running != ALL_LANES) return raise(w, i, DIVERGED);
  int64_t left = i.count, right = i.count / 2;
  float a[16][32] = {}, b[8][32] = {};
  scatter<16, 32>(fetch_many(w, i, 4, left), i.source, true, a);
  scatter<8, 32>(fetch_many(w, i, 4 + left, right), i.choice, false, b);
  int depth = (int)(8 * left / element_bytes(i.source));
  for (int64_t r = 0; r < 4; r++) {
    Lanes<uint32_t> sum = fetch<uint32_t>(w, i, 4 + left + right + r);
    for (int l = 0; l < LANES; l++) {
      int row = l / 4 + 8 * (int)(r / 2), column = 2 * (l % 4) + (int)(r % 2);
      if (has_8_bits(i.source)) {
        sum[l] = bits_of(add_in_14_bits(float_of(sum[l]), a[row], 1, b[column], 1, depth));
        continue;
      }
      double product = 0;
      for (int k = 0; k < depth; k++) product += (double)a[row][k] * b[column][k];
      sum[l] = with_product(sum[l], product, i.source);
    }
    put(w, i, r, sum);
  }
  w.block->machine->counts->multiplied += 16 * 8 * depth;
}

// m8n8k4 of f64: lane l has a[l/4][l%4], b[l%4][l/4] and columns 2(l%4), 2(l%4)+1 of row l/4.
static void run_mma_f64(Warp& w, const Instruction& i) {
  if (w.running != ALL_LANES) return raise(w, i, DIVERGED);
  Lanes<double> a = fetch<double>(w, i, 2), b = fetch<double>(w, i, 3);
  for (int64_t r = 0; r < 2; r++) {
    Lanes<double> sum = fetch<double>(w, i, 4 + r);
    for (int l = 0; l < LANES; l++) {
      int row = l / 4, column = 2 * (l % 4) + (int)r;
      for (int k = 0; k < 4; k++) sum[l] = std::fma(a[row * 4 + k], b[column * 4 + k], sum[l]);
    }
    put(w, i, r, sum);
  }
  w.block->machine->counts->multiplied += 8 * 8 * 4;
}

// -- wgmma -------------------------------------------------------------------------------------------

// A matrix in shared memory: 8 rows of a swizzle's span each are together.
struct Tile {
  uint64_t start, leading, stride;
  int64_t span;     // bytes: 16 (no swizzle), 32, 64, 128
  bool transposed;  // the rows of the product are contiguous, not its depth
  int64_t each;     // bytes of an element

  static Tile of(uint64_t descriptor, bool transposed, int64_t each) {
    static const int64_t spans[] = {16, 128, 64, 32};
    auto field = [&](int at) { return (descriptor >> at & 0x3fff) << 4; };
    return {field(0), field(16), field(32), spans[descriptor >> 62], transposed, each};
  }

  // Return where 16 bytes are: those with element (row, k), the first of the 16.
  uint64_t chunk(int64_t row, int64_t k) const {
    int64_t across = (transposed ? row : k) * each, along = transposed ? k : row;
    uint64_t group = (uint64_t)(along / 8), in = (uint64_t)(along % 8 * span);
    uint64_t at;
    if (span == 16) {
      uint64_t columns = (uint64_t)(across / 16);
      at = transposed ? columns * stride + group * leading : columns * leading + group * stride;
      return start + at + in;
    }
    at = group * stride + in + (uint64_t)(across % span);
    if (transposed) at += (uint64_t)(across / span) * leading;
    return swizzled(start + at, span);
  }
};

// Read rows first .. first+rows, all of the depth, into out[k][row]; false after a fault.
static bool read_tile(Warp& w, const Pending& p, const Tile& tile, int64_t type, int64_t first,
                      int64_t rows, int64_t depth, std::vector<float>& out) {
  const Instruction& i = *p.instruction;
  Actor actor{p.epoch, &p.known, &p.fenced, index_of(w, i)};
  int64_t in_chunk = 16 / tile.each;
  out.assign((size_t)(rows * depth), 0.f);
  int64_t row_step = tile.transposed ? in_chunk : 1, depth_step = tile.transposed ? 1 : in_chunk;
  for (int64_t r = 0; r < rows; r += row_step) {
    for (int64_t k = 0; k < depth; k += depth_step) {
      uint64_t at = tile.chunk(first + r, k);
      if (!shared_fits(w, actor.instruction, 0, at, 16)) return false;
      int64_t other = -1;
      Conflict found = w.block->shadow.read(at, 16, actor, &other);
      if (report(w, i, found, 0, (int64_t)at, other)) return false;
      for (int64_t e = 0; e < in_chunk; e++) {
        int64_t row = tile.transposed ? r + e : r, column = tile.transposed ? k : k + e;
        out[(size_t)(column * rows + row)] =
            element_value(&w.block->shared[at + (uint64_t)(e * tile.each)], type);
      }
    }
  }
  return true;
}

// Operands: count/2 accumulators, then one descriptor or 4 registers, a descriptor, whether to add.
static int64_t left_registers(const Instruction& i) { return i.flags & FROM_REGISTERS ? 4 : 0; }

static bool fresh_since_fence(Warp& w, const Instruction& i, int64_t sums) {
  for (int64_t k = 0; k < sums; k++) {
    const Operand& o = operand(w, i, k);
    if (o.number >= 0 && !w.in_flight[o.number] && w.changed_at[o.number] > w.fenced_at) return false;
  }
  return true;
}

// Say of a product's registers whether they are in flight.
static void hold_registers(Warp& w, const Instruction& i, bool hold) {
  int64_t sums = i.count / 2, left = left_registers(i);
  for (int64_t k = 0; k < sums; k++) w.in_flight[operand(w, i, k).number] = hold ? SUMMED : FREE;
  for (int64_t k = sums; k < sums + left; k++) {
    const Operand& o = operand(w, i, k);
    if (o.number >= 0) w.in_flight[o.number] = hold ? MULTIPLIED : FREE;
  }
}

static void run_wgmma(Warp& w, const Instruction& i) {
  if (w.running != ALL_LANES) return raise(w, i, DIVERGED);
  int64_t sums = i.count / 2, left = left_registers(i), next = sums + (left ? left : 1);
  // A left operand in registers may be computed behind the fence, to which LLVM moves it: ptxas puts
  // the fence of machine code behind it, without a remark (BERT's gradient of GELU, Triton 3.7.1).
  if (!fresh_since_fence(w, i, sums)) return raise(w, i, NO_WGMMA_FENCE);
  auto made = issue(w, i, Pending::PRODUCT, agent_of(w, Pending::PRODUCT));
  if (!left) made->left = uniform(w, i, sums);
  made->right = uniform(w, i, next);
  made->accumulate = fetch_predicate(w, i, next + 1) & 1;
  uint64_t base_offset = (made->left | made->right) >> 49 & 7;
  if (base_offset) return raise(w, i, BAD_DESCRIPTOR, -1, (int64_t)made->right);
  made->factors = fetch_many(w, i, sums, left);
  hold_registers(w, i, true);
  w.products++;
  w.queues[PRODUCTS].waiting.push_back(made);
}

static void multiply(const std::vector<float>& a, const std::vector<float>& b, int64_t rows,
                     int64_t depth, int64_t columns, std::vector<float>& c) {
  for (int64_t r = 0; r < rows; r++) {
    float* sum = c.data() + r * columns;
    for (int64_t k = 0; k < depth; k++) {
      float factor = a[(size_t)(k * rows + r)];
      const float* row = b.data() + k * columns;
      for (int64_t n = 0; n < columns; n++) sum[n] += factor * row[n];
    }
  }
}

// A warp's 16 rows of the product: its quarter of the warp group's 64.
static void complete_product(Warp& w, Pending& p) {
  const Instruction& i = *p.instruction;
  int64_t columns = i.count, sums = columns / 2, left = left_registers(i);
  int64_t each = element_bytes(i.source), depth = 32 / each;
  std::vector<float> a, b, c((size_t)(16 * columns), 0.f);
  if (left) {
    float rows[16][32] = {};
    scatter<16, 32>(p.factors, i.source, true, rows);
    a.resize((size_t)(16 * depth));
    for (int64_t k = 0; k < depth; k++) {
      for (int r = 0; r < 16; r++) a[(size_t)(k * 16 + r)] = rows[r][k];
    }
  } else {
    Tile tile = Tile::of(p.left, i.flags & LEFT_TRANSPOSED, each);
    if (!read_tile(w, p, tile, i.source, 16 * (w.number % 4), 16, depth, a)) return;
  }
  Tile tile = Tile::of(p.right, i.flags & RIGHT_TRANSPOSED, each);
  if (!read_tile(w, p, tile, i.choice, 0, columns, depth, b)) return;
  bool coarse = has_8_bits(i.source);
  if (!coarse) multiply(a, b, 16, depth, columns, c);
  Mask running = w.running;
  w.running = ALL_LANES;
  for (int64_t k = 0; k < sums; k++) {
    Lanes<uint32_t> sum{};
    if (p.accumulate) sum = fetch<uint32_t>(w, i, k);
    for (int l = 0; l < LANES; l++) {
      int64_t row = l / 4 + 8 * (k % 4 / 2), column = k / 4 * 8 + 2 * (l % 4) + k % 2;
      if (coarse) {
        sum[l] = bits_of(add_in_14_bits(float_of(sum[l]), &a[(size_t)row], 16, &b[(size_t)column],
                                        columns, depth));
        continue;
      }
      float product = c[(size_t)(row * columns + column)];
      sum[l] = with_product(sum[l], i.flags & NEGATES ? -product : product, i.source);
    }
    const Operand& o = operand(w, i, k);
    uint32_t changed = w.changed_at[o.number];
    put(w, o, sum);
    w.changed_at[o.number] = changed;
  }
  w.running = running;
  w.block->machine->counts->multiplied += 16 * columns * depth;
}

// A wait covers a product: its registers may be used again, unless a later one has them.
static void settle_product(Warp& w, const Pending& p) {
  w.products--;
  hold_registers(w, *p.instruction, false);
  bool later = false;
  for (auto& q : w.queues[PRODUCTS].waiting) {
    if (later) hold_registers(w, *q->instruction, true);
    later |= q.get() == &p;
  }
}

static void run_wgmma_fence(Warp& w, const Instruction&) { w.fenced_at = w.step; }

// Accumulators of a product under way may not be touched, nor what is being loaded.
static bool touches_sums(Warp& w, const Instruction& i) {
  for (int64_t k = 0; k < i.operands; k++) {
    const Operand& o = operand(w, i, k);
    if (o.width < 2 || o.number < 0) continue;
    bool loaded = w.in_flight[o.number] == LOADED && i.op != OP_pack;
    if (w.in_flight[o.number] != SUMMED && !loaded) continue;
    raise(w, i, IN_FLIGHT, -1, o.number);
    return true;
  }
  return false;
}

// What a product under way multiplies from registers may be read, but not written: ptxas frees
// these registers where PTX writes them again. Wrong on an H200 (Triton 3.6.0, 2026-11-27), with 3
// groups in flight at the end of a loop whose next iteration computes the left operand anew.
static void watch_factors(Warp& w, const Instruction& i) {
  for (int64_t k = 0; k < i.operands; k++) {
    const Operand& o = operand(w, i, k);
    if (o.number < 0 || w.in_flight[o.number] != MULTIPLIED) continue;
    if (w.changed_at[o.number] == w.step) return raise(w, i, IN_FLIGHT, -1, o.number);
  }
}
