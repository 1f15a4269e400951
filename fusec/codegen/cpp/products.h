// Products of matrices in memory, for programs that have them; it follows prelude.h.
//
// f_multiply(c, row, panel,       c[i, j] (+)= sum(k: a[i, k] * b[k, j]) in f32 for i < rows, j <
//            a, row, term,        columns (a multiple of FUSEC_W), k < terms: strides in elements;
//            b, term, panel,      W columns are a panel, contiguous in memory
//            rows, columns, terms, adds)
// f_multiply<DENSE>(...)          the same, and prefetches what follows b: the next terms, or panel
// f_multiply<APART>(...)          the same of terms that lie apart: the next columns of each
// f_multiply_bf16(c, row, panel,  the same of bf16, accumulated in f32; fastest if a is contiguous
//            a, row, term,        along terms or rows, and b along terms or columns
//            b, term, column,
//            rows, columns, terms, adds)
//                                 b may be of `m_pair`, two terms of a column: those of the columns
//                                 are contiguous, and `term`, in pairs, is half of what they take
// f_multiply_i8(...)              the same of int8, accumulated in i32, which wraps
// fusec_tiles_in_use tiles;       must be in scope where either of these two is called
// st_operand_bf16(p, v)           a store to a private operand: subnormals may become 0
// stp_operand_bf16(p, v, w)       the same of pairs: lane l at p[2 * l] and p[2 * l + 1]

// ---- f32 ----------------------------------------------------------------------------------------
// A block of R rows and V vectors of the result stays in registers while all terms are accumulated:
// 24 accumulators of 32 registers, or 12 of 16. There is a pointer to every third row only, so that
// the pointers fit in the general registers. If `b` is streamed (DENSE), each block of rows
// prefetches its share of what follows, `step` elements in each iteration: the first block alone
// would wait for memory (128 x 768 x 3072, weights from memory: 319 GFLOP/s instead of 266; two
// threads, AVX-512, 2026-11-27). Terms that lie APART are on a page each, which no hardware foresees:
// 256 rows, 24 matrices of 1024 x 1536, take 16 ms instead of 23 (one thread, AVX2, 2026-11-29).
//
// What a call adds to `c` is summed from 0 first, so that errors grow with the terms of a call.

#define FUSEC_R (FUSEC_W == 16 ? 12 : 6)
typedef vf32 vf32_any __attribute__((may_alias, aligned(4)));
enum fusec_ahead { NOTHING, DENSE, APART };
template <int R, int V, fusec_ahead AHEAD>
static __attribute__((noinline, unused)) void fusec_block(
    float *c, long long cr, long long cp, const float *a, long long ar, long long ak,
    const float *b, long long bk, long long bp, long long terms, bool adds, const float *next,
    long long step) {
  vf32 sum[R][V];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) sum[r][v] = vf32{};
  const float *third[(R + 2) / 3];
#pragma GCC unroll 4
  for (int t = 0; t < (R + 2) / 3; t++) third[t] = a + 3 * t * ar;
  for (long long k = 0; k < terms; k++) {
    vf32 y[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) y[v] = *(const vf32_any *)(b + v * bp);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      vf32 x = v_f32(third[r / 3][r % 3 * ar]);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sum[r][v] += x * y[v];
    }
    if (AHEAD != NOTHING) {
      __builtin_prefetch(next, 0, 2);
      if ((AHEAD == APART ? V * FUSEC_W : step) > 16) __builtin_prefetch(next + 16, 0, 2);
      next += step;
    }
    b += bk;
