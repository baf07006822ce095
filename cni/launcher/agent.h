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
    REFUSED,    /* the answer says why nothing was begun */
    LEAVING,    /* the same, and the next agent may do it */
    AWAY,       /* its socket is there, but no agent has begun the call: the next one may do it */
    UNUSABLE,   /* no agent, or none that took the request: another process may do it instead */
    DIED,       /* it may have done it, and does it no more: who does it instead settles that */
    UNANSWERED, /* the same of one that answered what no agent answers */
    AT_WORK,    /* no answer, but it may still do the call: no other process should */
};

/* Milliseconds on the monotonic clock. */
int64_t now(void);

/* What poll(2) says of the descriptor; 0 once the deadline is over. */
short await(const struct agent *agent, int descriptor, short events);

/* If there is no answer, `why` is the CNI error that says so, up to its message's end. */
enum outcome ask(const struct agent *agent, const struct request *request, struct answer *answer,
                 struct text *why);

#endif
