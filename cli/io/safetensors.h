/* The safetensors format. */
#ifndef STREAMKL_CLI_IO_SAFETENSORS_H
#define STREAMKL_CLI_IO_SAFETENSORS_H

#include "cli/io/tensor.h"

/* The largest header that the format allows, in bytes. */
enum { SAFETENSORS_HEADER_SIZE_MAX = 100000000 };

/* tensor_file_close() frees what the parser sets, even when it fails. */
bool safetensors_parse(tensor_contents *file, tensor_error *error);

#endif
