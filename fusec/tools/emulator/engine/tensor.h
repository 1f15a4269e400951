// Tensor memory and its products (tcgen05, Blackwell's data centers): one block, no pair of blocks.
//
// A block has 128 lanes of 512 columns of 32 bits, which it allocates by columns. A warp reaches the
// 32 lanes of its quarter. Loads and stores end where their warp waits for them; a product ends where
// somebody waits for the mbarrier to which its thread commits it. What of this overlaps without such
// a wait is a race.

static TensorMemory& tensor_of(Warp& w) {
  auto& memory = w.block->tensor;
  if (!memory) memory = std::make_shared<TensorMemory>();
  return *memory;
}

static int64_t lane_of(uint64_t address) { return (int64_t)(address >> 16 & 0xffff); }
static int64_t column_of(uint64_t address) { return (int64_t)(address & 0xffff); }

// Check that cells exist and that nothing races with this access to them; false after a fault.
static bool tensor_access(Warp& w, const Actor& actor, int64_t lane, int64_t column, int64_t count,
                          bool writes) {
  TensorMemory& memory = tensor_of(w);
  int64_t address = lane << 16 | column, other = -1;
  bool inside = lane < TENSOR_LANES && column + count <= TENSOR_COLUMNS;
  for (int64_t c = column; inside && c < column + count; c++) inside = memory.held[(size_t)c] > 0;
  if (!inside) {
    raise_at(w, actor.instruction, TENSOR_BOUNDS, -1, address, count);
    return false;
  }
  static const std::array<uint8_t, TENSOR_COLUMNS> old{}, fresh = [] {
    std::array<uint8_t, TENSOR_COLUMNS> ones;
    ones.fill(1);
    return ones;
  }();
  size_t first = (size_t)(lane * TENSOR_COLUMNS + column);
  Conflict found = writes
      ? memory.shadow.write(first, (size_t)count, actor, old.data(), fresh.data(), &other)
      : memory.shadow.read(first, (size_t)count, actor, &other);
  if (found == FINE) return true;
  int code = found == UNINITIALISED ? TENSOR_UNINITIALISED : TENSOR_RACE;
  raise_at(w, actor.instruction, code, -1, address, 0, other);
  return false;
}

static uint32_t* tensor_cells(Warp& w, int64_t lane, int64_t column) {
  return &tensor_of(w).cells[(size_t)(lane * TENSOR_COLUMNS + column)];
}

// -- allocation --------------------------------------------------------------------------------------

static bool are_free(const TensorMemory& memory, int64_t first, int64_t count) {
  for (int64_t c = first; c < first + count; c++) {
    if (memory.held[(size_t)c]) return false;
  }
  return true;
}

// where to store the address, offset, columns; waits where there are too few
static void run_tensor_alloc(Warp& w, const Instruction& i) {
  if (w.running != w.live) return raise(w, i, DIVERGED);
  TensorMemory& memory = tensor_of(w);
  int64_t count = (int64_t)uniform(w, i, 2);
  bool legal = 32 <= count && count <= TENSOR_COLUMNS && !(count & (count - 1));
  if (!legal || memory.relinquished) return raise(w, i, TENSOR_ALLOCATION, -1, -1, count);
  std::vector<int64_t> places;
  for (int64_t c = 0; c < TENSOR_COLUMNS; c += count) {
    if (are_free(memory, c, count)) places.push_back(c);
  }
  w.polling = places.empty();
  w.polled_at = w.block->happened;
  if (w.polling) return;
  uint32_t first = (uint32_t)places[w.block->machine->next() % places.size()];
  uint64_t at = addresses(w, i, 0)[first_lane(w.running)] & 0xffffffffu;
  uint8_t fresh[4];
  memcpy(fresh, &first, 4);
  uint8_t* to = shared_bytes(w, i, first_lane(w.running), at, 4, fresh);
  if (!to) return;
  memcpy(to, fresh, 4);
  for (int64_t c = first; c < first + count; c++) memory.held[(size_t)c] = count;
  memory.allocated[first] = index_of(w, i);
}

