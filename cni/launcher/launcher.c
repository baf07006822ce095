/* The launcher: a container runtime starts it under the name of each plugin. It sends the call to
 * this node's agent and prints the answer. It is linked statically and reads only its environment,
 * standard input and one socket. So it starts fast, and in any root file system.
 *
 * Without an agent the launcher prints a CNI error with the command that starts an agent. If the
 * node had an agent before, the launcher first waits for the next agent. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "exchange.h"
#include "memlock.h"

/* `podfabric install` replaces and removes only executables that contain this text. */
__attribute__((used)) static const char marker[] = "podfabric launcher 1";

enum { DEFAULT_SECONDS = 115, MAX_SECONDS = 3600 }; /* kubelet gives a sandbox 2 min */

/* The wait for an agent that is being replaced. A node with a slow STATUS counts as not ready. */
enum { WAIT_SECONDS = 20, WAIT_SECONDS_STATUS = 5 };
enum { FIRST_PAUSE = 5, LONGEST_PAUSE = 50 }; /* milliseconds between two attempts */

static bool write_all(int descriptor, const void *bytes, size_t length)
{
    const char *at = bytes;

    while (length > 0) {
        ssize_t written = write(descriptor, at, length);

        if (written >= 0) {
            at += written;
            length -= (size_t)written;
        } else if (errno == EAGAIN) { /* the runtime made its end of a pipe non-blocking */
            struct pollfd one = {.fd = descriptor, .events = POLLOUT};
            poll(&one, 1, -1);
        } else if (errno != EINTR) {
            return false;
        }
    }
    return true;
}

/* Print everything. Returns the exit code, which is not 0 if the output cannot be written. */
static int finish(const void *out, size_t length, int exit_code)
{
    signal(SIGPIPE, SIG_IGN);
    if (!write_all(STDOUT_FILENO, out, length) && exit_code == 0)
        return 1;
    return exit_code;
}

static int finish_error(struct text *error)
{
    add(error, "\"}");
    return finish(error->bytes, error->length, 1);
}

static int finish_answer(const struct answer *answer)
{
    signal(SIGPIPE, SIG_IGN);
    write_all(STDERR_FILENO, answer->body, answer->stderr_length);
    return finish(answer->body + answer->stderr_length, answer->stdout_length,
                  (int)answer->exit_code);
}

/* Answers without an agent, the same as in cni/spec/entry.py. */

static const char *const versions[] = {"0.1.0", "0.2.0", "0.3.0", "0.3.1",
                                       "0.4.0", "1.0.0", "1.1.0", NULL};

static const char *const abouts[][2] = {
    {"ib-sriov", "podfabric sriov: moves an SR-IOV virtual function into a pod"},
    {"ipoib", "podfabric ipoib: gives a pod an IP-over-InfiniBand interface"},
    {"ipvlan", "podfabric ipvlan: gives a pod an ipvlan interface on its RoCE HCA"},
    {"macvlan", "podfabric macvlan: gives a pod a macvlan interface on its RoCE HCA"},
    {"rdma", "podfabric rdma: gives a pod the RDMA device of the VF that sriov gave it"},
    {"sriov", "podfabric sriov: moves an SR-IOV virtual function into a pod"},
    {"nv-ipam", "podfabric-ipam: gives pods addresses of nv-ipam's pools"},
    {"podfabric-ipam", "podfabric-ipam: gives pods addresses from ranges, kept on this node"},
    {"podfabric-ipvlan", "podfabric ipvlan: gives a pod an ipvlan interface on its RoCE HCA"},
    {"podfabric-macvlan", "podfabric macvlan: gives a pod a macvlan interface on its RoCE HCA"},
    {"whereabouts", "podfabric-ipam: gives pods addresses from ranges, kept on this node"},
};

static int print_versions(struct text *text)
{
    add(text, "{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[");
    for (size_t i = 0; versions[i]; i++) {
        add(text, i ? ",\"" : "\"");
        add(text, versions[i]);
        add(text, "\"");
    }
    add(text, "]}\n");
    return finish(text->bytes, text->length, 0);
}

/* Describe the plugin to a person who starts the launcher by hand. */
static int print_about(struct text *text, const char *name)
{
    const char *about = NULL;

    for (size_t i = 0; i < sizeof abouts / sizeof *abouts; i++)
        if (strcmp(abouts[i][0], name) == 0)
            about = abouts[i][1];
    add(text, about ? about : name);
    add(text, about ? "" : ": a podfabric CNI plugin");
    add(text, "\nCNI protocol versions supported: ");
    for (size_t i = 0; versions[i]; i++) {
        add(text, i ? ", " : "");
        add(text, versions[i]);
    }
    add(text, "\n");
    signal(SIGPIPE, SIG_IGN);
    write_all(STDERR_FILENO, text->bytes, text->length);
    return 0;
}