#pragma GCC unroll 4
    for (int t = 0; t < (R + 2) / 3; t++) third[t] += ak;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      vf32_any *to = (vf32_any *)(c + r * cr + v * cp);
      *to = adds ? *to + sum[r][v] : sum[r][v];
    }
}
template <int V, fusec_ahead AHEAD>
static __attribute__((noinline, unused)) void fusec_rows(
    float *c, long long cr, long long cp, const float *a, long long ar, long long ak,
    const float *b, long long bk, long long bp, long long rows, long long terms, bool adds) {
  long long i = 0;
  // Each block prefetches its share of as many terms, or the columns behind those of all terms.
  const float *next = AHEAD == APART ? b + V * FUSEC_W : b + terms * bk;
#define FUSEC_BLOCKS(R)                                                                        \
  for (long long step = AHEAD == APART   ? bk                                                  \
                        : AHEAD == DENSE ? (bk * R + rows - 1) / (rows > R ? rows : R)         \
                                         : 0;                                                  \
       i + R <= rows; i += R, next += AHEAD == APART ? 0 : step * terms)                       \
    fusec_block<R, V, AHEAD>(c + i * cr, cr, cp, a + i * ar, ar, ak, b, bk, bp, terms, adds,   \
                             next, step);
  FUSEC_BLOCKS(FUSEC_R)
#if FUSEC_W == 16
  FUSEC_BLOCKS(8)
#endif
  FUSEC_BLOCKS(4)
  FUSEC_BLOCKS(3)
  FUSEC_BLOCKS(2)
  FUSEC_BLOCKS(1)
#undef FUSEC_BLOCKS
}
template <fusec_ahead AHEAD = NOTHING>
FUSEC_INLINE void f_multiply(
    float *c, long long cr, long long cp, const float *a, long long ar, long long ak,
    const float *b, long long bk, long long bp, long long rows, long long columns,
    long long terms, bool adds) {
  long long j = 0;
  for (; j + 2 * FUSEC_W <= columns; j += 2 * FUSEC_W, b += 2 * bp, c += 2 * cp)
    fusec_rows<2, AHEAD>(c, cr, cp, a, ar, ak, b, bk, bp, rows, terms, adds);
  if (j < columns) fusec_rows<1, AHEAD>(c, cr, cp, a, ar, ak, b, bk, bp, rows, terms, adds);
}

// ---- bf16 ---------------------------------------------------------------------------------------
// Two terms of W columns are a vector of pairs, the earlier term in the lower half. If the CPU has
// tiles (AMX), 32 rows by 2 * W columns are summed in four tiles: 920 to 1200 GFLOP/s with packing
// on a core whose f32 reaches 190 (Xeon, 96 x 128 x 64 and similar, 2026-11), and so are fours of
// int8: 128 rows of 4096 x 4096 take 5.0 ms with all around them for 12.8 by VNNI. Else, on AMD's
// processors (SSE4a), `vdpbf16ps` adds pairs: 222 GFLOP/s, where f32 reaches 117 (EPYC, 128 x 64 x
// 256, 2026-11-29). Intel's reached 80 with it, less than half of f32: others widen operands.

#define FUSEC_TERMS 256  // terms that are packed at a time
#define FUSEC_ROWS 128   // rows of a that are copied at a time, if they must be copied
#define FUSEC_TILE_BYTES 512  // of a row's terms that are packed for tiles at a time
#if FUSEC_W == 16 && defined(__AVX512BF16__) && defined(__SSE4A__)
#define FUSEC_PAIRS
#endif
typedef int fusec_word __attribute__((may_alias));
struct m_pair { m_bf16 terms[2]; };

// Subnormals may become 0: instructions for bf16 treat them as 0, that which rounds as well.
#if FUSEC_W == 16 && (defined(__AMX_BF16__) || defined(FUSEC_PAIRS)) && \
    defined(__AVX512BF16__) && !defined(__clang__)
FUSEC_INLINE vu16 fusec_operand_halves(vf32 v) { return (vu16)__builtin_ia32_cvtneps2bf16_v16sf(v); }
FUSEC_INLINE void st_operand_bf16(m_bf16 *p, vf32 v) { fusec_st((raw16 *)p, fusec_operand_halves(v)); }
FUSEC_INLINE void stp_operand_bf16(m_bf16 *p, vf32 v, vf32 w) {
  typedef FUSEC_VEC(unsigned short, 32) both;
  const both turn = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  both halves;  // those of v, then those of w
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(halves) : "v"(w), "v"(v));
  fusec_st((raw32 *)p, (vi32)__builtin_shuffle(halves, turn));
}
#else
FUSEC_INLINE void st_operand_bf16(m_bf16 *p, vf32 v) { st_bf16(p, v); }
FUSEC_INLINE void stp_operand_bf16(m_bf16 *p, vf32 v, vf32 w) { stp_bf16(p, v, w); }
#endif

#define FUSEC_TRANSPOSES(D)                                                                       \
  FUSEC_INLINE void fusec_transpose(m_##D *t, const m_##D *p, long long s, long long n) {         \
    ldt_##D(t, p, s, n);                                                                          \
  }                                                                                               \
  FUSEC_INLINE void fusec_transpose(m_##D *t, const m_##D *p, long long s, long long n, vm m) {   \
    ldtm_##D(t, p, s, n, m);                                                                      \
  }
FUSEC_TRANSPOSES(bf16)
FUSEC_TRANSPOSES(i8)

