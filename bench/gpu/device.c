/*
 * Actions on a GPU for bench/gpu.sh, through the libcuda.so.1 that the loader finds. It needs no
 * header of CUDA and no compiler for GPUs: its kernels are PTX, which the driver translates.
 *
 *   device uuid                  the first device's UUID, as 32 hexadecimal digits
 *   device launch COUNT          ns of an empty launch, synchronised after each thousand: median and 99th
 *                                    percentile of all but those that the gate times, one in 256, and of these
 *   device alloc COUNT BYTES LIVE  ns of a cuMemAlloc and its cuMemFree beside LIVE allocations of 512 bytes: the same
 *                                    two
 *   device address COUNT         ns of a cuGetProcAddress: the same two
 *   device resident LIVE         resident bytes of the process with LIVE allocations
 *   device init                  calls cuInit at the first line of its input, or its end: its ns, and
 *                                    ns of CPU time. Then it waits for the end of its input
 *   device fill KIND BYTES       takes memory (alloc, physical, async) in pieces until it is refused:
 *                                    the bytes it got, the total that it was shown, and the refusal's
 *                                    number. Then it waits for the end of its input
 *   device churn SEED            says "begins", then takes and frees memory until it is killed
 *   device calibrate             ns of one round of the kernels' loop
 *   device work KERNEL NS ROUND  launches work_... kernels of NS ns until its input ends, never more
 *                                    than two batches ahead; answers each line with how many are done
 */
#include <poll.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../../tests/gpu/programs/driver.h"

#define BODY                                                                          \
    "(.param .u64 rounds) { .reg .u64 %r<4>; .reg .pred %p<3>;\n"                     \
    "ld.param.u64 %r1, [rounds]; mov.u64 %r2, 0; mov.u64 %r3, 1;\n"                   \
    "LOOP: mad.lo.u64 %r3, %r3, 6364136223846793005, 1442695040888963407;\n"          \
    "add.u64 %r2, %r2, 1; setp.lt.u64 %p1, %r2, %r1; @%p1 bra LOOP;\n"                \
    "setp.eq.u64 %p2, %r3, 0; @%p2 st.global.u64 [%r3], %r2; ret; }\n"
#define KERNEL(NAME) ".visible .entry " #NAME BODY

static const char ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                          ".visible .entry empty() { ret; }\n"
    KERNEL(work_20us) KERNEL(work_1ms) KERNEL(work_5ms) KERNEL(work_100ms);

enum { CHUNK = 1000, TIMED_EVERY = 256, WARM = 2 * TIMED_EVERY, SMALL = 512 };
enum { BATCH_NS = 20000000, TRIED_ROUNDS = 1000000, SLOTS = 64, MIB = 1 << 20 };

struct place { int type, id; };
struct properties { int type, handle_types; struct place place; void *security; uint64_t flags; };

static void *stream;

static uint64_t ns_of(clockid_t clock)
{
    struct timespec time;

    clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static uint64_t now(void)
{
    return ns_of(CLOCK_MONOTONIC);
}

static void until_end(void)
{
    char byte;

    while (read(STDIN_FILENO, &byte, 1) > 0)
        ;
}

static void print(uint64_t number)
{
    printf("%llu\n", (unsigned long long)number);
    fflush(stdout);
}

static void print_uuid(void)
{
    unsigned char uuid[16];

    CALL(cuInit, (unsigned), 0);
    CALL(cuDeviceGetUuid, (void *, int), uuid, 0);
    for (size_t i = 0; i < sizeof uuid; i++)
        printf("%02x", uuid[i]);
    printf("\n");
}

static int by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

static uint64_t *room_for(long count)
{
    uint64_t *times = calloc((size_t)count + 1, sizeof *times);

    if (!times)
        exit(2);
    return times;
}

static void print_percentiles(uint64_t *times, long count)
{
    qsort(times, (size_t)count, sizeof *times, by_size);
    print(times[count / 2]);
    print(times[count * 99 / 100]);
}

static void time_launches(long count)
{
    void *function = function_of(ptx, "empty");
    launch_function *launch = (launch_function *)find("cuLaunchKernel");
    uint64_t *usual = room_for(count), *timed = room_for(count);
    long usuals = 0, timeds = 0;

    for (long i = 0; i < WARM + count; i++) {
        uint64_t began = now();

        check(launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
        uint64_t took = now() - began;

        if (i >= WARM && i % TIMED_EVERY == 0)
            timed[timeds++] = took;
        else if (i >= WARM)
            usual[usuals++] = took;
        if (i % CHUNK == CHUNK - 1)
            CALL(cuCtxSynchronize, (void));
    }
    print_percentiles(usual, usuals);
    print_percentiles(timed, timeds);
}

static void allocate(long live)
{
    int (*alloc)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))find("cuMemAlloc_v2");
    uint64_t pointer;

    for (long i = 0; i < live; i++)
        check(alloc(&pointer, SMALL), "cuMemAlloc_v2");
}

