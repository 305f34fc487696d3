/* The cases of `streamkl check`: small problems that together cover every feature, with float64 results. */
#ifndef STREAMKL_CLI_CHECK_CASES_H
#define STREAMKL_CLI_CHECK_CASES_H

#include "oracle.h"

#include <stdbool.h>

enum { CHECK_TENSORS = 8 }; /* q_t, k_t, q_s, k_s, w_s, gradients in the same order; v_s, o_s, do_s */

typedef struct check_case {
    const char *name;
    skl_problem problem;
    skl_inputs inputs;
    skl_attention attention; /* with SKL_DV_S; exact and naive are then results of an attention backward */
    void *tensors[CHECK_TENSORS];
    int64_t tensor_counts[CHECK_TENSORS]; /* elements */
    int64_t row_counts[2];                /* of a teacher and of a student row vector */
    int32_t *indices;                     /* of a sparse indexer, else NULL */
    int32_t *key_begin, *key_end;         /* row bounds, or NULL */
    float *sink_t, *sink_s;               /* or NULL */
    float *grad_kl;
    oracle_result exact; /* float64 */
    oracle_result naive; /* the same in float32, to calibrate the allowed error */
} check_case;

int check_case_count(void);

/* Makes a case and computes its results. False: out of memory. Call check_case_free() in any case. */
bool check_case_make(check_case *made, int index);

/* For check_case_make(): draws the data of made->problem, and sets made->inputs. False: out of memory. */
bool check_case_draw(check_case *made, uint64_t seed);

void check_case_free(check_case *made);

#endif
