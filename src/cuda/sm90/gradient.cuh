/* What the gradient kernels on Hopper share. "Own" is the argument of the KL that gets its gradients, "other" the
 * remaining one. */
#ifndef SKL_CUDA_SM90_GRADIENT_CUH
#define SKL_CUDA_SM90_GRADIENT_CUH

#include "cuda/sm80/facts.cuh"
#include "cuda/sm90/tile.cuh"

namespace sm90
{

template <bool SECOND> __device__ inline const skl_cuda_argument &own_of(const skl_cuda_params &params)
{
    return SECOND ? params.two : params.one;
}

template <bool SECOND> __device__ inline const skl_cuda_argument &other_of(const skl_cuda_params &params)
{
    return SECOND ? params.one : params.two;
}

/* Log2 of a probability, and what its cap lets through of a gradient. */
struct log_probability {
    float value, slope;
};

/* From a product of a query and a key. CAPPED: the argument may have a softcap. */
template <bool CAPPED>
__device__ inline log_probability log_of(float product, const skl_cuda_argument &argument, float minus_lse)
{
    if (!CAPPED || !argument.capped)
        return {fmaf(product, argument.scale, minus_lse), 1.0F};
    const float ratio = tanhf(product * argument.scale);
    return {fmaf(argument.softcap_2, ratio, minus_lse), 1.0F - ratio * ratio};
}

/* Two threads look at a row as the copy engine leaves it: whether all of it is finite. If not, or if it is not
 * wanted, it becomes 0. Threads of different rows begin at different chunks: so no bank is met twice. */
template <typename ELEMENT, int DIM, int ROWS>
__device__ inline bool clean_row(unsigned char (&halves)[DIM / 64][ROWS][128], int row, bool wanted)
{
    constexpr unsigned CHUNKS = DIM / 16; /* of 16 bytes, a thread's */
    const unsigned first = threadIdx.x % 2 * CHUNKS;
    unsigned char *const mine = &halves[first / 8][row][first % 8 * 16];
    bool finite = true;
#pragma unroll
    for (unsigned c = 0; c < CHUNKS; c++)
        finite = all_finite<ELEMENT>(*(const uint4 *)(const void *)(mine + (c ^ row % CHUNKS) * 16)) && finite;
    finite = __shfl_xor_sync(~0U, (int)finite, 1) && finite;
    if (!finite || !wanted)
#pragma unroll
        for (unsigned c = 0; c < CHUNKS; c++)
            *(uint4 *)(void *)(mine + c * 16) = make_uint4(0, 0, 0, 0);
    return finite;
}

/* Elements of a gradient's row that the thread holds; `half` is that of own_row. */
template <typename OUT, int BLOCKS>
__device__ inline void store_elements(OUT *row, int dim, const float (&x)[BLOCKS][4], int half, float factor)
{
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++)
            if (column_of(n, parity) < dim)
                row[column_of(n, parity)] = (OUT)(x[n][half * 2 + parity] * factor);
}

/* The same, in the gradient's type; `at`: the row's first element. */
template <typename ELEMENT, int BLOCKS>
__device__ inline void store_row(void *gradient, int64_t at, const skl_side &side, const float (&x)[BLOCKS][4],
                                 int half, float factor)
{
    if (side.grad_dtype == SKL_F32)
        store_elements((float *)gradient + at, (int)side.dim, x, half, factor);
    else
        store_elements((ELEMENT *)gradient + at, (int)side.dim, x, half, factor);
}

} // namespace sm90

#endif
