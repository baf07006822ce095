/* Writes lines to standard error, for the readers of the container's log. */
#ifndef PODFABRIC_GPU_SAY_H
#define PODFABRIC_GPU_SAY_H

/* Write "podfabric: TEXT" as one line, with one write(2). */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
