/* Preloaded: counts the calls that write below a folder, and makes one of them fail.
 *
 *   cc -shared -fPIC -o fail_write.so fail_write.c -ldl
 *
 * `fail_write(folder, number, error, log)` starts the count. The call of that number fails with
 * `error`; 0 fails none. Each call, or the one that fails, is written to the file `log`.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t folder_length;
static long target, count;
static int error_number, log_file = -1;

#define REAL(name, ...) ((__typeof__(&name))real(#name))(__VA_ARGS__)

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

void fail_write(const char *path, long number, int error, const char *log) {
  log_file = REAL(open, log, O_CREAT | O_WRONLY | O_APPEND, 0644);
  strncpy(folder, path, sizeof folder - 1);
  target = number, error_number = error, count = 0;
  folder_length = strlen(folder);
}

static int fails(const char *function, const char *path) {
  if (!folder_length || !path || strncmp(path, folder, folder_length)) return 0;
  if (path[folder_length] && path[folder_length] != '/') return 0;
  long number = __sync_add_and_fetch(&count, 1);
  if (target && number != target) return 0;
  char line[PATH_MAX + 64];
  int size = snprintf(line, sizeof line, "%s %s\n", function, path + folder_length);
  if (REAL(write, log_file, line, size) < 0) abort();
  if (!target) return 0;
  errno = error_number;
  return 1;
}

static int descriptor_fails(const char *function, int descriptor) {
  if (!folder_length) return 0;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return fails(function, path);
}

#define OPEN(name)                                                   \
  int name(const char *path, int flags, ...) {                       \
    va_list rest;                                                    \
    va_start(rest, flags);                                           \
    int mode = va_arg(rest, int);                                    \
    va_end(rest);                                                    \
    if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) && fails("open", path)) return -1; \
    return REAL(name, path, flags, mode);                            \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                 \
  int name(int at, const char *path, int flags, ...) {               \
    va_list rest;                                                    \
    va_start(rest, flags);                                           \
    int mode = va_arg(rest, int);                                    \
    va_end(rest);                                                    \
    if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) && fails("open", path)) return -1; \
    return REAL(name, at, path, flags, mode);                        \
  }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                  \
  FILE *name(const char *path, const char *mode) {                   \
    if (strpbrk(mode, "wa+") && fails("open", path)) return NULL;    \
    return REAL(name, path, mode);                                   \
  }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int file, const void *data, size_t size) {
  return descriptor_fails("write", file) ? -1 : REAL(write, file, data, size);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
  return descriptor_fails("write", file) ? -1 : REAL(pwrite64, file, data, size, at);
}
ssize_t writev(int file, const struct iovec *data, int number) {
  return descriptor_fails("write", file) ? -1 : REAL(writev, file, data, number);
}
int ftruncate64(int file, off64_t size) {
  return descriptor_fails("truncate", file) ? -1 : REAL(ftruncate64, file, size);
}
int truncate64(const char *path, off64_t size) {
  return fails("truncate", path) ? -1 : REAL(truncate64, path, size);
}
int fsync(int file) { return descriptor_fails("sync", file) ? -1 : REAL(fsync, file); }
int fdatasync(int file) { return descriptor_fails("sync", file) ? -1 : REAL(fdatasync, file); }
int mkdir(const char *path, mode_t mode) {
  return fails("mkdir", path) ? -1 : REAL(mkdir, path, mode);
}
int rename(const char *from, const char *to) {
  return fails("rename", to) ? -1 : REAL(rename, from, to);
}
int renameat(int from_at, const char *from, int to_at, const char *to) {
  return fails("rename", to) ? -1 : REAL(renameat, from_at, from, to_at, to);
}
