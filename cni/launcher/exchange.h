/* The exchange with the agent: one request, one answer, and one deadline for both. */
#ifndef PODFABRIC_EXCHANGE_H
#define PODFABRIC_EXCHANGE_H

#include "frame.h"
#include "text.h"

#ifndef DEFAULT_SOCKET
#define DEFAULT_SOCKET "/run/podfabric/agent.sock"
#endif

struct agent {
    const char *path;      /* the path of its socket, short enough for a sockaddr_un */
    unsigned long seconds; /* the time for the whole call */
    int64_t deadline;      /* the end of this time, on the clock of `now` */
};

enum outcome {
    ANSWERED,
    LEAVING, /* the agent ends and did not begin the call: the next agent may run the call */
    AWAY,    /* the socket exists, but no agent has begun the call: the next agent may run it */
    DIED,    /* the agent died and may have run the call: the next agent gets call and start time */
    FAILED,  /* no agent answered, and a second attempt would not help */
};

/* Milliseconds on the monotonic clock. */
int64_t now(void);

/* The events of poll(2) on the descriptor; 0 after the deadline. */
short await(const struct agent *agent, int descriptor, short events);

/* Without an answer, `why` gets a CNI error up to the end of its message. */
enum outcome ask(const struct agent *agent, const struct request *request, struct answer *answer,
                 struct text *why);

#endif
