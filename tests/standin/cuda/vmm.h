/* Physical memory and the device addresses where it is mapped. */
#ifndef STANDIN_VMM_H
#define STANDIN_VMM_H

#include "objects.h"

/* Whether all of [pointer, pointer + bytes) is mapped, with access set. Needs the lock. */
int mapping_is_usable(uint64_t pointer, uint64_t bytes);

#endif
