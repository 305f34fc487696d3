/* The tensors of calls in device memory: copies for a GPU, the tensors themselves on the CPU.
 *
 *     mirror tensors = mirror_of(&problem, SKL_CUDA);
 *     mirror_call(&tensors, &inputs, &rows, NULL);     // replaces host addresses by device addresses
 *     skl_forward(plan, &inputs, &rows, ...);
 *     mirror_fetch(&tensors);                          // copies the results to the host
 *     mirror_destroy(&tensors);
 *
 * A tensor is identified by its host address. An input is copied at its first use and must not change on the host
 * after that. An output is also copied before every call, from its first to its last element, so that elements that
 * the call does not write keep their values. Outputs must not interleave.
 */
#ifndef STREAMKL_DEVICE_MIRROR_H
#define STREAMKL_DEVICE_MIRROR_H

#include "device/device.h"

#include <stdbool.h>

/* Inputs (11), lengths and row bounds (5), sinks (2), rows (7) and gradients (7). */
enum { MIRROR_TENSORS_MAX = 32 };

typedef struct mirror_entry {
    void *host; /* address on the host */
    void *data; /* address on the device */
    size_t size;
    bool to_fetch; /* an output since the last mirror_fetch() */
} mirror_entry;

typedef struct mirror {
    skl_problem problem;
    skl_device device;
    int count;
    mirror_entry entries[MIRROR_TENSORS_MAX];
} mirror;

mirror mirror_of(const skl_problem *problem, skl_device device);
void mirror_destroy(mirror *tensors);

/* Any of the three may be NULL. On failure device_error() says why. */
skl_status mirror_call(mirror *tensors, skl_inputs *inputs, skl_rows *rows, skl_gradients *gradients);

/* Mirrors the results of skl_attention_stats that a tool asks for: those without key ranges, top keys and chosen
 * rows. */
skl_status mirror_stats(mirror *tensors, skl_inputs *inputs, skl_stats *stats);

/* Synchronises, and copies the outputs since the last fetch to the host. */
skl_status mirror_fetch(mirror *tensors);

#endif
