/* A model, inside. */

#ifndef FUSEC_MODEL_H
#define FUSEC_MODEL_H

#include "parts.h"

/* An argument of the function.

   input: its number among the inputs.
   names: of a weight, one a line.
   value: of one that is no input; `copy` is that, where it is the model's own. */
typedef struct {
  enum { UNREAD, INPUT, WEIGHT, HELD } kind;
  size_t input;
  fusec_text names;
  fusec_tensor type;
  const void *value;
  void *copy;
} argument;

/* whole: of one whose sizes are chosen, the one that was loaded, to which library, weights and held
     values belong.
   values: the symbols', for the function. */
struct fusec_model {
  const fusec_model *whole;
  fusec_symbols symbols;
  fusec_size *sizes;
  long long *values;
  fusec_library library;
  fusec_text weights; /* the file, mapped */
  argument *arguments;
  fusec_tensor *inputs, *outputs;
  size_t argument_count, input_count, output_count, size_count, workspace;
  char target[32];
  fusec_text description; /* the names, as the archive has them */
  char *names;            /* to which the tensors' point */
};

#endif
