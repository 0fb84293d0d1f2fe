/* A machine with faults, as the C library shows it to a program that is started with this in LD_PRELOAD.

   OFFBEAT_FAULTS names a folder, which is looked at in each call. As long as it holds a file named
     failing    with "PATH": reads, writes and syncs of files whose path begins so fail with EIO;
     full       with "PATH": writes of files whose path begins so fail with ENOSPC;
     slow       with "MILLISECONDS PATH": each write and sync of such a file takes so much longer;
     clock      with "SECONDS": the time of day is so much later, or earlier where it is negative. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* The text of a control file, with system calls alone: the functions below would call themselves. */
static int read_fault(const char *name, char *text, size_t size) {
    const char *folder = getenv("OFFBEAT_FAULTS");
    char path[PATH_MAX];
    if (!folder || snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return 0;
    long file = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    if (file < 0) return 0;
    long count = syscall(SYS_read, file, text, size - 1);
    syscall(SYS_close, file);
    if (count <= 0) return 0;
    text[count] = 0;
    return 1;
}

static int lies_below(int descriptor, const char *prefix) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    long count = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (count <= 0) return 0;
    path[count] = 0;
    return strncmp(path, prefix, strlen(prefix)) == 0;
}

static int has_fault(int descriptor, const char *name, int error) {
    char text[PATH_MAX];
    int kept = errno, answer = read_fault(name, text, sizeof text) && lies_below(descriptor, text);
    errno = answer ? error : kept;
    return answer;
}

static int fails(int descriptor) { return has_fault(descriptor, "failing", EIO); }

static int fails_or_waits(int descriptor) {
    char text[PATH_MAX + 32], *path;
    int kept = errno;
    if (read_fault("slow", text, sizeof text)) {
        long wait_ms = strtol(text, &path, 10);
        if (lies_below(descriptor, path + strspn(path, " "))) {
            struct timespec wait = {wait_ms / 1000, wait_ms % 1000 * 1000000};
            nanosleep(&wait, NULL);
        }
    }
    errno = kept;
    return fails(descriptor);
}

static int takes_nothing(int descriptor) {
    return fails_or_waits(descriptor) || has_fault(descriptor, "full", ENOSPC);
}

ssize_t write(int descriptor, const void *bytes, size_t count) {
    return takes_nothing(descriptor) ? -1 : syscall(SYS_write, descriptor, bytes, count);
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    return takes_nothing(descriptor) ? -1 : syscall(SYS_writev, descriptor, parts, count);
}

ssize_t pwrite64(int descriptor, const void *bytes, size_t count, off64_t offset) {
    return takes_nothing(descriptor) ? -1 : syscall(SYS_pwrite64, descriptor, bytes, count, offset);
}

ssize_t pwrite(int descriptor, const void *bytes, size_t count, off_t offset) {
    return pwrite64(descriptor, bytes, count, offset);
}

int fsync(int descriptor) { return fails_or_waits(descriptor) ? -1 : (int)syscall(SYS_fsync, descriptor); }

int fdatasync(int descriptor) { return fails_or_waits(descriptor) ? -1 : (int)syscall(SYS_fdatasync, descriptor); }

ssize_t read(int descriptor, void *bytes, size_t count) {
    return fails(descriptor) ? -1 : syscall(SYS_read, descriptor, bytes, count);
}

ssize_t pread64(int descriptor, void *bytes, size_t count, off64_t offset) {
    return fails(descriptor) ? -1 : syscall(SYS_pread64, descriptor, bytes, count, offset);
}

ssize_t pread(int descriptor, void *bytes, size_t count, off_t offset) {
    return pread64(descriptor, bytes, count, offset);
}

static long later_s(void) {
    char text[32];
    int kept = errno;
    long answer = read_fault("clock", text, sizeof text) ? strtol(text, NULL, 10) : 0;
    errno = kept;
    return answer;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    long answer = syscall(SYS_clock_gettime, clock, now);
    if (!answer && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += later_s();
    return (int)answer;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    long answer = syscall(SYS_gettimeofday, now, zone);
    if (!answer) now->tv_sec += later_s();
    return (int)answer;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}
