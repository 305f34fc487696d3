/* What the mma.sync kernels share: a warp owns 16 M rows of one tensor pair in registers, the block streams rows of
 * the other through shared memory, and every step multiplies the warp's rows with 16 of the streamed ones.
 *
 *                      streamed, 64 a stage
 *                    +----+----+----+----+
 *   warp 0, 16 M own |    |    |    |    |   forward, dq: own = queries, streamed = keys
 *   warp 1           |    |    |    |    |   dk:          own = keys, streamed = queries
 *   ...              +----+----+----+----+
 *
 * Both sides of the KL (first and second argument) are held and streamed together. Steps are short, 8 or 16 streamed
 * rows, so that their logits fit into registers beside own rows and sums. Blocks are small, so that two or three
 * share a multiprocessor: one's exponentials run beside another one's products.
 *
 * Shared memory holds rows of DIM 16-bit elements in 16-byte chunks, exchanged by chunk ^= row % 8: ldmatrix, plain
 * or transposed, meets no bank twice. */
#ifndef SKL_CUDA_SM80_TILE_CUH
#define SKL_CUDA_SM80_TILE_CUH

#include "base/kl_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/sequence.cuh"

namespace sm80
{

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int STAGES = 2;
template <int DIM> constexpr int STAGE_ROWS = DIM > 128 ? 32 : 64; /* consumer cards have 99 KB of shared memory */

/* ---- Rows of tensors ---------------------------------------------------------------------------------------- */

template <typename ELEMENT> struct row_source {
    const ELEMENT *rows;
    int64_t stride;
    int dim;

    __device__ row_source from(int64_t row) const
    {
        return {rows + row * stride, stride, dim};
    }
};

template <typename ELEMENT>
__device__ inline row_source<ELEMENT> queries_of(const skl_cuda_argument &side, const skl_sequence &s, int64_t head)
{
    return {(const ELEMENT *)side.q.data + SKL_ROW(side.q, s.batch, head, s.query_begin), side.q.stride_row,
            side.dim};
}

template <typename ELEMENT>
__device__ inline row_source<ELEMENT> keys_of(const skl_cuda_argument &side, const skl_sequence &s, int64_t head)
{
    return {(const ELEMENT *)side.k.data + SKL_ROW(side.k, s.batch, (int)head / side.heads_per_key, s.key_begin),
            side.k.stride_row, side.dim};
}

/* The warp's own rows as A operands. */
template <int DIM, int M> struct own_rows {
    uint32_t a[M][DIM / 16][4];
};

/* Own row m, half of a thread, counted from the block's first: half 0 is lane / 4 of 16, half 1 the one 8 behind. */
template <int M> __device__ inline int acc_row(int m, int half)
{
    return ((int)threadIdx.x / 32 * M + m) * 16 + (int)threadIdx.x % 32 / 4 + half * 8;
}

/* ---- Streamed rows ------------------------------------------------------------------------------------------ */

template <int DIM> struct staged_rows {
    uint4 chunks[STAGE_ROWS<DIM>][DIM / 8];
};

/* A stage holds rows of the first and of the second argument. */
template <int DIM> struct stage_memory {
    staged_rows<DIM> a, b;
};

/* Starts copying rows [first, first + STAGE_ROWS<DIM>); rows behind `count` and dimensions that are not there become
 * 0. */
template <int DIM, typename ELEMENT>
__device__ inline void copy_rows(staged_rows<DIM> &to, const row_source<ELEMENT> &from, int first, int count)
{
    constexpr int CHUNKS = DIM / 8;
    constexpr int ROWS = THREADS / CHUNKS; /* that the block copies at once */
    static_assert(STAGE_ROWS<DIM> % ROWS == 0 && ROWS >= 4, "every thread copies as many chunks");
    const int row = (int)threadIdx.x / CHUNKS;
    const int chunk = (int)threadIdx.x % CHUNKS;
    const ELEMENT *const source = from.rows + (first + row) * from.stride + chunk * 8;
    const uint32_t target = shared_address(&to.chunks[row][chunk ^ (row & 7)]);
    const int left = chunk * 8 < from.dim ? count - first - row : 0;
#pragma unroll
    for (int n = 0; n < STAGE_ROWS<DIM> / ROWS; n++)
        cp_async_16((target ^ (uint32_t)(n * ROWS % 8 * 16)) + (uint32_t)(n * ROWS * DIM * 2),
                    source + n * ROWS * from.stride, n * ROWS < left ? 16 : 0);
}

/* Address of a lane's row for ldmatrix: the 8 x 8 matrices lie `down` rows and `right` chunks apart. With rows of
 * 128 bytes or more, chunk c of that row is the address with 16 c exchanged into bits 4..6. */
template <int DIM> __device__ inline uint32_t matrix_address(const staged_rows<DIM> &rows, int down, int right)
{
    const int lane = (int)threadIdx.x % 32;
    return shared_address(&rows.chunks[down * 8 + lane % 8][right ^ lane % 8]);
}

template <int DIM> __device__ inline uint32_t at_chunk(uint32_t address, int row, int chunk)
{
    return (address ^ (uint32_t)(chunk % 8 * 16)) + (uint32_t)(chunk / 8 * 128 + row * DIM * 2);
}

/* A operands: {rows 0..7, 8..15} x {dimensions 0..7, 8..15}, dimensions slowest. */
template <int DIM> __device__ inline uint32_t own_operand(const staged_rows<DIM> &rows)
{
    const int lane = (int)threadIdx.x % 32;
    return matrix_address(rows, lane / 8 % 2, lane / 16);
}

/* B operands of logits for steps of 8 BLOCKS streamed rows: {rows 0..7, 8..15} x {dimensions 0..7, 8..15}, or 8 rows
 * x four times 8 dimensions. */
template <int BLOCKS, int DIM> __device__ inline uint32_t logit_operand(const staged_rows<DIM> &rows)
{
    const int lane = (int)threadIdx.x % 32;
    return BLOCKS == 2 ? matrix_address(rows, lane / 16, lane / 8 % 2) : matrix_address(rows, 0, lane / 8);
}

/* B operands of a gradient, transposed: {dimensions 0..7, 8..15} x {rows 0..7, 8..15}. */
template <int DIM> __device__ inline uint32_t gradient_operand(const staged_rows<DIM> &rows)
{
    const int lane = (int)threadIdx.x % 32;
    return matrix_address(rows, lane / 8 % 2, lane / 16);
}

/* The block's own rows, through memory for as many of them; rows behind `count` become 0. */
template <int DIM, int M, typename ELEMENT>
__device__ inline void load_own(own_rows<DIM, M> &own, staged_rows<DIM> *area, const row_source<ELEMENT> &from,
                                int count)
{
    constexpr int ROWS = WARPS * 16 * M;
#pragma unroll
    for (int first = 0; first < ROWS; first += STAGE_ROWS<DIM>)
        copy_rows(area[first / STAGE_ROWS<DIM>], from, first, count);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    const int warp_row = (int)threadIdx.x / 32 * 16 * M;
    const uint32_t operand = own_operand(area[warp_row / STAGE_ROWS<DIM>]);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
            ldmatrix_x4(own.a[m][k], at_chunk<DIM>(operand, warp_row % STAGE_ROWS<DIM> + m * 16, 2 * k));
    __syncthreads();
}

/* Through all of the stages' memory. */
template <int DIM, int M, typename ELEMENT>
__device__ inline void load_own(own_rows<DIM, M> &own, stage_memory<DIM> (&stages)[STAGES],
                                const row_source<ELEMENT> &from, int count)
{
    static_assert(WARPS * 16 * M <= STAGES * 2 * STAGE_ROWS<DIM>, "own rows fit into the stages");
    load_own(own, &stages[0].a, from, count);
}

/* ---- Logits ------------------------------------------------------------------------------------------------- */

/* Logits of one side for a step of 8 BLOCKS streamed rows: [m][block][half * 2 + parity]. */
template <int M, int BLOCKS> struct logits {
    float at[M][BLOCKS][4];
};

/* Streamed row of an element, counted from the step's first. */
__device__ inline int acc_column(int block, int parity)
{
    return block * 8 + (int)threadIdx.x % 4 * 2 + parity;
}

/* x = own rows times the streamed rows from `row` on. */
template <typename ELEMENT, int DIM, int M, int BLOCKS>
__device__ inline void multiply(logits<M, BLOCKS> &x, const own_rows<DIM, M> &own, uint32_t operand, int row)
{
    constexpr int K = 2 / BLOCKS; /* times 16 dimensions that one ldmatrix brings */
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int e = 0; e < BLOCKS * 4; e++)
            x.at[m][e / 4][e % 4] = 0.0F;
#pragma unroll
    for (int k = 0; k < DIM / 16; k += K) {
        uint32_t b[4];
        ldmatrix_x4(b, at_chunk<DIM>(operand, row, 2 * k));
#pragma unroll
        for (int part = 0; part < 2; part++)
#pragma unroll
            for (int m = 0; m < M; m++)
                mma_m16n8k16(x.at[m][BLOCKS == 2 ? part : 0], own.a[m][BLOCKS == 2 ? k : k + part], b[2 * part],
                             b[2 * part + 1], ELEMENT());
    }
}