// address, columns: those of an allocation, which nothing uses any more
static void run_tensor_dealloc(Warp& w, const Instruction& i) {
  if (w.running != w.live) return raise(w, i, DIVERGED);
  TensorMemory& memory = tensor_of(w);
  int64_t first = column_of(uniform(w, i, 0)), count = (int64_t)uniform(w, i, 1);
  if (!memory.allocated.count(first) || memory.held[(size_t)first] != count) {
    return raise(w, i, TENSOR_ALLOCATION, -1, first, count);
  }
  Actor actor = generic_actor(w, i);
  for (int64_t l = 0; l < TENSOR_LANES; l++) {
    if (!tensor_access(w, actor, l, first, count, true)) return;
    memory.shadow.set_object((size_t)(l * TENSOR_COLUMNS + first), (size_t)count, false, 0);
  }
  for (int64_t c = first; c < first + count; c++) memory.held[(size_t)c] = 0;
  memory.allocated.erase(first);
  w.block->happened++;
}

static void run_tensor_relinquish(Warp& w, const Instruction&) { tensor_of(w).relinquished = true; }

// -- loads and stores --------------------------------------------------------------------------------

// Lane l has a row of the warp's quarter; of half as many rows lanes from 16 on have other columns.
struct TensorPlace {
  int64_t lane, column;
  static TensorPlace of(uint64_t address, int l, bool halved, int64_t apart) {
    int64_t lane = lane_of(address), column = column_of(address);
    return halved ? TensorPlace{lane + l % 16, column + l / 16 * apart}
                  : TensorPlace{lane + l, column};
  }
};

static bool in_quarter(Warp& w, const Instruction& i, uint64_t address) {
  if (w.running != ALL_LANES) return raise(w, i, DIVERGED), false;
  if (lane_of(address) / 32 == w.number % 4 && lane_of(address) % (i.choice ? 16 : 32) == 0) return true;
  raise(w, i, TENSOR_BOUNDS, -1, (int64_t)address, i.count);
  return false;
}

// An access of a warp: its engine's, of which the warp knows only when it has waited.
static Actor tensor_actor(Warp& w, const Instruction& i, Pending::Kind kind) {
  int agent = agent_of(w, kind);
  return {Epoch{(uint32_t)agent, ++w.block->async_times[(size_t)agent]}, &w.known, nullptr,
          index_of(w, i)};
}

// What nobody wrote is loaded before loops without an iteration, and goes to nobody: it is a NaN.
constexpr uint32_t POISON = 0x7fffffff;

static bool is_written(Warp& w, int64_t lane, int64_t column, int64_t count) {
  TensorMemory& memory = tensor_of(w);
  if (lane >= TENSOR_LANES || column + count > TENSOR_COLUMNS) return true;  // a fault, as here:
  if (are_free(memory, column, count)) return true;
  return memory.shadow.is_written((size_t)(lane * TENSOR_COLUMNS + column), (size_t)count);
}

static void hold_loaded(Warp& w, const Operand& o) {
  if (o.number < 0) return;
  if (w.loaded.empty()) w.products++;
  w.loaded.push_back(o.number);
  w.in_flight[o.number] = LOADED;
}

// `count` registers, address, offset, columns between the halves
static void run_tensor_load(Warp& w, const Instruction& i) {
  uint64_t address = addresses(w, i, i.count)[0];
  if (!in_quarter(w, i, address)) return;
  Actor actor = tensor_actor(w, i, Pending::TENSOR_LOAD);
  int64_t apart = operand(w, i, i.count + 2).value;
  std::vector<Lanes<uint32_t>> values((size_t)i.count);
  for (int l = 0; l < LANES; l++) {
    TensorPlace at = TensorPlace::of(address, l, i.choice, apart);
    bool written = is_written(w, at.lane, at.column, i.count);
    if (written && !tensor_access(w, actor, at.lane, at.column, i.count, false)) return;
    const uint32_t* cells = tensor_cells(w, at.lane, at.column);
    for (int64_t k = 0; k < i.count; k++) values[(size_t)k][l] = written ? cells[k] : POISON;
  }
  for (int64_t k = 0; k < i.count; k++) {
    const Operand& o = operand(w, i, k);
    put(w, o, values[(size_t)k]);
    hold_loaded(w, o);
  }
}

