/* How much memory this process holds, as the kernel counts it. */
#ifndef STREAMKL_CLI_COMMON_RESIDENT_H
#define STREAMKL_CLI_COMMON_RESIDENT_H

#include <stddef.h>
#include <stdint.h>

/* Starts a measurement: forgets earlier peaks and returns what is resident now, in bytes; -1 if /proc cannot say. */
int64_t resident_begin(void);

/* How far the peak has risen above that since; -1 if unknown. */
int64_t resident_peak_growth(int64_t begin);

/* The most that was ever resident, in bytes, mapped files included; -1 if unknown. */
int64_t resident_peak(void);

/* Inputs and outputs are made resident before a measurement begins, so that it sees only what is beyond them. */

/* Reads a byte of every page of a mapped file. */
void resident_touch(const void *data, size_t size);

/* Zeroed memory, to be freed with free(), of which every page is resident; NULL if there is not enough. */
void *resident_allocate(size_t size);

#endif
