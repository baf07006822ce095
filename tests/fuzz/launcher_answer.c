/*
 * Fuzzes the launcher with foreign bytes, by libFuzzer: an agent's answers, and the names, paths
 * and environment of a runtime. The first byte selects the kind.
 */
#define main launcher_main
#include "../../cni/launcher/launcher.c"
#undef main

/* Stop where libFuzzer sees it. */
#define HOLDS(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            __builtin_trap();                                                                      \
    } while (0)

struct bytes {
    const uint8_t *at;
    size_t left, step;
};

/* A peer that sends at most a given number of bytes at a time. */
static ssize_t give(void *from, void *to, size_t room)
{
    struct bytes *bytes = from;
    size_t size = bytes->left < bytes->step ? bytes->left : bytes->step;

    size = size < room ? size : room;
    memcpy(to, bytes->at, size);
    bytes->at += size;
    bytes->left -= size;
    return (ssize_t)size;
}

/* A peer that never stops: the body must have room for the largest length that a header may
 * have. */
static ssize_t give_for_ever(void *from, void *to, size_t room)
{
    ssize_t given = give(from, to, room);

    return given ? given : (memset(to, 0, room), (ssize_t)room);
}

static void read_an_endless_answer(struct bytes bytes)
{
    static struct answer answer;
    enum reading state = read_answer(give_for_ever, &bytes, &answer);

    HOLDS(state == WHOLE || state == GARBAGE);
}

static void read_an_answer(struct bytes bytes)
{
    static struct answer answer;
    const uint8_t *start = bytes.at;
    enum reading state = read_answer(give, &bytes, &answer);
    size_t taken = (size_t)(bytes.at - start);
    size_t length = (size_t)answer.stderr_length + answer.stdout_length;

    HOLDS(state != LATE);
    HOLDS(state != GARBAGE || (answer.wrong && taken == HEADER_SIZE));
    HOLDS(state != CUT_SHORT || bytes.left == 0);
    if (state != WHOLE)
        return;
    HOLDS(memcmp(start, "pfa1", 4) == 0);
    HOLDS(answer.status <= 2 && answer.exit_code <= 255);
    HOLDS(answer.status == 0 || answer.exit_code != 0);
    HOLDS(taken == HEADER_SIZE + length);
    HOLDS(memcmp(answer.body, start + HEADER_SIZE, length) == 0);
}

/* Check for one JSON text in one line of ASCII, without words that a runtime takes for a
 * successful DEL. */
static void write_an_error(const char *foreign)
{
    static struct text text;
    bool escaped = false;

    begin_error(&text, CODE_TRY_AGAIN);
    size_t start = text.length;
    add_quoted(&text, foreign);
    add_quoted(&text, foreign); /* two paths at most are in one error */
    HOLDS(text.length + 2048 < sizeof text.bytes);
    for (size_t i = start; i < text.length; i++) {
        unsigned char byte = (unsigned char)text.bytes[i];
        HOLDS(byte > ' ' && byte < 0x7f);
        if (escaped) {
            HOLDS(byte == '"' || byte == '\\');
            escaped = false;
        } else {
            HOLDS(byte != '"');
            escaped = byte == '\\';
        }
    }
    HOLDS(!escaped);
}

static void pack_a_request(char *name, char *foreign, size_t size, size_t repeats)
{
    static struct request request;
    static char *environment[(1 << 12) + 1];
    size_t count = 0, expected = 0;

    for (size_t round = 0; round <= repeats; round++)
        for (size_t at = 0; at < size && count < 1 << 12; at += strlen(foreign + at) + 1) {
            expected += strlen(foreign + at) + 1;
            environment[count++] = foreign + at;
        }
    environment[count] = NULL;
    name = own_name(name);
    HOLDS(strlen(name) <= MAX_NAME && !strchr(name, '/'));
    bool fits = pack(&request, name, environment);
    HOLDS(fits == (expected <= MAX_ENVIRON));
    HOLDS(!fits || request.head_length == HEADER_SIZE + strlen(name) + expected);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    if (size < 2)
        return 0;
    struct bytes bytes = {input + 2, size - 2, input[1] + 1u};
    char *text = malloc(bytes.left + 1), *name = malloc(bytes.left + 1);

    memcpy(text, bytes.at, bytes.left);
    memcpy(name, bytes.at, bytes.left);
    text[bytes.left] = name[bytes.left] = '\0';
    switch (input[0] % 4) {
    case 0:
        read_an_answer(bytes);
        break;
    case 1:
        write_an_error(text);
        break;
    case 2:
        read_an_endless_answer(bytes);
        break;
    default:
        pack_a_request(name, text, bytes.left + 1, input[1]);
    }
    free(text);
    free(name);
    return 0;
}