// Two registers that become one of twice the width, which LLVM writes before the wait, are no
// instruction of the machine: the pair is in flight.
static void pass_on_loaded(Warp& w, const Instruction& i) {
  if (i.op != OP_pack) return;
  for (int64_t k = 1; k < i.operands; k++) {
    const Operand& o = operand(w, i, k);
    if (o.number >= 0 && w.in_flight[o.number] == LOADED) return hold_loaded(w, operand(w, i, 0));
  }
}

// address, offset, columns between the halves, `count` registers
static void run_tensor_store(Warp& w, const Instruction& i) {
  uint64_t address = addresses(w, i, 0)[0];
  if (!in_quarter(w, i, address)) return;
  Actor actor = tensor_actor(w, i, Pending::TENSOR_STORE);
  int64_t apart = operand(w, i, 2).value;
  std::vector<Lanes<uint32_t>> values = fetch_many(w, i, 3, i.count);
  for (int l = 0; l < LANES; l++) {
    TensorPlace at = TensorPlace::of(address, l, i.choice, apart);
    if (!tensor_access(w, actor, at.lane, at.column, i.count, true)) return;
    uint32_t* cells = tensor_cells(w, at.lane, at.column);
    for (int64_t k = 0; k < i.count; k++) cells[k] = values[(size_t)k][l];
  }
}

static void tensor_wait(Warp& w, Pending::Kind kind) {
  size_t agent = (size_t)agent_of(w, kind);
  w.known.times[agent] = w.block->async_times[agent];
}

static void run_tensor_wait_load(Warp& w, const Instruction&) {
  tensor_wait(w, Pending::TENSOR_LOAD);
  if (!w.loaded.empty()) w.products--;
  for (int64_t number : w.loaded) w.in_flight[number] = FREE;
  w.loaded.clear();
}

static void run_tensor_wait_store(Warp& w, const Instruction&) { tensor_wait(w, Pending::TENSOR_STORE); }

// -- products ----------------------------------------------------------------------------------------

// What the 32 bits of an instruction's descriptor say of a product; `kind` is a type of factors.
struct Shape {
  int64_t rows, columns;
  bool left_transposed, right_transposed, left_negated, right_negated;
  int64_t left, right;              // types
  int64_t left_scale, right_scale;  // the first byte of four that a column of scales has
  int64_t scale;                    // their type
  bool known;

  static int64_t type_of(uint32_t code, int64_t kind) {
    switch (kind) {
      case F16: return code == 0 ? F16 : code == 1 ? BF16 : -1;
      case TF32: return code == 2 ? TF32 : -1;
      case E2M1: return code == 1 ? E2M1 : -1;
      default: return code == 0 ? E4M3 : code == 1 ? E5M2 : -1;
    }
  }

  static Shape of(const Instruction& i, uint32_t bits) {
    auto field = [&](int at, int width) { return (int64_t)(bits >> at & ((1u << width) - 1)); };
    bool scaled = i.count > 0;
    Shape s{};
    s.rows = scaled ? field(27, 2) << 7 : field(24, 5) << 4;
    s.columns = field(17, 6) << 3;
    s.left_negated = field(13, 1), s.right_negated = field(14, 1);
    s.left_transposed = field(15, 1), s.right_transposed = field(16, 1);
    s.left = type_of((uint32_t)field(7, 3), i.source), s.right = type_of((uint32_t)field(10, 3), i.source);
    if (scaled) s.left_scale = field(29, 2), s.right_scale = field(4, 2);
    s.scale = field(23, 1) ? UE8M0 : UE4M3;
    bool plain = scaled ? !field(0, 4) && !field(31, 1)  // dense
                        : !field(0, 4) && field(4, 2) == 1 && !field(30, 2);  // and sums in f32
    s.known = plain && (s.rows == 128 || (s.rows == 64 && !scaled)) && 0 < s.columns &&
              s.columns <= 256 && s.left >= 0 && s.right >= 0;
    return s;
  }

