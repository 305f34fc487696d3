#include "cli/term/term.h"
#include "device/clock.h"

#include <langinfo.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool is_capable_terminal(FILE *stream)
{
    const char *kind = getenv("TERM");
    return isatty(fileno(stream)) && kind && strcmp(kind, "dumb") != 0;
}

term_style term_style_for(FILE *stream)
{
    static const term_style plain = {"", "", "", "", "", ""};
    static const term_style coloured = {"\033[1m", "\033[2m", "\033[32m", "\033[31m", "\033[36m", "\033[0m"};
    const char *no_color = getenv("NO_COLOR"); /* https://no-color.org: any non-empty value */
    const bool refused = no_color && no_color[0];
    return is_capable_terminal(stream) && !refused ? coloured : plain;
}

bool term_has_blocks(FILE *stream)
{
    return is_capable_terminal(stream) && strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
}

/* ---- Progress ----------------------------------------------------------------------------------------------- */

void term_progress_begin(term_progress *progress, const char *label)
{
    progress->label = label;
    progress->began = clock_seconds();
    progress->drawn = 0;
}

void term_progress_update(void *user, int64_t done, int64_t total)
{
    enum { BAR_WIDTH = 30 };
    static const double redraw_seconds = 0.1;
    static const double patience_seconds = 0.3; /* shorter calls get no bar */
    static const char filled[] = "##############################", empty[] = "..............................";
    term_progress *progress = user;
    const double now = clock_seconds();
    const double elapsed = now - progress->began;
    if (total <= 0 || done <= 0 || elapsed < patience_seconds || now - progress->drawn < redraw_seconds)
        return;
    if (!is_capable_terminal(stderr))
        return;
    const double share = (double)done / (double)total;
    const int full = (int)(share * BAR_WIDTH);
    fprintf(stderr, "\r%-10s [%.*s%.*s] %3.0f %%  %.0f s left \033[K", progress->label, full, filled,
            BAR_WIDTH - full, empty, 100 * share, ceil(elapsed / share - elapsed));
    fflush(stderr);
    progress->drawn = now;
}

void term_progress_end(term_progress *progress)
{
    if (progress->drawn > 0)
        fputs("\r\033[K", stderr);
    progress->drawn = 0;
}

/* ---- Chart -------------------------------------------------------------------------------------------------- */

typedef struct chart_ramp {
    int steps;                 /* levels of a cell */
    const char *const *glyphs; /* glyphs[n]: n levels filled */
} chart_ramp;

static chart_ramp ramp_for(FILE *stream)
{
    static const char *const blocks[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
    static const char *const ascii[] = {" ", ".", ":", "#"};
    static const chart_ramp fine = {8, blocks}, coarse = {3, ascii};
    return term_has_blocks(stream) ? fine : coarse;
}

void term_chart(FILE *stream, const double *values, int count, int height)
{
    const chart_ramp ramp = ramp_for(stream);
    const term_style style = term_style_for(stream);
    double top = 0;
    for (int i = 0; i < count; i++)
        top = values[i] > top ? values[i] : top; /* false for NaN */
    if (!(top > 0) || !isfinite(top))
        top = 1;
    for (int line = height - 1; line >= 0; line--) {
        const double label = line == height - 1 ? top : 0;
        if (line == height - 1 || line == 0)
            fprintf(stream, "  %9.3g |", label);
        else
            fprintf(stream, "  %9s |", "");
        fputs(style.accent, stream);
        for (int i = 0; i < count; i++) {
            const double levels = values[i] / top * height * ramp.steps - (double)line * ramp.steps;
            const int filled = !(levels > 0) ? 0 : levels >= ramp.steps ? ramp.steps : (int)ceil(levels);
            fputs(ramp.glyphs[filled], stream);
        }
        fprintf(stream, "%s\n", style.plain);
    }
}