/* Read PODFABRIC_SOCKET and PODFABRIC_TIMEOUT, which a set-uid process ignores. */
static bool read_settings(struct agent *agent, struct text *error)
{
    const char *path = secure_getenv("PODFABRIC_SOCKET");
    const char *time = secure_getenv("PODFABRIC_TIMEOUT");

    agent->path = path && *path ? path : DEFAULT_SOCKET;
    agent->seconds = DEFAULT_SECONDS;
    begin_error(error, CODE_ENVIRONMENT);
    if (strlen(agent->path) >= sizeof(struct sockaddr_un) - offsetof(struct sockaddr_un, sun_path)) {
        add(error, "PODFABRIC_SOCKET is ");
        add_quoted(error, agent->path);
        add(error, ": give a path of at most 107 bytes");
        return false;
    }
    if (time && *time) {
        size_t digits = strspn(time, "0123456789");
        agent->seconds = time[digits] || digits > 4 ? 0 : strtoul(time, NULL, 10);
        if (agent->seconds < 1 || agent->seconds > MAX_SECONDS) {
            add(error, "PODFABRIC_TIMEOUT is ");
            add_quoted(error, time);
            add(error, ": give whole seconds, 1 to 3600");
            return false;
        }
    }
    agent->deadline = now() + (int64_t)agent->seconds * 1000;
    return true;
}

/* Read standard input, or set `stdin_errno`. False if the input does not end in time. */
static bool read_stdin(const struct agent *agent, struct request *request, struct text *error)
{
    while (request->config_length < sizeof request->config) {
        if (!await(agent, STDIN_FILENO, POLLIN)) {
            begin_error(error, CODE_IO);
            add(error, "error reading from stdin: it did not end within ");
            add_number(error, agent->seconds);
            add(error, " s: close standard input after the configuration");
            return false;
        }
        ssize_t got = read(STDIN_FILENO, request->config + request->config_length,
                           sizeof request->config - request->config_length);
        if (got > 0) {
            request->config_length += (size_t)got;
        } else if (got == 0 || (errno != EINTR && errno != EAGAIN)) {
            request->stdin_errno = got == 0 ? 0 : errno;
            return true;
        }
    }
    request->stdin_errno = EMSGSIZE;
    return true;
}

/* Add the time since which a dead agent may have run the call, for cni/spec/request.py. */
static bool pack_again(struct request *request, const char *name, time_t began)
{
    static struct text since;

    add(&since, "PODFABRIC_UNANSWERED_SINCE=");
    add_number(&since, (unsigned long)began);
    return putenv(since.bytes) == 0 && pack(request, name, environ);
}

/* A call that was lost with an agent is repeated only once: the call may have ended the agent. */
static enum outcome ask_in_turn(const char *name, const struct agent *agent,
                                struct request *request, struct answer *answer, struct text *why)
{
    bool status = strcmp(getenv("CNI_COMMAND"), "STATUS") == 0;
    bool repeated = false;
    int64_t since = 0, end = 0;
    int pause = FIRST_PAUSE;
    time_t began = time(NULL);

    for (;;) {
        enum outcome outcome = ask(agent, request, answer, why);

        if (outcome == DIED ? repeated || !pack_again(request, name, began)
                            : outcome != AWAY && outcome != LEAVING)
            return outcome;
        repeated |= outcome == DIED;
        if (!since) {
            since = now();
            end = since + 1000 * (status ? WAIT_SECONDS_STATUS : WAIT_SECONDS);
            end = end < agent->deadline ? end : agent->deadline;
        }
        if (now() >= end) {
            add(why, " (waited ");
            add_number(why, (unsigned long)(now() - since + 500) / 1000);
            add(why, " s for the next agent)");
            return outcome;
        }
        poll(NULL, 0, pause);
        pause = 2 * pause < LONGEST_PAUSE ? 2 * pause : LONGEST_PAUSE;
    }
}

/* The name of the executable. A file's name has at most MAX_NAME bytes, but argv may be any text. */
static char *own_name(char *started_as)
{
    char *slash = strrchr(started_as, '/');
    char *name = slash ? slash + 1 : started_as;

    name[strnlen(name, MAX_NAME)] = '\0';
    return name;
}

int main(int argc, char **argv)
{
    static struct request request;
    static struct answer answer;
    static struct text text;
    struct agent agent;
    char nameless[] = "";
    const char *command = getenv("CNI_COMMAND");
    const char *name = own_name(argc > 0 ? argv[0] : nameless);

    if (strcmp(name, MEMLOCK_NAME) == 0)
        return raise_memlock(argc, argv);
    if (!command || !*command)
        return print_about(&text, name);
    if (strcmp(command, "VERSION") == 0)
        return print_versions(&text);

    if (!read_settings(&agent, &text) || !read_stdin(&agent, &request, &text))
        return finish_error(&text);
    if (!pack(&request, name, environ)) {
        begin_error(&text, CODE_ENVIRONMENT);
        add(&text, "the environment has more than 1048576 bytes: give the runtime fewer variables");
        return finish_error(&text);
    }
    enum outcome outcome = ask_in_turn(name, &agent, &request, &answer, &text);
    if (outcome == ANSWERED || outcome == LEAVING)
        return finish_answer(&answer);
    return finish_error(&text);
}
