#include "cli/kl/reduction.h"

#include <string.h>

static const char *const reduction_names[] = {
    [REDUCTION_MEAN] = "mean",
    [REDUCTION_SUM] = "sum",
    [REDUCTION_NONE] = "none",
};

const char *kl_reduction_name(kl_reduction reduction)
{
    return reduction_names[reduction];
}

const char *parse_reduction(const char *text, void *value)
{
    for (kl_reduction reduction = REDUCTION_MEAN; reduction <= REDUCTION_NONE; reduction++) {
        if (strcmp(text, reduction_names[reduction]) == 0) {
            *(kl_reduction *)value = reduction;
            return NULL;
        }
    }
    return "mean, sum or none";
}
