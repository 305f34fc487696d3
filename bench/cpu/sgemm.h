/* The reference speed: BLAS sgemm on 2048 x 2048 matrices. */
#ifndef STREAMKL_BENCH_CPU_SGEMM_H
#define STREAMKL_BENCH_CPU_SGEMM_H

#include "bench/cpu/blas.h"

typedef struct sgemm_cube sgemm_cube;

/* NULL: out of memory. */
sgemm_cube *sgemm_cube_create(const blas *library);
void sgemm_cube_destroy(sgemm_cube *cube); /* may be NULL */

void sgemm_cube_run(const sgemm_cube *cube, int threads);

/* FLOP of one run. */
double sgemm_cube_flop(void);

#endif
