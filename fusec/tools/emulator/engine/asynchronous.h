// Copies that run beside the warps: cp.async, bulk copies of boxes by tensor maps (TMA).
//
// An operation is issued with what its warp knows at that time, and takes effect at a random point
// before the wait that covers it. Its accesses are its engine's: who has not waited does not know
// of them, so that whatever touches the same bytes meanwhile is a race.

static std::shared_ptr<Pending> issue(Warp& w, const Instruction& i, Pending::Kind kind,
                                      int agent) {
  auto made = std::make_shared<Pending>();
  made->kind = kind;
  made->instruction = &i;
  made->known = w.known;
  made->fenced = w.fenced;
  made->epoch = Epoch{(uint32_t)agent, ++w.block->async_times[agent]};
  made->lanes = w.running;
  tick(w);
  return made;
}

static uint64_t swizzled(uint64_t address, int64_t span) {
  uint64_t mask = span == 128 ? 7 : span == 64 ? 3 : span == 32 ? 1 : 0;
  return address ^ (address >> 7 & mask) << 4;
}

// -- cp.async ----------------------------------------------------------------------------------------

// target, offset, source, offset, bytes, bytes to read: the rest becomes zeros
static void run_cp_async(Warp& w, const Instruction& i) {
  if (!w.running) return;
  auto made = issue(w, i, Pending::COPY, agent_of(w, Pending::COPY));
  made->target = addresses(w, i, 0);
  made->origin = addresses(w, i, 2);
  made->bytes = fetch<uint32_t>(w, i, 5);
  if (i.flags & IGNORES) {  // the last argument is a predicate that says: read nothing
    Mask ignored = fetch_predicate(w, i, 5);
    for (int l = 0; l < LANES; l++) made->bytes[l] = ignored >> l & 1 ? 0 : (uint32_t)i.count;
  }
  for (int l = 0; l < LANES; l++) {
    if (!(w.running >> l & 1)) continue;
    uint64_t to = made->target[l] & 0xffffffffu;
    if (to % (uint64_t)i.count) return raise(w, i, MISALIGNED, l, (int64_t)to, i.count);
    if (made->bytes[l] && made->origin[l] % (uint64_t)i.count) {
      return raise(w, i, MISALIGNED, l, (int64_t)made->origin[l], i.count);
    }
  }
  w.queues[COPIES].waiting.push_back(made);
}

static void complete_copy(Warp& w, Pending& p) {
  const Instruction& i = *p.instruction;
  Actor actor{p.epoch, &p.known, nullptr, index_of(w, i)};
  Machine& m = *w.block->machine;
  for (int l = 0; l < LANES; l++) {
    if (!(p.lanes >> l & 1)) continue;
    uint64_t to = p.target[l] & 0xffffffffu, size = (uint64_t)i.count;
    uint64_t read = std::min<uint64_t>(p.bytes[l], size);
    if (!shared_fits(w, actor.instruction, l, to, size)) return;
    uint8_t fresh[16] = {};
    if (read) {
      const uint8_t* from =
          global_bytes(w, actor.instruction, l, p.origin[l], read, false, nullptr, p.known);
      if (!from) return;
      memcpy(fresh, from, read);
    }
    int64_t other = -1;
    uint8_t* place = &w.block->shared[to];
    Conflict found = w.block->shadow.write(to, size, actor, place, fresh, &other);
    if (report(w, i, found, l, (int64_t)to, other)) return;
    memcpy(place, fresh, size);
    m.counts->copied += (int64_t)size;
    m.counts->global_loaded += (int64_t)read;
  }
}

// -- boxes -------------------------------------------------------------------------------------------

static const TensorMap* find_map(Warp& w, const Instruction& i, uint64_t handle) {
  const Launch& launch = *w.block->machine->launch;
  for (int64_t k = 0; k < launch.map_count; k++) {
    if (launch.maps[k].handle != handle) continue;
    if (launch.maps[k].rank == i.count) return &launch.maps[k];
    break;
  }
  raise(w, i, NO_TENSOR_MAP, first_lane(w.running), (int64_t)handle, i.count);
  return nullptr;
}

static int64_t box_bytes(const TensorMap& map) {
  int64_t bytes = map.element;
  for (int64_t d = 0; d < map.rank; d++) bytes *= map.box[d];
  return bytes;
}

