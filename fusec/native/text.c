/* Reading, with every access inside what is left; errors in words; types. */

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "parts.h"

int fusec_fail(fusec_error *error, int code, const char *format, ...) {
  if (error) {
    va_list arguments;
    va_start(arguments, format);
    error->code = code;
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
  }
  return code;
}

int fusec_take(fusec_text *text, size_t count, fusec_text *taken) {
  if (count > text->left) return 0;
  *taken = (fusec_text){text->at, count};
  text->at += count;
  text->left -= count;
  return 1;
}

int fusec_skip(fusec_text *text, const char *literal) {
  size_t length = strlen(literal);
  fusec_text start;
  if (length > text->left || memcmp(text->at, literal, length)) return 0;
  return fusec_take(text, length, &start);
}

int fusec_until(fusec_text *text, char end, fusec_text *taken) {
  const char *found = text->left ? memchr(text->at, end, text->left) : NULL;
  fusec_text mark;
  if (!found) return 0;
  fusec_take(text, (size_t)(found - text->at), taken);
  return fusec_take(text, 1, &mark);
}

int fusec_number(fusec_text *text, uint64_t *number) {
  int digits = 0;
  int64_t value = 0;
  fusec_text digit;
  for (; text->left && *text->at >= '0' && *text->at <= '9'; ++digits) {
    if (__builtin_mul_overflow(value, 10, &value)) return 0;
    if (__builtin_add_overflow(value, *text->at - '0', &value)) return 0;
    fusec_take(text, 1, &digit);
  }
  *number = (uint64_t)value;
  return digits > 0;
}

int fusec_equal(fusec_text text, const char *literal) {
  return text.left == strlen(literal) && !memcmp(text.at, literal, text.left);
}

int fusec_same(fusec_text one, fusec_text other) {
  return one.left == other.left && !memcmp(one.at, other.at, one.left);
}

const char *fusec_dtype(fusec_text name, size_t *bytes) {
  static const struct {
    const char *name;
    size_t bytes;
  } types[] = {{"bool", 1}, {"u8", 1},  {"i8", 1},   {"i16", 2}, {"i32", 4},
               {"i64", 8},  {"f16", 2}, {"bf16", 2}, {"f32", 4}, {"f64", 8},
               {"f8e4m3fn", 1}, {"f8e4m3fnuz", 1}, {"f8e5m2", 1}, {"f8e5m2fnuz", 1},
               {"f8e8m0fnu", 1}};
  for (size_t k = 0; k < sizeof types / sizeof *types; ++k)
    if (fusec_equal(name, types[k].name)) {
      *bytes = types[k].bytes;
      return types[k].name;
    }
  return NULL;
}
