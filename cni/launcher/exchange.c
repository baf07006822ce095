/* Sends one request to the agent and reads one answer. launcher.c decides how long to wait. */
#define _GNU_SOURCE
#include "exchange.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define START                                                                                      \
    "see whether podfabric's pod of this node runs (`kubectl -n podfabric get pods -o wide`); "    \
    "without Kubernetes: `systemctl start podfabric-agent`; then try again"
#define LOOK                                                                                       \
    "see the log of podfabric's pod of this node; without Kubernetes: "                            \
    "`systemctl status podfabric-agent`; then try again"
#define REINSTALL "bring launcher and agent to one version with `podfabric install` and try again"

enum { CONNECT_MILLISECONDS = 5000 };

int64_t now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

short await(const struct agent *agent, int descriptor, short events)
{
    for (;;) {
        struct pollfd one = {.fd = descriptor, .events = events};
        int64_t left = agent->deadline - now();

        if (left <= 0)
            return 0;
        if (poll(&one, 1, (int)left) > 0)
            return one.revents;
    }
}

/* Move a descriptor above the three standard ones, which the runtime may have closed. */
static int above_standard(int descriptor)
{
    if (descriptor < 0 || descriptor > STDERR_FILENO)
        return descriptor;
    int higher = fcntl(descriptor, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    close(descriptor);
    return higher;
}

/* Open CNI_NETNS in the runtime's root directory, because the agent may have another root. */
static int open_netns(void)
{
    const char *path = getenv("CNI_NETNS");

    if (!path || !*path)
        return -1;
    return above_standard(open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
}

/* A connection, or -1 with errno. */
static int connect_to(const struct agent *agent)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int64_t left = agent->deadline - now();
    int peer = above_standard(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));

    if (peer < 0)
        return -1;
    /* connect(2) waits this long while the backlog is full. With 0 it would wait without end. */
    left = left < 1 ? 1 : left < CONNECT_MILLISECONDS ? left : CONNECT_MILLISECONDS;
    struct timeval patience = {.tv_sec = left / 1000, .tv_usec = left % 1000 * 1000};
    setsockopt(peer, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    strncpy(address.sun_path, agent->path, sizeof address.sun_path - 1);
    while (connect(peer, (struct sockaddr *)&address, sizeof address) != 0)
        if (errno != EINTR) {
            int error = errno;
            close(peer);
            errno = error;
            return -1;
        }
    return peer;
}

/* Whether the listening process runs as root or as our user, so that it may have the request. */
static bool trusted(int peer, struct text *why)
{
    struct ucred listener = {.uid = (uid_t)-1};
    socklen_t size = sizeof listener;

    getsockopt(peer, SOL_SOCKET, SO_PEERCRED, &listener, &size);
    if (listener.uid == 0 || listener.uid == geteuid())
        return true;
    add(why, " runs as uid ");
    add_number(why, listener.uid);
    add(why, ", not as root, so no request was sent: end that process, and " START);
    return false;
}

/* Returns 0 or an errno. EALREADY means that the agent has answered already or has gone. Reading the
 * answer shows which of the two. */
static int send_request(const struct agent *agent, int peer, const struct request *request,
                        int netns)
{
    struct iovec parts[] = {{(void *)request->head, request->head_length},
                            {(void *)request->config, config_sent(request)}};
    union {
        char bytes[CMSG_SPACE(sizeof netns)];
        struct cmsghdr aligned;
    } control = {.bytes = {0}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};

    if (netns >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof netns);
        memcpy(CMSG_DATA(rights), &netns, sizeof netns);
    }
    while (parts[0].iov_len + parts[1].iov_len > 0) {
        ssize_t sent = sendmsg(peer, &message, MSG_DONTWAIT | MSG_NOSIGNAL);

        if (sent < 0 && errno == EAGAIN) {
            short ready = await(agent, peer, POLLIN | POLLOUT);
            if (!ready || ready & POLLIN)
                return ready ? EALREADY : ETIMEDOUT;
        } else if (sent < 0 && errno != EINTR) {
            return errno == EPIPE || errno == ECONNRESET ? EALREADY : errno;
        }
        if (sent > 0)
            message.msg_controllen = 0;
        for (int i = 0; i < 2 && sent > 0; i++) {
            size_t taken = (size_t)sent < parts[i].iov_len ? (size_t)sent : parts[i].iov_len;
            parts[i].iov_base = (char *)parts[i].iov_base + taken;
            parts[i].iov_len -= taken;
            sent -= (ssize_t)taken;
        }
    }
    return 0;
}

struct source {
    const struct agent *agent;
    int peer;
    bool reset; /* the agent ended before it had read the whole request */
    bool begun; /* the answer has begun */
};

static ssize_t receive(void *from, void *to, size_t room)
{
    struct source *source = from;

    for (;;) {
        ssize_t got = recv(source->peer, to, room, MSG_DONTWAIT);
        source->begun |= got > 0;
        source->reset = got < 0 && errno == ECONNRESET;
        if (got >= 0 || (errno != EINTR && errno != EAGAIN))
            return got;
        if (errno == EAGAIN && !await(source->agent, source->peer, POLLIN)) {
            errno = ETIMEDOUT;
            return -1;
        }
    }
}

/* If the socket exists, an agent may come back: removing podfabric from a node removes the socket. */
static enum outcome unreachable(int error, struct text *why)
{
    add(why, error == EAGAIN ? " does not take the connection" : " cannot be reached");
    add_errno(why, error);
    add(why, error == EAGAIN ? ": " LOOK : ": " START);
    return error == EAGAIN || error == ECONNREFUSED ? AWAY : FAILED;
}

static enum outcome converse(struct source *source, const struct request *request, int netns,
                             struct answer *answer, struct text *why)
{
    if (!trusted(source->peer, why))
        return FAILED;

    int error = send_request(source->agent, source->peer, request, netns);
    if (error != 0 && error != EALREADY) {
        add(why, " does not take the request");
        add_errno(why, error);
        add(why, ": " LOOK);
        return FAILED;
    }
    switch (read_answer(receive, source, answer)) {
    case WHOLE:
        return answer->status == STATUS_LEAVING ? LEAVING : ANSWERED;
    case CUT_SHORT:
        add(why, " ended the connection before its answer was whole: " LOOK);
        /* No agent begins a call before it has read the whole request. The kernel resets a
         * connection that an agent closes with unread bytes. */
        return !source->begun && (error == EALREADY || source->reset) ? AWAY : DIED;
    case GARBAGE:
        add(why, " sent an invalid answer (");
        add(why, answer->wrong);
        add(why, "): " REINSTALL);
        return FAILED;
    case LATE:
        break;
    }
    add(why, " did not answer within ");
    add_number(why, source->agent->seconds);
    add(why, " s and may still be at work: " LOOK);
    return FAILED;
}

enum outcome ask(const struct agent *agent, const struct request *request, struct answer *answer,
                 struct text *why)
{
    int netns = open_netns();
    struct source source = {.agent = agent, .peer = connect_to(agent)};
    int error = errno;

    begin_error(why, CODE_TRY_AGAIN);
    add(why, "the podfabric agent at ");
    add_quoted(why, agent->path);
    enum outcome outcome = source.peer < 0
                               ? unreachable(error, why)
                               : converse(&source, request, netns, answer, why);
    if (source.peer >= 0)
        close(source.peer);
    if (netns >= 0)
        close(netns);
    return outcome;
}
