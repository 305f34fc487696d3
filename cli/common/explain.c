#include "cli/common/explain.h"
#include "cli/common/cli.h"
#include "cli/term/term.h"

#include <string.h>

static const char *const op_names[] = {
    [SKL_OP_FORWARD] = "forward",
    [SKL_OP_BACKWARD] = "backward",
    [SKL_OP_FORWARD_BACKWARD] = "one pass",
    [SKL_OP_PARTIAL] = "partial",
};

void explain_print(FILE *stream, skl_op op, const char *text)
{
    const term_style style = term_style_for(stream);
    fprintf(stream, "  %s%s%s\n", style.bold, op_names[op], style.plain);
    while (*text) {
        const int length = (int)strcspn(text, "\n");
        fprintf(stream, "    %.*s\n", length, text);
        text += length + (text[length] == '\n');
    }
}

void explain_add_json(json_t *object, skl_op op, const char *text)
{
    json_t *const lines = json_array();
    while (*text) {
        const size_t length = strcspn(text, "\n");
        cli_json_append(lines, json_stringn(text, length));
        text += length + (text[length] == '\n');
    }
    cli_json_set(object, op_names[op], lines);
}
