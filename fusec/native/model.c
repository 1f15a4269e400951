/* A model: loaded, asked what it takes, and freed. Its calls are in run.c.

   What an archive says of its function (signature, names) is read and checked before the library is
   loaded, and the signature is then compared with the one that the library has itself. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

/* The parts of an archive that a model is made of. */
typedef struct {
  fusec_text file;
  fusec_archive archive;
  fusec_text signature, names, kernels;
} source;

/* -- from an archive ---------------------------------------------------------------------------- */

static fusec_text text_of(const char *literal) { return (fusec_text){literal, strlen(literal)}; }

static int check_pin(fusec_text file, const char *sha256, fusec_error *error) {
  unsigned char wanted[32], found[32];
  fusec_text digits = text_of(sha256);
  fusec_sha256_of(file, found);
  if (fusec_digest(&digits, wanted) && !digits.left && !memcmp(wanted, found, 32)) return FUSEC_OK;
  return fusec_fail(error, FUSEC_DAMAGED, "the archive has not the SHA-256 that is wanted");
}

static void close_source(source *from) {
  free(from->archive.blobs);
  fusec_unmap(from->file);
}

static int open_source(const char *path, const char *sha256, source *from, fusec_error *error) {
  memset(from, 0, sizeof *from);
  int code = fusec_map(path, &from->file, error);
  if (code) return code;
  if (sha256) code = check_pin(from->file, sha256, error);
  if (!code) code = fusec_open(from->file, &from->archive, error);
  const fusec_archive *archive = &from->archive;
  if (!code && !(fusec_find(archive, "inference/", text_of("native.txt"), &from->signature) &&
                 fusec_find(archive, "inference/", text_of("kernels.so"), &from->kernels) &&
                 fusec_find(archive, "", text_of("names.txt"), &from->names)))
    code = fusec_fail(error, FUSEC_DAMAGED, "the archive is not whole");
  if (code) close_source(from);
  return code;
}

/* -- what a model takes ------------------------------------------------------------------------- */

enum { MOST_AXES = 64 };

/* Read "f32 8 128" as a type. */
static int take_type(fusec_text line, fusec_tensor *type) {
  int64_t sizes[MOST_AXES];
  fusec_text dtype = line;
  if (!fusec_until(&line, ' ', &dtype)) line.left = 0;
  type->dtype = fusec_dtype(dtype, &type->bytes);
  if (!type->dtype) return 0;
  for (int more = line.left > 0; more; more = fusec_skip(&line, " ")) {
    uint64_t size;
    if (type->rank == MOST_AXES || !fusec_number(&line, &size)) return 0;
    if (size && type->bytes > SIZE_MAX / 2 / size) return 0;
    type->bytes *= (size_t)size;
    sizes[type->rank++] = (int64_t)size;
  }
  int64_t *kept = malloc(sizeof *kept * (type->rank + 1));
  type->sizes = kept;
  if (kept) memcpy(kept, sizes, sizeof *kept * type->rank);
  return kept && !line.left;
}

/* Read a line of the signature behind the first two. */
static int take_line(fusec_model *model, fusec_text line) {
  if (fusec_skip(&line, "result ")) return take_type(line, &model->outputs[model->output_count++]);
  argument *argument = &model->arguments[model->argument_count++];
  if (fusec_equal(line, "unread")) return 1;
  argument->kind = INPUT; /* or another: the names say which */
  argument->type.written = fusec_skip(&line, "written ");
  return (argument->type.written || fusec_skip(&line, "argument ")) &&
         take_type(line, &argument->type);
}

static int take_signature(fusec_model *model, fusec_text text) {
  fusec_text line;
  uint64_t workspace;
  if (!fusec_skip(&text, "fusec native 1\nworkspace ") || !fusec_number(&text, &workspace) ||
      !fusec_skip(&text, "\n"))
    return 0;
  model->workspace = (size_t)workspace;
  while (fusec_until(&text, '\n', &line))
    if (!take_line(model, line)) return 0;
  return !text.left;
}

