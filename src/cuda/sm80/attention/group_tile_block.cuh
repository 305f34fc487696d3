/* Tiles, threads and shared memory of the products of a teacher group by mma.sync. See group_tile_products.cuh. */
#ifndef SKL_CUDA_SM80_ATTENTION_GROUP_TILE_BLOCK_CUH
#define SKL_CUDA_SM80_ATTENTION_GROUP_TILE_BLOCK_CUH

#include "cuda/sm80/mma_tile.cuh"

namespace sm80
{

constexpr int GROUP_STATIONARY = SKL_GROUP_TILES_ROWS; /* stationary rows of a block */
constexpr int GROUP_STREAMED = 128;                    /* streamed rows of a stage */
constexpr int GROUP_BLOCKS_PER_SM = SKL_GROUP_TILES_BLOCKS;

constexpr int GROUP_SHARING = 2;                              /* warps with the same stationary rows */
constexpr int GROUP_M = 2;                                    /* tiles of 16 stationary rows per warp */
constexpr int GROUP_N = GROUP_STREAMED / (8 * GROUP_SHARING); /* blocks of 8 streamed rows per warp */
constexpr int GROUP_THREADS = GROUP_STATIONARY / (16 * GROUP_M) * GROUP_SHARING * 32;
constexpr int GROUP_TILE_M = GROUP_STATIONARY / 64; /* M of query_tile and row_tile */

template <int DIM> struct group_streamed {
    uint4 chunks[GROUP_STREAMED][DIM / 8];
};

typedef float group_logits[GROUP_M][GROUP_N][4]; /* logits or P of a warp: stationary x streamed rows */

/* Statistics of a query. Teacher: LSE in base 2, and the factor that all P of the row share, relative to the head's
 * own. Student: LSE, and the factor of G. */
struct alignas(8) query_stats {
    float lse, factor;
};

/* Streamed rows of a stage that a stationary row sees. */
struct stage_range {
    unsigned char begin, end;

