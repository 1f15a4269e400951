// Products of fragments whose factors have a scale for each block of a row's terms (mma, Blackwell).

static float value_of_e2m1(int b) {
  static const float sizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return b & 8 ? -sizes[b & 7] : sizes[b & 7];
}

// A scale has no sign: a power of two, or a positive e4m3.
static double scale_of(uint8_t b, int64_t type) {
  if (type == UE4M3) return value_of_e4m3(b & 0x7f);
  return b == 0xff ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, b - 127);
}

// The terms of 32 bytes of each row: 32 of 8 bits, or 64 of 4 bits.
static int terms_of(int64_t type) { return type == E2M1 ? 64 : 32; }

// A fragment's registers as rows of terms; see `scatter` for their places.
static void scatter_terms(const std::vector<Lanes<uint32_t>>& registers, int64_t type, bool first,
                          double (&out)[16][64]) {
  size_t row_step = first ? 2 : 1;
  for (size_t r = 0; r < registers.size(); r++) {
    for (int l = 0; l < LANES; l++) {
      uint8_t bytes[4];
      memcpy(bytes, &registers[r][l], 4);
      double* row = out[l / 4 + (first ? 8 * (int)(r % row_step) : 0)];
      for (int b = 0; b < 4; b++) {
        int at = 16 * (int)(r / row_step) + 4 * (l % 4) + b;
        if (type == E2M1) {
          row[2 * at] = value_of_e2m1(bytes[b] & 15), row[2 * at + 1] = value_of_e2m1(bytes[b] >> 4);
        } else {
          row[at] = element_value(bytes + b, type);
        }
      }
    }
  }
}

// Multiply rows by their scales: four lanes have those of row l/4, and of the first factor two of
// them those of row l/4 + 8. Operands: a register, the first byte, which of the four (pairs).
static void scale_rows(Warp& w, const Instruction& i, int64_t k, bool first, int terms,
                       double (&rows)[16][64]) {
  Lanes<uint32_t> scales = fetch<uint32_t>(w, i, k);
  int byte = (int)uniform(w, i, k + 1), which = (int)uniform(w, i, k + 2);
  for (int r = 0; r < (first ? 16 : 8); r++) {
    int lane = 4 * (r % 8) + (first ? 2 * which + r / 8 : which);
    for (int t = 0; t < terms; t++) {
      int block = byte + t * (int)i.count / terms;
      rows[r][t] *= scale_of((uint8_t)(scales[lane & 31] >> 8 * (block & 3)), i.choice);
    }
  }
}

// m16n8 of f32; d, a, b, c, then the scales of a and of b with the places of both.
static void run_mma_scaled(Warp& w, const Instruction& i) {
  if (w.running != ALL_LANES) return raise(w, i, DIVERGED);
  double a[16][64] = {}, b[16][64] = {};
  int terms = terms_of(i.type);
  scatter_terms(fetch_many(w, i, 4, 4), i.type, true, a);
  scatter_terms(fetch_many(w, i, 8, 2), i.source, false, b);
  scale_rows(w, i, 14, true, terms, a);
  scale_rows(w, i, 17, false, terms, b);
  for (int64_t r = 0; r < 4; r++) {
    Lanes<float> sum = fetch<float>(w, i, 10 + r);
    for (int l = 0; l < LANES; l++) {
      int row = l / 4 + 8 * (int)(r / 2), column = 2 * (l % 4) + (int)(r % 2);
      double product = 0;
      for (int k = 0; k < terms; k++) product += a[row][k] * b[column][k];
      sum[l] = (float)(sum[l] + product);
    }
    put(w, i, r, sum);
  }
  w.block->machine->counts->multiplied += 16 * 8 * terms;
}
