/* SPDX-License-Identifier: Apache-2.0 */
/* A benchmark's times against tokens as SVG, a panel for each suite, both axes logarithmic. The background is left to
 * the page: every colour can be read on white and on black. */
#include "bench.h"

#include <math.h>

enum { WIDTH = 530, HEIGHT = 430, LEFT = 66, RIGHT = 390, TOP = 118, BOTTOM = 376, LINE = 16 };

/* What has a line: ours, floor and gemms. */
enum { LINES = BENCH_GEMMS + 1 };

static const char text_colour[] = "#7b8088";
static const char *const colours[LINES] = {"#e8590c", "#868e96", "#3b82f6"};
static const char *const strokes[LINES] = {"stroke-width=\"2.5\"", "stroke-width=\"1.5\" stroke-dasharray=\"4 3\"",
                                           "stroke-width=\"1.5\""};

/* ---- Axes ------------------------------------------------------------------------------------------------------- */

/* Values from low to high, drawn from one pixel to another. */
struct axis {
    double low, high, first, last;
};

static double position(const struct axis *axis, double value) {
    return axis->first + log(value / axis->low) / log(axis->high / axis->low) * (axis->last - axis->first);
}

/* The nth of the numbers 1, 2, 5, 10, 20, ... */
static double tick(int n) {
    static const double steps[] = {1, 2, 5};
    const int decade = n >= 0 ? n / 3 : (n - 2) / 3;
    return steps[n - 3 * decade] * pow(10, decade);
}

/* The first tick that is not less than value. */
static int tick_from(double value) {
    int n = 3 * (int)floor(log10(value));
    while (tick(n) < value * (1 - 1e-9))
        n++;
    return n;
}

/* An axis that has room for the values; it is longer where fewer than three ticks would be on it. */
static struct axis axis_of(double least, double greatest, double first, double last) {
    struct axis axis = {least / 1.15, greatest * 1.15, first, last};
    if (tick(tick_from(axis.low) + 2) > axis.high) {
        axis.low = tick(tick_from(axis.low) - 1);
        axis.high = tick(tick_from(axis.high));
    }
    return axis;
}

/* The ticks of an axis, or only the powers of ten where there would be more than most. Calls draw for each. */
static void draw_ticks(FILE *file, const struct axis *axis, int most,
                       void (*draw)(FILE *file, double value, double at)) {
    const int first = tick_from(axis->low);
    int count = 0;
    while (tick(first + count) <= axis->high)
        count++;
    for (int n = first; n < first + count; n++)
        if (count <= most || n % 3 == 0)
            draw(file, tick(n), position(axis, tick(n)));
}

static void draw_tokens_tick(FILE *file, double tokens, double x) {
    const double scale = tokens < 1e3 ? 1 : tokens < 1e6 ? 1e3 : 1e6;
    fprintf(file, "<path class=\"grid\" d=\"M%.1f %dV%d\"/>\n", x, TOP, BOTTOM);
    fprintf(file, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%g%s</text>\n", x, BOTTOM + LINE, tokens / scale,
            scale == 1     ? ""
            : scale == 1e3 ? "k"
                           : "M");
}

static void draw_time_tick(FILE *file, double us, double y) {
    fprintf(file, "<path class=\"grid\" d=\"M%d %.1fH%d\"/>\n", LEFT, y, RIGHT);
    fprintf(file, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%g %s</text>\n", LEFT - 6, y + 4,
            us < 1e3   ? us
            : us < 1e6 ? us / 1e3
                       : us / 1e6,
            us < 1e3   ? "&#181;s"
            : us < 1e6 ? "ms"
                       : "s");
}

/* ---- Lines ------------------------------------------------------------------------------------------------------ */

/* A line through the times of the suite; returns the height of the last one, or NaN. */
static double draw_line(FILE *file, const struct bench_suite *suite, int time, const struct axis *x,
                        const struct axis *y) {
    double height = NAN;
    fprintf(file, "<g stroke=\"%s\" fill=\"%s\">\n<path fill=\"none\" %s d=\"", colours[time], colours[time],
            strokes[time]);
    for (size_t i = 0; i < suite->count; i++)
        if (!isnan(suite->cases[i].us[time])) {
            const char command = isnan(height) ? 'M' : 'L';
            height = position(y, suite->cases[i].us[time]);
            fprintf(file, "%c%.1f %.1f", command, position(x, (double)suite->cases[i].tokens), height);
        }
    fprintf(file, "\"/>\n");
    for (size_t i = 0; i < suite->count; i++)
        if (!isnan(suite->cases[i].us[time]))
            fprintf(file, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2\"/>\n", position(x, (double)suite->cases[i].tokens),
                    position(y, suite->cases[i].us[time]));
    fprintf(file, "</g>\n");
    return height;
}

