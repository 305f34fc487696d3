/* Resident memory of this process. */
#ifndef STREAMKL_CLI_COMMON_RESIDENT_H
#define STREAMKL_CLI_COMMON_RESIDENT_H

#include <stddef.h>
#include <stdint.h>

/* Starts a measurement: resets the peak and returns the resident bytes; -1 if unknown. */
int64_t resident_begin(void);

/* Growth of the peak since resident_begin(), in bytes; -1 if unknown. */
int64_t resident_peak_growth(int64_t begin);

/* Peak resident bytes since resident_begin() or the start, including mapped files; -1 if unknown. */
int64_t resident_peak(void);

/* Inputs and outputs are made resident before a measurement, so that it excludes them. */

/* Reads a byte of every page of a mapped file. */
void resident_touch(const void *data, size_t size);

/* Zeroed, fully resident memory that the caller frees with free(); NULL: out of memory. */
void *resident_allocate(size_t size);

#endif
