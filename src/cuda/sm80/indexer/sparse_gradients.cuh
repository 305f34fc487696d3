/* Gradients of a sparse indexer by mma.sync, sm_80 and up, from dy, the gradient of its logits (sparse_scores.cuh):
 *
 *   D_g = sum_n dy_n [a_gn > 0] k_n      dq_g = scale w_g D_g      dw_g = scale <q_g, D_g>
 *   entry_dk_n = scale dy_n sum_g (w_g [a_gn > 0]) q_g             what entry n adds to dk
 *
 * Three products per entry and index head: A = q k^T, D and entry_dk; no exponentials. Every product of up to 128
 * heads gathers the keys again and adds to entry_dk in memory.
 *
 *   block      one row; 8 warps share heads and keys: each has 16 heads and 16, 32 or 64 of a stage's 64 keys
 *   registers  queries (DIM / 4), D (at most 64: 256 dimensions in two halves, one after another), A of 16 keys (8),
 *              entry_dk of 16 keys and half of the dimensions (32)
 *   shared     queries, up to 128 heads (32 heads if DIM > 128); 2 stages of 64 keys; the weights that pass the ReLU,
 *              64 keys of every head: at most 88 KB
 *
 *   cp.async   | gather stage n + 1                         | gather stage n + 2
 *   warps      | stage n:                                   | stage n + 1
 *              |   A = q k^T (mma)                          |
 *              |   D += (dy [A > 0]) k (mma)                |
 *              |   w [A > 0] to shared memory               |
 *              |   entry_dk = dy (w [A > 0])^T q (mma)      |
 *
 * dy and the weights of a row are known in advance, so f16 scales them by units of the row, powers of two. */
#ifndef SKL_CUDA_SM80_INDEXER_SPARSE_GRADIENTS_CUH
#define SKL_CUDA_SM80_INDEXER_SPARSE_GRADIENTS_CUH

#include "cuda/sm80/attention/backward.cuh"
#include "cuda/common/strips/gradients.cuh"
#include "cuda/sm80/indexer/sparse_row.cuh"

namespace sm80
{

constexpr int STAGE_KEYS = 64;

template <int DIM> struct sparse_gradient_smem {
    static constexpr int HEADS = DIM > 128 ? 32 : SPARSE_HEADS; /* per product, at most */
    static constexpr int GATED_ROWS = STAGE_ROWS<STAGE_KEYS>;
    smem_rows<DIM> queries[HEADS / STAGE_ROWS<DIM>];
    smem_rows<DIM> stages[STAGES][STAGE_KEYS / STAGE_ROWS<DIM>];
    smem_rows<STAGE_KEYS> gated_weights[(HEADS + GATED_ROWS - 1) / GATED_ROWS]; /* w [A > 0], [head][key] */
    float weights[HEADS];                                                       /* multiples of weight_unit */
    float dy[STAGES][STAGE_KEYS];                                               /* multiples of dy_unit */
    float largest[2];                                                           /* largest |dy|; largest |weight| */
    sparse_row32 row;
};

/* How the warps share a product: each has 16 heads and some of a stage's keys. */
struct warp_layout {
    int warps_m;

