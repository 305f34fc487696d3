/* The device layer: memory and time on the device that computes, copies of tensors on a GPU, and the machine.
 *
 * The library works on the caller's memory, which its device must be able to access, and never allocates. On failure
 * a call returns a status other than SKL_OK, and device_error() says why.
 */
#ifndef STREAMKL_DEVICE_DEVICE_H
#define STREAMKL_DEVICE_DEVICE_H

#include "streamkl.h"

#include <stdbool.h>

/* ---- Device ------------------------------------------------------------------------------------------------- */

/* Initializes a GPU for this thread. Call it first, after a plan for the device was created. */
skl_status device_open(skl_device device, int32_t index);

/* "NVIDIA H200"; "" for the CPU. */
skl_status device_describe(skl_device device, char *name, size_t size);

/* Aligned for tensors and workspaces. Error messages call the memory `what`. */
skl_status device_allocate(skl_device device, size_t size, const char *what, void **memory);
void device_free(skl_device device, void *memory); /* may be NULL */

/* Between host and device memory, in the direction that the addresses imply. */
skl_status device_copy(skl_device device, void *to, const void *from, size_t size);

/* Measures the time between start and stop: with the clock on the CPU, with events in the stream on a GPU. */
typedef struct device_timer {
    skl_device device;
    double began;
    void *events[2];
} device_timer;

skl_status device_timer_start(device_timer *timer, skl_device device);
skl_status device_timer_stop(device_timer *timer, double *seconds); /* synchronizes */

/* The text of skl_plan_explain(), one line per launch; the caller frees it. `inputs` are those of the call, in device
 * memory, or NULL for aligned, contiguous tensors. On failure returns NULL, and device_error() or, if that is empty,
 * skl_last_error() says why. */
char *explain_plan(const skl_plan *plan, const skl_inputs *inputs, skl_op op);

/* Why the last call of the device layer failed; "" if it succeeded. */
const char *device_error(void);

/* ---- Mirror: the tensors of calls in device memory ----------------------------------------------------------- */

/* Copies for a GPU, the tensors themselves on the CPU.
 *
 *     mirror tensors = mirror_of(&problem, SKL_CUDA);
 *     mirror_call(&tensors, &inputs, &rows, NULL);     // replaces host addresses by device addresses
 *     skl_forward(plan, &inputs, &rows, ...);
 *     mirror_fetch(&tensors);                          // copies the results to the host
 *     mirror_destroy(&tensors);
 *
 * A tensor is identified by its host address. An input is copied at its first use and must not change on the host
 * after that. An output is also copied before every call, from its first to its last element, so that elements that
 * the call does not write keep their values. Outputs must not interleave. */
typedef struct mirror_entry {
    void *host; /* address on the host */
    void *data; /* address on the device */
    size_t size;
    bool to_fetch; /* an output since the last mirror_fetch() */
} mirror_entry;

/* Inputs (11), lengths and row bounds (5), sinks (2), rows (7) and gradients (7). */
enum { MIRROR_TENSORS_MAX = 32 };

typedef struct mirror {
    skl_problem problem;
    skl_device device;
    int count;
    mirror_entry entries[MIRROR_TENSORS_MAX];
} mirror;

mirror mirror_of(const skl_problem *problem, skl_device device);
void mirror_destroy(mirror *tensors); /* the mirror is empty then, and can be used again */

/* Any of the three may be NULL. On failure device_error() says why. */
skl_status mirror_call(mirror *tensors, skl_inputs *inputs, skl_rows *rows, skl_gradients *gradients);

/* Mirrors the results of skl_attention_stats that a tool asks for: those without key ranges, top keys and chosen
 * rows. */
skl_status mirror_stats(mirror *tensors, skl_inputs *inputs, skl_stats *stats);

/* Synchronizes, and copies the outputs since the last fetch to the host. */
skl_status mirror_fetch(mirror *tensors);

/* ---- Machine and process ------------------------------------------------------------------------------------- */

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

/* Starts a measurement: resets the peak and returns the resident bytes; -1 if unknown. */
int64_t resident_begin(void);

/* Growth of the peak since resident_begin(), in bytes; -1 if unknown. */
int64_t resident_peak_growth(int64_t begin);

/* Peak resident bytes since resident_begin() or the start, including mapped files; -1 if unknown. */
int64_t resident_peak(void);

/* Makes an input resident before a measurement: reads a byte of every page of a mapped file. */
void resident_touch(const void *data, size_t size);

/* Zeroed, fully resident memory for an output, which the caller frees with free(); NULL: out of memory. */
void *resident_allocate(size_t size);

/* ---- Threads ------------------------------------------------------------------------------------------------- */

typedef void rows_task(void *context, int64_t row_begin, int64_t row_end);

/* Runs `task` on blocks of rows that together are [0, row_count), on the calling thread and threads - 1 others: for
 * work outside the library, such as projections and the baseline. Threads are created per call, which takes about
 * 50 us. */
void parallel_rows(int threads, int64_t row_count, rows_task *task, void *context);

/* ---- For the layer itself ------------------------------------------------------------------------------------ */

/* Sets the text of device_error() and returns `status`, for the caller to return. */
skl_status device_fail(skl_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* What device.c needs of a GPU: gpu_cuda.c implements it, gpu_none.c is for builds without CUDA. */
skl_status gpu_open(int32_t index);
skl_status gpu_describe(char *name, size_t size);
skl_status gpu_allocate(size_t size, const char *what, void **memory);
void gpu_free(void *memory);
skl_status gpu_copy(void *to, const void *from, size_t size);
skl_status gpu_timer_start(void *events[2]);
skl_status gpu_timer_stop(void *const events[2], double *seconds);

#endif
