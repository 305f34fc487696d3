/* The .npy header:
 *
 *     "\x93NUMPY", u8 major, u8 minor, length (u16 in version 1.0, u32 in 2.0 and 3.0)
 *     then `length` bytes that spell a Python dictionary:
 *         {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
 *     then the elements.
 */
#include "cli/common/cli.h"
#include "cli/io/tensor_file.h"

static const char magic[] = "\x93NUMPY";
enum { MAGIC_SIZE = sizeof magic - 1, VERSION_SIZE = 2 };

bool npy_recognize(const tensor_file *file)
{
    return file->size >= MAGIC_SIZE && memcmp(file->bytes, magic, MAGIC_SIZE) == 0;
}

/* ---- A cursor over the dictionary -------------------------------------------------------------------------- */

typedef struct dict_cursor {
    const char *path;
    const char *begin, *at, *end;
} dict_cursor;

typedef struct slice {
    const char *text;
    int length;
} slice;

static bool slice_is(slice text, const char *expected)
{
    const size_t length = strlen(expected);
    return (size_t)text.length == length && memcmp(text.text, expected, length) == 0;
}

/* Refuses the text at the cursor. */
_Noreturn static void expected(const dict_cursor *cursor, const char *what)
{
    const int shown_max = 24;
    const ptrdiff_t left = cursor->end - cursor->at;
    if (left == 0)
        file_refuse(cursor->path, "header ends: must continue with %s", what);
    file_refuse(cursor->path, "header byte %td, '%.*s': must be %s", cursor->at - cursor->begin,
                left < shown_max ? (int)left : shown_max, cursor->at, what);
}

static void skip_space(dict_cursor *cursor)
{
    while (cursor->at < cursor->end && (*cursor->at == ' ' || *cursor->at == '\n' || *cursor->at == '\t'))
        cursor->at++;
}

/* Skips a character and the space around it, if it is the next one. */
static bool accept(dict_cursor *cursor, char wanted)
{
    skip_space(cursor);
    if (cursor->at == cursor->end || *cursor->at != wanted)
        return false;
    cursor->at++;
    skip_space(cursor);
    return true;
}

/* A string in single or double quotes. Escapes are refused: no accepted value needs one. */
static slice read_string(dict_cursor *cursor, const char *what)
{
    if (cursor->at == cursor->end || (*cursor->at != '\'' && *cursor->at != '"'))
        expected(cursor, what);
    const int length_max = 64; /* longest string that a message shows */
    const char *const text = cursor->at + 1;
    const char *close = text;
    while (close < cursor->end && *close != *cursor->at && *close != '\\' && close - text < length_max)
        close++;
    if (close == cursor->end || *close != *cursor->at)
        expected(cursor, what);
    cursor->at = close + 1;
    return (slice){text, (int)(close - text)};
}

static bool accept_word(dict_cursor *cursor, const char *word)
{
    const size_t length = strlen(word);
    if ((size_t)(cursor->end - cursor->at) < length || memcmp(cursor->at, word, length) != 0)
        return false;
    cursor->at += length;
    return true;
}

/* ---- The three fields -------------------------------------------------------------------------------------- */

static void read_descr(dict_cursor *cursor, stored_tensor *tensor)
{
    static const struct {
        const char *descr;
        skl_dtype dtype;
    } known[] = {{"<f4", SKL_F32}, {"<f2", SKL_F16}};

    const slice descr = read_string(cursor, "a descr of '<f4' or '<f2'");
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (slice_is(descr, known[i].descr)) {
            tensor->supported = true;
            tensor->dtype = known[i].dtype;
            tensor->dtype_name = tensor_dtype_name(tensor->dtype);
            return;
        }
    }
    file_refuse(cursor->path, "descr '%.*s': must be '<f4' or '<f2'", descr.length, descr.text);
}

static void read_order(dict_cursor *cursor, stored_tensor *tensor)
{
    (void)tensor;
    if (accept_word(cursor, "True"))
        file_refuse(cursor->path, "fortran_order True: must be False");
    if (!accept_word(cursor, "False"))
        expected(cursor, "a fortran_order of False");
}

static int64_t read_dimension(dict_cursor *cursor)
{
    const char *const digits = cursor->at;
    int64_t value = 0;
    for (; cursor->at < cursor->end && *cursor->at >= '0' && *cursor->at <= '9'; cursor->at++) {
        const int digit = *cursor->at - '0';
        if (value > (INT64_MAX - digit) / 10) {
            cursor->at = digits;
            expected(cursor, "a dimension of the shape below 2^63");
        }
        value = value * 10 + digit;
    }
    if (cursor->at == digits)
        expected(cursor, "a dimension of the shape, an integer of at least 0");
    return value;
}