    __device__ explicit warp_layout(int heads) : warps_m(heads > 64 ? 8 : heads > 32 ? 4 : 2)
    {
    }
    __device__ int heads() const
    {
        return warps_m * 16;
    }
    __device__ int warp_head() const
    {
        return (int)threadIdx.x / 32 % warps_m * 16;
    }
    __device__ int warp_keys() const
    {
        return STAGE_KEYS / SPARSE_WARPS * warps_m;
    }
    __device__ int warp_key() const
    {
        return (int)threadIdx.x / 32 / warps_m * warp_keys();
    }
};

/* ---- A product of index heads ------------------------------------------------------------------------------- */

/* Up to HEADS index heads of the row, over all of its entries. */
template <typename ELEMENT, int DIM> struct sparse_heads {
    static constexpr int WIDTH = DIM < 128 ? DIM : 128; /* dimensions of D in registers at once: a slice */

    const sparse_params &params;
    sparse_gradient_smem<DIM> &smem;
    row_source<ELEMENT> queries, keys;
    int count;          /* number of heads */
    int64_t first_head; /* first of the row's index heads */
    warp_layout layout;
    const float *dy; /* dy of the row */
    float *entry_dk; /* dk of the row's entries; NULL: not wanted */
    float factor;    /* upstream gradient times scale */
    float dy_unit, weight_unit;

    __device__ void copy_stage(int n) const
    {
        const int entry = n * STAGE_KEYS + (int)threadIdx.x;
        if (threadIdx.x < STAGE_KEYS)
            smem.dy[n % STAGES][threadIdx.x] = entry < smem.row.count ? dy[entry] / dy_unit : 0.0F;
        gather_rows(smem.stages[n % STAGES], STAGE_KEYS, keys, 0,
                    [&](int row) { return smem.row.key(n * STAGE_KEYS + row); });
    }

    /* Loads the queries and weights of the product. All threads call it. */
    __device__ void load_heads() const
    {
        __syncthreads(); /* all threads are done with the previous product */
        gather_rows(smem.queries, layout.heads(), queries, 0, [&](int n) { return n < count ? n : -1; });
        cp_async_commit();
        const int head = (int)threadIdx.x;
        if (head < layout.heads())
            smem.weights[head] =
                head < count ? sparse_weight(params, smem.row, first_head + head) / weight_unit : 0.0F;
        cp_async_wait<0>();
        __syncthreads();
    }

    /* For 16 heads and 16 keys: dy [A > 0] as an operand for D, and w [A > 0] to shared memory for entry_dk. */
    __device__ void gate(uint32_t (&gated_dy)[1][4], const logits<1, 2> &a, const float (&stage_dy)[STAGE_KEYS],
                         int key) const
    {
        constexpr int ROWS = sparse_gradient_smem<DIM>::GATED_ROWS;
        const float2 ones = make_float2(1.0F, 1.0F);
#pragma unroll
        for (int reg = 0; reg < 4; reg++) {
            const float low = a.at[0][reg / 2][reg % 2 * 2], high = a.at[0][reg / 2][reg % 2 * 2 + 1];
            const float2 pair = *(const float2 *)(const void *)&stage_dy[key + acc_column(reg / 2, 0)];
            gated_dy[0][reg] = gate_pair<ELEMENT>(pair, low, high, ones, params.least);
            if (entry_dk == NULL)
                continue;
            const int head = layout.warp_head() + (int)threadIdx.x % 32 / 4 + reg % 2 * 8;
            const float weight = smem.weights[head];
            uint4 &chunk = smem.gated_weights[head / ROWS].chunks[head % ROWS][(key / 8 + reg / 2) ^ head % 8];
            ((uint32_t *)(void *)&chunk)[threadIdx.x % 4] =
                gate_pair<ELEMENT>(make_float2(weight, weight), low, high, ones, params.least);
        }
    }

    /* Stores entry_dk of the stage's keys: 16 keys and half of the slice's dimensions per warp. */
    __device__ void store_entry_dk(int first, int slice, bool add) const
    {
        constexpr int HALF = WIDTH / 2;
        const int warp = (int)threadIdx.x / 32, key = warp / 2 * 16, chunk = (slice * WIDTH + warp % 2 * HALF) / 8;
        const uint32_t weights = logit_b_address<2>(smem.gated_weights[0]);
        const uint32_t rows = at_chunk<DIM>(gradient_b_address(smem.queries[0]), 0, chunk);
        gradient_acc<HALF, 1> sums = {};
#pragma unroll 1
        for (int head = 0; head < layout.heads(); head += 16) {
            uint32_t a[1][4];
            ldmatrix_x4_transposed(a[0], at_chunk<STAGE_KEYS>(weights, head, key / 8));
            multiply_add<ELEMENT, DIM>(sums, a, rows, head);
        }
        const int64_t dim = queries.dim;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = key + (int)threadIdx.x % 32 / 4 + half * 8;
            if (smem.row.key(first + row) < 0)
                continue;
            const float weight = dy[first + row] * factor * weight_unit;
            float *const to = entry_dk + (first + row) * dim;
#pragma unroll
            for (int n = 0; n < HALF / 8; n++) {
                const int c = chunk * 8 + acc_column(n, 0);
                if (c >= dim)
                    continue;
                float2 &pair = *(float2 *)(void *)(to + c);
                const float2 before = add ? pair : make_float2(0.0F, 0.0F);
                pair = make_float2(fmaf(sums.sum[0][n][half * 2], weight, before.x),
                                   fmaf(sums.sum[0][n][half * 2 + 1], weight, before.y));
            }
        }
    }

