/* The oracle's own text, exact but for the row vectors between the two passes: they are saved in float. */
#define REAL       double
#define SAVED      float
#define ORACLE_RUN saved_rows_run
#include "oracle.c"
