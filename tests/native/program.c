/* Loads a model and runs it: `program ARCHIVE WEIGHTS|- THREADS IN... -- OUT...`, with files of
   elements. Prints what the model takes. Callers at the same time: the environment's CALLERS. Sizes
   that are chosen: its SIZES, as "B=3 T=5". An archive that is loaded before, after which files are
   closed as a daemon does: its BEFORE. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fusec.h"

enum { MOST = 16 };

typedef struct {
  const fusec_model *model;
  fusec_memory inputs[MOST], outputs[MOST];
  int threads, rounds, code;
  fusec_error error;
} call;

static void *run(void *of) {
  call *own = of;
  for (int k = 0; k < own->rounds && !own->code; ++k)
    own->code = fusec_run(own->model, own->inputs, own->outputs, NULL, own->threads, &own->error);
  return NULL;
}

static fusec_memory read_file(const char *path) {
  FILE *file = fopen(path, "rb");
  fusec_memory made = {NULL, 0};
  if (!file) exit(99);
  fseek(file, 0, SEEK_END);
  made.bytes = (size_t)ftell(file);
  rewind(file);
  made.data = malloc(made.bytes + 1);
  if (fread(made.data, 1, made.bytes, file) != made.bytes) exit(99);
  fclose(file);
  return made;
}

static void show(const char *what, const fusec_tensor *tensors, size_t count) {
  for (size_t k = 0; k < count; ++k) {
    printf("%s %s: %s[", what, tensors[k].name, tensors[k].dtype);
    for (size_t axis = 0; axis < tensors[k].rank; ++axis)
      printf("%s%lld", axis ? ", " : "", (long long)tensors[k].sizes[axis]);
    printf("]%s\n", tensors[k].written ? " written" : "");
  }
}

static void show_sizes(const fusec_model *model) {
  size_t count;
  const fusec_size *sizes = fusec_sizes(model, &count);
  for (size_t k = 0; k < count; ++k)
    printf("size %s: %lld to %lld\n", sizes[k].name, (long long)sizes[k].least,
           (long long)sizes[k].most);
}

/* Choose the sizes of a text, which is cut into names. */
static int choose(fusec_model **chosen, const fusec_model *model, char *text, fusec_error *error) {
  fusec_choice choices[MOST];
  size_t count = 0;
  for (char *at = strtok(text, " "); at && count < MOST; at = strtok(NULL, " ")) {
    char *value = strchr(at, '=');
    *value = 0;
    choices[count++] = (fusec_choice){at, strtoll(value + 1, NULL, 10)};
  }
  return fusec_choose(chosen, model, choices, count, error);
}

static int finish(int code, const fusec_error *error) {
  if (code) printf("error %d: %s\n", code, error->text);
  return code;
}

int main(int count, char **given) {
  static call calls[MOST];
  pthread_t threads[MOST];
  fusec_model *model, *whole = NULL, *before = NULL;
  fusec_error error;
  const char *callers = getenv("CALLERS");
  int all = callers ? atoi(callers) : 1, code;
  if (count < 4) return 98;
  if (getenv("BEFORE") && fusec_load(&before, getenv("BEFORE"), NULL, NULL, &error)) return 96;
  for (int file = 3; before && file < 64; ++file) close(file);
  code = fusec_load(&model, given[1], strcmp(given[2], "-") ? given[2] : NULL, getenv("PIN"), &error);
  if (code) return finish(code, &error);
  show_sizes(model);
  if (getenv("SIZES")) {
    whole = model;
    code = choose(&model, whole, getenv("SIZES"), &error);
    if (code) fusec_free(whole);
    if (code) return finish(code, &error);
  }
  size_t inputs, outputs;
  const fusec_tensor *takes = fusec_inputs(model, &inputs), *gives = fusec_outputs(model, &outputs);
  if (getenv("TARGET")) puts(fusec_target(model));
  show("input", takes, inputs);
  show("output", gives, outputs);
  int dashes = 4;
  while (dashes < count && strcmp(given[dashes], "--")) ++dashes;
  for (int c = 0; c < all; ++c) {
    calls[c].model = model;
    calls[c].threads = atoi(given[3]);
    calls[c].rounds = all > 1 ? 3 : 1;
    for (int k = 4; k < dashes; ++k) calls[c].inputs[k - 4] = read_file(given[k]);
    for (size_t k = 0; k < outputs; ++k)
      calls[c].outputs[k] = (fusec_memory){malloc(gives[k].bytes + 1), gives[k].bytes};
  }
  for (int c = 0; c < all; ++c) pthread_create(&threads[c], NULL, run, &calls[c]);
  for (int c = 0; c < all; ++c) pthread_join(threads[c], NULL);
  for (int c = 0; c < all; ++c) {
    if (calls[c].code) return finish(calls[c].code, &calls[c].error);
    for (size_t k = 0; k < outputs; ++k)
      if (memcmp(calls[c].outputs[k].data, calls[0].outputs[k].data, gives[k].bytes)) return 97;
  }
  for (size_t k = 0; k < outputs && dashes + 1 + (int)k < count; ++k) {
    FILE *file = fopen(given[dashes + 1 + (int)k], "wb");
    fwrite(calls[0].outputs[k].data, 1, gives[k].bytes, file);
    fclose(file);
  }
  for (int k = 4; k < dashes; ++k) /* an input that was written is a result, too */
    if (takes[k - 4].written) {
      FILE *file = fopen(given[k], "wb");
      fwrite(calls[0].inputs[k - 4].data, 1, takes[k - 4].bytes, file);
      fclose(file);
    }
  for (int c = 0; c < all; ++c) {
    for (size_t k = 0; k < inputs; ++k) free(calls[c].inputs[k].data);
    for (size_t k = 0; k < outputs; ++k) free(calls[c].outputs[k].data);
  }
  if (getenv("WORKSPACE")) printf("workspace %zu\n", fusec_workspace(model));
  fusec_free(model);
  fusec_free(whole);
  fusec_free(before);
  return 0;
}
