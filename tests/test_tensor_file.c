/* The tensor file parsers on files in memory: what each rule of the two formats accepts and refuses. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "caught.h"
#include "cli/io/tensor_file.h"

/* ---- Files in memory --------------------------------------------------------------------------------------- */

/* Exactly the size of the file, so that a sanitizer detects a read past its end. */
typedef struct memory_file {
    unsigned char *bytes;
    size_t size;
} memory_file;

/* `prefix`, `header`, then bytes 0, 1, 2, ... */
static memory_file build_file(const void *prefix, size_t prefix_size, const char *header, size_t data_size)
{
    const size_t header_size = strlen(header);
    const memory_file file = {malloc(prefix_size + header_size + data_size), prefix_size + header_size + data_size};
    assert_non_null(file.bytes);
    memcpy(file.bytes, prefix, prefix_size);
    memcpy(file.bytes + prefix_size, header, header_size);
    for (size_t i = 0; i < data_size; i++)
        file.bytes[prefix_size + header_size + i] = (unsigned char)i;
    return file;
}

static memory_file build_safetensors(const char *header, size_t data_size)
{
    const uint64_t length = strlen(header);
    return build_file(&length, sizeof length, header, data_size);
}

static memory_file build_npy(int major, const char *header, size_t data_size)
{
    const size_t length = strlen(header);
    const unsigned char prefix[12] = {
        0x93, 'N', 'U', 'M', 'P', 'Y', (unsigned char)major, 0, length & 0xff, (unsigned char)(length >> 8), 0, 0};
    return build_file(prefix, major == 1 ? 10 : 12, header, data_size);
}

static void expect_refused(memory_file file, const char *message)
{
    tensor_file parsed;
    CATCH(tensor_file_parse(&parsed, file.bytes, file.size, "in"));
    if (strncmp(caught.text, "in: ", 4) != 0 || !strstr(caught.text, message))
        fail_msg("got \"%s\", wanted \"in: %s\"", caught.text, message);
    tensor_file_close(&parsed);
    free(file.bytes);
}

/* ---- safetensors ------------------------------------------------------------------------------------------- */

static void safetensors_accepts(void **state)
{
    (void)state;
    const memory_file bytes = build_safetensors(
        "{\"__metadata__\":{\"by\":\"hand\"},\"q\":{\"dtype\":\"F16\",\"shape\":[2,3],\"data_offsets\":[16,28]},"
        "\"big\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[28,36]},"
        "\"none\":{\"shape\":[0,7],\"data_offsets\":[16,16],\"dtype\":\"BF16\",\"note\":null},"
        "\"new\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[36,38]},"
        "\"k\":{\"dtype\":\"F32\",\"shape\":[1,2,2],\"data_offsets\":[0,16]}}   ",
        38);
    tensor_file file;
    tensor_file_parse(&file, bytes.bytes, bytes.size, "in");

    const char *const names_by_address[] = {"k", "none", "q", "big", "new"};
    for (size_t i = 0; i < 5; i++)
        assert_string_equal(file.tensors[i].name, names_by_address[i]);
    assert_int_equal(file.tensor_count, 5);

    const stored_tensor *const q = tensor_file_find(&file, "q");
    assert_non_null(q);
    assert_true(q->supported && q->dtype == SKL_F16 && q->rank == 2 && q->shape[0] == 2 && q->shape[1] == 3);
    assert_int_equal(q->size, 12);
    assert_memory_equal(tensor_file_data(&file, q), bytes.bytes + bytes.size - 38 + 16, 12);

    const stored_tensor *const none = tensor_file_find(&file, "none");
    assert_true(none->dtype == SKL_BF16 && none->size == 0 && none->shape[1] == 7);
    assert_non_null(tensor_file_data(&file, none));

    const stored_tensor *const big = tensor_file_find(&file, "big");
    assert_true(!big->supported && big->rank == 0);
    CATCH(tensor_file_data(&file, big));
    assert_string_equal(caught.text, "in: tensor \"big\": dtype F64: must be F32, F16 or BF16");

    assert_null(tensor_file_find(&file, "q_t"));
    assert_string_equal(tensor_file_names(&file).text, "\"k\", \"none\", \"q\", \"big\", \"new\"");
    tensor_file_close(&file);
    free(bytes.bytes);
}

