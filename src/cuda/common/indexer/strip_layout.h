/* Both layouts of a launch on tensor cores, for launch.h. */
#ifndef SKL_CUDA_COMMON_INDEXER_STRIP_LAYOUT_H
#define SKL_CUDA_COMMON_INDEXER_STRIP_LAYOUT_H

#include "cuda/common/indexer/sparse_layout.h"
#include "cuda/common/strips/layout.h"

#endif
