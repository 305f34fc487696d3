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
 * A warp multiplies its whole tile at once: 8 independent chains of mma, with both operands from shared memory.
 *
 * Four warps share their stationary rows: they copy them, and wait for each other before and after they read them. The
 * block waits where the streamed rows are new. In between, the four warps of a scheduler, which have different rows,
 * are free to be at different places: some multiply while others compute exponentials or addresses.
 *
 * Every product reads its rows again: the L2 cache holds the queries of a block's heads, which shared memory cannot
 * (32 KB per head). Rows that the product before it had, as keys of heads that share them, are not copied again.
 *
 * See common/group_rows.cuh for P and LSEs, which are those of sm90/attention/group_heads.cuh. */
#ifndef SKL_CUDA_SM80_ATTENTION_GROUP_TILE_PRODUCTS_CUH
#define SKL_CUDA_SM80_ATTENTION_GROUP_TILE_PRODUCTS_CUH

#include "cuda/common/group_rows.cuh"
#include "cuda/sm80/mma_tile.cuh"

namespace sm80
{

constexpr int GROUP_TILE_ROWS = 128; /* stationary rows of a block, streamed rows of a stage */
constexpr int GROUP_M = 2;           /* tiles of 16 stationary rows per warp */

constexpr int GROUP_N = 4;           /* blocks of 8 streamed rows per warp */
constexpr int GROUP_SHARING = GROUP_TILE_ROWS / (8 * GROUP_N); /* warps with the same stationary rows */
constexpr int GROUP_THREADS = GROUP_TILE_ROWS / (16 * GROUP_M) * GROUP_SHARING * 32;

static_assert(GROUP_TILE_ROWS == TILE_ROWS<GROUP_M>, "");

template <int DIM> using group_tile = smem_rows<DIM>[2]; /* 128 rows */

typedef float group_logits[GROUP_M][GROUP_N][4]; /* of a warp: 32 stationary rows x 32 streamed rows; also P */

/* Of a query. Teacher: LSE in base 2, and the factor that all P of the row share, relative to the head's own.
 * Student: LSE, and the factor of G. */
struct alignas(8) query_stats {
    float lse, factor;
};

/* Streamed rows of a stage that a stationary row sees. */
struct stage_range {
    unsigned char begin, end;

    __device__ static stage_range of(const range32 &sees, int first)
    {
        return {(unsigned char)min(max(sees.begin - first, 0), GROUP_TILE_ROWS),
                (unsigned char)min(max(sees.end - first, 0), GROUP_TILE_ROWS)};
    }

    __device__ bool has(int row) const
    {
        return row >= begin && row < end;
    }

