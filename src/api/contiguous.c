#include "api/contiguous.h"

skl_output skl_contiguous_output(int64_t heads, int64_t rows, int64_t dim)
{
    const uint64_t head_size = (uint64_t)rows * (uint64_t)dim;
    const skl_output tensor = {SKL_PLACEHOLDER, (int64_t)((uint64_t)heads * head_size & INT64_MAX),
                               (int64_t)(head_size & INT64_MAX), dim};
    return tensor;
}

skl_input skl_contiguous_input(int64_t heads, int64_t rows, int64_t dim)
{
    const skl_output tensor = skl_contiguous_output(heads, rows, dim);
    return skl_input_of(&tensor);
}

skl_inputs skl_contiguous_inputs(const skl_problem *p)
{
    const int64_t rows_q = skl_query_rows(p).rows, rows_k = skl_key_rows(p).rows;
    skl_inputs in = {.struct_size = sizeof(skl_inputs)};
    in.q_t = skl_contiguous_input(p->heads_t, rows_q, p->dim_t);
    in.k_t = skl_contiguous_input(p->key_heads_t, rows_k, p->dim_t);
    in.q_s = skl_contiguous_input(skl_query_heads_s(p), rows_q, p->dim_s);
    in.k_s = skl_contiguous_input(p->key_heads_s, rows_k, p->dim_s);
    if (skl_is_indexer(p))
        in.w_s = skl_contiguous_input(p->heads_s, rows_q, p->index_heads);
    if (p->top_k > 0)
        in.indices = skl_contiguous_input(p->heads_s, rows_q, p->top_k);
    if (p->packed)
        in.cu_seqlens_q = in.cu_seqlens_k = SKL_PLACEHOLDER;
    if (p->row_bounds)
        in.key_begin = in.key_end = SKL_PLACEHOLDER;
    if (p->sinks)
        in.sink_t = in.sink_s = SKL_PLACEHOLDER;
    return in;
}