  // Return the lane of a row, counted from the address's: 64 rows take half of each quarter.
  int64_t lane(int64_t row) const { return rows == 64 ? row / 16 * 32 + row % 16 : row; }
};

// sums, offset, left (with an offset in tensor memory), right, shape, [both scales with offsets,]
// whether to add; `count`: scales of a row
static void run_tensor_mma(Warp& w, const Instruction& i) {
  int64_t next = i.flags & FROM_TENSOR ? 4 : 3;
  for (Mask lanes = w.running; lanes; lanes &= lanes - 1) {
    int l = first_lane(lanes);
    auto made = issue(w, i, Pending::TENSOR_PRODUCT, agent_of(w, Pending::PRODUCT));
    made->target[0] = addresses(w, i, 0)[l];
    made->left = i.flags & FROM_TENSOR ? addresses(w, i, 2)[l] : fetch<uint64_t>(w, i, 2)[l];
    made->right = fetch<uint64_t>(w, i, next)[l];
    made->bytes[0] = fetch<uint32_t>(w, i, next + 1)[l];
    if (i.count) {
      for (int k = 0; k < 2; k++) made->origin[(size_t)k] = addresses(w, i, next + 2 + 2 * k)[l];
    }
    made->accumulate = fetch_predicate(w, i, i.operands - 1) >> l & 1;
    if (!Shape::of(i, made->bytes[0]).known) return raise(w, i, UNSUPPORTED, l);
    w.queues[PRODUCTS].waiting.push_back(made);
  }
}

// Read a factor of 32 bytes of each row from shared memory.
static bool read_factor(Warp& w, const Pending& p, uint64_t descriptor, int64_t type,
                        bool transposed, int64_t rows, std::vector<float>& out) {
  if (descriptor >> 49 & 7 || (descriptor >> 61 & 1)) {
    raise(w, *p.instruction, BAD_DESCRIPTOR, -1, (int64_t)descriptor);
    return false;
  }
  if (type != E2M1) {
    int64_t each = element_bytes(type);
    return read_tile(w, p, Tile::of(descriptor, transposed, each), type, 0, rows, 32 / each, out);
  }
  std::vector<float> pairs;
  if (!read_tile(w, p, Tile::of(descriptor, false, 1), U8, 0, rows, 32, pairs)) return false;
  out.resize((size_t)(64 * rows));
  for (int64_t k = 0; k < 64; k++) {
    for (int64_t r = 0; r < rows; r++) {
      int pair = (int)pairs[(size_t)(k / 2 * rows + r)];
      out[(size_t)(k * rows + r)] = value_of_e2m1(k % 2 ? pair >> 4 : pair & 15);
    }
  }
  return true;
}

static bool read_left(Warp& w, const Pending& p, const Shape& shape, int64_t depth,
                      std::vector<float>& out) {
  const Instruction& i = *p.instruction;
  if (!(i.flags & FROM_TENSOR)) {
    return read_factor(w, p, p.left, shape.left, shape.left_transposed, shape.rows, out);
  }
  int64_t each = element_bytes(shape.left);
  Actor actor{p.epoch, &p.known, nullptr, index_of(w, i)};
  out.assign((size_t)(shape.rows * depth), 0.f);
  for (int64_t r = 0; r < shape.rows; r++) {
    int64_t lane = lane_of(p.left) + shape.lane(r), column = column_of(p.left);
    if (!tensor_access(w, actor, lane, column, depth * each / 4, false)) return false;
    const uint8_t* bytes = (const uint8_t*)tensor_cells(w, lane, column);
    for (int64_t k = 0; k < depth; k++) {
      out[(size_t)(k * shape.rows + r)] = element_value(bytes + k * each, shape.left);
    }
  }
  return true;
}

