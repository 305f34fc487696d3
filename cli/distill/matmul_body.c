/* Compiled for several instruction sets: MATMUL_ROWS names the instance. */
#include "cli/distill/matmul.h"

#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, TILE_ROWS = 12 };
#elif defined(__AVX2__)
enum { LANES = 8, TILE_ROWS = 6 };
#else
enum { LANES = 4, TILE_ROWS = 6 };
#endif
enum {
    TILE_VECTORS = 2,
    TILE_COLUMNS = TILE_VECTORS * LANES,
    BLOCK_INNER = 256 /* a tile's slice of b fits into the L1 cache */
};

typedef float vector __attribute__((vector_size(LANES * sizeof(float))));

static inline vector load(const float *from)
{
    vector value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline void store(float *to, vector value)
{
    memcpy(to, &value, sizeof value);
}

/* c[TILE_ROWS, TILE_COLUMNS] += a[., inner] b[inner, .] with all of c in registers */
static void full_tile(float *c, const float *a, int64_t row_stride, int64_t column_stride, const float *b,
                      int64_t columns, int64_t inner)
{
    vector sum[TILE_ROWS][TILE_VECTORS];
    for (int i = 0; i < TILE_ROWS; i++)
        for (int v = 0; v < TILE_VECTORS; v++)
            sum[i][v] = load(c + i * columns + v * LANES);
    for (int64_t k = 0; k < inner; k++) {
        const vector b0 = load(b + k * columns), b1 = load(b + k * columns + LANES);
        for (int i = 0; i < TILE_ROWS; i++) {
            const float factor = a[i * row_stride + k * column_stride];
            sum[i][0] += factor * b0;
            sum[i][1] += factor * b1;
        }
    }
    for (int i = 0; i < TILE_ROWS; i++)
        for (int v = 0; v < TILE_VECTORS; v++)
            store(c + i * columns + v * LANES, sum[i][v]);
}

/* The same for a tile that the end of the matrix cuts. */
static void partial_tile(float *c, matrix a, const float *b, int64_t rows, int64_t width, int64_t columns,
                         int64_t inner)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < inner; k++) {
            const float factor = a.data[i * a.row_stride + k * a.column_stride];
            for (int64_t j = 0; j < width; j++)
                c[i * columns + j] += factor * b[k * columns + j];
        }
}

static int64_t smaller(int64_t x, int64_t y)
{
    return x < y ? x : y;
}

matmul_rows MATMUL_ROWS;
void MATMUL_ROWS(float *c, matrix a, const float *b, int64_t row_begin, int64_t row_end, int64_t columns,
                 int64_t inner)
{
    for (int64_t k = 0; k < inner; k += BLOCK_INNER)
        for (int64_t j = 0; j < columns; j += TILE_COLUMNS)
            for (int64_t i = row_begin; i < row_end; i += TILE_ROWS) {
                const matrix part = {a.data + i * a.row_stride + k * a.column_stride, a.row_stride, a.column_stride};
                const int64_t depth = smaller(BLOCK_INNER, inner - k);
                if (i + TILE_ROWS <= row_end && j + TILE_COLUMNS <= columns)
                    full_tile(c + i * columns + j, part.data, part.row_stride, part.column_stride,
                              b + k * columns + j, columns, depth);
                else
                    partial_tile(c + i * columns + j, part, b + k * columns + j, smaller(TILE_ROWS, row_end - i),
                                 smaller(TILE_COLUMNS, columns - j), columns, depth);
            }
}
