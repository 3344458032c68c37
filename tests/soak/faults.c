/* Storage faults below Python: a library for LD_PRELOAD that makes file calls fail, stop halfway or kill, as a page of
 * shared memory says (`Faults` in events.py writes it). Without that page, or with `action` NONE, it passes calls on.
 *
 * Only calls on files at or below `prefix` count, and on absolute paths. Of those that match `ops`, the first `after` pass, then `limit` are
 * hit (-1: all that follow).
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
#include <unistd.h>

enum { READ = 1, WRITE = 2, OPEN = 4, SYNC = 8, NAME = 16 };
enum { NONE, FAIL, SHORTEN, KILL };

static struct control {
    volatile int32_t action, ops, error, group;
    volatile int64_t after, limit, calls, hits;
    char prefix[1024];
} *control;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("RESOLUTE_SOAK_FAULTS");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *page = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (page != MAP_FAILED) control = page;
}

static int below(const char *path) {
    size_t n = strlen(control->prefix);
    /* why ' ': the kernel appends " (deleted)" to the name of an open file that was deleted */
    return n && !strncmp(path, control->prefix, n) && (path[n] == 0 || path[n] == '/' || path[n] == ' ');
}

static int is_open_below(int fd) {
    char link[48], path[2048];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n < 0 ? 0 : n] = 0;
    return below(path);
}

/* The action for a call on `path`, or on `fd` if that is NULL: NONE, FAIL (errno is set), SHORTEN or KILL. */
static int verdict(int op, int fd, const char *path) {
    if (!control || control->action == NONE || !(control->ops & op)) return NONE;
    int saved = errno, action = control->action, concerned = path ? below(path) : is_open_below(fd);
    errno = saved;
    if (!concerned) return NONE;
    int64_t number = __atomic_fetch_add(&control->calls, 1, __ATOMIC_SEQ_CST) - control->after;
    if (number < 0 || (control->limit >= 0 && number >= control->limit)) return NONE;
    __atomic_fetch_add(&control->hits, 1, __ATOMIC_SEQ_CST);
    if (action == FAIL) errno = control->error;
    return action;
}

static void die(void) {
    kill(control->group ? 0 : getpid(), SIGKILL);
    for (;;) pause();
}

/* A call on a path or an open file. */
#define WHOLE(name, op, parameters, fd, path, ...) \
    int name parameters { \
        static int(*real) parameters; \
        if (!real) real = (int(*) parameters)dlsym(RTLD_NEXT, #name); \
        int action = verdict(op, fd, path); \
        if (action == FAIL) return -1; \
        if (action == KILL) die(); \
        return real(__VA_ARGS__); \
    }

/* A read or write of `n` bytes: a short one takes half of them; a write that kills is torn in half. */
#define SIZED(name, op, parameters, ...) \
    ssize_t name parameters { \
        static ssize_t(*real) parameters; \
        if (!real) real = (ssize_t(*) parameters)dlsym(RTLD_NEXT, #name); \
        int action = verdict(op, fd, NULL); \
        if (action == FAIL) return -1; \
        if (action == KILL && op == READ) die(); \
        if (action != NONE && n > 1) n = n / 2; \
        ssize_t result = real(__VA_ARGS__); \
        if (action == KILL) die(); \
        return result; \
    }

#define OPENING(name) \
    int name(const char *path, int flags, ...) { \
        static int (*real)(const char *, int, ...); \
        if (!real) real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name); \
        va_list words; \
        va_start(words, flags); \
        mode_t mode = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(words, mode_t) : 0; \
        va_end(words); \
        int action = verdict(OPEN, 0, path); \
        if (action == KILL) die(); \
        return action == FAIL ? -1 : real(path, flags, mode); \
    }

SIZED(read, READ, (int fd, void *data, size_t n), fd, data, n)
SIZED(pread, READ, (int fd, void *data, size_t n, off_t at), fd, data, n, at)
SIZED(pread64, READ, (int fd, void *data, size_t n, off64_t at), fd, data, n, at)
SIZED(write, WRITE, (int fd, const void *data, size_t n), fd, data, n)
SIZED(pwrite, WRITE, (int fd, const void *data, size_t n, off_t at), fd, data, n, at)
SIZED(pwrite64, WRITE, (int fd, const void *data, size_t n, off64_t at), fd, data, n, at)
WHOLE(ftruncate, WRITE, (int fd, off_t n), fd, NULL, fd, n)
WHOLE(ftruncate64, WRITE, (int fd, off64_t n), fd, NULL, fd, n)
WHOLE(fsync, SYNC, (int fd), fd, NULL, fd)
WHOLE(fdatasync, SYNC, (int fd), fd, NULL, fd)
WHOLE(rename, NAME, (const char *from, const char *to), 0, to, from, to)
WHOLE(link, NAME, (const char *from, const char *to), 0, to, from, to)
WHOLE(unlink, NAME, (const char *path), 0, path, path)
WHOLE(mkdir, NAME, (const char *path, mode_t mode), 0, path, path, mode)
WHOLE(rmdir, NAME, (const char *path), 0, path, path)
OPENING(open)
OPENING(open64)
