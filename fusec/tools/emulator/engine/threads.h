// What lanes of a warp tell each other.

// All lanes that the instruction names have to be there.
static bool together(Warp& w, const Instruction& i, uint64_t members) {
  if (((Mask)members & w.live) == (w.active & (Mask)members)) return true;
  raise(w, i, DIVERGED);
  return false;
}

// result, result's predicate, value, lane, clamp, members
static void run_shfl(Warp& w, const Instruction& i) {
  if (!together(w, i, uniform(w, i, 5))) return;
  Lanes<uint32_t> a = fetch<uint32_t>(w, i, 2), b = fetch<uint32_t>(w, i, 3), d;
  Lanes<uint32_t> clamps = fetch<uint32_t>(w, i, 4);
  Mask inside = 0;
  for (int l = 0; l < LANES; l++) {
    int by = b[l] & 31, clamp = clamps[l] & 31, segment = clamps[l] >> 8 & 31;
    int most = (l & segment) | (clamp & ~segment), least = l & segment, from;
    bool in;
    switch (i.choice) {
      case UP: from = l - by, in = from >= most; break;
      case DOWN: from = l + by, in = from <= most; break;
      case BFLY: from = l ^ by, in = from <= most; break;
      default: from = least | (by & ~segment), in = from <= most;
    }
    if (!in) from = l;
    d[l] = a[from & 31];
    inside |= (Mask)in << l;
  }
  put(w, i, 0, d);
  put_predicate(w, i, 1, inside);
}

// result, predicate, members
static void run_vote(Warp& w, const Instruction& i) {
  Mask members = (Mask)uniform(w, i, 2);
  if (!together(w, i, members)) return;
  members &= w.active;
  Mask yes = fetch_predicate(w, i, 1) & members;
  if (i.choice == BALLOT) {
    Lanes<uint32_t> d;
    d.fill(yes);
    return put(w, i, 0, d);
  }
  bool all = yes == members, any = yes != 0;
  bool found = i.choice == ALL ? all : i.choice == ANY ? any : all || !any;
  put_predicate(w, i, 0, found ? ALL_LANES : 0);
}

static void run_activemask(Warp& w, const Instruction& i) {
  Lanes<uint32_t> d;
  d.fill(w.active);
  put(w, i, 0, d);
}

// The extremum of f32; a NaN wins or loses. IGNORES: of the absolute values.
static void redux_float(Warp& w, const Instruction& i, Mask members) {
  Lanes<float> a = fetch<float>(w, i, 1), d;
  float best = std::numeric_limits<float>::quiet_NaN();
  bool first = true, nan = false;
  for (int l = 0; l < LANES; l++) {
    if (!(members >> l & 1)) continue;
    float value = i.flags & IGNORES ? std::fabs(a[l]) : a[l];
    if (std::isnan(value)) {
      nan = true;
    } else if (first || (i.count == ATOMIC_MAX ? value > best : value < best)) {
      best = value, first = false;
    }
  }
  d.fill(nan && i.flags & NANS ? std::numeric_limits<float>::quiet_NaN() : best);
  put(w, i, 0, d);
}

// result, value, members
static void run_redux(Warp& w, const Instruction& i) {
  Mask members = (Mask)uniform(w, i, 2);
  if (!together(w, i, members)) return;
  members &= w.active;
  if (i.type == F32) return redux_float(w, i, members);
  with_integer(i.type, [&](auto tag) {
    using T = decltype(tag);
    Lanes<T> a = fetch<T>(w, i, 1), d;
    T sum{};
    bool first = true;
    for (int l = 0; l < LANES; l++) {
      if (!(members >> l & 1)) continue;
      sum = first ? a[l] : atomic_result<T>(sum, a[l], T{}, i);
      first = false;
    }
    d.fill(sum);
    put(w, i, 0, d);
  });
}

// the leader's number, whether this lane is it, members
static void run_elect(Warp& w, const Instruction& i) {
  Mask members = (Mask)uniform(w, i, 2);
  if (!together(w, i, members)) return;
  int leader = first_lane(members & w.active);
  Lanes<uint32_t> d;
  d.fill((uint32_t)leader);
  put(w, i, 0, d);
  put_predicate(w, i, 1, 1u << leader);
}

static void run_bar_warp(Warp& w, const Instruction& i) { together(w, i, uniform(w, i, 0)); }

static void run_nothing(Warp&, const Instruction&) {}

static void run_trap(Warp& w, const Instruction& i) { raise(w, i, TRAP, first_lane(w.running)); }
