/* Gradients of an indexer over a list of keys, by mma.sync, sm_80 and up, from the gradient of its logits
 * (sparse_scores.cuh):
 *
 *   D_g = sum_n dy_n [a_gn > 0] k_n      dq_g = scale w_g D_g      dw_g = scale <q_g, D_g>
 *   part_n = scale dy_n sum_g (w_g [a_gn > 0]) q_g                 what entry n adds to dk
 *
 *   block     a row; 8 warps, each 16 heads and 16, 32 or 64 of the stage's 64 keys, which share out the heads
 *   regs      own queries (DIM / 4), D (64 at most: of 256 dimensions one half after the other), A of 16 keys (8),
 *             parts of 16 keys and half of the dimensions (32)
 *   shared    queries, up to 128 heads (32 of more than 128 dimensions); 2 stages of 64 keys; what of the weights
 *             passes the ReLU, 64 keys of every head: 88 KB at most
 *
 *   stage n + 1 is gathered  |  A = q k^T of stage n says what passes;  D += (dy [A > 0]) k
 *                            |  (w [A > 0]) through shared memory, transposed, times q: parts of the stage's keys
 *
 * A row's dy and weights are known before: f16 takes them in units of the row, powers of two. */
#ifndef SKL_CUDA_SM80_INDEXER_SPARSE_GRADIENTS_CUH
#define SKL_CUDA_SM80_INDEXER_SPARSE_GRADIENTS_CUH

#include "cuda/sm80/attention/backward.cuh"
#include "cuda/common/indexer/strip_gradients.cuh"
#include "cuda/sm80/indexer/sparse_row.cuh"

namespace sm80
{

constexpr int PART_KEYS = 64; /* of a stage */

template <int DIM> struct sparse_gradient_smem {
    static constexpr int HEADS = DIM > 128 ? 32 : SPARSE_HEADS; /* of a product, at most */
    static constexpr int PASSING_ROWS = STAGE_ROWS<PART_KEYS>;
    staged_rows<DIM> queries[HEADS / STAGE_ROWS<DIM>];
    staged_rows<DIM> stages[STAGES][PART_KEYS / STAGE_ROWS<DIM>];
    staged_rows<PART_KEYS> passing[(HEADS + PASSING_ROWS - 1) / PASSING_ROWS]; /* [head][key] */
    float weights[HEADS];                                                      /* in their unit */
    float dy[STAGES][PART_KEYS];                                               /* in its unit */
    float largest[2];                                                          /* of dy, of the weights */
    sparse_row32 place;
};

/* 2^e that brings `largest` to 2^14 .. 2^15; 1 for what is 0 or not finite. */
__device__ inline float unit_for(float largest)
{
    constexpr int ROOM = 14;
    const int exponent = (int)(__float_as_uint(largest) >> 23) - 127; /* 2^exponent <= largest */
    return largest > 0.0F && largest < INFINITY ? power_of_2(max(exponent - ROOM, -126)) : 1.0F;
}

/* How the warps share a product of so many heads: 16 each, and keys of a stage. */
struct head_shape {
    int warps_m;

    __device__ explicit head_shape(int heads) : warps_m(heads > 64 ? 8 : heads > 32 ? 4 : 2)
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
        return PART_KEYS / SPARSE_WARPS * warps_m;
    }
    __device__ int warp_key() const
    {
        return (int)threadIdx.x / 32 / warps_m * warp_keys();
    }
};

