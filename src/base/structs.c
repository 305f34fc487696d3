#include "base/structs.h"

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
const skl_struct skl_struct_kernel_info = {"info", sizeof(skl_kernel_info), sizeof(skl_kernel_info), ""};

static skl_status check_size(const skl_struct *type, const void *given, size_t *given_size)
{
    if (given == NULL)
        return skl_fail(SKL_ERROR_ARGUMENT, "%s=NULL: must be given", type->name);
    memcpy(given_size, given, sizeof *given_size);
    if (*given_size >= type->first_size && *given_size <= SKL_STRUCT_SIZE_MAX)
        return SKL_OK;
    return skl_fail(SKL_ERROR_ARGUMENT, "%s.struct_size=%zu: must be the sizeof of the struct, %zu, or %zu..%d%s",
                    type->name, *given_size, type->size, type->first_size, SKL_STRUCT_SIZE_MAX, type->hint);
}

skl_status skl_struct_read(const skl_struct *type, void *to, const void *from)
{
    size_t given_size = 0;
    SKL_TRY(check_size(type, from, &given_size));
    const unsigned char *const bytes = from;
    for (size_t i = type->size; i < given_size; i++)
        if (bytes[i] != 0)
            return skl_fail(SKL_ERROR_ARGUMENT,
                            "%s.struct_size=%zu: byte %zu is not 0; this library knows %zu bytes, and the others "
                            "must be 0",
                            type->name, given_size, i, type->size);
    const size_t copied = given_size < type->size ? given_size : type->size;
    memcpy(to, from, copied);
    memset((unsigned char *)to + copied, 0, type->size - copied);
    memcpy(to, &type->size, sizeof type->size);
    return SKL_OK;
}

skl_status skl_struct_write(const skl_struct *type, void *to, const void *from)
{
    size_t given_size = 0;
    SKL_TRY(check_size(type, to, &given_size));
    const size_t copied = given_size < type->size ? given_size : type->size, first = sizeof given_size;
    memcpy((unsigned char *)to + first, (const unsigned char *)from + first, copied - first);
    memset((unsigned char *)to + copied, 0, given_size - copied);
    return SKL_OK;
}
