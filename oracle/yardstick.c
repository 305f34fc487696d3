/* The oracle compiled in float. */
#define REAL       float
#define ORACLE_RUN yardstick_run
#include "oracle.c"
