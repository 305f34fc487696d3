/* What the products of a teacher group by mma.sync share: tiles, threads, and a block's shared memory. See
 * group_tile_products.cuh. */
#ifndef SKL_CUDA_SM80_ATTENTION_GROUP_TILE_BLOCK_CUH
#define SKL_CUDA_SM80_ATTENTION_GROUP_TILE_BLOCK_CUH

#include "cuda/sm80/mma_tile.cuh"

namespace sm80
{

constexpr int GROUP_TILE_ROWS = 128; /* stationary rows of a block, streamed rows of a stage */
constexpr int GROUP_M = 2;           /* tiles of 16 stationary rows per warp */

constexpr int GROUP_N = 4;                                     /* blocks of 8 streamed rows per warp */
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

    __device__ int quarter() const /* of the stage */
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

} // namespace sm80

#endif