/* Read what kind an argument is, and its names. */
static int take_names(fusec_text *text, argument *argument) {
  uint64_t number = 0;
  fusec_text line;
  if (argument->kind == UNREAD) return fusec_skip(text, "unread\n");
  if (fusec_skip(text, "weight ")) argument->kind = WEIGHT;
  else if (fusec_skip(text, "held ")) argument->kind = HELD;
  else if (!fusec_skip(text, "input ") || !fusec_number(text, &number) || !fusec_skip(text, " "))
    return 0;
  argument->input = (size_t)number;
  argument->names = *text;
  argument->type.name = text->at;
  do
    if (!fusec_until(text, '\n', &line)) return 0;
  while (argument->kind == WEIGHT && fusec_skip(text, "or "));
  argument->names.left = (size_t)(text->at - argument->names.at);
  return argument->kind == INPUT || !argument->type.written;
}

/* Put the inputs in the order of the model's call, each of which is there once. */
static int order_inputs(fusec_model *model) {
  for (size_t k = 0; k < model->argument_count; ++k) {
    const argument *argument = &model->arguments[k];
    if (argument->kind != INPUT) continue;
    if (argument->input >= model->argument_count || model->inputs[argument->input].name) return 0;
    model->inputs[argument->input] = argument->type;
    ++model->input_count;
  }
  for (size_t k = 0; k < model->input_count; ++k)
    if (!model->inputs[k].name) return 0;
  return 1;
}

static int take_all_names(fusec_model *model, fusec_text text) {
  fusec_text line;
  for (size_t k = 0; k < model->argument_count; ++k)
    if (!take_names(&text, &model->arguments[k])) return 0;
  for (size_t k = 0; k < model->output_count; ++k) {
    if (!fusec_skip(&text, "result ")) return 0;
    model->outputs[k].name = text.at;
    if (!fusec_until(&text, '\n', &line)) return 0;
  }
  return !text.left && order_inputs(model);
}

/* Make room for what a signature of so many lines can say. */
static int make_room(fusec_model *model, const source *from) {
  size_t lines = 1;
  for (size_t k = 0; k < from->signature.left; ++k) lines += from->signature.at[k] == '\n';
  model->arguments = calloc(lines, sizeof *model->arguments);
  model->inputs = calloc(lines, sizeof *model->inputs);
  model->outputs = calloc(lines, sizeof *model->outputs);
  model->names = malloc(from->names.left + 1);
  if (!model->arguments || !model->inputs || !model->outputs || !model->names) return 0;
  memcpy(model->names, from->names.at, from->names.left);
  return 1;
}

static int read_description(fusec_model *model, const source *from, fusec_error *error) {
  fusec_text names, needed;
  if (!make_room(model, from)) return fusec_fail(error, FUSEC_NO_MEMORY, "no memory");
  names = (fusec_text){model->names, from->names.left};
  if (!fusec_skip(&names, "needs ") || !fusec_until(&names, '\n', &needed))
    return fusec_fail(error, FUSEC_NOT_NATIVE, "the archive is of another version of fusec");
  if (!take_signature(model, from->signature) || !take_all_names(model, names))
    return fusec_fail(error, FUSEC_NOT_NATIVE, "the archive is of another version of fusec");
  return FUSEC_OK;
}

/* -- its library and its weights ---------------------------------------------------------------- */

static int load_library(fusec_model *model, const source *from, fusec_error *error) {
  int code = fusec_load_library(from->kernels, &model->library, error);
  if (code) return code;
  if (fusec_equal(from->signature, model->library.signature)) return FUSEC_OK;
  return fusec_fail(error, FUSEC_DAMAGED, "the archive describes another function than it has");
}

