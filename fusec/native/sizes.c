/* Sizes that a call chooses: formulas of them, and conditions.

     formula    ::= 8 | -8 | s0 | ("+" | "*" | "min" | "//" | "%") formula formula
     condition  ::= ("==" | "!=" | "<" | "<=" | ">" | ">=") formula formula
                  | ("and" | "or") condition condition

   There is one space between two words. All arithmetic is checked: a number that 64 bits do not hold
   is none. */

#include <stdio.h>
#include <string.h>

#include "parts.h"

enum { DEEPEST = 1000 };

static const char *const arithmetic[] = {"+ ", "* ", "min ", "// ", "% ", NULL};
static const char *const comparisons[] = {"== ", "!= ", "< ", "<= ", "> ", ">= ", NULL};
static const char *const junctions[] = {"and ", "or ", NULL};

/* Go past one of some signs; return which, or -1. */
static int take_sign(fusec_text *text, const char *const *signs) {
  for (int k = 0; signs[k]; ++k)
    if (fusec_skip(text, signs[k])) return k;
  return -1;
}

static void take_word(fusec_text *text, fusec_text *word) {
  if (!fusec_until(text, ' ', word)) fusec_take(text, text->left, word);
  else {
    --text->at; /* the space is not part of it */
    ++text->left;
  }
}

/* -- what they are ------------------------------------------------------------------------------ */

static int64_t floor_of(int64_t a, int64_t b) { return a / b - (a % b < 0); }

static int combine(int sign, int64_t a, int64_t b, int64_t *value) {
  if (sign == 0) return !__builtin_add_overflow(a, b, value);
  if (sign == 1) return !__builtin_mul_overflow(a, b, value);
  if (sign == 2) *value = a < b ? a : b;
  if (sign >= 3 && b <= 0) return 0;
  if (sign == 3) *value = floor_of(a, b);
  if (sign == 4) *value = a % b + (a % b < 0 ? b : 0);
  return 1;
}

static int leaf(fusec_text *text, const fusec_symbols *symbols, int64_t *value) {
  fusec_text word;
  uint64_t number;
  take_word(text, &word);
  for (size_t k = 0; k < symbols->count; ++k)
    if (fusec_same(word, symbols->rows[k].symbol)) {
      *value = symbols->rows[k].value;
      return *value < 0 ? FUSEC_OPEN : FUSEC_KNOWN;
    }
  int negative = fusec_skip(&word, "-");
  if (!fusec_number(&word, &number) || word.left) return FUSEC_NO_FORMULA;
  *value = negative ? -(int64_t)number : (int64_t)number;
  return FUSEC_KNOWN;
}

static int formula(fusec_text *text, const fusec_symbols *symbols, int depth, int64_t *value) {
  int64_t sides[2] = {0, 0};
  int found[2];
  int sign = take_sign(text, arithmetic);
  if (sign < 0) return leaf(text, symbols, value);
  for (int k = 0; k < 2; ++k) {
    if (!depth || (k && !fusec_skip(text, " "))) return FUSEC_NO_FORMULA;
    found[k] = formula(text, symbols, depth - 1, &sides[k]);
    if (found[k] == FUSEC_NO_FORMULA) return FUSEC_NO_FORMULA;
  }
  int worst = found[0] > found[1] ? found[0] : found[1];
  if (worst != FUSEC_KNOWN) return worst;
  return combine(sign, sides[0], sides[1], value) ? FUSEC_KNOWN : FUSEC_NO_NUMBER;
}

int fusec_size_of(fusec_text *text, const fusec_symbols *symbols, int64_t *value) {
  return formula(text, symbols, DEEPEST, value);
}

static int compare(int sign, int64_t a, int64_t b) {
  const int holds[] = {a == b, a != b, a < b, a <= b, a > b, a >= b};
  return holds[sign];
}

static int condition(fusec_text *text, const fusec_symbols *symbols, int depth, int *holds) {
  int junction = take_sign(text, junctions), worst = FUSEC_KNOWN, parts[2] = {0, 0};
  int sign = junction < 0 ? take_sign(text, comparisons) : -1;
  int64_t sides[2] = {0, 0};
  if ((junction < 0 && sign < 0) || !depth) return FUSEC_NO_FORMULA;
  for (int k = 0; k < 2; ++k) {
    if (k && !fusec_skip(text, " ")) return FUSEC_NO_FORMULA;
    int found = junction < 0 ? formula(text, symbols, DEEPEST, &sides[k])
                             : condition(text, symbols, depth - 1, &parts[k]);
    if (found == FUSEC_NO_FORMULA) return FUSEC_NO_FORMULA;
    if (found > worst) worst = found;
  }
  *holds = junction < 0 ? compare(sign, sides[0], sides[1])
                        : (junction ? parts[0] || parts[1] : parts[0] && parts[1]);
  return worst;
}

