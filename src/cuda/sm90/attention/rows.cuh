/* Rows of the kernel list for attention on Hopper.
 *
 *     SKL_SM90_FUSED(type, head size, cap)     forward, fused backward (dq and dk), deterministic dk
 *     SKL_SM90_WIDE(type, head size, cap)      forward, dq, dk
 *     SKL_SM90_PAIR(type, larger, smaller)     forward, fused backward of at most 128 dimensions
 *
 * Softcap kernels are separate and compile 1.5 times slower, so they exist only where a published model needs one:
 * bf16 heads of 128 and 256 dimensions, and f32. bf16 heads of 64 and 192 with a softcap run padded on these, f16
 * heads on sm80. No model has f16 heads of 192 dimensions, so these run padded to 256.
 *
 * A pair serves head sizes that differ between teacher and student, whichever is larger, or a size between those of
 * the other rows. It has no softcaps. The next row that fits has what a pair lacks, with padding. */
#include "cuda/common/kernel_row.cuh"
#include "cuda/sm90/attention/backward_wide.cuh"
#include "cuda/sm90/attention/dk.cuh"
#include "cuda/sm90/attention/forward.cuh"
#include "cuda/sm90/attention/fused_backward.cuh"

typedef sm90::two_term_f32 skl_element_f32;

#define SKL_SM90_FUSED(type, dim, cap)                                                                               \
    SKL_KERNEL(                                                                                                      \
        sm90, type, dim, "dim <= " #dim SKL_DETAIL_##cap, .does = SKL_DOES_ATTENTION, .dim_max = dim,                \
        .small_dim_max = dim, .fused_dim_max = dim, .softcap = SKL_SOFTCAP_##cap, .linear_link = SKL_SOFTCAP_##cap,  \
        .reverse = true,                                                                                             \
        .forward = SKL_LAUNCHER(sm90, type, dim, sm90::launch_forward<SKL_ELEMENT(type), dim, SKL_SOFTCAP_##cap>),   \
        .fused =                                                                                                     \
            SKL_LAUNCHER(sm90, type, dim, sm90::launch_fused_backward<SKL_ELEMENT(type), dim, SKL_SOFTCAP_##cap>),   \
        .dk = SKL_LAUNCHER(sm90, type, dim, sm90::launch_dk<SKL_ELEMENT(type), dim, SKL_SOFTCAP_##cap>))

#define SKL_SM90_WIDE(type, dim, cap)                                                                                \
    SKL_KERNEL(                                                                                                      \
        sm90, type, dim, "dim <= " #dim SKL_DETAIL_##cap, .does = SKL_DOES_ATTENTION, .dim_max = dim,                \
        .small_dim_max = dim, .softcap = SKL_SOFTCAP_##cap, .linear_link = SKL_SOFTCAP_##cap, .reverse = true,       \
        .forward = SKL_LAUNCHER(sm90, type, dim, sm90::launch_forward<SKL_ELEMENT(type), dim, SKL_SOFTCAP_##cap>),   \
        .dq = SKL_LAUNCHER(sm90, type, dim, sm90::launch_wide<SKL_ELEMENT(type), dim, false, SKL_SOFTCAP_##cap>),    \
        .dk = SKL_LAUNCHER(sm90, type, dim, sm90::launch_wide<SKL_ELEMENT(type), dim, true, SKL_SOFTCAP_##cap>))

#define SKL_SM90_PAIR(type, large, small)                                                                            \
    SKL_KERNEL(sm90, type, large##_##small, "dim <= " #large " and <= " #small SKL_DETAIL_plain,                     \
               .does = SKL_DOES_ATTENTION, .dim_max = large, .small_dim_max = small,                                 \
               .fused_dim_max = (large) <= SKL_SM90_FUSED_DIM_MAX ? (large) : (small), .reverse = true,              \
               .forward = SKL_LAUNCHER(sm90, type, large##_##small,                                                  \
                                       sm90::launch_forward_pair<SKL_ELEMENT(type), large, small>),                  \
               .fused = SKL_LAUNCHER(sm90, type, large##_##small,                                                    \
                                     sm90::launch_fused_pair<SKL_ELEMENT(type), large, small>))
