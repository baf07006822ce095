/* Texts, put together by hand: printf would bring a locale along. */
#ifndef PODFABRIC_TEXT_H
#define PODFABRIC_TEXT_H

#include <stddef.h>

enum { CODE_ENVIRONMENT = 4, CODE_IO = 5, CODE_TRY_AGAIN = 11 }; /* of the CNI specification */

enum { QUOTED = 512 }; /* bytes of a foreign text that are shown, by 5 characters each at most */

struct text {
    size_t length;
    char bytes[4 * 5 * QUOTED];
};

void add(struct text *text, const char *words);
void add_number(struct text *text, unsigned long number);

/* A foreign text of any bytes between quotes, as a part of JSON. */
void add_quoted(struct text *text, const char *foreign);

/* " (ENOENT, errno 2)" */
void add_errno(struct text *text, int number);

/* A CNI error up to the code in its message, for Multus passes on the message alone; a quote and a
 * brace end it. */
void begin_error(struct text *error, unsigned code);

#endif
