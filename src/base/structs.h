/* Copies a public struct of the caller, whose size may be that of another release. */
#ifndef SKL_BASE_STRUCTS_H
#define SKL_BASE_STRUCTS_H

#include "streamkl.h"

/* Larger sizes are not believed: they are more likely garbage than the struct of a newer release. */
enum { SKL_STRUCT_SIZE_MAX = 4096 };

/* Copies `size` bytes of `from`, which starts with its struct_size, to `to`, and sets the struct_size of the copy to
 * `size`. Reads no byte after struct_size before it is checked, and no byte beyond it. A larger struct is accepted
 * if its additional bytes are 0. `name` is the argument in messages; `hint` ends the message about the size. */
skl_status skl_struct_copy(void *to, const void *from, size_t size, const char *name, const char *hint);

#endif
