/* Teacher groups by mma.sync, sm_80 and up: the products that the forward, dq and dk share. 16-bit types, head sizes
 * up to 128, KL(P || S); the teacher's LSEs are known.
 *
 * A block has 128 stationary rows and streams stages of 128 rows: queries and keys, or for dk keys and queries
 * (mma_tile.cuh). P of a stage stays in registers while the heads of the group are multiplied, and then the student:
 *
 *   head n    X = rows_n streamed_n^T (mma)   ->  P += (2^(X - lse_n) - P) / (n + 1)
 *   student   Y = rows streamed^T (mma)       ->  row states, or G and its product with streamed rows
 *
 *   block      16 warps of 32 stationary rows x 32 streamed rows; 1 block per SM
 *   registers  P and the logits of a head (32 each); gradients have DIM / 4 more
 *   shared     one tile of stationary rows, two of streamed rows: 96 KB at DIM = 128
 *
 *   cp.async   streamed rows of the next product | its stationary rows
 *   warps      X (mma)                           | 2^x, P
 *
 * A warp multiplies all of its tile at once: 8 independent chains of mma, with both operands from shared memory.
 *
 * Four warps share their stationary rows: they copy them, and wait for each other before and after they read them.
 * The block waits where the streamed rows are new. In between, the four warps of a scheduler, which have different
 * rows, are free to be at different places: some multiply while others compute exponentials or addresses.
 *
 * Every product reads its rows again: the L2 cache holds the queries of a block's heads, which shared memory cannot
 * (32 KB per head). Rows that the product before it had, as keys of heads that share them, are not copied again.
 *
 * See common/group_rows.cuh for P and LSEs, which are those of sm90/attention/group_heads.cuh. */
#ifndef SKL_CUDA_SM80_ATTENTION_GROUP_TILE_PRODUCTS_CUH
#define SKL_CUDA_SM80_ATTENTION_GROUP_TILE_PRODUCTS_CUH

#include "cuda/common/group_rows.cuh"
#include "cuda/sm80/attention/group_tile_block.cuh"

