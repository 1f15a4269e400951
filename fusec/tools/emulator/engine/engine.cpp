// The interpreter: warps of a block in a random order, blocks one after the other.

// -- steps -------------------------------------------------------------------------------------------

using Handler = void (*)(Warp&, const Instruction&);
static const Handler HANDLERS[] = {FUSEC_HANDLERS};

static bool is_jump(int64_t op) { return op == OP_bra || op == OP_brx || op == OP_ret; }

// Keep what starts or ends asynchronous work, if somebody wants to see the order.
static void trace(const Warp& w, const Instruction& i) {
  Machine& m = *w.block->machine;
  if (m.counts->events >= m.launch->event_room) return;
  const int64_t *place = w.block->place, *grid = m.launch->grid;
  switch (i.op) {
    case OP_bulk_load: case OP_bulk_store: case OP_cp_async: case OP_wgmma: case OP_wait_group:
    case OP_mbarrier_wait: case OP_mbarrier_arrive: case OP_bar: case OP_set_registers:
    case OP_tensor_mma: case OP_tensor_commit: case OP_tensor_load: case OP_tensor_store:
      m.launch->events[m.counts->events++] = {
          place[0] + grid[0] * (place[1] + grid[1] * place[2]), w.number, index_of(w, i)};
  }
}

static void count(Machine& m, const Instruction& i) {
  m.counts->instructions++;
  m.counts->pipes[i.pipe]++;
}

// Return true if the warp went on: a poll that fails does not.
static bool step(Warp& w) {
  Machine& m = *w.block->machine;
  const Instruction& i = m.launch->program[w.pc];
  w.step++;
  w.running = w.active;
  if (i.guard >= 0) {
    Mask guard;
    memcpy(&guard, w.file.data() + i.guard, sizeof(guard));
    w.running &= i.negated ? ~guard : guard;
  }
  if (w.products && i.op != OP_wgmma && touches_sums(w, i)) return false;
  w.polling = false;
  if (is_jump(i.op)) {
    count(m, i);
    HANDLERS[i.op](w, i);
    return true;
  }
  if (w.running) HANDLERS[i.op](w, i);
  if (w.products && i.op != OP_wgmma) watch_factors(w, i), pass_on_loaded(w, i);
  if (w.polling) return false;
  count(m, i);
  if (w.running) trace(w, i);
  go_to(w, w.pc + 1);
  return true;
}

// -- asynchronous operations -------------------------------------------------------------------------

static void drop_done(std::vector<std::shared_ptr<Pending>>& loads) {
  loads.erase(std::remove_if(loads.begin(), loads.end(), [](auto& p) { return p->done; }),
              loads.end());
}

// Complete one operation that is under way, chosen at random; products of a warp in their order.
static bool complete_one(Block& block) {
  struct Choice { Warp* warp; Pending* pending; };
  std::vector<Choice> choices;
  for (auto& p : block.loads) choices.push_back({&block.warps[0], p.get()});
  for (Warp& w : block.warps) {
    for (int kind = 0; kind < QUEUES; kind++) {
      bool earlier = false;  // is there one, which products and arrivals have to follow
      for (auto& p : w.queues[kind].waiting) {
        if (p->done) continue;
        bool follows = p->kind == Pending::PRODUCT || p->kind == Pending::ARRIVE ||
                       p->kind == Pending::TENSOR_PRODUCT;
        if (!(follows && earlier)) choices.push_back({&w, p.get()});
        earlier = true;
      }
    }
  }
  if (choices.empty()) return false;
  Choice& chosen = choices[block.machine->next() % choices.size()];
  complete(*chosen.warp, *chosen.pending);
  drop_done(block.loads);
  return true;
}

// -- blocks ------------------------------------------------------------------------------------------

static bool can_run(const Warp& w) {
  if (!w.live || w.blocked) return false;
  return !w.polling || w.polled_at != w.block->happened;
}

static Warp* choose_warp(Block& block) {
  size_t count = block.warps.size(), first = block.machine->next() % count;
  for (size_t k = 0; k < count; k++) {
    Warp& w = block.warps[(first + k) % count];
    if (can_run(w)) return &w;
  }
  return nullptr;
}

// How many instructions a warp runs before another: often few, now and then very many.
static int64_t draw_turn(Machine& m) {
  uint64_t drawn = m.next();
  switch (drawn & 3) {
    case 0: return 1 + (int64_t)(drawn >> 8 & 7);
    case 1: return 1 + (int64_t)(drawn >> 8 & 63);
    default: return 1 + (int64_t)(drawn >> 8 & 1023);
  }
}

static void run_turn(Warp& w) {
  Machine& m = *w.block->machine;
  int64_t turn = draw_turn(m);
  while (turn-- && !stopped(m) && w.live && step(w)) {
    if (w.blocked) return;
    if (m.counts->instructions > m.launch->step_limit) {
      return raise_at(w, w.pc, STEP_LIMIT, -1, -1, m.launch->step_limit);
    }
  }
}

