/* Launches of an indexer. */
#include "cuda/select/choice.h"

void skl_select_add_indexer(const choice *s, const char *step, bool gradients)
{
    const skl_problem *const p = &s->plan->problem;
    const skl_cuda_kernel *const kernel = s->kernel;
    const bool sparse = p->top_k > 0;
    const skl_cuda_launcher rows = sparse ? kernel->sparse_rows : kernel->dense_rows;
    const skl_cuda_launcher grads = sparse ? kernel->sparse_gradients : kernel->dense_gradients;
    skl_cuda_launch *const launch = skl_select_add(s, step, kernel, gradients ? grads : rows,
                                                   gradients ? SKL_VARIANT_GRADIENTS : SKL_VARIANT_ROWS, s->reason);
    launch->streams_queries = gradients && !sparse;
    if (sparse)
        launch->sparse = skl_select_sparse_layout_of(s->plan, gradients, !skl_only_lse_s(s->call));
    if (sparse && kernel != skl_cuda_general) {
        launch->variant = launch->sparse.resident ? SKL_VARIANT_RESIDENT : SKL_VARIANT_STREAMED;
        launch->workspace_size = launch->sparse.end;
    } else if (sparse) {
        launch->workspace_size = gradients ? launch->sparse.chunk.end : skl_select_group_lse_size(s->plan);
    } else if (kernel != skl_cuda_general) {
        launch->strips = skl_index_layout_of(p, s->plan->sm_count, gradients);
        launch->num_splits = launch->strips.num_splits;
        launch->workspace_size = launch->strips.size;
    } else {
        launch->dense = skl_dense_chunk_of(p, s->plan->sm_count);
        launch->workspace_size = gradients ? launch->dense.end : skl_select_group_lse_size(s->plan);
    }
}

void skl_select_indexer(choice *s)
{
    const skl_gradients *const grads = &s->call->gradients;
    const bool of_queries = s->gradients && s->some_rows && (grads->dq_s.data != NULL || grads->dw_s.data != NULL);
    const bool of_keys = s->gradients && s->some_keys && grads->dk_s.data != NULL;
    /* On tensor cores one launch gives gradients and rows. */
    const bool rows_in_gradients = s->kernel != skl_cuda_general && (of_queries || of_keys);
    if (s->rows && s->some_rows && !rows_in_gradients)
        skl_select_add_indexer(s, "forward", false);
    if (of_queries || of_keys)
        skl_select_add_indexer(s, rows_in_gradients && s->rows ? "forward and gradients" : "gradients", true);
}
