/* Included before everything else in builds for an older glibc (cmake/manylinux.cmake). From glibc 2.38 on, headers with
 * _GNU_SOURCE rename strtol, sscanf and their relatives to functions that older releases lack. */
#include <features.h>

#undef __GLIBC_USE_C2X_STRTOL
#define __GLIBC_USE_C2X_STRTOL 0
#undef __GLIBC_USE_C23_STRTOL
#define __GLIBC_USE_C23_STRTOL 0
