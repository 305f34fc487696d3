/* Products of f32 on 256 threads, fed through shared memory: rows of any type, stride, alignment and size.
 *
 * A product adds own[step][row] * streamed[step][column] over the steps. 16 x 16 threads own 8 rows and 4 or 8
 * columns each, in fours that lie 64 apart, so a step of 8 x 8 takes four 16-byte reads and 64 multiply-adds.
 * Operands pass through two buffers in chunks of 16 steps: while a chunk is multiplied, the next one is on its way
 * from memory to registers, where it keeps its type; it becomes f32 on its way to shared memory. One barrier a chunk.
 */
#ifndef SKL_CUDA_GENERAL_PIPELINE_CUH
#define SKL_CUDA_GENERAL_PIPELINE_CUH

#include "base/convert.h"
#include "cuda/common/params.cuh"

constexpr int THREADS = 256;
constexpr int TILE = SKL_GENERAL_TILE; /* own rows of a block */
constexpr int LANES = 16;              /* threads of a row: half a warp, so rows are reduced by shuffles */
constexpr int ROWS = TILE / LANES;     /* own rows of a thread */
constexpr int CHUNK = 16;              /* steps between two barriers */
constexpr int QUAD = 4;                /* elements of a thread's load: 16 bytes of f32, 8 of 16-bit types */

constexpr int OWN_QUADS = TILE * CHUNK / QUAD / THREADS; /* of a thread, in a chunk of TILE rows or columns */
constexpr int HALF = TILE / 2;                           /* between the fours of a thread */

/* Where a step of an operand begins. Every fourth step is moved by 8 floats: eight rows of four steps in a row each,
 * which is what a warp writes, then meet every bank once. */
__host__ __device__ constexpr int step_at(int step)
{
    return step * TILE + step / 4 * 8;
}

typedef float operand_chunk[step_at(CHUNK)];

struct __align__(16) staged_chunks
{
    operand_chunk own[2], streamed[2];
};

/* The rows and columns of a thread. */
__device__ inline int row_of(int i)
{
    return i / 4 * HALF + (int)threadIdx.x / LANES * 4 + i % 4;
}

__device__ inline int acc_column(int j)
{
    return j / 4 * HALF + (int)threadIdx.x % LANES * 4 + j % 4;
}

template <int COLUMNS> struct fragment {
    float at[ROWS][COLUMNS]; /* what a thread owns of a tile */
};

template <int COLUMNS> __device__ inline void clear(fragment<COLUMNS> &sum)
{
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            sum.at[i][j] = 0.0F;
}

/* Rows move up by one, the first one becomes the last. A loop in which rows take turns at the top is short, and uses
 * few registers, where an unrolled one over all rows is neither. */
template <int COLUMNS> __device__ inline void rotate_rows(fragment<COLUMNS> &x)
{
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        const float top = x.at[0][j];
#pragma unroll
        for (int i = 1; i < ROWS; i++)
            x.at[i - 1][j] = x.at[i][j];
        x.at[ROWS - 1][j] = top;
    }
}

/* ---- From memory -------------------------------------------------------------------------------------------- */

/* Rows of a tensor, the first one at `data`; zeros stand for rows and dimensions that it does not have. */
struct row_source {
    const char *data;
    int64_t row_size; /* bytes from row to row */
    int row_count, dim;
    skl_dtype dtype;
    bool vectors; /* a quad is one load */
};

/* Rows [first, end) of one head, which begins at element `offset` of the tensor. */
__device__ inline row_source source_rows(const skl_input &tensor, skl_dtype dtype, int64_t dim, int64_t offset,
                                         int64_t first, int64_t end)
{
    const int size = dtype == SKL_F32 ? 4 : 2;
    row_source source;
    source.data = (const char *)tensor.data + (offset + first * tensor.stride_row) * size;
    source.row_size = tensor.stride_row * size;
    source.row_count = (int)skl_max(0, skl_min(end - first, TILE));
    source.dim = (int)dim;
    source.dtype = dtype;
    source.vectors = (((uintptr_t)source.data | (uintptr_t)source.row_size) % (unsigned)(QUAD * size)) == 0 &&
                     source.dim % QUAD == 0;
    return source;
}

/* Four elements as they lie in memory: 16-bit ones fill x and y. */
typedef uint4 raw_quad;

