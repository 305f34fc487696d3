/* Attention that carries its KL, on Hopper's tensor cores (sm_90a): the backward of the student's attention and the
 * gradient of its KL in one pass. bf16 and f16, heads of up to 128, one teacher head per student head.
 *
 *   dP = dO V^T    S = 2^(Y - LSE_s)    P = 2^(X - LSE_t)    dS = S (dP - D) + g (S - P)
 *   dv = S^T dO    dk = scale dS^T Q    dq = scale dS K
 *
 * Six products instead of the nine of an attention backward and a one-pass call.
 *
 * Bound: shared memory. At DIM = 128 it takes 4,000 clocks per 128 keys x 64 queries, tensor cores 3,072,
 * exponentials 1,024.
 *
 *   block      2 consumer warpgroups of 64 keys, and a producer warpgroup of which 3 warps work; one block per SM
 *   registers  240 per consumer thread: dk and dv (DIM), Y or X (32), dP or T (32), S (16), 32 for the rest; dq
 *              (DIM / 2) takes those of Y and T, while dv and dk are in flight
 *   shared     K and V of the tile, the teacher's K; stages of 64 queries of Q, dO and the teacher's Q; dS of two
 *              stages; 64 dimensions of dq of a stage in f32: 226 KB at DIM = 128
 *
 *   consumer   wgmma       | Y n | dP n  | X n      | dv n        | dq n-1: low | high    | dk n     | Y n+1 ...
 *              other pipes |     | exp S | T =      | exp P, dS = |             | low to  | high to  |
 *                          |     |       | S (dP -  | T - g P     |             | shared, | shared,  |
 *                          |     |       | D + g)   |             |             | TMA     | TMA      |
 *
 * Keys are rows of all logits, as in dk.cuh, so that S^T is an A operand from registers, and dk and dv stay in
 * registers. dS of both warpgroups goes through shared memory, because dq sums over all keys of the tile. The
 * warpgroups alternate with dq: one multiplies that of even stages, the other that of odd stages. Each does so one
 * stage later. So they need not meet, and drift apart: one computes exponentials while the other multiplies.
 *
 * No product waits for dq's way out. The picture shows a stage with dq at DIM = 128: dq is issued behind dv without a
 * wait, in halves of 64 dimensions, and dk behind it. The low half leaves while the high half is multiplied, the high
 * half leaves during dk, and dk is still in flight when Y of the next stage is issued. At DIM = 64 dq has one half,
 * and dk, whose dS comes from registers, follows once dq is complete. In a stage without dq, dk follows dv at
 * DIM = 64; at DIM = 128 the next stage multiplies it behind Y.
 *
 * The low half leaves by way of smem.dq, the high half by way of the dS that it was multiplied from. That dS is free
 * when both warpgroups have multiplied their dk by it: one waits for that dk and for Y of the next stage before it
 * arrives at ds_empty, the other waits for its dk before it issues dq. TMA adds dq to f32 sums in global memory, in
 * any order, so its last bits differ between runs.
 *
 * Row stats belong to columns of the logits: a thread loads those of 16 queries per stage. The teacher's LSE includes
 * the weight g, which saves a load; only masked stages know its sign. */
#ifndef SKL_CUDA_SM90_ATTENTION_ATTENTION_BACKWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_ATTENTION_BACKWARD_CUH

#include "cuda/sm90/attention/attention_backward_keys.cuh"
#include "cuda/sm90/launch.cuh"

