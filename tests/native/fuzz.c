/* Loads files that are wrong in some bytes, and runs what can be loaded: every access is checked by
   the sanitizers that it is compiled with.

     fuzz ARCHIVE WEIGHTS COUNT SEED       so many times with some bytes of either changed
     fuzz ARCHIVE WEIGHTS 0 0 OTHER...     each of the other archives

   Prints how many were refused, and how many ran. */

#define _GNU_SOURCE

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fusec.h"

enum { MOST = 1 << 24 }; /* bytes of tensors that are tried */

static int refused, ran;

static fusec_memory room(const fusec_tensor *tensor) {
  return (fusec_memory){calloc(1, tensor->bytes + 1), tensor->bytes};
}

static unsigned long long state;

static size_t below(size_t end) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (size_t)(state % end);
}

static void run(const fusec_model *model) {
  size_t inputs, outputs;
  const fusec_tensor *takes = fusec_inputs(model, &inputs), *gives = fusec_outputs(model, &outputs);
  fusec_memory *given = calloc(inputs + 1, sizeof *given), *made = calloc(outputs + 1, sizeof *made);
  for (size_t k = 0; k < inputs; ++k) given[k] = room(&takes[k]);
  for (size_t k = 0; k < outputs; ++k) made[k] = room(&gives[k]);
  fusec_run(model, given, made, NULL, 1, NULL);
  for (size_t k = 0; k < inputs; ++k) free(given[k].data);
  for (size_t k = 0; k < outputs; ++k) free(made[k].data);
  free(given);
  free(made);
}

/* Run a model for sizes of any kind: few, none, and such whose products 64 bits do not hold. */
static void choose(const fusec_model *model) {
  static const int64_t odd[] = {0, -1, 1, INT64_MAX, INT64_MIN, 1ll << 32, 1ll << 62, 3037000500ll};
  size_t count;
  const fusec_size *sizes = fusec_sizes(model, &count);
  fusec_choice *choices = calloc(count + 1, sizeof *choices);
  for (int round = 0; round < 8; ++round) {
    fusec_model *chosen;
    size_t bytes = 0;
    for (size_t k = 0; k < count; ++k)
      choices[k] = (fusec_choice){sizes[k].name, below(3) ? (int64_t)below(20) : odd[below(8)]};
    if (fusec_choose(&chosen, model, choices, count, NULL)) continue;
    bytes = fusec_workspace(chosen);
    for (int side = 0; side < 2; ++side) {
      const fusec_tensor *of = (side ? fusec_outputs : fusec_inputs)(chosen, &count);
      for (size_t k = 0; k < count; ++k) bytes = bytes > MOST ? bytes : bytes + of[k].bytes;
    }
    if (bytes < MOST) run(chosen);
    fusec_free(chosen);
    fusec_sizes(model, &count);
  }
  free(choices);
}

static void try_files(const char *archive, const char *weights) {
  fusec_model *model;
  fusec_error error;
  if (fusec_load(&model, archive, weights, NULL, &error)) {
    ++refused;
    return;
  }
  size_t open;
  ++ran;
  fusec_sizes(model, &open);
  if (open) choose(model);
  run(model);
  fusec_free(model);
}

static char *read_file(const char *path, size_t *size) {
  FILE *file = fopen(path, "rb");
  if (!file) exit(99);
  fseek(file, 0, SEEK_END);
  *size = (size_t)ftell(file);
  rewind(file);
  char *bytes = malloc(*size + 1);
  if (fread(bytes, 1, *size, file) != *size) exit(99);
  fclose(file);
  return bytes;
}

/* Try one file changed, and the other as it is. Most of what is read lies at the front. */
static void mutate(const char *bytes, size_t size, const char *other, int is_archive) {
  char path[40], *changed = malloc(size);
  int file = memfd_create("changed", 0);
  size_t length = below(8) ? size : below(size), front = size < 2000 ? size : 2000;
  memcpy(changed, bytes, size);
  for (size_t k = 1 + below(4); k; --k)
    changed[below(4) ? below(front) : below(size)] = below(3) ? (char)below(256) : "{}[],:\"9"[below(8)];
  if (write(file, changed, length) != (ssize_t)length) exit(99);
  snprintf(path, sizeof path, "/proc/self/fd/%d", file);
  if (is_archive) try_files(path, other);
  else try_files(other, path);
  close(file);
  free(changed);
}

int main(int count, char **given) {
  size_t sizes[2];
  char *files[2];
  if (count < 5) return 98;
  state = 88172645463325252ull + strtoull(given[4], NULL, 10);
  for (int k = 0; k < 2; ++k) files[k] = read_file(given[1 + k], &sizes[k]);
  for (int k = 0; k < atoi(given[3]); ++k)
    mutate(files[k % 2], sizes[k % 2], given[2 - k % 2], k % 2 == 0);
  for (int k = 5; k < count; ++k) try_files(given[k], given[2]);
  for (int k = 0; k < 2; ++k) free(files[k]);
  printf("refused %d, ran %d\n", refused, ran);
  return 0;
}
