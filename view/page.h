/* A self-contained HTML page: inline styles, no scripts, no network. */
#ifndef STREAMKL_VIEW_PAGE_H
#define STREAMKL_VIEW_PAGE_H

#include "view/picture.h"

void page_begin(bytes *page, const char *title);
void page_end(bytes *page);

/* A section with a heading and an introduction, in HTML. */
void page_section_begin(bytes *page, const char *heading, const char *lead);
void page_section_end(bytes *page);

/* A key figure: value, label and detail. */
void page_figure(bytes *page, const char *value, const char *label, const char *detail);

/* A map with its caption, scaled without interpolation. */
void page_map(bytes *page, palette_kind kind, const double *values, int64_t rows, int64_t columns, double top,
              const char *caption);

#endif
