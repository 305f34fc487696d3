/* A page of HTML that needs nothing but itself: styles inside, no scripts, no network. */
#ifndef STREAMKL_VIEW_PAGE_H
#define STREAMKL_VIEW_PAGE_H

#include "view/picture.h"

void page_begin(bytes *page, const char *title);
void page_end(bytes *page);

/* A section of the page; `lead` says in a sentence what it shows, as HTML. */
void page_section_begin(bytes *page, const char *heading, const char *lead);
void page_section_end(bytes *page);

/* A big number with what it is. */
void page_figure(bytes *page, const char *value, const char *label, const char *detail);

/* A map with its caption; pixels stay sharp when the page enlarges it. */
void page_map(bytes *page, palette_kind kind, const double *values, int64_t rows, int64_t columns, double top,
              const char *caption);

#endif
