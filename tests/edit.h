/* Edits of a struct as data, for tables of invalid arguments. */
#ifndef SKL_TESTS_EDIT_H
#define SKL_TESTS_EDIT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum edit_kind { EDIT_NONE, EDIT_SET, EDIT_SET_FLOAT, EDIT_ADD, EDIT_COPY, EDIT_SET_AT } edit_kind;

typedef struct edit {
    edit_kind kind;
    size_t offset, size; /* of the member; EDIT_SET_AT: offset of the pointer, index of the element */
    int64_t value;       /* EDIT_COPY: offset of the member to copy from */
    float number;        /* EDIT_SET_FLOAT */
} edit;

/* One edit of a member of `type`. Integers, enums and pointers are all set as integers. SET_AT_IN sets an element of
 * the int32_t array that a member points to. The formatter would put the braces of a macro on separate lines. */
/* clang-format off */
#define MEMBER_OF(type, member)            offsetof(type, member), sizeof(((type *)0)->member)
#define SET_IN(type, member, to)           {EDIT_SET, MEMBER_OF(type, member), to, 0}
#define SET_FLOAT_IN(type, member, to)     {EDIT_SET_FLOAT, MEMBER_OF(type, member), 0, to}
#define ADD_IN(type, member, amount)       {EDIT_ADD, MEMBER_OF(type, member), amount, 0}
#define COPY_IN(type, member, from)        {EDIT_COPY, MEMBER_OF(type, member), offsetof(type, from), 0}
#define SET_AT_IN(type, member, index, to) {EDIT_SET_AT, offsetof(type, member), index, to, 0}
/* clang-format on */

static inline void edit_apply(void *object, const edit *edits, size_t count)
{
    for (size_t n = 0; n < count; n++) {
        unsigned char *const member = (unsigned char *)object + edits[n].offset;
        const unsigned char *const from = (const unsigned char *)object + edits[n].value;
        int64_t value = edits[n].value;
        int32_t *array;
        switch (edits[n].kind) {
        case EDIT_NONE:
            break;
        case EDIT_SET_FLOAT:
            memcpy(member, &edits[n].number, sizeof edits[n].number);
            break;
        case EDIT_COPY:
            memcpy(member, from, edits[n].size);
            break;
        case EDIT_ADD: /* for a pointer, in bytes */
            memcpy(&value, member, edits[n].size);
            value += edits[n].value;
            memcpy(member, &value, edits[n].size);
            break;
        case EDIT_SET_AT:
            memcpy(&array, member, sizeof array);
            array[edits[n].size] = (int32_t)value;
            break;
        case EDIT_SET: /* little-endian: the low bytes come first */
            memcpy(member, &value, edits[n].size);
            break;
        }
    }
}

#endif