/* Copy a value that the archive holds, for in the archive it is not aligned. */
static int copy_held(argument *argument, const source *from, fusec_error *error) {
  fusec_text name, content;
  size_t bytes = argument->type.bytes;
  fusec_until(&argument->names, '\n', &name);
  if (!fusec_find(&from->archive, "held/", name, &content) || content.left != bytes)
    return fusec_fail(error, FUSEC_DAMAGED, "the archive does not hold what it says");
  argument->copy = aligned_alloc(64, bytes / 64 * 64 + 64);
  if (!argument->copy) return fusec_fail(error, FUSEC_NO_MEMORY, "no memory");
  memcpy(argument->copy, content.at, bytes);
  argument->value = argument->copy;
  return FUSEC_OK;
}

static int find_weights(fusec_model *model, const char *path, fusec_error *error) {
  size_t count = 0;
  fusec_weight *weights = calloc(model->argument_count + 1, sizeof *weights);
  if (!weights) return fusec_fail(error, FUSEC_NO_MEMORY, "no memory");
  for (size_t k = 0; k < model->argument_count; ++k) {
    const argument *argument = &model->arguments[k];
    if (argument->kind == WEIGHT)
      weights[count++] = (fusec_weight){argument->names, &argument->type, NULL};
  }
  int code = FUSEC_OK;
  if (count && !path) code = fusec_fail(error, FUSEC_BAD_WEIGHTS, "the model has weights");
  if (count && !code) code = fusec_map(path, &model->weights, error);
  if (count && !code) code = fusec_find_weights(model->weights, weights, count, error);
  for (size_t k = 0, taken = 0; !code && k < model->argument_count; ++k)
    if (model->arguments[k].kind == WEIGHT) model->arguments[k].value = weights[taken++].found;
  free(weights);
  return code;
}

static int find_values(fusec_model *model, const source *from, const char *weights,
                       fusec_error *error) {
  int code = find_weights(model, weights, error);
  for (size_t k = 0; !code && k < model->argument_count; ++k)
    if (model->arguments[k].kind == HELD) code = copy_held(&model->arguments[k], from, error);
  return code;
}

/* End each line of the names, so that they are texts of C. */
static void end_names(fusec_model *model, size_t length) {
  for (size_t k = 0; k < length; ++k)
    if (model->names[k] == '\n') model->names[k] = 0;
}

/* -- for users ---------------------------------------------------------------------------------- */

static int load_from(fusec_model *model, const source *from, const char *weights,
                     fusec_error *error) {
  int code = read_description(model, from, error);
  if (!code) code = load_library(model, from, error);
  if (!code) code = find_values(model, from, weights, error);
  if (!code) end_names(model, from->names.left);
  return code;
}

int fusec_load(fusec_model **model, const char *archive, const char *weights, const char *sha256,
               fusec_error *error) {
  source from;
  *model = NULL;
  int code = open_source(archive, sha256, &from, error);
  if (code) return code;
  fusec_model *made = calloc(1, sizeof *made);
  if (made) {
    fusec_text target = from.archive.target;
    made->library.file = -1;
    snprintf(made->target, sizeof made->target, "%.*s", (int)target.left, target.at);
    code = load_from(made, &from, weights, error);
  } else {
    code = fusec_fail(error, FUSEC_NO_MEMORY, "no memory");
  }
  close_source(&from);
  if (code) fusec_free(made);
  else *model = made;
  return code;
}

const fusec_tensor *fusec_inputs(const fusec_model *model, size_t *count) {
  *count = model->input_count;
  return model->inputs;
}

const fusec_tensor *fusec_outputs(const fusec_model *model, size_t *count) {
  *count = model->output_count;
  return model->outputs;
}

const char *fusec_target(const fusec_model *model) { return model->target; }

size_t fusec_workspace(const fusec_model *model) { return model->workspace; }

void fusec_free(fusec_model *model) {
  if (!model) return;
  fusec_unload_library(&model->library);
  fusec_unmap(model->weights);
  for (size_t k = 0; k < model->argument_count; ++k) {
    free(model->arguments[k].copy);
    free((void *)model->arguments[k].type.sizes);
  }
  for (size_t k = 0; k < model->output_count; ++k) free((void *)model->outputs[k].sizes);
  free(model->arguments);
  free(model->inputs);
  free(model->outputs);
  free(model->names);
  free(model);
}
