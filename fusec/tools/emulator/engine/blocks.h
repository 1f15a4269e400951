// Which blocks of a launch touched each byte of global memory. Nothing orders two blocks: what one
// writes, no other may touch. Three things are no race: two that write the same value, as where tiles
// overlap; two atomics; and what one block does alone. Bytes that are loaded and stored at all are
// counted, too: the traffic of a launch whose caches keep everything.

class GlobalShadow {
 public:
  // Buffers are in the order of their addresses; views of one tensor overlap, and share a shadow.
  explicit GlobalShadow(const Launch& launch) {
    uint64_t end = 0, total = 0;
    for (int64_t k = 0; k < launch.buffer_count; k++) {
      const Buffer& b = launch.buffers[k];
      if (!k || b.base >= end) shift_.push_back(b.base - total), end = b.base;
      else shift_.push_back(shift_.back());
      if (b.base + b.size > end) total += b.base + b.size - end, end = b.base + b.size;
    }
    touched_.assign(total + 1, 0);
    // One block races with nobody.
    if (launch.grid[0] * launch.grid[1] * launch.grid[2] < 2) return;
    marks_.reset((Marks*)calloc(total + 1, sizeof(Marks)));
  }

  int64_t distinct_loaded = 0, distinct_stored = 0;  // bytes

  // Return whether a read conflicts with another block's write; `other` gets its instruction.
  bool read(size_t buffer, uint64_t address, uint64_t count, uint32_t block, int64_t* other) {
    touch(buffer, address, count, LOADED, distinct_loaded);
    if (!marks_) return false;
    Marks* at = &marks_[address - shift_[buffer]];
    for (uint64_t k = 0; k < count; k++) {
      Marks& m = at[k];
      if (m.writer && m.writer != block) return *other = m.wrote, true;
      m.reader = !m.reader || m.reader == block ? block : MANY;
    }
    return false;
  }

  // The same for a write of `fresh`, or an atomic, which has none.
  bool write(size_t buffer, uint64_t address, uint64_t count, uint32_t block, int64_t instruction,
             const uint8_t* fresh, int64_t* other) {
    touch(buffer, address, count, STORED, distinct_stored);
    if (!fresh) touch(buffer, address, count, LOADED, distinct_loaded);
    if (!marks_) return false;
    Marks* at = &marks_[address - shift_[buffer]];
    const uint8_t* old = (const uint8_t*)address;
    uint32_t writer = fresh ? block : ATOMIC;
    for (uint64_t k = 0; k < count; k++) {
      Marks& m = at[k];
      bool changes = !fresh || fresh[k] != old[k];
      if (changes && m.writer && m.writer != writer) return *other = m.wrote, true;
      if (changes && m.reader && m.reader != block) return *other = -1, true;
      if (!m.writer) m.writer = writer, m.wrote = (int32_t)instruction;
    }
    return false;
  }

 private:
  static constexpr uint8_t LOADED = 1, STORED = 2;

  void touch(size_t buffer, uint64_t address, uint64_t count, uint8_t how, int64_t& distinct) {
    uint8_t* at = &touched_[address - shift_[buffer]];
    for (uint64_t k = 0; k < count; k++) {
      distinct += !(at[k] & how);
      at[k] |= how;
    }
  }

  static constexpr uint32_t MANY = 0xffffffffu, ATOMIC = 0xfffffffeu;
  struct Marks {
    uint32_t writer, reader;  // blocks, counted from 1; 0: none
    int32_t wrote;            // the instruction
  };
  struct Free {
    void operator()(Marks* m) const { free(m); }
  };

  std::vector<uint64_t> shift_;  // by buffer: from an address to its place in both
  std::vector<uint8_t> touched_;
  std::unique_ptr<Marks[], Free> marks_;
};
