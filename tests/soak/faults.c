/* Storage faults below Python: a library for LD_PRELOAD that makes file calls fail, stall or kill, as a page of shared
 * memory says (`Control` in faults.py writes it). Without that page, or with `action` NONE, it only passes calls on.
 *
 * Only calls on paths that begin with `prefix` count; the process `exempt` is never touched. Of the calls that match
 * `ops`, the first `after` pass, then `limit` are hit (-1: all that follow).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READ = 1, WRITE = 2, OPEN = 4, SYNC = 8, NAME = 16 };
enum { NONE, COUNT, ERROR, SHORT, SLOW, KILL };

struct control {
    volatile int32_t action, ops, error, group;
    volatile int64_t after, limit, wait_us, calls, hits, exempt;
    char prefix[1024];
};

static struct control *control;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("RESOLUTE_SOAK_FAULTS");
    int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    if (!path) return;
    int fd = real_open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *page = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED) control = page;
    close(fd);
}

static int below(const char *path) {
    size_t n = strlen(control->prefix);
    return n && !strncmp(path, control->prefix, n) && (path[n] == 0 || path[n] == '/' || path[n] == ' ');
}

static int path_of(int fd, char *out, size_t size) {
    char link[48];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, size - 1);
    if (n < 0) return 0;
    out[n] = 0;
    return 1;
}

/* The action for this call: NONE, ERROR (errno is set), SHORT or KILL; SLOW has waited already and is NONE. */
static int verdict(int op, int fd, int folder, const char *path) {
    if (!control || control->action == NONE || !(control->ops & op)) return NONE;
    int saved = errno, action = control->action;
    char full[2048];
    if (control->exempt == getpid()) return NONE;
    if (path && path[0] == '/') {
        if (!below(path)) return NONE;
    } else if (path) {
        char base[1024];
        if (folder == AT_FDCWD ? !getcwd(base, sizeof base) : !path_of(folder, base, sizeof base)) return NONE;
        snprintf(full, sizeof full, "%s/%s", base, path);
        if (!below(full)) return NONE;
    } else if (!path_of(fd, full, sizeof full) || !below(full)) {
        errno = saved;
        return NONE;
    }
    errno = saved;
    int64_t number = __atomic_fetch_add(&control->calls, 1, __ATOMIC_SEQ_CST);
    if (action == COUNT || number < control->after) return NONE;
    if (control->limit >= 0 && number >= control->after + control->limit) return NONE;
    __atomic_fetch_add(&control->hits, 1, __ATOMIC_SEQ_CST);
    if (action == SLOW) {
        usleep((useconds_t)control->wait_us);
        return NONE;
    }
    if (action == ERROR) errno = control->error;
    return action;
}

static void die(void) {
    kill(control->group ? 0 : getpid(), SIGKILL);
    for (;;) pause();
}

#define REAL(name, type, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define PAIRED(name, op, type, parameters, fd, folder, path, ...) \
    type name parameters { \
        static type(*real) parameters; \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name); \
        int what = verdict(op, fd, folder, path); \
        if (what == ERROR) return (type)-1; \
        if (what == KILL) die(); \
        return real(__VA_ARGS__); \
    }

/* A short read or write takes half of the bytes; a killed write is torn in half. */
#define SIZED(name, op, type, parameters, size, ...) \
    type name parameters { \
        static type(*real) parameters; \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name); \
        int what = verdict(op, fd, 0, NULL); \
        if (what == ERROR) return (type)-1; \
        if ((what == SHORT || what == KILL) && size > 1) size = size / 2; \
        if (what == KILL && op == READ) die(); \
        type result = real(__VA_ARGS__); \
        if (what == KILL) die(); \
        return result; \
    }

SIZED(read, READ, ssize_t, (int fd, void *data, size_t n), n, fd, data, n)
SIZED(pread, READ, ssize_t, (int fd, void *data, size_t n, off_t at), n, fd, data, n, at)
SIZED(pread64, READ, ssize_t, (int fd, void *data, size_t n, off64_t at), n, fd, data, n, at)
SIZED(write, WRITE, ssize_t, (int fd, const void *data, size_t n), n, fd, data, n)
SIZED(pwrite, WRITE, ssize_t, (int fd, const void *data, size_t n, off_t at), n, fd, data, n, at)
SIZED(pwrite64, WRITE, ssize_t, (int fd, const void *data, size_t n, off64_t at), n, fd, data, n, at)
PAIRED(ftruncate, WRITE, int, (int fd, off_t n), fd, 0, NULL, fd, n)
PAIRED(ftruncate64, WRITE, int, (int fd, off64_t n), fd, 0, NULL, fd, n)
PAIRED(fsync, SYNC, int, (int fd), fd, 0, NULL, fd)
PAIRED(fdatasync, SYNC, int, (int fd), fd, 0, NULL, fd)
PAIRED(rename, NAME, int, (const char *from, const char *to), 0, AT_FDCWD, to, from, to)
PAIRED(renameat, NAME, int, (int a, const char *from, int b, const char *to), 0, b, to, a, from, b, to)
PAIRED(link, NAME, int, (const char *from, const char *to), 0, AT_FDCWD, to, from, to)
PAIRED(linkat, NAME, int, (int a, const char *from, int b, const char *to, int flags), 0, b, to, a, from, b, to, flags)
PAIRED(unlink, NAME, int, (const char *path), 0, AT_FDCWD, path, path)
PAIRED(unlinkat, NAME, int, (int folder, const char *path, int flags), 0, folder, path, folder, path, flags)
PAIRED(mkdir, NAME, int, (const char *path, mode_t mode), 0, AT_FDCWD, path, path, mode)
PAIRED(rmdir, NAME, int, (const char *path), 0, AT_FDCWD, path, path)

static mode_t mode_of(int flags, va_list words) {
    return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? (mode_t)va_arg(words, int) : 0;
}

#define OPENING(name) \
    int name(const char *path, int flags, ...) { \
        va_list words; \
        va_start(words, flags); \
        mode_t mode = mode_of(flags, words); \
        va_end(words); \
        REAL(#name, int, const char *, int, ...); \
        int what = verdict(OPEN, 0, AT_FDCWD, path); \
        if (what == ERROR) return -1; \
        if (what == KILL) die(); \
        return real(path, flags, mode); \
    }
#define OPENING_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        va_list words; \
        va_start(words, flags); \
        mode_t mode = mode_of(flags, words); \
        va_end(words); \
        REAL(#name, int, int, const char *, int, ...); \
        int what = verdict(OPEN, 0, folder, path); \
        if (what == ERROR) return -1; \
        if (what == KILL) die(); \
        return real(folder, path, flags, mode); \
    }
OPENING(open)
OPENING(open64)
OPENING_AT(openat)
OPENING_AT(openat64)
