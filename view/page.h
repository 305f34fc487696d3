/* The page of every report: view/report.html, which draws a document of JSON. It needs no network. */
#ifndef STREAMKL_VIEW_PAGE_H
#define STREAMKL_VIEW_PAGE_H

#include <stdio.h>

/* Writes the page of a document. view/report.html says what documents consist of. */
void page_print(FILE *page, const char *json);

#endif
