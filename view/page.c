#include "view/view.h"

#include <assert.h>
#include <string.h>

extern const char report_html[]; /* view/report.html, as a string */

void page_print(FILE *page, const char *json)
{
    static const char marker[] = "@DOCUMENT@";
    const char *const at = strstr(report_html, marker);
    assert(at);
    fwrite(report_html, 1, (size_t)(at - report_html), page);
    for (; *json; json++) /* without '<', which JSON has in strings only, no text can end the script around it */
        fputs(*json == '<' ? "\\u003c" : (const char[]){*json, '\0'}, page);
    fputs(at + strlen(marker), page);
}
