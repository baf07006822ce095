/* Asks the agent to register this process (layout.h, "the agent's socket"). */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "process.h"

static const struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = PF_SOCKET_PATH};

static long long milliseconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Limit the time of connect, send and recv. False: no time is left. */
static bool set_patience(int peer, long long left)
{
    struct timeval patience = {.tv_sec = left / 1000, .tv_usec = left % 1000 * 1000};

    if (left <= 0)
        return false;
    return setsockopt(peer, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) == 0 &&
           setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) == 0;
}

/* Wait again after a signal, for the rest of the time. */
static bool wait_on(int peer, long long deadline)
{
    return errno == EINTR && set_patience(peer, deadline - milliseconds());
}

static int ask(int peer, uint32_t slot, struct pf_answer *answer)
{
    struct pf_request request = {.version = PF_VERSION, .slot = slot};
    long long deadline = milliseconds() + PF_PATIENCE_MS;
    ssize_t length;

    if (!set_patience(peer, PF_PATIENCE_MS))
        return errno;
    while (connect(peer, (const struct sockaddr *)&address, sizeof address) != 0)
        if (!wait_on(peer, deadline))
            return errno == EAGAIN || errno == EINTR ? ETIMEDOUT : errno;
    if (send(peer, &request, sizeof request, MSG_NOSIGNAL) != sizeof request)
        return errno ? errno : EIO;
    while ((length = recv(peer, answer, sizeof *answer, 0)) < 0)
        if (!wait_on(peer, deadline))
            return errno == EAGAIN || errno == EINTR ? ETIMEDOUT : errno;
    if (length != sizeof *answer)
        return EPROTO;
    return answer->status == PF_STATUS_OK ? 0 : -(int)(answer->status & 0xff);
}

int agent_register(uint32_t slot, struct pf_answer *answer)
{
    int peer = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    if (peer < 0)
        return errno;
    errno = 0;
    int error = ask(peer, slot, answer);

    close(peer);
    return error;
}

bool agent_runs(void)
{
    int peer = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (peer < 0)
        return false;
    bool runs = connect(peer, (const struct sockaddr *)&address, sizeof address) == 0 || errno == EAGAIN;

    close(peer);
    return runs;
}