// Multiply rows by their scales: those of row r are in lane r % 32 of column r / 32, from a byte on.
static bool scale_factor(Warp& w, const Pending& p, int k, int64_t byte, int64_t type, int64_t rows,
                         int64_t depth, std::vector<float>& values) {
  const Instruction& i = *p.instruction;
  Actor actor{p.epoch, &p.known, nullptr, index_of(w, i)};
  for (int64_t r = 0; r < rows; r++) {
    int64_t lane = lane_of(p.origin[(size_t)k]) + r % 32, column = column_of(p.origin[(size_t)k]) + r / 32;
    if (!tensor_access(w, actor, lane, column, 1, false)) return false;
    uint32_t scales = *tensor_cells(w, lane, column);
    for (int64_t t = 0; t < depth; t++) {
      int64_t at = byte + t * i.count / depth;
      values[(size_t)(t * rows + r)] *= (float)scale_of((uint8_t)(scales >> 8 * (at & 3)), type);
    }
  }
  return true;
}

static void complete_tensor_product(Warp& w, Pending& p) {
  const Instruction& i = *p.instruction;
  Shape shape = Shape::of(i, p.bytes[0]);
  int64_t depth = shape.left == E2M1 ? 64 : 32 / element_bytes(shape.left);
  std::vector<float> a, b, sums((size_t)(shape.rows * shape.columns), 0.f);
  if (!read_left(w, p, shape, depth, a)) return;
  if (!read_factor(w, p, p.right, shape.right, shape.right_transposed, shape.columns, b)) return;
  if (i.count) {
    if (!scale_factor(w, p, 0, shape.left_scale, shape.scale, shape.rows, depth, a)) return;
    if (!scale_factor(w, p, 1, shape.right_scale, shape.scale, shape.columns, depth, b)) return;
  }
  multiply(a, b, shape.rows, depth, shape.columns, sums);
  bool negates = shape.left_negated != shape.right_negated;
  Actor actor{p.epoch, &p.known, nullptr, index_of(w, i)};
  for (int64_t r = 0; r < shape.rows; r++) {
    int64_t lane = lane_of(p.target[0]) + shape.lane(r), column = column_of(p.target[0]);
    if (p.accumulate && !tensor_access(w, actor, lane, column, shape.columns, false)) return;
    if (!tensor_access(w, actor, lane, column, shape.columns, true)) return;
    float* cells = (float*)tensor_cells(w, lane, column);
    const float* row = &sums[(size_t)(r * shape.columns)];
    for (int64_t c = 0; c < shape.columns; c++) {
      float product = negates ? -row[c] : row[c];
      cells[c] = p.accumulate ? cells[c] + product : product;
    }
  }
  w.block->machine->counts->multiplied += shape.rows * shape.columns * depth;
}

// Forget products that a commit covers which has arrived.
static void drop_committed(Warp& w) {
  auto& waiting = w.queues[PRODUCTS].waiting;
  for (size_t k = waiting.size(); k > 0; k--) {
    if (waiting[k - 1]->kind != Pending::ARRIVE || !waiting[k - 1]->done) continue;
    waiting.erase(waiting.begin(), waiting.begin() + (std::ptrdiff_t)k);
    return;
  }
}

// The mbarrier learns when all products before this that the thread has issued are done.
static void run_tensor_commit(Warp& w, const Instruction& i) {
  drop_committed(w);
  for (Mask lanes = w.running; lanes; lanes &= lanes - 1) {
    int l = first_lane(lanes);
    uint32_t object = (uint32_t)addresses(w, i, 0)[l];
    if (!find_mbarrier(w, i, object)) return;
    auto made = issue(w, i, Pending::ARRIVE, agent_of(w, Pending::PRODUCT));
    made->origin[0] = object;
    made->lanes = 1u << l;
    w.queues[PRODUCTS].waiting.push_back(made);
  }
}

// What is allocated has to be given back before the block ends.
static void check_tensor_memory(Block& block) {
  if (!block.tensor) return;
  for (auto& [column, instruction] : block.tensor->allocated) {
    raise_at(block.warps[0], instruction, TENSOR_LEAK, -1, column,
             block.tensor->held[(size_t)column]);
  }
}
