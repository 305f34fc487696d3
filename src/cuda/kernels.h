/* The kernel list: every kernel that cuda/select can choose, with what it supports. */
#ifndef SKL_CUDA_KERNELS_H
#define SKL_CUDA_KERNELS_H

#include <stdbool.h>

#include "cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Lowest compute capability of the code of an architecture: 90 is 9.0. */
enum { SKL_CAPABILITY_sm80 = 80, SKL_CAPABILITY_sm90 = 90 };

/* The first compute capability that code of an architecture does not run on. */
enum { SKL_CAPABILITY_END_sm80 = 1000, SKL_CAPABILITY_END_sm90 = 91 };

/* Work that a kernel supports, as bits. */
enum {
    SKL_DOES_ATTENTION = 1, /* one teacher head per student head */
    SKL_DOES_GROUPS = 2,    /* the mean of several teacher heads per student head */
    SKL_DOES_DENSE = 4,     /* an indexer over all keys */
    SKL_DOES_SPARSE = 8,    /* an indexer over lists of keys */
    SKL_DOES_CARRIED = 16,  /* the student's attention with the KL; other kernels of the plan do the rest */
    SKL_DOES_JOINT = 32,    /* the gradients of both sides in one launch; other kernels of the plan do the rest */
    SKL_DOES_TEACHER = 64,  /* teacher groups: gradients of the teacher, too */
    SKL_DOES_DK = 128,      /* dk alone, in a fixed order: the row has the launcher `dk` */
    SKL_DOES_ORDERED = 256, /* all sums in a fixed order: the row has no launcher `fused` */
    SKL_DOES_STATS = 512    /* statistics of one attention: the row has the launcher `forward` */
};

/* A row of the kernel list: what a kernel supports. Selection reads the list from the top and takes the first row
 * that fits. */
typedef struct skl_cuda_kernel {
    const char *name, *detail;
    int capability, capability_end; /* lowest compute capability, and the first beyond the highest */
    bool tma;                       /* loads tensors by TMA */
    bool two_terms;                 /* multiplies two-term rows, made of f32, mixed types and odd head sizes */
    bool general;                   /* any type, size and stride, without tensor cores */
    skl_dtype dtype;                /* type of q and k, without two_terms */
    uint32_t does;                  /* SKL_DOES_*; _DK and _ORDERED follow from the launchers */
    int64_t dim_max;                /* largest head size; indexers: of the student */
    int64_t small_dim_max;          /* attention: largest size of the smaller head */
    int64_t fused_dim_max;          /* attention: largest head size of the gradients of `fused` */
    int64_t group_max;              /* teacher groups: most heads of a group; 0: no limit */
    int64_t index_heads_max;        /* indexers: most index heads of a student head; 0: no limit */
    int64_t pool_dim_max;           /* indexers: largest head size of a pooled teacher; 0: it cannot be pooled */
    bool softcap;                   /* either side may have a softcap */
    bool linear_link;               /* the student may have a linear link */
    bool reverse;                   /* KL(S || P), too */
    skl_cuda_launcher forward;      /* row results */
    skl_cuda_launcher fused;        /* dq and dk (indexers: dw, too) in one launch; dk is a sum in any order. Of the
                                     * kernels for teacher groups only those of Hopper have it */
    skl_cuda_launcher dq, dk;       /* dq and dk in separate launches, in a fixed order */
    skl_cuda_launcher gradients;    /* strips and indexers: all gradients of a side, in a fixed order */
    skl_cuda_launcher top;          /* statistics: the top keys of rows */
} skl_cuda_kernel;

/* The kernel list, best first; NULL past its end. */
const skl_cuda_kernel *skl_cuda_kernel_at(int32_t index);

/* The last row of the list. Rows of the same name before it do indexers and statistics. */
extern const skl_cuda_kernel skl_cuda_general;

/* Whether a plan can be made for this kernel. Carried attention, joint backwards and statistics belong to plans of
 * other kernels. */
bool skl_cuda_has_plans(const skl_cuda_kernel *kernel);

#ifdef __cplusplus
}
#endif

#endif
