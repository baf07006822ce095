/* The conversation with the agent: one question, one answer, and one deadline for both. */
#ifndef PODFABRIC_AGENT_H
#define PODFABRIC_AGENT_H

#include "frame.h"
#include "text.h"

#ifndef DEFAULT_SOCKET
#define DEFAULT_SOCKET "/run/podfabric/agent.sock"
#endif

struct agent {
    const char *path;      /* of its socket, short enough for an address */
    unsigned long seconds; /* for the whole call */
    int64_t deadline;      /* their end, by `now` */
};

enum outcome {
    ANSWERED,
    LEAVING, /* the answer says that nothing was begun: the next agent may do it */
    AWAY,    /* its socket is there, but no agent has begun the call: the next one may do it */
    DIED,    /* it may have done it, and does it no more: the next one is told so */
    FAILED,  /* there is no agent, or no answer of it, and to ask again is of no use */
};

/* Milliseconds on the monotonic clock. */
int64_t now(void);

/* What poll(2) says of the descriptor; 0 once the deadline is over. */
short await(const struct agent *agent, int descriptor, short events);

/* If there is no answer, `why` is the CNI error that says so, up to its message's end. */
enum outcome ask(const struct agent *agent, const struct request *request, struct answer *answer,
                 struct text *why);

#endif
