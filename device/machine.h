/* The machine of a measurement, and the date. */
#ifndef STREAMKL_DEVICE_MACHINE_H
#define STREAMKL_DEVICE_MACHINE_H

#include <stddef.h>
#include <stdint.h>

/* "Intel(R) Xeon(R) Processor" from /proc/cpuinfo, or the architecture if that names no model. */
void machine_cpu_model(char *text, size_t size);

/* "2026-01-31". */
void machine_date(char *text, size_t size);

/* Seconds of the monotonic clock, since an arbitrary moment: only differences are meaningful. */
double clock_seconds(void);

/* Cores that this process may run on. */
int machine_cores(void);

/* Bytes that can be allocated without swapping; INT64_MAX if unknown. */
int64_t machine_available_memory(void);

/* Total time that the calling thread was ready to run but waited for a core; 0 if unknown. */
double machine_waiting_seconds(void);

#endif
