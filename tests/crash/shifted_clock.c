/* Shifts the wall clock of a process and its children, for tests: LD_PRELOAD it. The monotonic clock stays.
 *
 * SHIFTED_CLOCK  a file of 8 bytes: by how many seconds, a signed integer in the host's byte order. It may change
 *                while processes run; they see it at once.
 *
 * A wait until a time of the wall clock is moved back by the shift that it began under, since the kernel's clock is not
 * shifted. Such times are told from monotonic ones by being later than 2001.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const long long *shift;

static long long shifted(void) {
    if (!shift) {
        const char *path = getenv("SHIFTED_CLOCK");
        int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        if (fd < 0) return 0;
        void *at = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, fd, 0);
        close(fd);
        if (at == MAP_FAILED) return 0;
        shift = at;
    }
    return *shift;
}

int clock_gettime(clockid_t id, struct timespec *at) {
    int result = (int)syscall(SYS_clock_gettime, id, at);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += shifted();
    return result;
}

int gettimeofday(struct timeval *at, void *zone) {
    int result = (int)syscall(SYS_gettimeofday, at, zone);
    if (!result) at->tv_sec += shifted();
    return result;
}

time_t time(time_t *out) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (out) *out = at.tv_sec;
    return at.tv_sec;
}

static struct timespec unshifted(const struct timespec *until) {
    struct timespec at = *until;
    if (at.tv_sec > 1000000000) at.tv_sec -= shifted();
    return at;
}

static void *next(const char *name, const char *version) {
    void *found = version ? dlvsym(RTLD_NEXT, name, version) : NULL;
    return found ? found : dlsym(RTLD_NEXT, name);
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = next("pthread_cond_timedwait", "GLIBC_2.3.2"); /* x86-64 has an older one of other structures */
    struct timespec at = unshifted(until);
    return real(cond, mutex, &at);
}

int pthread_cond_clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t id, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (!real) real = next("pthread_cond_clockwait", NULL);
    struct timespec at = unshifted(until);
    return real(cond, mutex, id, &at);
}

int sem_timedwait(sem_t *sem, const struct timespec *until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) real = next("sem_timedwait", NULL);
    struct timespec at = unshifted(until);
    return real(sem, &at);
}

int sem_clockwait(sem_t *sem, clockid_t id, const struct timespec *until) {
    static int (*real)(sem_t *, clockid_t, const struct timespec *);
    if (!real) real = next("sem_clockwait", NULL);
    struct timespec at = unshifted(until);
    return real(sem, id, &at);
}