// Packs the terms of W columns in pairs; those from `terms` up to `all` are 0.
static __attribute__((noinline, unused)) void fusec_pack_pairs(
    m_f32 *pairs, const m_bf16 *b, long long bk, long long bc, long long terms, long long all) {
  long long k = 0;
  if (bk == 1 && bc % 2 == 0 && (unsigned long long)b % 4 == 0) {
    for (; k + 2 <= terms; k += 2 * FUSEC_W) {
      long long n = fusec_least(FUSEC_W, (terms - k) / 2);
      m_f32 block[FUSEC_W * FUSEC_W], *to = pairs + k / 2 * FUSEC_W;
      bool whole = n == FUSEC_W;  // it has no row that is undefined
      ldt_f32(whole ? to : block, (const m_f32 *)(b + k), bc / 2, n);
      for (long long l = whole ? n : 0; l < n; l++)
        st_f32(to + l * FUSEC_W, ld_f32(block + l * FUSEC_W));
    }
    k = terms / 2 * 2;
  } else if (bk == 2 && bc % 2 == 0) {
    // An aligned word has a term and its neighbour: what does not exist is no page of its own.
    bool odd = (unsigned long long)b % 4;
    const m_f32 *words = (const m_f32 *)(b - odd);
    for (; k + 2 <= terms; k += FUSEC_W) {
      long long n = fusec_least(FUSEC_W, (terms - k) / 2 * 2);
      m_f32 block[FUSEC_W * FUSEC_W];
      ldt_f32(block, words + k, bc / 2, n);
      for (long long l = 0; l < n; l += 2) {
        vu32 x = (vu32)ld_f32(block + l * FUSEC_W), y = (vu32)ld_f32(block + (l + 1) * FUSEC_W);
        vu32 pair = odd ? x >> 16 | (y & 0xffff0000) : (x & 0xffff) | y << 16;
        st_f32(pairs + (k + l) / 2 * FUSEC_W, (vf32)pair);
      }
    }
    k = terms / 2 * 2;
  } else if (bc == 1) {
    for (; k + 2 <= terms; k += 2) {
      vu32 even = (vu32)ld_bf16(b + k * bk), odd = (vu32)ld_bf16(b + (k + 1) * bk);
      st_f32(pairs + k / 2 * FUSEC_W, (vf32)(even >> 16 | odd));
    }
  }
  m_bf16 *halves = (m_bf16 *)pairs;
  for (; k < all; k++)
    for (long long l = 0; l < FUSEC_W; l++)
      halves[(k / 2 * FUSEC_W + l) * 2 + k % 2] = k < terms ? b[k * bk + l * bc] : 0;
}

// The same of terms that lie in pairs.
static __attribute__((noinline, unused)) void fusec_pack_pairs(
    m_f32 *pairs, const m_pair *b, long long bk, long long, long long terms, long long all) {
  for (long long k = 0; k < all; k += 2) {
    m_f32 *to = pairs + k / 2 * FUSEC_W;
    st_f32(to, k < terms ? ld_f32((const m_f32 *)(b + k * bk)) : v_f32(0));
    for (long long l = 0; k + 1 == terms && l < FUSEC_W; l++) ((m_bf16 *)to)[2 * l + 1] = 0;
  }
}

// Copies rows of a, `step` elements apart, each padded with zeros from `terms` up to `all`; terms
// that lie apart may be padded up to a multiple of W.
template <class T>
static __attribute__((noinline, unused)) void fusec_copy_rows(
    T *rows, long long step, const T *a, long long ar, long long ak, long long count,
    long long terms, long long all) {
  for (long long r = 0; r < count; r++)
    if (ak == 1) {
      __builtin_memcpy(rows + r * step, a + r * ar, sizeof(T) * terms);
      __builtin_memset(rows + r * step + terms, 0, sizeof(T) * (all - terms));
    } else if (ar == 1 && r % FUSEC_W == 0) {
      long long n = fusec_least(FUSEC_W, count - r);
      for (long long k = 0; k < all; k += FUSEC_W) {
        T block[FUSEC_W * FUSEC_W] = {};
        if (k + FUSEC_W <= terms)
          fusec_transpose(block, a + r + k * ak, ak, n);
        else if (k < terms)
          fusec_transpose(block, a + r + k * ak, ak, n, v_first(terms - k));
        for (long long l = 0; l < n; l++)
          __builtin_memcpy(rows + (r + l) * step + k, block + l * FUSEC_W, sizeof(T) * FUSEC_W);
      }
    } else if (ar != 1) {
      for (long long k = 0; k < all; k++) rows[r * step + k] = k < terms ? a[r * ar + k * ak] : 0;
    }
}

