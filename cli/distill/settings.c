#include "cli/common/cli.h"
#include "cli/distill/distill.h"
#include "cli/common/options.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>

const setting_name distill_counts[] = {
    {"context", offsetof(distill_settings, context)},
    {"needles", offsetof(distill_settings, needles)},
    {"hidden", offsetof(distill_settings, hidden)},
    {"heads-t", offsetof(distill_settings, heads_t)},
    {"dim-t", offsetof(distill_settings, dim_t)},
    {"heads-s", offsetof(distill_settings, heads_s)},
    {"dim-s", offsetof(distill_settings, dim_s)},
    {"steps", offsetof(distill_settings, steps)},
    {"batch", offsetof(distill_settings, batch)},
    {"held-out", offsetof(distill_settings, held_out)},
    {"seed", offsetof(distill_settings, seed)},
    {"control-queries", offsetof(distill_settings, control_queries)},
};
const size_t distill_counts_size = sizeof distill_counts / sizeof distill_counts[0];

static int64_t count_at(const distill_settings *settings, size_t offset)
{
    return *(const int64_t *)((const char *)settings + offset);
}

static json_t *path_or_null(const char *path)
{
    return path ? cli_json_path(path) : json_null();
}

static const char teacher_content[] = "teacher-content", student_content[] = "student-content";

static json_t *hash_json(uint64_t hash)
{
    char text[32];
    snprintf(text, sizeof text, "%016" PRIx64, hash);
    return json_string(text);
}

/* NULL: out of memory. */
static json_t *settings_json(const distill_settings *settings)
{
    json_t *object = json_object();
    for (size_t c = 0; c < distill_counts_size; c++)
        cli_json_set(&object, distill_counts[c].name,
                     json_integer((json_int_t)count_at(settings, distill_counts[c].offset)));
    cli_json_set(&object, "rate", json_real((double)settings->rate));
    cli_json_set(&object, "direction", json_string(direction_name(settings->direction)));
    cli_json_set(&object, "teacher", path_or_null(settings->teacher_path));
    cli_json_set(&object, "student", path_or_null(settings->student_path));
    if (settings->teacher_path) {
        cli_json_set(&object, teacher_content, hash_json(settings->teacher_hash));
        cli_json_set(&object, student_content, hash_json(settings->student_hash));
    }
    return object;
}

static int fail_content(const char *option, const char *file, const char *path)
{
    return cli_fail(CLI_BAD_INPUT, "--%s=%s: its contents have changed since %s was made; must be equal to resume",
                    option, file, path);
}

/* Without json_dumps(), which leaves out keys when it runs out of memory. */
static char *text_of(const json_t *object)
{
    const size_t size = json_dumpb(object, NULL, 0, JSON_COMPACT);
    char *const text = size ? calloc(size + 1, 1) : NULL;
    if (text == NULL || json_dumpb(object, text, size, JSON_COMPACT) == size)
        return text;
    free(text);
    return NULL;
}

char *distill_settings_text(const distill_settings *settings)
{
    json_t *const object = settings_json(settings);
    char *const text = object ? text_of(object) : NULL;
    json_decref(object);
    return text;
}

static int compare(const distill_settings *settings, json_t *now, const json_t *saved, const char *path)
{
    const char *name;
    json_t *value;
    json_object_foreach(now, name, value)
    {
        json_t *const before = json_object_get(saved, name);
        if (json_equal(value, before))
            continue;
        if (strcmp(name, teacher_content) == 0)
            return fail_content("teacher", settings->teacher_path, path);
        if (strcmp(name, student_content) == 0)
            return fail_content("student", settings->student_path, path);
        char *const is = json_dumps(value, JSON_ENCODE_ANY);
        char *const was = before ? json_dumps(before, JSON_ENCODE_ANY) : NULL;
        cli_fail(CLI_BAD_INPUT, "--%s=%s: %s was made with %s; settings must be equal to resume", name, is ? is : "?",
                 path, was ? was : "none");
        free(is);
        free(was);
        return CLI_BAD_INPUT;
    }
    return CLI_OK;
}

int distill_settings_compare(const distill_settings *settings, const char *text, const char *path)
{
    errno = 0;
    json_t *const now = settings_json(settings), *const saved = json_loads(text, 0, NULL);
    const bool no_memory = now == NULL || (saved == NULL && errno == ENOMEM);
    const int exit_code = no_memory ? cli_fail(CLI_NO_MEMORY, "%s: out of memory for its settings", path)
                                    : compare(settings, now, saved, path);
    json_decref(saved);
    json_decref(now);
    return exit_code;
}

distill_path distill_path_of(const distill_request *request, const char *name)
{
    distill_path path;
    snprintf(path.text, sizeof path.text, "%s/%s", request->folder, name);
    return path;
}
