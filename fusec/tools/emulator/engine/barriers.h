// Barriers of the block, mbarriers, fences: what orders warps.

static void release(Block& block, Waiting& barrier) {
  for (Warp* each : barrier.warps) {
    each->known.join(barrier.known);
    each->fenced.join(barrier.fenced);
    each->blocked = false;
  }
  barrier = Waiting{};
}

// number, threads (0: all of the block); `flags` says whether the warp goes on without waiting.
static void run_bar(Warp& w, const Instruction& i) {
  if (!w.running) return;
  if (w.active != w.live) return raise(w, i, DIVERGED);
  Block& block = *w.block;
  uint32_t number = (uint32_t)uniform(w, i, 0);
  int64_t needed = (int64_t)uniform(w, i, 1);
  if (!needed) needed = (int64_t)block.warps.size() * LANES;
  if (needed % LANES || number > 15) return raise(w, i, BARRIER_COUNT, -1, number, needed);
  Waiting& barrier = block.barriers[number];
  block.machine->counts->barriers++;
  barrier.arrived += LANES;
  barrier.known.join(w.known);
  barrier.fenced.join(w.fenced);
  tick(w);
  if (!(i.flags & ARRIVES)) {
    barrier.warps.push_back(&w);
    w.blocked = true;
  }
  if (barrier.arrived > needed) return raise(w, i, BARRIER_COUNT, -1, number, needed);
  if (barrier.arrived == needed) release(block, barrier);
}

// What a warp wrote so far can be seen by copies and products of the asynchronous proxy.
static void run_fence_proxy(Warp& w, const Instruction&) { w.fenced.join(w.known); }

// -- mbarriers ---------------------------------------------------------------------------------------

static uint32_t object_address(Warp& w, const Instruction& i, int64_t k) {
  return (uint32_t)addresses(w, i, k)[first_lane(w.running)];
}

static Mbarrier* find_mbarrier(Warp& w, const Instruction& i, uint32_t address) {
  auto found = w.block->mbarriers.find(address);
  if (found == w.block->mbarriers.end()) {
    raise(w, i, NO_MBARRIER, first_lane(w.running), address);
    return nullptr;
  }
  Mbarrier& b = found->second;
  if ((int)b.made.agent != w.number && w.known.times[b.made.agent] < b.made.time) {
    raise(w, i, MBARRIER_RACE, first_lane(w.running), address);
    return nullptr;
  }
  b.users.times[w.number] = w.known.times[w.number];
  return &b;
}

// A phase ends when nobody and no byte is waited for.
static void end_phase(Block& block, Mbarrier& b) {
  if (b.pending || b.bytes) return;
  block.happened++;
  b.phase++;
  b.pending = b.count;
  b.complete.join(b.arriving);
  b.complete_fenced.join(b.arriving_fenced);
}

static void run_mbarrier_init(Warp& w, const Instruction& i) {
  if (!w.running) return;
  Block& block = *w.block;
  uint32_t address = object_address(w, i, 0);
  int lane = first_lane(w.running);
  if (address % 8) return raise(w, i, MISALIGNED, lane, address, 8);
  if (block.mbarriers.count(address)) return raise(w, i, OBJECT_TOUCHED, lane, address);
  const uint8_t unknown[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  if (!shared_bytes(w, i, lane, address, 8, unknown)) return;
  Mbarrier& b = block.mbarriers[address];
  b.count = b.pending = (int64_t)uniform(w, i, 2);
  b.agent = 6 * (int)block.warps.size() + block.mbarriers_made++ % BULK_AGENTS;
  b.made = now(w);
  block.shadow.set_object(address, 8, true, index_of(w, i));
}

static void run_mbarrier_inval(Warp& w, const Instruction& i) {
  if (!w.running) return;
  uint32_t address = object_address(w, i, 0);
  Mbarrier* b = find_mbarrier(w, i, address);
  if (!b) return;
  for (size_t k = 0; k < w.block->warps.size(); k++) {
    if ((int)k != w.number && b->users.times[k] > w.known.times[k]) {
      return raise(w, i, MBARRIER_RACE, first_lane(w.running), address);
    }
  }
  w.block->mbarriers.erase(address);
  w.block->shadow.set_object(address, 8, false, index_of(w, i));
}

static void arrive(Warp& w, const Instruction& i, Mbarrier& b, int64_t arrivals, int64_t bytes,
                   const Clock& known, const Clock& fenced) {
  b.arriving.join(known);
  b.arriving_fenced.join(fenced);
  b.bytes += bytes;
  b.pending -= arrivals;
  if (b.pending < 0) return raise(w, i, TOO_MANY_ARRIVALS, first_lane(w.running));
  if (std::abs(b.bytes) >= 1 << 20) return raise(w, i, TRANSACTION_COUNT, -1, -1, b.bytes);
  end_phase(*w.block, b);
}

// address, offset, count of arrivals, bytes that are to come; each lane that runs arrives.
static void run_mbarrier_arrive(Warp& w, const Instruction& i) {
  if (!w.running) return;
  Mbarrier* b = find_mbarrier(w, i, object_address(w, i, 0));
  if (!b) return;
  int64_t lanes = __builtin_popcount(w.running);
  int64_t count = (int64_t)uniform(w, i, 2), bytes = (int64_t)uniform(w, i, 3);
  arrive(w, i, *b, lanes * count, lanes * bytes, w.known, w.fenced);
  tick(w);
}

// predicate, address, offset, parity; a wait blocks, a test does not.
static void run_mbarrier_wait(Warp& w, const Instruction& i) {
  if (!w.running) return;
  Mbarrier* b = find_mbarrier(w, i, object_address(w, i, 1));
  if (!b) return;
  bool complete = (b->phase & 1) != (int64_t)(uniform(w, i, 3) & 1);
  w.polling = !complete && !(i.flags & TESTS);
  w.polled_at = w.block->happened;
  if (complete) {
    w.known.join(b->complete);
    w.fenced.join(b->complete_fenced);
  }
  put_predicate(w, i, 0, complete ? ALL_LANES : 0);
}
