/* The SVG writer of all charts: the few elements that they consist of. Lengths are in units of the picture's own
 * grid; CSS classes carry colours and fonts. Texts are escaped. */
#ifndef STREAMKL_VIEW_SVG_H
#define STREAMKL_VIEW_SVG_H

#include "view/bytes.h"

/* A standalone file with its style sheet. */
void svg_begin_file(bytes *svg, int width, int height, const char *title, const char *style);
void svg_end(bytes *svg);

typedef enum svg_anchor { SVG_START, SVG_MIDDLE, SVG_END } svg_anchor;
void svg_text(bytes *svg, const char *css_class, svg_anchor anchor, double x, double y, const char *text);

/* A text that starts at x, and a second one after it. */
void svg_text_pair(bytes *svg, const char *css_class, double x, double y, const char *text, const char *second_class,
                   const char *second);

void svg_line(bytes *svg, const char *css_class, double x1, double y1, double x2, double y2);
void svg_circle(bytes *svg, const char *css_class, double x, double y, double radius);

void svg_rect(bytes *svg, const char *css_class, double x, double y, double width, double height);

/* A line through any number of points. */
void svg_path_begin(bytes *svg, const char *css_class);
void svg_path_point(bytes *svg, bool first, double x, double y);
void svg_path_end(bytes *svg);

#endif
