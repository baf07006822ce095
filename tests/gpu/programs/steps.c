/*
 * Counts the instructions of cuMemFree in a process that has many other allocations, by single steps of
 * ptrace(2): a number that no load of the machine changes.
 *
 *     steps LIVE     one line: the instructions of the median of some frees
 */
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver.h"

enum { BYTES = 512, FREES = 9, FAILED = 3 };

static void child(long live)
{
    load_driver();
    start_driver();
    int (*alloc)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))find("cuMemAlloc_v2");
    int (*release)(uint64_t) = (int (*)(uint64_t))find("cuMemFree_v2");
    uint64_t pointers[FREES + 1], other;

    for (long i = 0; i < live; i++) {
        if (alloc(&other, BYTES))
            _exit(FAILED);
        if (i < FREES + 1)
            pointers[i] = other;
    }
    release(pointers[FREES]); /* the first call of a function takes longer */
    ptrace(PTRACE_TRACEME, 0, NULL, NULL);
    for (int i = 0; i < FREES; i++) {
        raise(SIGSTOP);
        int result = release(pointers[i]);
        raise(SIGSTOP);
        if (result)
            _exit(FAILED);
    }
    _exit(0);
}

static int compare(const void *one, const void *other)
{
    long a = *(const long *)one, b = *(const long *)other;

    return (a > b) - (a < b);
}

/* Let the process go on until it stops itself. */
static void until_stop(pid_t pid, int request, long *steps)
{
    int status;

    do {
        ptrace(request, pid, NULL, NULL);
        if (waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status)) {
            fprintf(stderr, "steps: the process has ended\n");
            exit(1);
        }
        ++*steps;
    } while (WSTOPSIG(status) != SIGSTOP);
}

int main(int count, char **arguments)
{
    long steps[FREES], skipped = 0, live = count == 2 ? atol(arguments[1]) : 0;
    int status;
    pid_t pid = fork();

    if (live <= FREES || pid < 0)
        return 2;
    if (pid == 0)
        child(live);
    if (waitpid(pid, &status, WUNTRACED) != pid || !WIFSTOPPED(status))
        return 1;
    for (int i = 0; i < FREES; i++) {
        if (i)
            until_stop(pid, PTRACE_CONT, &skipped);
        steps[i] = 0;
        until_stop(pid, PTRACE_SINGLESTEP, &steps[i]);
    }
    kill(pid, SIGKILL);
    qsort(steps, FREES, sizeof steps[0], compare);
    printf("%ld\n", steps[FREES / 2]);
    return 0;
}
