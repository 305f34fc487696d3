/* AMX: tiles of 16 rows of 64 bytes. One instruction adds the product of 16 x 32 and 32 x 16 numbers of bf16 to 16 x
 * 16 sums in f32. Everything else is AVX-512. */
#define SKL_MATRIX_INTERLEAVE 2
#define SKL_MATRIX_ROWS       16
#define SKL_MATRIX_DEPTH      32

#include "cpu/avx512_vector.h"
#include "cpu/body/matrix.h"

/* The compiler's tile intrinsics do not say which memory they read and write. */
#define MEMORY_BARRIER() __asm__ volatile("" ::: "memory")

enum { BLOCK = 16 }; /* rows and columns of a tile of C */

/* Tiles 0..3 hold up to 2 x 2 blocks of C, 4 and 5 rows of A, 6 and 7 columns of B. */
SKL_INLINE void multiply_blocks(const matrix_operands *m, int64_t row, int64_t column, const int rows,
                                const int columns, const bool accumulate)
{
    const int64_t c_bytes = m->c_stride * 4, a_bytes = m->a_stride * 2, b_bytes = m->b_stride * 4;
    float *const c = m->c + row * m->c_stride + column;
    float *const below = c + BLOCK * m->c_stride;
    if (accumulate) {
        _tile_loadd(0, c, c_bytes);
        if (columns > 1)
            _tile_loadd(1, c + BLOCK, c_bytes);
        if (rows > 1)
            _tile_loadd(2, below, c_bytes);
        if (rows > 1 && columns > 1)
            _tile_loadd(3, below + BLOCK, c_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const uint16_t *a = m->a + row * m->a_stride;
    const uint16_t *b = m->b + column * MATRIX_INTERLEAVE;
    for (int64_t k = 0; k < m->depth; k += MATRIX_DEPTH) {
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, b, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (columns > 1) {
            _tile_loadd(7, b + BLOCK * MATRIX_INTERLEAVE, b_bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (rows > 1) {
            _tile_loadd(5, a + BLOCK * m->a_stride, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (rows > 1 && columns > 1)
            _tile_dpbf16ps(3, 5, 7);
        a += MATRIX_DEPTH;
        b += MATRIX_DEPTH * m->b_stride;
    }
    _tile_stored(0, c, c_bytes);
    if (columns > 1)
        _tile_stored(1, c + BLOCK, c_bytes);
    if (rows > 1)
        _tile_stored(2, below, c_bytes);
    if (rows > 1 && columns > 1)
        _tile_stored(3, below + BLOCK, c_bytes);
}

SKL_INLINE void multiply_matrices(const matrix_operands *m, const bool accumulate)
{
    MEMORY_BARRIER();
    for (int64_t column = 0; column < m->columns; column += 2 * BLOCK)
        for (int64_t row = 0; row < m->rows; row += 2 * BLOCK) {
            const bool two_rows = row + BLOCK < m->rows, two_columns = column + BLOCK < m->columns;
            if (two_rows && two_columns)
                multiply_blocks(m, row, column, 2, 2, accumulate);
            else if (two_rows)
                multiply_blocks(m, row, column, 2, 1, accumulate);
            else if (two_columns)
                multiply_blocks(m, row, column, 1, 2, accumulate);
            else
                multiply_blocks(m, row, column, 1, 1, accumulate);
        }
    MEMORY_BARRIER();
}

/* ---- Tile registers: those of a thread are set up at the start of a task and freed at its end ---------------- */

typedef struct tile_configuration {
    _Alignas(64) uint8_t palette;
    uint8_t start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_configuration;

static void begin_task(void)
{
    enum { TILES = 8, ROW_BYTES = 64 };
    tile_configuration configuration = {.palette = 1};
    for (int n = 0; n < TILES; n++) {
        configuration.row_bytes[n] = ROW_BYTES;
        configuration.rows[n] = BLOCK;
    }
    MEMORY_BARRIER();
    _tile_loadconfig(&configuration);
}

static void end_task(void)
{
    _tile_release();
}

#define SKL_HAS_TASK_SETUP
#include "cpu/body/work.h"
#include "cpu/features.h"

const skl_cpu_kernel skl_cpu_amx = {
    .name = "cpu_amx",
    .detail = "AMX for bf16, AVX-512, 192 x 96 tiles, 32 x 32 micro-kernel",
    .usable = skl_cpu_has_amx,
    .on_matrix = true,
    .works = &works,
};
