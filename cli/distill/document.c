#include "cli/distill/document.h"
#include "cli/common/cli.h"
#include "cli/io/file_write.h"
#include "view/page.h"

#include <stdlib.h>

json_t *document_numbers(const double *values, int64_t count)
{
    json_t *numbers = json_array();
    for (int64_t i = 0; i < count; i++)
        cli_json_append(&numbers, cli_json_number(values[i]));
    return numbers;
}

json_t *document_matrix(const double *values, int64_t rows, int64_t columns)
{
    json_t *matrix = json_array();
    for (int64_t row = 0; row < rows; row++)
        cli_json_append(&matrix, document_numbers(values + row * columns, columns));
    return matrix;
}

json_t *document_series(const char *name, const char *style, const double *x, const double *y, int64_t count,
                        bool dots)
{
    return json_pack("{ss ss so so sb}", "name", name, "style", style, "x", document_numbers(x, x ? count : 0), "y",
                     document_numbers(y, count), "dots", (int)dots);
}

json_t *document_lines(const char *title, const char *x_label, double x_max, json_t *series)
{
    return json_pack("{ss ss ss sf sb so}", "kind", "lines", "title", title, "x_label", x_label, "x_max", x_max,
                     "log_y", 1, "series", series);
}

json_t *document_table(const char *title, const char *const *header, json_t *rows, json_t *note)
{
    json_t *names = json_array();
    for (; *header; header++)
        cli_json_append(&names, json_string(*header));
    return json_pack("{ss ss so so so}", "kind", "table", "title", title, "header", names, "rows", rows, "note",
                     note);
}

json_t *document_section(const char *title, const char *lead, json_t *blocks)
{
    return json_pack("{ss ss so}", "title", title, "lead", lead, "blocks", blocks);
}

int document_write(file_set *set, const char *path, json_t *document)
{
    enum { DIGITS = 5 }; /* a report is looked at */
    char *const json = document ? json_dumps(document, JSON_COMPACT | JSON_REAL_PRECISION(DIGITS)) : NULL;
    json_decref(document);
    if (json == NULL)
        return cli_fail(CLI_NO_MEMORY, "out of memory for the report");
    bytes page = {0};
    page_print(&page, json);
    free(json);
    const int exit_code = file_write_into(set, path, &page);
    bytes_free(&page);
    return exit_code;
}
