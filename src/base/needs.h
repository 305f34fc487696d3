/* Row vectors that an operation needs besides q and k, derived once for argument checks, backends and callers.
 *
 * A is the first argument of the KL and B the second: teacher and student of KL(P || S), student and teacher of
 * KL(S || P). Gradients of B's logits are a difference of probabilities and need the two LSEs. Those of A's logits
 * also hold the finished KL of their row; under teacher groups, where each head has its own P_h, a dot product per
 * teacher head takes the KL's place. */
#ifndef SKL_BASE_NEEDS_H
#define SKL_BASE_NEEDS_H

#include <stdbool.h>

#include "base/backend.h"

typedef struct skl_needs {
    bool gradients; /* the operation computes gradients, if any are requested */
    bool lse_t;     /* inputs.lse_t is required; in a one-pass call with a pooled teacher, rows.lse_t */
    bool lse_s;     /* inputs.lse_s, or rows.lse_s */
    bool kl;        /* gradients read the KL of their row: from inputs in a backward, else from rows */
    bool dot_t;     /* gradients read dot_t, from the same place */
} skl_needs;

/* `gradients` holds the SKL_DQ_T, ... that are requested; ignored by an operation without gradients. */
skl_needs skl_needs_of(const skl_problem *problem, skl_op op, uint32_t gradients);

/* skl_needs_of() for the gradients that a call requests. */
skl_needs skl_call_needs(const skl_problem *problem, const skl_call *call);

/* Row results as bits: SKL_ROW_KL, ..., and these: cross_entropy or entropy; mass. */
enum { SKL_ROW_ENTROPIES = 16, SKL_ROW_MASS = 32 };

/* The row results that have a buffer. */
uint32_t skl_row_bits(const skl_rows *rows);

/* Whether an operation for which `rows` are requested computes row results (or states), not only gradients. */
bool skl_op_has_rows(skl_op op, uint32_t rows);

/* SKL_DQ_T, ...: the gradients that have a buffer. */
uint32_t skl_gradient_bits(const skl_gradients *gradients);

#endif
