#include "bench/cpu/sgemm.h"

#include <stdlib.h>

enum { SIDE = 2048 };

struct sgemm_cube {
    const blas *library;
    float *a, *b, *c;
};

/* Small integers: no subnormal results, and equal results in all libraries. */
static float *filled_square(int modulus)
{
    float *const square = malloc((size_t)SIDE * SIDE * sizeof *square);
    for (int i = 0; square && i < SIDE * SIDE; i++)
        square[i] = (float)(i % modulus - modulus / 2);
    return square;
}

sgemm_cube *sgemm_cube_create(const blas *library)
{
    sgemm_cube *const cube = calloc(1, sizeof *cube);
    if (cube == NULL)
        return NULL;
    *cube = (sgemm_cube){library, filled_square(7), filled_square(5), filled_square(3)};
    if (cube->a && cube->b && cube->c)
        return cube;
    sgemm_cube_destroy(cube);
    return NULL;
}

void sgemm_cube_destroy(sgemm_cube *cube)
{
    if (cube == NULL)
        return;
    free(cube->a);
    free(cube->b);
    free(cube->c);
    free(cube);
}

void sgemm_cube_run(const sgemm_cube *cube, int threads)
{
    const blas_operand a = {cube->a, SIDE, false}, b = {cube->b, SIDE, false};
    blas_set_threads(cube->library, threads);
    blas_multiply(cube->library, 1, a, b, cube->c, SIDE, SIDE, SIDE);
}

double sgemm_cube_flop(void)
{
    return 2.0 * SIDE * SIDE * SIDE;
}
