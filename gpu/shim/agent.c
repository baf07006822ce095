/* Asks the agent to register this process (layout.h, "the agent's socket"). */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "process.h"

enum { WAIT_MILLISECONDS = 500 };

static long long milliseconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* What connect, send and recv may still take together; false: nothing is left. */
static bool set_timeout(int peer, long long deadline)
{
    long long left = deadline - milliseconds();
    struct timeval patience = {.tv_sec = left / 1000, .tv_usec = left % 1000 * 1000};

    if (left <= 0)
        return false;
    return setsockopt(peer, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) == 0 &&
           setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) == 0;
}

static int ask(int peer, long long deadline, uint32_t slot, struct pf_answer *answer)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = PF_SOCKET_PATH};
    struct pf_request request = {.version = PF_VERSION, .slot = slot};
    ssize_t length;
    int error;

    do {
        if (!set_timeout(peer, deadline))
            return ETIMEDOUT;
        error = connect(peer, (struct sockaddr *)&address, sizeof address) == 0 ? 0 : errno;
    } while (error == EINTR);
    if (error != 0)
        return error == EAGAIN ? ETIMEDOUT : error;
    if (send(peer, &request, sizeof request, MSG_NOSIGNAL) != sizeof request)
        return errno ? errno : EIO;
    do {
        if (!set_timeout(peer, deadline))
            return ETIMEDOUT;
        length = recv(peer, answer, sizeof *answer, 0);
    } while (length < 0 && errno == EINTR);
    if (length < 0)
        return errno == EAGAIN ? ETIMEDOUT : errno;
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
    int error = ask(peer, milliseconds() + WAIT_MILLISECONDS, slot, answer);

    close(peer);
    return error;
}