#define F32(shape, offsets) "{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static const struct {
    const char *header;
    size_t data_size;
    const char *message;
} safetensors_refusals[] = {
    {"[1]", 0, "neither safetensors (byte 8 is 0x5b, not '{') nor .npy"},
    {"{\"a\":", 0, "header byte "},
    {"{} x", 0, "end of file expected near 'x'"},
    {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", 0, "duplicate object key"},
    {"{\"a\":" F32("[]", "[0,4]") ",\"a\":" F32("[]", "[0,4]") "}", 4, "duplicate object key"},
    {"{\"a\\u0000b\":{}}", 0, "NUL byte in object key not supported"},
    {"{\"\xff\":{}}", 0, "unable to decode byte 0xff"},
    {"{\"__metadata__\":[]}", 0, "__metadata__ [...]: must be an object of strings"},
    {"{\"__metadata__\":{\"n\":3}}", 0, "__metadata__ \"n\" 3: must be a string"},
    {"{\"a\":7}", 0, "tensor \"a\": 7: must be an object"},
    {"{\"a\":{\"shape\":[],\"data_offsets\":[0,0]}}", 0, "tensor \"a\": dtype missing: must be a string"},
    {"{\"a\":{\"dtype\":{},\"shape\":[],\"data_offsets\":[0,0]}}", 0, "tensor \"a\": dtype {...}: must be a string"},
    {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,0]}}", 0, "tensor \"a\": shape missing: must be an array"},
    {"{\"a\":" F32("true", "[0,0]") "}", 0, "tensor \"a\": shape true: must be an array of integers"},
    {"{\"a\":" F32("\"12\"", "[0,0]") "}", 0, "tensor \"a\": shape \"12\": must be an array of integers"},
    {"{\"a\":" F32("[2,-3]", "[0,0]") "}", 0, "tensor \"a\": shape[1] -3: must be an integer of at least 0"},
    {"{\"a\":" F32("[1.5]", "[0,0]") "}", 0, "tensor \"a\": shape[0] 1.5: must be an integer of at least 0"},
    {"{\"a\":" F32("[null]", "[0,0]") "}", 0, "tensor \"a\": shape[0] null: must be an integer of at least 0"},
    {"{\"a\":" F32("[false]", "[0,0]") "}", 0, "tensor \"a\": shape[0] false: must be an integer of at least 0"},
    {"{\"a\":" F32("[99999999999999999999]", "[0,0]") "}", 0, "too big integer"},
    {"{\"a\":" F32("[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "tensor \"a\": shape has 9 entries: must be at most 8"},
    {"{\"a\":" F32("[4294967296,4294967296]", "[0,4]") "}", 4,
     "tensor \"a\": shape [4294967296, 4294967296]: its size overflows 64 bits"},
    {"{\"a\":" F32("[4294967296,0,4294967296]", "[0,0]") "}", 0,
     "tensor \"a\": shape [4294967296, 0, 4294967296]: its size overflows 64 bits"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[]}}", 0, "tensor \"a\": data_offsets missing: must be an array"},
    {"{\"a\":" F32("[]", "[0,4,8]") "}", 4, "tensor \"a\": data_offsets has 3 entries: must be at most 2"},
    {"{\"a\":" F32("[]", "[4]") "}", 4, "tensor \"a\": data_offsets has 1 entries: must be [begin, end]"},
    {"{\"a\":" F32("[]", "[-4,0]") "}", 4, "tensor \"a\": data_offsets[0] -4: must be an integer of at least 0"},
    {"{\"a\":" F32("[]", "[64,32]") "}", 64, "tensor \"a\": data_offsets [64, 32]: end before begin"},
    {"{\"a\":" F32("[]", "[0,4]") "}", 3, "tensor \"a\": data_offsets [0, 4]: end past the 3 bytes of data"},
    {"{\"a\":" F32("[]", "[9223372036854775803,9223372036854775807]") "}", 4, "end past the 4 bytes of data"},
    {"{\"a\":" F32("[4,4]", "[0,60]") "}", 60,
     "tensor \"a\": data_offsets span 60 bytes: shape [4, 4] of F32 takes 64"},
    {"{\"a\":{\"dtype\":\"I64\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8,
     "tensor \"a\": data_offsets span 8 bytes: shape [3] of I64 takes 24"},
    {"{\"a\":" F32("[2]", "[0,8]") ",\"b\":" F32("[2]", "[4,12]") "}", 12,
     "tensor \"b\": data_offsets [4, 12]: overlaps tensor \"a\""},
    {"{\"b\":" F32("[2]", "[0,8]") ",\"a\":" F32("[0]", "[4,4]") "}", 8,
     "tensor \"a\": data_offsets [4, 4]: overlaps tensor \"b\""},
    {"{\"a\":" F32("[1]", "[4,8]") "}", 8, "tensor \"a\": data_offsets [4, 8]: must begin at 0, without a gap"},
    {"{\"a\":" F32("[1]", "[0,4]") ",\"b\":" F32("[1]", "[8,12]") "}", 12,
     "tensor \"b\": data_offsets [8, 12]: must begin at 4, without a gap"},
    {"{\"a\":" F32("[1]", "[0,4]") "}", 9, "9 bytes of data: the tensors end at 4"},
    {"{\"\\u001b[2J\":" F32("[]", "[4,0]") "}", 4, "tensor \"?[2J\": data_offsets [4, 0]: end before begin"},
};

