// A warp, its block and the launch: state, registers, faults.

struct Warp;
struct Block;

// One asynchronous operation, from its issue until a wait covers it. It takes effect at a random
// point in between, all at once.
struct Pending {
  enum Kind {
    COPY, PRODUCT, BULK_LOAD, BULK_STORE, ARRIVE, TENSOR_PRODUCT, TENSOR_LOAD, TENSOR_STORE
  } kind;
  const Instruction* instruction;
  Clock known, fenced;  // of the issuer, at issue
  Epoch epoch;
  Mask lanes;
  bool done = false;
  bool committed = false;
  int64_t group = 0;  // its commit group's number
  Lanes<uint64_t> target{}, origin{};
  Lanes<uint32_t> bytes{};
  const TensorMap* map = nullptr;
  std::array<int64_t, 5> at{};
  uint64_t left = 0, right = 0;  // descriptors of a product
  std::vector<Lanes<uint32_t>> factors;  // a product's first factor, if in registers
  bool accumulate = true;
};

// Lanes that go on from here when those before them have reached their meeting.
struct Path {
  int64_t pc, meeting;
  Mask lanes;
};

// The asynchronous operations of one kind that a warp has issued.
struct Queue {
  std::vector<std::shared_ptr<Pending>> waiting;
  int64_t committed = 0;  // groups
};

static_assert(QUEUES == 3, "a queue for each kind of group");

// What a product under way does with a register; or a load from tensor memory fills it.
enum InFlight : uint8_t { FREE, SUMMED, MULTIPLIED, LOADED };

struct Warp {
  Block* block;
  int number;
  std::vector<uint8_t> file, local;
  std::vector<uint8_t> in_flight;    // by register: InFlight
  std::vector<uint32_t> changed_at;  // by register: when it was written, in steps
  uint32_t step = 1, fenced_at = 0;  // of the last wgmma.fence
  int products = 0;                  // in flight, and loads from tensor memory
  std::vector<int64_t> loaded;  // registers
  int64_t pc = 0;
  int64_t meeting = -1;           // where the active lanes wait for others
  std::vector<Path> paths;        // of lanes that wait, the last one goes on first
  bool blocked = false;   // at a barrier, until it lets go
  bool polling = false;   // at an mbarrier, or for registers: what others do may let it go
  uint64_t polled_at = 0;  // what had happened when it looked last
  int64_t registers = 0;   // of a thread; 0: not known
  Mask live, active, running;  // not exited; at this pc; of those, where the guard holds
  Mask carry = 0;
  Clock known, fenced;
  Queue queues[QUEUES];
};

struct Waiting {
  int64_t arrived = 0;  // threads
  Clock known, fenced;
  std::vector<Warp*> warps;
};

struct Mbarrier {
  int64_t count = 0, pending = 0, bytes = 0, phase = 0;
  int agent = 0;
  Epoch made;
  Clock arriving, arriving_fenced, complete, complete_fenced, users;
};

constexpr int64_t TENSOR_LANES = 128, TENSOR_COLUMNS = 512;

struct TensorMemory {
  std::vector<uint32_t> cells = std::vector<uint32_t>(TENSOR_LANES * TENSOR_COLUMNS);
  Shadow shadow{TENSOR_LANES * TENSOR_COLUMNS, 0};
  std::array<int64_t, TENSOR_COLUMNS> held{};  // by column: the columns of its allocation, or 0
  std::map<int64_t, int64_t> allocated;        // first column: the instruction
  bool relinquished = false;
};

struct Machine {
  const Launch* launch;
  Fault* fault;
  Counts* counts;
  uint64_t random;
  GlobalShadow shadow;
  uint64_t next() {
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    return random;
  }
};

