/* Gradients of a student with teacher groups by mma.sync, sm_80 and up: dq or dk.
 * LSEs of both sides are known. group_tile_products.cuh describes the tiles.
 *
 * r + 2 products per pair and gradient: like the kernels for equal heads (backward.cuh), dq and dk compute the logits
 * each, and nothing is summed in memory. G goes through shared memory, because the warps divide the gradient
 * otherwise than the logits:
 *
 *   logits     32 stationary rows x 64 streamed rows per warp
 *   gradient   32 stationary rows x DIM / 2 dimensions per warp, over all streamed rows: DIM / 2 registers
 *
 * G takes the memory of the stationary rows, which the student's product has read. */
#ifndef SKL_CUDA_SM80_ATTENTION_GROUP_TILE_BACKWARD_CUH
#define SKL_CUDA_SM80_ATTENTION_GROUP_TILE_BACKWARD_CUH

#include "cuda/common/launch.cuh"
#include "cuda/sm80/attention/backward.cuh"
#include "cuda/sm80/attention/group_tile_products.cuh"

namespace sm80
{

template <int DIM, bool DK> struct group_backward_smem : group_smem<DIM> {
    row_tile<GROUP_TILE_M, DK> tile;
    float largest[GROUP_STATIONARY / (16 * GROUP_M)][GROUP_SHARING]; /* f16: upstream gradient of a warp's queries */
    unsigned poisoned[GROUP_STREAMED / 32]; /* bits: whether a streamed row of the student has a non-finite value */
};

template <typename ELEMENT, int DIM, bool DK> struct group_gradient_pass {
    static constexpr int WIDTH = DIM / GROUP_SHARING; /* dimensions of the gradient per warp */
    const group_tile_params<backward_params> &params;
    group_backward_smem<DIM, DK> &smem;
    unsigned index;
    gradient_acc<WIDTH, GROUP_M> gradient;
    gradient_unit<ELEMENT> unit;
    row_sums kl_sums; /* kl_in_backward: of one of the thread's rows, by all four lanes that hold them */

    __device__ skl_input lse_of(bool of_student) const
    {
        return row_stat_source(params, of_student ? 1 : 0);
    }

    /* LSE of a query, of teacher head n or, after the last one, of the student. */
    __device__ float lse_at(const group_product<DK> &of, int n, bool of_student, int query) const
    {
        const float *const first = smem.sources[of.list()][n].lse;
        return first != NULL ? first[query * lse_of(of_student).stride_row] : 0.0F;
    }

    __device__ float load(const group_product<DK> &of, int query) const
    {
        if (of.n() < params.group_size)
            return lse_at(of, of.n(), false, query);
        return DK ? upstream(of.head, smem.block.origin + query) : 1.0F;
    }

    __device__ float reference(const group_product<DK> &of, int query) const
    {
        return lse_at(of, params.group_size, true, query);
    }

    /* Upstream gradient of a query that attends to a key of the block. Other upstream gradients must not move the
     * unit. */
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

    __device__ query_stats student_stats(float upstream, float lse_s) const
    {
        const skl_lse2 lse = split_lse2(lse_s);
        return {lse.value, fmaf(upstream, -lse.low * SKL_LN2, upstream)};
    }

    static constexpr bool USES_STATIONARY = true;
    static constexpr bool LOADS_REFERENCE = DK && !gradient_unit<ELEMENT>::MOVES; /* registers allow no more */

    /* Returns the row whose sums the thread keeps. */
    __device__ static int summed_row(const group_thread &thread)
    {
        return thread.acc_row(thread.lane % 4 / 2, thread.lane % 2);
    }

    /* Adds the KL from P and the logits alone, so that nothing else needs registers meanwhile. */
    template <bool MASKED>
    __device__ void add_kl(const group_logits &p, const group_logits &y, const warp_stats<DK> &stats)
    {
        const group_thread thread(index);
#pragma unroll
        for (int i = 0; i < 2 * GROUP_M; i++) {
            const int m = i / 2, half = i % 2, row = thread.acc_row(m, half);
            const row_sums sums = sum_group_row<MASKED, false>(
                p[m], y[m], params.b.scale, stats.from(m * 16 + half * 8 + thread.lane / 4, 0).lse, half,
                MASKED ? smem.seen[row].from(thread.column) : range32{});
            const row_sums total = {quad_sum(sums.l_a), quad_sum(sums.l_b), quad_sum(sums.w)};
            if (thread.lane % 4 == i)
                add_sums(kl_sums, total);
        }
    }

    __device__ void write_kl()
    {
        const group_thread thread(index);
        const int row = summed_row(thread);
        row_sums(*const halves)[GROUP_STATIONARY] = (row_sums(*)[GROUP_STATIONARY])(void *)smem.g;
        halves[thread.half()][row] = kl_sums;
        __syncthreads();
        if (thread.half() != 0 || row >= smem.block.rows)
            return;
        for (int half = 1; half < GROUP_SHARING; half++)
            add_sums(kl_sums, halves[half][row]);
        write_one_pass_row(params, smem.tile.sequence, smem.tile.head, smem.tile.first + row, state_of(kl_sums));
    }

    /* Replaces values that are not finite, as clear_non_finite in backward.cuh does. */
    __device__ void sanitize(group_streamed<DIM> &streamed)
    {
        const int thread_index = (int)threadIdx.x;
        if (thread_index < GROUP_STREAMED / 32)
            smem.poisoned[thread_index] = 0;
        __syncthreads();
#pragma unroll 1
        for (int n = thread_index; n < GROUP_STREAMED * DIM / 8; n += GROUP_THREADS) {
            const int row = n / (DIM / 8);
            uint4 &chunk = streamed.chunks[row][n % (DIM / 8)];
            if (!all_finite<ELEMENT>(chunk)) {
                chunk = make_uint4(0, 0, 0, 0);
                atomicOr(&smem.poisoned[row / 32], 1U << row % 32);
            }
        }
        __syncthreads();
    }

    /* f16: |s - p| <= 1, so 1 or, for dk, the upstream gradients of the stage bound G. */
    __device__ static float largest_factor(const warp_stats<DK> &stats)
    {
        float largest = 0.0F;
#pragma unroll
        for (int n = 0; n < warp_stats<DK>::PER_LANE; n++) {
            const float size = fabsf(stats.of[n].factor);
            largest = size < INFINITY ? fmaxf(largest, size) : largest;
        }
        return warp_max(largest);
    }

    /* Fits the unit to the largest factor of all warps whose G makes up a gradient, and waits for them. */
    __device__ void fit_unit(const warp_stats<DK> &stats)
    {
        const group_thread thread(index);
        float(&halves)[GROUP_SHARING] = smem.largest[thread.sharing()];
        const float largest = largest_factor(stats);
        if (thread.lane == 0)
            halves[thread.half()] = largest;
        thread.sync_rows();
        unit.fit(gradient, fmaxf(halves[0], halves[1]));
    }

    /* G of a stage. MASKED: of masked pairs 0. */
    template <bool MASKED>
    __device__ void compute_g(const group_logits &p, const group_logits &y, const warp_stats<DK> &stats)
    {
        const group_thread thread(index);
        tile_stats<DK> queries(stats, thread.lane);
        const uint32_t to = shared_address(&smem.g[thread.acc_row(0, 0)][thread.column / 8 ^ thread.lane / 4]) +
                            (uint32_t)(thread.lane % 4 * 4);
#pragma unroll
        for (int block = 0; block < GROUP_N; block++) {
            queries.load(stats, thread.lane, block);
            const unsigned poisoned = MASKED ? smem.poisoned[(thread.column + block * 8) / 32] : 0;
#pragma unroll
            for (int m = 0; m < GROUP_M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const stage_range sees = MASKED ? smem.seen[thread.acc_row(m, half)] : stage_range{};
                    float pair[2];
#pragma unroll
                    for (int parity = 0; parity < 2; parity++) {
                        const int e = half * 2 + parity, at = thread.acc_column(block, parity);
                        const query_stats query = queries.of(m, e);
                        const float log_s = fmaf(y[m][block][e], params.b.scale,
                                                 MASKED && (poisoned >> (at % 32) & 1) != 0 ? NAN : -query.lse);
                        const bool seen = !MASKED || sees.has(at);
                        pair[parity] = seen ? (ex2(log_s) - p[m][block][e]) * (query.factor * unit.inverse()) : 0.0F;
                    }
                    const uint32_t packed = pack(pair[0], pair[1], ELEMENT());
                    asm volatile(
                        "st.shared.b32 [%0], %1;" ::"r"(at_chunk<GROUP_STREAMED>(to, m * 16 + half * 8, block)),
                        "r"(packed)
                        : "memory");
                }
        }
    }

    __device__ void student(group_logits &p, group_logits &y, group_streamed<DIM> &streamed,
                            const warp_stats<DK> &stats, const group_product<DK> &at)
    {
        if (DK && unit.MOVES)
            fit_unit(stats);
        group_thread(index).sync_rows(); /* Y is complete: the stationary rows are not needed any more */
        const bool with_kl = !DK && params.kl_in_backward;
        if (covers(smem.block.full, at.first(), GROUP_STREAMED)) {
            if (with_kl)
                add_kl<false>(p, y, stats);
            compute_g<false>(p, y, stats);
        } else {
            if (with_kl)
                add_kl<true>(p, y, stats);
            sanitize(streamed);
            compute_g<true>(p, y, stats);
        }
        const group_thread thread(index);
        thread.sync_rows(); /* G is complete */
        const uint32_t g_address = a_address(rows_from<GROUP_STREAMED>(smem.g[thread.row][0]), thread.lane);
        const uint32_t rows = at_chunk<DIM>(gradient_b_address(rows_from<DIM>(streamed.chunks[0][0]), thread.lane), 0,
                                            thread.half() * (WIDTH / 8));
#pragma unroll
        for (int k = 0; k < GROUP_STREAMED / 16; k++) {
            uint32_t a[GROUP_M][4];
#pragma unroll
            for (int m = 0; m < GROUP_M; m++)
                ldmatrix_x4(a[m], at_chunk<GROUP_STREAMED>(g_address, m * 16, 2 * k));
            multiply_add<ELEMENT, DIM>(gradient, a, rows, k * 16);
        }
    }
};

template <typename ELEMENT, int DIM, bool DK>
__global__ void __launch_bounds__(GROUP_THREADS, GROUP_BLOCKS_PER_SM)
    group_tile_gradient_kernel(const __grid_constant__ group_tile_params<backward_params> params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    group_backward_smem<DIM, DK> &smem = *(group_backward_smem<DIM, DK> *)kept_address(raw);
    const unsigned index = kept(threadIdx.x);
    row_tile<GROUP_TILE_M, DK> tile;
    if (!tile.find(params))
        return;
    const int rows = (int)skl_max(0, skl_min(GROUP_STATIONARY, tile.rows - tile.first));
    if (threadIdx.x == 0) {
        smem.tile = tile;
        const int sharing = DK ? params.b.heads_per_key : 1;
        const skl_band band =
            DK ? skl_query_band(&params.problem, &tile.sequence) : skl_key_band(&params.problem, &tile.sequence);
        const streamed_band all = rows > 0 ? stream_for(band, tile.first, tile.first + rows - 1) : streamed_band{};
        set_group_block<DK>(smem, tile.sequence, tile.first, rows, all, (int)tile.head * sharing,
                            (int)(tile.head + 1) * sharing);
        if (rows < GROUP_STATIONARY) /* rows that do not exist must be masked */
            smem.block.full = {};
    }
    __syncthreads();
    group_gradient_pass<ELEMENT, DIM, DK> pass = {params, smem, index, {}, {}, {}};
    if (!DK)
        pass.unit.fit(pass.gradient, 1.0F);
    run_group_products<ELEMENT, DIM, DK>(params, smem, (group_streamed<DIM> *)(void *)(&smem + 1), index, pass);
    if (!DK && params.kl_in_backward)
        pass.write_kl();
    const group_thread thread(index);
    store_gradient<ELEMENT>(pass.gradient, params, smem.tile, pass.unit.value() * params.problem.scale_s, thread.row,
                            thread.half() * pass.WIDTH);
}

template <typename ELEMENT, int DIM, bool DK>
cudaError_t launch_group_tile_gradient(const char *kernel, const skl_cuda_params *params,
                                       const skl_cuda_launch *launch)
{
    typedef group_backward_smem<DIM, DK> smem_type;
    const auto kernel_params = group_tile_params_of<DIM, smem_type>(backward_params_of(params, launch), launch);
    const size_t size = sizeof(smem_type) + (size_t)kernel_params.slots * sizeof(group_streamed<DIM>);
    const skl_problem *const p = &params->problem;
    record_launch(kernel, DK ? SKL_VARIANT_DK_GROUPS : SKL_VARIANT_DQ_GROUPS, 1);
    const dim3 blocks = grid_of(p->batch, row_tile<GROUP_TILE_M, DK>::heads(kernel_params),
                                skl_ceil_div(DK ? p->len_k : p->len_q, GROUP_STATIONARY));
    return launch_blocks(group_tile_gradient_kernel<ELEMENT, DIM, DK>, blocks, GROUP_THREADS, size, kernel_params);
}

} // namespace sm80

#endif
