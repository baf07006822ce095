#ifndef PODFABRIC_GPU_SAY_H
#define PODFABRIC_GPU_SAY_H

/* Write "podfabric: TEXT" to standard error as one line, with one write(2). Keeps errno. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
