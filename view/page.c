#include "view/page.h"

static const char style[] =
    ":root{color-scheme:light dark;--page:#fbfaf7;--card:#fff;--ink:#1d2129;--soft:#5d6572;--line:#e4e1d9;"
    "--teacher:#7a8190;--before:#c2570c;--after:#1f5fbf;--loss:#9db7dd;--control:#2f8f6b}"
    "@media(prefers-color-scheme:dark){:root{--page:#12141a;--card:#1a1d25;--ink:#e8e9ed;--soft:#9aa1ae;--line:#"
    "2c303b;"
    "--teacher:#a3aab8;--before:#f59e4b;--after:#6ea8ff;--loss:#3f5f92;--control:#5cc79b}}"
    "*{box-sizing:border-box}html{-webkit-text-size-adjust:100%}"
    "body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,"
    "'Noto Sans',sans-serif}"
    "main{max-width:1120px;margin:0 auto;padding:40px 20px 64px}"
    "h1{font-size:clamp(1.6rem,4.5vw,2.4rem);line-height:1.15;letter-spacing:-.02em;margin:0 0 .4em;font-weight:680}"
    "h2{font-size:1.25rem;letter-spacing:-.01em;margin:0 0 .25em;font-weight:640}"
    "h3{font-size:1rem;margin:1.6em 0 .5em;font-weight:620}.card h3{margin-top:0}"
    "p{margin:0 0 1em;max-width:68ch}.lead{color:var(--soft)}"
    "section{margin-top:44px}"
    ".figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:14px;margin-top:28px}"
    ".figure,.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:16px "
    "18px;min-width:0}"
    ".figure b{display:block;font-size:1.7rem;line-height:1.2;letter-spacing:-.02em;font-weight:660;"
    "font-variant-numeric:tabular-nums}"
    ".figure span{display:block}.figure small{color:var(--soft);font-size:.85rem}"
    ".pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:14px}"
    ".chart{display:block;width:100%;height:auto}.chart text{font-size:12px;fill:var(--ink)}"
    ".chart .axis{fill:var(--soft);font-size:11px}.chart .grid{stroke:var(--line);stroke-width:1}"
    ".chart .line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}"
    ".line.teacher{stroke:var(--teacher)}.line.before{stroke:var(--before)}.line.after{stroke:var(--after)}"
    ".chart .line.loss{stroke:var(--loss);stroke-width:1.3}"
    ".fill.teacher{fill:var(--teacher)}.fill.before{fill:var(--before)}.fill.after{fill:var(--after)}"
    ".fill.loss{fill:var(--loss)}.fill.control{fill:var(--control)}"
    ".maps{display:grid;grid-template-columns:1fr 1fr;gap:14px}.maps figure:first-child{grid-column:1/-1}"
    "@media(min-width:820px){.maps{grid-template-columns:repeat(5,1fr)}.maps figure:first-child{grid-column:auto}}"
    "figure{margin:0;min-width:0}figure img{display:block;width:100%;aspect-ratio:1;image-rendering:pixelated;"
    "border-radius:8px;border:1px solid var(--line)}"
    "figcaption{font-size:.85rem;color:var(--soft);margin-top:6px}"
    ".scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-"
    "nums}"
    "th,td{text-align:right;padding:6px 10px;border-bottom:1px solid var(--line);white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left;padding-left:0}th{color:var(--soft);font-weight:560}"
    "@media(max-width:480px){th,td{padding:6px 5px}table{font-size:.85rem}}"
    ".plain td{white-space:normal;overflow-wrap:anywhere}"
    "pre{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px "
    "16px;white-space:pre-wrap;"
    "overflow-wrap:anywhere;font:13.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
    "footer{margin-top:52px;color:var(--soft);font-size:.85rem}";

void page_begin(bytes *page, const char *title)
{
    bytes_print(page, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
                      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">"
                      "<link rel=\"icon\" href=\"data:,\"><title>");
    bytes_add_escaped(page, title);
    bytes_print(page, "</title><style>%s</style></head><body><main>\n", style);
}

void page_end(bytes *page)
{
    bytes_print(page, "</main></body></html>\n");
}

void page_section_begin(bytes *page, const char *heading, const char *lead)
{
    bytes_print(page, "<section><h2>%s</h2><p class=\"lead\">%s</p>\n", heading, lead);
}

void page_section_end(bytes *page)
{
    bytes_print(page, "</section>\n");
}

void page_figure(bytes *page, const char *value, const char *label, const char *detail)
{
    bytes_print(page, "<div class=\"figure\"><b>%s</b><span>%s</span><small>%s</small></div>\n", value, label,
                detail);
}

void page_map(bytes *page, palette_kind kind, const double *values, int64_t rows, int64_t columns, double top,
              const char *caption)
{
    bytes png = {0};
    picture_png(&png, kind, values, rows, columns, top, 1);
    page->failed |= png.failed;
    bytes_print(page, "<figure><img alt=\"%s\" src=\"data:image/png;base64,", caption);
    if (!png.failed)
        bytes_add_base64(page, png.data, png.size);
    bytes_print(page, "\"><figcaption>%s</figcaption></figure>\n", caption);
    bytes_free(&png);
}
