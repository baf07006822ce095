/*
 * An agent that answers at once whoever registers (gpu/shim/layout.h, "the agent's socket"): it asks not
 * who that is, and writes nothing. What bench/gpu_registration.py measures with it is the machine's
 * part: processes that are woken and wait for a CPU, and their own part of cuInit.
 *
 *   gpu_floor SOCKET...      says "serves"; at the end of its input how many it answered and the
 *                            seconds of CPU time that took
 */
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "../gpu/shim/layout.h"

enum { MOST = 64, BACKLOG = 512 };

static unsigned answered;

static void answer(int listener)
{
    struct pf_request request;
    int peer = accept(listener, NULL, NULL);

    if (peer >= 0 && recv(peer, &request, sizeof request, 0) == sizeof request) {
        struct pf_answer answer = {.host_pid = 1, .registration = ++answered};

        send(peer, &answer, sizeof answer, MSG_NOSIGNAL);
    }
    close(peer);
}

static int listen_at(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);

    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, BACKLOG))
        perror(path);
    return listener;
}

int main(int count, char **paths)
{
    struct pollfd polled[MOST] = {{.fd = STDIN_FILENO, .events = POLLIN}};
    struct timespec used;

    if (count > MOST)
        return 2;
    for (int i = 1; i < count; i++)
        polled[i] = (struct pollfd){.fd = listen_at(paths[i]), .events = POLLIN};
    printf("serves\n");
    fflush(stdout);
    while (poll(polled, (nfds_t)count, -1) >= 0 && !polled[0].revents)
        for (int i = 1; i < count; i++)
            if (polled[i].revents)
                answer(polled[i].fd);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    printf("%u %f\n", answered, (double)used.tv_sec + (double)used.tv_nsec / 1e9);
    return 0;
}
