/* The functions of the vector kernels for each kind of student, shared by all instruction sets. */
#ifndef SKL_CPU_BODY_WORK_H
#define SKL_CPU_BODY_WORK_H

#include "cpu/body/sparse_backward.h"

static const skl_cpu_work attention_work = {
    .fuses = true,
    .tiles = tiles,
    .scratch_size = scratch_size,
    .forward = forward,
    .backward_queries = backward_queries,
    .backward_keys = backward_keys,
};

static const skl_cpu_work indexer_work = {
    .fuses = true,
    .tiles = tiles,
    .scratch_size = index_scratch_size,
    .forward = index_forward,
    .backward_queries = index_backward_queries,
    .backward_keys = index_backward_keys,
};

static const skl_cpu_work sparse_indexer_work = {
    .fuses = true,
    .tiles = sparse_tiles,
    .scratch_size = sparse_scratch_size,
    .forward = sparse_forward,
    .backward_queries = sparse_backward_queries,
    .backward_keys = sparse_backward_keys,
};

#endif
