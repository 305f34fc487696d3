#include "cli/distill/document.h"

static json_t *numbers_of(const double *values, int64_t count)
{
    json_t *const numbers = json_array();
    for (int64_t i = 0; i < count; i++)
        cli_json_append(numbers, cli_json_number(values[i]));
    return numbers;
}

json_t *document_matrix(const double *values, int64_t rows, int64_t columns)
{
    json_t *const matrix = json_array();
    for (int64_t row = 0; row < rows; row++)
        cli_json_append(matrix, numbers_of(values + row * columns, columns));
    return matrix;
}

json_t *document_series(const char *name, const char *style, const double *x, const double *y, int64_t count)
{
    return json_pack("{ss ss so so}", "name", name, "style", style, "x", numbers_of(x, count), "y",
                     numbers_of(y, count));
}

json_t *document_lines(const char *title, const char *x_label, double x_max, json_t *series)
{
    return json_pack("{ss ss ss sf sb so}", "kind", "lines", "title", title, "x_label", x_label, "x_max", x_max,
                     "log_y", 1, "series", series);
}

json_t *document_bars(const char *title, const char *x_label, json_t *groups, const document_shares *shares)
{
    const char *const names[] = {"teacher", "before", "after"};
    const double *const values[] = {shares->teacher, shares->before, shares->after};
    json_t *const series = json_array();
    for (int s = 0; s < 3; s++)
        cli_json_append(series, json_pack("{ss ss so}", "name", names[s], "style", names[s], "y",
                                          numbers_of(values[s], (int64_t)json_array_size(groups))));
    return json_pack("{ss ss ss sf so so}", "kind", "bars", "title", title, "x_label", x_label, "top", shares->top,
                     "groups", groups, "series", series);
}

json_t *document_table(const char *title, const char *const *header, json_t *rows, json_t *note)
{
    json_t *const names = json_array();
    for (; *header; header++)
        cli_json_append(names, json_string(*header));
    return json_pack("{ss ss so so so}", "kind", "table", "title", title, "header", names, "rows", rows, "note",
                     note);
}

json_t *document_figure(json_t *value, const char *label, json_t *detail)
{
    return json_pack("{so ss so}", "value", value, "label", label, "detail", detail);
}

json_t *document_section(const char *title, const char *lead, json_t *blocks)
{
    return json_pack("{ss ss so}", "title", title, "lead", lead, "blocks", blocks);
}
