#include "cli/common/explain.h"
#include "cli/term/term.h"

#include <string.h>

const char *explain_op_name(skl_op op)
{
    static const char *const names[] = {
        [SKL_OP_FORWARD] = "forward",
        [SKL_OP_BACKWARD] = "backward",
        [SKL_OP_FORWARD_BACKWARD] = "one pass",
        [SKL_OP_PARTIAL] = "partial",
    };
    return names[op];
}

void explain_print(FILE *stream, skl_op op, const char *text)
{
    const term_style style = term_style_for(stream);
    fprintf(stream, "  %s%s%s\n", style.bold, explain_op_name(op), style.plain);
    while (*text) {
        const int length = (int)strcspn(text, "\n");
        fprintf(stream, "    %.*s\n", length, text);
        text += length + (text[length] == '\n');
    }
}

bool explain_add_json(json_t *object, skl_op op, const char *text)
{
    json_t *const lines = json_array();
    bool complete = lines != NULL;
    while (*text && complete) {
        const size_t length = strcspn(text, "\n");
        complete = json_array_append_new(lines, json_stringn(text, length)) == 0;
        text += length + (text[length] == '\n');
    }
    return json_object_set_new(object, explain_op_name(op), lines) == 0 && complete;
}
