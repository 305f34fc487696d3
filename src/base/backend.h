/* The interface between src/api and a backend: a checked call, and the vtable of the backend that runs it. */
#ifndef SKL_BASE_BACKEND_H
#define SKL_BASE_BACKEND_H

#include "base/text.h"
#include "base/visible.h"

/* One run call and its tensors, after all checks. Members that a call does not have are empty. */
typedef struct skl_call {
    skl_op op;
    skl_inputs inputs; /* struct_size is 0 where skl_states_finish has none */
    skl_rows rows;
    skl_gradients gradients;
    skl_output o_s;                 /* the output that SKL_OP_ATTENTION_FORWARD stores; else no data */
    const skl_attention *attention; /* the student's own, in host memory; NULL without one */
    const skl_stats *stats;         /* requests of SKL_OP_ATTENTION_STATS, in host memory; else NULL */
    skl_range keys;                 /* all keys, or the range of skl_partial */
    skl_row_state *states;
    void *workspace;
    skl_stream stream;
} skl_call;

/* A forward of an indexer that requests only its LSEs does not need the teacher. */
SKL_HOST_DEVICE int skl_only_lse_s(const skl_call *call)
{
    const skl_rows *const rows = &call->rows;
    return call->op == SKL_OP_FORWARD && rows->kl.data == NULL && rows->lse_t.data == NULL &&
           rows->cross_entropy.data == NULL && rows->entropy.data == NULL && rows->mass.data == NULL;
}

SKL_HOST_DEVICE int skl_call_has_sink_gradients(const skl_call *call)
{
    return call->gradients.dsink_t != NULL || call->gradients.dsink_s != NULL;
}

typedef struct skl_backend skl_backend;

struct skl_plan {
    skl_problem problem; /* checked, defaults filled in */
    const skl_backend *backend;
    const void *kernel; /* CPU: entry in the kernel table */
    const char *kernel_name;
    const char *forced_by; /* "options.kernel" or "STREAMKL_KERNEL"; NULL: the backend chose the kernel */
    size_t workspace_size[SKL_OP_COUNT + 1]; /* bytes; 0 for SKL_OP_FINISH */
    int32_t threads;                         /* CPU */
    int32_t workers;                         /* CPU: threads that can have work at the same time, 1..threads */
    int32_t device_index;                    /* GPU */
    void *of_backend;                        /* GPU: skl_cuda_plan, allocated with the plan; CPU: NULL */
    skl_progress progress;
    void *progress_user;
    const int32_t *cancel; /* CPU; may be NULL */
};

struct skl_backend {
    skl_device device;
    /* Chooses a kernel and sets workspace sizes and threads. `kernel` is the name of a forced kernel, or NULL. */
    skl_status (*plan)(skl_plan *plan, const skl_options *options, const char *kernel);
    skl_status (*run)(const skl_plan *plan, const skl_call *call);
    skl_status (*states_merge)(const skl_plan *plan, skl_row_state *into, const skl_row_state *from,
                               skl_stream stream);
    skl_status (*states_finish)(const skl_plan *plan, const skl_call *call);
    /* Memory for one call, aligned to SKL_WORKSPACE_ALIGNMENT; the backend's device has it in the stream's order. */
    skl_status (*allocate)(const skl_plan *plan, size_t size, void **memory, skl_stream stream);
    void (*release)(const skl_plan *plan, void *memory, skl_stream stream);
    /* Adds one line per launch of the call: see skl_plan_explain. Reads no tensor; data may be placeholders. */
    skl_status (*explain)(const skl_plan *plan, const skl_call *call, skl_text *text);
    int (*kernel_at)(int32_t index, skl_kernel_info *info);
    /* dsink_t and dsink_s, after `run` of the call, from inputs.lse_* and, where it is needed, the KL of each row. */
    skl_status (*sink_gradients)(const skl_plan *plan, const skl_call *call);
};

extern const skl_backend skl_cpu_backend;
extern const skl_backend skl_cuda_backend; /* exists in builds with SKL_WITH_CUDA */

/* Number of states in a contiguous array. */
SKL_HOST_DEVICE int64_t skl_state_count(const skl_problem *p)
{
    return p->heads_s * (p->packed ? p->total_q : p->batch * p->len_q);
}

#endif
