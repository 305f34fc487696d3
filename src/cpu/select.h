/* Every choice that the CPU backend makes: the kernel and the threads of a plan, and the passes of a call. */
#ifndef SKL_CPU_SELECT_H
#define SKL_CPU_SELECT_H

#include "cpu/schedule.h"

enum { SKL_CPU_PASSES_MAX = 3 };

typedef struct skl_cpu_passes {
    skl_cpu_pass pass[SKL_CPU_PASSES_MAX]; /* in the order in which they run */
    int count;
    bool fused;      /* one of the passes is fused */
    bool rows_first; /* the first pass writes rows that the others read */
} skl_cpu_passes;

/* Number `index` of the kernels of this build, best first; NULL past the end. */
const skl_cpu_kernel *skl_cpu_kernel_number(int32_t index);

/* `forced` is a name or NULL. */
skl_status skl_cpu_select_kernel(const skl_cpu_kernel **chosen, const skl_plan *plan, const char *forced);

/* `requested` threads, else STREAMKL_THREADS, else one per core. */
skl_status skl_cpu_select_threads(int32_t *threads, int32_t requested);

/* At most `threads`, and no more than the tiles of the largest pass: others would have neither work nor use for their
 * scratch memory. */
int32_t skl_cpu_select_workers(const skl_problem *problem, const skl_cpu_work *work, int32_t threads);

skl_cpu_passes skl_cpu_select_passes(const skl_plan *plan, const skl_call *call);

/* Whether the backend has kernels for an operation. */
skl_status skl_cpu_check_op(skl_op op);

/* One line per pass that has items. */
skl_status skl_cpu_explain(const skl_plan *plan, const skl_call *call, skl_text *text);

#endif
