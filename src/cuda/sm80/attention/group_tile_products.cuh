/* Teacher groups by mma.sync, sm_80 and up: the products that the forward, dq and dk share. 16-bit types, head sizes
 * up to 128, KL(P || S); the teacher's LSEs are known.
 *
 * A block has 64 stationary rows and streams stages of 128 rows: queries and keys, or for dk keys and queries
 * (mma_tile.cuh). P of a stage stays in registers while the heads of the group are multiplied, and then the student:
 *
 *   head n    X = rows_n streamed_n^T (mma)   ->  P += (2^(X - lse_n) - P) / (n + 1)
 *   student   Y = rows streamed^T (mma)       ->  row states, or G and its product with streamed rows
 *
 *   block      4 warps of 32 stationary rows x 64 streamed rows; 2 blocks per SM
 *   registers  P and the logits of a head (64 each); gradients have DIM / 2 more
 *   shared     one tile of stationary rows (16 KB at DIM = 128), one or two of streamed rows (32 KB each)
 *
 *   cp.async   streamed rows of the next product | its stationary rows
 *   warps      X (mma)                           | 2^x, P
 *
 * A warp multiplies all of its tile at once: 16 independent chains of mma, with both operands from shared memory.
 * Nothing overlaps within a warp, and the warps of a block run in step, because they wait for the same rows. So two
 * blocks share an SM: one multiplies while the other computes exponentials or addresses.
 *
 * Two warps share their stationary rows: they copy them, and wait for each other before and after they read them.
 * The block waits where the streamed rows are new. Two blocks with two slots for streamed rows fit into the shared
 * memory of data center GPUs; consumer cards have one slot, whose rows are copied while the other block computes.
 *
 * Every product reads its rows again: the L2 cache holds the queries of a block's heads, which shared memory cannot
 * (16 KB per head). Rows that the product before it had, as keys of heads that share them, are not copied again.
 *
 * See common/group_rows.cuh for P and LSEs, which are those of sm90/attention/group_heads.cuh. */
#ifndef SKL_CUDA_SM80_ATTENTION_GROUP_TILE_PRODUCTS_CUH
#define SKL_CUDA_SM80_ATTENTION_GROUP_TILE_PRODUCTS_CUH

#include "cuda/common/group_rows.cuh"
#include "cuda/sm80/attention/group_tile_block.cuh"

