/* Makes writes and syncs below one directory fail, for tests: LD_PRELOAD it, RocksDB's own writes included.
 *
 * FAULTY_IO_BELOW  only files whose path holds this text
 * FAULTY_IO_WHILE  only while this file exists: removing it is the disk getting well
 * FAULTY_IO_AT     from which matching call on, counted from 0
 * FAULTY_IO_ERRNO  what they fail with, a number
 * FAULTY_IO_SHORT  if set, a write that fails has written half of its bytes before
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static long calls;

static int fails(int fd) {
    const char *below = getenv("FAULTY_IO_BELOW"), *on = getenv("FAULTY_IO_WHILE"), *at = getenv("FAULTY_IO_AT");
    char link[64], path[4096];
    if (!below || !on || !at) return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    int hit = 0;
    if (length > 0) {
        path[length] = 0;
        hit = strstr(path, below) && access(on, F_OK) == 0 && __sync_fetch_and_add(&calls, 1) >= atol(at);
    }
    errno = before;
    return hit;
}

static int number(void) {
    const char *text = getenv("FAULTY_IO_ERRNO");
    return text ? atoi(text) : EIO;
}

static size_t half(size_t count) { return getenv("FAULTY_IO_SHORT") ? count / 2 : 0; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t count) {
    if (!fails(fd)) return REAL(write)(fd, data, count);
    if (half(count)) REAL(write)(fd, data, half(count));
    errno = number();
    return -1;
}

ssize_t pwrite(int fd, const void *data, size_t count, off_t at) {
    if (!fails(fd)) return REAL(pwrite)(fd, data, count, at);
    if (half(count)) REAL(pwrite)(fd, data, half(count), at);
    errno = number();
    return -1;
}

ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at) {
    if (!fails(fd)) return REAL(pwrite64)(fd, data, count, at);
    if (half(count)) REAL(pwrite64)(fd, data, half(count), at);
    errno = number();
    return -1;
}

int fsync(int fd) {
    if (!fails(fd)) return REAL(fsync)(fd);
    errno = number();
    return -1;
}

int fdatasync(int fd) {
    if (!fails(fd)) return REAL(fdatasync)(fd);
    errno = number();
    return -1;
}
