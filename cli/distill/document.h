/* Parts of a report's document, as JSON: view/report.html says what it consists of. Functions return NULL if there is
 * no memory, and accept NULL in place of a part. */
#ifndef STREAMKL_CLI_DISTILL_DOCUMENT_H
#define STREAMKL_CLI_DISTILL_DOCUMENT_H

#include "cli/common/cli.h"

json_t *document_matrix(const double *values, int64_t rows, int64_t columns);

/* A curve of a chart. `style` is a class of the page: teacher, before, after or loss. */
json_t *document_series(const char *name, const char *style, const double *x, const double *y, int64_t count);

/* A chart of curves. The axis of y is logarithmic. */
json_t *document_lines(const char *title, const char *x_label, double x_max, json_t *series);

/* Shares, 0..1, of teacher and student before and after training: a bar of each for every group. The axis ends at the
 * next step above `top`. */
typedef struct document_shares {
    const double *teacher, *before, *after;
    double top;
} document_shares;
json_t *document_bars(const char *title, const char *x_label, json_t *groups, const document_shares *shares);

/* `header` ends with NULL. */
json_t *document_table(const char *title, const char *const *header, json_t *rows, json_t *note);
json_t *document_figure(json_t *value, const char *label, json_t *detail);
json_t *document_section(const char *title, const char *lead, json_t *blocks);

#endif
