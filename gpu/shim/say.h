/* What the shim tells the person who reads the container's log: lines on standard error. */
#ifndef PODFABRIC_GPU_SAY_H
#define PODFABRIC_GPU_SAY_H

/* Write "podfabric: TEXT" as one line, with one write(2). */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
