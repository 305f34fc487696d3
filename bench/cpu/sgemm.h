/* The yardstick: BLAS sgemm on a 2048-cube, as fast as this machine multiplies matrices. */
#ifndef STREAMKL_BENCH_CPU_SGEMM_H
#define STREAMKL_BENCH_CPU_SGEMM_H

#include "bench/cpu/blas.h"

typedef struct sgemm_cube sgemm_cube;

/* NULL: out of memory. */
sgemm_cube *sgemm_cube_create(const blas *library);
void sgemm_cube_destroy(sgemm_cube *cube); /* NULL is fine */

void sgemm_cube_run(const sgemm_cube *cube, int threads);

/* FLOP of one run. */
double sgemm_cube_flop(void);

#endif