    __device__ range32 from(int row) const /* counted from this row on */
    {
        return {begin - row, end - row};
    }
};

/* What all products of a block share, in shared memory to save registers. */
struct group_block {
    skl_sequence sequence;
    int64_t first_row; /* stationary */
    int64_t origin;    /* streamed row that the rows of the stages count from */
    int rows, needed;  /* stationary rows that exist; streamed rows up to the last one that some row needs */
    int last_query;    /* of the sequence, from the first stationary or streamed one on */
    int head, end;     /* student heads */
    int count;         /* teacher heads of each */
    range32 full;      /* streamed rows that all stationary rows see */
    bounded_band band;
};

/* Rows of a product in global memory: of its tensors, from the block's first stationary row and from
 * group_block.origin on, and LSEs of the queries among them (NULL: not needed). Listed for a whole group, because the
 * divisions and 64-bit products that they follow from took more time than a product. */
struct group_source {
    const void *stationary, *streamed;
    const float *lse;
    float share;  /* of a teacher's head in the mean of those up to it */
    int new_keys; /* whether its keys are others than those of the product before it */
};

template <int DIM> struct group_smem {
    group_tile<DIM> stationary, streamed[STAGES];
    group_source sources[SKL_GROUP_TILES_SIZE_MAX + 1]; /* of the student head's products: the teacher's, its own */
    alignas(16) query_stats stats[2][GROUP_TILE_ROWS];  /* of a product, and of the next one; read in pairs */
    stage_range seen[GROUP_TILE_ROWS];                  /* of the stationary rows, in the student's product */
    group_block block;
};

/* One product of a block, in two registers. */
template <bool DK> struct group_product {
    enum {
        HEADS = 15,        /* bits of the number of the product */
        STREAMED = 16,     /* bit: which slot the streamed rows are in */
        STATS = 32,        /* bit: which slot the stats are in */
        NEW_STREAMED = 64, /* the streamed rows of the next product are others: the block has to wait for them */
    };
    int head; /* of the student */
    int at;   /* first streamed row of the stage, and the bits above */

    /* Teacher head of the group; after the last one: the student. */
    __device__ int n() const
    {
        return at & HEADS;
    }

    __device__ int first() const
    {
        return at & -GROUP_TILE_ROWS;
    }

    __device__ int slot(int bit) const
    {
        return (at & bit) != 0;
    }

    /* False: it comes after the last one. */
    __device__ bool exists(const group_block &block) const
    {
        return DK ? head < block.end : first() < block.needed;
    }

    __device__ group_product next(const group_block &block) const
    {
        const int slots = at & (STREAMED | STATS | NEW_STREAMED);
        if (n() < block.count)
            return {head, at + 1};
        const int stage = first() + GROUP_TILE_ROWS;
        return DK && stage >= block.needed ? group_product{head + 1, slots} : group_product{head, stage | slots};
    }
};

static_assert(SKL_GROUP_TILES_SIZE_MAX <= (int)group_product<true>::HEADS, "");

/* Where a thread is in the tile. Read again for every product, by instructions that the compiler does not move: it
 * would keep dozens of addresses that follow from it in registers during the whole loop. */
struct group_thread {
    int lane;
    int row;    /* first of the warp's stationary rows */
    int column; /* first of its streamed rows within a stage */

    __device__ static int index()
    {
        unsigned thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        return (int)(thread % GROUP_THREADS); /* tells the compiler its range */
    }

    /* Two warps of one scheduler, w and w + 4, have different rows and do not wait for each other. */
    __device__ static group_thread read()
    {
        const unsigned thread = (unsigned)index();
        return {(int)(thread % 32), (int)(thread / (32 * GROUP_SHARING) * 16 * GROUP_M),
                (int)(thread / 32 % GROUP_SHARING * 8 * GROUP_N)};
    }

    /* Waits for the other warps with the same stationary rows. */
    __device__ void sync_rows() const
    {
        named_barrier_sync(1 + row / (16 * GROUP_M), 32 * GROUP_SHARING);
    }

    __device__ int part() const /* of the stage */
    {
        return column / (8 * GROUP_N);
    }

    /* Stationary row of an accumulator, and streamed row within a stage. */
    __device__ int acc_row(int m, int half) const
    {
        return row + m * 16 + lane / 4 + half * 8;
    }

    __device__ int acc_column(int block, int parity) const
    {
        return column + block * 8 + lane % 4 * 2 + parity;
    }
};

/* Executed by one thread, before a barrier; `band` of stream_for(). */
template <bool DK, int DIM>
__device__ inline void set_group_block(group_smem<DIM> &smem, const skl_sequence &sequence, int64_t first_row,
                                       int rows, const streamed_band &all, int head, int end, int count)
{
    const range32 full = reach_of(all.band, 0, GROUP_TILE_ROWS).all;
    const int64_t queries = sequence.query_count - (DK ? all.origin : first_row);
    const int last_query = (int)skl_min(queries, SKL_ROWS_MAX) - 1;
    smem.block = {sequence, first_row, all.origin, rows, all.needed, last_query, head, end, count, full, all.band};
}

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
        copy_chunks<DIM, 16 * GROUP_M, 32 * GROUP_SHARING>(&smem.stationary[0].chunks[thread.row], from.from(thread.row), 0,
                                           block.rows - thread.row, thread.part() * 32 + thread.lane);
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
        if (thread.part() != 0)
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
