// Who knows of what: vector clocks of warps and asynchronous engines, and a shadow of shared memory.
//
// An *agent* is a warp, or what copies or multiplies for one: its cp.async engine, its wgmma engine,
// its bulk stores, its loads or stores of tensor memory, or the bulk loads that report to one
// mbarrier. An access is an epoch (agent, time).
// It is ordered before what an actor does if the actor's clock knows that time of that agent. Clocks
// are joined by barriers and waits (Flanagan, Freund: FastTrack, PLDI 2009).

constexpr int AGENTS = 256;
constexpr int BULK_AGENTS = 62;

struct Clock {
  std::array<uint32_t, AGENTS> times{};
  void join(const Clock& other) {
    for (int i = 0; i < AGENTS; i++) times[i] = std::max(times[i], other.times[i]);
  }
};

struct Epoch {
  uint32_t agent : 8;
  uint32_t time : 24;  // 0: never
};

// Something that touches memory. Generic writes that `fenced` does not know are invisible to an
// actor of the asynchronous proxy.
struct Actor {
  Epoch epoch;
  const Clock* known;
  const Clock* fenced;  // null: an actor of the generic proxy
  int64_t instruction;
};

enum Conflict { FINE, UNINITIALISED, RACE_READ, RACE_WRITE, UNFENCED, BARRIER_OBJECT };

class Shadow {
 public:
  Shadow(size_t bytes, int generic_agents)
      : generic_(generic_agents), writer_(bytes), wrote_(bytes), readers_(bytes, NONE) {}

  // Return how a read of some bytes conflicts with what was before; `other` gets the instruction.
  Conflict read(size_t first, size_t count, const Actor& actor, int64_t* other) {
    uint64_t checked = ~0ull;
    for (size_t i = first; i < first + count; i++) {
      Epoch w = writer_[i];
      uint64_t key = (uint64_t)w.agent << 32 | w.time;
      if (key != checked) {
        Conflict found = check_read(w, actor);
        if (found != FINE) return *other = wrote_[i], found;
        checked = key;
      }
      note_reader(i, actor);
    }
    return FINE;
  }

  bool is_written(size_t first, size_t count) const {
    for (size_t i = first; i < first + count; i++) {
      if (!writer_[i].time) return false;
    }
    return true;
  }

  // Two that write the same value race with nobody: warps that share data store it all the same.
  Conflict write(size_t first, size_t count, const Actor& actor, const uint8_t* old,
                 const uint8_t* fresh, int64_t* other) {
    for (size_t i = first; i < first + count; i++) {
      Epoch w = writer_[i];
      if (w.agent == OBJECT) return *other = wrote_[i], BARRIER_OBJECT;
      bool same = old[i - first] == fresh[i - first];
      if (w.time && !same && !knows(actor, w)) return *other = wrote_[i], RACE_WRITE;
      for (uint32_t at = readers_[i]; at != NONE;) {
        Reader& reader = pool_[at];
        if (!knows(actor, reader.epoch)) return *other = reader.instruction, RACE_READ;
        uint32_t next = reader.next;
        reader.next = free_, free_ = at, at = next;
      }
      readers_[i] = NONE;
      writer_[i] = actor.epoch;
      wrote_[i] = (int32_t)actor.instruction;
    }
    return FINE;
  }

  // Bytes become a barrier object, or again memory that nobody has written.
  void set_object(size_t first, size_t count, bool object, int64_t instruction) {
    for (size_t i = first; i < first + count; i++) {
      writer_[i] = object ? Epoch{OBJECT, 1} : Epoch{0, 0};
      wrote_[i] = (int32_t)instruction;
    }
  }

 private:
  static constexpr uint32_t NONE = 0xffffffffu, OBJECT = AGENTS - 1;
  struct Reader {
    Epoch epoch;
    int32_t instruction;
    uint32_t next;
  };

  static bool knows(const Actor& actor, Epoch e) {
    return e.agent == actor.epoch.agent || actor.known->times[e.agent] >= e.time;
  }

  Conflict check_read(Epoch w, const Actor& actor) const {
    if (!w.time) return UNINITIALISED;
    if (w.agent == OBJECT) return BARRIER_OBJECT;
    if (!knows(actor, w)) return RACE_WRITE;
    bool generic = (int)w.agent < generic_;
    return actor.fenced && generic && actor.fenced->times[w.agent] < w.time ? UNFENCED : FINE;
  }

  // Keep the last read of each agent; those that the actor knows of are implied by its own.
  void note_reader(size_t i, const Actor& actor) {
    uint32_t* link = &readers_[i];
    while (*link != NONE) {
      Reader& reader = pool_[*link];
      if (knows(actor, reader.epoch)) {
        uint32_t gone = *link;
        *link = reader.next, reader.next = free_, free_ = gone;
      } else {
        link = &reader.next;
      }
    }
    uint32_t fresh = free_;
    if (fresh != NONE) {
      free_ = pool_[fresh].next;
    } else {
      fresh = (uint32_t)pool_.size();
      pool_.push_back({});
    }
    pool_[fresh] = {actor.epoch, (int32_t)actor.instruction, readers_[i]};
    readers_[i] = fresh;
  }

  int generic_;
  std::vector<Epoch> writer_;
  std::vector<int32_t> wrote_;
  std::vector<uint32_t> readers_;
  std::vector<Reader> pool_;
  uint32_t free_ = NONE;
};
