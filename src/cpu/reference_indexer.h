/* Gradients of an indexer, for the scalar reference. */
#ifndef SKL_CPU_REFERENCE_INDEXER_H
#define SKL_CPU_REFERENCE_INDEXER_H

#include "cpu/kernel.h"

void skl_reference_indexer_queries(const skl_task *task); /* dq and dw of a query tile */
void skl_reference_indexer_keys(const skl_task *task);    /* dk of a key tile */

#endif