static void safetensors_refuses(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof safetensors_refusals / sizeof safetensors_refusals[0]; i++)
        expect_refused(build_safetensors(safetensors_refusals[i].header, safetensors_refusals[i].data_size),
                       safetensors_refusals[i].message);
}

static void safetensors_refuses_header_length(void **state)
{
    (void)state;
    const uint64_t longest = UINT64_MAX, below = UINT64_MAX - 7, cap = 100000001, past = 3;
    expect_refused(build_file(&longest, 8, "{}", 0), "header length 18446744073709551615: must be at most 100000000");
    expect_refused(build_file(&below, 8, "{}", 0), "header length 18446744073709551608: must be at most 100000000");
    expect_refused(build_file(&cap, 8, "{}", 0), "header length 100000001: must be at most 100000000");
    expect_refused(build_file(&past, 8, "{}", 0), "header length 3: only 2 bytes follow");
    expect_refused(build_file(&past, 8, "", 0), "8 bytes: too short for a safetensors header");
    expect_refused(build_file(&past, 1, "", 0), "1 bytes: too short for a safetensors header");
}

static void long_names_are_truncated(void **state)
{
    (void)state;
    char header[2100] = "{\"";
    memset(header + 2, 'n', 2000);
    strcpy(header + 2002, "\":" F32("[]", "[4,0]") "}");
    expect_refused(build_safetensors(header, 4), "nnn\": data_offsets [4, 0]: end before begin");
}

static void long_lists_of_names_are_truncated(void **state)
{
    (void)state;
    char header[4000] = "{\"first\":" F32("[0]", "[0,0]");
    size_t length = strlen(header);
    for (int i = 1; i < 40; i++)
        length +=
            (size_t)snprintf(header + length, sizeof header - length, ",\"layer.%02d\":%s", i, F32("[0]", "[0,0]"));
    assert_true(length + 2 < sizeof header);
    const memory_file bytes = build_safetensors(strcat(header, "}"), 0);
    tensor_file file;
    tensor_file_parse(&file, bytes.bytes, bytes.size, "in");
    assert_int_equal(file.tensor_count, 40);
    const tensor_names names = tensor_file_names(&file);
    assert_memory_equal(names.text, "\"first\", ", 9);
    assert_string_equal(names.text + strlen(names.text) - 4, "\"...");
    tensor_file_close(&file);
    free(bytes.bytes);
}

/* ---- .npy -------------------------------------------------------------------------------------------------- */

static void npy_accepts(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        size_t data_size;
        skl_dtype dtype;
        int rank;
        int64_t shape[2];
    } cases[] = {
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }      \n", 24, SKL_F32, 2, {2, 3}},
        {"{\"shape\":(2,3),\"fortran_order\":False,\"descr\":\"<f2\"}", 12, SKL_F16, 2, {2, 3}},
        {" {\n'shape' : ( 5 , ) , 'descr' :\t'<f2' , 'fortran_order' : False } ", 10, SKL_F16, 1, {5}},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (), }\n", 4, SKL_F32, 0, {0}},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 9,), }\n", 0, SKL_F32, 2, {0, 9}},
    };
    for (int major = 1; major <= 3; major++) {
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            const memory_file bytes = build_npy(major, cases[i].header, cases[i].data_size);
            tensor_file file;
            tensor_file_parse(&file, bytes.bytes, bytes.size, "in");
            const stored_tensor *const tensor = file.tensors;
            assert_string_equal(tensor->name, "");
            assert_true(tensor->supported && tensor->dtype == cases[i].dtype && tensor->rank == cases[i].rank);
            assert_memory_equal(tensor->shape, cases[i].shape, sizeof cases[i].shape);
            assert_int_equal(tensor->size, cases[i].data_size);
            assert_memory_equal(tensor_file_data(&file, tensor), bytes.bytes + bytes.size - tensor->size,
                                tensor->size);
            assert_int_equal(file.tensor_count, 1);
            tensor_file_close(&file);
            free(bytes.bytes);
        }
    }
}

