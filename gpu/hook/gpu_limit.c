/*
 * A hook of container runtimes (OCI's createRuntime): it runs when a container's cgroup exists and before
 * the container's first program. It hands the state that the runtime gives it to this node's agent, which
 * limits the memory of GPUs for that cgroup. Unless the agent says that this is done, it fails, and with it
 * the start of the container. It waits a few seconds for an agent that starts, as in an update: a pod that
 * is not to be restarted would fail for good.
 *
 *   gpu-limit SOCKET GROUP     the agent's socket, and the group whose limits they are
 *
 * It is static and reads nothing but its arguments, standard input and the socket, so that it starts in
 * any root file system. The agent's side is gpu/limit_hook.py.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* Together less than the runtime waits (TIMEOUT in gpu/container_edits.py). */
enum { WAIT_SECONDS = 5, STEPS_A_SECOND = 20, SECONDS = 8, MOST_STATE = 1 << 20, MOST_ANSWER = 8192 };

static const char done[] = "done\n";

static int fail(const char *what)
{
    fprintf(stderr, "podfabric gpu-limit: %s: %s: the container must not start without limits of its GPU's "
            "memory: see podfabric's agent on this node\n", what, strerror(errno));
    return 1;
}

static bool write_all(int descriptor, const char *bytes, size_t length)
{
    while (length > 0) {
        ssize_t written = send(descriptor, bytes, length, MSG_NOSIGNAL);

        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return false;
        bytes += written;
        length -= (size_t)written;
    }
    return true;
}

/* Read to the end; false: an error, or there is more. */
static bool read_all(int descriptor, char *bytes, size_t most, size_t *length)
{
    for (*length = 0; *length < most;) {
        ssize_t got = read(descriptor, bytes + *length, most - *length);

        if (got == 0)
            return true;
        if (got < 0 && errno != EINTR)
            return false;
        *length += got > 0 ? (size_t)got : 0;
    }
    errno = EMSGSIZE;
    return false;
}

/* Connect to an agent, also one that does not listen yet. */
static bool reach(int client, const struct sockaddr_un *agent)
{
    const struct timespec pause = {.tv_nsec = 1000000000 / STEPS_A_SECOND};

    for (int step = 0;; step++) {
        if (connect(client, (const struct sockaddr *)agent, sizeof *agent) == 0)
            return true;
        if ((errno != ECONNREFUSED && errno != ENOENT) || step == WAIT_SECONDS * STEPS_A_SECOND)
            return false;
        nanosleep(&pause, NULL);
    }
}

int main(int count, char **words)
{
    static char state[MOST_STATE], answer[MOST_ANSWER + 1];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval patience = {.tv_sec = SECONDS};
    size_t length;

    if (count != 3 || strlen(words[1]) >= sizeof address.sun_path) {
        fprintf(stderr, "usage: gpu-limit SOCKET GROUP, with the state of a container as input\n");
        return 2;
    }
    if (!read_all(STDIN_FILENO, state, sizeof state, &length))
        return fail("the container's state");
    strcpy(address.sun_path, words[1]);
    int agent = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (agent < 0 || setsockopt(agent, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) != 0 ||
        setsockopt(agent, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) != 0 ||
        !reach(agent, &address))
        return fail(words[1]);
    if (!write_all(agent, words[2], strlen(words[2])) || !write_all(agent, "\n", 1) ||
        !write_all(agent, state, length) || shutdown(agent, SHUT_WR) != 0)
        return fail(words[1]);
    if (!read_all(agent, answer, MOST_ANSWER, &length))
        return fail(words[1]);
    if (strcmp(answer, done) == 0)
        return 0;
    errno = EPIPE;
    if (length == 0)
        return fail(words[1]);
    fprintf(stderr, "podfabric gpu-limit: %s", answer);
    return 1;
}
