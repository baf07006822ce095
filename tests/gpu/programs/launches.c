/*
 * Launches one kernel after the other on the first device, until standard input ends:
 *
 *   launches KERNEL
 *
 * KERNEL is a function's name, which ends in how long it takes: work_5ms. Prints a line when it
 * begins. Each line that it reads stops it until the next one.
 */
#include <poll.h>
#include <unistd.h>

#include "driver.h"

/* The next line, if there is one or `wait`; false at the end. */
static int read_line(int wait, int *read_one)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    char byte;

    *read_one = 0;
    if (poll(&input, 1, wait ? -1 : 0) <= 0)
        return 1;
    if (read(STDIN_FILENO, &byte, 1) <= 0)
        return 0;
    *read_one = 1;
    return 1;
}

int main(int count, char **arguments)
{
    int pause;

    if (count != 2)
        return 2;
    load_driver();
    start_driver();
    void *function = function_of("image", arguments[1]);
    launch_function *launch = (launch_function *)find("cuLaunchKernel");

    puts("begins");
    fflush(stdout);
    while (read_line(0, &pause)) {
        if (pause && !read_line(1, &pause))
            break;
        check(launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
    }
    return 0;
}
