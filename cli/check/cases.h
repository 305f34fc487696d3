/* What `streamkl check` runs: small problems that together touch every feature, with their float64 answers. */
#ifndef STREAMKL_CLI_CHECK_CASES_H
#define STREAMKL_CLI_CHECK_CASES_H

#include "oracle.h"

#include <stdbool.h>

enum { CHECK_TENSORS = 5 }; /* q_t, k_t, q_s, k_s, w_s; their gradients have the same order */

typedef struct check_case {
    const char *name;
    skl_problem problem;
    skl_inputs inputs;
    void *tensors[CHECK_TENSORS];
    int64_t tensor_counts[CHECK_TENSORS]; /* elements */
    int64_t row_counts[2];                /* of a teacher and of a student row vector */
    int32_t *indices;                     /* lists of keys, or NULL */
    float *grad_kl;
    oracle_result exact; /* float64 */
    oracle_result naive; /* the same in float32: how well one can do without trying */
} check_case;

int check_case_count(void);

/* Makes the case, and computes its answers. False: out of memory. check_case_free() is right after either. */
bool check_case_make(check_case *made, int index);
void check_case_free(check_case *made);

#endif
