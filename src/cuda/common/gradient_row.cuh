/* Stores of gradients from accumulators. They are predicated, not branched, and have no copy per type: as branches
 * they were a quarter of the instructions of a backward, and of its compile time. */
#ifndef SKL_CUDA_COMMON_GRADIENT_ROW_CUH
#define SKL_CUDA_COMMON_GRADIENT_ROW_CUH

#include "cuda/common/ptx.cuh"
#include "cuda/common/tile_scheduler.cuh"

namespace tensor_core
{

/* The thread's part of a gradient row, in f32 or in 16 bits. The count of the gradient's type is the number of
 * columns; the other count is 0. */
struct gradient_columns {
    char *first;
    int of_f32, of_16_bits;

    /* `offset`: the row's first element; `dim`: its columns. */
    __device__ gradient_columns(void *gradient, int64_t offset, skl_dtype dtype, int dim)
        : first((char *)gradient + (offset + acc_column(0, 0)) * (dtype == SKL_F32 ? 4 : 2)),
          of_f32(dtype == SKL_F32 ? dim : 0), of_16_bits(dtype == SKL_F32 ? 0 : dim)
    {
    }

    /* Stores columns acc_column(block, 0) and the next, if the row has the block. Rows of q and k have whole blocks
     * of 8 columns, and rows of gradients begin at even elements: see skl_select_has_pairs. */
    template <typename ELEMENT> __device__ void store_pair(int block, float low, float high, ELEMENT element) const
    {
        asm volatile("{\n"
                     ".reg .pred of_f32, of_16_bits;\n"
                     "setp.lt.s32 of_f32, %0, %1;\n"
                     "setp.lt.s32 of_16_bits, %0, %2;\n"
                     "@of_f32 st.global.v2.f32 [%3], {%5, %6};\n"
                     "@of_16_bits st.global.b32 [%4], %7;\n"
                     "}" ::"r"(block * 8),
                     "r"(of_f32), "r"(of_16_bits), "l"(first + block * 32), "l"(first + block * 16), "f"(low),
                     "f"(high), "r"(pack(low, high, element))
                     : "memory");
    }

    /* Stores column acc_column(block, parity), if the row has it; `bits`: the value in 16 bits. */
    __device__ void store(int block, int parity, float value, uint16_t bits) const
    {
        asm volatile("{\n"
                     ".reg .pred of_f32, of_16_bits;\n"
                     "setp.lt.s32 of_f32, %0, %1;\n"
                     "setp.lt.s32 of_16_bits, %0, %2;\n"
                     "@of_f32 st.global.f32 [%3], %5;\n"
                     "@of_16_bits st.global.b16 [%4], %6;\n"
                     "}" ::"r"(acc_column(block, parity)),
                     "r"(of_f32), "r"(of_16_bits), "l"(first + block * 32 + parity * 4),
                     "l"(first + block * 16 + parity * 2), "f"(value), "h"(bits)
                     : "memory");
    }
};

} // namespace tensor_core

#endif
