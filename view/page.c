#include "view/page.h"

#include <assert.h>
#include <string.h>

extern const char report_html[]; /* view/report.html, as a string */

void page_print(bytes *page, const char *json)
{
    static const char marker[] = "@DOCUMENT@";
    const char *const at = strstr(report_html, marker);
    assert(at);
    bytes_add(page, report_html, (size_t)(at - report_html));
    /* Without '<', which JSON has in strings only, no text can end the script that contains it. */
    for (const char *open; (open = strchr(json, '<')); json = open + 1) {
        bytes_add(page, json, (size_t)(open - json));
        bytes_print(page, "\\u003c");
    }
    bytes_add(page, json, strlen(json));
    const char *const rest = at + strlen(marker);
    bytes_add(page, rest, strlen(rest));
}
