/* `podfabric-memlock BYTES|unlimited` reads the state of a container from standard input (OCI
 * runtime specification, "State") and raises RLIMIT_MEMLOCK of the container's process. It never
 * lowers a limit. A definition of this CNI type has no effect, because CNI passes no argument. */
#define _GNU_SOURCE
#include "memlock.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "text.h"

enum { MAX_STATE = 1 << 20, MAX_PID = 1 << 22 }; /* bytes; PID_MAX_LIMIT of linux/threads.h */

/* `error` is an errno, or 0. */
static int fail(const char *reason, int error)
{
    static struct text line;

    add(&line, MEMLOCK_NAME ": ");
    add(&line, reason);
    if (error)
        add_errno(&line, error);
    add(&line, "\n");
    ssize_t written = write(STDERR_FILENO, line.bytes, line.length);
    return written ? 0 : 0;
}

static const char *skip_space(const char *at)
{
    return at + strspn(at, " \t\r\n");
}

/* The text behind the digits at `at`; NULL if there are none. */
static const char *read_number(const char *at, rlim_t *number)
{
    *number = strtoul(at, NULL, 10);
    return *at >= '0' && *at <= '9' ? at + strspn(at, "0123456789") : NULL;
}

/* The pid of a state; 0 if it has none. Only a key of the outermost object counts, because a pod
 * chooses the texts and keys of the annotations. The pids 0 (this process) and 1 do not count. */
static pid_t pid_in(const char *at)
{
    at = skip_space(at);
    for (int depth = *at++ == '{'; depth && *at; at++) {
        depth += (*at == '{' || *at == '[') - (*at == '}' || *at == ']');
        if (*at != '"')
            continue;
        const char *text = ++at;
        while (*at && *at != '"')
            at += at[0] == '\\' && at[1] ? 2 : 1;
        const char *colon = skip_space(at + (*at == '"'));
        if (depth == 1 && *colon == ':' && at - text == 3 && memcmp(text, "pid", 3) == 0) {
            rlim_t pid;
            const char *end = read_number(skip_space(colon + 1), &pid);
            int whole = end && (*skip_space(end) == ',' || *skip_space(end) == '}');
            return whole && pid > 1 && pid <= MAX_PID ? (pid_t)pid : 0;
        }
        if (!*at)
            return 0;
    }
    return 0;
}

int raise_memlock(int argc, char **argv)
{
    static char state[MAX_STATE + 1];
    size_t length = 0;
    rlim_t wanted = RLIM_INFINITY;
    struct rlimit limit;

    const char *end = argc == 2 && strcmp(argv[1], "unlimited") ? read_number(argv[1], &wanted) : "";
    if (argc != 2 || !end || *end)
        return fail("expected one argument: a number of bytes, or unlimited", 0);
    ssize_t got;
    while ((got = read(STDIN_FILENO, state + length, MAX_STATE - length)) > 0)
        length += (size_t)got;
    if (got < 0)
        return fail("standard input cannot be read", errno);
    pid_t pid = length < MAX_STATE ? pid_in(state) : 0;
    if (!pid)
        return fail("standard input has no container state with a pid, or has 1 MiB or more", 0);
    if (prlimit(pid, RLIMIT_MEMLOCK, NULL, &limit) != 0)
        return fail("the limit of locked memory is unknown", errno);
    limit.rlim_cur = wanted > limit.rlim_cur ? wanted : limit.rlim_cur;
    limit.rlim_max = wanted > limit.rlim_max ? wanted : limit.rlim_max;
    if (prlimit(pid, RLIMIT_MEMLOCK, &limit, NULL) != 0)
        return fail("the limit of locked memory cannot be raised", errno);
    return 0;
}