namespace sm80
{

/* ---- Row stats ---------------------------------------------------------------------------------------------- */

/* `reference`: LSE of the row's reference, whose rounding all P of the row share. */
__device__ inline query_stats teacher_stats(float lse, float reference)
{
    const skl_lse2 lse2 = split_lse2(lse);
    return {lse2.value, fmaf(split_lse2(reference).low - lse2.low, SKL_LN2, 1.0F)};
}

/* Address of a row vector's value; NULL if there is none. */
__device__ inline const float *row_address(const skl_input &rows, const skl_sequence &s, int64_t head, int64_t query)
{
    return rows.data != NULL ? (const float *)rows.data + SKL_ROW(rows, s.batch, head, s.query_begin + query) : NULL;
}

/* Stats of the queries of a product, in the warp that needs them: of its stationary rows one per lane, for dk of its
 * streamed rows two per lane. */
template <bool DK> struct warp_stats {
    static constexpr int PER_LANE = DK ? 2 : 1;
    query_stats of[PER_LANE];

    __device__ query_stats from(int lane, int n) const
    {
        return {__shfl_sync(~0U, of[n].lse, lane), __shfl_sync(~0U, of[n].factor, lane)};
    }
};

/* Statistics of the rows of a thread's accumulators; dk has those of one block of columns at a time. */
template <bool DK> struct tile_stats;

template <> struct tile_stats<false> {
    query_stats stationary[GROUP_M][2];

    __device__ tile_stats(const warp_stats<false> &stats, int lane)
    {
#pragma unroll
        for (int m = 0; m < GROUP_M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                stationary[m][half] = stats.from(m * 16 + half * 8 + lane / 4, 0);
    }

    __device__ void load(const warp_stats<false> &, int, int)
    {
    }

    __device__ query_stats of(int m, int e) const
    {
        return stationary[m][e / 2];
    }
};

template <> struct tile_stats<true> {
    query_stats streamed[2];

    __device__ tile_stats(const warp_stats<true> &, int)
    {
    }

    __device__ void load(const warp_stats<true> &stats, int lane, int block)
    {
#pragma unroll
        for (int parity = 0; parity < 2; parity++)
            streamed[parity] = stats.from(block * 4 + lane % 4, parity);
    }

    __device__ query_stats of(int, int e) const
    {
        return streamed[e % 2];
    }
};

static_assert(8 * GROUP_N == 2 * 32 && 16 * GROUP_M == 32, "stats of a warp's rows");

/* ---- Products ----------------------------------------------------------------------------------------------- */

/* Adds a teacher's head to the running mean. */
template <bool DK>
__device__ inline void add_head(group_logits &p, const group_logits &x, const warp_stats<DK> &stats, float scale,
                                float share, int lane)
{
    tile_stats<DK> queries(stats, lane);
#pragma unroll
    for (int block = 0; block < GROUP_N; block++) {
        queries.load(stats, lane, block);
#pragma unroll
        for (int m = 0; m < GROUP_M; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const query_stats query = queries.of(m, e);
                const float of_pair = ex2(fmaf(x[m][block][e], scale, -query.lse));
                float &mean = p[m][block][e];
                mean = fmaf(fmaf(of_pair, query.factor, -mean), share, mean);
            }
    }
}

__device__ inline void clear(group_logits &tile)
{
#pragma unroll
    for (int m = 0; m < GROUP_M; m++)
#pragma unroll
        for (int e = 0; e < 4 * GROUP_N; e++)
            tile[m][e / 4][e % 4] = 0.0F;
}

/* All products of the block. PASS has the rest:
 *
 *     skl_input lse_of(bool of_student)                         LSEs that it reads
 *     float load(product, int query)                            LSE of a teacher's head, upstream gradient of the
 *                                                               student; queries count as group_source.lse
 *     float reference(product, int query)                       LSE
 *     query_stats student_stats(float loaded, float reference)
 *     static constexpr bool USES_STATIONARY                     its student() overwrites the stationary rows
 *     static constexpr bool LOADS_REFERENCE                     a product ahead, too
 *     void student(p, y, streamed, stats, product)              for each stage
 */
template <typename ELEMENT, int DIM, bool DK, typename PARAMS, typename PASS>
__device__ inline void run_group_products(const PARAMS &params, group_smem<DIM> &smem, group_streamed<DIM> *slots,
                                          unsigned index, PASS &pass)
{
    typedef group_product<DK> product_type;
    const group_block &block = smem.block;
    const int group_size = params.group_size;
    const bool two_slots = params.slots == 2;
    const auto has_new_keys = [&](const product_type &of) { return (params.new_keys >> of.n() & 1) != 0; };
    const auto source_of = [&](const product_type &of) -> const group_source & {
        return smem.sources[of.list()][of.n()];
    };
    const auto list_sources = [&](const product_type &of) {
        const int n = (int)group_index(index);
        if (n <= group_size) {
            const bool of_student = n == group_size;
            const skl_cuda_argument &argument = of_student ? params.b : params.a;
            const int head = of_student ? of.head : of.head * group_size + n;
            const auto queries = queries_of<ELEMENT>(argument, block.sequence, head);
            const auto keys = keys_of<ELEMENT>(argument, block.sequence, head);
            smem.sources[of.list()][n] = {
                (DK ? keys : queries).from(block.first_row).rows, (DK ? queries : keys).from(block.origin).rows,
                row_address(pass.lse_of(of_student), block.sequence, head, DK ? block.origin : block.first_row)};
        }
        __syncthreads();
    };
    const auto rows_at = [&](const void *rows, const product_type &of, bool of_keys) {
        const bool of_student = of.n() == group_size;
        const int64_t stride_a = of_keys ? params.a.k.stride_row : params.a.q.stride_row;
        const int64_t stride_b = of_keys ? params.b.k.stride_row : params.b.q.stride_row;
        return row_source<ELEMENT>{(const ELEMENT *)rows, of_student ? stride_b : stride_a,
                                   of_student ? params.b.dim : params.a.dim};
    };
    /* Copies the rows of this warp and of the warps that share them. */
    const auto stationary_copy = [&](const product_type &of) {
        const group_thread thread(index_again());
        const auto from = rows_at(source_of(of).stationary, of, DK);
        return chunk_copy<DIM, 16 * GROUP_M, 32 * GROUP_SHARING, ELEMENT>(
            rows_from<DIM>(smem.g[thread.row][0]).chunks, from.from(thread.row), 0, block.rows - thread.row,
            thread.half() * 32 + thread.lane);
    };
    const auto replace_stationary = [&](const product_type &next) {
        if (!DK || has_new_keys(next)) {
            const auto copy = stationary_copy(next);
            group_thread(index).sync_rows(); /* the former rows are not needed any more */
            copy.start();
        }
    };
    const auto copy_streamed = [&](const product_type &of, int slot) {
        copy_chunks<DIM, GROUP_STREAMED, GROUP_THREADS>(slots[slot].chunks, rows_at(source_of(of).streamed, of, !DK),
                                                        of.first(), block.band.count, (int)group_index(index));
    };
    const auto query_of_lane = [&](const product_type &of, int n) {
        const group_thread thread(index);
        const int query = DK ? of.first() + thread.column + thread.lane * 2 + n : thread.row + thread.lane;
        return min(query, block.last_query);
    };
    /* Loaded a product ahead. */
    struct loaded_stats {
        float of[warp_stats<DK>::PER_LANE], reference[warp_stats<DK>::PER_LANE];
    };
    const auto load_stats = [&](loaded_stats &loaded, const product_type &of) {
#pragma unroll
        for (int n = 0; n < warp_stats<DK>::PER_LANE; n++) {
            loaded.of[n] = pass.load(of, query_of_lane(of, n));
            if (PASS::LOADS_REFERENCE)
                loaded.reference[n] = pass.reference(of, query_of_lane(of, n));
        }
    };
    const auto stats_of = [&](const product_type &of, const loaded_stats &loaded, bool of_student) {
        warp_stats<DK> stats;
#pragma unroll
        for (int n = 0; n < warp_stats<DK>::PER_LANE; n++) {
            const float reference =
                PASS::LOADS_REFERENCE ? loaded.reference[n] : pass.reference(of, query_of_lane(of, n));
            stats.of[n] =
                of_student ? pass.student_stats(loaded.of[n], reference) : teacher_stats(loaded.of[n], reference);
        }
        return stats;
    };
    /* Runs before the student's product, whose barrier follows. */
    const auto store_seen = [&](const product_type &of) {
        const group_thread thread(index);
        const int row = thread.row + thread.lane;
        if (of.n() == group_size && thread.half() == 0)
            smem.seen[row] = stage_range::of(block.band.of(row), of.first());
    };

    product_type now = {block.head, product_type::NEW_STREAMED};
    if (block.needed == 0)
        return;
    list_sources(now);
    stationary_copy(now).start();
    if (two_slots)
        copy_streamed(now, 0);
    loaded_stats loaded;
    load_stats(loaded, now);
    group_logits p = {};
    for (;;) {
        cp_async_commit();
        cp_async_wait<0>();
        if (now.slot(now.NEW_STREAMED)) {
            __syncthreads(); /* the rows are complete, and all warps have finished the product before */
            if (!two_slots) {
                copy_streamed(now, 0);
                cp_async_commit();
                cp_async_wait<0>();
                __syncthreads();
            }
        } else
            group_thread(index).sync_rows(); /* only warps that share stationary rows wait */
        {
            const product_type next = now.next(block, group_size);
            const bool exists = now.n() < group_size || next.exists(block);
            if (DK && exists && next.head != now.head)
                list_sources(next);
            const bool renewed = exists && (DK || has_new_keys(next));
            if (renewed && two_slots)
                copy_streamed(next, 1 - now.slot(now.STREAMED));
            now.at = renewed ? now.at | now.NEW_STREAMED : now.at & ~now.NEW_STREAMED;
        }
        group_streamed<DIM> &streamed = slots[now.slot(now.STREAMED)];
        group_logits logits;
        clear(logits);
        {
            const group_thread thread(index);
            multiply_add_smem<ELEMENT, DIM>(
                logits, a_address(rows_from<DIM>(smem.g[thread.row][0]), thread.lane),
                at_chunk<DIM>(logit_b_address<2>(rows_from<DIM>(streamed.chunks[0][0]), thread.lane), thread.column,
                              0));
        }
        if (now.n() < group_size) {
            replace_stationary(now.next(block, group_size));
            add_head<DK>(p, logits, stats_of(now, loaded, false), params.a.scale, params.shares[now.n()],
                         group_thread(index).lane);
        } else {
            const auto has_next = [&] { return now.next(block, group_size).exists(block); };
            if (!PASS::USES_STATIONARY && has_next())
                replace_stationary(now.next(block, group_size));
            pass.student(p, logits, streamed, stats_of(now, loaded, true), now);
            if (!has_next())
                break;
            clear(p);
            if (PASS::USES_STATIONARY)
                replace_stationary(now.next(block, group_size));
        }
        now = now.next(block, group_size);
        now.at ^= now.slot(now.NEW_STREAMED) && two_slots ? now.STREAMED : 0;
        load_stats(loaded, now);
        store_seen(now);
    }
    __syncthreads();
}

} // namespace sm80

#endif
