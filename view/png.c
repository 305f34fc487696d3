#include "view/png.h"

#include <stdlib.h>
#include <string.h>

/* ---- Checksums ---------------------------------------------------------------------------------------------- */

uint32_t png_crc32(const void *data, size_t size)
{
    const unsigned char *const in = data;
    uint32_t crc = UINT32_MAX;
    for (size_t at = 0; at < size; at++) {
        crc ^= in[at];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xedb88320 : 0);
    }
    return ~crc;
}

uint32_t png_adler32(const void *data, size_t size)
{
    enum { MODULUS = 65521 }; /* the largest prime below 2^16 */
    const unsigned char *const in = data;
    uint32_t a = 1, b = 0;
    for (size_t at = 0; at < size; at++) {
        a = (a + in[at]) % MODULUS;
        b = (b + a) % MODULUS;
    }
    return b << 16 | a;
}

/* ---- Deflate (RFC 1951): one block of fixed codes ----------------------------------------------------------- */

typedef struct bit_writer {
    bytes *out;
    uint32_t held; /* bits of an incomplete byte, the first one lowest */
    int count;
} bit_writer;

static void put_bits(bit_writer *writer, uint32_t value, int count)
{
    writer->held |= value << writer->count;
    for (writer->count += count; writer->count >= 8; writer->count -= 8) {
        bytes_add_u8(writer->out, (uint8_t)writer->held);
        writer->held >>= 8;
    }
}

/* Unlike other values, Huffman codes start with their highest bit. */
static void put_code(bit_writer *writer, uint32_t code, int count)
{
    for (int bit = count - 1; bit >= 0; bit--)
        put_bits(writer, code >> bit & 1, 1);
}

/* Literals 0..255, the end 256 and lengths 257..287, as RFC 1951, 3.2.6 numbers them. */
static void put_symbol(bit_writer *writer, uint32_t symbol)
{
    if (symbol < 144)
        put_code(writer, 0x30 + symbol, 8);
    else if (symbol < 256)
        put_code(writer, 0x190 + symbol - 144, 9);
    else if (symbol < 280)
        put_code(writer, symbol - 256, 7);
    else
        put_code(writer, 0xc0 + symbol - 280, 8);
}

/* The code of a length or distance is that of the largest base that does not exceed it. */
typedef struct code_step {
    uint16_t base;
    uint8_t extra_bits;
} code_step;

static const code_step length_steps[] = {
    {3, 0},  {4, 0},  {5, 0},  {6, 0},   {7, 0},   {8, 0},   {9, 0},   {10, 0},  {11, 1},  {13, 1},
    {15, 1}, {17, 1}, {19, 2}, {23, 2},  {27, 2},  {31, 2},  {35, 3},  {43, 3},  {51, 3},  {59, 3},
    {67, 4}, {83, 4}, {99, 4}, {115, 4}, {131, 5}, {163, 5}, {195, 5}, {227, 5}, {258, 0},
};
static const code_step distance_steps[] = {
    {1, 0},     {2, 0},     {3, 0},     {4, 0},      {5, 1},      {7, 1},      {9, 2},     {13, 2},
    {17, 3},    {25, 3},    {33, 4},    {49, 4},     {65, 5},     {97, 5},     {129, 6},   {193, 6},
    {257, 7},   {385, 7},   {513, 8},   {769, 8},    {1025, 9},   {1537, 9},   {2049, 10}, {3073, 10},
    {4097, 11}, {6145, 11}, {8193, 12}, {12289, 12}, {16385, 13}, {24577, 13},
};
enum {
    LENGTH_STEPS = sizeof length_steps / sizeof length_steps[0],
    DISTANCE_STEPS = sizeof distance_steps / sizeof distance_steps[0],
    LENGTH_MIN = 3,
    LENGTH_MAX = 258,
    DISTANCE_MAX = 32768
};

static uint32_t step_of(const code_step *steps, uint32_t count, uint32_t value)
{
    uint32_t step = count - 1;
    while (steps[step].base > value)
        step--;
    return step;
}

