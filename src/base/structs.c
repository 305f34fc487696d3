#include "base/structs.h"

#include <string.h>

#include "base/status.h"

skl_status skl_struct_copy(void *to, const void *from, size_t size, const char *name, const char *hint)
{
    size_t given_size = 0;
    memcpy(&given_size, from, sizeof given_size);
    if (given_size < size || given_size > SKL_STRUCT_SIZE_MAX)
        return skl_fail(SKL_ERROR_ARGUMENT, "%s.struct_size=%zu: must be %zu, or up to %d if the rest is 0%s", name,
                        given_size, size, SKL_STRUCT_SIZE_MAX, hint);
    const unsigned char *const bytes = from;
    for (size_t i = size; i < given_size; i++)
        if (bytes[i] != 0)
            return skl_fail(SKL_ERROR_ARGUMENT,
                            "%s.struct_size=%zu: byte %zu is not 0; this library knows %zu bytes, and the others "
                            "must be 0",
                            name, given_size, i, size);
    memcpy(to, from, size);
    memcpy(to, &size, sizeof size);
    return SKL_OK;
}
