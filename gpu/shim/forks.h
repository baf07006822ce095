/* Memory that a fork does not share: it is zero in the child (MADV_WIPEONFORK). */
#ifndef PODFABRIC_GPU_FORKS_H
#define PODFABRIC_GPU_FORKS_H

#include <stddef.h>
#include <sys/mman.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

/* Returns NULL and sets errno without memory, or before Linux 4.14. */
static inline void *zero_after_fork(size_t size)
{
    void *made = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (made == MAP_FAILED)
        return NULL;
    if (madvise(made, size, MADV_WIPEONFORK) == 0)
        return made;
    munmap(made, size);
    return NULL;
}

#endif
