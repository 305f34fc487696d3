/* Indexers without tensor cores, and kernels over rows. */
#include "cuda/general/indexer/forward.cu"
#include "cuda/general/indexer/backward.cu"
#include "cuda/common/indexer/sparse_dk.cu"
#include "cuda/common/merge_splits.cu"
#include "cuda/common/row_kernels.cu"
#include "cuda/common/sink_kernels.cu"
#include "cuda/common/two_term_rows.cu"
#include "cuda/common/stats_rows.cu"
