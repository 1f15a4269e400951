/* Says what formulas of sizes are: each line of the input is `A B FORMULA`, where A and B are values
   of s0 and s1, -1 for one that is open. Prints what came of it, and the number. Lines that begin with
   `?` are conditions. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "parts.h"

int main(void) {
  char line[4096];
  fusec_symbol rows[] = {{{"s0", 2}, "A", 0, 0, INT64_MAX}, {{"s1", 2}, "B", 0, 0, INT64_MAX}};
  fusec_symbols symbols = {rows, 2};
  while (fgets(line, sizeof line, stdin)) {
    int is_condition = *line == '?', holds = 0;
    char *at = line + is_condition;
    for (int k = 0; k < 2; ++k) rows[k].value = strtoll(at, &at, 10);
    /* In memory of its own length, so that a sanitizer sees each access behind it. */
    size_t length = strcspn(++at, "\n");
    char *own = malloc(length + !length);
    fusec_error error = {0, ""};
    memcpy(own, at, length);
    fusec_text text = {own, length};
    int64_t value = 0;
    int found = is_condition ? fusec_holds(text, &symbols, &holds)
                             : fusec_size_of(&text, &symbols, &value);
    if (!is_condition && text.left) found = FUSEC_NO_FORMULA;
    if (is_condition && found != FUSEC_NO_FORMULA) fusec_refuse(text, &symbols, &error);
    printf("%d %lld %s\n", found, (long long)(is_condition ? holds : value), error.text);
    free(own);
  }
  return 0;
}