static uint32_t special_value(const Block& block, int64_t code, int warp, int lane) {
  const Launch& launch = *block.machine->launch;
  uint32_t thread = (uint32_t)(warp * LANES + lane);
  switch (code) {
    case TID_X: return thread;
    case NTID_X: return (uint32_t)launch.threads;
    case CTAID_X: return (uint32_t)block.place[0];
    case CTAID_Y: return (uint32_t)block.place[1];
    case CTAID_Z: return (uint32_t)block.place[2];
    case NCTAID_X: return (uint32_t)launch.grid[0];
    case NCTAID_Y: return (uint32_t)launch.grid[1];
    case NCTAID_Z: return (uint32_t)launch.grid[2];
    case LANEID: return (uint32_t)lane;
    case WARPID: return (uint32_t)warp;
    case LANEMASK_LT: return (1u << lane) - 1;
    case ONE: return 1;
    default: return 0;
  }
}

static void start_warp(Block& block, Warp& w, int number) {
  const Launch& launch = *block.machine->launch;
  w.block = &block;
  w.number = number;
  w.file.assign((size_t)launch.file_bytes, 0);
  w.local.assign((size_t)launch.local_bytes * LANES, 0);
  w.in_flight.assign((size_t)launch.register_count, 0);
  w.changed_at.assign((size_t)launch.register_count, 0);
  w.live = w.active = w.running = ALL_LANES;
  w.known.times[number] = 1;
  w.registers = launch.thread_registers;
  for (int64_t k = 0; k < launch.preset_count; k++) {
    for (int l = 0; l < LANES; l++) {
      uint32_t value = special_value(block, launch.presets[2 * k], number, l);
      memcpy(w.file.data() + launch.presets[2 * k + 1] + 4 * l, &value, 4);
    }
  }
}

// What a block leaves behind: copies and products that nobody waited for, mbarriers in mid-phase.
static void check_end(Block& block) {
  while (!stopped(*block.machine) && complete_one(block)) {}
  check_tensor_memory(block);
  const Launch& launch = *block.machine->launch;
  if (launch.dependent && block.waits.empty()) {
    raise_at(block.warps[0], launch.instructions - 1, NO_GRID_WAIT, -1, -1);
  }
  for (Warp& w : block.warps) {
    drop_committed(w);
    for (int kind : {PRODUCTS, STORES}) {
      for (auto& p : w.queues[kind].waiting) {
        raise_at(w, index_of(w, *p->instruction), NOT_WAITED, -1, -1);
      }
    }
  }
  for (auto& [address, b] : block.mbarriers) {
    if (b.bytes) raise_at(block.warps[0], 0, TRANSACTION_COUNT, -1, address, b.bytes);
  }
}

static void run_block(Machine& m, int64_t at) {
  const Launch& launch = *m.launch;
  const int64_t* grid = launch.grid;
  int warps = (int)(launch.threads / LANES);
  size_t bytes = SHARED_BASE + (size_t)launch.shared_bytes;
  Block block{&m, (uint32_t)at + 1, {at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]},
              std::vector<uint8_t>(bytes), Shadow(bytes, generic_agents(warps))};
  block.warps.resize((size_t)warps);
  for (int k = 0; k < warps; k++) start_warp(block, block.warps[(size_t)k], k);
  while (!stopped(m)) {
    Warp* w = choose_warp(block);
    if (w) {
      run_turn(*w);
      if (m.next() & 1) complete_one(block);
      continue;
    }
    if (complete_one(block)) continue;
    for (Warp& each : block.warps) {
      if (each.live) return raise_at(each, each.blocked ? each.pc - 1 : each.pc, DEADLOCK, -1, -1);
    }
    break;
  }
  check_end(block);
}

// Run all blocks of a launch in a random order, up to the first fault.
extern "C" void fusec_emulate(const Launch* launch, Fault* fault, Counts* counts) {
  Machine m{launch, fault, counts, (uint64_t)launch->seed * 0x9e3779b97f4a7c15ull + 0x1234567ull,
            GlobalShadow(*launch)};
  for (int k = 0; k < 8; k++) m.next();
  const int64_t* grid = launch->grid;
  std::vector<int64_t> order((size_t)(grid[0] * grid[1] * grid[2]));
  for (size_t k = 0; k < order.size(); k++) order[k] = (int64_t)k;
  for (size_t k = order.size(); k > 1; k--) std::swap(order[k - 1], order[m.next() % k]);
  for (int64_t at : order) {
    run_block(m, at);
    if (stopped(m)) return;
  }
  counts->distinct_loaded = m.shadow.distinct_loaded;
  counts->distinct_stored = m.shadow.distinct_stored;
}
