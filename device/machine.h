/* What a measurement is worth nothing without: the machine and the day. */
#ifndef STREAMKL_DEVICE_MACHINE_H
#define STREAMKL_DEVICE_MACHINE_H

#include <stddef.h>
#include <stdint.h>

/* "Intel(R) Xeon(R) Processor" from /proc/cpuinfo, or the architecture where that names no model. */
void machine_cpu_model(char *text, size_t size);

/* "2026-01-31". */
void machine_date(char *text, size_t size);

/* Cores that this process may run on. */
int machine_cores(void);

/* Bytes that can be used without swapping; INT64_MAX if the system does not say. */
int64_t machine_available_memory(void);

/* How long the calling thread, ready to run, has waited for a core so far; 0 if the system does not say. */
double machine_waiting_seconds(void);

#endif
