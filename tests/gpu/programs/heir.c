/*
 * A process waits for the shim's lock while the process that has the lock is killed, COUNT times. Prints
 * for each kill the microseconds from the kill until the waiting process has allocated.
 *
 *   heir COUNT
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int told[2]; /* a pipe to the first process */
static bool stays;  /* in the lock, in this process */

/* The shim's tests are built to call this (gpu/shim/process.h, STEP). */
void pf_step(const char *name)
{
    if (!stays || strcmp(name, "slot charged") != 0)
        return;
    if (write(told[1], "l", 1) == 1)
        for (;;)
            pause();
}

static uint64_t now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static int call(const char *symbol, uint64_t first, uint64_t second)
{
    static void *library;

    if (!library)
        library = dlopen("libcuda.so.1", RTLD_NOW);
    int (*function)(uint64_t, uint64_t) = (int (*)(uint64_t, uint64_t))dlsym(library, symbol);

    return function ? function(first, second) : -1;
}

static void start(void)
{
    uint64_t context = 0;

    if (call("cuInit", 0, 0) || call("cuDevicePrimaryCtxRetain", (uintptr_t)&context, 0) ||
        call("cuCtxSetCurrent", context, 0))
        _exit(3);
}

static void own(void)
{
    uint64_t pointer;

    start();
    stays = true;
    call("cuMemAlloc_v2", (uintptr_t)&pointer, 1 << 20);
    _exit(4);
}

/* Allocate for each byte that comes, and answer with the time when that is done. */
static void inherit(int asked, int answer)
{
    uint64_t pointer, done;
    char byte;

    start();
    if (write(told[1], "s", 1) != 1)
        _exit(5);
    while (read(asked, &byte, 1) == 1) {
        if (write(told[1], "w", 1) != 1 || call("cuMemAlloc_v2", (uintptr_t)&pointer, 1 << 20))
            _exit(5);
        done = now();
        if (call("cuMemFree_v2", pointer, 0) || write(answer, &done, sizeof done) != sizeof done)
            _exit(6);
    }
    _exit(0);
}

static bool sleeps(pid_t pid)
{
    char path[40], state = 0;

    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");

    if (!file || fscanf(file, "%*d (heir) %c", &state) != 1)
        exit(7);
    fclose(file);
    return state == 'S';
}

static void expect(char wanted)
{
    char byte = 0;

    if (read(told[0], &byte, 1) != 1 || byte != wanted)
        exit(8);
}

int main(int count, char **arguments)
{
    int asked[2], answer[2];
    uint64_t done;

    if (count < 2 || pipe(told) || pipe(asked) || pipe(answer))
        return 2;
    pid_t heir = fork();

    if (heir == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(asked[1]);
        inherit(asked[0], answer[1]);
    }
    expect('s');
    for (int left = atoi(arguments[1]); left > 0; left--) {
        pid_t owner = fork();

        if (owner == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            own();
        }
        expect('l');
        if (write(asked[1], "a", 1) != 1)
            return 2;
        expect('w');
        while (!sleeps(heir)) /* which it does nowhere but in the lock */
            usleep(1000);
        uint64_t killed = now();

        kill(owner, SIGKILL);
        if (read(answer[0], &done, sizeof done) != sizeof done)
            return 2;
        printf("%llu\n", (unsigned long long)(done - killed) / 1000);
        waitpid(owner, NULL, 0);
    }
    close(asked[1]);
    return waitpid(heir, NULL, 0) != heir;
}
