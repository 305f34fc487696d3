/* f32 matrix products of a block of 256 threads, for rows of any type, stride, alignment and size (FFMA, no tensor
 * cores). The block keeps the rows of the stationary operand and loops over those of the streamed operand.
 *
 *     sum[row][column] += stationary[step][row] * streamed[step][column], over the steps (dimensions, as a rule)
 *
 *   thread    16 x 16 threads; each has 8 rows and 4 or 8 columns, in groups of 4 that are 64 apart. A step of 8 x 8
 *             takes four 16-byte reads of shared memory and 64 multiply-adds.
 *   pipeline  two stages of 16 steps in shared memory, one barrier per stage:
 *
 *             global memory -> registers   stage n + 1, in its own type  |  while stage n is multiplied
 *             registers -> shared memory   converted to f32              |  before the barrier of stage n + 1 */
#ifndef SKL_CUDA_GENERAL_PIPELINE_CUH
#define SKL_CUDA_GENERAL_PIPELINE_CUH

#include "base/convert.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/params.cuh"

constexpr int THREADS = 256;
constexpr int TILE = SKL_GENERAL_TILE; /* stationary rows of a block */
constexpr int LANES = 16;              /* threads that share a row: half a warp, so that shuffles reduce rows */
constexpr int ROWS = TILE / LANES;     /* stationary rows of a thread */
constexpr int STAGE_STEPS = 16;        /* steps of a pipeline stage */
constexpr int QUAD = 4;                /* elements per load of a thread: 16 bytes of f32, 8 bytes of 16-bit types */

constexpr int TILE_QUADS = TILE * STAGE_STEPS / QUAD / THREADS; /* per thread, in a stage of TILE rows or columns */
constexpr int HALF = TILE / 2;                                  /* distance between a thread's groups of 4 */

/* Offset of a step of an operand. Every fourth step is padded by 8 floats: a warp writes 8 rows of 4 consecutive
 * steps each, and with the padding it has no bank conflicts. */
__host__ __device__ constexpr int step_offset(int step)
{
    return step * TILE + step / 4 * 8;
}

typedef float operand_stage[step_offset(STAGE_STEPS)];

struct __align__(16) operand_stages
{
    operand_stage stationary[2], streamed[2];
};

/* Rows and columns of the tile that a thread accumulates. */
__device__ inline int acc_row(int i)
{
    return i / 4 * HALF + (int)(threadIdx.x / LANES) * 4 + i % 4;
}

__device__ inline int acc_column(int j)
{
    return j / 4 * HALF + (int)(threadIdx.x % LANES) * 4 + j % 4;
}

template <int COLUMNS, int R = ROWS> struct fragment {
    float at[R][COLUMNS]; /* a thread's elements of a tile */
};

template <int COLUMNS, int R> __device__ inline void clear(fragment<COLUMNS, R> &sum)
{
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            sum.at[i][j] = 0.0F;
}

/* Moves all rows up by one; the first becomes the last. A loop that works on row 0 and rotates is short and needs few
 * registers. Unrolled over all rows it would be long and need many. */
template <int COLUMNS, int R> __device__ inline void rotate_rows(fragment<COLUMNS, R> &x)
{
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        const float top = x.at[0][j];
#pragma unroll
        for (int i = 1; i < R; i++)
            x.at[i - 1][j] = x.at[i][j];
        x.at[R - 1][j] = top;
    }
}

/* ---- Global memory to registers ----------------------------------------------------------------------------- */

/* Rows of a tensor, the first one at `data`. Rows and dimensions outside it read as 0. */
struct row_source {
    const char *data;
    int64_t row_size; /* bytes between consecutive rows */
    int row_count, dim;
    skl_dtype dtype;
    bool vectorized; /* f32 with rows of whole, aligned quads: one load per quad */
};

/* Rows [first, end) of one head that begins at element `offset` of the tensor, at most TILE of them. */
__device__ inline row_source make_row_source(const skl_input &tensor, skl_dtype dtype, int64_t dim, int64_t offset,
                                             int64_t first, int64_t end)
{
    const int size = dtype == SKL_F32 ? 4 : 2;
    row_source source;
    source.data = (const char *)tensor.data + (offset + first * tensor.stride_row) * size;
    source.row_size = tensor.stride_row * size;
    source.row_count = (int)skl_max(0, skl_min(end - first, TILE));
    source.dim = (int)dim;
    source.dtype = dtype;
    source.vectorized = dtype == SKL_F32 && dim % QUAD == 0 &&
                        ((uintptr_t)source.data | (uintptr_t)source.row_size) % sizeof(float4) == 0;
    return source;
}

/* The bits of four elements, each in 32 bits. */
typedef uint4 raw_quad;

