/* Documents of JSON for the page of a report: view/report.html says what they consist of.
 *
 * Every function returns a new object, or NULL if memory has run out. NULL as an argument makes NULL of the result,
 * so that one check at the end is enough. */
#ifndef STREAMKL_CLI_DISTILL_DOCUMENT_H
#define STREAMKL_CLI_DISTILL_DOCUMENT_H

#include "cli/io/file_set.h"

#include <jansson.h>
#include <stdint.h>

json_t *document_numbers(const double *values, int64_t count);
json_t *document_matrix(const double *values, int64_t rows, int64_t columns);

/* A curve of a chart. `style` is a class of the page: teacher, before, after, loss or control. x may be NULL. */
json_t *document_series(const char *name, const char *style, const double *x, const double *y, int64_t count,
                        bool dots);

/* A chart of curves. The axis of y is logarithmic. */
json_t *document_lines(const char *title, const char *x_label, double x_max, json_t *series);

/* `header` ends with NULL. */
json_t *document_table(const char *title, const char *const *header, json_t *rows, json_t *note);

json_t *document_section(const char *title, const char *lead, json_t *blocks);

/* Writes the page and frees the document. Returns an exit code. */
int document_write(file_set *set, const char *path, json_t *document);

#endif
