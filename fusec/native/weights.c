/* Weights in a safetensors file: the length of a header (u64), the header, the tensors' bytes.

     {"up.weight": {"dtype": "F32", "shape": [8, 4], "data_offsets": [0, 128]}, ...}

   The header is JSON, of which this reads objects, lists, texts and whole numbers, and nothing else.
   Nothing of it is believed: what is used is compared with the type that the model wants, and lies
   inside the file. */

#include <string.h>

#include "parts.h"

/* A row of the header. */
typedef struct {
  fusec_text dtype, shape;
  uint64_t begin, end;
} row;

static void skip_space(fusec_text *text) {
  fusec_text space;
  while (text->left && strchr(" \t\r\n", *text->at) && *text->at) fusec_take(text, 1, &space);
}

static int skip(fusec_text *text, const char *literal) {
  skip_space(text);
  return fusec_skip(text, literal);
}

/* Read a text in quotes, as it stands: one with escapes is no name of a model's weight. */
static int take_string(fusec_text *text, fusec_text *string) {
  if (!skip(text, "\"")) return 0;
  const char *start = text->at;
  fusec_text taken;
  while (text->left && *text->at != '"')
    if (!fusec_take(text, *text->at == '\\' ? 2 : 1, &taken)) return 0;
  *string = (fusec_text){start, (size_t)(text->at - start)};
  return fusec_skip(text, "\"");
}

/* Read a list of whole numbers, of which `numbers` has room for `room`; return how many, or -1. */
static int take_numbers(fusec_text *text, uint64_t *numbers, int room) {
  int count = 0;
  if (!skip(text, "[")) return -1;
  if (skip(text, "]")) return 0;
  do {
    skip_space(text);
    if (count == room || !fusec_number(text, &numbers[count++])) return -1;
  } while (skip(text, ","));
  return skip(text, "]") ? count : -1;
}

/* Read an object of texts, which says something of the file. */
static int skip_metadata(fusec_text *text) {
  fusec_text string;
  if (!skip(text, "{")) return 0;
  if (skip(text, "}")) return 1;
  do {
    if (!take_string(text, &string) || !skip(text, ":") || !take_string(text, &string)) return 0;
  } while (skip(text, ","));
  return skip(text, "}");
}

enum { MOST_AXES = 64 };

static int take_field(fusec_text *text, row *row) {
  uint64_t numbers[MOST_AXES];
  fusec_text name;
  if (!take_string(text, &name) || !skip(text, ":")) return 0;
  if (fusec_equal(name, "dtype")) return take_string(text, &row->dtype);
  skip_space(text);
  fusec_text list = *text;
  int count = take_numbers(text, numbers, MOST_AXES);
  if (fusec_equal(name, "shape")) row->shape = list;
  if (fusec_equal(name, "data_offsets") && count == 2) {
    row->begin = numbers[0];
    row->end = numbers[1];
  }
  return count >= 0;
}

static int take_row(fusec_text *text, row *row) {
  memset(row, 0, sizeof *row);
  if (!skip(text, "{")) return 0;
  do {
    if (!take_field(text, row)) return 0;
  } while (skip(text, ","));
  return skip(text, "}");
}

/* Return fusec's name of a type, by that of safetensors; an empty one for what has none. */
static fusec_text own_name(fusec_text stored) {
  static const char *const names[][2] = {
      {"BOOL", "bool"}, {"U8", "u8"}, {"I8", "i8"}, {"I16", "i16"}, {"I32", "i32"}, {"I64", "i64"},
      {"F16", "f16"}, {"BF16", "bf16"}, {"F32", "f32"}, {"F64", "f64"},
      {"F8_E4M3", "f8e4m3fn"}, {"F8_E4M3FNUZ", "f8e4m3fnuz"}, {"F8_E5M2", "f8e5m2"},
      {"F8_E5M2FNUZ", "f8e5m2fnuz"}, {"F8_E8M0", "f8e8m0fnu"}};
  for (size_t k = 0; k < sizeof names / sizeof *names; ++k)
    if (fusec_equal(stored, names[k][0])) return (fusec_text){names[k][1], strlen(names[k][1])};
  return (fusec_text){"", 0};
}