int fusec_holds(fusec_text text, const fusec_symbols *symbols, int *holds) {
  int found = condition(&text, symbols, DEEPEST, holds);
  return text.left ? FUSEC_NO_FORMULA : found;
}

void fusec_take_bounds(fusec_text text, fusec_symbols *symbols) {
  fusec_text symbol;
  uint64_t number;
  int least = fusec_skip(&text, ">= ");
  if (!least && !fusec_skip(&text, "<= ")) return;
  if (!fusec_until(&text, ' ', &symbol) || !fusec_number(&text, &number) || text.left) return;
  for (size_t k = 0; k < symbols->count; ++k) {
    fusec_symbol *row = &symbols->rows[k];
    if (!fusec_same(symbol, row->symbol)) continue;
    if (least && (int64_t)number > row->least) row->least = (int64_t)number;
    if (!least && (int64_t)number < row->most) row->most = (int64_t)number;
  }
}

/* -- for people --------------------------------------------------------------------------------- */

/* What is written, cut where there is no room. */
typedef struct {
  char *at;
  size_t left;
} page;

static void put(page *page, const char *text, size_t length) {
  if (length >= page->left) length = page->left - 1;
  memcpy(page->at, text, length);
  page->at += length;
  page->left -= length;
  *page->at = 0;
}

static void put_text(page *page, const char *text) { put(page, text, strlen(text)); }

static void show_leaf(fusec_text *text, const fusec_symbols *symbols, page *page) {
  fusec_text word;
  take_word(text, &word);
  for (size_t k = 0; k < symbols->count; ++k)
    if (fusec_same(word, symbols->rows[k].symbol)) {
      put_text(page, symbols->rows[k].name);
      return;
    }
  put(page, word.at, word.left);
}

/* Write a formula or a condition, which was read before, with each sign between its sides. */
static void show(fusec_text *text, const fusec_symbols *symbols, int is_inner, page *page) {
  const char *const *const kinds[] = {junctions, comparisons, arithmetic};
  fusec_text space;
  int kind = 0, sign = -1;
  for (; kind < 3; ++kind)
    if ((sign = take_sign(text, kinds[kind])) >= 0) break;
  if (sign < 0) {
    show_leaf(text, symbols, page);
    return;
  }
  int brackets = is_inner && kind != 1, is_least = kind == 2 && sign == 2;
  put_text(page, is_least ? "min(" : brackets ? "(" : "");
  show(text, symbols, !is_least && (kind == 0 || (kind == 2 && sign)), page);
  fusec_take(text, 1, &space);
  /* As people write it, and as archive/sizes.py does: "2*A + 1 <= 8". */
  int is_close = kind == 2 && sign;
  size_t length = strlen(kinds[kind][sign]);
  put_text(page, is_least ? ", " : is_close ? "" : " ");
  if (!is_least) put(page, kinds[kind][sign], length - (size_t)is_close);
  show(text, symbols, !is_least && (kind == 0 || (kind == 2 && sign)), page);
  put_text(page, is_least || brackets ? ")" : "");
}

static int mentions(fusec_text text, fusec_text symbol) {
  fusec_text word;
  for (;;) {
    take_word(&text, &word);
    if (fusec_same(word, symbol)) return 1;
    if (!fusec_take(&text, 1, &word)) return 0;
  }
}

int fusec_refuse(fusec_text text, const fusec_symbols *symbols, fusec_error *error) {
  char known[120] = "", built[120] = "";
  page first = {known, sizeof known}, second = {built, sizeof built};
  for (size_t k = 0; k < symbols->count; ++k) {
    const fusec_symbol *row = &symbols->rows[k];
    char value[24];
    if (!mentions(text, row->symbol)) continue;
    snprintf(value, sizeof value, " is %lld", (long long)row->value);
    put_text(&first, first.at == known ? "" : ", ");
    put_text(&first, row->name);
    put_text(&first, value);
  }
  show(&text, symbols, 0, &second);
  return fusec_fail(error, FUSEC_BAD_SIZE, "%s; the model was built for %s", known, built);
}
