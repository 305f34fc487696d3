/* The skeleton of the Hopper kernels that keep one gradient of a tile in registers: deterministic dk (dk.cuh), and dq
 * or dk of wide heads (backward_wide.cuh). They have 2 consumer warpgroups of 64 stationary rows and 1 producer
 * warpgroup.
 *
 * A kernel is a CONSUMER, derived from gradient_warpgroup. It adds run(), produce() for the producer warpgroup, and
 * the registers of both. SMEM, its shared memory, has tile, count, heads, stream, visible and init_barriers(). */
#ifndef SKL_CUDA_SM90_ATTENTION_GRADIENT_KERNEL_CUH
#define SKL_CUDA_SM90_ATTENTION_GRADIENT_KERNEL_CUH

#include <type_traits>

#include "cuda/sm90/attention/logit_gradients.cuh"
#include "cuda/sm90/attention/tile_kernel.cuh"

namespace sm90
{

constexpr int STATIONARY_ROWS = CONSUMERS * 64;
constexpr int GRADIENT_THREADS = 128 * (CONSUMERS + 1);

/* `rows` are the stationary rows. */
struct gradient_maps {
    CUtensorMap wrt_rows, other_rows, wrt_stream, other_stream;
};

/* Barriers of stationary rows and of a pipeline. */
template <int DEPTH> struct gradient_barriers : ring_barriers<DEPTH> {
    uint64_t rows_full;

    __device__ void init(int releases)
    {
        ring_barriers<DEPTH>::init(releases);
        barrier_init(rows_full, 1);
    }
};

/* Executed by one warp when the row stats or the poison of a stage are stored: sanitizes a masked stage. */
template <typename ELEMENT, int DIM>
__device__ inline void complete_stage(bool masked, row_stage<DIM> &rows, float (&poison)[STAGE_ROWS], uint64_t &full,
                                      int phase, uint64_t &stats_full)
{
    if (masked) {
        __syncwarp(); /* LSEs or zeros are stored before poison overwrites them */
        barrier_wait(full, phase);
        sanitize_rows<ELEMENT>(rows, poison);
        fence_proxy_async();
    }
    barrier_arrive(stats_full); /* every lane, because every lane has written row stats or poison */
}

/* ---- Consumers ---------------------------------------------------------------------------------------------- */

/* DK: stationary rows are keys. */
template <typename ELEMENT, int DIM, bool DK, bool WRT_B, bool CAPPED, typename SMEM> struct gradient_warpgroup {
    typedef SMEM memory;
    typedef row_tile<2, DK> tile_type;
    static constexpr bool OF_KEYS = DK, OF_B = WRT_B, TWO_TERM = operand<ELEMENT>::TWO_TERM;
    static constexpr bool POLYNOMIALS = DIM > 128; /* dk of smaller heads keeps K in registers, and has none left */
    const backward_params &params;
    SMEM &smem;
    int warpgroup; /* warp-uniform */
    float gradient[DIM / 8][4];
    row_sums sums[2]; /* dq with respect to B: of the KL */
    std::conditional_t<TWO_TERM, row_units, gradient_unit<ELEMENT>> unit;

    __device__ const typename SMEM::visible_rows &visible() const
    {
        return smem.visible;
    }

    __device__ void clear()
    {
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            gradient[e / 4][e % 4] = 0.0F;
        sums[0] = sums[1] = {};
    }

    __device__ void scale(float factor)
    {
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            gradient[e / 4][e % 4] *= factor;
    }

    /* G of a stage as A operands. stats(): the stage's row stats. fit() makes the unit large enough for G with
     * respect to B, which |p_b - p_a| <= 1 bounds; with respect to A only G itself tells how large it is. */
    template <bool MASKED, typename STATS, typename FIT>
    __device__ void compute_g(uint32_t (&g)[4][4], const argument_logits &logits, STATS stats, FIT fit)
    {
        if constexpr (decltype(unit)::MOVES && !WRT_B) {
            stage_logits values;
            const float largest = compute_logit_gradients<MASKED, WRT_B, CAPPED, POLYNOMIALS>(
                values, params, logits, visible(), smem.count, stats());
            fence_operand(gradient);
            unit.fit(*this, largest);
            pack_logit_gradients<ELEMENT>(g, values, unit.inverse());
        } else {
            if (unit.MOVES) {
                fence_operand(gradient);
                fit();
            }
            const float inverse = unit.inverse(); /* applied last: times an upstream gradient it could overflow */
            for_each_logit_gradient<MASKED, WRT_B, CAPPED, POLYNOMIALS>(
                params, logits, visible(), stats(), [&](int i, int half, float low, float high) {
                    g[i / 2][i % 2 * 2 + half] = pack(low * inverse, high * inverse, ELEMENT());
                });
        }
    }

    /* The wgmmas of gradient += G times the streamed rows of the wrt argument. */
    __device__ void issue_gradient(const uint32_t (&g)[4][4], const row_stage<DIM> &rows)
    {
        wgmma_fence();
        wgmma_steps<true, STAGE_ROWS / 16>(gradient, g, mn_major_operand(&rows, STAGE_ROWS * 128), 1, ELEMENT());
        wgmma_commit();
    }

    /* Unit of one of the thread's rows. */
    __device__ float unit_of(int half) const
    {
        if constexpr (TWO_TERM)
            return unit.of[half].value() / TWO_TERM_LARGEST;
        else
            return unit.value();
    }

    /* Upstream gradient of a stationary row: 0 if it attends to no key. */
    __device__ float upstream_of(int row) const
    {
        const range32 sees = visible().of(row);
        return sees.begin < sees.end ? row_stat(params, 3, smem.tile.sequence, smem.tile.head, smem.tile.first + row)
                                     : 0.0F;
    }

    /* Padding keys get a gradient of 0, whatever their accumulators contain. */
    __device__ void store()
    {
        const tile_type &tile = smem.tile;
        const skl_side side = side_of(params);
        const skl_output out = DK ? *side.dk : *side.dq;
        const int64_t base =
            SKL_ROW(out, tile.sequence.batch, tile.head, DK ? tile.sequence.key_begin : tile.sequence.query_begin) +
            tile.first * out.stride_row;
        if (!DK && WRT_B && params.kl_in_backward)
            write_one_pass_rows(params, tile, smem.count, sums);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = acc_row<1>(0, half);
#pragma unroll
            for (int e = 0; e < DIM / 4 && DK && row >= smem.count; e++)
                gradient[e / 2][half * 2 + e % 2] = 0.0F;
            if (tile.first + row >= tile.stored)
                continue;
            const float weight = DK ? side.scale : side.scale * upstream_of(row), unit = unit_of(half);
            const bool shrinks = fabsf(weight) < 1.0F;
            store_row<ELEMENT>(out.data, base + row * out.stride_row, side, gradient, half, shrinks ? weight : unit,
                               shrinks ? unit : weight);
        }
    }
};

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

