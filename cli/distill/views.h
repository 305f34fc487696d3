/* What the report shows of one sequence: attention maps, and how far teacher and student look. */
#ifndef STREAMKL_CLI_DISTILL_VIEWS_H
#define STREAMKL_CLI_DISTILL_VIEWS_H

#include "cli/distill/distill.h"
#include "view/attention_map.h"

enum { LOOK_BUCKETS_MAX = 40 };

/* How far one attention looks on a sequence, and how spread it is. */
typedef struct look {
    int32_t buckets;
    double share[LOOK_BUCKETS_MAX]; /* of the attention, by distance: 0, 1, 2 to 3, 4 to 7, ...; mean over heads */
    double entropy[EVALUATE_HEADS_MAX]; /* nats; mean over rows: of a student head, or of its teacher heads */
} look;

/* Teacher and student on the first held-out sequence. */
typedef struct distill_views {
    attention_map map_before, map_after;
    look teacher, before, after;
} distill_views;

void distill_views_compute(distill_views *views, distill_run *run);
void distill_views_free(distill_views *views);

#endif
