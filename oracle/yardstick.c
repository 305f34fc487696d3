/* The yardstick is the oracle's own text with float for double. */
#define REAL       float
#define ORACLE_RUN yardstick_run
#include "oracle.c"
