/* A libFuzzer target: for any input, the parsers accept only tensors inside the file.
 *
 * Each input is parsed unchanged, and after a valid prefix of each format, so that mutations reach the header. */
#include "caught.h"
#include "cli/io/tensor_file.h"

#include <stdlib.h>

static volatile unsigned char sink;

static void read_bytes(const unsigned char *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        sink = bytes[i];
}

static void read_tensors(tensor_file *file)
{
    for (size_t i = 0; i < file->tensor_count; i++) {
        const stored_tensor *const tensor = &file->tensors[i];
        read_bytes(tensor->bytes, tensor->size);
        if (!tensor->supported)
            continue;
        const unsigned char *const data = tensor_file_data(file, tensor);
        if ((uintptr_t)data % tensor_dtype_size(tensor->dtype) != 0)
            abort();
        read_bytes(data, tensor->size);
    }
    tensor_file_find(file, "q_t");
    tensor_file_names(file);
}

static void parse_and_read(const unsigned char *bytes, size_t size)
{
    static tensor_file file;
    CATCH(tensor_file_parse(&file, bytes, size, "fuzz"));
    if (caught.text[0] == '\0')
        read_tensors(&file);
    tensor_file_close(&file);
}

static void parse_after_prefix(const void *prefix, size_t prefix_size, const uint8_t *input, size_t input_size)
{
    unsigned char *const bytes = malloc(prefix_size + input_size);
    if (!bytes)
        return;
    memcpy(bytes, prefix, prefix_size);
    if (input_size > 0)
        memcpy(bytes + prefix_size, input, input_size);
    parse_and_read(bytes, prefix_size + input_size);
    free(bytes);
}

/* The header ends with the last '}'; the rest is data. */
static size_t header_length(const uint8_t *input, size_t size)
{
    while (size > 0 && input[size - 1] != '}')
        size--;
    return size;
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    const uint64_t length = header_length(input, size);
    unsigned char npy_prefix[12] = "\x93NUMPY\2";
    memcpy(npy_prefix + 8, &length, 4);

    parse_after_prefix("", 0, input, size);
    parse_after_prefix(&length, sizeof length, input, size);
    parse_after_prefix(npy_prefix, sizeof npy_prefix, input, size);
    return 0;
}
