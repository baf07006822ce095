/* The messages between launcher and agent (agent/serve/framing.py). A header is four bytes of magic
 * and four numbers of 32 bits, most significant byte first. */
#ifndef PODFABRIC_FRAME_H
#define PODFABRIC_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define REQUEST_MAGIC "pfq1"
#define ANSWER_MAGIC "pfa1"

enum {
    HEADER_SIZE = 20,
    MAX_NAME = 255,
    MAX_ENVIRON = 1 << 20,
    MAX_CONFIG = 16 << 20,
    MAX_STDERR = 1 << 20,
    MAX_STDOUT = 16 << 20,
    MAX_EXIT_CODE = 255,
};

enum status { STATUS_ANSWERED, STATUS_REFUSED, STATUS_LEAVING };

/* A request and an answer are too large for a stack. Static zeros take only the pages in use. */

struct request {
    uint8_t head[HEADER_SIZE + MAX_NAME + MAX_ENVIRON]; /* header, name, environment */
    size_t head_length;
    char config[MAX_CONFIG + 1]; /* standard input; the extra byte shows that it is too long */
    size_t config_length;
    int stdin_errno;
};

struct answer {
    uint32_t status, exit_code, stderr_length, stdout_length;
    uint8_t body[MAX_STDERR + MAX_STDOUT]; /* standard error, standard output */
    const char *wrong;                     /* why the answer is invalid, or NULL */
};

size_t config_sent(const struct request *request);

/* Write header, name and environment into `head`; false if the environment is too large. */
bool pack(struct request *request, const char *name, char *const *environment);

/* Reads bytes of an answer, like read(2); ETIMEDOUT means that the bytes come too late. */
typedef ssize_t reader(void *from, void *to, size_t room);

enum reading { WHOLE, CUT_SHORT, LATE, GARBAGE };

/* Read an answer. Only a WHOLE answer may be used. */
enum reading read_answer(reader *read, void *from, struct answer *answer);

#endif