    /* Sums D over the warps that have the same heads and different keys, in the first of them. */
    __device__ void reduce_key_warps(gradient_acc<WIDTH, 1> &sums) const
    {
        const int warp = (int)threadIdx.x / 32, key_warp = warp / layout.warps_m;
        float *const buffer = (float *)(void *)smem.stages[0] + warp % layout.warps_m * WIDTH * 16 + threadIdx.x % 32;
#pragma unroll 1
        for (int other = 1; other < SPARSE_WARPS / layout.warps_m; other++) {
            __syncthreads(); /* all threads are done with the keys and with the previous sums */
            if (key_warp == other)
#pragma unroll
                for (int e = 0; e < WIDTH / 2; e++)
                    buffer[e * 32] = sums.sum[0][e / 4][e % 4];
            __syncthreads();
            if (key_warp == 0)
#pragma unroll
                for (int e = 0; e < WIDTH / 2; e++)
                    sums.sum[0][e / 4][e % 4] += buffer[e * 32];
        }
    }

    /* Stores dq of a slice of dimensions, and adds <q_g, D_g> of the thread's two heads to dots. */
    __device__ void store_dq(float (&dots)[2], const gradient_acc<WIDTH, 1> &sums, int slice) const
    {
        const skl_problem &p = params.problem;
        const sparse_row32 &row = smem.row;
        const skl_output &dq = params.call.gradients.dq_s;
        const int64_t query = row.sequence.query_begin + row.query;
        const int dim = queries.dim - slice * WIDTH;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int head = layout.warp_head() + (int)threadIdx.x % 32 / 4 + half * 8;
            const auto sum = [&](int n, int parity) { return sums.sum[0][n][half * 2 + parity] * dy_unit; };
            const ELEMENT *const q = queries.rows + min(head, count - 1) * queries.stride + slice * WIDTH;
            dots[half] += dot_of<ELEMENT, WIDTH / 8>(sum, q, dim);
            if (dq.data == NULL || head >= count)
                continue;
            const float weight = smem.weights[head] * weight_unit * factor;
            const int64_t dq_head = row.head * p.index_heads + first_head + head;
            const gradient_columns columns(dq.data, SKL_ROW(dq, row.sequence.batch, dq_head, query) + slice * WIDTH,
                                           skl_grad_dtype(&p, p.dtype_s), dim);
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++)
                columns.store_pair(n, sum(n, 0) * weight, sum(n, 1) * weight, ELEMENT());
        }
    }

    __device__ void store_dw(const float (&dots)[2]) const
    {
        const skl_problem &p = params.problem;
        const sparse_row32 &row = smem.row;
        const skl_output &dw = params.call.gradients.dw_s;
        const int64_t base = SKL_ROW(dw, row.sequence.batch, row.head, row.sequence.query_begin + row.query);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int head = layout.warp_head() + (int)threadIdx.x % 32 / 4 + half * 8;
            if (dw.data != NULL && head < count && threadIdx.x % 4 == 0)
                skl_store(dw.data, skl_grad_dtype(&p, p.dtype_w), base + first_head + head, dots[half] * factor);
        }
    }

    /* Adds the warp's heads and keys to D, and stores entry_dk. */
    __device__ void gemm(gradient_acc<WIDTH, 1> &sums, const row_frags<DIM, 1> &q_frags, int slice) const
    {
        const int stages = (smem.row.count + STAGE_KEYS - 1) / STAGE_KEYS;
        copy_stage(0);
        cp_async_commit();
#pragma unroll 1
        for (int n = 0; n < stages; n++) {
            cp_async_wait<0>();
            __syncthreads(); /* this stage is complete, and the other one is free */
            if (n + 1 < stages)
                copy_stage(n + 1);
            cp_async_commit();
            const smem_rows<DIM> &rows = smem.stages[n % STAGES][0];
            const uint32_t b_address = at_chunk<DIM>(gradient_b_address(rows), 0, slice * WIDTH / 8);
#pragma unroll 1
            for (int key = layout.warp_key(); key < layout.warp_key() + layout.warp_keys(); key += 16) {
                logits<1, 2> a;
                multiply<ELEMENT>(a, q_frags, logit_b_address<2>(rows), key);
                uint32_t gated_dy[1][4];
                gate(gated_dy, a, smem.dy[n % STAGES], key);
                multiply_add<ELEMENT, DIM>(sums, gated_dy, b_address, key);
            }
            if (entry_dk == NULL)
                continue;
            __syncthreads(); /* gated_weights is complete */
            store_entry_dk(n * STAGE_KEYS, slice, first_head > 0);
        }
        __syncthreads(); /* all threads are done with the stages */
    }

    __device__ void run() const
    {
        load_heads();
        row_frags<DIM, 1> q_frags;
        const uint32_t address = a_address(smem.queries[0]);
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
            ldmatrix_x4(q_frags.a[0][k], at_chunk<DIM>(address, layout.warp_head(), 2 * k));
        float dots[2] = {};
#pragma unroll 1
        for (int slice = 0; slice * WIDTH < queries.dim; slice++) {
            gradient_acc<WIDTH, 1> sums = {};
            gemm(sums, q_frags, slice);
            reduce_key_warps(sums);
            if (threadIdx.x / 32 < (unsigned)layout.warps_m)
                store_dq(dots, sums, slice);
            __syncthreads(); /* all threads are done with the reduced sums */
        }
        if (threadIdx.x / 32 < (unsigned)layout.warps_m)
            store_dw(dots);
    }
};

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

