#include "view/svg.h"

static const char *const anchors[] = {[SVG_START] = "start", [SVG_MIDDLE] = "middle", [SVG_END] = "end"};

void svg_begin_file(bytes *svg, int width, int height, const char *title, const char *style)
{
    bytes_print(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n",
        width, height, width, height);
    bytes_print(svg, "<title>");
    bytes_add_escaped(svg, title);
    bytes_print(svg, "</title>\n<style>\n%s</style>\n", style);
}

void svg_end(bytes *svg)
{
    bytes_print(svg, "</svg>\n");
}

void svg_text(bytes *svg, const char *css_class, svg_anchor anchor, double x, double y, const char *text)
{
    bytes_print(svg, "<text class=\"%s\" text-anchor=\"%s\" x=\"%.1f\" y=\"%.1f\">", css_class, anchors[anchor], x,
                y);
    bytes_add_escaped(svg, text);
    bytes_print(svg, "</text>\n");
}

void svg_text_pair(bytes *svg, const char *css_class, double x, double y, const char *text, const char *second_class,
                   const char *second)
{
    bytes_print(svg, "<text class=\"%s\" x=\"%.1f\" y=\"%.1f\">", css_class, x, y);
    bytes_add_escaped(svg, text);
    bytes_print(svg, "<tspan class=\"%s\" dx=\"6\">", second_class);
    bytes_add_escaped(svg, second);
    bytes_print(svg, "</tspan></text>\n");
}

void svg_line(bytes *svg, const char *css_class, double x1, double y1, double x2, double y2)
{
    bytes_print(svg, "<line class=\"%s\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>\n", css_class, x1, x2, y1,
                y2);
}

void svg_circle(bytes *svg, const char *css_class, double x, double y, double radius)
{
    bytes_print(svg, "<circle class=\"%s\" cx=\"%.1f\" cy=\"%.1f\" r=\"%.1f\"/>\n", css_class, x, y, radius);
}

void svg_rect(bytes *svg, const char *css_class, double x, double y, double width, double height)
{
    bytes_print(svg, "<rect class=\"%s\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"/>\n", css_class, x, y,
                width, height);
}

void svg_path_begin(bytes *svg, const char *css_class)
{
    bytes_print(svg, "<path class=\"%s\" d=\"", css_class);
}

void svg_path_point(bytes *svg, bool first, double x, double y)
{
    bytes_print(svg, "%c%.1f %.1f", first ? 'M' : 'L', x, y);
}

void svg_path_end(bytes *svg)
{
    bytes_print(svg, "\"/>\n");
}