static void time_allocations(long count, size_t bytes, long live)
{
    int (*alloc)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))find("cuMemAlloc_v2");
    int (*release)(uint64_t) = (int (*)(uint64_t))find("cuMemFree_v2");
    uint64_t *times = room_for(count), pointer;

    allocate(live);
    for (long i = 0; i < count; i++) {
        uint64_t began = now();

        check(alloc(&pointer, bytes) || release(pointer), "cuMemAlloc_v2");
        times[i] = now() - began;
    }
    print_percentiles(times, count);
}

static void time_addresses(long count)
{
    static const struct {
        const char *name;
        int version;
    } asked[] = {{"cuMemAlloc", 3020}, {"cuCtxGetDevice", 2000}, {"cuLaunchKernel", 4000},
                 {"cuStreamCreate", 2000}, {"cuMemcpyHtoD", 3020}, {"cuEventRecord", 2000}};
    int (*address)(const char *, void **, int, uint64_t, int *) =
        (int (*)(const char *, void **, int, uint64_t, int *))find("cuGetProcAddress_v2");
    uint64_t *times = room_for(count);
    void *found;
    int status;

    for (long i = 0; i < count; i++) {
        size_t which = (size_t)i % (sizeof asked / sizeof asked[0]);
        uint64_t began = now();

        check(address(asked[which].name, &found, asked[which].version, 0, &status), "cuGetProcAddress_v2");
        times[i] = now() - began;
    }
    print_percentiles(times, count);
}

static void print_resident(long live)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");

    allocate(live);
    if (!file || fscanf(file, "%*u %lu", &pages) != 1)
        exit(2);
    print(pages * (uint64_t)sysconf(_SC_PAGESIZE));
}

static int take(const char *kind, size_t bytes)
{
    static const struct properties properties = {.type = 1, .place = {1, 0}};
    uint64_t taken;

    if (strcmp(kind, "physical") == 0)
        return ((int (*)(uint64_t *, size_t, const void *, uint64_t))find("cuMemCreate"))(
            &taken, bytes, &properties, 0);
    if (strcmp(kind, "async") == 0)
        return ((int (*)(uint64_t *, size_t, void *))find("cuMemAllocAsync"))(&taken, bytes, NULL);
    return ((int (*)(uint64_t *, size_t))find("cuMemAlloc_v2"))(&taken, bytes);
}

static void fill(const char *kind, size_t bytes)
{
    size_t got = 0, left, total;
    int result;

    CALL(cuMemGetInfo_v2, (size_t *, size_t *), &left, &total);
    while ((result = take(kind, bytes)) == 0)
        got += bytes;
    CALL(cuCtxSynchronize, (void));
    printf("%zu %zu %d\n", got, total, result);
    fflush(stdout);
    until_end();
}

static void churn(unsigned seed)
{
    int (*alloc)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))find("cuMemAlloc_v2");
    int (*release)(uint64_t) = (int (*)(uint64_t))find("cuMemFree_v2");
    uint64_t held[SLOTS] = {0};

    printf("begins\n");
    fflush(stdout);
    for (;;) {
        int slot = rand_r(&seed) % SLOTS;

        if (held[slot])
            check(release(held[slot]), "cuMemFree_v2");
        held[slot] = 0;
        if (alloc(&held[slot], (size_t)(1 + rand_r(&seed) % 8) * MIB) != 0)
            held[slot] = 0;
    }
}