/* x += 16 M own rows times 8 N streamed ones, both staged, DIM dimensions of them; N is even. Operands are those of
 * the first own and streamed row. */
template <typename ELEMENT, int DIM, int M, int N>
__device__ inline void add_staged(float (&x)[M][N][4], uint32_t own, uint32_t streamed)
{
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
            ldmatrix_x4(a[m], at_chunk<DIM>(own, m * 16, 2 * k));
#pragma unroll
        for (int pair = 0; pair < N / 2; pair++) {
            uint32_t b[4];
            ldmatrix_x4(b, at_chunk<DIM>(streamed, pair * 16, 2 * k));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_m16n8k16(x[m][2 * pair], a[m], b[0], b[1], ELEMENT());
                mma_m16n8k16(x[m][2 * pair + 1], a[m], b[2], b[3], ELEMENT());
            }
        }
    }
}

/* Caps logits if the argument has a cap; returns what still scales them. */
template <int M, int BLOCKS>
__device__ inline float cap_logits(logits<M, BLOCKS> &x, const skl_cuda_argument &argument)
{
    if (!argument.capped)
        return argument.scale;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int e = 0; e < BLOCKS * 4; e++)
            x.at[m][e / 4][e % 4] = argument.softcap_2 * tanhf(x.at[m][e / 4][e % 4] * argument.scale);
    return 1.0F;
}