struct Block {
  Machine* machine;
  uint32_t number;  // from 1, along the grid's first axis first
  int64_t place[3];
  std::vector<uint8_t> shared;
  Shadow shadow;
  std::vector<Warp> warps;
  std::map<uint32_t, Waiting> barriers;
  std::map<uint32_t, Mbarrier> mbarriers;
  std::vector<std::shared_ptr<Pending>> loads;  // bulk loads under way
  std::array<uint32_t, AGENTS> async_times{};
  std::shared_ptr<TensorMemory> tensor;  // from the first use on
  std::vector<Epoch> waits;  // by griddepcontrol.wait, for the launch before this one
  int mbarriers_made = 0;
  uint64_t happened = 1;       // phases that ended, registers that were given back
  int64_t free_registers = 0;  // of a thread, for a warp that asks
};

enum Faults {
  OUT_OF_BOUNDS = 1, MISALIGNED, SHARED_BOUNDS, UNINITIALISED_READ, RACE_WITH_READ, RACE_WITH_WRITE,
  NO_FENCE, DEADLOCK, NO_MBARRIER, OBJECT_TOUCHED, TOO_MANY_ARRIVALS, IN_FLIGHT, NOT_WAITED,
  DIVERGED, BAD_DESCRIPTOR, NO_TENSOR_MAP, STEP_LIMIT, TRAP, BARRIER_COUNT, NO_WGMMA_FENCE,
  TRANSACTION_COUNT, UNSUPPORTED, LOCAL_BOUNDS, MBARRIER_RACE, REGISTER_COUNT,
  BLOCK_RACE, TENSOR_BOUNDS, TENSOR_RACE, TENSOR_UNINITIALISED, TENSOR_ALLOCATION, TENSOR_LEAK,
  EARLY_ACCESS, EARLY_LAUNCH, NO_GRID_WAIT,
};  // the names are in faults.py, in this order

static bool stopped(const Machine& m) { return m.fault->code != 0; }

static void raise_at(Warp& w, int64_t instruction, int code, int64_t lane, int64_t address,
                     int64_t detail = 0, int64_t other = -1) {
  Machine& m = *w.block->machine;
  if (stopped(m)) return;
  const int64_t* place = w.block->place;
  *m.fault = {code,   instruction, other, w.number, lane, address, detail,
              {place[0], place[1], place[2]}};
}

static int64_t index_of(const Warp& w, const Instruction& i) {
  return &i - w.block->machine->launch->program;
}

static void raise(Warp& w, const Instruction& i, int code, int64_t lane = -1, int64_t address = -1,
                  int64_t detail = 0, int64_t other = -1) {
  raise_at(w, index_of(w, i), code, lane, address, detail, other);
}

static const Operand& operand(const Warp& w, const Instruction& i, int64_t k) {
  return w.block->machine->launch->operands[i.first + k];
}

// -- registers ---------------------------------------------------------------------------------------

template <class T>
using Bits = std::conditional_t<sizeof(T) == 1, uint8_t,
             std::conditional_t<sizeof(T) == 2, uint16_t,
             std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;

template <class R, class T>
static void narrow(const uint8_t* base, Lanes<T>& out) {
  for (int l = 0; l < LANES; l++) {
    R wide;
    memcpy(&wide, base + l * sizeof(R), sizeof(R));
    Bits<T> bits = (Bits<T>)wide;
    memcpy(&out[l], &bits, sizeof(T));
  }
}

template <class T>
static Lanes<T> fetch(const Warp& w, const Operand& o) {
  Lanes<T> out;
  const uint8_t* base = w.file.data() + o.value;
  switch (o.width) {
    case 2: narrow<uint16_t>(base, out); break;
    case 4: narrow<uint32_t>(base, out); break;
    case 8: narrow<uint64_t>(base, out); break;
    default: {
      Bits<T> bits = (Bits<T>)o.value;
      T value;
      memcpy(&value, &bits, sizeof(T));
      out.fill(value);
    }
  }
  return out;
}

template <class T>
static Lanes<T> fetch(const Warp& w, const Instruction& i, int64_t k) {
  return fetch<T>(w, operand(w, i, k));
}