/* A tuple. In Python "(3)" is a number; the tuple is "(3,)". */
static void read_shape(dict_cursor *cursor, stored_tensor *tensor)
{
    if (!accept(cursor, '('))
        expected(cursor, "a shape such as (2, 3)");
    tensor->rank = 0;
    bool comma = true;
    while (!accept(cursor, ')')) {
        if (!comma)
            expected(cursor, "',' or ')' after a dimension of the shape");
        if (tensor->rank == TENSOR_RANK_MAX)
            file_refuse(cursor->path, "shape has more than %d entries: must be at most %d", TENSOR_RANK_MAX,
                        TENSOR_RANK_MAX);
        tensor->shape[tensor->rank++] = read_dimension(cursor);
        comma = accept(cursor, ',');
    }
    if (tensor->rank == 1 && !comma)
        file_refuse(cursor->path, "shape (%lld): must be a tuple, (%lld,)", (long long)tensor->shape[0],
                    (long long)tensor->shape[0]);
}

static const struct {
    const char *name;
    void (*read)(dict_cursor *cursor, stored_tensor *tensor);
} fields[] = {{"descr", read_descr}, {"fortran_order", read_order}, {"shape", read_shape}};
enum { FIELD_COUNT = sizeof fields / sizeof fields[0] };

static void read_field(dict_cursor *cursor, stored_tensor *tensor, bool seen[FIELD_COUNT])
{
    const slice key = read_string(cursor, "'descr', 'fortran_order' or 'shape'");
    if (!accept(cursor, ':'))
        expected(cursor, "':'");
    for (size_t i = 0; i < FIELD_COUNT; i++) {
        if (!slice_is(key, fields[i].name))
            continue;
        if (seen[i])
            file_refuse(cursor->path, "%s is given twice", fields[i].name);
        seen[i] = true;
        fields[i].read(cursor, tensor);
        return;
    }
    file_refuse(cursor->path, "header key '%.*s': must be 'descr', 'fortran_order' or 'shape'", key.length, key.text);
}

static void read_dictionary(dict_cursor *cursor, stored_tensor *tensor)
{
    bool seen[FIELD_COUNT] = {false};
    if (!accept(cursor, '{'))
        expected(cursor, "'{'");
    bool comma = true;
    while (!accept(cursor, '}')) {
        if (!comma)
            expected(cursor, "',' or '}'");
        read_field(cursor, tensor, seen);
        comma = accept(cursor, ',');
    }
    if (cursor->at != cursor->end)
        expected(cursor, "nothing but space");
    for (size_t i = 0; i < FIELD_COUNT; i++)
        if (!seen[i])
            file_refuse(cursor->path, "%s is missing from the header", fields[i].name);
}

/* ---- The file ---------------------------------------------------------------------------------------------- */

/* The dictionary; the elements are after it. */
static dict_cursor find_dictionary(const tensor_file *file)
{
    const size_t prefix_size = MAGIC_SIZE + VERSION_SIZE;
    if (file->size < prefix_size)
        file_refuse(file->path, "%zu bytes: too short for an .npy header", file->size);
    const int major = file->bytes[MAGIC_SIZE], minor = file->bytes[MAGIC_SIZE + 1];
    if (major < 1 || major > 3 || minor != 0)
        file_refuse(file->path, ".npy version %d.%d: must be 1.0, 2.0 or 3.0", major, minor);

    const size_t length_size = major == 1 ? sizeof(uint16_t) : sizeof(uint32_t);
    if (file->size < prefix_size + length_size)
        file_refuse(file->path, "%zu bytes: too short for an .npy header", file->size);
    uint32_t length = 0;
    memcpy(&length, file->bytes + prefix_size, length_size); /* little-endian: a u16 fills the low half */
    const size_t following = file->size - prefix_size - length_size;
    if (length > following)
        file_refuse(file->path, "header length %lu: only %zu bytes follow", (unsigned long)length, following);
    const char *const begin = (const char *)file->bytes + prefix_size + length_size;
    return (dict_cursor){file->path, begin, begin, begin + length};
}

void npy_parse(tensor_file *file)
{
    dict_cursor cursor = find_dictionary(file);
    stored_tensor tensor = {.name = ""};
    read_dictionary(&cursor, &tensor);
    tensor.bytes = (const unsigned char *)cursor.end;
    tensor.size = file->size - (size_t)(tensor.bytes - file->bytes);
    const shape_text shape = shape_print(tensor.shape, tensor.rank);
    size_t size = 0;
    if (!shape_size(tensor.shape, tensor.rank, tensor_dtype_size(tensor.dtype), &size))
        file_refuse(file->path, "shape %s: its size overflows 64 bits", shape.text);
    if (size != tensor.size)
        file_refuse(file->path, "%zu bytes of data: shape %s of %s takes %zu", tensor.size, shape.text,
                    tensor.dtype_name, size);
    file->tensors = cli_allocate_zeros(1, sizeof tensor, "the list of tensors");
    file->tensors[0] = tensor;
    file->tensor_count = 1;
}
