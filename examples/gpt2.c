// GPT-2 in C: reads tokens, writes those that follow. No Python, no libtorch.
//
// Where Python is, the model is written as two files. gpt2.py:
//
//   from transformers import GPT2LMHeadModel
//
//   gpt2 = GPT2LMHeadModel.from_pretrained("gpt2", use_cache=False)
//
//   $ fusec build gpt2.py:gpt2 --input "i64[1,8]<50257" --native --with-weights -o gpt2.fusec
//
// Then, here or anywhere that has the sources which `python -m fusec.native` names:
//
//   $ cc -O2 gpt2.c $(python -m fusec.native) -o gpt2
//   $ ./gpt2 gpt2.fusec gpt2.safetensors 2 464 3290 318 257
//
// The archive has room for so many tokens as it was built with: a window over the last of them.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fusec.h"

/* Stop with what an error says. */
static void stop(const fusec_error *error) {
  fprintf(stderr, "error %d: %s\n", error->code, error->text);
  exit(1);
}

static double seconds(void) {
  struct timespec now;
  timespec_get(&now, TIME_UTC);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Return the token with the greatest of its logits. */
static int64_t greatest(const float *logits, int64_t count) {
  int64_t best = 0;
  for (int64_t token = 1; token < count; ++token)
    if (logits[token] > logits[best]) best = token;
  return best;
}

int main(int count, char **given) {
  enum { MORE = 8 };
  double start = seconds();
  fusec_model *model;
  fusec_error error;
  size_t inputs, outputs;
  if (count < 5) return fprintf(stderr, "gpt2 ARCHIVE WEIGHTS THREADS TOKEN...\n"), 2;
  if (fusec_load(&model, given[1], given[2], NULL, &error)) stop(&error);

  /* The caller owns all memory: its sizes are the model's. */
  const fusec_tensor *takes = fusec_inputs(model, &inputs), *gives = fusec_outputs(model, &outputs);
  const int64_t window = takes->sizes[1], tokens = gives->sizes[2];
  int64_t *text = calloc((size_t)(count + MORE), sizeof *text), length = count - 4;
  fusec_memory ids = {calloc(1, takes->bytes), takes->bytes};
  fusec_memory logits = {malloc(gives->bytes), gives->bytes};
  for (int64_t k = 0; k < length; ++k) text[k] = atoll(given[4 + k]);

  for (int more = 0; more < MORE; ++more) {
    const int64_t seen = length < window ? length : window;
    memcpy(ids.data, text + length - seen, (size_t)seen * sizeof *text);
    if (fusec_run(model, &ids, &logits, NULL, atoi(given[3]), &error)) stop(&error);
    text[length] = greatest((float *)logits.data + (seen - 1) * tokens, tokens);
    printf("%lld\n", (long long)text[length++]);
    fflush(stdout);
    if (!more) fprintf(stderr, "first output after %.3f s\n", seconds() - start);
  }
  free(text);
  free(ids.data);
  free(logits.data);
  fusec_free(model);
  return 0;
}
