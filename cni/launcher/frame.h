/*
 * What launcher and agent say to each other: agent/serve/framing.py describes it, and is the other side.
 * A header is four bytes of magic and four numbers of 32 bits, most significant byte first.
 */
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

/* Both are too large for a stack; as static zeros they cost the pages that are used. */

struct request {
    uint8_t head[HEADER_SIZE + MAX_NAME + MAX_ENVIRON]; /* header, name, environment */
    size_t head_length;
    char config[MAX_CONFIG + 1]; /* standard input; one byte more shows that it is too much */
    size_t config_length;
    int stdin_errno;
};

struct answer {
    uint32_t status, exit_code, stderr_length, stdout_length;
    uint8_t body[MAX_STDERR + MAX_STDOUT]; /* standard error, standard output */
    const char *wrong;                     /* what makes it no answer, if it is none */
};

/* How much of the configuration is sent. */
size_t config_sent(const struct request *request);

/* Put what goes before the configuration into `head`; false if the environment is too much. */
bool pack(struct request *request, const char *name, char *const *environment);

/* Bytes of an answer, as read(2) gives them; ETIMEDOUT says that they come too late. */
typedef ssize_t reader(void *from, void *to, size_t room);

enum reading { WHOLE, CUT_SHORT, LATE, GARBAGE };

/* All of an answer. Only a WHOLE one may be used. */
enum reading read_answer(reader *read, void *from, struct answer *answer);

#endif