/* The bits of element e; 0 from `count` on. */
__device__ inline uint32_t load_bits(const char *from, bool wide, int e, int count)
{
    if (e >= count)
        return 0;
    return wide ? __ldg((const uint32_t *)(const void *)from + e) : __ldg((const uint16_t *)(const void *)from + e);
}

/* Quads at dimension c of the rows at row_at(quad); NULL reads as 0. */
template <int QUADS, typename ROW>
__device__ inline void load_quads(raw_quad (&to)[QUADS], const row_source &source, int c, ROW row_at)
{
    const bool wide = source.dtype == SKL_F32, vectorized = source.vectorized;
    const int count = source.dim - c;
#pragma unroll
    for (int quad = 0; quad < QUADS; quad++) {
        const char *const row = count > 0 ? row_at(quad) : NULL;
        to[quad] = make_uint4(0, 0, 0, 0);
        if (row == NULL)
            continue;
        const char *const from = row + c * (wide ? 4 : 2);
        if (vectorized)
            to[quad] = __ldg((const uint4 *)(const void *)from);
        else
            to[quad] = make_uint4(load_bits(from, wide, 0, count), load_bits(from, wide, 1, count),
                                  load_bits(from, wide, 2, count), load_bits(from, wide, 3, count));
    }
}

/* Quads at dimension c of rows `row`, row + row_step, ... */
template <int QUADS>
__device__ inline void load_quads(raw_quad (&to)[QUADS], const row_source &source, int row, int row_step, int c)
{
    const row_source from = source;
    load_quads(to, from, c, [&](int quad) {
        const int index = row + quad * row_step;
        return index < from.row_count ? from.data + index * from.row_size : NULL;
    });
}

__device__ inline float from_16_bits(uint32_t bits, skl_dtype dtype)
{
    return dtype == SKL_F16 ? skl_from_f16((uint16_t)bits) : skl_from_bf16((uint16_t)bits);
}

template <int QUADS>
__device__ inline void convert_quads(float4 (&to)[QUADS], const raw_quad (&from)[QUADS], skl_dtype dtype)
{
#pragma unroll
    for (int quad = 0; quad < QUADS; quad++)
        to[quad] = make_float4(__uint_as_float(from[quad].x), __uint_as_float(from[quad].y),
                               __uint_as_float(from[quad].z), __uint_as_float(from[quad].w));
    if (dtype == SKL_F32)
        return;
#pragma unroll
    for (int quad = 0; quad < QUADS; quad++)
        to[quad] = make_float4(from_16_bits(from[quad].x, dtype), from_16_bits(from[quad].y, dtype),
                               from_16_bits(from[quad].z, dtype), from_16_bits(from[quad].w, dtype));
}

/* ---- Registers to shared memory ----------------------------------------------------------------------------- */

/* Steps are the dimensions [c, c + STAGE_STEPS), columns are rows of the tensor: four lanes read a row, and
 * store_dims() transposes. */
template <int QUADS> __device__ inline void load_dims(raw_quad (&to)[QUADS], const row_source &from, int c)
{
    load_quads(to, from, (int)(threadIdx.x / 4), HALF, c + (int)(threadIdx.x % 4) * QUAD);
}

template <int QUADS> __device__ inline void store_dims(float *to, const raw_quad (&from)[QUADS], skl_dtype dtype)
{
    float4 values[QUADS];
    convert_quads(values, from, dtype);
    to += step_offset((int)(threadIdx.x % 4) * QUAD) + (int)(threadIdx.x / 4);
#pragma unroll
    for (int quad = 0; quad < QUADS; quad++, to += HALF) {
        to[step_offset(0)] = values[quad].x;
        to[step_offset(1)] = values[quad].y;
        to[step_offset(2)] = values[quad].z;
        to[step_offset(3)] = values[quad].w;
    }
}

/* Steps are the rows [row, row + STAGE_STEPS), columns are TILE dimensions from c: a warp reads a row. */
__device__ inline void load_steps(raw_quad (&to)[TILE_QUADS], const row_source &from, int row, int c)
{
    load_quads(to, from, row + (int)(threadIdx.x / 32), THREADS / 32, c + (int)(threadIdx.x % 32) * QUAD);
}

