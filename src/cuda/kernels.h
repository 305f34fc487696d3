/* The kernel list: every kernel that cuda/select can choose. */
#ifndef SKL_CUDA_KERNELS_H
#define SKL_CUDA_KERNELS_H

#include <stdbool.h>

#include "cuda/launch.h"

/* Lowest compute capability of the code of an architecture: 90 is 9.0. */
enum { SKL_CAPABILITY_sm80 = 80, SKL_CAPABILITY_sm90 = 90 };

/* An entry of the kernel list: the launchers of one line of instances.def, or the general kernels. NULL: it has no
 * such launcher. */
typedef struct skl_cuda_kernel {
    const char *name, *detail;
    int capability, capability_end; /* lowest compute capability, and the first beyond the highest: 90 is 9.0 */
    skl_dtype dtype;                /* f32: rows of any type, as two-term rows */
    int64_t dim_max;                /* of attention heads; 0: any size and type */
    int64_t small_dim_max;          /* of the smaller of an attention's two head sizes */
    int64_t fused_dim_max;          /* of the gradients of `fused` */
    bool softcap;                   /* attention or teacher groups with one */
    skl_cuda_launcher forward, fused, dq, dk;
    int (*blocks_per_sm)(void); /* of the forward */
    skl_cuda_launcher group_rows, group_fused;
    skl_cuda_launcher strip_rows, strip_gradients; /* teacher groups with softcaps, both directions, both sides */
    skl_cuda_launcher carrying;                    /* the student's attention backward, with the KL */
    skl_cuda_launcher joint;                       /* dq and dk of both sides */
    skl_cuda_launcher dense_rows, dense_gradients, sparse_rows, sparse_gradients;
} skl_cuda_kernel;

/* The kernel list, best first; NULL past its end. */
const skl_cuda_kernel *skl_cuda_kernel_at(int32_t index);

/* The last of the list, which does every problem. */
extern const skl_cuda_kernel *const skl_cuda_general;

/* Whether a kernel has this name, or had it in release 0.1.0. */
bool skl_cuda_has_name(const skl_cuda_kernel *kernel, const char *name);

#endif