/* Launch `count` kernels with `rounds` rounds of the loop each, then record an event. */
static void launch_batch(void *function, long count, uint64_t rounds, void *event)
{
    launch_function *launch = (launch_function *)find("cuLaunchKernel");
    void *parameters[] = {&rounds};

    for (long i = 0; i < count; i++)
        check(launch(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL), "cuLaunchKernel");
    CALL(cuEventRecord, (void *, void *), event, stream);
}

static void make_events(void **events, int count)
{
    CALL(cuStreamCreate, (void **, unsigned), &stream, 1);
    for (int i = 0; i < count; i++)
        CALL(cuEventCreate, (void **, unsigned), &events[i], 0);
}

static void calibrate(void)
{
    void *events[2], *function = function_of(ptx, "work_1ms");
    float ms = 0;

    make_events(events, 2);
    for (int i = 0; i < 3; i++) { /* the last one counts: clocks rise at first */
        CALL(cuEventRecord, (void *, void *), events[0], stream);
        launch_batch(function, 1, TRIED_ROUNDS, events[1]);
        CALL(cuEventSynchronize, (void *), events[1]);
    }
    CALL(cuEventElapsedTime, (float *, void *, void *), &ms, events[0], events[1]);
    printf("%.9f\n", (double)ms * 1e6 / TRIED_ROUNDS);
}

static void work(const char *name, uint64_t ns, double ns_of_round)
{
    void *events[2], *function = function_of(ptx, name);
    long batch = ns < BATCH_NS ? (long)(BATCH_NS / ns) : 1, batches = 0;
    uint64_t rounds = (uint64_t)((double)ns / ns_of_round) + 1;
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    char byte;

    make_events(events, 2);
    launch_batch(function, batch, rounds, events[0]);
    printf("begins\n");
    fflush(stdout);
    for (;; batches++) {
        launch_batch(function, batch, rounds, events[(batches + 1) % 2]);
        CALL(cuEventSynchronize, (void *), events[batches % 2]);
        if (poll(&input, 1, 0) > 0) {
            if (read(STDIN_FILENO, &byte, 1) <= 0)
                return;
            print((uint64_t)(batches + 1) * (uint64_t)batch);
        }
    }
}

int main(int count, char **words)
{
    const char *what = count > 1 ? words[1] : "", *first = count > 2 ? words[2] : "";
    const char *second = count > 3 ? words[3] : "";

    load_driver();
    if (strcmp(what, "uuid") == 0) {
        print_uuid();
        return 0;
    }
    if (strcmp(what, "init") == 0) {
        char line;

        if (read(STDIN_FILENO, &line, 1) < 0)
            return 2;
        uint64_t began = now(), used = ns_of(CLOCK_PROCESS_CPUTIME_ID);

        CALL(cuInit, (unsigned), 0);
        used = ns_of(CLOCK_PROCESS_CPUTIME_ID) - used;
        print(now() - began);
        print(used);
        until_end();
        return 0;
    }
    start_driver();
    if (strcmp(what, "launch") == 0)
        time_launches(atol(first));
    else if (strcmp(what, "alloc") == 0)
        time_allocations(atol(first), (size_t)atoll(second), count > 4 ? atol(words[4]) : 0);
    else if (strcmp(what, "address") == 0)
        time_addresses(atol(first));
    else if (strcmp(what, "resident") == 0)
        print_resident(atol(first));
    else if (strcmp(what, "fill") == 0)
        fill(first, (size_t)atoll(second));
    else if (strcmp(what, "churn") == 0)
        churn((unsigned)atol(first));
    else if (strcmp(what, "calibrate") == 0)
        calibrate();
    else if (strcmp(what, "work") == 0 && count > 4)
        work(first, (uint64_t)atoll(second), atof(words[4]));
    else
        return 2;
    return 0;
}
