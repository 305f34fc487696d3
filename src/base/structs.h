/* Public structs of the caller, whose size may be that of an older or a newer release. All entry points read and
 * write them here. */
#ifndef SKL_BASE_STRUCTS_H
#define SKL_BASE_STRUCTS_H

#include "streamkl.h"

/* Larger sizes are refused: they are more likely garbage than the struct of a newer release. */
enum { SKL_STRUCT_SIZE_MAX = 4096 };

/* A public struct. `first_size` is its size in the first release that had it: no program has a shorter one. */
typedef struct skl_struct {
    const char *name; /* name in messages */
    size_t size, first_size;
    const char *hint; /* ends the message about its size */
} skl_struct;

extern const skl_struct skl_struct_problem, skl_struct_options, skl_struct_inputs, skl_struct_rows,
    skl_struct_gradients, skl_struct_attention, skl_struct_stats, skl_struct_kernel_info;

/* Copies the caller's struct `from` to `to`, which has the size of this release. Fields that a shorter struct lacks
 * become 0. Refuses NULL, and a longer struct with a byte that is not 0 beyond the fields of this release. Reads
 * nothing after struct_size before its value is checked, and nothing beyond it. */
skl_status skl_struct_read(const skl_struct *type, void *to, const void *from);

/* Copies `from`, which has the size of this release, to the caller's struct `to`, except for its struct_size. Checks
 * `to` like skl_struct_read, so that a size that was never set does no harm: no byte beyond this release's fields is
 * written. */
skl_status skl_struct_write(const skl_struct *type, void *to, const void *from);

#endif