// Call f(shared address, global address, bytes inside) for each 16 bytes of a box.
template <class F>
static void each_chunk(const Pending& p, F f) {
  const TensorMap& map = *p.map;
  int64_t row_bytes = map.box[0] * map.element, rows = box_bytes(map) / row_bytes;
  for (int64_t r = 0; r < rows; r++) {
    int64_t rest = r;
    uint64_t base = map.base;
    bool inside = true;
    for (int64_t d = 1; d < map.rank; d++) {
      int64_t at = p.at[d] + rest % map.box[d];
      rest /= map.box[d];
      inside &= 0 <= at && at < map.dims[d];
      base += (uint64_t)(at * map.strides[d]);
    }
    for (int64_t b = 0; b < row_bytes; b += 16) {
      int64_t first = p.at[0] * map.element + b, end = map.dims[0] * map.element;
      int64_t skipped = std::min<int64_t>(std::max<int64_t>(-first, 0), 16);
      int64_t kept = inside ? std::max<int64_t>(std::min<int64_t>(16, end - first), 0) : 0;
      uint64_t place = swizzled(p.target[0] + (uint64_t)(r * row_bytes + b), map.swizzle);
      f(place, base + (uint64_t)first, skipped, std::max(skipped, kept));
    }
  }
}

static void fill_chunk(uint8_t* to, const TensorMap& map) {
  memset(to, 0, 16);
  if (!map.nan_fill) return;
  for (int k = (int)map.element - 1; k < 16; k += (int)map.element) {
    memset(to + k - map.element + 1, 0xff, (size_t)map.element);
    to[k] = 0x7f;
  }
}

static void complete_bulk_load(Warp& w, Pending& p) {
  const Instruction& i = *p.instruction;
  Block& block = *w.block;
  Actor actor{p.epoch, &p.known, nullptr, index_of(w, i)};
  each_chunk(p, [&](uint64_t to, uint64_t from, int64_t skipped, int64_t end) {
    if (stopped(*block.machine) || !shared_fits(w, actor.instruction, 0, to, 16)) return;
    uint8_t fresh[16];
    fill_chunk(fresh, *p.map);
    uint64_t bytes = (uint64_t)(end - skipped), first = from + (uint64_t)skipped;
    if (bytes) {
      const uint8_t* source =
          global_bytes(w, actor.instruction, 0, first, bytes, false, nullptr, p.known);
      if (!source) return;
      memcpy(fresh + skipped, source, bytes);
      block.machine->counts->global_loaded += (int64_t)bytes;
    }
    int64_t other = -1;
    uint8_t* place = &block.shared[to];
    Conflict found = block.shadow.write(to, 16, actor, place, fresh, &other);
    if (report(w, i, found, 0, (int64_t)to, other)) return;
    memcpy(place, fresh, 16);
  });
  if (stopped(*block.machine)) return;
  block.machine->counts->copied += box_bytes(*p.map);
  auto found = block.mbarriers.find((uint32_t)p.origin[0]);
  if (found == block.mbarriers.end()) return raise(w, i, NO_MBARRIER, 0, (int64_t)p.origin[0]);
  Clock known = p.known;
  known.times[p.epoch.agent] = std::max(known.times[p.epoch.agent], (uint32_t)p.epoch.time);
  arrive(w, i, found->second, 0, -box_bytes(*p.map), known, p.fenced);
}

// Add f32 to memory: of a sum that blocks share, each part at once.
static void add_floats(uint8_t* to, const uint8_t* parts, uint64_t bytes) {
  for (uint64_t k = 0; k < bytes; k += sizeof(float)) {
    float sum, part;
    memcpy(&sum, to + k, sizeof sum);
    memcpy(&part, parts + k, sizeof part);
    sum += part;
    memcpy(to + k, &sum, sizeof sum);
  }
}

static void complete_bulk_store(Warp& w, Pending& p) {
  const Instruction& i = *p.instruction;
  Block& block = *w.block;
  Actor actor{p.epoch, &p.known, &p.fenced, index_of(w, i)};
  each_chunk(p, [&](uint64_t from, uint64_t to, int64_t skipped, int64_t end) {
    if (stopped(*block.machine) || !shared_fits(w, actor.instruction, 0, from, 16)) return;
    if (end <= skipped) return;
    uint64_t bytes = (uint64_t)(end - skipped), first = to + (uint64_t)skipped;
    int64_t other = -1;
    Conflict found = block.shadow.read(from + (uint64_t)skipped, bytes, actor, &other);
    if (report(w, i, found, 0, (int64_t)from, other)) return;
    const uint8_t* fresh = &block.shared[from + (uint64_t)skipped];
    bool adds = i.flags & ADDS;
    if (adds && p.map->element != 4) return raise(w, i, MISALIGNED, 0, (int64_t)first, p.map->element);
    uint8_t* target = global_bytes(w, actor.instruction, 0, first, bytes, true,
                                   adds ? nullptr : fresh, p.known);
    if (!target) return;
    if (adds) add_floats(target, fresh, bytes);
    else memcpy(target, fresh, bytes);
    block.machine->counts->global_stored += (int64_t)bytes;
  });
  block.machine->counts->copied += box_bytes(*p.map);
}

