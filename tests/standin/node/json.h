/* A reader of JSON files (RFC 8259) of tests: numbers are 64-bit integers, strings have no \u
 * escapes. Unreadable input ends the process with a line that gives the position. */
#ifndef STANDIN_JSON_H
#define STANDIN_JSON_H

#include <stdint.h>

enum json_type { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_LIST, JSON_OBJECT };

struct json {
    enum json_type type;
    char *key;          /* of a member of an object */
    char *text;         /* of a string */
    uint64_t number;
    struct json *first; /* of a list or an object */
    struct json *next;
};

/* The document in the file at `path`; NULL with errno if the file cannot be read. */
struct json *json_load(const char *path);
/* The member `key` of an object; NULL if it is missing. */
const struct json *json_get(const struct json *object, const char *key);
uint64_t json_number(const struct json *object, const char *key, uint64_t otherwise);
const char *json_text(const struct json *object, const char *key, const char *otherwise);

#endif
