/* Gradients of a student with teacher groups by mma.sync, sm_80 and up: dq or dk.
 * LSEs of both sides are known. group_tile_products.cuh describes the tiles.
 *
 * r + 2 products per pair and gradient: like the kernels for equal heads (backward.cuh), dq and dk compute the logits
 * each, and nothing is summed in memory. G goes through shared memory, because the eight warps divide the gradient
 * otherwise than the logits:
 *
 *   logits     32 stationary rows x 64 streamed rows per warp
 *   gradient   32 stationary rows x DIM / 2 dimensions per warp, over all streamed rows: DIM / 2 registers
 *
 * G has a separate 32 KB. Where there is no room for them, it takes the memory of the stationary rows, and those of
 * the next stage are copied after its product. */
#ifndef SKL_CUDA_SM80_ATTENTION_GROUP_TILE_BACKWARD_CUH
#define SKL_CUDA_SM80_ATTENTION_GROUP_TILE_BACKWARD_CUH

#include "cuda/sm80/attention/backward.cuh"
#include "cuda/sm80/attention/group_tile_products.cuh"

namespace sm80
{

template <int DIM, bool DK> struct group_backward_smem : group_smem<DIM> {
    row_tile<GROUP_M, DK> tile;
    unsigned poisoned[GROUP_TILE_ROWS / 32]; /* bits: whether a streamed row of the student has a non-finite value */
};

typedef group_tile<GROUP_TILE_ROWS> group_g; /* [stationary row][streamed row] */

/* Bytes of shared memory: with memory for G where there is room for it. */
template <int DIM> constexpr int GROUP_BACKWARD_SIZE = (sizeof(group_backward_smem<DIM, false>) + 127) / 128 * 128;
static_assert(GROUP_BACKWARD_SIZE<128> <= 99 << 10 && GROUP_BACKWARD_SIZE<64> + sizeof(group_g) <= 99 << 10,
              "consumer cards have 99 KB of shared memory");

template <typename ELEMENT, int DIM, bool DK> struct group_gradient_pass {
    const backward_params &params;
    group_backward_smem<DIM, DK> &smem;
    group_g &g;
    gradient_acc<DIM / 2, GROUP_M> gradient;
    gradient_unit<ELEMENT> unit;

    __device__ skl_input lse_of(bool of_student) const
    {
        return row_stat_source(params, of_student ? 1 : 0);
    }

    /* LSE of a query, of teacher head n or, after the last one, of the student. */
    __device__ float lse_at(int n, bool of_student, int query) const
    {
        const float *const first = smem.sources[n].lse;
        return first != NULL ? first[query * lse_of(of_student).stride_row] : 0.0F;
    }

    __device__ raw_stats load(const group_product &of, bool of_student, int query) const
    {
        const float lse_s = lse_at(smem.block.count, true, query);
        if (!of_student)
            return {lse_at(of.n, false, query), lse_s};
        return {lse_s, DK ? upstream(of.head, smem.block.origin + query) : 1.0F};
    }

    /* Upstream gradient of a query that attends to a key of the block. Those of others must not move the unit. */
    __device__ float upstream(int head, int64_t query) const
    {
        const skl_sequence &s = smem.block.sequence;
        return is_seen(s, query) ? row_stat(params, 3, s, head, query) : 0.0F;
    }

    __device__ bool is_seen(const skl_sequence &s, int64_t query) const
    {
        const skl_range sees = skl_visible(&params.problem, &s, query);
        return sees.begin < smem.block.first_row + smem.block.rows && sees.end > smem.block.first_row;
    }

    __device__ query_stats student_stats(const raw_stats &raw) const
    {
        const skl_lse2 lse = split_lse2(raw.lse);
        return {lse.value, fmaf(raw.other, -lse.low * SKL_LN2, raw.other)};
    }

    __device__ bool keeps_stationary() const
    {
        return (void *)&g == (void *)smem.stationary;
    }

    /* As clear_non_finite in backward.cuh. */
    __device__ void sanitize(group_tile<DIM> &streamed)
    {
        const int index = group_thread::index();
        if (index < GROUP_TILE_ROWS / 32)
            smem.poisoned[index] = 0;
        __syncthreads();
        for (int n = index; n < GROUP_TILE_ROWS * DIM / 8; n += GROUP_THREADS) {
            const int row = n / (DIM / 8);
            uint4 &chunk = streamed[row / 64].chunks[row % 64][n % (DIM / 8)];
            if (!all_finite<ELEMENT>(chunk)) {
                chunk = make_uint4(0, 0, 0, 0);
                atomicOr(&smem.poisoned[row / 32], 1U << row % 32);
            }
        }
        __syncthreads();
    }

    /* DK, f16: |s - p| <= 1, so the upstream gradients of the stage bound G. The same in all warps. */
    __device__ void fit_unit(const query_stats *stats)
    {
        float largest = DK ? 0.0F : 1.0F;
        for (int row = (int)threadIdx.x % 32; DK && row < GROUP_TILE_ROWS; row += 32) {
            const float size = fabsf(stats[row].factor);
            largest = size < INFINITY ? fmaxf(largest, size) : largest;
        }
        unit.fit(gradient, warp_max(largest));
    }

    /* G of the stage_rows rows of a stage that some row needs, up to a multiple of 16. MASKED: of masked pairs 0. */
    template <bool MASKED>
    __device__ void compute_g(const group_mean &p, const row_frags<DIM, GROUP_M> &frags,
                              const group_tile<DIM> &streamed, const query_stats *stats, int stage_rows)
    {
        const group_thread thread = group_thread::read();
        step_stats<DK> queries(stats, thread);
        const uint32_t to =
            shared_address(
                &g[thread.row / 64].chunks[thread.acc_row(0, 0) % 64][thread.column / 8 + thread.lane / 4]) +
            (uint32_t)(thread.lane % 4 * 4);
        for_each_step<ELEMENT>(thread, frags, streamed, stage_rows, [&](const step_logits &y, int step) {
            queries.load(stats, thread, step);
            const unsigned poisoned = MASKED ? smem.poisoned[thread.column / 32 + step * GROUP_STEP / 32] : 0;
#pragma unroll
            for (int m = 0; m < GROUP_M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const stage_range sees = MASKED ? smem.seen[thread.acc_row(m, half)] : stage_range{};
#pragma unroll
                    for (int block = 0; block < GROUP_BLOCKS; block++) {
                        float pair[2];
#pragma unroll
                        for (int parity = 0; parity < 2; parity++) {
                            const int e = half * 2 + parity, at = thread.acc_column(step, block, parity);
                            const query_stats query = queries.of(m, block, e);
                            const float p_pair = p[step].at[m][block][e];
                            const float log_s = fmaf(y.at[m][block][e], params.b.scale,
                                                     MASKED && (poisoned >> (at % 32) & 1) != 0 ? NAN : -query.lse);
                            const float s = ex2(log_s);
                            const bool seen = !MASKED || (at >= sees.begin && at < sees.end);
                            pair[parity] = seen ? (s - p_pair) * (query.factor * unit.inverse()) : 0.0F;
                        }
                        const uint32_t packed = pack(pair[0], pair[1], ELEMENT());
                        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at_chunk<GROUP_TILE_ROWS>(
                                         to, m * 16 + half * 8, step * GROUP_BLOCKS + block)),
                                     "r"(packed)
                                     : "memory");
                    }
                }
        });
    }

    __device__ void student(const group_mean &p, const row_frags<DIM, GROUP_M> &frags, group_tile<DIM> &streamed,
                            const query_stats *stats, const group_product &at)
    {
        const bool masked = !covers(smem.block.full, at.first, GROUP_TILE_ROWS);
        const int stage_rows = smem.block.needed - at.first;
        fit_unit(stats);
        if (masked) {
            sanitize(streamed);
            compute_g<true>(p, frags, streamed, stats, stage_rows);
        } else {
            compute_g<false>(p, frags, streamed, stats, stage_rows);
        }
        const group_thread thread = group_thread::read();
        thread.sync_rows(); /* G is complete */
        const uint32_t g_address = a_address(g[0], thread.lane);
        const uint32_t rows =
            at_chunk<DIM>(gradient_b_address(streamed[0], thread.lane), 0, thread.half() * (DIM / 16));
#pragma unroll
        for (int k = 0; k < GROUP_TILE_ROWS / 16; k++) {
            if (k * 16 >= stage_rows)
                break;
            uint32_t a[GROUP_M][4];
#pragma unroll
            for (int m = 0; m < GROUP_M; m++)
                ldmatrix_x4(a[m], at_chunk<GROUP_TILE_ROWS>(g_address, thread.row + m * 16, 2 * k));
            multiply_add<ELEMENT, DIM>(gradient, a, rows, k * 16);
        }
    }
};

