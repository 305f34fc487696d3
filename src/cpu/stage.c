#include "cpu/stage.h"

#include "cpu/pool.h"

int64_t skl_turn_count(int threads)
{
    return 3 * (int64_t)threads;
}

/* Finds an item's chain and tile, and the items around it in its chain (-1: none). */
static void place_item(const skl_stage *s, int64_t item, skl_task *task, int64_t *behind)
{
    const int64_t chain_items = s->chain_heads * s->tiles;
    const int64_t chain_count = s->item_count / chain_items;
    const int64_t wave_chains_max = s->plan->threads;
    const int64_t wave = item / (wave_chains_max * chain_items);
    const int64_t wave_first = wave * wave_chains_max * chain_items;
    const int64_t wave_chains = skl_min(wave_chains_max, chain_count - wave * wave_chains_max);
    const int64_t step = (item - wave_first) / wave_chains;
    const int64_t chain = wave * wave_chains_max + (item - wave_first) % wave_chains;
    const int64_t head = chain * s->chain_heads + step / s->tiles;
    task->item = item;
    task->before = step > 0 ? item - wave_chains : -1;
    task->batch = head / s->heads;
    task->head = head % s->heads;
    task->tile = s->tiles - 1 - step % s->tiles; /* causal: longest first */
    *behind = step + 1 < chain_items ? item + wave_chains : -1;
}

/* Waits until the counter that `item` takes over has no reader left. */
static void take_turn(const skl_stage *s, const skl_task *task)
{
    const int64_t former = task->item - task->turns.count;
    if (former >= 0) {
        skl_task other;
        int64_t behind = -1;
        place_item(s, former, &other, &behind);
        skl_turn_wait(&task->turns, former, SKL_ALL_TILES);
        skl_turn_wait(&task->turns, behind, SKL_ALL_TILES);
    }
    skl_turn_pass(&task->turns, task->item, 0);
}

static void work_on_stage(void *context, int worker)
{
    skl_stage *const s = context;
    skl_task task = s->task;
    task.scratch = (float *)(void *)(s->scratch + (size_t)worker * s->scratch_size);
    for (;;) {
        const int64_t item = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed);
        if (item >= s->item_count)
            return;
        int64_t behind = -1;
        place_item(s, item, &task, &behind);
        if (task.fused)
            take_turn(s, &task);
        s->function(&task);
        if (task.fused) {
            skl_turn_wait(&task.turns, task.before, SKL_ALL_TILES);
            skl_turn_pass(&task.turns, item, SKL_ALL_TILES);
        }
        const int64_t done = 1 + atomic_fetch_add_explicit(&s->done, 1, memory_order_relaxed);
        if (worker == 0 && s->plan->progress != NULL)
            s->plan->progress(s->plan->progress_user, s->work_before + done, s->work_total);
    }
}

static int64_t least_common_multiple(int64_t a, int64_t b)
{
    int64_t x = a, y = b;
    while (y != 0) {
        const int64_t rest = x % y;
        x = y;
        y = rest;
    }
    return a / x * b;
}

/* Student heads in a row that share a key head with one another, on either side. */
static int64_t sharing_heads(const skl_problem *p)
{
    const int64_t group = skl_group_size(p);
    const int64_t shared_s = p->heads_s / p->key_heads_s;
    const int64_t shared_t = p->heads_t / p->key_heads_t; /* in teacher heads */
    if (shared_t % group != 0 && group % shared_t != 0)
        return p->heads_s; /* key heads straddle groups */
    return least_common_multiple(shared_s, skl_max(1, shared_t / group));
}

/* Tiles that a pass works on: queries of the student heads, or keys of one side's key heads. */
typedef struct grid {
    int64_t heads; /* per sequence */
    int64_t tiles; /* per head */
} grid;

static grid grid_of(const skl_plan *plan, const skl_cpu_pass *pass)
{
    const skl_problem *const p = &plan->problem;
    const skl_tiles tiles = ((const skl_cpu_work *)plan->kernel)->tiles(p);
    const grid over_queries = {p->heads_s, skl_ceil_div(p->len_q, tiles.queries)};
    const grid over_keys = {pass->teacher_side ? p->key_heads_t : p->key_heads_s, skl_ceil_div(p->len_k, tiles.keys)};
    return pass->over_keys ? over_keys : over_queries;
}

int64_t skl_pass_tasks(const skl_plan *plan, const skl_cpu_pass *pass)
{
    const grid g = grid_of(plan, pass);
    return plan->problem.batch * g.heads * g.tiles;
}

static void set_pass(skl_stage *s, const skl_cpu_pass *pass)
{
    const grid g = grid_of(s->plan, pass);
    s->function = pass->function;
    s->heads = g.heads;
    s->tiles = g.tiles;
    s->chain_heads = pass->over_keys ? 1 : sharing_heads(&s->plan->problem);
    s->item_count = skl_pass_tasks(s->plan, pass);
    s->task.fused = pass->fused;
    s->task.teacher_side = pass->teacher_side;
}

void skl_stage_run(skl_stage *s, const skl_cpu_pass *pass)
{
    set_pass(s, pass);
    if (s->item_count == 0)
        return;
    atomic_init(&s->next, 0);
    atomic_init(&s->done, 0);
    skl_turns_init(&s->task.turns);
    const int64_t threads = skl_min(s->plan->threads, s->item_count); /* wakes nobody for nothing */
    skl_pool_run((int)threads, work_on_stage, s);
    s->work_before += s->item_count;
    if (s->plan->progress != NULL)
        s->plan->progress(s->plan->progress_user, s->work_before, s->work_total);
}