// Packs fours of int8, as `fusec_pack_pairs` does pairs; of up to FUSEC_TILE_BYTES terms.
static __attribute__((noinline, unused)) void fusec_pack_fours(
    m_f32 *fours, const m_i8 *b, long long bk, long long bc, long long terms, long long all) {
  m_i8 columns[FUSEC_W * FUSEC_TILE_BYTES];
  if (bk != 1 || terms % 4 || bc % 4 || (unsigned long long)b % 4) {
    fusec_copy_rows(columns, FUSEC_TILE_BYTES, b, bc, bk, FUSEC_W, terms, all);
    b = columns, bc = FUSEC_TILE_BYTES, terms = all;
  }
  fusec_pack_pairs(fours, (const m_bf16 *)b, 1, bc / 2, terms / 2, all / 2);
}

// Multiplies R rows by V * W columns; the number of terms is even.
template <int R, int V>
static __attribute__((noinline, unused)) void fusec_block_pairs(
    float *c, long long cr, long long cp, const m_bf16 *a, long long ar, const m_f32 *pairs,
    long long terms, bool adds) {
  vf32 sum[R][V];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) sum[r][v] = vf32{};
#ifdef FUSEC_PAIRS
  const m_bf16 *third[(R + 2) / 3];
#pragma GCC unroll 4
  for (int t = 0; t < (R + 2) / 3; t++) third[t] = a + 3 * t * ar;
  for (long long k = 0; k < terms; k += 2) {
    vf32 y[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) y[v] = ld_f32(pairs + (v * FUSEC_TERMS + k) / 2 * FUSEC_W);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int v = 0; v < V; v++)
        asm("vdpbf16ps %2%{1to16%}, %1, %0"
            : "+v"(sum[r][v])
            : "v"(y[v]), "m"(*(const fusec_word *)(third[r / 3] + r % 3 * ar)));
#pragma GCC unroll 4
    for (int t = 0; t < (R + 2) / 3; t++) third[t] += 2;
  }
#else
  m_f32 wide[R * FUSEC_TERMS];
  for (int r = 0; r < R; r++)
    for (long long k = 0; k < terms; k += FUSEC_W)
      st_f32(wide + r * FUSEC_TERMS + k, ld_bf16(a + r * ar + k));
  for (long long k = 0; k < terms; k += 2)
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      vf32 y[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) {
        vu32 pair = (vu32)ld_f32(pairs + (v * FUSEC_TERMS + k) / 2 * FUSEC_W);
        y[v] = (vf32)(odd ? pair & 0xffff0000 : pair << 16);
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        vf32 x = v_f32(wide[r * FUSEC_TERMS + k + odd]);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) sum[r][v] += x * y[v];
      }
    }
#endif
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      vf32_any *to = (vf32_any *)(c + r * cr + v * cp);
      *to = adds ? *to + sum[r][v] : sum[r][v];
    }
}
template <int V>
static __attribute__((noinline, unused)) void fusec_rows_pairs(
    float *c, long long cr, long long cp, const m_bf16 *a, long long ar, const m_f32 *pairs,
    long long rows, long long terms, bool adds) {
  long long i = 0;
#define FUSEC_BLOCKS(R) \
  for (; i + R <= rows; i += R) \
    fusec_block_pairs<R, V>(c + i * cr, cr, cp, a + i * ar, ar, pairs, terms, adds);
  FUSEC_BLOCKS(FUSEC_R)
  FUSEC_BLOCKS(4)
  FUSEC_BLOCKS(1)
#undef FUSEC_BLOCKS
}

// ---- tiles (AMX) --------------------------------------------------------------------------------
// 16 rows of words of a, by words of 16 columns: pairs of bf16 into f32, or four of int8 into i32.

template <class T> constexpr long long fusec_at_once = FUSEC_TILE_BYTES / sizeof(T);  // terms
template <class T> constexpr long long fusec_whole = 64 / sizeof(T);   // terms of a tile
#if FUSEC_W == 16 && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
struct fusec_tile_shapes {
  unsigned char palette, start, reserved[14];
  unsigned short bytes[16];
  unsigned char rows[16];
};
// Eight tiles of 16 rows of 64 bytes.
alignas(64) static const fusec_tile_shapes fusec_tiles = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
#define FUSEC_TILE(what, t, p, step) \
  asm volatile(what : : "r"((const void *)(p)), "r"((long long)(step)) : "memory")
