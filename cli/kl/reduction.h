/* How the KL of the rows becomes a loss. */
#ifndef STREAMKL_CLI_KL_REDUCTION_H
#define STREAMKL_CLI_KL_REDUCTION_H

typedef enum kl_reduction { REDUCTION_MEAN = 0, REDUCTION_SUM = 1, REDUCTION_NONE = 2 } kl_reduction;

const char *kl_reduction_name(kl_reduction reduction); /* "mean", "sum", "none" */

/* An option_parser: stores a kl_reduction. */
const char *parse_reduction(const char *text, void *value);

#endif
