/* A disk that fails beneath a library, such as SQLite: file operations under `place` are counted, and one of them fails or is the last. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static char place[PATH_MAX];
static long count, at;
static int code, lasting;

/* The operation of that number (none for 0) gives the error; the process is killed where the error is 0. */
void arm(const char *under, long number, int error, int stays) {
    strncpy(place, under, sizeof place - 1);
    count = 0, at = number, code = error, lasting = stays;
}

long counted(void) { return count; }

static int beneath(const char *path) { return place[0] && !strncmp(path, place, strlen(place)); }

static int of_handle(int handle) {
    char link[64], path[PATH_MAX + 1];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = place[0] ? readlink(link, path, PATH_MAX) : -1;
    path[length < 0 ? 0 : length] = 0;
    return beneath(path);
}

static int fails(void) {
    count++;
    if (!at || (count != at && !(lasting && count > at))) return 0;
    if (!code) kill(getpid(), SIGKILL);
    errno = code;
    return 1;
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

ssize_t pwrite64(int handle, const void *bytes, size_t size, off64_t offset) {
    if (of_handle(handle)) {
        if (at == count + 1 && !code) /* torn */
            REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t)(handle, bytes, size / 2, offset);
        if (fails()) return -1;
    }
    return REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t)(handle, bytes, size, offset);
}

ssize_t pread64(int handle, void *bytes, size_t size, off64_t offset) {
    if (of_handle(handle) && fails()) return -1;
    return REAL(ssize_t, pread64, int, void *, size_t, off64_t)(handle, bytes, size, offset);
}

int ftruncate64(int handle, off64_t size) {
    if (of_handle(handle) && fails()) return -1;
    return REAL(int, ftruncate64, int, off64_t)(handle, size);
}

int fsync(int handle) {
    if (of_handle(handle) && fails()) return -1;
    return REAL(int, fsync, int)(handle);
}

int fdatasync(int handle) {
    if (of_handle(handle) && fails()) return -1;
    return REAL(int, fdatasync, int)(handle);
}

int unlink(const char *path) {
    if (beneath(path) && fails()) return -1;
    return REAL(int, unlink, const char *)(path);
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
    va_end(rest);
    if (beneath(path) && fails()) return -1;
    return REAL(int, open64, const char *, int, ...)(path, flags, mode);
}