template <typename CONSUMER>
__global__ void __launch_bounds__(GRADIENT_THREADS, 1)
    gradient_kernel(const __grid_constant__ backward_params params, const __grid_constant__ gradient_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    constexpr bool DK = CONSUMER::OF_KEYS;
    typename CONSUMER::memory &smem = *(typename CONSUMER::memory *)(void *)raw;
    typename CONSUMER::tile_type tile;
    if (!tile.find(params))
        return;
    const skl_sequence &s = tile.sequence;
    const int64_t last = skl_min(tile.first + STATIONARY_ROWS, tile.rows) - 1;
    row_stream stream = {};
    if (last >= tile.first)
        stream =
            make_row_stream(stream_for(DK ? skl_query_band(&params.problem, &s) : skl_key_band(&params.problem, &s),
                                       tile.first, last),
                            DK ? s.query_begin : s.key_begin);
    fill_visible(smem.visible, stream.band);
    if (threadIdx.x == 0) {
        smem.tile = tile;
        smem.count = (int)(last + 1 - tile.first);
        smem.stream = stream;
        smem.heads = stream.stages == 0 ? 0 : DK ? wrt_argument<CONSUMER::OF_B>(params).heads_per_key : 1;
        smem.init_barriers();
        barrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = warpgroup_index();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<CONSUMER::PRODUCER_REGS>();
        CONSUMER::produce(params, maps, smem);
    } else {
        reg_alloc<CONSUMER::REGS>();
        CONSUMER consumer = {params, smem, warpgroup};
        consumer.run();
        consumer.store();
    }
#endif
}

/* ---- Launch ------------------------------------------------------------------------------------------------- */

template <typename CONSUMER>
cudaError_t launch_gradient_tiles(const backward_params &params, const gradient_maps &maps)
{
    constexpr int MEMORY = sizeof(typename CONSUMER::memory);
    static_assert(MEMORY <= SMEM_MAX, "shared memory of a block");
    const skl_problem &p = params.problem;
    const int64_t rows = CONSUMER::OF_KEYS ? p.len_k : p.len_q;
    return launch_blocks(gradient_kernel<CONSUMER>,
                         grid_of(p.batch, CONSUMER::tile_type::heads(params), skl_ceil_div(rows, STATIONARY_ROWS)),
                         GRADIENT_THREADS, MEMORY, params, maps);
}

/* FAMILY::consumer<WRT_B, CAPPED> is a CONSUMER for dq or dk (DK). */
template <typename FAMILY, typename ELEMENT, bool DK, bool SOFTCAP>
cudaError_t launch_gradient(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    typedef typename operand<ELEMENT>::type element;
    constexpr int QUERY_ROWS = DK ? STAGE_ROWS : STATIONARY_ROWS, KEY_ROWS = DK ? STATIONARY_ROWS : STAGE_ROWS;
    const backward_params kernel_params = backward_params_of(params, launch);
    const skl_problem *const p = &kernel_params.problem;
    const skl_cuda_argument *const wrt = wrt_of(kernel_params), *const other = other_of(kernel_params);
    gradient_maps maps;
    if (!encode_queries(DK ? &maps.wrt_stream : &maps.wrt_rows, p, wrt, QUERY_ROWS, element()) ||
        !encode_queries(DK ? &maps.other_stream : &maps.other_rows, p, other, QUERY_ROWS, element()) ||
        !encode_keys(DK ? &maps.wrt_rows : &maps.wrt_stream, p, wrt, KEY_ROWS, element()) ||
        !encode_keys(DK ? &maps.other_rows : &maps.other_stream, p, other, KEY_ROWS, element()))
        return encode_error();
    return with_softcap<SOFTCAP>(kernel_params, [&](auto capped) {
        if (DK)
            record_launch(kernel, capped() ? SKL_VARIANT_DK_SOFTCAP : SKL_VARIANT_DK, 1);
        else
            record_launch(kernel, capped() ? SKL_VARIANT_DQ_SOFTCAP : SKL_VARIANT_DQ, 1);
        constexpr bool CAPPED = decltype(capped)::value || (SOFTCAP && operand<ELEMENT>::TWO_TERM);
        typedef typename FAMILY::template consumer<true, CAPPED> of_b;
        typedef typename FAMILY::template consumer<false, CAPPED> of_a;
        return is_grad_of_b(kernel_params) ? launch_gradient_tiles<of_b>(kernel_params, maps)
                                           : launch_gradient_tiles<of_a>(kernel_params, maps);
    });
}

} // namespace sm90

#endif
