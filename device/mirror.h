/* The tensors of calls where the device reaches them: on the CPU where they are, for a GPU copied into its memory.
 *
 *     mirror tensors = mirror_of(&problem, SKL_CUDA);
 *     mirror_call(&tensors, &inputs, &rows, NULL);     // their addresses are now those of the device
 *     skl_forward(plan, &inputs, &rows, ...);
 *     mirror_fetch(&tensors);                          // what rows pointed to before now holds the results
 *     mirror_destroy(&tensors);
 *
 * A tensor is known by its address on the host. One that is only read is copied when it is first seen, and must not
 * change there. One that is written is copied before every call too, from its first element to its last: what the
 * call leaves alone stays as it was. Tensors that are written must not interleave.
 */
#ifndef STREAMKL_DEVICE_MIRROR_H
#define STREAMKL_DEVICE_MIRROR_H

#include "device/device.h"

#include <stdbool.h>

/* Inputs, lengths, rows, gradients and two arrays of states are 28. */
enum { MIRROR_TENSORS_MAX = 32 };

typedef struct mirror_entry {
    void *host; /* its address there */
    void *data; /* and on the device */
    size_t size;
    bool to_fetch; /* the call at hand writes it */
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
skl_status mirror_states(mirror *tensors, skl_row_state **states); /* that a call writes */

/* Copies back what was mirrored for writing since the last time; waits for the calls that write it. */
skl_status mirror_fetch(mirror *tensors);

#endif
