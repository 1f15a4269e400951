// What a launch is given: the decoded program, memory that may be touched, tensor maps; and what it
// hands back: counts and the first fault. Layouts are those of engine.py, field by field.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <type_traits>
#include <vector>

constexpr int LANES = 32;
using Mask = uint32_t;
constexpr Mask ALL_LANES = 0xffffffffu;
template <class T>
using Lanes = std::array<T, LANES>;

// A register of 2, 4 or 8 bytes a lane at a byte offset of the warp's file (width 2, 4, 8), a
// predicate (width 1; -1: negated), or the bits of a constant (width 0).
struct Operand {
  int64_t width;
  int64_t number;  // of the register, counted from 0
  int64_t value;   // byte offset, or bits
};

struct Instruction {
  int64_t op;
  int64_t type;    // of the result
  int64_t source;  // of the arguments, where it differs
  int64_t choice;  // comparison, rounding, space, mode...: what the operation has one of
  int64_t flags;
  int64_t count;   // elements of a vector, columns of a product
  int64_t guard;   // byte offset of the predicate; -1: none
  int64_t negated;
  int64_t first;   // operand
  int64_t operands;
  int64_t target;   // of a branch
  int64_t meeting;  // where lanes that a branch parts run together again; -1: nowhere
  int64_t pipe;     // what it is issued to
};

struct Buffer {
  uint64_t base;
  uint64_t size;
};

struct TensorMap {
  uint64_t handle;  // the value that instructions name it by
  uint64_t base;
  int64_t rank;
  int64_t dims[5];     // elements, innermost first
  int64_t strides[5];  // bytes
  int64_t box[5];
  int64_t element;  // bytes
  int64_t swizzle;  // bytes of a row of the pattern: 0, 32, 64, 128
  int64_t nan_fill;
};

// Something that a warp did and that a trace shows.
struct Event {
  int64_t block;
  int64_t warp;
  int64_t instruction;
};

struct Launch {
  const Instruction* program;
  const Operand* operands;
  const int64_t* branch_targets;
  const Buffer* buffers;
  const TensorMap* maps;
  const uint8_t* params;
  const int64_t* presets;  // pairs: a special register's code, the byte offset that holds it
  Event* events;           // in their order, as many as there is room for
  int64_t instructions;
  int64_t buffer_count;
  int64_t map_count;
  int64_t param_bytes;
  int64_t preset_count;
  int64_t file_bytes;  // of a warp's registers
  int64_t register_count;
  int64_t shared_bytes;
  int64_t local_bytes;
  int64_t threads;
  int64_t thread_registers;  // 0: not known
  int64_t dependent;         // 1: it may start while the launch before it runs
  int64_t event_room;
  int64_t grid[3];
  int64_t seed;
  int64_t step_limit;
};

struct Fault {
  int64_t code;  // 0: none
  int64_t instruction;
  int64_t other;  // the instruction that it conflicts with, or -1
  int64_t warp;
  int64_t lane;
  int64_t address;
  int64_t detail;
  int64_t block[3];
};

struct Counts {
  int64_t instructions;
  int64_t global_loaded;  // bytes
  int64_t global_stored;
  int64_t distinct_loaded;  // bytes, each once
  int64_t distinct_stored;
  int64_t shared_loaded;
  int64_t shared_stored;
  int64_t barriers;  // a warp at a barrier of the block
  int64_t copied;    // bytes that asynchronous copies move
  int64_t multiplied;  // multiply-adds of tensor cores
  int64_t pipes[7];  // instructions, by vocabulary.PIPES
  int64_t events;    // that are kept
};

// Where an address of PTX's generic space points to.
constexpr uint64_t PARAM_WINDOW = 1ull << 60;
constexpr uint64_t LOCAL_WINDOW = 1ull << 59;
constexpr uint64_t SHARED_WINDOW = 1ull << 58;
// The system keeps the first KiB of a block's shared memory.
constexpr uint32_t SHARED_BASE = 1024;