__device__ inline void store_steps(float *to, const raw_quad (&from)[TILE_QUADS], skl_dtype dtype)
{
    float4 values[TILE_QUADS];
    convert_quads(values, from, dtype);
#pragma unroll
    for (int quad = 0; quad < TILE_QUADS; quad++)
        *(float4 *)&to[step_offset((int)(threadIdx.x / 32) + quad * THREADS / 32) + (int)(threadIdx.x % 32) * QUAD] =
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

/* sum[i][j] += a[i] b[j] over the steps of a stage. read_a(a, step) and read_b(b, step) read a thread's rows and
 * columns of a step. SKIP_ZEROS: a value of 0 in `a` belongs to a masked pair and is skipped, because b may not be
 * finite. Half of the steps are unrolled: unrolling all would be a few percent faster, and take long to compile. */
template <bool SKIP_ZEROS, int COLUMNS, int R, typename READ_A, typename READ_B>
__device__ inline void multiply_steps(fragment<COLUMNS, R> &sum, READ_A read_a, READ_B read_b)
{
    constexpr int UNROLLED = STAGE_STEPS / 2;
#pragma unroll 1
    for (int first = 0; first < STAGE_STEPS; first += UNROLLED)
#pragma unroll
        for (int step = 0; step < UNROLLED; step++) {
            float a[R], b[COLUMNS];
            read_a(a, first, step);
            read_b(b, first, step);
#pragma unroll
            for (int i = 0; i < R; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS; j++)
                    if (!SKIP_ZEROS || a[i] != 0.0F)
                        sum.at[i][j] = fmaf(a[i], b[j], sum.at[i][j]);
        }
}

/* Offset of step first + step: a constant and one register for all of them. */
__device__ inline int step_offset(int first, int step)
{
    return step_offset(first) + step_offset(step); /* first is a multiple of 4 */
}

/* Reads a thread's rows or columns, in fours, from a stage. */
struct stage_reader {
    const float *stage;

    template <int COUNT> __device__ void operator()(float (&to)[COUNT], int first, int step) const
    {
        read_fours(to, stage + step_offset(first, step));
    }
};

__device__ inline stage_reader rows_of(const float *stage)
{
    return {stage + (int)(threadIdx.x / LANES) * 4};
}

__device__ inline stage_reader columns_of(const float *stage)
{
    return {stage + (int)(threadIdx.x % LANES) * 4};
}

/* The two operands of a tile of logits. */
struct tile_operands {
    row_source stationary, streamed;
};

/* Values that all threads share are in shared memory, because registers are scarce. */
struct pipeline_memory {
    operand_stages stages;
    tile_operands operands[2]; /* operands of the current and of the next tile */
};

/* Products of one tile after another. The first stage of a tile is loaded while the last stage of the previous tile
 * is multiplied. */
template <int COLUMNS> struct pipeline {
    pipeline_memory &memory;
    int stage;                                              /* stage of the loads in flight */
    int current;                                            /* memory.operands of the current tile */
    raw_quad stationary[TILE_QUADS], streamed[COLUMNS / 4]; /* loads in flight */

    __device__ explicit pipeline(pipeline_memory &shared) : memory(shared), stage(0), current(0)
    {
    }

    __device__ void load(int tile, int c)
    {
        load_dims(stationary, memory.operands[tile].stationary, c);
        load_dims(streamed, memory.operands[tile].streamed, c);
    }

    /* Starts with the tile whose operands first() returns. */
    template <typename OPERANDS> __device__ void begin(OPERANDS first)
    {
        __syncthreads(); /* no thread reads memory.operands any more */
        if (threadIdx.x == 0)
            memory.operands[current] = first();
        __syncthreads();
        load(current, 0);
    }

    /* Sets the operands of the tile after the current one. Call it before multiply_tile(). */
    template <typename OPERANDS> __device__ void prefetch(OPERANDS next)
    {
        if (threadIdx.x == 0)
            memory.operands[1 - current] = next();
    }

    /* sum = stationary . streamed over all dimensions of the current tile. Then the next tile is the current one. */
    __device__ void multiply_tile(fragment<COLUMNS> &sum)
    {
        /* Read now: after the last barrier prefetch() may overwrite the operands of this tile. */
        const int dim = memory.operands[current].stationary.dim;
        const skl_dtype dtype = memory.operands[current].stationary.dtype;
        clear(sum);
#pragma unroll 1
        for (int c = 0; c < dim; c += STAGE_STEPS, stage ^= 1) {
            store_dims(memory.stages.stationary[stage], stationary, dtype);
            store_dims(memory.stages.streamed[stage], streamed, dtype);
            __syncthreads(); /* this stage is full, and no thread reads the other one any more */
            const bool last = c + STAGE_STEPS >= dim;
            load(last ? 1 - current : current, last ? 0 : c + STAGE_STEPS);
            multiply_steps<false>(sum, rows_of(memory.stages.stationary[stage]),
                                  columns_of(memory.stages.streamed[stage]));
        }
        current ^= 1;
    }
};

/* ---- Launch ------------------------------------------------------------------------------------------------- */

/* Launches a kernel whose blocks loop over work items, with `size` bytes of shared memory. */
template <typename PARAMS>
cudaError_t launch_general(void (*kernel)(PARAMS), const PARAMS &params, const skl_cuda_launch *launch, size_t size)
{
    return launch_blocks(kernel, (int64_t)launch->sm_count * SKL_GENERAL_BLOCKS_PER_SM, THREADS, size, params);
}

#endif
