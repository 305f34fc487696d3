#include "base/structs.h"

#include <stdbool.h>
#include <string.h>

#include "base/status.h"

/* A release that adds fields to a struct for the first time names the first of them here. */
const skl_struct skl_struct_problem = {"problem", sizeof(skl_problem), offsetof(skl_problem, row_bounds),
                                       "; start from skl_problem_default()"};
const skl_struct skl_struct_options = {"options", sizeof(skl_options), offsetof(skl_options, gpu),
                                       "; start from skl_options_default()"};
const skl_struct skl_struct_inputs = {"inputs", sizeof(skl_inputs), offsetof(skl_inputs, key_begin), ""};
const skl_struct skl_struct_rows = {"rows", sizeof(skl_rows), sizeof(skl_rows), ""};
const skl_struct skl_struct_gradients = {"gradients", sizeof(skl_gradients), offsetof(skl_gradients, dsink_t), ""};
const skl_struct skl_struct_attention = {"attention", sizeof(skl_attention), sizeof(skl_attention), ""};
const skl_struct skl_struct_stats = {"stats", sizeof(skl_stats), sizeof(skl_stats), ""};
const skl_struct skl_struct_kernel_info = {"info", sizeof(skl_kernel_info), sizeof(skl_kernel_info), ""};

/* Checks a struct of the caller and sets *size to the bytes that it shares with the library's. */
static skl_status check_struct(const skl_struct *type, const void *given, size_t *size)
{
    size_t given_size = 0;
    if (given == NULL)
        return skl_fail(SKL_ERROR_ARGUMENT, "%s=NULL: must be given", type->name);
    memcpy(&given_size, given, sizeof given_size);
    const bool ends_in_a_pointer = given_size < type->size && given_size % sizeof(void *) != 0;
    if (given_size < type->first_size || given_size > SKL_STRUCT_SIZE_MAX || ends_in_a_pointer)
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "%s.struct_size=%zu: must be the sizeof of the struct, %zu, or %zu..%d, a multiple of 8%s",
                        type->name, given_size, type->size, type->first_size, SKL_STRUCT_SIZE_MAX, type->hint);
    const unsigned char *const bytes = given;
    for (size_t i = type->size; i < given_size; i++)
        if (bytes[i] != 0)
            return skl_fail(SKL_ERROR_ARGUMENT,
                            "%s.struct_size=%zu: byte %zu is not 0; this library knows %zu bytes, and the others "
                            "must be 0",
                            type->name, given_size, i, type->size);
    *size = given_size < type->size ? given_size : type->size;
    return SKL_OK;
}

skl_status skl_struct_read(const skl_struct *type, void *to, const void *from)
{
    size_t size = 0;
    SKL_TRY(check_struct(type, from, &size));
    memcpy(to, from, size);
    memset((unsigned char *)to + size, 0, type->size - size);
    memcpy(to, &type->size, sizeof type->size);
    return SKL_OK;
}

skl_status skl_struct_write(const skl_struct *type, void *to, const void *from)
{
    size_t size = 0;
    const size_t first = sizeof size; /* first byte after struct_size */
    SKL_TRY(check_struct(type, to, &size));
    memcpy((unsigned char *)to + first, (const unsigned char *)from + first, size - first);
    return SKL_OK;
}
