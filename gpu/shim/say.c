#define _GNU_SOURCE
#include "say.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

void say(const char *format, ...)
{
    char line[512] = "podfabric: ";
    int start = 11, length, error = errno;
    va_list arguments;

    va_start(arguments, format);
    length = vsnprintf(line + start, sizeof line - (size_t)start - 1, format, arguments);
    va_end(arguments);
    length = length < 0 ? 0 : length;
    length += start;
    if (length > (int)sizeof line - 2)
        length = (int)sizeof line - 2;
    line[length++] = '\n';
    if (write(STDERR_FILENO, line, (size_t)length) < 0) {
        /* A program without standard error goes on without the line. */
    }
    errno = error;
}