/* ---- A product of index heads ------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM> struct sparse_heads {
    static constexpr int WIDTH = DIM < 128 ? DIM : 128; /* dimensions of D that are summed up together */

    const sparse_params &params;
    sparse_gradient_smem<DIM> &smem;
    row_source<ELEMENT> queries, keys;
    int count;          /* of heads */
    int64_t first_head; /* of the row's index heads */
    head_shape shape;
    const float *dy; /* of the row */
    float *parts;    /* of the row; NULL: not wanted */
    float factor;    /* upstream gradient times scale */
    float dy_unit, weight_unit;

    __device__ void copy_stage(int n) const
    {
        const int entry = n * PART_KEYS + (int)threadIdx.x;
        if (threadIdx.x < PART_KEYS)
            smem.dy[n % STAGES][threadIdx.x] = entry < smem.place.count ? dy[entry] / dy_unit : 0.0F;
        gather_rows(smem.stages[n % STAGES], PART_KEYS, keys, 0,
                    [&](int row) { return smem.place.key(n * PART_KEYS + row); });
    }

    /* Queries and weights of the product, for all threads. */
    __device__ void begin() const
    {
        __syncthreads(); /* nobody looks at the last product any more */
        gather_rows(smem.queries, shape.heads(), queries, 0, [&](int n) { return n < count ? n : -1; });
        cp_async_commit();
        const int head = (int)threadIdx.x;
        if (head < shape.heads())
            smem.weights[head] =
                head < count ? sparse_weight(params, smem.place, first_head + head) / weight_unit : 0.0F;
        cp_async_wait<0>();
        __syncthreads();
    }

    /* What passes of 16 heads and 16 keys: as an operand for D, and to shared memory for parts. */
    __device__ void pass(uint32_t (&h)[1][4], const logits<1, 2> &a, const float (&stage_dy)[PART_KEYS],
                         int key) const
    {
        constexpr int ROWS = sparse_gradient_smem<DIM>::PASSING_ROWS;
        const float2 ones = make_float2(1.0F, 1.0F);
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const float low = a.at[0][part / 2][part % 2 * 2], high = a.at[0][part / 2][part % 2 * 2 + 1];
            const float2 pair = *(const float2 *)(const void *)&stage_dy[key + acc_column(part / 2, 0)];
            h[0][part] = weigh_pair<ELEMENT>(pair, low, high, ones, params.least);
            if (parts == NULL)
                continue;
            const int head = shape.warp_head() + (int)threadIdx.x % 32 / 4 + part % 2 * 8;
            const float weight = smem.weights[head];
            uint4 &chunk = smem.passing[head / ROWS].chunks[head % ROWS][(key / 8 + part / 2) ^ head % 8];
            ((uint32_t *)(void *)&chunk)[threadIdx.x % 4] =
                weigh_pair<ELEMENT>(make_float2(weight, weight), low, high, ones, params.least);
        }
    }

    /* Parts of the stage's keys: 16 keys and half of the slice's dimensions a warp. */
    __device__ void store_parts(int first, int slice, bool add) const
    {
        constexpr int HALF = WIDTH / 2;
        const int warp = (int)threadIdx.x / 32, key = warp / 2 * 16, chunk = (slice * WIDTH + warp % 2 * HALF) / 8;
        const uint32_t weights = logit_operand<2>(smem.passing[0]);
        const uint32_t rows = at_chunk<DIM>(gradient_operand(smem.queries[0]), 0, chunk);
        own_gradient<HALF, 1> sums = {};
#pragma unroll 1
        for (int head = 0; head < shape.heads(); head += 16) {
            uint32_t a[1][4];
            ldmatrix_x4_transposed(a[0], at_chunk<PART_KEYS>(weights, head, key / 8));
            add_operand<ELEMENT, DIM>(sums, a, rows, head);
        }
        const int64_t dim = queries.dim;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = key + (int)threadIdx.x % 32 / 4 + half * 8;
            if (smem.place.key(first + row) < 0)
                continue;
            const float weight = dy[first + row] * factor * weight_unit;
            float *const to = parts + (first + row) * dim;
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

    /* Warps that have the same heads add up what their keys gave, in the first one of them. */
    __device__ void merge_keys(own_gradient<WIDTH, 1> &sums) const
    {
        const int warp = (int)threadIdx.x / 32, place = warp / shape.warps_m;
        float *const area = (float *)(void *)smem.stages[0] + warp % shape.warps_m * WIDTH * 16 + threadIdx.x % 32;
#pragma unroll 1
        for (int other = 1; other < SPARSE_WARPS / shape.warps_m; other++) {
            __syncthreads(); /* nobody looks at keys, or at the last sums, any more */
            if (place == other)
#pragma unroll
                for (int e = 0; e < WIDTH / 2; e++)
                    area[e * 32] = sums.sum[0][e / 4][e % 4];
            __syncthreads();
            if (place == 0)
#pragma unroll
                for (int e = 0; e < WIDTH / 2; e++)
                    sums.sum[0][e / 4][e % 4] += area[e * 32];
        }
    }

    /* dq of a slice of dimensions; adds to dots <q_g, D_g> of the thread's two heads. */
    __device__ void store_queries(float (&dots)[2], const own_gradient<WIDTH, 1> &sums, int slice) const
    {
        const skl_problem &p = params.problem;
        const sparse_row32 &at = smem.place;
        const skl_output &dq = params.call.gradients.dq_s;
        const int64_t query = at.sequence.query_begin + at.query;
        const int dim = queries.dim - slice * WIDTH;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int head = shape.warp_head() + (int)threadIdx.x % 32 / 4 + half * 8;
            const auto sum = [&](int n, int parity) { return sums.sum[0][n][half * 2 + parity] * dy_unit; };
            const ELEMENT *const own = queries.rows + min(head, count - 1) * queries.stride + slice * WIDTH;
            dots[half] += dot_of<ELEMENT, WIDTH / 8>(sum, own, dim);
            if (dq.data == NULL || head >= count)
                continue;
            const float weight = smem.weights[head] * weight_unit * factor;
            const int64_t row = at.head * p.index_heads + first_head + head;
            const int64_t base = SKL_ROW(dq, at.sequence.batch, row, query) + slice * WIDTH;
            const skl_dtype dtype = skl_grad_dtype(&p, p.dtype_s);
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++)
                if (acc_column(n, 0) < dim)
                    store_pair<ELEMENT>(dq, base + acc_column(n, 0), dtype, sum(n, 0) * weight, sum(n, 1) * weight);
        }
    }

    __device__ void store_weights(const float (&dots)[2]) const
    {
        const skl_problem &p = params.problem;
        const sparse_row32 &at = smem.place;
        const skl_output &dw = params.call.gradients.dw_s;
        const int64_t row = SKL_ROW(dw, at.sequence.batch, at.head, at.sequence.query_begin + at.query);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int head = shape.warp_head() + (int)threadIdx.x % 32 / 4 + half * 8;
            if (dw.data != NULL && head < count && threadIdx.x % 4 == 0)
                skl_store(dw.data, skl_grad_dtype(&p, p.dtype_w), row + first_head + head, dots[half] * factor);
        }
    }

    /* D of the warp's heads and keys, and parts. */
    __device__ void gemm(own_gradient<WIDTH, 1> &sums, const own_rows<DIM, 1> &own, int slice) const
    {
        const int stages = (smem.place.count + PART_KEYS - 1) / PART_KEYS;
        copy_stage(0);
        cp_async_commit();
#pragma unroll 1
        for (int n = 0; n < stages; n++) {
            cp_async_wait<0>();
            __syncthreads(); /* this stage is complete, and the other one free */
            if (n + 1 < stages)
                copy_stage(n + 1);
            cp_async_commit();
            const staged_rows<DIM> &rows = smem.stages[n % STAGES][0];
            const uint32_t to = at_chunk<DIM>(gradient_operand(rows), 0, slice * WIDTH / 8);
#pragma unroll 1
            for (int key = shape.warp_key(); key < shape.warp_key() + shape.warp_keys(); key += 16) {
                logits<1, 2> a;
                multiply<ELEMENT>(a, own, logit_operand<2>(rows), key);
                uint32_t h[1][4];
                pass(h, a, smem.dy[n % STAGES], key);
                add_operand<ELEMENT, DIM>(sums, h, to, key);
            }
            if (parts == NULL)
                continue;
            __syncthreads(); /* what passes is complete */
            store_parts(n * PART_KEYS, slice, first_head > 0);
        }
        __syncthreads(); /* nobody looks at the stages any more */
    }

    __device__ void run() const
    {
        begin();
        own_rows<DIM, 1> own;
        const uint32_t operand = own_operand(smem.queries[0]);
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
            ldmatrix_x4(own.a[0][k], at_chunk<DIM>(operand, shape.warp_head(), 2 * k));
        float dots[2] = {};
#pragma unroll 1
        for (int slice = 0; slice * WIDTH < queries.dim; slice++) {
            own_gradient<WIDTH, 1> sums = {};
            gemm(sums, own, slice);
            merge_keys(sums);
            if (threadIdx.x / 32 < (unsigned)shape.warps_m)
                store_queries(dots, sums, slice);
            __syncthreads(); /* nobody looks at merged sums any more */
        }
        if (threadIdx.x / 32 < (unsigned)shape.warps_m)
            store_weights(dots);
    }
};

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

