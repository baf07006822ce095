/* The hook of container runtimes that raises a container's limit of locked memory. */
#define MEMLOCK_NAME "podfabric-memlock" /* of the launcher beside the plugins */

/* Run the hook with main's arguments. Returns 0 always: a container must start even if its limit
 * cannot be raised. A failure is one line of standard error. */
int raise_memlock(int argc, char **argv);
