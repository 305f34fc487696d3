/* Top keys of each row on Hopper. stats_tiles.cuh has the loop, common/stats_top.cuh the selection.
 *
 *   X = Q K^T
 *
 * Bound: tensor cores, 256 clocks per 64 queries x 64 keys at DIM = 128; a comparison per pair, and what candidates
 * take. Raw products are compared: scale, softcap and LSE keep their order.
 *
 *   registers  X of 64 keys (32)
 *   scratch    in the workspace, per block and query: candidates
 *
 * A warp has 16 queries with all keys of a stage, so its rows, their thresholds and candidates are its own, and warps
 * wait for each other only at wgmmas. */
#ifndef SKL_CUDA_SM90_ATTENTION_STATS_TOP_CUH
#define SKL_CUDA_SM90_ATTENTION_STATS_TOP_CUH

#include "cuda/common/stats_top.cuh"
#include "cuda/sm90/attention/stats_tiles.cuh"

namespace sm90
{

template <typename E, int D> struct stats_top : stats_position<stats_smem<stats_top<E, D>>> {
    typedef stats_position<stats_smem<stats_top>> base;
    using base::chunk, base::first, base::params, base::sequence, base::smem, base::sync, base::warpgroup;
    typedef E ELEMENT;
    static constexpr int DIM = D;
    static constexpr bool KEYS_ARE_ROWS = false;

    /* Results of a warpgroup's queries. */
    struct shared {
        row_ranges<STATS_QUERIES> visible; /* keys of the sequence */
        float threshold[STATS_QUERIES];    /* smaller products are no candidates */
        int count[STATS_QUERIES];          /* candidates */
    };

    float threshold[2]; /* one for each of the thread's two rows */

    __device__ shared &rows() const
    {
        return smem.of_warpgroup[warpgroup];
    }

    /* One of the thread's two rows. */
    __device__ static int row(int half)
    {
        return (int)(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) + half * 8;
    }

    __device__ uint64_t *candidates(int of_row) const
    {
        const int64_t query = (int64_t)blockIdx.x * STATS_TILE + warpgroup * STATS_QUERIES + of_row;
        return (uint64_t *)(void *)params.scratch + query * TOP_CANDIDATES;
    }

    __device__ void start_tile(const skl_band &band)
    {
        const int query = (int)(threadIdx.x % 128);
        if (query < STATS_QUERIES) {
            const skl_range none = {0, 0};
            const skl_range sees =
                first + query < sequence().query_count ? skl_band_range(&band, first + query) : none;
            rows().visible.ranges[query] = {(int)sees.begin, (int)sees.end};
            rows().threshold[query] = -INFINITY;
            rows().count[query] = 0;
        }
        threshold[0] = threshold[1] = -INFINITY;
        sync();
    }

    __device__ bool is_plain(int) const
    {
        return true;
    }

    template <bool MASKED> __device__ void add_stage(stage_logits &x, int first_key)
    {
        range32 sees[2];
        if (MASKED)
            sees[0] = rows().visible.of(row(0)), sees[1] = rows().visible.of(row(1));
#pragma unroll
        for (int n = 0; n < 8; n++) {
            bool hits[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int key = first_key + acc_column(n, e % 2);
                hits[e] = x[n][e] > threshold[e / 2];
                if (MASKED)
                    hits[e] = hits[e] && key >= sees[e / 2].begin && key < sees[e / 2].end;
            }
            if (!__any_sync(~0U, hits[0] || hits[1] || hits[2] || hits[3]))
                continue;
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (hits[e])
                    candidates(row(e / 2))[atomicAdd(&rows().count[row(e / 2)], 1)] =
                        candidate_of(x[n][e], first_key + acc_column(n, e % 2));
        }
        __syncwarp();
        keep_if_full();
    }

    /* Makes room where the next stage might not fit. */
    __device__ void keep_if_full()
    {
        const int lane = (int)(threadIdx.x % 32), first_row = (int)(threadIdx.x % 128 / 32 * 16);
        unsigned full =
            __ballot_sync(~0U, lane < 16 && rows().count[first_row + lane % 16] > TOP_CANDIDATES - STAGE_KEYS);
        if (full == 0)
            return;
        for (; full != 0; full &= full - 1) {
            const int of_row = first_row + __ffs((int)full) - 1;
            float raised;
            const int kept = keep_largest(candidates(of_row), rows().count[of_row], params.stats.top_k, raised);
            if (lane == 0) {
                rows().count[of_row] = kept;
                rows().threshold[of_row] = raised;
            }
            __syncwarp();
        }
        threshold[0] = rows().threshold[row(0)];
        threshold[1] = rows().threshold[row(1)];
    }

    __device__ void finish_tile()
    {
        const int first_row = (int)(threadIdx.x % 128 / 32 * 16);
        const skl_sequence &s = sequence();
#pragma unroll 1
        for (int of_row = first_row; of_row < first_row + 16 && first + of_row < s.query_count; of_row++) {
            const float lse2 = stats_lse2(params, s, chunk().head, first + of_row);
            float raised;
            const int kept = keep_largest(candidates(of_row), rows().count[of_row], params.stats.top_k, raised);
            write_top(params, s, chunk().head, first + of_row, candidates(of_row), kept,
                      [&](float product) { return exp2f(exact_logit(product, params.b) - lse2); });
            __syncwarp();
        }
        sync(); /* start_tile() overwrites what was read */
    }
};

template <typename ELEMENT>
cudaError_t launch_top(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    record_launch(kernel, SKL_VARIANT_STATS_TOP, 1);
    const stats_params of = stats_params_of(params, launch);
    return of.b.dim <= 64    ? launch_stats_blocks<stats_top<ELEMENT, 64>>(of)
           : of.b.dim <= 128 ? launch_stats_blocks<stats_top<ELEMENT, 128>>(of)
                             : launch_stats_blocks<stats_top<ELEMENT, 256>>(of);
}

} // namespace sm90

#endif