// Check a box's place in shared memory, and keep where it begins in the tensor.
static bool aim(Warp& w, const Instruction& i, Pending& p, uint64_t place, int64_t first) {
  p.target[0] = place & 0xffffffffu;
  for (int64_t d = 0; d < i.count; d++) {
    p.at[d] = (int32_t)fetch<uint32_t>(w, i, first + d)[first_lane(w.running)];
  }
  if (p.target[0] % 128 == 0) return true;
  raise(w, i, MISALIGNED, first_lane(w.running), (int64_t)p.target[0], 128);
  return false;
}

// target, offset, map, offset, mbarrier, offset, coordinates; one box for each lane that runs
static void run_bulk_load(Warp& w, const Instruction& i) {
  Mask running = w.running;
  for (int l = 0; l < LANES && !stopped(*w.block->machine); l++) {
    if (!(running >> l & 1)) continue;
    w.running = 1u << l;
    uint32_t object = object_address(w, i, 4);
    Mbarrier* b = find_mbarrier(w, i, object);
    const TensorMap* map = find_map(w, i, addresses(w, i, 2)[l]);
    if (!b || !map) break;
    auto made = issue(w, i, Pending::BULK_LOAD, b->agent);
    made->map = map;
    made->origin[0] = object;
    if (!aim(w, i, *made, addresses(w, i, 0)[l], 6)) break;
    w.block->loads.push_back(made);
  }
  w.running = running;
}

// map, offset, source, offset, coordinates
static void run_bulk_store(Warp& w, const Instruction& i) {
  Mask running = w.running;
  for (int l = 0; l < LANES && !stopped(*w.block->machine); l++) {
    if (!(running >> l & 1)) continue;
    w.running = 1u << l;
    const TensorMap* map = find_map(w, i, addresses(w, i, 0)[l]);
    if (!map) break;
    auto made = issue(w, i, Pending::BULK_STORE, agent_of(w, Pending::BULK_STORE));
    made->map = map;
    if (!aim(w, i, *made, addresses(w, i, 2)[l], 4)) break;
    w.queues[STORES].waiting.push_back(made);
  }
  w.running = running;
}

static void complete_product(Warp& w, Pending& p);
static void complete_tensor_product(Warp& w, Pending& p);
static void settle_product(Warp& w, const Pending& p);

static void complete(Warp& w, Pending& p) {
  if (p.done) return;
  p.done = true;
  switch (p.kind) {
    case Pending::COPY: return complete_copy(w, p);
    case Pending::PRODUCT: return complete_product(w, p);
    case Pending::BULK_LOAD: return complete_bulk_load(w, p);
    case Pending::BULK_STORE: return complete_bulk_store(w, p);
    case Pending::TENSOR_PRODUCT: return complete_tensor_product(w, p);
    default: break;  // ARRIVE
  }
  auto found = w.block->mbarriers.find((uint32_t)p.origin[0]);
  if (found == w.block->mbarriers.end()) return;
  Clock known = p.known;
  known.times[p.epoch.agent] = p.epoch.time;
  int64_t lanes = __builtin_popcount(p.lanes);
  arrive(w, *p.instruction, found->second, lanes, 0, known, p.fenced);
}

// An mbarrier learns when the copies before this are done; `flags`: it does not count the arrival.
static void run_cp_async_arrive(Warp& w, const Instruction& i) {
  if (!w.running) return;
  uint32_t object = object_address(w, i, 0);
  Mbarrier* b = find_mbarrier(w, i, object);
  if (!b) return;
  if (!(i.flags & UNCOUNTED)) b->pending += __builtin_popcount(w.running);
  auto made = issue(w, i, Pending::ARRIVE, agent_of(w, Pending::COPY));
  made->origin[0] = object;
  w.queues[COPIES].waiting.push_back(made);
}

// -- groups ------------------------------------------------------------------------------------------

static void run_commit(Warp& w, const Instruction& i) {
  Queue& queue = w.queues[i.choice];
  if (!w.running) return;
  queue.committed++;
  for (auto& p : queue.waiting) {
    if (!p->committed) p->committed = true, p->group = queue.committed;
  }
}

// Complete all but the last `count` groups of a kind, and let the warp know; -1: all operations.
static void run_wait_group(Warp& w, const Instruction& i) {
  if (!w.running) return;
  Queue& queue = w.queues[i.choice];
  auto covered = [&](const Pending& p) {
    return i.count < 0 || (p.committed && p.group <= queue.committed - i.count);
  };
  for (auto& p : queue.waiting) {
    if (!covered(*p)) continue;
    complete(w, *p);
    if (stopped(*w.block->machine)) return;
    uint32_t& time = w.known.times[p->epoch.agent];
    time = std::max(time, (uint32_t)p->epoch.time);
    if (p->kind == Pending::PRODUCT) settle_product(w, *p);
  }
  auto& waiting = queue.waiting;
  waiting.erase(std::remove_if(waiting.begin(), waiting.end(), [&](auto& p) { return covered(*p); }),
                waiting.end());
}