/* Whether a row's type is the one that is wanted, and its bytes per element. */
static int has_type(const row *row, const fusec_tensor *wanted, size_t *element) {
  uint64_t sizes[MOST_AXES];
  fusec_text shape = row->shape;
  if (take_numbers(&shape, sizes, MOST_AXES) != (int)wanted->rank) return 0;
  for (size_t k = 0; k < wanted->rank; ++k)
    if (sizes[k] != (uint64_t)wanted->sizes[k]) return 0;
  return fusec_dtype(own_name(row->dtype), element) == wanted->dtype;
}

static int fail(const fusec_weight *weight, const char *problem, fusec_error *error) {
  fusec_text names = weight->names, first = {"", 0};
  fusec_until(&names, '\n', &first);
  return fusec_fail(error, FUSEC_BAD_WEIGHTS, "the weight %.*s %s", (int)first.left, first.at,
                    problem);
}

/* Return which of a weight's names one is, from 1; 0 if it is none. */
static size_t rank_of(const fusec_weight *weight, fusec_text name) {
  fusec_text names = weight->names, one;
  for (size_t rank = 1; fusec_until(&names, '\n', &one); ++rank) {
    if (fusec_same(one, name)) return rank;
    fusec_skip(&names, "or ");
  }
  return 0;
}

/* Take a row for the weight that it is. */
static int take_weight(const row *row, fusec_text data, fusec_weight *weight, fusec_error *error) {
  size_t element = 1;
  if (!has_type(row, weight->type, &element))
    return fail(weight, "has another type or other sizes than the model's", error);
  if (row->end > data.left || row->begin > row->end || row->end - row->begin != weight->type->bytes)
    return fail(weight, "is not whole", error);
  weight->found = data.at + row->begin;
  if ((uintptr_t)weight->found % element) return fail(weight, "is not aligned", error);
  return FUSEC_OK;
}

/* Cut the header from the front of a file. */
static int take_header(fusec_text *file, fusec_text *header) {
  fusec_text bytes;
  uint64_t length = 0;
  if (!fusec_take(file, 8, &bytes)) return 0;
  for (int k = 7; k >= 0; --k) length = length << 8 | (unsigned char)bytes.at[k];
  return length <= file->left && fusec_take(file, (size_t)length, header) && skip(header, "{");
}

static int is_whole(const fusec_weight *weights, size_t count, fusec_error *error) {
  for (size_t k = 0; k < count; ++k)
    if (!weights[k].found) return fail(&weights[k], "is missing", error);
  return FUSEC_OK;
}

int fusec_find_weights(fusec_text file, fusec_weight *weights, size_t count, fusec_error *error) {
  static const char damaged[] = "the weights are no safetensors file, or damaged";
  fusec_text header, name;
  row row;
  if (!take_header(&file, &header)) return fusec_fail(error, FUSEC_BAD_WEIGHTS, "%s", damaged);
  int more = !skip(&header, "}");
  while (more) {
    if (!take_string(&header, &name) || !skip(&header, ":"))
      return fusec_fail(error, FUSEC_BAD_WEIGHTS, "%s", damaged);
    int is_row = !fusec_equal(name, "__metadata__");
    if (!(is_row ? take_row(&header, &row) : skip_metadata(&header)))
      return fusec_fail(error, FUSEC_BAD_WEIGHTS, "%s", damaged);
    for (size_t k = 0; is_row && k < count; ++k) {
      size_t rank = rank_of(&weights[k], name);
      if (!rank || (weights[k].found && weights[k].rank < rank)) continue;
      weights[k].rank = rank;
      if (take_weight(&row, file, &weights[k], error)) return FUSEC_BAD_WEIGHTS;
    }
    more = skip(&header, ",");
    if (!more && !skip(&header, "}")) return fusec_fail(error, FUSEC_BAD_WEIGHTS, "%s", damaged);
  }
  return is_whole(weights, count, error);
}