/* The names at the ends of the lines, moved apart where they would touch. */
static void draw_names(FILE *file, const struct bench *bench, const double heights[LINES]) {
    int order[LINES] = {0, 1, 2};
    double lowest = TOP - LINE;
    for (int i = 1; i < LINES; i++)
        for (int j = i; j > 0 && heights[order[j]] < heights[order[j - 1]]; j--) {
            const int swapped = order[j];
            order[j] = order[j - 1];
            order[j - 1] = swapped;
        }
    for (int i = 0; i < LINES; i++) {
        lowest = fmax(heights[order[i]], lowest + LINE);
        fprintf(file, "<text x=\"%d\" y=\"%.1f\" style=\"fill:%s\">%s</text>\n", RIGHT + 8, lowest + 4,
                colours[order[i]], bench->peers->names[order[i]]);
    }
}

/* ---- Panels ----------------------------------------------------------------------------------------------------- */

/* The least and the greatest of a suite's times; 0 where none was timed. */
static int time_range(const struct bench_suite *suite, double *least, double *greatest) {
    *least = INFINITY;
    *greatest = 0;
    for (size_t i = 0; i < suite->count; i++)
        for (int time = 0; time < LINES; time++) { /* fmin() and fmax() take the number of a number and NaN */
            *least = fmin(*least, suite->cases[i].us[time]);
            *greatest = fmax(*greatest, suite->cases[i].us[time]);
        }
    return *greatest > 0;
}

static void draw_panel(FILE *file, const struct bench *bench, const struct bench_suite *suite) {
    const struct axis x =
        axis_of((double)suite->cases[0].tokens, (double)suite->cases[suite->count - 1].tokens, LEFT, RIGHT);
    double least, greatest, heights[LINES];
    fprintf(file, "<text class=\"name\" x=\"%d\" y=\"%d\">%s</text>\n", LEFT, TOP - 40,
            moer_operation_name(suite->operation));
    fprintf(file, "<text x=\"%d\" y=\"%d\">H = %lld, E = %lld, K = %lld, bfloat16; %s, median of %llu</text>\n", LEFT,
            TOP - 40 + LINE, (long long)suite->dims.hidden, (long long)suite->dims.experts,
            (long long)suite->dims.top_k, bench->method, (unsigned long long)bench->repeats);
    draw_ticks(file, &x, 7, draw_tokens_tick);
    fprintf(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">tokens</text>\n", (LEFT + RIGHT) / 2,
            BOTTOM + 2 * LINE + 4);
    fprintf(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">time</text>\n", LEFT - 6, TOP - 8);
    if (!time_range(suite, &least, &greatest))
        return;
    const struct axis y = axis_of(least, greatest, BOTTOM, TOP);
    draw_ticks(file, &y, 10, draw_time_tick);
    for (int time = LINES - 1; time >= 0; time--) /* ours over the others */
        heights[time] = draw_line(file, suite, time, &x, &y);
    draw_names(file, bench, heights);
}

/* Text with XML's own characters written as it wants them. */
static void write_text(FILE *file, const char *text) {
    for (; *text; text++)
        if (*text == '&' || *text == '<')
            fprintf(file, "&#%d;", *text);
        else
            fputc(*text, file);
}

void bench_write_plot(const struct bench *bench, FILE *file) {
    char setting[80];
    fprintf(file,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\">\n"
            "<style>text{font:13px sans-serif;fill:%s}.title{font-size:16px;font-weight:bold}.name{font-weight:bold}"
            ".grid{stroke:%s;stroke-opacity:.35;fill:none}</style>\n",
            WIDTH * (int)bench->count, HEIGHT, WIDTH * (int)bench->count, HEIGHT, text_colour, text_colour);
    fprintf(file, "<text class=\"title\" x=\"%d\" y=\"28\">", LEFT);
    write_text(file, bench->device_name);
    fprintf(file, "</text>\n<text x=\"%d\" y=\"%d\">%s; moerouter %s, commit %s, %s</text>\n", LEFT, 28 + LINE + 2,
            bench_setting(bench, setting), moer_version(), bench_commit(), bench->date);
    for (size_t i = 0; i < bench->count; i++) {
        fprintf(file, "<g transform=\"translate(%d 0)\">\n", WIDTH * (int)i);
        draw_panel(file, bench, &bench->suites[i]);
        fprintf(file, "</g>\n");
    }
    fprintf(file, "</svg>\n");
}
