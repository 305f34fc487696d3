/* Instruction sets and cores of this CPU. */
#ifndef SKL_CPU_FEATURES_H
#define SKL_CPU_FEATURES_H

#include <stdbool.h>

/* x86_64 only. */
bool skl_cpu_has_avx2(void);   /* AVX2 and FMA */
bool skl_cpu_has_avx512(void); /* AVX-512 F, BW, DQ and VL */
bool skl_cpu_has_avx512_bf16(void);
bool skl_cpu_has_amx(void); /* AVX-512 with BF16, AMX tiles of bf16, and permission to use them */

/* aarch64 only. */
bool skl_cpu_has_neon_bf16(void); /* BFMMLA */

int skl_cpu_count(void); /* cores available to this process */

#endif
