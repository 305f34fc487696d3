/* General statistics of one attention: f32 FFMA products of rows of any type, size and stride. See
 * common/stats_tile.cuh.
 *
 *   block   128 queries x 64 keys per tile, 8 x 4 pairs per thread
 *   shared  71 KB: two stages of both operands (33 KB), log2 P of a tile (33 KB), row data */
#include "cuda/common/stats_tile.cuh"
#include "cuda/general/tile.cuh"

struct general_stats_product {
    static constexpr int QUERIES = TILE, COLUMNS = tensor_core::STATS_KEYS / LANES, BLOCKS_PER_SM = 1;
    static constexpr bool GENERAL = true;
    struct memory {
        pipeline_memory pipe;
        tile_side side;
    };

    memory &shared;
    pipeline<COLUMNS> pipe;
    /* The current tile has these: */
    const tensor_core::stats_chunk *chunk;
    int first;

    __device__ explicit general_stats_product(memory &of_block) : shared(of_block), pipe(of_block.pipe)
    {
    }

    __device__ tile_operands operands(int stage) const
    {
        const skl_sequence &s = chunk->sequence;
        const tile_side &of = shared.side;
        const int64_t key_head = chunk->head / of.heads_per_key;
        return {make_row_source(of.q, of.dtype, of.dim, SKL_ROW(of.q, s.batch, chunk->head, s.query_begin), first,
                                s.query_count),
                make_row_source(of.k, of.dtype, of.dim, SKL_ROW(of.k, s.batch, key_head, s.key_begin),
                                (int64_t)stage * tensor_core::STATS_KEYS, s.key_count)};
    }

    __device__ void begin(const stats_params &params, const tensor_core::stats_chunk &of_block, int first_query,
                          int stage)
    {
        chunk = &of_block;
        first = first_query;
        if (threadIdx.x == 0)
            shared.side = tile_side_of(skl_student_of(&params.problem, &params.call));
        pipe.begin([&] { return operands(stage); });
    }

    template <typename STORE> __device__ void multiply(int next, STORE store)
    {
        fragment<COLUMNS> x;
        pipe.prefetch([&] { return operands(next >= 0 ? next : 1 << 24); }); /* rows after the last key read as 0 */
        pipe.multiply_tile(x);
        scale_products(x, shared.side);
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                store(acc_row(i), acc_column(j), x.at[i][j]);
    }
};

extern "C" cudaError_t skl_cuda_general_stats(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    record_launch("cuda_general", SKL_VARIANT_STATS, 1);
    return tensor_core::launch_stats_tiles<general_stats_product>(params, launch);
}
