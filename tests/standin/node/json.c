#include "json.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct reader {
    const char *path;
    const char *text;
    const char *at;
};

static void fail(const struct reader *r, const char *wanted)
{
    fprintf(stderr, "stand-in: %s, byte %ld: expected %s\n", r->path, (long)(r->at - r->text), wanted);
    abort();
}

static void skip(struct reader *r)
{
    while (isspace((unsigned char)*r->at))
        r->at++;
}

static void expect(struct reader *r, char wanted)
{
    char text[2] = {wanted, 0};
    skip(r);
    if (*r->at != wanted)
        fail(r, text);
    r->at++;
}

static char *string(struct reader *r)
{
    expect(r, '"');
    char *text = malloc(strlen(r->at) + 1), *end = text;
    if (text == NULL)
        abort();
    while (*r->at != '"') {
        if (*r->at == '\\') {
            r->at++;
            if (strchr("\"\\/", *r->at) == NULL)
                fail(r, "a simple escape");
        }
        if (*r->at == 0)
            fail(r, "the end of a string");
        *end++ = *r->at++;
    }
    r->at++;
    *end = 0;
    return text;
}

static struct json *value(struct reader *r);

/* The members or elements up to `close`. */
static void fill(struct reader *r, struct json *outer, char close)
{
    struct json **place = &outer->first;
    skip(r);
    if (*r->at == close) {
        r->at++;
        return;
    }
    for (;;) {
        char *key = NULL;
        skip(r);
        if (outer->type == JSON_OBJECT) {
            key = string(r);
            expect(r, ':');
        }
        *place = value(r);
        (*place)->key = key;
        place = &(*place)->next;
        skip(r);
        if (*r->at == ',') {
            r->at++;
            continue;
        }
        expect(r, close);
        return;
    }
}

static int word(struct reader *r, const char *text)
{
    size_t length = strlen(text);
    if (strncmp(r->at, text, length) != 0)
        return 0;
    r->at += length;
    return 1;
}

static struct json *value(struct reader *r)
{
    struct json *found = calloc(1, sizeof *found);
    if (found == NULL)
        abort();
    skip(r);
    if (*r->at == '{' || *r->at == '[') {
        found->type = *r->at == '{' ? JSON_OBJECT : JSON_LIST;
        char close = *r->at++ == '{' ? '}' : ']';
        fill(r, found, close);
    } else if (*r->at == '"') {
        found->type = JSON_STRING;
        found->text = string(r);
    } else if (isdigit((unsigned char)*r->at)) {
        char *end;
        found->type = JSON_NUMBER;
        found->number = strtoull(r->at, &end, 10);
        r->at = end;
    } else if (word(r, "true")) {
        found->type = JSON_TRUE;
        found->number = 1;
    } else if (word(r, "false")) {
        found->type = JSON_FALSE;
    } else if (!word(r, "null")) {
        fail(r, "a value");
    }
    return found;
}

struct json *json_load(const char *path)
{
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return NULL;
    size_t room = 4096, length = 0, got;
    char *text = malloc(room);
    while (text != NULL && (got = fread(text + length, 1, room - length - 1, file)) > 0) {
        length += got;
        if (room - length < 1024)
            text = realloc(text, room *= 2);
    }
    fclose(file);
    if (text == NULL)
        abort();
    text[length] = 0;
    struct reader r = {path, text, text};
    struct json *found = value(&r);
    skip(&r);
    if (*r.at != 0)
        fail(&r, "the end of the file");
    free(text);
    return found;
}

const struct json *json_get(const struct json *object, const char *key)
{
    for (const struct json *m = object ? object->first : NULL; m != NULL; m = m->next)
        if (m->key != NULL && strcmp(m->key, key) == 0)
            return m;
    return NULL;
}

uint64_t json_number(const struct json *object, const char *key, uint64_t otherwise)
{
    const struct json *m = json_get(object, key);
    return m == NULL || m->type == JSON_NULL ? otherwise : m->number;
}

const char *json_text(const struct json *object, const char *key, const char *otherwise)
{
    const struct json *m = json_get(object, key);
    return m == NULL || m->type != JSON_STRING ? otherwise : m->text;
}