namespace sm90
{

/* ---- Stores ------------------------------------------------------------------------------------------------- */

/* Rows of whole 16-byte vectors, by way of shared memory. */
template <typename WARPGROUP, typename ELEMENT, int BLOCKS>
__device__ inline void store_vectors(const WARPGROUP &of, ELEMENT *rows, int64_t stride, int64_t stored,
                                     const float (&sum)[BLOCKS][4], float factor)
{
    auto &smem = of.smem;
    unsigned char(*const staged)[128] = &smem.dq[of.warpgroup][of.warp * 16];
    const int lane = (int)(threadIdx.x % 32), row = lane % 16, first = of.warpgroup * 64 + of.warp * 16;
#pragma unroll
    for (int slab = 0; slab < BLOCKS / 8; slab++) {
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *const from = &sum[slab * 8 + n + i / 2][i % 2 * 2];
                pairs[i] = pack(from[0] * factor, from[1] * factor, ELEMENT());
            }
            stmatrix_x4(shared_address(&staged[row][((n + lane / 16) ^ row % 8) * 16]), pairs);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = i * 4 + lane / 8, chunk = lane % 8, column = slab * 64 + chunk * 8;
            const int64_t key = smem.first + first + r;
            const uint4 vector = *(const uint4 *)(const void *)&staged[r][(chunk ^ r % 8) * 16];
            if (key < stored && column < of.params.b.dim)
                *(uint4 *)(void *)(rows + key * stride + column) =
                    first + r < smem.count ? vector : make_uint4(0, 0, 0, 0); /* padding keys */
        }
    }
}

/* Stores dk or dv of a warpgroup's keys. */
template <typename ELEMENT, typename WARPGROUP, int BLOCKS>
__device__ inline void store_sum(const WARPGROUP &of, const skl_output &out, float (&sum)[BLOCKS][4], float factor)
{
    const attention_backward_params &params = of.params;
    auto &smem = of.smem;
    if (out.data == NULL)
        return;
    const skl_sequence &s = smem.sequence;
    const int64_t stored = params.problem.packed ? s.key_count : params.problem.len_k;
    const int64_t base = SKL_ROW(out, s.batch, (int64_t)smem.key_head, s.key_begin);
    const skl_side side = skl_student_of(&params.problem, &params.call);
    const int64_t offsets = (int64_t)(uintptr_t)out.data / (int64_t)sizeof(ELEMENT) | base | out.stride_row;
    if (side.grad_dtype != SKL_F32 && offsets % 8 == 0) {
        store_vectors(of, (ELEMENT *)out.data + base, out.stride_row, stored, sum, factor);
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = acc_row<1>(0, half);
        const int64_t key = smem.first + row;
#pragma unroll
        for (int e = 0; e < BLOCKS * 2 && row >= smem.count; e++)
            sum[e / 2][half * 2 + e % 2] = 0.0F; /* padding keys */
        if (key < stored)
            store_row<ELEMENT>(out.data, base + key * out.stride_row, side, sum, half, factor);
    }
}

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM, int DIM_A>
__global__ void __launch_bounds__(ATTENTION_BACKWARD_THREADS, 1)
    attention_backward_kernel(const __grid_constant__ attention_backward_params params,
                              const __grid_constant__ attention_backward_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    attention_backward_smem<DIM, DIM_A> &smem = *(attention_backward_smem<DIM, DIM_A> *)(void *)raw;
    const skl_problem &p = params.problem;
    const unsigned tiles = (unsigned)skl_ceil_div(p.len_k, TILE_KEYS);
    const tile_coord tile = tile_of_block((unsigned)p.key_heads_s, tiles, (unsigned)params.head_group);
    if (tile.sequence >= p.batch)
        return;
    const skl_sequence s = device_sequence(params, tile.sequence);
    const int64_t first = (int64_t)tile.tile * TILE_KEYS, last = skl_min(first + TILE_KEYS, s.key_count) - 1;
    if (first >= (p.packed ? s.key_count : p.len_k))
        return;
    row_stream queries = {};
    if (last >= first)
        queries = make_row_stream(stream_for(skl_query_band(&p, &s), first, last), s.query_begin);
    if (threadIdx.x == 0) {
        smem.sequence = s;
        smem.first = (int)first;
        smem.batch = (int)s.batch;
        smem.count = (int)(last + 1 - first);
        smem.key_head = tile.head;
        smem.heads = params.b.heads_per_key;
        smem.queries = queries;
        smem.poisoned = 0;
        smem.visible = queries.band;
        if (smem.count < TILE_KEYS)
            smem.queries.masked_stages = smem.queries.stages;
        smem.queries_needed = queries.band.of((int)(last - first)).end;
        barrier_init(smem.keys_full, 1);
        for (int buffer = 0; buffer < 2; buffer++) {
            barrier_init(smem.ds_full[buffer], CONSUMERS);
            barrier_init(smem.ds_empty[buffer], 4);
        }
        barrier_init(smem.k_a_full, 1);
        barrier_init(smem.k_a_empty, CONSUMERS * 4);
        for (uint64_t &barrier : smem.stats_full)
            barrier_init(barrier, STAGE_ROWS);
        smem.of_d_out.init(CONSUMERS * 128);
        smem.of_q_b.init(CONSUMERS * 4);
        smem.of_q_a.init(CONSUMERS * 4);
        barrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = warpgroup_index();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<PRODUCER_REGS>();
        if (warp_index() == CONSUMERS * 4)
            produce(params, maps, smem);
        else if (warp_index() >= CONSUMERS * 4 + 4 - STATS_WARPS)
            produce_stats<ELEMENT>(params, smem);
    } else {
        reg_alloc<KEY_WARPGROUP_REGS>();
        key_warpgroup<ELEMENT, DIM, DIM_A> consumer = {params, maps, smem, warpgroup, warp_in_warpgroup()};
        consumer.run();
        const float unit = exp2f(-log2_unit<ELEMENT>(*params.largest));
        store_sum<ELEMENT>(consumer, params.call.gradients.dk_s, consumer.dk, params.problem.scale_s * unit);
        store_sum<ELEMENT>(consumer, params.of.dv_s, consumer.dv, unit);
    }
#endif
}

