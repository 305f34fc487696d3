#include "cli/term/term.h"
#include "device/device.h"

#include <inttypes.h>
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
    static const term_style colored = {"\033[1m", "\033[2m", "\033[32m", "\033[31m", "\033[36m", "\033[0m"};
    const char *no_color = getenv("NO_COLOR"); /* https://no-color.org: any non-empty value */
    const bool refused = no_color && no_color[0];
    return is_capable_terminal(stream) && !refused ? colored : plain;
}

bool term_has_blocks(FILE *stream)
{
    return is_capable_terminal(stream) && strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
}

/* ---- Progress ----------------------------------------------------------------------------------------------- */

static struct {
    const char *label;
    double began, drawn; /* clock_seconds(); drawn is 0 if no line is on the screen */
} progress;

void term_progress_begin(const char *label)
{
    progress.label = label;
    progress.began = clock_seconds();
    progress.drawn = 0;
}

void term_progress_update(void *unused, int64_t done, int64_t total)
{
    enum { BAR_WIDTH = 30 };
    static const double redraw_seconds = 0.1;
    static const double patience_seconds = 0.3; /* shorter calls get no bar */
    static const char filled[] = "##############################", empty[] = "..............................";
    (void)unused;
    const double now = clock_seconds();
    const double elapsed = now - progress.began;
    if (total <= 0 || done <= 0 || elapsed < patience_seconds || now - progress.drawn < redraw_seconds)
        return;
    if (!is_capable_terminal(stderr))
        return;
    const double share = (double)done / (double)total;
    const int full = (int)(share * BAR_WIDTH);
    fprintf(stderr, "\r%-10s [%.*s%.*s] %3.0f %%  %.0f s left \033[K", progress.label, full, filled, BAR_WIDTH - full,
            empty, 100 * share, ceil(elapsed / share - elapsed));
    fflush(stderr);
    progress.drawn = now;
}

void term_progress_end(void)
{
    if (progress.drawn > 0)
        fputs("\r\033[K", stderr);
    progress.drawn = 0;
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

/* Mean over positions [begin, end) of all sequences; NaN if no row attends to a key. */
static double mean_between(const float *kl, const float *lse_s, int64_t sequence_count, int64_t length, int64_t begin,
                           int64_t end)
{
    double sum = 0;
    int64_t rows = 0;
    for (int64_t sequence = 0; sequence < sequence_count; sequence++) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t row = sequence * length + i;
            if (!row_attends(lse_s[row], kl[row]))
                continue;
            sum += (double)kl[row];
            rows++;
        }
    }
    return rows ? sum / (double)rows : NAN;
}

void term_position_chart(FILE *stream, const float *kl, const float *lse_s, int64_t sequence_count, int64_t length)
{
    enum { WIDTH = 64, HEIGHT = 6 };
    double columns[WIDTH];
    const int count = length < WIDTH ? (int)length : WIDTH;
    for (int c = 0; c < count; c++)
        columns[c] = mean_between(kl, lse_s, sequence_count, length, length * c / count, length * (c + 1) / count);
    term_chart(stream, columns, count, HEIGHT);
    fprintf(stream, "  %9s  0%*" PRId64 "\n", "query", count - 1, length - 1);
}

/* ---- Printable text ----------------------------------------------------------------------------------------- */

typedef struct code_range {
    uint32_t first, last;
} code_range;

static const code_range refused[] = {
    {0x0000, 0x001f}, /* C0 */
    {0x007f, 0x009f}, /* DEL and C1 */
    {0x061c, 0x061c}, /* Arabic letter mark */
    {0x200e, 0x200f}, /* left-to-right and right-to-left marks */
    {0x2028, 0x202e}, /* line and paragraph separators, bidirectional embeddings and overrides */
    {0x2066, 0x2069}, /* bidirectional isolates */
};

static bool is_refused(uint32_t code)
{
    for (size_t r = 0; r < sizeof refused / sizeof refused[0]; r++)
        if (code >= refused[r].first && code <= refused[r].last)
            return true;
    return false;
}

/* Bytes of the UTF-8 character at `text`, and its code. A byte that begins no character stands for itself, as in
 * terminals that are not set to UTF-8: then 0x80 to 0x9f are C1. */
static int decode(const unsigned char *text, uint32_t *code)
{
    const unsigned char first = text[0];
    const int size = first >= 0xf0 && first < 0xf8 ? 4 : first >= 0xe0 ? 3 : first >= 0xc0 ? 2 : 1;
    *code = first;
    if (size == 1 || first >= 0xf8)
        return 1;
    uint32_t whole = first & (0xffU >> (size + 1));
    for (int i = 1; i < size; i++) {
        if ((text[i] & 0xc0) != 0x80) /* also at the end of the text */
            return 1;
        whole = whole << 6 | (text[i] & 0x3fU);
    }
    *code = whole; /* an overlong encoding counts as what it encodes */
    return size;
}

void printable_make(char *text)
{
    unsigned char *at = (unsigned char *)text;
    while (*at) {
        uint32_t code;
        const int size = decode(at, &code);
        for (int i = 0; i < size && is_refused(code); i++)
            at[i] = '?';
        at += size;
    }
}

printable printable_of(const char *text)
{
    printable out;
    snprintf(out.text, sizeof out.text, "%s", text);
    printable_make(out.text);
    return out;
}