/* Largest finite magnitudes of the row's dy and weights, to block.largest. */
template <int DIM>
__device__ inline void find_largest(sparse_gradient_smem<DIM> &smem, const sparse_params &params, const float *dy)
{
    if (threadIdx.x < 2)
        smem.largest[threadIdx.x] = 0.0F;
    __syncthreads();
    float largest = 0.0F, weight = 0.0F;
    for (int n = (int)threadIdx.x; n < smem.place.count; n += SPARSE_THREADS)
        largest = fabsf(dy[n]) < INFINITY ? fmaxf(largest, fabsf(dy[n])) : largest;
    for (int64_t g = threadIdx.x; g < params.problem.index_heads; g += SPARSE_THREADS) {
        const float size = fabsf(sparse_weight(params, smem.place, g));
        weight = size < INFINITY ? fmaxf(weight, size) : weight;
    }
    largest = warp_max(largest);
    weight = warp_max(weight);
    if (threadIdx.x % 32 == 0) { /* as integers: none of them is negative */
        atomicMax((int *)(void *)&smem.largest[0], __float_as_int(largest));
        atomicMax((int *)(void *)&smem.largest[1], __float_as_int(weight));
    }
    __syncthreads();
}

/* A row that lists no key: its gradients are 0, whatever its weights and its upstream gradient are. */
__device__ inline void clear_row(const sparse_params &params, const sparse_row32 &at)
{
    const skl_problem &p = params.problem;
    const skl_output &dq = params.call.gradients.dq_s, &dw = params.call.gradients.dw_s;
    const int64_t query = at.sequence.query_begin + at.query, head = at.head * p.index_heads;
    for (int64_t n = threadIdx.x; dq.data != NULL && n < p.index_heads * p.dim_s; n += SPARSE_THREADS)
        skl_store(dq.data, skl_grad_dtype(&p, p.dtype_s),
                  SKL_ROW(dq, at.sequence.batch, head + n / p.dim_s, query) + n % p.dim_s, 0.0F);
    for (int64_t g = threadIdx.x; dw.data != NULL && g < p.index_heads; g += SPARSE_THREADS)
        skl_store(dw.data, skl_grad_dtype(&p, p.dtype_w), SKL_ROW(dw, at.sequence.batch, at.head, query) + g, 0.0F);
}

