/* The operating system and the processor: files, features, libraries. Linux. */

#define _GNU_SOURCE

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "parts.h"

/* -- files -------------------------------------------------------------------------------------- */

/* Read a file to memory of our own: what is checked is what runs, whoever writes the file. */
int fusec_read(const char *path, fusec_text *file, fusec_error *error) {
  struct stat status;
  int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  int known = descriptor >= 0 && !fstat(descriptor, &status);
  size_t size = known ? (size_t)status.st_size : 0, done = 0;
  char *at = known ? malloc(size + 1) : NULL;
  ssize_t count = 1;
  while (at && done < size && count > 0) {
    count = read(descriptor, at + done, size - done);
    done += count > 0 ? (size_t)count : 0;
  }
  int code = FUSEC_OK;
  if (known && !at) code = fusec_fail(error, FUSEC_NO_MEMORY, "no memory for %s", path);
  else if (!known || count < 0)
    code = fusec_fail(error, FUSEC_CANNOT_READ, "cannot read %s: %s", path, strerror(errno));
  if (descriptor >= 0) close(descriptor);
  if (code) free(at);
  else *file = (fusec_text){at, done};
  return code;
}

int fusec_map(const char *path, fusec_text *file, fusec_error *error) {
  struct stat status;
  int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0 || fstat(descriptor, &status)) {
    int code = fusec_fail(error, FUSEC_CANNOT_READ, "cannot read %s: %s", path, strerror(errno));
    if (descriptor >= 0) close(descriptor);
    return code;
  }
  size_t size = (size_t)status.st_size;
  /* No memory is mapped for an empty file; it is damaged, and says so when it is read. */
  void *at = size ? mmap(NULL, size, PROT_READ, MAP_PRIVATE, descriptor, 0) : "";
  close(descriptor);
  if (at == MAP_FAILED)
    return fusec_fail(error, FUSEC_CANNOT_READ, "cannot map %s: %s", path, strerror(errno));
  *file = (fusec_text){at, size};
  return FUSEC_OK;
}

void fusec_unmap(fusec_text file) {
  if (file.left) munmap((void *)file.at, file.left);
}

/* -- the processor ------------------------------------------------------------------------------ */

/* Read the line of features as Linux lists them, for it leaves out what it does not let us use.
   Tests compile with another file. */
#ifndef FUSEC_CPUINFO
#define FUSEC_CPUINFO "/proc/cpuinfo"
#endif

static char *features(void) {
  FILE *file = fopen(FUSEC_CPUINFO, "re");
  char *line = NULL;
  size_t room = 0;
  int found = 0;
  while (file && !found && getline(&line, &room, file) > 0)
    found = !strncmp(line, "flags", 5) || !strncmp(line, "Features", 8);
  if (file) fclose(file);
  if (found) return line;
  free(line);
  return NULL;
}

static int has_word(const char *line, fusec_text word) {
  fusec_text rest = {line, strlen(line)}, one;
  while (fusec_until(&rest, ' ', &one))
    if (fusec_same(one, word)) return 1;
  if (rest.left && rest.at[rest.left - 1] == '\n') --rest.left;
  return fusec_same(rest, word);
}

size_t fusec_missing(fusec_text needed, char *missing, size_t room) {
  struct utsname names;
  fusec_text word;
  char *here = features();
  size_t count = 0, length = 0;
  for (int first = 1; needed.left; first = 0) {
    if (!fusec_until(&needed, ' ', &word)) fusec_take(&needed, needed.left, &word);
    int has = first ? !uname(&names) && fusec_equal(word, names.machine)
                    : here && has_word(here, word);
    if (has) continue;
    ++count;
    if (word.left + 2 > room - length) continue;
    missing[length++] = ' ';
    memcpy(missing + length, word.at, word.left);
    length += word.left;
  }
  missing[length] = 0;
  free(here);
  return count;
}

/* -- libraries ---------------------------------------------------------------------------------- */

/* Write bytes to a file in memory, which nobody can change afterwards. */
static int memory_file(fusec_text content) {
  int file = memfd_create("fusec", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  while (file >= 0 && content.left) {
    ssize_t count = write(file, content.at, content.left);
    if (count <= 0 || !fusec_take(&content, (size_t)count, &(fusec_text){NULL, 0})) {
      close(file);
      return -1;
    }
  }
  if (file >= 0) fcntl(file, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL);
  return file;
}

/* Keep OpenMP's library for good: its threads wait in it for the next run, whoever asks. */
static void keep_threads(void *handle) {
  Dl_info info;
  void *function = dlsym(handle, "omp_get_max_threads");
  if (function && dladdr(function, &info)) dlopen(info.dli_fname, RTLD_NOW | RTLD_NODELETE);
}

/* Write a path of an open file that no library has had in this process: dlopen knows a library by
   its path, and the number of a file that was closed is given again. Each bit of a counter, and of
   its place, for a process may have this code twice, is a "/" or a "./", which lead nowhere else. */
static void path_of(int file, char path[400]) {
  static unsigned long loads;
  unsigned long bits[2] = {(unsigned long)&loads, __atomic_add_fetch(&loads, 1, __ATOMIC_RELAXED)};
  char *end = path + sprintf(path, "/proc/self/fd/");
  for (int k = 0; k < 2; ++k)
    for (unsigned long rest = bits[k]; rest; rest >>= 1) end += sprintf(end, rest & 1 ? "./" : "/");
  sprintf(end, "%d", file);
}

int fusec_load_library(fusec_text content, fusec_library *library, fusec_error *error) {
  char path[400]; /* two for each of 128 bits, and what is around them */
  int file = memory_file(content);
  *library = (fusec_library){NULL, NULL, NULL, NULL};
  if (file < 0)
    return fusec_fail(error, FUSEC_NO_MEMORY, "no file in memory: %s", strerror(errno));
  path_of(file, path);
  library->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  close(file); /* what is mapped stays */
  if (!library->handle) {
    fusec_fail(error, FUSEC_OTHER_MACHINE, "the kernels cannot be loaded: %s", dlerror());
    fusec_unload_library(library);
    return FUSEC_OTHER_MACHINE;
  }
  keep_threads(library->handle);
  void *run = dlsym(library->handle, "fusec_run"), *bytes = dlsym(library->handle, "fusec_bytes");
  memcpy(&library->run, &run, sizeof run); /* C has no cast from an object to a function */
  memcpy(&library->bytes, &bytes, sizeof bytes);
  library->signature = dlsym(library->handle, "fusec_signature");
  if (run && bytes && library->signature) return FUSEC_OK;
  fusec_unload_library(library);
  return fusec_fail(error, FUSEC_DAMAGED, "the kernels are not those of an archive for C");
}

void fusec_unload_library(fusec_library *library) {
  if (library->handle) dlclose(library->handle);
  library->handle = NULL;
}
