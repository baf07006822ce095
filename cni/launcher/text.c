#define _GNU_SOURCE
#include "text.h"

#include <stdbool.h>
#include <string.h>

void add(struct text *text, const char *words)
{
    while (*words && text->length < sizeof text->bytes)
        text->bytes[text->length++] = *words++;
}

void add_number(struct text *text, unsigned long number)
{
    char digits[24];
    char *at = digits + sizeof digits - 1;

    *at = '\0';
    do
        *--at = (char)('0' + number % 10);
    while (number /= 10);
    add(text, at);
}

/* A space is written as \x20, and every invisible byte as such an escape. So no path can put "not
 * found" into the error of a DEL: go-cni would take these words for success. */
void add_quoted(struct text *text, const char *foreign)
{
    add(text, "\\\"");
    for (size_t i = 0; foreign[i]; i++) {
        unsigned char byte = (unsigned char)foreign[i];
        char plain[] = {(char)byte, '\0'};
        char coded[] = {"0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15], '\0'};
        bool visible = byte > ' ' && byte < 0x7f;

        if (i == QUOTED) {
            add(text, "...");
            break;
        }
        add(text, !visible ? "\\\\x" : byte == '"' || byte == '\\' ? "\\" : "");
        add(text, visible ? plain : coded);
    }
    add(text, "\\\"");
}

/* Add the errno's name and number, because runtimes misread the words of strerror. */
void add_errno(struct text *text, int number)
{
    const char *name = strerrorname_np(number);

    add(text, " (");
    if (name) {
        add(text, name);
        add(text, ", ");
    }
    add(text, "errno ");
    add_number(text, (unsigned long)number);
    add(text, ")");
}

void begin_error(struct text *error, unsigned code)
{
    error->length = 0;
    add(error, "{\"cniVersion\":\"1.1.0\",\"code\":");
    add_number(error, code);
    add(error, ",\"msg\":\"[podfabric ");
    add_number(error, code);
    add(error, "] ");
}