#define LONG_TEXT  "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" /* two of them are longer than any key */
#define NPY(shape) "{'descr': '<f4', 'fortran_order': False, 'shape': " shape "}"

static const struct {
    const char *header;
    size_t data_size;
    const char *message;
} npy_refusals[] = {
    {"", 0, "header ends: must continue with '{'"},
    {"['descr']", 0, "header byte 0, '['descr']': must be '{'"},
    {"{", 0, "header ends: must continue with 'descr', 'fortran_order' or 'shape'"},
    {"{}", 0, "descr is missing from the header"},
    {"{,}", 0, "header byte 1, ',}': must be 'descr', 'fortran_order' or 'shape'"},
    {"{'descr': '<f4', 'shape': ()}", 4, "fortran_order is missing from the header"},
    {"{'descr': '<f4', 'fortran_order': False}", 4, "shape is missing from the header"},
    {"{'descr': '<f4', 'descr': '<f4'}", 4, "descr is given twice"},
    {"{'descr': '<f4', 'color': 'red'}", 4, "header key 'color': must be 'descr', 'fortran_order' or 'shape'"},
    {"{'descr' '<f4'}", 4, "header byte 9, ''<f4'}': must be ':'"},
    {"{'descr': '<f4' 'shape': ()}", 4, "header byte 16, ''shape': ()}': must be ',' or '}'"},
    {"{'descr': '<f8'}", 4, "descr '<f8': must be '<f4' or '<f2'"},
    {"{'descr': '>f4'}", 4, "descr '>f4': must be '<f4' or '<f2'"},
    {"{'descr': [('x', '<f4')]}", 4, "header byte 10, '[('x', '<f4')]}': must be a descr of '<f4' or '<f2'"},
    {"{'descr': '\\x3cf4'}", 4, "must be a descr of '<f4' or '<f2'"},
    {"{'descr': '<f4", 4, "must be a descr of '<f4' or '<f2'"},
    {"{'descr': '<f4\"}", 4, "must be a descr of '<f4' or '<f2'"},
    {"{'fortran_order': True}", 4, "fortran_order True: must be False"},
    {"{'fortran_order': 0}", 4, "header byte 18, '0}': must be a fortran_order of False"},
    {"{'fortran_order': Fals", 4, "header byte 18, 'Fals': must be a fortran_order of False"},
    {NPY("3"), 12, "must be a shape such as (2, 3)"},
    {NPY("(3)"), 12, "shape (3): must be a tuple, (3,)"},
    {NPY("(,)"), 12, "header byte 51, ',)}': must be a dimension of the shape, an integer of at least 0"},
    {NPY("(-3,)"), 12, "header byte 51, '-3,)}': must be a dimension of the shape, an integer of at least 0"},
    {NPY("(2 3)"), 12, "header byte 53, '3)}': must be ',' or ')' after a dimension of the shape"},
    {NPY("(1.5,)"), 12, "header byte 52, '.5,)}': must be ',' or ')' after a dimension of the shape"},
    {NPY("(9223372036854775808,)"), 12, "'9223372036854775808,)}': must be a dimension of the shape below 2^63"},
    {NPY("(1,1,1,1,1,1,1,1,1)"), 4, "shape has more than 8 entries: must be at most 8"},
    {NPY("(4294967296, 4294967296)"), 4, "shape [4294967296, 4294967296]: its size overflows 64 bits"},
    {NPY("(2, 3)"), 23, "23 bytes of data: shape [2, 3] of F32 takes 24"},
    {NPY("(2, 3)"), 25, "25 bytes of data: shape [2, 3] of F32 takes 24"},
    {NPY("(2, 3"), 24, "header byte 55, '}': must be ',' or ')' after a dimension of the shape"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3", 24, "header ends: must continue with ',' or ')'"},
    {NPY("(3x,)"), 12, "header byte 52, 'x,)}': must be ',' or ')' after a dimension of the shape"},
    {"{'" LONG_TEXT LONG_TEXT "': 1}", 4, "header byte 1, ''aaaaaaaaaaaaaaaaaaaaaaa': must be 'descr', "},
    {NPY("()") " # comment", 4, "header byte 54, '# comment': must be nothing but space"},
};

static void npy_refuses(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof npy_refusals / sizeof npy_refusals[0]; i++)
        for (int major = 1; major <= 3; major++)
            expect_refused(build_npy(major, npy_refusals[i].header, npy_refusals[i].data_size),
                           npy_refusals[i].message);
}

