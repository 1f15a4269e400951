/* The file of `fusec build` (fusec/runtime/cache/entry.py): named blobs behind a table of digests.

     header    magic (8 bytes), version (u32), length of the manifest (u32), its SHA-256
     manifest  {"key": "...", "blobs": [{"name": "...", "length": 1, "sha256": "..."}, ...]}
     blobs     one after the other

   Numbers are little-endian. The manifest is JSON, but one program alone writes it, so that it is
   read letter by letter. The blobs of a file are its variants, one for each target, and each of
   these is such a file again. */

#include <stdlib.h>
#include <string.h>

#include "parts.h"

enum { HEADER = 48 };

static uint32_t little_endian(const char *bytes) {
  const unsigned char *b = (const unsigned char *)bytes;
  return b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

/* Cut header and manifest from the front. */
static int take_manifest(fusec_text *file, fusec_text *manifest) {
  unsigned char digest[32];
  fusec_text header;
  if (!fusec_take(file, HEADER, &header) || memcmp(header.at, "fusec\0\r\n", 8)) return 0;
  if (little_endian(header.at + 8) != 1) return 0;
  if (!fusec_take(file, little_endian(header.at + 12), manifest)) return 0;
  fusec_sha256_of(*manifest, digest);
  return !memcmp(digest, header.at + 16, 32);
}

/* Read one row of the manifest, and cut its blob from the front of the file. */
static int take_blob(fusec_text *manifest, fusec_text *file, fusec_blob *blob) {
  uint64_t length;
  return fusec_skip(manifest, "{\"name\": \"") && fusec_until(manifest, '"', &blob->name) &&
         !memchr(blob->name.at, '\\', blob->name.left) && fusec_skip(manifest, ", \"length\": ") &&
         fusec_number(manifest, &length) && fusec_skip(manifest, ", \"sha256\": \"") &&
         fusec_digest(manifest, blob->sha256) && fusec_skip(manifest, "\"}") &&
         length <= file->left && fusec_take(file, (size_t)length, &blob->content);
}

static void forget(fusec_archive *archive) {
  free(archive->blobs);
  *archive = (fusec_archive){NULL, 0, {NULL, 0}};
}

/* Read the table of a file. On success `archive->blobs` is to be freed. */
static int read_table(fusec_text file, const char *key, fusec_archive *archive) {
  fusec_text manifest, found;
  *archive = (fusec_archive){NULL, 0, {NULL, 0}};
  if (!take_manifest(&file, &manifest)) return 0;
  if (!fusec_skip(&manifest, "{\"key\": \"") || !fusec_until(&manifest, '"', &found)) return 0;
  if (!fusec_equal(found, key) || !fusec_skip(&manifest, ", \"blobs\": [")) return 0;
  /* A row has more than 64 bytes, so there are fewer rows than that. */
  archive->blobs = calloc(manifest.left / 64 + 1, sizeof *archive->blobs);
  if (!archive->blobs) return 0;
  int whole = fusec_skip(&manifest, "]}");
  while (!whole && take_blob(&manifest, &file, &archive->blobs[archive->count])) {
    ++archive->count;
    whole = fusec_skip(&manifest, "]}");
    if (!whole && !fusec_skip(&manifest, ", ")) break;
  }
  if (whole && !manifest.left && !file.left) return 1;
  forget(archive);
  return 0;
}

int fusec_find(const fusec_archive *archive, const char *folder, fusec_text name,
               fusec_text *content) {
  for (size_t k = 0; k < archive->count; ++k) {
    fusec_text full = archive->blobs[k].name;
    if (!fusec_skip(&full, folder) || !fusec_same(full, name)) continue;
    *content = archive->blobs[k].content;
    return 1;
  }
  return 0;
}

static int is_whole(const fusec_blob *blob) {
  unsigned char digest[32];
  fusec_sha256_of(blob->content, digest);
  return !memcmp(digest, blob->sha256, 32);
}

static int blobs_are_whole(const fusec_archive *archive) {
  for (size_t k = 0; k < archive->count; ++k)
    if (!is_whole(&archive->blobs[k])) return 0;
  return 1;
}

static int by_name(const void *one, const void *other) {
  fusec_text a = ((const fusec_blob *)one)->name, b = ((const fusec_blob *)other)->name;
  int order = memcmp(a.at, b.at, a.left < b.left ? a.left : b.left);
  return order ? order : (a.left > b.left) - (a.left < b.left);
}

/* The digest of all but the wrapper, which names it: what describes code is what belongs to it. */
static void digest_beside(fusec_archive *archive, unsigned char result[32]) {
  static const char wrapper[] = "/wrapper.py";
  const size_t length = sizeof wrapper - 1;
  fusec_sha256 digest;
  fusec_sha256_begin(&digest);
  qsort(archive->blobs, archive->count, sizeof *archive->blobs, by_name);
  for (size_t k = 0; k < archive->count; ++k) {
    const fusec_blob *blob = &archive->blobs[k];
    char number[24];
    size_t digits = sizeof number;
    if (blob->name.left >= length &&
        !memcmp(blob->name.at + blob->name.left - length, wrapper, length))
      continue;
    number[--digits] = 0;
    for (size_t rest = blob->content.left; digits == sizeof number - 1 || rest; rest /= 10)
      number[--digits] = (char)('0' + rest % 10);
    fusec_sha256_add(&digest, blob->name.at, blob->name.left);
    fusec_sha256_add(&digest, "", 1);
    fusec_sha256_add(&digest, number + digits, sizeof number - digits);
    fusec_sha256_add(&digest, blob->sha256, 32);
  }
  fusec_sha256_end(&digest, result);
}

/* Whether the code says that it was made with what stands beside it. */
static int is_described(fusec_archive *archive) {
  static const char mark[] = "\n# described: ";
  unsigned char said[32], found[32];
  fusec_text wrapper, name = {"wrapper.py", 10}, end = {NULL, 0};
  if (!fusec_find(archive, "inference/", name, &wrapper)) return 0;
  for (; wrapper.left; fusec_take(&wrapper, 1, &name))
    if (fusec_skip(&wrapper, mark)) end = wrapper; /* the last one */
  if (!end.at || !fusec_digest(&end, said)) return 0;
  digest_beside(archive, found);
  return !memcmp(said, found, 32);
}

/* Whether this processor has what a variant needs. If not, that is added to `lacking`. */
static int runs_here(const fusec_archive *archive, fusec_error *lacking) {
  static const fusec_text file = {"names.txt", 9};
  fusec_text names, needed;
  fusec_error before = *lacking;
  char missing[200];
  if (!fusec_find(archive, "", file, &names) || !fusec_skip(&names, "needs ") ||
      !fusec_until(&names, '\n', &needed))
    return 1; /* which the model then refuses */
  if (!fusec_missing(needed, missing, sizeof missing)) return 1;
  fusec_fail(lacking, FUSEC_OTHER_MACHINE, "%s%s for %.*s:%s",
             before.code ? before.text : "this processor lacks", before.code ? ";" : "", (int)archive->target.left,
             archive->target.at, missing);
  return 0;
}

int fusec_open(fusec_text file, fusec_archive *archive, fusec_error *error) {
  static const fusec_text signature = {"native.txt", 10};
  fusec_archive variants;
  fusec_text found;
  fusec_error lacking = {FUSEC_OK, ""};
  if (!read_table(file, "fusec model", &variants))
    return fusec_fail(error, FUSEC_DAMAGED, "the file is no archive of fusec build, or damaged");
  for (size_t k = 0; k < variants.count; ++k) {
    if (!read_table(variants.blobs[k].content, "fusec archive", archive)) {
      if (is_whole(&variants.blobs[k])) continue; /* What a later version wrote, say. */
      forget(&variants);
      return fusec_fail(error, FUSEC_DAMAGED, "the archive is not the one that was written");
    }
    archive->target = variants.blobs[k].name;
    if (fusec_find(archive, "inference/", signature, &found)) {
      int whole = blobs_are_whole(archive) && is_described(archive);
      if (!whole || runs_here(archive, &lacking)) {
        forget(&variants);
        if (whole) return FUSEC_OK;
        forget(archive);
        return fusec_fail(error, FUSEC_DAMAGED, "the archive is not the one that was written");
      }
    }
    forget(archive);
  }
  forget(&variants);
  if (lacking.code) return fusec_fail(error, lacking.code, "%s", lacking.text);
  return fusec_fail(error, FUSEC_NOT_NATIVE, "the archive was built without --native");
}
