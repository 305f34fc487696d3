/* Marks small functions that are compiled for both the CPU and the GPU. */
#ifndef SKL_BASE_HOST_DEVICE_H
#define SKL_BASE_HOST_DEVICE_H

#if defined(__CUDACC__)
#define SKL_HOST_DEVICE static __host__ __device__ inline
#else
#define SKL_HOST_DEVICE static inline
#endif

#endif
