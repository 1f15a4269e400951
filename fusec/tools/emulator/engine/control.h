// Branches: lanes of a warp part, and run together again where all their ways lead.

// Go on at an instruction; at a meeting, or where no lane is left, with the lanes that wait.
static void go_to(Warp& w, int64_t pc) {
  w.pc = pc;
  while (!w.paths.empty() && (!w.active || (w.meeting >= 0 && w.pc == w.meeting))) {
    Path next = w.paths.back();
    w.paths.pop_back();
    w.pc = next.pc;
    w.meeting = next.meeting;
    w.active = next.lanes & w.live;
  }
}

// Let lanes go on by some paths, one after the other, and all of them together from a meeting.
static void part(Warp& w, int64_t meeting, const std::vector<Path>& ways) {
  if (meeting >= 0) w.paths.push_back({meeting, w.meeting, w.active});
  w.paths.insert(w.paths.end(), ways.begin(), ways.end());
  w.active = 0;
  go_to(w, w.pc);
}

static void run_bra(Warp& w, const Instruction& i) {
  if (w.running == w.active || !w.running) return go_to(w, w.running ? i.target : w.pc + 1);
  part(w, i.meeting, {{w.pc + 1, i.meeting, w.active & ~w.running},
                      {i.target, i.meeting, w.running}});
}

static void run_brx(Warp& w, const Instruction& i) {
  const int64_t* table = w.block->machine->launch->branch_targets + i.target;
  Lanes<uint32_t> index = fetch<uint32_t>(w, i, 0);
  std::vector<Path> ways;
  if (w.active & ~w.running) ways.push_back({w.pc + 1, i.meeting, w.active & ~w.running});
  for (int64_t k = 0; k < i.count; k++) {
    Mask lanes = 0;
    for (int l = 0; l < LANES; l++) lanes |= (Mask)(index[l] == k) << l;
    if (lanes & w.running) ways.push_back({table[k], i.meeting, lanes & w.running});
  }
  if (ways.size() == 1) return go_to(w, ways[0].pc);
  part(w, i.meeting, ways);
}

// How many registers each thread has from here on. What one warp gives back another may wait for.
static void run_set_registers(Warp& w, const Instruction& i) {
  if (!w.running || !w.registers) return;
  Block& block = *w.block;
  int64_t more = i.count - w.registers;
  bool known = 24 <= i.count && i.count <= 256 && i.count % 8 == 0;
  if (w.active != w.live) return raise(w, i, DIVERGED);
  if (!known || (i.flags & TAKES ? more < 0 : more > 0)) {
    return raise(w, i, REGISTER_COUNT, -1, -1, i.count);
  }
  w.polling = more > block.free_registers;
  w.polled_at = block.happened;
  if (w.polling) return;
  block.free_registers -= more;
  w.registers = i.count;
  if (more < 0) block.happened++;
}

// The launch before this one has ended, and what it wrote is visible to the whole grid.
static void run_grid_wait(Warp& w, const Instruction& i) {
  if (w.running != w.live) return raise(w, i, DIVERGED);
  w.block->waits.push_back(now(w));
}

static void run_grid_launch(Warp& w, const Instruction& i) {
  if (!may_go_on(*w.block, w.known)) raise(w, i, EARLY_LAUNCH);
}

static void run_ret(Warp& w, const Instruction&) {
  w.live &= ~w.running;
  w.active &= w.live;
  go_to(w, w.pc + 1);
}
