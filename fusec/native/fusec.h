/* fusec.h: run a model that `fusec build --native` wrote, without Python.

   A model is loaded once and may be run by any number of threads at the same time: nothing in it
   changes. All memory of a run is the caller's: inputs, outputs, and a workspace.

     fusec_model *model;
     fusec_error error;
     if (fusec_load(&model, "net.fusec", "net.safetensors", NULL, &error)) { puts(error.text); ... }
     float x[8 * 256], y[8 * 1024];
     fusec_memory in = {x, sizeof x}, out = {y, sizeof y};
     if (fusec_run(model, &in, &out, NULL, 4, &error)) { puts(error.text); ... }
     fusec_free(model);

   A model whose sizes calls choose runs once they are chosen:

     fusec_choice sizes[] = {{"B", 8}, {"T", 128}};
     fusec_model *chosen;
     if (fusec_choose(&chosen, model, sizes, 2, &error)) { puts(error.text); ... }

   Every function that can fail returns 0 or one of the codes below. */

#ifndef FUSEC_H
#define FUSEC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  FUSEC_OK = 0,
  FUSEC_CANNOT_READ = 1,      /* a file is not there, or may not be read */
  FUSEC_DAMAGED = 2,          /* a file is no archive, or not the one that was written */
  FUSEC_NOT_NATIVE = 3,       /* an archive that was built without --native, or by another fusec */
  FUSEC_OTHER_MACHINE = 4,    /* the processor lacks what the kernels use, or libgomp is missing */
  FUSEC_BAD_WEIGHTS = 5,      /* a weight is missing, or has another type or size */
  FUSEC_BAD_CALL = 6,         /* an argument of fusec_run is not what the model takes */
  FUSEC_OUT_OF_RANGE = 7,     /* an index among the inputs, a token say, is out of range */
  FUSEC_DIVISION_BY_ZERO = 8, /* of integers */
  FUSEC_NO_MEMORY = 9,
  FUSEC_BAD_SIZE = 10 /* a size is missing or unknown, or one that the model was not built for */
};

/* What went wrong, in words. Wherever one is taken, NULL may be given. */
typedef struct {
  int code;
  char text[256];
} fusec_error;

/* An input or an output: its elements lie one after another, the last axis fastest. */
typedef struct {
  const char *name;
  const char *dtype; /* "bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64",
                        or a float of 8 bits, as "f8e4m3fn" */
  size_t rank;
  const int64_t *sizes; /* so many as `rank`; -1 is one that follows from what is chosen */
  size_t bytes;         /* 0, where a size is -1 */
  int written; /* an input that the model changes, a cache say */
} fusec_tensor;

/* Memory that the caller owns. */
typedef struct {
  void *data;
  size_t bytes;
} fusec_memory;

/* A size that a call chooses, and what bounds it by itself: 0 and INT64_MAX, where nothing does. More
   may be asked of several sizes together, which fusec_choose checks. */
typedef struct {
  const char *name;
  int64_t least, most;
} fusec_size;

/* What is chosen. */
typedef struct {
  const char *name;
  int64_t value;
} fusec_choice;

typedef struct fusec_model fusec_model;

/* Load an archive. Of several variants for CPUs the first that this processor can run is taken: they
   stand in the archive best first. Nothing of it runs before all of it is verified.

   weights: a safetensors file, which is mapped, so that processes share its pages; it has to stay as
     it is. NULL for a model without any.
   sha256: the archive's digest in 64 hexadecimal digits: another file is refused. NULL: any is
     taken, and trusted as a shared library is. */
int fusec_load(fusec_model **model, const char *archive, const char *weights, const char *sha256,
               fusec_error *error);

/* The sizes that are to be chosen before a run; none, where all are known. */
const fusec_size *fusec_sizes(const fusec_model *model, size_t *count);

/* Choose sizes: each of them, once, by name. `*chosen` is a model without any, which has the sizes of
   inputs and outputs, and the bytes of its workspace. That takes microseconds and some kB, for it
   shares all else with `model`, which has to be there as long; let go of it by fusec_free. */
int fusec_choose(fusec_model **chosen, const fusec_model *model, const fusec_choice *choices,
                 size_t count, fusec_error *error);

/* What a run takes and gives: `*count` tensors, in order. */
const fusec_tensor *fusec_inputs(const fusec_model *model, size_t *count);
const fusec_tensor *fusec_outputs(const fusec_model *model, size_t *count);

/* What the kernels are for: "cpu:avx2". */
const char *fusec_target(const fusec_model *model);

/* The bytes that a run needs beside them; 0, where sizes are to be chosen. */
size_t fusec_workspace(const fusec_model *model);

/* Run the model once.

   inputs, outputs: as many as it has, each of exactly the tensor's size, at a multiple of the size
     of an element; outputs overlap nothing.
   workspace: of at least fusec_workspace(model) bytes, at a multiple of 64. NULL: memory is
     allocated for this run.
   threads: 1 to 1024. They are OpenMP's, and each thread that calls has its own. */
int fusec_run(const fusec_model *model, const fusec_memory *inputs, const fusec_memory *outputs,
              const fusec_memory *workspace, int threads, fusec_error *error);

/* Let go of a model that no thread runs any more; of those that sizes were chosen for before the one
   that they are of. NULL is allowed. */
void fusec_free(fusec_model *model);

#ifdef __cplusplus
}
#endif
#endif
