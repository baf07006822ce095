/* Builds texts without printf, which would need a locale. */
#ifndef PODFABRIC_TEXT_H
#define PODFABRIC_TEXT_H

#include <stddef.h>

enum { CODE_ENVIRONMENT = 4, CODE_IO = 5, CODE_TRY_AGAIN = 11 }; /* of the CNI specification */

enum { QUOTED = 512 }; /* bytes of a foreign text that are shown, each as 1 to 5 characters */

struct text {
    size_t length;
    char bytes[4 * 5 * QUOTED];
};

void add(struct text *text, const char *words);
void add_number(struct text *text, unsigned long number);

/* Add a foreign text of any bytes, quoted within a JSON string. */
void add_quoted(struct text *text, const char *foreign);

/* " (ENOENT, errno 2)" */
void add_errno(struct text *text, int number);

/* Begin a CNI error. Its message begins with the code, because Multus passes on only the message.
 * The caller ends the error with a quote and a brace. */
void begin_error(struct text *error, unsigned code);

#endif
