#include "cli/common/cli.h"
#include "cli/term/term.h"
#include "device/device.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Errors ------------------------------------------------------------------------------------------------- */

static void print_line(const char *format, va_list arguments)
{
    char message[2048];
    vsnprintf(message, sizeof message, format, arguments);
    printable_make(message); /* whatever the names of files and tensors contain */
    term_progress_end();
    fprintf(stderr, "%s: %s\n", program_invocation_name, message);
}

void cli_fail(int exit_code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    print_line(format, arguments);
    va_end(arguments);
    exit(exit_code);
}

void cli_warn(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    print_line(format, arguments);
    va_end(arguments);
}

void cli_check(skl_status status)
{
    static const int exit_codes[] = {
        [SKL_OK] = CLI_OK,
        [SKL_ERROR_ARGUMENT] = CLI_BAD_INPUT,
        [SKL_ERROR_UNSUPPORTED] = CLI_NO_DEVICE,
        [SKL_ERROR_MEMORY] = CLI_NO_MEMORY,
        [SKL_ERROR_WORKSPACE] = CLI_NO_MEMORY,
        [SKL_ERROR_DEVICE] = CLI_NO_DEVICE,
    };
    const size_t count = sizeof exit_codes / sizeof exit_codes[0];
    /* A successful call of the device layer clears its text, so a text means that the device layer failed. */
    if (status != SKL_OK)
        cli_fail((size_t)status < count ? exit_codes[status] : CLI_NO_DEVICE, "%s",
                 device_error()[0] ? device_error() : skl_last_error());
}

void *cli_allocate(size_t size, const char *what)
{
    void *const memory = malloc(size ? size : 1);
    if (memory == NULL)
        cli_fail(CLI_NO_MEMORY, "out of memory: %s needs %zu bytes", what, size);
    return memory;
}

void *cli_allocate_zeros(size_t count, size_t size, const char *what)
{
    void *const memory = calloc(count ? count : 1, size);
    if (memory == NULL)
        cli_fail(CLI_NO_MEMORY, "out of memory: %s needs %zu times %zu bytes", what, count, size);
    return memory;
}

/* ---- JSON --------------------------------------------------------------------------------------------------- */

static void check_json(bool complete)
{
    if (!complete)
        cli_fail(CLI_NO_MEMORY, "out of memory for JSON");
}

json_t *cli_json_number(double value)
{
    if (isfinite(value))
        return json_real(value);
    return json_string(isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity");
}

json_t *cli_json_array(const void *values, size_t size, int rank, const int64_t *shape)
{
    int64_t stride = (int64_t)size;
    for (int d = 1; d < rank; d++)
        stride *= shape[d];
    json_t *const array = json_array();
    for (int64_t i = 0; i < shape[0]; i++) {
        const void *const at = (const char *)values + i * stride;
        if (rank > 1)
            cli_json_append(array, cli_json_array(at, size, rank - 1, shape + 1));
        else
            cli_json_append(
                array, cli_json_number(size == sizeof(float) ? (double)*(const float *)at : *(const double *)at));
    }
    return array;
}

json_t *cli_json_path(const char *path)
{
    errno = 0;
    json_t *text = json_string(path);
    if (text || errno == ENOMEM)
        return text;
    char *const ascii = strdup(path);
    for (char *letter = ascii; ascii && *letter; letter++)
        *letter = (unsigned char)*letter < 0x80 ? *letter : '?';
    text = ascii ? json_string(ascii) : NULL;
    free(ascii);
    return text;
}

void cli_json_append(json_t *array, json_t *value)
{
    check_json(json_array_append_new(array, value) == 0);
}

void cli_json_set(json_t *object, const char *key, json_t *value)
{
    check_json(json_object_set_new(object, key, value) == 0);
}

void cli_print_json(json_t *object)
{
    /* 9 digits distinguish any two f32 values. main() reports write errors when it closes stdout. */
    check_json(object && (json_dumpf(object, stdout, JSON_REAL_PRECISION(9)) == 0 || ferror(stdout)));
    putchar('\n');
    json_decref(object);
}

/* ---- Text --------------------------------------------------------------------------------------------------- */

cli_text cli_bytes_text(double bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    const size_t unit_count = sizeof units / sizeof units[0];
    size_t unit = 0;
    for (; bytes >= 1024 && unit + 1 < unit_count; unit++)
        bytes /= 1024;
    const int decimals = unit == 0 || bytes >= 100 ? 0 : bytes >= 10 ? 1 : 2;
    cli_text out;
    snprintf(out.text, sizeof out.text, "%.*f %s", decimals, bytes, units[unit]);
    return out;
}

cli_text cli_seconds_text(double seconds)
{
    cli_text out;
    if (seconds < 1e-3)
        snprintf(out.text, sizeof out.text, "%.0f us", 1e6 * seconds);
    else if (seconds < 1)
        snprintf(out.text, sizeof out.text, "%.1f ms", 1e3 * seconds);
    else
        snprintf(out.text, sizeof out.text, "%.2f s", seconds);
    return out;
}

const char *cli_plural(int64_t count)
{
    return count == 1 ? "" : "s";
}
