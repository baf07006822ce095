/*
 * PROCESSES processes allocate and free all memory at random, for ROUNDS rounds each. A process exits
 * with 0 unless a call fails with another error than "out of memory".
 *
 *   race PROCESSES ROUNDS BYTES
 */
#include <sys/wait.h>
#include <unistd.h>

#include "driver.h"

enum { HELD = 8, OUT_OF_MEMORY = 2 };

static int (*allocate)(uint64_t *, size_t);
static int (*release)(uint64_t);

static int run(unsigned seed, int rounds, size_t bytes)
{
    uint64_t held[HELD] = {0};

    start_driver();
    for (int round = 0; round < rounds; round++) {
        uint64_t *one = &held[rand_r(&seed) % HELD], freed = *one;
        int result = freed ? release(freed) : allocate(one, 1 + (size_t)rand_r(&seed) % bytes);

        if (result != 0 && (freed || result != OUT_OF_MEMORY))
            return 4;
        if (freed)
            *one = 0;
    }
    for (int i = 0; i < HELD; i++)
        if (held[i] && release(held[i]) != 0)
            return 5;
    return 0;
}

int main(int count, char **arguments)
{
    int failed = 0, status;

    if (count < 4)
        return 2;
    load_driver();
    allocate = (int (*)(uint64_t *, size_t))find("cuMemAlloc_v2");
    release = (int (*)(uint64_t))find("cuMemFree_v2");
    for (int i = 0; i < atoi(arguments[1]); i++)
        if (fork() == 0)
            _exit(run((unsigned)i + 1, atoi(arguments[2]), strtoul(arguments[3], NULL, 10)));
    while (wait(&status) > 0)
        failed |= status;
    return failed != 0;
}