namespace sm80
{

/* ---- Row stats ---------------------------------------------------------------------------------------------- */

/* Stats of a query as they are in global memory, loaded a product ahead. */
struct raw_stats {
    float lse, other; /* teacher: the LSE of the row's reference; student: the upstream gradient */
};

__device__ inline query_stats teacher_stats(const raw_stats &raw)
{
    const skl_lse2 lse = split_lse2(raw.lse);
    return {lse.value, fmaf(split_lse2(raw.other).low - lse.low, SKL_LN2, 1.0F)};
}

/* Address of a row vector's value; NULL if there is none. */
__device__ inline const float *row_address(const skl_input &rows, const skl_sequence &s, int64_t head, int64_t query)
{
    return rows.data != NULL ? (const float *)rows.data + SKL_ROW(rows, s.batch, head, s.query_begin + query) : NULL;
}

/* Stats of the queries of a warp's tile: of its stationary rows, or for dk of a block of its streamed ones. */
template <bool DK> struct tile_stats;

template <> struct tile_stats<false> {
    query_stats stationary[GROUP_M][2];

    __device__ tile_stats(const query_stats *stats, const group_thread &thread)
    {
#pragma unroll
        for (int m = 0; m < GROUP_M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                stationary[m][half] = stats[thread.acc_row(m, half)];
    }

    __device__ void load(const query_stats *, const group_thread &, int)
    {
    }

    __device__ query_stats of(int m, int e) const
    {
        return stationary[m][e / 2];
    }
};

template <> struct tile_stats<true> {
    query_stats streamed[2];

    __device__ tile_stats(const query_stats *, const group_thread &)
    {
    }

    __device__ void load(const query_stats *stats, const group_thread &thread, int block)
    {
        const float4 two = *(const float4 *)(const void *)&stats[thread.acc_column(block, 0)];
        streamed[0] = {two.x, two.y};
        streamed[1] = {two.z, two.w};
    }

    __device__ query_stats of(int, int e) const
    {
        return streamed[e % 2];
    }
};

/* ---- Products ----------------------------------------------------------------------------------------------- */

/* Adds a teacher's head to the running mean. */
template <bool DK>
__device__ inline void add_head(group_logits &p, const group_logits &x, const query_stats *stats, float scale,
                                float share)
{
    const group_thread thread = group_thread::read();
    tile_stats<DK> queries(stats, thread);
#pragma unroll
    for (int block = 0; block < GROUP_N; block++) {
        queries.load(stats, thread, block);
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
 *     raw_stats load(product, bool of_student, int query)       from global memory; queries count as group_source.lse
 *     query_stats student_stats(raw_stats)
 *     static constexpr bool USES_STATIONARY                     its student() overwrites the stationary rows
 *     void student(p, y, streamed, stats, product)              for each stage
 */
template <typename ELEMENT, int DIM, bool DK, typename PASS>
__device__ inline void run_group_products(const skl_cuda_params &params, group_smem<DIM> &smem, PASS &pass)
{
    typedef group_product<DK> product_type;
    const group_block &block = smem.block;
    const auto list_sources = [&](int student_head) {
        const int n = group_thread::index();
        if (n <= block.count) {
            const bool of_student = n == block.count;
            const skl_cuda_argument &argument = of_student ? params.b : params.a;
            const int head = of_student ? student_head : student_head * block.count + n;
            const auto queries = queries_of<ELEMENT>(argument, block.sequence, head);
            const auto keys = keys_of<ELEMENT>(argument, block.sequence, head);
            smem.sources[n] = {
                (DK ? keys : queries).from(block.first_row).rows, (DK ? queries : keys).from(block.origin).rows,
                row_address(pass.lse_of(of_student), block.sequence, head, DK ? block.origin : block.first_row),
                1.0F / (float)(n + 1), n == 0 || of_student || head % argument.heads_per_key == 0};
        }
        __syncthreads();
    };
    const auto side_of_product = [&](const product_type &of) -> const skl_cuda_argument & {
        return of.n() == block.count ? params.b : params.a;
    };
    const auto rows_at = [&](const void *rows, const product_type &of, bool of_keys) {
        const skl_cuda_argument &argument = side_of_product(of);
        return row_source<ELEMENT>{(const ELEMENT *)rows, of_keys ? argument.k.stride_row : argument.q.stride_row,
                                   argument.dim};
    };
    /* The rows of this warp and the one that shares them. */
    const auto copy_stationary = [&](const product_type &of) {
        const group_thread thread = group_thread::read();
        const auto from = rows_at(smem.sources[of.n()].stationary, of, DK);
        copy_chunks<DIM, 16 * GROUP_M, 32 * GROUP_SHARING>(&smem.stationary[0].chunks[thread.row],
                                                           from.from(thread.row), 0, block.rows - thread.row,
                                                           thread.quarter() * 32 + thread.lane);
    };
    const auto copy_streamed = [&](const product_type &of, int slot) {
        copy_chunks<DIM, GROUP_TILE_ROWS, GROUP_THREADS>(smem.streamed[slot][0].chunks,
                                                         rows_at(smem.sources[of.n()].streamed, of, !DK), of.first(),
                                                         block.band.count, group_thread::index());
    };
    const auto load_stats = [&](const product_type &of) {
        const group_thread thread = group_thread::read();
        const int row = thread.row + thread.lane;
        return pass.load(of, of.n() == block.count, min(DK ? of.first() + row : row, block.last_query));
    };
    const auto store_stats = [&](const product_type &of, const raw_stats &raw, int slot) {
        const group_thread thread = group_thread::read();
        const int row = thread.row + thread.lane;
        if (thread.quarter() != 0)
            return;
        smem.stats[slot][row] = of.n() == block.count ? pass.student_stats(raw) : teacher_stats(raw);
        if (of.n() == block.count)
            smem.seen[row] = stage_range::of(block.band.of(row), of.first());
    };

    product_type now = {block.head, product_type::NEW_STREAMED};
    if (block.needed == 0)
        return;
    list_sources(now.head);
    copy_stationary(now);
    copy_streamed(now, 0);
    cp_async_commit();
    store_stats(now, load_stats(now), 0);
    group_logits p = {};
    while (now.exists(block)) {
        cp_async_wait<0>();
        if (now.slot(now.NEW_STREAMED))
            __syncthreads(); /* the rows are complete, and all warps have finished the product before */
        else
            group_thread::read().sync_rows(); /* the same for the stationary rows: warps with others need not wait */
        {
            const product_type next = now.next(block);
            const bool more = next.exists(block);
            if (DK && more && next.head != now.head) {
                __syncthreads();
                list_sources(next.head);
            }
            const bool renewed = more && (DK || smem.sources[next.n()].new_keys);
            if (renewed)
                copy_streamed(next, 1 - now.slot(now.STREAMED));
            cp_async_commit();
            now.at = renewed ? now.at | now.NEW_STREAMED : now.at & ~now.NEW_STREAMED;
        }
        group_tile<DIM> &streamed = smem.streamed[now.slot(now.STREAMED)];
        group_logits logits;
        clear(logits);
        {
            const group_thread thread = group_thread::read();
            multiply_add_smem<ELEMENT, DIM>(
                logits, at_chunk<DIM>(a_address(smem.stationary[0], thread.lane), thread.row, 0),
                at_chunk<DIM>(logit_b_address<2>(streamed[0], thread.lane), thread.column, 0));
        }
        const product_type next = now.next(block);
        const bool of_student = now.n() == block.count, more = next.exists(block);
        const auto load_next = [&] {
            const raw_stats raw = more ? load_stats(next) : raw_stats{};
            if (more && (!DK || smem.sources[next.n()].new_keys)) {
                group_thread::read().sync_rows(); /* the stationary rows are not needed any more */
                copy_stationary(next);
            }
            cp_async_commit();
            return raw;
        };
        raw_stats raw;
        const query_stats *const stats = smem.stats[now.slot(now.STATS)];
        if (!of_student) {
            raw = load_next();
            add_head<DK>(p, logits, stats, params.a.scale, smem.sources[now.n()].share);
        } else {
            if (!PASS::USES_STATIONARY)
                raw = load_next();
            pass.student(p, logits, streamed, stats, now);
            clear(p);
            if (PASS::USES_STATIONARY)
                raw = load_next();
        }
        now = next;
        now.at ^= now.STATS | (now.slot(now.NEW_STREAMED) ? now.STREAMED : 0);
        if (more)
            store_stats(now, raw, now.slot(now.STATS));
    }
    cp_async_wait<0>();
    __syncthreads();
}

} // namespace sm80

#endif