// Wider registers take a signed integer with its sign, any other type with zeros.
template <class R, class T>
static void widen(Warp& w, const Operand& o, const Lanes<T>& values) {
  uint8_t* base = w.file.data() + o.value;
  for (int l = 0; l < LANES; l++) {
    if (!(w.running >> l & 1)) continue;
    R wide;
    if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) {
      wide = (R)(std::make_signed_t<R>)values[l];
    } else {
      Bits<T> bits;
      memcpy(&bits, &values[l], sizeof(T));
      wide = (R)bits;
    }
    memcpy(base + l * sizeof(R), &wide, sizeof(R));
  }
}

template <class T>
static void put(Warp& w, const Operand& o, const Lanes<T>& values) {
  if (o.width == sizeof(T) && w.running == ALL_LANES) {
    memcpy(w.file.data() + o.value, values.data(), sizeof(T) * LANES);
  } else if (o.width == 2) {
    widen<uint16_t>(w, o, values);
  } else if (o.width == 4) {
    widen<uint32_t>(w, o, values);
  } else if (o.width == 8) {
    widen<uint64_t>(w, o, values);
  }
  if (o.number >= 0) w.changed_at[o.number] = w.step;
}

template <class T>
static void put(Warp& w, const Instruction& i, int64_t k, const Lanes<T>& values) {
  put(w, operand(w, i, k), values);
}

static Mask fetch_predicate(const Warp& w, const Operand& o) {
  if (o.width == 0) return o.value ? ALL_LANES : 0;
  Mask mask;
  memcpy(&mask, w.file.data() + o.value, sizeof(mask));
  return o.width < 0 ? ~mask : mask;
}

static Mask fetch_predicate(const Warp& w, const Instruction& i, int64_t k) {
  return fetch_predicate(w, operand(w, i, k));
}

static void put_predicate(Warp& w, const Operand& o, Mask mask) {
  if (o.width == 0) return;  // the sink "_"
  Mask old;
  memcpy(&old, w.file.data() + o.value, sizeof(old));
  mask = (old & ~w.running) | (mask & w.running);
  memcpy(w.file.data() + o.value, &mask, sizeof(mask));
}

static void put_predicate(Warp& w, const Instruction& i, int64_t k, Mask mask) {
  put_predicate(w, operand(w, i, k), mask);
}

static int first_lane(Mask mask) { return mask ? __builtin_ctz(mask) : 0; }

// What all lanes of a warp have in common: the value of the first one that runs.
static uint64_t uniform(const Warp& w, const Instruction& i, int64_t k) {
  return fetch<uint64_t>(w, i, k)[first_lane(w.running)];
}

// -- agents ------------------------------------------------------------------------------------------

static int generic_agents(int warps) { return 2 * warps; }  // warps, and their cp.async engines

static int agent_of(const Warp& w, Pending::Kind kind) {
  int warps = (int)w.block->warps.size();
  switch (kind) {
    case Pending::COPY: return warps + w.number;
    case Pending::PRODUCT: return 2 * warps + w.number;
    case Pending::TENSOR_LOAD: return 4 * warps + w.number;
    case Pending::TENSOR_STORE: return 5 * warps + w.number;
    default: return 3 * warps + w.number;
  }
}

static Epoch now(const Warp& w) {
  return Epoch{(uint32_t)w.number, w.known.times[w.number]};
}

static Actor generic_actor(const Warp& w, const Instruction& i) {
  return {now(w), &w.known, nullptr, index_of(w, i)};
}

// Let a warp's time go on: what it did so far was released to others.
static void tick(Warp& w) { w.known.times[w.number]++; }

// Whether the launch before this one has ended for whom knows `known`: there is none, or a warp that
// it knows of has waited for it.
static bool may_go_on(const Block& block, const Clock& known) {
  if (!block.machine->launch->dependent) return true;
  for (Epoch e : block.waits) {
    if (known.times[e.agent] >= e.time) return true;
  }
  return false;
}

static bool report(Warp& w, const Instruction& i, Conflict found, int lane, int64_t address,
                   int64_t other) {
  static const int codes[] = {0, UNINITIALISED_READ, RACE_WITH_READ, RACE_WITH_WRITE, NO_FENCE,
                              OBJECT_TOUCHED};
  if (found == FINE) return false;
  raise(w, i, codes[found], lane, address, 0, other);
  return true;
}
