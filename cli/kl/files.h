/* The files of a `streamkl kl` command line, and the tensors for each role. */
#ifndef STREAMKL_CLI_KL_FILES_H
#define STREAMKL_CLI_KL_FILES_H

#include "cli/io/tensor_file.h"

/* The purpose of a tensor. The first four are required. */
typedef enum kl_role {
    ROLE_Q_T,
    ROLE_K_T,
    ROLE_Q_S,
    ROLE_K_S,
    ROLE_LSE_T,
    ROLE_KEY_LENGTHS,
    ROLE_CU_SEQLENS_Q,
    ROLE_CU_SEQLENS_K,
    ROLE_W_S,
    ROLE_INDICES,
    ROLE_KEY_BEGIN,
    ROLE_KEY_END,
    ROLE_SINK_T,
    ROLE_SINK_S,
    ROLE_COUNT,
    ROLE_REQUIRED_COUNT = ROLE_LSE_T
} kl_role;

extern const char *const kl_role_names[ROLE_COUNT]; /* "q_t", ...: also the default names in files */

typedef struct kl_file {
    const char *path;
    tensor_file *contents;
    int role; /* of ROLE=FILE; -1: any, by name */
} kl_file;

typedef struct kl_files {
    kl_file *files;
    size_t count;
} kl_files;

/* The path in an argument of the form FILE or ROLE=FILE. */
const char *kl_file_path(const char *argument);

/* Opens arguments of the form FILE or ROLE=FILE. On failure prints why. Returns an exit code. */
int kl_files_open(kl_files *files, char *const *arguments, size_t count);
void kl_files_close(kl_files *files);

/* Call it after the computation and before its results are used: refuses files that changed during it. */
int kl_files_unchanged(const kl_files *files);

typedef struct kl_found {
    const kl_file *file;
    const stored_tensor *tensor; /* NULL: not found */
} kl_found;

/* Finds the tensor for a role, by its name in the files. A missing tensor is an error only if it is required. */
int kl_files_find(const kl_files *files, kl_role role, const char *name, bool required, kl_found *found);

#endif
