// Loads and stores of each space, atomics, and copies of 8 x 8 tiles to and from shared memory.

// Return where bytes of global memory lie after all checks, or null after a fault; `fresh` is what
// will be written there, null for an atomic; `known` is what who touches them knew at issue.
static uint8_t* global_bytes(Warp& w, int64_t instruction, int lane, uint64_t address,
                             uint64_t bytes, bool writes, const uint8_t* fresh,
                             const Clock& known) {
  Machine& machine = *w.block->machine;
  if (!may_go_on(*w.block, known)) {
    raise_at(w, instruction, EARLY_ACCESS, lane, (int64_t)address, (int64_t)bytes);
    return nullptr;
  }
  const Launch& launch = *machine.launch;
  const Buffer* end = launch.buffers + launch.buffer_count;
  const Buffer* after = std::upper_bound(
      launch.buffers, end, address, [](uint64_t a, const Buffer& b) { return a < b.base; });
  // Views of one tensor overlap: any of them will do.
  for (const Buffer* b = after; b != launch.buffers;) {
    b--;
    if (address + bytes <= b->base + b->size) {
      size_t buffer = (size_t)(b - launch.buffers);
      int64_t other = -1;
      bool raced = writes ? machine.shadow.write(buffer, address, bytes, w.block->number,
                                                 instruction, fresh, &other)
                          : machine.shadow.read(buffer, address, bytes, w.block->number, &other);
      if (!raced) return (uint8_t*)address;
      raise_at(w, instruction, BLOCK_RACE, lane, (int64_t)address, (int64_t)bytes, other);
      return nullptr;
    }
    if (after - b > 64) break;
  }
  raise_at(w, instruction, OUT_OF_BOUNDS, lane, (int64_t)address, (int64_t)bytes);
  return nullptr;
}

static uint8_t* local_bytes(Warp& w, const Instruction& i, int lane, uint64_t address,
                            uint64_t bytes) {
  uint64_t each = (uint64_t)w.block->machine->launch->local_bytes;
  uint64_t at = address & 0xffffffffu;
  if (at < 16 || at + bytes > each + 16) {
    raise(w, i, LOCAL_BOUNDS, lane, (int64_t)at, (int64_t)bytes);
    return nullptr;
  }
  return w.local.data() + lane * each + at - 16;
}

static bool shared_fits(Warp& w, int64_t instruction, int lane, uint64_t address, uint64_t bytes) {
  if (address >= SHARED_BASE && address + bytes <= w.block->shared.size()) return true;
  raise_at(w, instruction, SHARED_BOUNDS, lane, (int64_t)address, (int64_t)bytes);
  return false;
}

// Return where a lane's bytes of shared memory lie after all checks, or null after a fault; `fresh`
// is what will be written there, null for a read.
static uint8_t* shared_bytes(Warp& w, const Instruction& i, int lane, uint64_t address,
                             uint64_t bytes, const uint8_t* fresh) {
  if (!shared_fits(w, index_of(w, i), lane, address, bytes)) return nullptr;
  Shadow& shadow = w.block->shadow;
  Actor actor = generic_actor(w, i);
  int64_t other = -1;
  uint8_t* place = w.block->shared.data() + address;
  Conflict found = fresh ? shadow.write(address, bytes, actor, place, fresh, &other)
                         : shadow.read(address, bytes, actor, &other);
  return report(w, i, found, lane, (int64_t)address, other) ? nullptr : place;
}

static uint8_t* param_bytes(Warp& w, const Instruction& i, uint64_t address, uint64_t bytes) {
  const Launch& launch = *w.block->machine->launch;
  uint64_t at = address & ~PARAM_WINDOW;
  if (at + bytes > (uint64_t)launch.param_bytes) {
    raise(w, i, OUT_OF_BOUNDS, 0, (int64_t)address, (int64_t)bytes);
    return nullptr;
  }
  return const_cast<uint8_t*>(launch.params) + at;
}

