#include "device/explain.h"
#include "device/error.h"

#include <stdlib.h>

char *explain_plan(const skl_plan *plan, const skl_inputs *inputs, skl_op op)
{
    device_begin();
    const size_t length = skl_plan_explain(plan, inputs, op, NULL, 0);
    if (length == 0)
        return NULL;
    char *const text = malloc(length + 1);
    if (text)
        skl_plan_explain(plan, inputs, op, text, length + 1);
    else
        device_fail(SKL_ERROR_MEMORY, "out of memory: the explanation needs %zu bytes", length + 1);
    return text;
}