/* ---- Work --------------------------------------------------------------------------------------------------- */

/* Streamed rows counted from the first that the block needs, in 32 bits. */
struct range32 {
    int begin, end;
};

/* skl_band for a block: own rows counted from the block's first, streamed rows from `origin`. */
struct band32 {
    int begin, end, count;

    __device__ range32 of(int row) const
    {
        return {max(0, begin + row), min(count, end + row)};
    }
};

/* `last` is the block's last row; no row of the block meets a streamed row before the origin. */
struct streamed_band {
    int64_t origin;
    band32 band;
    int needed; /* streamed rows that some row of the block meets */
};

__device__ inline int saturated(int64_t value)
{
    return (int)skl_max(-SKL_SM80_ROWS_MAX, skl_min(SKL_SM80_ROWS_MAX, value));
}

__device__ inline streamed_band stream_for(const skl_band &band, int64_t first, int64_t last)
{
    const int64_t origin = skl_band_range(&band, first).begin;
    return {
        origin,
        {saturated(first + band.begin - origin), saturated(first + band.end - origin), (int)(band.count - origin)},
        (int)(skl_band_range(&band, last).end - origin)};
}

/* Part `part` of `parts` of the streamed rows, cut between stages. */
__device__ inline streamed_band cut(const streamed_band &all, int stage_rows, int split, int num_splits)
{
    const unsigned stages = (unsigned)(all.needed + stage_rows - 1) / (unsigned)stage_rows;
    const int rows = (int)((stages + (unsigned)num_splits - 1) / (unsigned)num_splits) * stage_rows;
    const int begin = min(split * rows, all.needed), end = min(begin + rows, all.needed);
    const band32 &band = all.band;
    return {all.origin + begin, {band.begin - begin, band.end - begin, band.count - begin}, end - begin};
}

