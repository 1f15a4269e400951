/* A call of a model: its memory is checked, then its function runs. */

#include <stdlib.h>
#include <string.h>

#include "model.h"

/* What the function returns, by codegen/cpp/printer.py. */
enum { OUT_OF_RANGE = 1, DIVISION_BY_ZERO = 2 };

enum { MOST_THREADS = 1024 };

/* -- checks ------------------------------------------------------------------------------------- */

static int check_memory(const fusec_tensor *tensor, const fusec_memory *memory,
                        fusec_error *error) {
  size_t element = 0;
  fusec_dtype((fusec_text){tensor->dtype, strlen(tensor->dtype)}, &element);
  if (memory->bytes != tensor->bytes)
    return fusec_fail(error, FUSEC_BAD_CALL, "%s has %zu bytes, not %zu", tensor->name,
                      tensor->bytes, memory->bytes);
  if (tensor->bytes && (!memory->data || (uintptr_t)memory->data % element))
    return fusec_fail(error, FUSEC_BAD_CALL, "%s lies nowhere, or not at a multiple of %zu bytes",
                      tensor->name, element);
  return FUSEC_OK;
}

static int overlap(const fusec_memory *one, const fusec_memory *other) {
  uintptr_t a = (uintptr_t)one->data, b = (uintptr_t)other->data;
  return one->bytes && other->bytes && a < b + other->bytes && b < a + one->bytes;
}

/* Check that what is written overlaps nothing else. */
static int check_apart(const fusec_model *model, const fusec_memory *inputs,
                       const fusec_memory *outputs, const fusec_memory *workspace,
                       fusec_error *error) {
  size_t before = model->input_count, all = before + model->output_count;
  for (size_t k = 0; k <= all; ++k) {
    const fusec_memory *one = k < before ? &inputs[k] : k < all ? &outputs[k - before] : workspace;
    int written = k >= before || model->inputs[k].written;
    for (size_t j = 0; j < k; ++j) {
      const fusec_memory *other = j < before ? &inputs[j] : &outputs[j - before];
      if ((written || j >= before || model->inputs[j].written) && overlap(one, other))
        return fusec_fail(error, FUSEC_BAD_CALL, "%s overlaps what is written",
                          j < before ? model->inputs[j].name : model->outputs[j - before].name);
    }
  }
  return FUSEC_OK;
}

static int check_call(const fusec_model *model, const fusec_memory *inputs,
                      const fusec_memory *outputs, const fusec_memory *workspace, int threads,
                      fusec_error *error) {
  int code = FUSEC_OK;
  if (threads < 1 || threads > MOST_THREADS)
    return fusec_fail(error, FUSEC_BAD_CALL, "%d threads, not 1 to %d", threads, MOST_THREADS);
  if (workspace->bytes < model->workspace || (uintptr_t)workspace->data % 64 ||
      (model->workspace && !workspace->data))
    return fusec_fail(error, FUSEC_BAD_CALL,
                      "a workspace of %zu bytes at a multiple of 64 is wanted", model->workspace);
  for (size_t k = 0; !code && k < model->input_count; ++k)
    code = check_memory(&model->inputs[k], &inputs[k], error);
  for (size_t k = 0; !code && k < model->output_count; ++k)
    code = check_memory(&model->outputs[k], &outputs[k], error);
  return code ? code : check_apart(model, inputs, outputs, workspace, error);
}

/* -- the call ----------------------------------------------------------------------------------- */

static int call(const fusec_model *model, const fusec_memory *inputs, const fusec_memory *outputs,
                void *workspace, int threads, fusec_error *error) {
  size_t count = model->argument_count;
  void **pointers = malloc(sizeof *pointers * (count + model->output_count + 1));
  if (!pointers) return fusec_fail(error, FUSEC_NO_MEMORY, "no memory");
  for (size_t k = 0; k < count; ++k) {
    const argument *argument = &model->arguments[k];
    pointers[k] = argument->kind == INPUT ? inputs[argument->input].data : (void *)argument->value;
  }
  for (size_t k = 0; k < model->output_count; ++k) pointers[count + k] = outputs[k].data;
  int status = model->library.run(pointers, pointers + count, workspace, model->values, threads);
  free(pointers);
  if (status == OUT_OF_RANGE)
    return fusec_fail(error, FUSEC_OUT_OF_RANGE, "an index among the inputs is out of range");
  if (status == DIVISION_BY_ZERO)
    return fusec_fail(error, FUSEC_DIVISION_BY_ZERO, "an integer is divided by zero");
  return FUSEC_OK;
}

int fusec_run(const fusec_model *model, const fusec_memory *inputs, const fusec_memory *outputs,
              const fusec_memory *workspace, int threads, fusec_error *error) {
  fusec_memory own = {NULL, 0};
  if (model->size_count)
    return fusec_fail(error, FUSEC_BAD_CALL, "%s is to be chosen first, by fusec_choose",
                      model->sizes[0].name);
  if (!workspace) {
    own.bytes = model->workspace / 64 * 64 + 64;
    own.data = aligned_alloc(64, own.bytes);
    if (!own.data) return fusec_fail(error, FUSEC_NO_MEMORY, "no memory for a workspace");
    workspace = &own;
  }
  int code = check_call(model, inputs, outputs, workspace, threads, error);
  if (!code) code = call(model, inputs, outputs, workspace->data, threads, error);
  free(own.data);
  return code;
}