template <typename ELEMENT, int DIM, bool DK>
__global__ void __launch_bounds__(GROUP_THREADS, 1)
    group_tile_gradient_kernel(const __grid_constant__ backward_params params, int g_at)
{
    extern __shared__ __align__(128) unsigned char raw[];
    group_backward_smem<DIM, DK> &smem = *(group_backward_smem<DIM, DK> *)(void *)raw;
    row_tile<GROUP_M, DK> tile;
    if (!tile.find(params))
        return;
    const int rows = (int)skl_max(0, skl_min(GROUP_TILE_ROWS, tile.rows - tile.first));
    if (threadIdx.x == 0) {
        smem.tile = tile;
        const int sharing = DK ? params.b.heads_per_key : 1;
        const skl_band band =
            DK ? skl_query_band(&params.problem, &tile.sequence) : skl_key_band(&params.problem, &tile.sequence);
        const streamed_band all = rows > 0 ? stream_for(band, tile.first, tile.first + rows - 1) : streamed_band{};
        set_group_block<DK>(smem, tile.sequence, tile.first, rows, all, (int)tile.head * sharing,
                            (int)(tile.head + 1) * sharing, (int)skl_group_size(&params.problem));
        if (rows < GROUP_TILE_ROWS) /* rows that do not exist must be masked */
            smem.block.full = {};
    }
    __syncthreads();
    group_gradient_pass<ELEMENT, DIM, DK> pass = {params, smem, *(group_g *)(void *)(raw + g_at), {}, {}};
    run_group_products<ELEMENT, DIM, DK>(params, smem, pass);
    const group_thread thread = group_thread::read();
    store_gradient(pass.gradient, params, smem.tile, pass.unit.value() * params.problem.scale_s, thread.row,
                   thread.half() * (DIM / 2));
}

