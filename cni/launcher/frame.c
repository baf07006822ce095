#define _GNU_SOURCE
#include "frame.h"

#include <errno.h>
#include <string.h>

static void put32(uint8_t *to, uint32_t number)
{
    for (int i = 0; i < 4; i++)
        to[i] = (uint8_t)(number >> (24 - 8 * i));
}

static uint32_t get32(const uint8_t *from)
{
    return (uint32_t)from[0] << 24 | (uint32_t)from[1] << 16 | (uint32_t)from[2] << 8 | from[3];
}

size_t config_sent(const struct request *request)
{
    return request->config_length < MAX_CONFIG ? request->config_length : MAX_CONFIG;
}

bool pack(struct request *request, const char *name, char *const *environment)
{
    size_t name_length = strnlen(name, MAX_NAME);
    uint8_t *start = mempcpy(request->head + HEADER_SIZE, name, name_length);
    uint8_t *at = start;

    for (; *environment; environment++) {
        size_t length = strlen(*environment) + 1;
        if (length > MAX_ENVIRON - (size_t)(at - start))
            return false;
        at = mempcpy(at, *environment, length);
    }
    memcpy(request->head, REQUEST_MAGIC, 4);
    put32(request->head + 4, (uint32_t)name_length);
    put32(request->head + 8, (uint32_t)(at - start));
    put32(request->head + 12, (uint32_t)config_sent(request));
    put32(request->head + 16, (uint32_t)request->stdin_errno);
    request->head_length = (size_t)(at - request->head);
    return true;
}

static enum reading fill(reader *read, void *from, uint8_t *to, size_t length)
{
    while (length > 0) {
        ssize_t got = read(from, to, length);
        if (got <= 0)
            return got < 0 && errno == ETIMEDOUT ? LATE : CUT_SHORT;
        to += got;
        length -= (size_t)got;
    }
    return WHOLE;
}

static const char *check(const struct answer *answer, const uint8_t *magic)
{
    if (memcmp(magic, ANSWER_MAGIC, 4) != 0)
        return "it begins with other bytes than " ANSWER_MAGIC;
    if (answer->status > STATUS_LEAVING)
        return "its status is above 2";
    if (answer->exit_code > MAX_EXIT_CODE)
        return "its exit code is above 255";
    if (answer->status != STATUS_ANSWERED && answer->exit_code == 0)
        return "it refuses with exit code 0";
    if (answer->stderr_length > MAX_STDERR || answer->stdout_length > MAX_STDOUT)
        return "it is longer than an answer may be";
    return NULL;
}

enum reading read_answer(reader *read, void *from, struct answer *answer)
{
    uint8_t header[HEADER_SIZE];
    enum reading state = fill(read, from, header, sizeof header);

    if (state != WHOLE)
        return state;
    answer->status = get32(header + 4);
    answer->exit_code = get32(header + 8);
    answer->stderr_length = get32(header + 12);
    answer->stdout_length = get32(header + 16);
    answer->wrong = check(answer, header);
    if (answer->wrong)
        return GARBAGE;
    return fill(read, from, answer->body, (size_t)answer->stderr_length + answer->stdout_length);
}
