/* The .npy format. */
#ifndef STREAMKL_CLI_IO_NPY_H
#define STREAMKL_CLI_IO_NPY_H

#include "cli/io/tensor.h"

bool npy_recognise(const unsigned char *bytes, size_t size);

/* tensor_file_close() frees what the parser sets, even when it fails. */
bool npy_parse(tensor_contents *file, tensor_error *error);

#endif