    __device__ static stage_range of(const range32 &sees, int first)
    {
        return {(unsigned char)min(max(sees.begin - first, 0), GROUP_STREAMED),
                (unsigned char)min(max(sees.end - first, 0), GROUP_STREAMED)};
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

/* Facts that all products of a block share, in shared memory to save registers. */
struct group_block {
    skl_sequence sequence;
    int64_t first_row; /* stationary */
    int64_t origin;    /* streamed row that the rows of the stages count from */
    int rows, needed;  /* stationary rows that exist; streamed rows up to the last one that some row needs */
    int last_query;    /* last query, counted from the first stationary or streamed one */
    int head, end;     /* student heads */
    range32 full;      /* streamed rows that all stationary rows see */
    bounded_band band;
};

/* Rows of a product in global memory: of its tensors, from the block's first stationary row and from
 * group_block.origin on, and LSEs of the queries among them (NULL: not needed). Listed for a whole group, because the
 * divisions and 64-bit products that they follow from took more time than a product. */
struct group_source {
    const void *stationary, *streamed;
    const float *lse;
};

/* Rows that begin at this chunk of shared memory, for addresses. */
template <int DIM> __device__ inline smem_rows<DIM> &rows_from(uint4 &first)
{
    return *(smem_rows<DIM> *)(void *)&first;
}

/* The beginning of a block's shared memory; one or two slots for streamed rows follow. */
template <int DIM> struct alignas(128) group_smem {
    /* G of a stage, once the student's product has read the stationary rows. Before that, stationary rows that some
     * warps share begin where the G of these warps does: other warps neither read nor write there, so these need not
     * wait for the block. */
    uint4 g[GROUP_STATIONARY][GROUP_STREAMED / 8];
    group_source sources[2][SKL_GROUP_TILES_SIZE_MAX + 1]; /* operands of a student head's products, first the
                                                            * teacher's; and those of the next head */
    stage_range seen[GROUP_STATIONARY]; /* stages that the stationary rows see, in the student's product */
    group_block block;
};

/* Parameters of a kernel. What decides about every product is in the constant bank: loads from shared memory would
 * wait for each other. */
template <typename PARAMS> struct group_tile_params : PARAMS {
    int32_t group_size;
    uint32_t new_keys; /* bit n: the keys of product n may be others than those of the product before it */
    int32_t slots;     /* for streamed rows: 2, or 1 where two blocks of two slots do not fit into an SM */
    float shares[SKL_GROUP_TILES_SIZE_MAX]; /* share of a teacher head in the mean of the heads up to it */
};

/* SMEM: what precedes the slots of the streamed rows. */
template <int DIM, typename SMEM, typename PARAMS>
group_tile_params<PARAMS> group_tile_params_of(const PARAMS &params, const skl_cuda_launch *launch)
{
    constexpr int RESERVED = 1024; /* bytes per block that the system reserves */
    constexpr int TWO = GROUP_BLOCKS_PER_SM * (int)(sizeof(SMEM) + 2 * sizeof(group_streamed<DIM>) + RESERVED);
    constexpr int ONE = GROUP_BLOCKS_PER_SM * (int)(sizeof(SMEM) + sizeof(group_streamed<DIM>) + RESERVED);
    static_assert(TWO <= 164 << 10 && ONE <= 100 << 10, "shared memory of a data center GPU, of a consumer card");
    const int size = (int)skl_group_size(&params.problem), sharing = params.a.heads_per_key;
    group_tile_params<PARAMS> result = {params, size, 1U | 1U << size, TWO <= launch->smem_per_sm ? 2 : 1, {}};
    for (int n = 0; n < size; n++) {
        if (sharing % size != 0 && (size % sharing != 0 || n % sharing == 0))
            result.new_keys |= 1U << n;
        result.shares[n] = 1.0F / (float)(n + 1);
    }
    return result;
}

/* One product of a block, in two registers. */
template <bool DK> struct group_product {
    enum {
        HEADS = 15,        /* bits of the number of the product */
        STREAMED = 16,     /* bit: which slot the streamed rows are in */
        NEW_STREAMED = 32, /* the streamed rows of the next product are others: the block has to wait for them */
    };
    int head; /* student head */
    int at;   /* first streamed row of the stage, and the bits above */

    /* Teacher head of the group; after the last one: the student. */
    __device__ int n() const
    {
        return at & HEADS;
    }

    /* Returns the index of the product's list in group_smem.sources. */
    __device__ int list() const
    {
        return DK ? head % 2 : 0;
    }

    __device__ int first() const
    {
        return at & -GROUP_STREAMED;
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

    /* Returns the next product: after the last teacher head's comes the student's, and then the next stage. */
    __device__ group_product next(const group_block &block, int group_size) const
    {
        const int slots = at & (STREAMED | NEW_STREAMED);
        if (n() < group_size)
            return {head, at + 1};
        const int stage = first() + GROUP_STREAMED;
        return DK && stage >= block.needed ? group_product{head + 1, slots} : group_product{head, stage | slots};
    }
};

static_assert(SKL_GROUP_TILES_SIZE_MAX <= (int)group_product<true>::HEADS, "");

/* A value that the compiler keeps in a register, because it cannot compute it again: special registers, which the
 * addresses of threads and of shared memory come from, are slow. */
__device__ inline unsigned kept(unsigned value)
{
    return __shfl_sync(~0U, value, (int)threadIdx.x % 32);
}

__device__ inline void *kept_address(void *shared)
{
    return __cvta_shared_to_generic(kept(shared_address(shared)));
}

/* An opaque threadIdx.x, kept(threadIdx.x): the compiler cannot hoist the dozens of addresses that follow from it
 * into registers for the whole loop. */
__device__ inline unsigned group_index(unsigned kept_index)
{
    asm volatile("" : "+r"(kept_index));
    return kept_index % GROUP_THREADS; /* tells the compiler its range */
}

/* The thread's index, read again: the compiler cannot keep numbers derived from an earlier use. */
__device__ inline unsigned index_again()
{
    unsigned index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

/* The position of a thread in the tile, computed for every product. */
struct group_thread {
    int lane;
    int row;    /* first of the warp's stationary rows */
    int column; /* first of its streamed rows within a stage */

    __device__ explicit group_thread(unsigned kept_index)
    {
        const unsigned index = group_index(kept_index);
        lane = (int)(index % 32);
        row = (int)(index / (32 * GROUP_SHARING) * 16 * GROUP_M);
        column = (int)(index / 32 % GROUP_SHARING * 8 * GROUP_N);
    }

    /* Waits for the other warps with the same stationary rows. */
    __device__ void sync_rows() const
    {
        named_barrier_sync(1 + sharing(), 32 * GROUP_SHARING);
    }

    __device__ int sharing() const /* index among the groups of shared stationary rows */
    {
        return row / (16 * GROUP_M);
    }

    __device__ int half() const /* half of the stage */
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
                                       int rows, const streamed_band &all, int head, int end)
{
    const range32 full = reach_of(all.band, 0, GROUP_STATIONARY).all;
    const int64_t queries = sequence.query_count - (DK ? all.origin : first_row);
    const int last_query = (int)skl_min(queries, SKL_ROWS_MAX) - 1;
    smem.block = {sequence, first_row, all.origin, rows, all.needed, last_query, head, end, full, all.band};
}

} // namespace sm80

#endif
