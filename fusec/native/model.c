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
  free((void *)from->file.at);
}

static int open_source(const char *path, const char *sha256, source *from, fusec_error *error) {
  memset(from, 0, sizeof *from);
  int code = fusec_read(path, &from->file, error);
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

/* Read "f32 8 s0" as a type; one with open sizes has no bytes. */
static int take_type(fusec_text line, const fusec_symbols *symbols, fusec_tensor *type) {
  int64_t sizes[MOST_AXES];
  fusec_text dtype = line;
  int is_open = 0;
  if (!fusec_until(&line, ' ', &dtype)) line.left = 0;
  type->dtype = fusec_dtype(dtype, &type->bytes);
  if (!type->dtype) return 0;
  for (int more = line.left > 0; more; more = fusec_skip(&line, " ")) {
    int64_t size = -1;
    if (type->rank == MOST_AXES) return 0;
    int found = fusec_size_of(&line, symbols, &size);
    if (found == FUSEC_OPEN) {
      is_open = 1;
      sizes[type->rank++] = -1;
      continue;
    }
    if (found != FUSEC_KNOWN || size < 0) return 0;
    if (size && type->bytes > SIZE_MAX / 4 / (uint64_t)size) return 0;
    type->bytes *= (size_t)size;
    sizes[type->rank++] = size;
  }
  if (is_open) type->bytes = 0;
  int64_t *kept = malloc(sizeof *kept * (type->rank + 1));
  type->sizes = kept;
  if (kept) memcpy(kept, sizes, sizeof *kept * type->rank);
  return kept && !line.left;
}

/* Read a line of the signature of an argument or a result. */
static int take_line(fusec_model *model, fusec_text line) {
  const fusec_symbols *symbols = &model->symbols;
  if (fusec_skip(&line, "result "))
    return take_type(line, symbols, &model->outputs[model->output_count++]);
  argument *argument = &model->arguments[model->argument_count++];
  if (fusec_equal(line, "unread")) return 1;
  argument->kind = INPUT; /* or another: the names say which */
  argument->type.written = fusec_skip(&line, "written ");
  return (argument->type.written || fusec_skip(&line, "argument ")) &&
         take_type(line, symbols, &argument->type);
}

/* Cut the sizes from the front of a signature. Values that were chosen stay. */
static int take_sizes(fusec_model *model, fusec_text *text) {
  fusec_symbols *symbols = &model->symbols;
  if (!fusec_skip(text, "fusec native 2\n")) return 0;
  while (fusec_skip(text, "size ")) {
    fusec_symbol *row = &symbols->rows[symbols->count];
    if (!fusec_until(text, '\n', &row->symbol) || !row->symbol.left) return 0;
    ++symbols->count;
  }
  return 1;
}

/* Cut what is asked of sizes from the front, and check it where they are chosen. Returns 0, and sets
   the error, if it does not hold; the error is none if it is none that this reads. */
static int take_checks(fusec_model *model, fusec_text *text, fusec_error *error) {
  fusec_text line;
  int holds = 0;
  while (fusec_skip(text, "check ")) {
    if (!fusec_until(text, '\n', &line)) return 0;
    int found = fusec_holds(line, &model->symbols, &holds);
    if (found == FUSEC_NO_FORMULA) return 0;
    fusec_take_bounds(line, &model->symbols);
    if (found == FUSEC_NO_NUMBER || (found == FUSEC_KNOWN && !holds)) {
      fusec_refuse(line, &model->symbols, error);
      return 0;
    }
  }
  return 1;
}

static int take_signature(fusec_model *model, fusec_text text) {
  fusec_text line;
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
  if (argument->kind == INPUT) return 1;
  for (size_t k = 0; k < argument->type.rank; ++k)
    if (argument->type.sizes[k] < 0) return 0;
  return !argument->type.written;
}

/* Read what users call the sizes; those of one name are one size. */
static int take_size_names(fusec_model *model, fusec_text *text) {
  for (size_t k = 0; k < model->symbols.count; ++k) {
    fusec_symbol *row = &model->symbols.rows[k];
    fusec_text lines, earlier, name;
    if (!fusec_skip(text, "size ")) return 0;
    row->name = text->at;
    if (!fusec_until(text, '\n', &name) || !name.left) return 0;
    size_t at = 0;
    for (; at < model->size_count; ++at) {
      lines = (fusec_text){model->sizes[at].name, (size_t)(text->at - model->sizes[at].name)};
      if (fusec_until(&lines, '\n', &earlier) && fusec_same(earlier, name)) break;
    }
    fusec_size *size = &model->sizes[at];
    if (at == model->size_count) {
      *size = (fusec_size){row->name, row->least, row->most};
      ++model->size_count;
    }
    if (row->least > size->least) size->least = row->least;
    if (row->most < size->most) size->most = row->most;
  }
  return 1;
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
static int make_room(fusec_model *model, fusec_text signature, fusec_text names) {
  size_t lines = 1;
  for (size_t k = 0; k < signature.left; ++k) lines += signature.at[k] == '\n';
  model->arguments = calloc(lines, sizeof *model->arguments);
  model->inputs = calloc(lines, sizeof *model->inputs);
  model->outputs = calloc(lines, sizeof *model->outputs);
  model->symbols.rows = calloc(lines, sizeof *model->symbols.rows);
  model->sizes = calloc(lines, sizeof *model->sizes);
  model->values = calloc(lines, sizeof *model->values);
  model->names = malloc(names.left + 1);
  if (!model->arguments || !model->inputs || !model->outputs || !model->symbols.rows ||
      !model->sizes || !model->values || !model->names)
    return 0;
  for (size_t k = 0; k < lines; ++k)
    model->symbols.rows[k] = (fusec_symbol){{NULL, 0}, "", -1, 0, INT64_MAX};
  memcpy(model->names, names.at, names.left);
  return 1;
}

/* Read what there is to know of a model, for which room was made. */
static int read_description(fusec_model *model, fusec_text signature, fusec_error *error) {
  static const char other[] = "the archive is of another version of fusec";
  fusec_text names = {model->names, model->description.left}, needed;
  fusec_error asked = {FUSEC_OK, ""};
  if (!fusec_skip(&names, "needs ") || !fusec_until(&names, '\n', &needed) ||
      !take_sizes(model, &signature))
    return fusec_fail(error, FUSEC_NOT_NATIVE, other);
  for (size_t k = 0; k < model->symbols.count; ++k)
    if (model->whole) model->symbols.rows[k].name = model->whole->symbols.rows[k].name;
  if (!take_checks(model, &signature, &asked))
    return fusec_fail(error, asked.code ? asked.code : FUSEC_NOT_NATIVE, "%s",
                      asked.code ? asked.text : other);
  if (!take_size_names(model, &names)) return fusec_fail(error, FUSEC_NOT_NATIVE, other);
  if (take_signature(model, signature) && take_all_names(model, names)) return FUSEC_OK;
  if (!model->whole) return fusec_fail(error, FUSEC_NOT_NATIVE, other);
  return fusec_fail(error, FUSEC_BAD_SIZE, "tensors of these sizes are too large");
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
      weights[count++] = (fusec_weight){argument->names, &argument->type, NULL, 0};
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

/* Ask the library how many bytes a run of these sizes needs. */
static int find_workspace(fusec_model *model, fusec_error *error) {
  for (size_t k = 0; k < model->symbols.count; ++k) model->values[k] = model->symbols.rows[k].value;
  long long bytes = model->library.bytes(model->values);
  if (bytes < 0 || bytes > INT64_MAX / 4)
    return fusec_fail(error, FUSEC_BAD_SIZE, "a run of these sizes needs too much memory");
  model->workspace = (size_t)bytes;
  return FUSEC_OK;
}

static int load_from(fusec_model *model, const source *from, const char *weights,
                     fusec_error *error) {
  char *kept = malloc(from->names.left + 1);
  if (kept) memcpy(kept, from->names.at, from->names.left);
  model->description = (fusec_text){kept, kept ? from->names.left : 0};
  if (!kept || !make_room(model, from->signature, model->description))
    return fusec_fail(error, FUSEC_NO_MEMORY, "no memory");
  int code = read_description(model, from->signature, error);
  if (!code) code = load_library(model, from, error);
  if (!code && !model->symbols.count) code = find_workspace(model, error);
  if (!code) code = find_values(model, from, weights, error);
  if (!code) end_names(model, from->names.left);
  /* The texts of symbols lie in the archive, which is let go of. */
  for (size_t k = 0; k < model->symbols.count; ++k) model->symbols.rows[k].symbol.left = 0;
  return code;
}

static const fusec_choice *find_choice(const fusec_choice *choices, size_t count,
                                       const char *name) {
  for (size_t k = 0; k < count; ++k)
    if (choices[k].name && !strcmp(choices[k].name, name)) return &choices[k];
  return NULL;
}

/* Check that each size is chosen once, and nothing else. */
static int check_choices(const fusec_model *model, const fusec_choice *choices, size_t count,
                         fusec_error *error) {
  for (size_t k = 0; k < count; ++k)
    if (choices[k].name && find_choice(choices, k, choices[k].name))
      return fusec_fail(error, FUSEC_BAD_SIZE, "the size %s is given twice", choices[k].name);
  for (size_t k = 0; k < model->size_count; ++k) {
    const fusec_choice *found = find_choice(choices, count, model->sizes[k].name);
    if (!found)
      return fusec_fail(error, FUSEC_BAD_SIZE, "the size %s is missing", model->sizes[k].name);
    if (found->value < 0)
      return fusec_fail(error, FUSEC_BAD_SIZE, "%s is %lld", found->name, (long long)found->value);
  }
  if (count != model->size_count)
    return fusec_fail(error, FUSEC_BAD_SIZE, "%zu sizes are to be chosen, not %zu",
                      model->size_count, count);
  return FUSEC_OK;
}

static int choose_into(fusec_model *made, const fusec_choice *choices, size_t count,
                       fusec_error *error) {
  const fusec_model *whole = made->whole;
  fusec_text signature = text_of(whole->library.signature);
  if (!make_room(made, signature, whole->description))
    return fusec_fail(error, FUSEC_NO_MEMORY, "no memory");
  for (size_t k = 0; k < whole->symbols.count; ++k) {
    const fusec_choice *found = find_choice(choices, count, whole->symbols.rows[k].name);
    made->symbols.rows[k].value = found->value;
  }
  int code = read_description(made, signature, error);
  if (!code) code = find_workspace(made, error);
  if (code) return code;
  for (size_t k = 0; k < made->argument_count; ++k)
    made->arguments[k].value = whole->arguments[k].value;
  made->size_count = 0;
  end_names(made, made->description.left);
  return FUSEC_OK;
}

int fusec_choose(fusec_model **chosen, const fusec_model *model, const fusec_choice *choices,
                 size_t count, fusec_error *error) {
  *chosen = NULL;
  if (model->whole)
    return fusec_fail(error, FUSEC_BAD_SIZE, "the sizes of this model are chosen already");
  int code = check_choices(model, choices, count, error);
  if (code) return code;
  fusec_model *made = calloc(1, sizeof *made);
  if (!made) return fusec_fail(error, FUSEC_NO_MEMORY, "no memory");
  made->whole = model;
  made->library = model->library;
  made->description = model->description;
  memcpy(made->target, model->target, sizeof made->target);
  code = choose_into(made, choices, count, error);
  if (code) fusec_free(made);
  else *chosen = made;
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

const fusec_size *fusec_sizes(const fusec_model *model, size_t *count) {
  *count = model->size_count;
  return model->sizes;
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
  if (!model->whole) {
    fusec_unload_library(&model->library);
    fusec_unmap(model->weights);
    free((void *)model->description.at);
  }
  for (size_t k = 0; k < model->argument_count; ++k) {
    free(model->arguments[k].copy);
    free((void *)model->arguments[k].type.sizes);
  }
  for (size_t k = 0; k < model->output_count; ++k) free((void *)model->outputs[k].sizes);
  free(model->arguments);
  free(model->inputs);
  free(model->outputs);
  free(model->symbols.rows);
  free(model->sizes);
  free(model->values);
  free(model->names);
  free(model);
}