#define FUSEC_TILE_LOAD(t, p, step) FUSEC_TILE("tileloadd (%0,%1,1), %%tmm" #t, t, p, step)
#define FUSEC_TILE_STORE(t, p, step) FUSEC_TILE("tilestored %%tmm" #t ", (%0,%1,1)", t, p, step)
#define FUSEC_TILE_ZERO(t) asm volatile("tilezero %tmm" #t)
#define FUSEC_TILE_ADD(c, a, b)                                       \
  do {                                                                \
    if (sizeof(T) == 2)                                               \
      asm volatile("tdpbf16ps %tmm" #b ", %tmm" #a ", %tmm" #c);      \
    else                                                              \
      asm volatile("tdpbssd %tmm" #b ", %tmm" #a ", %tmm" #c);        \
  } while (0)
// True if Linux grants this process the use of tiles (ARCH_REQ_XCOMP_PERM of XTILEDATA): asked as the
// library is loaded, by one thread.
static const bool fusec_may_tile = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
FUSEC_INLINE bool fusec_has_tiles() { return fusec_may_tile; }
// Tiles are set up as long as one of these lives: for a point of the grid, in each thread. Set up by
// each product they take a tenth of 16 rows by 4096 x 4096 packed weights of 4 bits (2026-11-30).
struct fusec_tiles_in_use {
  fusec_tiles_in_use() {
    if (fusec_has_tiles()) asm volatile("ldtilecfg %0" : : "m"(fusec_tiles));
  }
  ~fusec_tiles_in_use() {
    if (fusec_has_tiles()) asm volatile("tilerelease");
  }
};
// Multiplies 16 * R rows by V * W columns; a row's terms are a multiple of 64 bytes.
template <class T, int R, int V>
static void fusec_block_tiles(
    m_f32 *c, long long cr, long long cp, const T *a, long long ar, const m_f32 *words,
    long long wk, long long wp, long long terms, bool adds) {
  long long step = cr * 4, side = ar * sizeof(T), down = wk * 4;
  if (adds) {
    FUSEC_TILE_LOAD(0, c, step);
    if (R == 2) FUSEC_TILE_LOAD(1, c + 16 * cr, step);
    if (V == 2) FUSEC_TILE_LOAD(2, c + cp, step);
    if (R == 2 && V == 2) FUSEC_TILE_LOAD(3, c + 16 * cr + cp, step);
  } else {
    FUSEC_TILE_ZERO(0);
    FUSEC_TILE_ZERO(1);
    FUSEC_TILE_ZERO(2);
    FUSEC_TILE_ZERO(3);
  }
  for (const T *end = a + terms; a < end; a += 64 / sizeof(T), words += 16 * wk) {
    FUSEC_TILE_LOAD(4, a, side);
    if (R == 2) FUSEC_TILE_LOAD(5, a + 16 * ar, side);
    FUSEC_TILE_LOAD(6, words, down);
    FUSEC_TILE_ADD(0, 4, 6);
    if (R == 2) FUSEC_TILE_ADD(1, 5, 6);
    if (V == 2) FUSEC_TILE_LOAD(7, words + wp, down);
    if (V == 2) FUSEC_TILE_ADD(2, 4, 7);
    if (R == 2 && V == 2) FUSEC_TILE_ADD(3, 5, 7);
  }
  FUSEC_TILE_STORE(0, c, step);
  if (R == 2) FUSEC_TILE_STORE(1, c + 16 * cr, step);
  if (V == 2) FUSEC_TILE_STORE(2, c + cp, step);
  if (R == 2 && V == 2) FUSEC_TILE_STORE(3, c + 16 * cr + cp, step);
}
// Multiplies 16 * R rows, or fewer in a copy of c, by panels of W columns.
template <class T, int R>
static __attribute__((noinline, unused)) void fusec_rows_tiles(
    m_f32 *c, long long cr, long long cp, const T *a, long long ar, const m_f32 *words,
    long long wk, long long wp, long long rows, long long panels, long long terms, bool adds) {
  m_f32 sum[2][16 * FUSEC_W];
  for (; panels > 0; panels -= 2, c += 2 * cp, words += 2 * wp) {
    bool two = panels > 1, few = rows < 16;
    m_f32 *to = few ? sum[0] : c;
    long long tr = few ? FUSEC_W : cr, tp = few ? 16 * FUSEC_W : cp;
    if (few && adds)
      for (long long r = 0; r < rows; r++)
        for (int v = 0; v <= two; v++)
          __builtin_memcpy(sum[v] + r * FUSEC_W, c + r * cr + v * cp, 4 * FUSEC_W);
    if (two)
      fusec_block_tiles<T, R, 2>(to, tr, tp, a, ar, words, wk, wp, terms, adds);
    else
      fusec_block_tiles<T, R, 1>(to, tr, tp, a, ar, words, wk, wp, terms, adds);
    if (few)
      for (long long r = 0; r < rows; r++)
        for (int v = 0; v <= two; v++)
          __builtin_memcpy(c + r * cr + v * cp, sum[v] + r * FUSEC_W, 4 * FUSEC_W);
  }
}
// Packs the words of W columns; those from `terms` up to `all` are 0.
template <class B>
FUSEC_INLINE void fusec_pack_words(
    m_f32 *words, const B *b, long long bk, long long bc, long long terms, long long all) {
  fusec_pack_pairs(words, b, bk, bc, terms, all);
}
FUSEC_INLINE void fusec_pack_words(
    m_f32 *words, const m_i8 *b, long long bk, long long bc, long long terms, long long all) {
  fusec_pack_fours(words, b, bk, bc, terms, all);
}
// Tiles read rows where they lie, also a page apart, if these are contiguous and whole: a copy for
// each panel takes as long as it saves (128 rows of 4096 x 4096: 1.5 ms of 9.5; Xeon, 2026-11-30).
template <class T, class B>
static __attribute__((noinline, unused)) void fusec_part_tiles(
    m_f32 *c, long long cr, long long cp, const T *a, long long ar, long long ak, const B *b,
    long long bk, long long bc, long long rows, long long columns, long long terms, bool adds) {
  alignas(64) T copy[FUSEC_ROWS * fusec_at_once<T>];
  alignas(64) m_f32 packed[8 * FUSEC_TILE_BYTES / 4 * FUSEC_W];
  long long all = (terms + fusec_whole<T> - 1) / fusec_whole<T> * fusec_whole<T>;
  long long from = ak != 1 || terms != all ? 0 : rows / 16 * 16;  // rows before it are not copied
  if (from < rows) fusec_copy_rows(copy, all, a + from * ar, ar, ak, rows - from, terms, all);
  for (long long panels = columns / FUSEC_W, n; panels > 0; panels -= n, c += n * cp) {
    n = fusec_least(8, panels);
    const m_f32 *words = packed;
    long long wk = FUSEC_W, wp = FUSEC_TILE_BYTES / 4 * FUSEC_W;
    if (sizeof(B) == sizeof(m_pair) && terms == all)
      words = (const m_f32 *)b, wk = 2 * bk, wp = FUSEC_W, b += n * FUSEC_W;
    else
      for (long long v = 0; v < n; v++, b += FUSEC_W * bc)
        fusec_pack_words(packed + v * wp, b, bk, bc, terms, all);
    for (long long i = 0, some; i < rows; i += some) {
      some = rows - i >= 32 ? 32 : fusec_least(16, rows - i);
      const T *at = i < from ? a + i * ar : copy + (i - from) * all;
      long long step = i < from ? ar : all;
      if (some == 32)
        fusec_rows_tiles<T, 2>(c + i * cr, cr, cp, at, step, words, wk, wp, some, n, all, adds);
      else
        fusec_rows_tiles<T, 1>(c + i * cr, cr, cp, at, step, words, wk, wp, some, n, all, adds);
    }
  }
}
template <class T, class B>
static __attribute__((noinline, unused)) void fusec_multiply_tiles(
    m_f32 *c, long long cr, long long cp, const T *a, long long ar, long long ak, const B *b,
    long long bk, long long bc, long long rows, long long columns, long long terms, bool adds) {
  for (long long k = 0; k == 0 || k < terms; k += fusec_at_once<T>, adds = true)
    for (long long i = 0; i < rows; i += FUSEC_ROWS)
      fusec_part_tiles(c + i * cr, cr, cp, a + i * ar + k * ak, ar, ak, b + k * bk, bk, bc,
                       fusec_least(FUSEC_ROWS, rows - i), columns,
                       fusec_least(fusec_at_once<T>, terms - k), adds);
}
#else
FUSEC_INLINE bool fusec_has_tiles() { return false; }
struct fusec_tiles_in_use {
  fusec_tiles_in_use() {}  // else it is a variable that nothing uses
};
template <class T, class B> FUSEC_INLINE void fusec_multiply_tiles(
    m_f32 *, long long, long long, const T *, long long, long long, const B *, long long,
    long long, long long, long long, long long, bool) {}
#endif

// Multiplies by V * W columns; the rows of a have terms padded to a multiple of 32.
template <int V, class B>
FUSEC_INLINE void fusec_columns_bf16(
    float *c, long long cr, long long cp, const m_bf16 *a, long long ar, const B *b,
    long long bk, long long bc, long long rows, long long terms, bool adds) {
  alignas(64) m_f32 pairs[V][FUSEC_TERMS / 2 * FUSEC_W];
  long long all = (terms + 31) / 32 * 32;
  for (int v = 0; v < V; v++)
    fusec_pack_pairs(pairs[v], b + v * FUSEC_W * bc, bk, bc, terms, all);
  fusec_rows_pairs<V>(c, cr, cp, a, ar, pairs[0], rows, all, adds);
}
template <class B>
static __attribute__((noinline, unused)) void fusec_part_bf16(
    float *c, long long cr, long long cp, const m_bf16 *a, long long ar, long long ak,
    const B *b, long long bk, long long bc, long long rows, long long columns,
    long long terms, bool adds) {
  alignas(64) m_bf16 copy[FUSEC_ROWS * FUSEC_TERMS];
  if (ak != 1 || terms % 32 || ar % 1024 == 0) {
    long long all = (terms + 31) / 32 * 32;
    fusec_copy_rows(copy, all, a, ar, ak, rows, terms, all);
    a = copy, ar = all;
  }
  long long j = 0;
#define FUSEC_COLUMNS(V)                                                                    \
  for (; j + V * FUSEC_W <= columns; j += V * FUSEC_W)                                      \
    fusec_columns_bf16<V>(c + j / FUSEC_W * cp, cr, cp, a, ar, b + j * bc, bk, bc, rows, terms, adds);
  FUSEC_COLUMNS(2)
  FUSEC_COLUMNS(1)
#undef FUSEC_COLUMNS
}
template <class B>
FUSEC_INLINE void f_multiply_bf16(
    float *c, long long cr, long long cp, const m_bf16 *a, long long ar, long long ak,
    const B *b, long long bk, long long bc, long long rows, long long columns,
    long long terms, bool adds) {
  terms = terms < 0 ? 0 : terms;
  if (fusec_has_tiles())
    return fusec_multiply_tiles(c, cr, cp, a, ar, ak, b, bk, bc, rows, columns, terms, adds);
  for (long long k = 0; k == 0 || k < terms; k += FUSEC_TERMS, adds = true)
    for (long long i = 0; i < rows; i += FUSEC_ROWS)
      fusec_part_bf16(c + i * cr, cr, cp, a + i * ar + k * ak, ar, ak, b + k * bk, bk, bc,
                      fusec_least(FUSEC_ROWS, rows - i), columns, fusec_least(FUSEC_TERMS, terms - k),
                      adds);
}

// ---- int8 ---------------------------------------------------------------------------------------
// A word of a row is multiplied by a word of each of W columns, and the products are added, all in
// one instruction: pairs of terms widened to 16 bits, twice the rate of f32, or four terms as they
// are (AVX-512 VNNI), where the CPU has no tiles. Four terms of a row are unsigned, so 128 is added to each: 128 times the sum
// of a column is subtracted from what they add up to, exactly, since i32 wraps.

#if defined(FUSEC_AVX512) && defined(__AVX512VNNI__)
#define FUSEC_FOURS
typedef m_i8 fusec_term;
FUSEC_INLINE vi32 fusec_add_words(vi32 sum, vi32 x, vi32 y) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
  return sum;
}
#elif defined(FUSEC_AVX512) || defined(FUSEC_AVX2)
typedef short fusec_term;
typedef FUSEC_VEC(short, 2 * FUSEC_W) fusec_pairs;
FUSEC_INLINE vi32 fusec_add_words(vi32 sum, vi32 x, vi32 y) {
#ifdef FUSEC_AVX512
  return sum + __builtin_ia32_pmaddwd512_mask((fusec_pairs)x, (fusec_pairs)y, vi32{}, -1);
#else
  return sum + __builtin_ia32_pmaddwd256((fusec_pairs)x, (fusec_pairs)y);
#endif
}
#else
typedef short fusec_term;
FUSEC_INLINE vi32 fusec_add_words(vi32 sum, vi32 x, vi32 y) {
  return sum + (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
}
#endif
#define FUSEC_WORD (4 / (long long)sizeof(fusec_term))  // terms in a word

// Copies rows of words, each padded with zeros from `terms` up to the end of a word.
static __attribute__((noinline, unused)) void fusec_word_rows(
    fusec_term *to, const m_i8 *a, long long ar, long long ak, long long rows, long long terms) {
  long long all = (terms + FUSEC_WORD - 1) / FUSEC_WORD * FUSEC_WORD;
#ifdef FUSEC_FOURS
  fusec_copy_rows(to, FUSEC_TERMS, a, ar, ak, rows, terms, all);
#else
  m_i8 copy[FUSEC_W * FUSEC_TERMS];
  for (long long r = 0; r < rows; r++, a += ar, to += FUSEC_TERMS) {
    const m_i8 *row = ak == 1 ? a : copy + r % FUSEC_W * FUSEC_TERMS;
    if (ak != 1 && r % FUSEC_W == 0)
      fusec_copy_rows(copy, FUSEC_TERMS, a, ar, ak, fusec_least(FUSEC_W, rows - r), terms, all);
    long long k = 0;
    for (; k + FUSEC_W <= terms; k += FUSEC_W) st_i16((m_i16 *)to + k, ld_i8(row + k));
    for (; k < all; k++) to[k] = k < terms ? row[k] : 0;
  }
#endif
}
template <int R, int V>
static __attribute__((noinline, unused)) void fusec_block_i8(
    m_i32 *c, long long cr, long long cp, const fusec_term *a, const m_f32 *words,
    const vi32 *less, long long count, bool adds) {
  vi32 sum[R][V];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) sum[r][v] = (adds ? ld_i32(c + r * cr + v * cp) : vi32{}) - less[v];
  for (long long k = 0; k < count; k++) {
    vi32 y[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++)
      y[v] = (vi32)ld_f32(words + (v * FUSEC_TERMS / FUSEC_WORD + k) * FUSEC_W);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      vi32 x = v_i32(*(const fusec_word *)(a + r * FUSEC_TERMS + k * FUSEC_WORD));
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sum[r][v] = fusec_add_words(sum[r][v], x, y[v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) st_i32(c + r * cr + v * cp, sum[r][v]);
}
template <int V>
static __attribute__((noinline, unused)) void fusec_columns_i8(
    m_i32 *c, long long cr, long long cp, const fusec_term *a, const m_i8 *b, long long bk,
    long long bc, long long rows, long long terms, bool adds) {
  alignas(64) m_f32 words[V][FUSEC_TERMS / FUSEC_WORD * FUSEC_W];
  long long count = (terms + FUSEC_WORD - 1) / FUSEC_WORD;
  vi32 less[V] = {};
  for (int v = 0; v < V; v++) {
#ifndef FUSEC_FOURS
    alignas(64) fusec_term columns[FUSEC_W * FUSEC_TERMS];
    fusec_word_rows(columns, b + v * FUSEC_W * bc, bc, bk, FUSEC_W, terms);
    fusec_pack_pairs(words[v], (const m_bf16 *)columns, 1, FUSEC_TERMS, 2 * count, 2 * count);
#else
    fusec_pack_fours(words[v], b + v * FUSEC_W * bc, bk, bc, terms, 4 * count);
    for (long long k = 0; k < count; k++)
      less[v] = fusec_add_words(less[v], v_i32((int)0x80808080), (vi32)ld_f32(words[v] + k * FUSEC_W));
#endif
  }
  long long i = 0;
#define FUSEC_BLOCKS(R)            \
  for (; i + R <= rows; i += R)    \
    fusec_block_i8<R, V>(c + i * cr, cr, cp, a + i * FUSEC_TERMS, words[0], less, count, adds);
  FUSEC_BLOCKS(FUSEC_R)
  FUSEC_BLOCKS(4)
  FUSEC_BLOCKS(1)
#undef FUSEC_BLOCKS
}
static __attribute__((noinline, unused)) void f_multiply_i8(
    m_i32 *c, long long cr, long long cp, const m_i8 *a, long long ar, long long ak,
    const m_i8 *b, long long bk, long long bc, long long rows, long long columns,
    long long terms, bool adds) {
  alignas(64) fusec_term words[FUSEC_ROWS * FUSEC_TERMS];
  terms = terms < 0 ? 0 : terms;
#ifdef __AMX_INT8__
  if (fusec_has_tiles())
    return fusec_multiply_tiles((m_f32 *)c, cr, cp, a, ar, ak, b, bk, bc, rows, columns, terms, adds);
#endif
  for (long long k = 0; k == 0 || k < terms; k += FUSEC_TERMS, adds = true)
    for (long long i = 0; i < rows; i += FUSEC_ROWS) {
      long long n = fusec_least(FUSEC_ROWS, rows - i), some = fusec_least(FUSEC_TERMS, terms - k);
      fusec_word_rows(words, a + i * ar + k * ak, ar, ak, n, some);
#ifdef FUSEC_FOURS
      for (long long r = 0; r < n; r++)
        for (long long t = 0; t < some; t += 4 * FUSEC_W) {
          m_i32 *at = (m_i32 *)(words + r * FUSEC_TERMS + t);
          st_i32(at, ld_i32(at) ^ (int)0x80808080);
        }
#endif
      long long j = 0;
#define FUSEC_COLUMNS(V)                                                                   \
  for (; j + V * FUSEC_W <= columns; j += V * FUSEC_W)                                     \
    fusec_columns_i8<V>(c + i * cr + j / FUSEC_W * cp, cr, cp, words, b + k * bk + j * bc, bk, \
                        bc, n, some, adds);
      FUSEC_COLUMNS(2)
      FUSEC_COLUMNS(1)
#undef FUSEC_COLUMNS
    }
}
