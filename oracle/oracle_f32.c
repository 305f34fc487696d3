/* The oracle compiled in float. */
#define REAL                 float
#define ORACLE_RUN           oracle_run_f32
#define ORACLE_RUN_ATTENTION oracle_run_attention_f32
#include "oracle.c"