/* What `count` own rows meet: some row sees a streamed row inside `any`, every row sees all inside `all`. Rows behind
 * the tensor's last count too: they are 0, and nobody asks for their results. */
struct reach {
    range32 any, all;
};

__device__ inline reach reach_of(const band32 &band, int first, int count)
{
    const range32 low = band.of(first), high = band.of(first + count - 1);
    return {{low.begin, high.end}, {high.begin, low.end}};
}

__device__ inline bool meets(const range32 &range, int first, int rows)
{
    return range.begin < first + rows && range.end > first;
}

__device__ inline bool covers(const range32 &range, int first, int rows)
{
    return range.begin <= first && range.end >= first + rows;
}

/* One tile of own rows of one head of one sequence. */
struct tile_coord {
    int64_t sequence;
    int head, tile;
};

/* Sequences in y and z, heads and tiles in x: the backend sees to it that they are less than 2^31. */
constexpr int64_t GRID_Y_MAX = 65535;

inline dim3 grid_of(int64_t sequences, int64_t heads, int64_t tiles)
{
    return dim3((unsigned)(heads * tiles), (unsigned)skl_min(sequences, GRID_Y_MAX),
                (unsigned)skl_ceil_div(sequences, GRID_Y_MAX));
}

/* Number x of a sequence. Tiles of a section of heads come longest first (causal), and the section's streamed rows
 * stay in the L2 cache. */
__device__ inline tile_coord swizzled_tile(int64_t sequence, unsigned x, unsigned heads, unsigned tiles, unsigned head_group)
{
    const unsigned first_head = x / (head_group * tiles) * head_group;
    const unsigned width = min(head_group, heads - first_head);
    const unsigned rest = x - first_head * tiles;
    return {sequence, (int)(first_head + rest % width), (int)(rest / width)};
}

/* Volatile: what follows from it is computed anew where it is used again, and holds no registers meanwhile. */
__device__ inline tile_coord tile_of_block(unsigned heads, unsigned tiles, unsigned head_group)
{
    unsigned x, y, z;
    asm volatile("mov.u32 %0, %%ctaid.x; mov.u32 %1, %%ctaid.y; mov.u32 %2, %%ctaid.z;" : "=r"(x), "=r"(y), "=r"(z));
    return swizzled_tile(z * GRID_Y_MAX + y, x, heads, tiles, head_group);
}

/* Of a block that stays, the work number `round`: the blocks, all in x, take that of all sequences in turns. */
__device__ inline tile_coord persistent_tile(unsigned iteration, unsigned heads, unsigned tiles, unsigned head_group)
{
    const unsigned number = blockIdx.x + iteration * gridDim.x, of_sequence = heads * tiles;
    return swizzled_tile(number / of_sequence, number % of_sequence, heads, tiles, head_group);
}

/* A tile of 64 M rows of a gradient: queries, or keys (DK). */
template <int M, bool DK> struct row_tile {
    skl_sequence sequence;
    int64_t head, first;  /* head of the gradient, first own row */
    int64_t rows, stored; /* own rows of the sequence that take part, and that have a gradient: padding keys get 0 */

    /* False: there is nothing at this block's place. */
    __device__ bool find(const skl_cuda_params &params)
    {
        const skl_problem &p = params.problem;
        const unsigned tiles = (unsigned)skl_ceil_div(DK ? p.len_k : p.len_q, WARPS * 16 * M);
        const tile_coord at = tile_of_block((unsigned)heads(params), tiles, SKL_HEAD_GROUP_MAX);
        if (at.sequence >= p.batch)
            return false;
        sequence = device_sequence(params, at.sequence);
        head = at.head;
        first = (int64_t)(DK ? at.tile : tiles - 1 - at.tile) * WARPS * 16 * M; /* causal: longest first */
        rows = DK ? sequence.key_count : sequence.query_count;
        stored = DK && !p.packed ? p.len_k : rows;
        return first < stored;
    }

    __host__ __device__ static int64_t heads(const skl_cuda_params &params)
    {
        const skl_problem &p = params.problem;
        return !DK ? p.heads_s : params.teacher_side ? p.key_heads_t : p.key_heads_s;
    }
};

} // namespace sm80

#endif