/* ---- Launch ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT>
inline bool encode_all(attention_backward_maps *maps, const attention_backward_params &params, ELEMENT element)
{
    const skl_problem *const p = &params.problem;
    skl_cuda_argument values = params.b;
    values.q = params.of.do_s;
    values.k = params.of.v_s;
    return encode_queries(&maps->q_a, p, &params.a, STAGE_ROWS, element) &&
           encode_queries(&maps->q_b, p, &params.b, STAGE_ROWS, element) &&
           encode_queries(&maps->d_out, p, &values, STAGE_ROWS, element) &&
           encode_keys(&maps->k_a, p, &params.a, TILE_KEYS, element) &&
           encode_keys(&maps->k_b, p, &params.b, TILE_KEYS, element) &&
           encode_keys(&maps->v, p, &values, TILE_KEYS, element) &&
           encode_sums(&maps->dq_sums, params.dq_sums, params.b.dim, p->heads_s, skl_query_rows(p));
}

template <typename ELEMENT>
cudaError_t launch_attention_backward(const char *kernel, const skl_cuda_params *params,
                                      const skl_cuda_launch *launch)
{
    const attention_backward_params kernel_params = attention_backward_params_of(params, launch);
    const skl_problem *const p = &params->problem;
    attention_backward_maps maps;
    if (!encode_all(&maps, kernel_params, ELEMENT()))
        return encode_error();
    cudaError_t error = prepare_attention_rows(&kernel_params);
    record_launch(kernel, SKL_VARIANT_CARRYING, 1);
    if (error == cudaSuccess)
        error = with_head_sizes(*p, [&](auto dim_t, auto dim_s) {
            constexpr int MEMORY = sizeof(attention_backward_smem<dim_s(), dim_t()>);
            static_assert(MEMORY <= SMEM_MAX, "shared memory of a block");
            return launch_blocks(attention_backward_kernel<ELEMENT, dim_s(), dim_t()>,
                                 grid_of(p->batch, p->key_heads_s, skl_ceil_div(p->len_k, TILE_KEYS)),
                                 ATTENTION_BACKWARD_THREADS, MEMORY, kernel_params, maps);
        });
    return error == cudaSuccess ? store_dq_sums(&kernel_params) : error;
}

} // namespace sm90

#endif