template <typename ELEMENT, int DIM>
__global__ void __launch_bounds__(SPARSE_THREADS, 1)
    sparse_gradient_kernel(const __grid_constant__ sparse_params params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    sparse_gradient_smem<DIM> &smem = *(sparse_gradient_smem<DIM> *)(void *)raw;
    const skl_problem &p = params.problem;
    const sparse_row32 &at = smem.place;
    const float *const dy = params.dy + blockIdx.x * p.top_k;
    find_row(smem.place, params, params.row_first + blockIdx.x);
    if (!at.exists)
        return;
    trim_indices(smem.place);
    if (at.count == 0) {
        clear_row(params, at);
        return;
    }
    find_largest(smem, params, dy);
    const skl_input &upstream = params.call.inputs.grad_kl;
    const float grad = upstream.data != NULL ? skl_row_value(&upstream, &at.sequence, at.head, at.query) : 1.0F;
#pragma unroll 1
    for (int64_t g = 0; g < p.index_heads; g += sparse_gradient_smem<DIM>::HEADS) {
        const int count = (int)skl_min(p.index_heads - g, sparse_gradient_smem<DIM>::HEADS);
        const sparse_heads<ELEMENT, DIM> heads = {
            params,
            smem,
            heads_of<ELEMENT>(params.student, at, at.head * p.index_heads + g),
            gathered_keys_of<ELEMENT>(params.student, at, at.head / params.student.heads_per_key),
            count,
            g,
            head_shape(count),
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