/* Up to four elements one by one. */
__device__ inline raw_quad load_elements(const char *at, bool wide, int count)
{
    uint32_t bits[QUAD] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < QUAD; e++)
        if (e < count)
            bits[e] =
                wide ? __ldg((const uint32_t *)(const void *)at + e) : __ldg((const uint16_t *)(const void *)at + e);
    if (wide)
        return make_uint4(bits[0], bits[1], bits[2], bits[3]);
    return make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, 0, 0);
}

/* Quads at dimension c of rows `row`, row + row_step, ... The way to load them is chosen once, not quad by quad. */
template <int QUADS>
__device__ inline void load_quads(raw_quad (&to)[QUADS], const row_source &source, int row, int row_step, int c)
{
    const row_source from = source;
    const bool wide = from.dtype == SKL_F32;
    const char *const first = from.data + row * from.row_size + c * (wide ? 4 : 2);
    const int row_count = c < from.dim ? from.row_count : 0;
#pragma unroll
    for (int quad = 0; quad < QUADS; quad++)
        to[quad] = make_uint4(0, 0, 0, 0);
    if (from.vectors && wide) {
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++)
            if (row + quad * row_step < row_count)
                to[quad] = __ldg((const uint4 *)(const void *)(first + quad * row_step * from.row_size));
    } else if (from.vectors) {
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++)
            if (row + quad * row_step < row_count) {
                const uint2 halves = __ldg((const uint2 *)(const void *)(first + quad * row_step * from.row_size));
                to[quad] = make_uint4(halves.x, halves.y, 0, 0);
            }
    } else {
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++)
            if (row + quad * row_step < row_count)
                to[quad] = load_elements(first + quad * row_step * from.row_size, wide, from.dim - c);
    }
}

template <int QUADS>
__device__ inline void convert_quads(float4 (&to)[QUADS], const raw_quad (&from)[QUADS], skl_dtype dtype)
{
    if (dtype == SKL_F32) {
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++)
            to[quad] = make_float4(__uint_as_float(from[quad].x), __uint_as_float(from[quad].y),
                                   __uint_as_float(from[quad].z), __uint_as_float(from[quad].w));
        return;
    }
#pragma unroll
    for (int quad = 0; quad < QUADS; quad++) {
        const uint16_t halves[QUAD] = {(uint16_t)from[quad].x, (uint16_t)(from[quad].x >> 16), (uint16_t)from[quad].y,
                                       (uint16_t)(from[quad].y >> 16)};
        to[quad] = dtype == SKL_F16 ? make_float4(skl_from_f16(halves[0]), skl_from_f16(halves[1]),
                                                  skl_from_f16(halves[2]), skl_from_f16(halves[3]))
                                    : make_float4(skl_from_bf16(halves[0]), skl_from_bf16(halves[1]),
                                                  skl_from_bf16(halves[2]), skl_from_bf16(halves[3]));
    }
}

/* ---- To shared memory --------------------------------------------------------------------------------------- */

/* Dimensions [c, c + CHUNK) are the steps, rows the columns: four lanes read a row, and it is transposed. */
template <int QUADS> __device__ inline void load_dims(raw_quad (&to)[QUADS], const row_source &from, int c)
{
    load_quads(to, from, (int)threadIdx.x / 4, HALF, c + (int)threadIdx.x % 4 * QUAD);
}

template <int QUADS> __device__ inline void store_dims(float *to, const raw_quad (&from)[QUADS], skl_dtype dtype)
{
    float4 values[QUADS];
    convert_quads(values, from, dtype);
    to += step_at((int)threadIdx.x % 4 * QUAD) + (int)threadIdx.x / 4;
#pragma unroll
    for (int quad = 0; quad < QUADS; quad++, to += HALF) {
        to[step_at(0)] = values[quad].x;
        to[step_at(1)] = values[quad].y;
        to[step_at(2)] = values[quad].z;
        to[step_at(3)] = values[quad].w;
    }
}

/* Rows [row, row + CHUNK) are the steps, TILE dimensions from c on the columns: a warp reads a row. */
__device__ inline void load_steps(raw_quad (&to)[OWN_QUADS], const row_source &from, int row, int c)
{
    load_quads(to, from, row + (int)threadIdx.x / 32, THREADS / 32, c + (int)threadIdx.x % 32 * QUAD);
}

