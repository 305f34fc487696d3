#include "cli/common/cli.h"
#include "cli/term/printable.h"
#include "device/device.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cli_fail(int exit_code, const char *format, ...)
{
    char message[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    printable_make(message); /* whatever the names of files and tensors contain */
    fprintf(stderr, "%s: %s\n", program_invocation_name, message);
    return exit_code;
}

static int exit_code_of(skl_status status)
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
    return (size_t)status < count ? exit_codes[status] : CLI_NO_DEVICE;
}

int cli_fail_status(skl_status status)
{
    return cli_fail(exit_code_of(status), "%s", cli_status_text());
}

/* A successful call of the device layer clears its text, so a text means that the device layer failed. */
const char *cli_status_text(void)
{
    return device_error()[0] ? device_error() : skl_last_error();
}

json_t *cli_json_number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
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

/* Of Jansson, which accepts NULL for an array, an object and a value. */
static void keep_if(bool added, json_t **whole)
{
    if (added)
        return;
    json_decref(*whole);
    *whole = NULL;
}

void cli_json_append(json_t **array, json_t *value)
{
    keep_if(json_array_append_new(*array, value) == 0, array);
}

void cli_json_set(json_t **object, const char *key, json_t *value)
{
    keep_if(json_object_set_new(*object, key, value) == 0, object);
}

int cli_print_json(json_t *object)
{
    /* 9 digits distinguish any two f32 values. main() reports write errors when it closes stdout. */
    const bool printed =
        object && (json_dumpf(object, stdout, JSON_REAL_PRECISION(9)) == 0 || ferror(stdout)) && putchar('\n');
    json_decref(object);
    return printed ? CLI_OK : cli_fail(CLI_NO_MEMORY, "out of memory for the JSON output");
}

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
