/* A clock on the wall that jumps, or stands still: preloaded into a server, this adds an offset to what it
 * reads, or says the same time whenever it is asked.
 *
 * A file of sixteen bytes says which: the offset in seconds, and the time at which it stands in microseconds,
 * which is zero while it goes. It is mapped: so a jump takes effect at once, in the middle of whatever
 * goes on. The monotonic clock is left alone, as a real jump leaves it.
 * Times come from the kernel by system calls of their own: what would look for the next function of the same
 * name needs memory, and the server's allocator asks for the time.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct hands {
    int64_t ahead;    /* seconds */
    int64_t standing; /* microseconds since 1970, or zero */
};

static const volatile struct hands *hands;

__attribute__((constructor)) static void open_hands(void) {
    const char *path = getenv("CLOCK_HANDS");
    int file = path ? open(path, O_RDONLY) : -1;
    void *mapped =
        file < 0 ? MAP_FAILED : mmap(NULL, sizeof(struct hands), PROT_READ, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED)
        abort(); /* a clock that does not jump would make a test pass for nothing */
    hands = mapped;
}

static void turn(int64_t *seconds, int64_t *micros) {
    int64_t standing = hands ? hands->standing : 0;
    if (standing) {
        *seconds = standing / 1000000;
        *micros = standing % 1000000;
    } else if (hands) {
        *seconds += hands->ahead;
    }
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t seconds = now->tv_sec, micros = now->tv_nsec / 1000;
        turn(&seconds, &micros);
        now->tv_sec = seconds;
        now->tv_nsec = micros * 1000;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = (int)syscall(SYS_gettimeofday, now, zone);
    if (!failed) {
        int64_t seconds = now->tv_sec, micros = now->tv_usec;
        turn(&seconds, &micros);
        now->tv_sec = seconds;
        now->tv_usec = micros;
    }
    return failed;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}