template <typename ELEMENT, int DIM, bool DK>
cudaError_t launch_group_tile_gradient(const char *kernel, const skl_cuda_params *params,
                                       const skl_cuda_launch *launch)
{
    const backward_params kernel_params = backward_params_of(params, launch);
    const skl_problem *const p = &params->problem;
    const int size = GROUP_BACKWARD_SIZE<DIM> + (int)sizeof(group_g);
    const bool has_room = size <= launch->smem_per_block;
    const int used = has_room ? size : GROUP_BACKWARD_SIZE<DIM>;
    record_launch(kernel, DK ? SKL_VARIANT_DK_GROUPS : SKL_VARIANT_DQ_GROUPS, 1);
    const cudaError_t error = cudaFuncSetAttribute(group_tile_gradient_kernel<ELEMENT, DIM, DK>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, used);
    if (error != cudaSuccess)
        return error;
    const dim3 blocks = grid_of(p->batch, row_tile<GROUP_M, DK>::heads(kernel_params),
                                skl_ceil_div(DK ? p->len_k : p->len_q, GROUP_TILE_ROWS));
    group_tile_gradient_kernel<ELEMENT, DIM, DK><<<blocks, GROUP_THREADS, (size_t)used, params->call.stream>>>(
        kernel_params, has_room ? GROUP_BACKWARD_SIZE<DIM> : 0);
    return cudaPeekAtLastError();
}

} // namespace sm80

#endif