static uint8_t* place_of(Warp& w, const Instruction& i, int lane, uint64_t address, uint64_t bytes,
                         const uint8_t* fresh) {
  int64_t space = i.choice;
  if (space == GENERIC) {
    space = address & PARAM_WINDOW ? PARAM
            : address & LOCAL_WINDOW ? LOCAL
            : address & SHARED_WINDOW ? SHARED : GLOBAL;
  }
  if (space == SHARED) address &= 0xffffffffu;
  if (address % bytes) {
    raise(w, i, MISALIGNED, lane, (int64_t)address, (int64_t)bytes);
    return nullptr;
  }
  Counts& counts = *w.block->machine->counts;
  switch (space) {
    case SHARED:
      (fresh ? counts.shared_stored : counts.shared_loaded) += (int64_t)bytes;
      return shared_bytes(w, i, lane, address, bytes, fresh);
    case LOCAL: return local_bytes(w, i, lane, address, bytes);
    case PARAM: return param_bytes(w, i, address, bytes);
    default:
      (fresh ? counts.global_stored : counts.global_loaded) += (int64_t)bytes;
      return global_bytes(w, index_of(w, i), lane, address, bytes, fresh != nullptr,
                          i.op == OP_atom ? nullptr : fresh, w.known);
  }
}

static Lanes<uint64_t> addresses(const Warp& w, const Instruction& i, int64_t k) {
  Lanes<uint64_t> a = fetch<uint64_t>(w, i, k);
  int64_t offset = operand(w, i, k + 1).value;
  for (int l = 0; l < LANES; l++) a[l] += (uint64_t)offset;
  return a;
}

// `count` registers, then the address and its offset.
static void run_ld(Warp& w, const Instruction& i) {
  Lanes<uint64_t> at = addresses(w, i, i.count);
  with_any(i.type, [&](auto tag) {
    using T = decltype(tag);
    std::array<Lanes<T>, 8> values{};
    uint64_t bytes = sizeof(T) * (uint64_t)i.count;
    for (int l = 0; l < LANES; l++) {
      if (!(w.running >> l & 1)) continue;
      const uint8_t* from = place_of(w, i, l, at[l], bytes, nullptr);
      if (!from) return;
      for (int64_t k = 0; k < i.count; k++) memcpy(&values[k][l], from + k * sizeof(T), sizeof(T));
    }
    for (int64_t k = 0; k < i.count; k++) put(w, i, k, values[k]);
  });
}

// The address and its offset, then `count` values.
static void run_st(Warp& w, const Instruction& i) {
  Lanes<uint64_t> at = addresses(w, i, 0);
  with_any(i.type, [&](auto tag) {
    using T = decltype(tag);
    std::array<Lanes<T>, 8> values;
    for (int64_t k = 0; k < i.count; k++) values[k] = fetch<T>(w, i, 2 + k);
    uint64_t bytes = sizeof(T) * (uint64_t)i.count;
    for (int l = 0; l < LANES; l++) {
      if (!(w.running >> l & 1)) continue;
      uint8_t fresh[64];
      for (int64_t k = 0; k < i.count; k++) memcpy(fresh + k * sizeof(T), &values[k][l], sizeof(T));
      uint8_t* to = place_of(w, i, l, at[l], bytes, fresh);
      if (!to) return;
      memcpy(to, fresh, bytes);
    }
  });
}

// -- atomics -----------------------------------------------------------------------------------------

template <class T>
static T atomic_result(T old, T b, T c, const Instruction& i) {
  if constexpr (std::is_integral_v<T>) {
    switch (i.count) {
      case ATOMIC_ADD: return (T)(old + b);
      case ATOMIC_MIN: return std::min(old, b);
      case ATOMIC_MAX: return std::max(old, b);
      case ATOMIC_AND: return old & b;
      case ATOMIC_OR: return old | b;
      case ATOMIC_XOR: return old ^ b;
      case ATOMIC_CAS: return old == b ? c : old;
      default: return b;  // exch
    }
  } else {
    if (i.count != ATOMIC_ADD) return b;
    return finished<T>(started(old, i) + started(b, i), i);
  }
}

// [the old values,] the address and its offset, the values; `flags` says whether there are results,
// `source` how many neighbours a lane has.
static void run_atom(Warp& w, const Instruction& i) {
  int64_t n = i.source, first = i.flags & RETURNS ? n : 0;
  Lanes<uint64_t> at = addresses(w, i, first);
  with_any(i.type, [&](auto tag) {
    using T = decltype(tag);
    std::array<Lanes<T>, 4> b{}, old{};
    Lanes<T> c{};
    for (int64_t k = 0; k < n; k++) b[k] = fetch<T>(w, i, first + 2 + k);
    if (i.count == ATOMIC_CAS) c = fetch<T>(w, i, first + 3);
    for (int l = 0; l < LANES; l++) {
      if (!(w.running >> l & 1)) continue;
      uint8_t unknown[32] = {};
      uint8_t* to = place_of(w, i, l, at[l], sizeof(T) * (uint64_t)n, unknown);
      if (!to) return;
      for (int64_t k = 0; k < n; k++) {
        memcpy(&old[k][l], to + k * sizeof(T), sizeof(T));
        T fresh = atomic_result(old[k][l], b[k][l], c[l], i);
        memcpy(to + k * sizeof(T), &fresh, sizeof(T));
      }
    }
    for (int64_t k = 0; k < first; k++) put(w, i, k, old[k]);
  });
}