static void npy_refuses_prefix(void **state)
{
    (void)state;
    expect_refused(build_file("\x93NUMP", 5, "", 0), "5 bytes: too short for a safetensors header");
    expect_refused(build_file("\x93NUMPY\1", 7, "", 0), "7 bytes: too short for an .npy header");
    expect_refused(build_file("\x93NUMPY\1\0\1", 9, "", 0), "9 bytes: too short for an .npy header");
    expect_refused(build_file("\x93NUMPY\2\0\1\0", 10, "", 0), "10 bytes: too short for an .npy header");
    expect_refused(build_file("\x93NUMPY\0\0\0\0", 10, "", 0), ".npy version 0.0: must be 1.0, 2.0 or 3.0");
    expect_refused(build_file("\x93NUMPY\4\0\0\0", 10, "", 0), ".npy version 4.0: must be 1.0, 2.0 or 3.0");
    expect_refused(build_file("\x93NUMPY\1\1\0\0", 10, "", 0), ".npy version 1.1: must be 1.0, 2.0 or 3.0");
    expect_refused(build_file("\x93NUMPY\1\0\3\0", 10, "{}", 0), "header length 3: only 2 bytes follow");
    expect_refused(build_file("\x93NUMPY\2\0\xff\xff\xff\xff", 12, "{}", 0),
                   "header length 4294967295: only 2 bytes follow");
}

/* ---- Numbers ----------------------------------------------------------------------------------------------- */

static void numbers_of_16_bits(void **state)
{
    (void)state;
    static const struct {
        skl_dtype dtype;
        uint16_t bits;
        float value;
    } numbers[] = {{SKL_F16, 0x0000, 0.0F},     {SKL_F16, 0x0001, 0x1p-24F},  {SKL_F16, 0x83FF, -0x1.FF8p-15F},
                   {SKL_F16, 0x0400, 0x1p-14F}, {SKL_F16, 0xC500, -5.0F},     {SKL_F16, 0x7BFF, 65504.0F},
                   {SKL_F16, 0x7C00, INFINITY}, {SKL_F16, 0xFC00, -INFINITY}, {SKL_BF16, 0x0001, 0x1p-133F},
                   {SKL_BF16, 0xC0A0, -5.0F},   {SKL_BF16, 0x7F80, INFINITY}};
    for (size_t n = 0; n < sizeof numbers / sizeof numbers[0]; n++)
        assert_true(tensor_number_at(&numbers[n].bits, numbers[n].dtype, 0) == numbers[n].value);
    const uint16_t nans[] = {0x7C01, 0xFFFF};
    assert_true(isnan(tensor_number_at(nans, SKL_F16, 0)) && isnan(tensor_number_at(nans, SKL_F16, 1)));
}

/* ---- Alignment --------------------------------------------------------------------------------------------- */

static void unaligned_data_is_copied_once(void **state)
{
    (void)state;
    /* One of the four paddings aligns the data to 4 bytes; the others force a copy. */
    for (int padding = 0; padding < 4; padding++) {
        char header[100];
        snprintf(header, sizeof header, "{\"a\":%s}%*s", F32("[3]", "[0,12]"), padding, "");
        const memory_file bytes = build_safetensors(header, 12);
        tensor_file file;
        tensor_file_parse(&file, bytes.bytes, bytes.size, "in");
        const stored_tensor *const tensor = tensor_file_find(&file, "a");
        const bool aligned = (uintptr_t)tensor->bytes % 4 == 0;
        const void *const data = tensor_file_data(&file, tensor);
        assert_int_equal((uintptr_t)data % 4, 0);
        assert_int_equal(data == bytes.bytes + bytes.size - 12, aligned);
        assert_memory_equal(data, bytes.bytes + bytes.size - 12, 12);
        assert_ptr_equal(tensor_file_data(&file, tensor), data);
        tensor_file_close(&file);
        free(bytes.bytes);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(safetensors_accepts),
        cmocka_unit_test(safetensors_refuses),
        cmocka_unit_test(safetensors_refuses_header_length),
        cmocka_unit_test(long_names_are_truncated),
        cmocka_unit_test(long_lists_of_names_are_truncated),
        cmocka_unit_test(npy_accepts),
        cmocka_unit_test(npy_refuses),
        cmocka_unit_test(npy_refuses_prefix),
        cmocka_unit_test(numbers_of_16_bits),
        cmocka_unit_test(unaligned_data_is_copied_once),
    };
    return cmocka_run_group_tests_name("tensor_file", tests, NULL, NULL);
}
