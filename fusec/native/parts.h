/* What the parts of the library share. Users include fusec.h. */

#ifndef FUSEC_PARTS_H
#define FUSEC_PARTS_H

#include "fusec.h"

/* -- text.c: reading, with every access inside what is left ------------------------------------- */

/* Bytes that are still to be read. What is cut from a text goes into another one. */
typedef struct {
  const char *at;
  size_t left;
} fusec_text;

/* Set `error` and return its code. */
int fusec_fail(fusec_error *error, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Cut `count` bytes from the front into `taken`. Returns 0, and takes none, if there are fewer. */
int fusec_take(fusec_text *text, size_t count, fusec_text *taken);
/* Go past a literal that the text begins with. Returns 0 if it begins with another. */
int fusec_skip(fusec_text *text, const char *literal);
/* Cut what stands before a character, which is gone past. Returns 0 if there is none. */
int fusec_until(fusec_text *text, char end, fusec_text *taken);
/* Cut a number, which 63 bits hold. Returns 0 if there is none. */
int fusec_number(fusec_text *text, uint64_t *number);
int fusec_equal(fusec_text text, const char *literal);
int fusec_same(fusec_text one, fusec_text other);

/* Return the name of a type, and its bytes per element; NULL for what is no type. */
const char *fusec_dtype(fusec_text name, size_t *bytes);

/* -- sizes.c: those that a call chooses --------------------------------------------------------- */

/* A size of a signature.

   symbol: its name in the signature, such as s0; name: the user's, such as T.
   value: -1 until it is chosen. least, most: of the values that it may have. */
typedef struct {
  fusec_text symbol;
  const char *name;
  int64_t value, least, most;
} fusec_symbol;

typedef struct {
  fusec_symbol *rows;
  size_t count;
} fusec_symbols;

/* What evaluating a formula gave, from best to worst: a value; nothing, since a size is not chosen
   yet; an overflow or a division by zero; no formula at all. A formula is as bad as its worst part. */
enum { FUSEC_KNOWN, FUSEC_OPEN, FUSEC_NO_NUMBER, FUSEC_NO_FORMULA };

/* Cut a formula from the front and evaluate it. */
int fusec_size_of(fusec_text *text, const fusec_symbols *symbols, int64_t *value);
/* Evaluate a condition; `holds` is set where it is known. */
int fusec_holds(fusec_text text, const fusec_symbols *symbols, int *holds);
/* Narrow the bounds of a size where the condition compares it with a number alone. */
void fusec_take_bounds(fusec_text text, fusec_symbols *symbols);
/* Set the error for a condition that does not hold. */
int fusec_refuse(fusec_text text, const fusec_symbols *symbols, fusec_error *error);

/* -- sha256.c ----------------------------------------------------------------------------------- */

typedef struct {
  uint32_t state[8];
  uint64_t bytes;
  unsigned char block[64];
} fusec_sha256;

void fusec_sha256_begin(fusec_sha256 *digest);
void fusec_sha256_add(fusec_sha256 *digest, const void *data, size_t count);
void fusec_sha256_end(fusec_sha256 *digest, unsigned char result[32]);
void fusec_sha256_of(fusec_text text, unsigned char result[32]);
/* Read 64 hexadecimal digits. Returns 0 if there are others. */
int fusec_digest(fusec_text *text, unsigned char result[32]);

/* -- archive.c: what `fusec build` writes ------------------------------------------------------- */

/* One named part of an archive, and its digest in the manifest. */
typedef struct {
  fusec_text name, content;
  unsigned char sha256[32];
} fusec_blob;

/* target: what the variant is for. */
typedef struct {
  fusec_blob *blobs;
  size_t count;
  fusec_text target;
} fusec_archive;

/* Find the first variant for C in a file's bytes that this processor can run, and check every digest
   in it. Free `archive->blobs`. */
int fusec_open(fusec_text file, fusec_archive *archive, fusec_error *error);
/* Find a blob by two parts of its name. Returns 0 if there is none. */
int fusec_find(const fusec_archive *archive, const char *folder, fusec_text name,
               fusec_text *content);

/* -- weights.c: safetensors --------------------------------------------------------------------- */

/* A weight that the model needs, and where in the file it lies.

   names: of the weight, and of others that share its memory, one a line: "a", then "or b".
   found, rank: the values, and which name the file has them by: the first that it has counts. */
typedef struct {
  fusec_text names;
  const fusec_tensor *type;
  const void *found;
  size_t rank;
} fusec_weight;

int fusec_find_weights(fusec_text file, fusec_weight *weights, size_t count, fusec_error *error);

/* -- machine.c: the operating system and the processor ------------------------------------------ */

/* Read a file to memory that `free` takes. */
int fusec_read(const char *path, fusec_text *file, fusec_error *error);

/* Map a file, to be read. */
int fusec_map(const char *path, fusec_text *file, fusec_error *error);
void fusec_unmap(fusec_text file);
/* Count the features, words after an architecture, that this processor lacks; write them as a text
   of less than `room` bytes, a space before each. */
size_t fusec_missing(fusec_text needed, char *missing, size_t room);

typedef int (*fusec_function)(void *const *, void *const *, char *, const long long *, int);
typedef long long (*fusec_count)(const long long *);

/* A shared library that was loaded from memory. */
typedef struct {
  void *handle;
  fusec_function run;
  fusec_count bytes; /* of a workspace; -1 where 64 bits do not hold it */
  const char *signature;
} fusec_library;

int fusec_load_library(fusec_text content, fusec_library *library, fusec_error *error);
void fusec_unload_library(fusec_library *library);

#endif