static void put_match(bit_writer *writer, uint32_t length, uint32_t distance)
{
    const uint32_t l = step_of(length_steps, LENGTH_STEPS, length);
    put_symbol(writer, 257 + l);
    put_bits(writer, length - length_steps[l].base, length_steps[l].extra_bits);
    const uint32_t d = step_of(distance_steps, DISTANCE_STEPS, distance);
    put_code(writer, d, 5);
    put_bits(writer, distance - distance_steps[d].base, distance_steps[d].extra_bits);
}

static uint32_t match_length(const uint8_t *data, size_t size, size_t at, size_t distance)
{
    uint32_t length = 0;
    if (distance > at || distance > DISTANCE_MAX)
        return 0;
    while (length < LENGTH_MAX && at + length < size && data[at + length] == data[at + length - distance])
        length++;
    return length;
}

/* Enlarged pixels repeat the previous byte and the previous line: only these two distances are tried. */
static void deflate(bytes *out, const uint8_t *data, size_t size, size_t line)
{
    bit_writer writer = {.out = out};
    put_bits(&writer, 1, 1); /* the last block */
    put_bits(&writer, 1, 2); /* of fixed codes */
    for (size_t at = 0; at < size;) {
        const uint32_t before = match_length(data, size, at, 1), above = match_length(data, size, at, line);
        const uint32_t longest = before > above ? before : above;
        if (longest < LENGTH_MIN) {
            put_symbol(&writer, data[at++]);
            continue;
        }
        put_match(&writer, longest, before >= above ? 1 : (uint32_t)line);
        at += longest;
    }
    put_symbol(&writer, 256);
    put_bits(&writer, 0, 7); /* flushes the last byte */
}

/* ---- The file ----------------------------------------------------------------------------------------------- */

static void add_chunk(bytes *file, const char type[4], const bytes *content)
{
    bytes_add_u32(file, (uint32_t)content->size);
    const size_t begin = file->size;
    bytes_add(file, type, 4);
    bytes_add(file, content->data, content->size);
    file->failed |= content->failed;
    if (!file->failed)
        bytes_add_u32(file, png_crc32(file->data + begin, file->size - begin));
}

static void add_header(bytes *file, uint32_t width, uint32_t height)
{
    enum { BIT_DEPTH = 8, INDEXED = 3 };
    static const uint8_t rest[] = {BIT_DEPTH, INDEXED, 0, 0, 0};
    bytes header = {0};
    bytes_add_u32(&header, width);
    bytes_add_u32(&header, height);
    bytes_add(&header, rest, sizeof rest);
    add_chunk(file, "IHDR", &header);
    bytes_free(&header);
}

static void add_palette(bytes *file, const rgb palette[256])
{
    bytes colours = {0};
    for (int c = 0; c < 256; c++) {
        const uint8_t colour[3] = {palette[c].red, palette[c].green, palette[c].blue};
        bytes_add(&colours, colour, sizeof colour);
    }
    add_chunk(file, "PLTE", &colours);
    bytes_free(&colours);
}

/* Every line begins with its filter type: 0 is none. */
static void add_pixels(bytes *file, const uint8_t *pixels, uint32_t width, uint32_t height)
{
    bytes lines = {0}, content = {0};
    for (uint32_t y = 0; y < height; y++) {
        bytes_add_u8(&lines, 0);
        bytes_add(&lines, pixels + (size_t)y * width, width);
    }
    bytes_add_u8(&content, 0x78); /* zlib: deflate, a window of 32 KiB */
    bytes_add_u8(&content, 0x01);
    if (!lines.failed) {
        deflate(&content, lines.data, lines.size, (size_t)width + 1);
        bytes_add_u32(&content, png_adler32(lines.data, lines.size));
    }
    content.failed |= lines.failed;
    add_chunk(file, "IDAT", &content);
    bytes_free(&lines);
    bytes_free(&content);
}

void png_encode(bytes *file, const uint8_t *pixels, uint32_t width, uint32_t height, const rgb palette[256])
{
    static const uint8_t signature[] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
    const bytes nothing = {0};
    bytes_add(file, signature, sizeof signature);
    add_header(file, width, height);
    add_palette(file, palette);
    add_pixels(file, pixels, width, height);
    add_chunk(file, "IEND", &nothing);
}