__device__ inline void store_steps(float *to, const raw_quad (&from)[OWN_QUADS], skl_dtype dtype)
{
    float4 values[OWN_QUADS];
    convert_quads(values, from, dtype);
#pragma unroll
    for (int quad = 0; quad < OWN_QUADS; quad++)
        *(float4 *)&to[step_at((int)threadIdx.x / 32 + quad * THREADS / 32) + (int)threadIdx.x % 32 * QUAD] =
            values[quad];
}

/* ---- Multiply ----------------------------------------------------------------------------------------------- */

template <int COUNT> __device__ inline void read_fours(float (&to)[COUNT], const float *from)
{
#pragma unroll
    for (int four = 0; four < COUNT / 4; four++) {
        const float4 values = *(const float4 *)(from + four * HALF);
        to[four * 4 + 0] = values.x;
        to[four * 4 + 1] = values.y;
        to[four * 4 + 2] = values.z;
        to[four * 4 + 3] = values.w;
    }
}

/* sum[i][j] += own[step][i] streamed[step][j] over a chunk. SKIP_ZEROS: an own value of 0 stands for a pair that is
 * masked, and may meet a streamed value that is not finite: it adds nothing. */
template <bool SKIP_ZEROS, int COLUMNS>
__device__ inline void multiply(fragment<COLUMNS> &sum, const float *own, const float *streamed)
{
    own += (int)threadIdx.x / LANES * 4;
    streamed += (int)threadIdx.x % LANES * 4;
#pragma unroll
    for (int step = 0; step < CHUNK; step++) {
        float a[ROWS], b[COLUMNS];
        read_fours(a, own + step_at(step));
        read_fours(b, streamed + step_at(step));
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                if (!SKIP_ZEROS || a[i] != 0.0F)
                    sum.at[i][j] = fmaf(a[i], b[j], sum.at[i][j]);
    }
}

/* Both operands of a tile of logits. */
struct tile_source {
    row_source own, streamed;
};

/* What is the same for all threads lies in shared memory: registers are for what is not. */
struct stage_memory {
    staged_chunks chunks;
    tile_source sources[2]; /* of the tile at hand, and of the next one */
};

/* Tile after tile of products; the first chunk of a tile is loaded while the last one of the tile before is
 * multiplied. */
template <int COLUMNS> struct pipeline {
    stage_memory &memory;
    int chunk;  /* buffer of the chunk on its way */
    int source; /* of the tile at hand */
    raw_quad own[OWN_QUADS], streamed[COLUMNS / 4];

    __device__ explicit pipeline(stage_memory &shared) : memory(shared), chunk(0), source(0)
    {
    }

    __device__ void load(int from, int c)
    {
        load_dims(own, memory.sources[from].own, c);
        load_dims(streamed, memory.sources[from].streamed, c);
    }

    /* Starts with the tile that first() gives. */
    template <typename SOURCE> __device__ void begin(SOURCE first)
    {
        __syncthreads(); /* nobody reads the sources any more */
        if (threadIdx.x == 0)
            memory.sources[source] = first();
        __syncthreads();
        load(source, 0);
    }

    /* Says what follows the tile that is multiplied next. */
    template <typename SOURCE> __device__ void prefetch(SOURCE next)
    {
        if (threadIdx.x == 0)
            memory.sources[1 - source] = next();
    }

    /* sum = own . streamed over all dimensions of the tile at hand; then the announced one is. */
    __device__ void multiply_tile(fragment<COLUMNS> &sum)
    {
        /* Behind the last barrier only the next source may be read: the other one can be announced over. */
        const int dim = memory.sources[source].own.dim;
        const skl_dtype dtype = memory.sources[source].own.dtype;
        clear(sum);
#pragma unroll 1
        for (int c = 0; c < dim; c += CHUNK, chunk ^= 1) {
            store_dims(memory.chunks.own[chunk], own, dtype);
            store_dims(memory.chunks.streamed[chunk], streamed, dtype);
            __syncthreads(); /* this chunk is complete, and the one before the last is no longer read */
            const bool last = c + CHUNK >= dim;
            load(last ? 1 - source : source, last ? 0 : c + CHUNK);
            multiply<false>(sum, memory.chunks.own[chunk], memory.chunks.streamed[chunk]);
        }
        source ^= 1;
    }
};

#endif
