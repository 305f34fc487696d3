/* The oracle of statistics compiled in float. */
#define REAL         float
#define ORACLE_STATS oracle_stats_run_f32
#include "stats.c"