// -- tiles -------------------------------------------------------------------------------------------

// Return the row of a tile, 16 bytes, whose address a lane has; arguments as of `shared_bytes`.
static uint8_t* row_of_tile(Warp& w, const Instruction& i, const Lanes<uint64_t>& at, int lane,
                            const uint8_t* fresh) {
  uint64_t address = at[lane] & 0xffffffffu;
  if (address % 16 == 0) return shared_bytes(w, i, lane, address, 16, fresh);
  raise(w, i, MISALIGNED, lane, (int64_t)address, 16);
  return nullptr;
}

// Lane 8j + r has the address of row r of tile j; lane l holds elements 2(l%4), 2(l%4)+1 of row l/4.
static void run_ldmatrix(Warp& w, const Instruction& i) {
  if (w.running != ALL_LANES) return raise(w, i, DIVERGED);
  Lanes<uint64_t> at = addresses(w, i, i.count);
  w.block->machine->counts->shared_loaded += 128 * i.count;
  for (int64_t j = 0; j < i.count; j++) {
    uint16_t tile[8][8];
    for (int r = 0; r < 8; r++) {
      const uint8_t* row = row_of_tile(w, i, at, (int)(8 * j + r), nullptr);
      if (!row) return;
      memcpy(tile[r], row, 16);
    }
    Lanes<uint32_t> d;
    for (int l = 0; l < LANES; l++) {
      int r = l / 4, c = 2 * (l % 4);
      uint32_t low = i.flags & TRANSPOSED ? tile[c][r] : tile[r][c];
      uint32_t high = i.flags & TRANSPOSED ? tile[c + 1][r] : tile[r][c + 1];
      d[l] = low | high << 16;
    }
    put(w, i, j, d);
  }
}

// Tiles of 16 x 16 bytes, turned: lane 8j + r has the address of row r of the tile of registers j and
// j + 1, of which lane l holds rows 4(l%4) to 4(l%4) + 3 of columns l/4 and l/4 + 8.
static void run_ldmatrix_b8(Warp& w, const Instruction& i) {
  if (w.running != ALL_LANES) return raise(w, i, DIVERGED);
  Lanes<uint64_t> at = addresses(w, i, i.count);
  w.block->machine->counts->shared_loaded += 128 * i.count;
  for (int64_t j = 0; j < i.count; j += 2) {
    uint8_t tile[16][16];
    for (int r = 0; r < 16; r++) {
      const uint8_t* row = row_of_tile(w, i, at, (int)(8 * j + r), nullptr);
      if (!row) return;
      memcpy(tile[r], row, 16);
    }
    for (int64_t half = 0; half < 2; half++) {
      Lanes<uint32_t> d{};
      for (int l = 0; l < LANES; l++) {
        for (int b = 0; b < 4; b++) {
          d[l] |= (uint32_t)tile[4 * (l % 4) + b][l / 4 + 8 * half] << (8 * b);
        }
      }
      put(w, i, j + half, d);
    }
  }
}

static void run_stmatrix(Warp& w, const Instruction& i) {
  if (w.running != ALL_LANES) return raise(w, i, DIVERGED);
  Lanes<uint64_t> at = addresses(w, i, 0);
  w.block->machine->counts->shared_stored += 128 * i.count;
  for (int64_t j = 0; j < i.count; j++) {
    Lanes<uint32_t> a = fetch<uint32_t>(w, i, 2 + j);
    uint16_t tile[8][8];
    for (int l = 0; l < LANES; l++) {
      int r = l / 4, c = 2 * (l % 4);
      (i.flags & TRANSPOSED ? tile[c][r] : tile[r][c]) = (uint16_t)a[l];
      (i.flags & TRANSPOSED ? tile[c + 1][r] : tile[r][c + 1]) = (uint16_t)(a[l] >> 16);
    }
    for (int r = 0; r < 8; r++) {
      const uint8_t* fresh = (const uint8_t*)tile[r];
      uint8_t* row = row_of_tile(w, i, at, (int)(8 * j + r), fresh);
      if (!row) return;
      memcpy(row, fresh, 16);
    }
  }
}