/* Finds the largest finite magnitudes of the row's dy and weights: smem.largest. */
template <int DIM>
__device__ inline void find_largest(sparse_gradient_smem<DIM> &smem, const sparse_params &params, const float *dy)
{
    if (threadIdx.x < 2)
        smem.largest[threadIdx.x] = 0.0F;
    __syncthreads();
    float largest_dy = 0.0F, largest_weight = 0.0F;
    for (int n = (int)threadIdx.x; n < smem.row.count; n += SPARSE_THREADS)
        largest_dy = fabsf(dy[n]) < INFINITY ? fmaxf(largest_dy, fabsf(dy[n])) : largest_dy;
    for (int64_t g = threadIdx.x; g < params.problem.index_heads; g += SPARSE_THREADS) {
        const float magnitude = fabsf(sparse_weight(params, smem.row, g));
        largest_weight = magnitude < INFINITY ? fmaxf(largest_weight, magnitude) : largest_weight;
    }
    largest_dy = warp_max(largest_dy);
    largest_weight = warp_max(largest_weight);
    if (threadIdx.x % 32 == 0) { /* floats that are not negative have the order of their bits */
        atomicMax((int *)(void *)&smem.largest[0], __float_as_int(largest_dy));
        atomicMax((int *)(void *)&smem.largest[1], __float_as_int(largest_weight));
    }
    __syncthreads();
}

/* The gradients of a row without valid entries are 0, whatever its weights and its upstream gradient are. */
__device__ inline void clear_row(const sparse_params &params, const sparse_row32 &row)
{
    const skl_problem &p = params.problem;
    const skl_output &dq = params.call.gradients.dq_s, &dw = params.call.gradients.dw_s;
    const int64_t query = row.sequence.query_begin + row.query, head = row.head * p.index_heads;
    for (int64_t n = threadIdx.x; dq.data != NULL && n < p.index_heads * p.dim_s; n += SPARSE_THREADS)
        skl_store(dq.data, skl_grad_dtype(&p, p.dtype_s),
                  SKL_ROW(dq, row.sequence.batch, head + n / p.dim_s, query) + n % p.dim_s, 0.0F);
    for (int64_t g = threadIdx.x; dw.data != NULL && g < p.index_heads; g += SPARSE_THREADS)
        skl_store(dw.data, skl_grad_dtype(&p, p.dtype_w), SKL_ROW(dw, row.sequence.batch, row.head, query) + g, 0.0F);
}

template <typename ELEMENT, int DIM>
__global__ void __launch_bounds__(SPARSE_THREADS, 1)
    sparse_gradient_kernel(const __grid_constant__ sparse_params params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    sparse_gradient_smem<DIM> &smem = *(sparse_gradient_smem<DIM> *)(void *)raw;
    const skl_problem &p = params.problem;
    const sparse_row32 &row = smem.row;
    const float *const dy = params.dy + blockIdx.x * p.top_k;
    find_row(smem.row, params, params.row_first + blockIdx.x);
    if (!row.exists)
        return;
    trim_indices(smem.row);
    if (row.count == 0) {
        clear_row(params, row);
        return;
    }
    find_largest(smem, params, dy);
    const skl_input &upstream = params.call.inputs.grad_kl;
    const float grad = upstream.data != NULL ? skl_row_value(&upstream, &row.sequence, row.head, row.query) : 1.0F;
#pragma unroll 1
    for (int64_t g = 0; g < p.index_heads; g += sparse_gradient_smem<DIM>::HEADS) {
        const int count = (int)skl_min(p.index_heads - g, sparse_gradient_smem<DIM>::HEADS);
        const sparse_heads<ELEMENT, DIM> heads = {
            params,
            smem,
            heads_of<ELEMENT>(params.student, row, row.head * p.index_heads + g),
            keys_of_row<ELEMENT>(params.student, row, row.head / params.student.heads_per_key),
            count,
            g,
            warp_layout(count),
            dy,
            params.entry_dk != NULL ? params.entry_dk + blockIdx.x * p.top_k * p.dim_s : NULL,
            grad * p.scale_s,
            unit_for(smem.largest[0]),
            unit_for(smem.largest[1])};
        heads.run();
    }
}

} // namespace sm80

#endif
