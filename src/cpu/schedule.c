#include "cpu/schedule.h"

#include "cpu/pool.h"

int64_t skl_ordered_sum_count(int threads)
{
    return 3 * (int64_t)threads;
}

/* Finds the chain and the tile of an item, and the items before and after it in its chain (-1: none). */
static void locate_item(const skl_schedule *s, int64_t item, skl_task *task, int64_t *next)
{
    const int64_t chain_items = s->chain_heads * s->tiles;
    const int64_t chain_count = s->item_count / chain_items;
    const int64_t chains_per_wave = s->plan->workers;
    const int64_t wave = item / (chains_per_wave * chain_items);
    const int64_t wave_first = wave * chains_per_wave * chain_items;
    const int64_t wave_chains = skl_min(chains_per_wave, chain_count - wave * chains_per_wave);
    const int64_t step = (item - wave_first) / wave_chains;
    const int64_t chain = wave * chains_per_wave + (item - wave_first) % wave_chains;
    const int64_t head = chain * s->chain_heads + step / s->tiles;
    task->item = item;
    task->previous = step > 0 ? item - wave_chains : -1;
    /* All waves except the last have one chain per worker, and end with the last items of these. */
    const int64_t place = chain - wave * chains_per_wave;
    task->before = step > 0 ? task->previous : wave > 0 ? wave_first - chains_per_wave + place : -1;
    if (task->fused)
        task->key_sums = skl_key_sums_at(task->problem, s->key_sums + place * skl_key_sums_floats(task->problem));
    task->batch = head / s->heads;
    task->head = head % s->heads;
    task->tile = s->tiles - 1 - step % s->tiles; /* causal masks: the longest tiles start first */
    *next = step + 1 < chain_items ? item + wave_chains : -1;
}

/* Waits until the counter that the item reuses has no reader left. */
static void claim_counter(const skl_schedule *s, const skl_task *task)
{
    const int64_t former = task->item - task->ordered_sum.count;
    if (former >= 0) {
        skl_task other = s->task;
        int64_t next = -1;
        locate_item(s, former, &other, &next);
        skl_ordered_sum_wait(&task->ordered_sum, former, SKL_ALL_TILES);
        skl_ordered_sum_wait(&task->ordered_sum, next, SKL_ALL_TILES);
    }
    skl_ordered_sum_advance(&task->ordered_sum, task->item, 0);
}

static bool is_cancelled(const skl_plan *plan)
{
    return plan->cancel != NULL && __atomic_load_n(plan->cancel, __ATOMIC_RELAXED) != 0;
}

/* A worker that finds the call cancelled takes no further item. Items wait only for earlier ones, which other workers
 * have taken and complete. */
static void run_tasks(void *context, int worker)
{
    skl_schedule *const s = context;
    skl_task task = s->task;
    task.scratch = (float *)(void *)(s->scratch + (size_t)worker * s->scratch_size);
    while (!is_cancelled(s->plan)) {
        const int64_t item = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed);
        if (item >= s->item_count)
            return;
        int64_t next = -1;
        locate_item(s, item, &task, &next);
        if (task.fused)
            claim_counter(s, &task);
        s->function(&task);
        if (task.fused) {
            skl_ordered_sum_wait(&task.ordered_sum, task.previous, SKL_ALL_TILES);
            skl_ordered_sum_advance(&task.ordered_sum, item, SKL_ALL_TILES);
        }
        const int64_t done = 1 + atomic_fetch_add_explicit(&s->done, 1, memory_order_relaxed);
        if (worker == 0 && s->plan->progress != NULL)
            s->plan->progress(s->plan->progress_user, s->work_before + done, s->work_total);
    }
}

int64_t skl_key_sums_count(const skl_problem *p, int32_t workers)
{
    return skl_min(workers, p->batch * p->heads_s / skl_chain_heads(p));
}

/* The tiles of a pass: query tiles of the student heads, or key tiles of its key heads. */
typedef struct grid {
    int64_t heads; /* per sequence */
    int64_t tiles; /* per head */
} grid;

static grid grid_of(const skl_plan *plan, const skl_cpu_pass *pass)
{
    const skl_problem *const p = &plan->problem;
    const skl_tiles tiles = ((const skl_cpu_work *)plan->kernel)->tiles(p);
    const grid over_queries = {p->heads_s, skl_ceil_div(p->len_q, tiles.queries)};
    const int64_t key_heads = pass->key_result_heads > 0 ? pass->key_result_heads : p->key_heads_s;
    const grid over_keys = {key_heads, skl_ceil_div(skl_student_keys(p, p->len_k), tiles.keys)};
    return pass->over_keys ? over_keys : over_queries;
}

int64_t skl_pass_items(const skl_plan *plan, const skl_cpu_pass *pass)
{
    const grid g = grid_of(plan, pass);
    return plan->problem.batch * g.heads * g.tiles;
}

static void set_pass(skl_schedule *s, const skl_cpu_pass *pass)
{
    const grid g = grid_of(s->plan, pass);
    s->function = pass->function;
    s->heads = g.heads;
    s->tiles = g.tiles;
    s->chain_heads = pass->over_keys ? 1 : skl_chain_heads(&s->plan->problem);
    s->item_count = skl_pass_items(s->plan, pass);
    s->task.fused = pass->fused;
}

bool skl_schedule_run(skl_schedule *s, const skl_cpu_pass *pass)
{
    set_pass(s, pass);
    if (s->item_count == 0)
        return true;
    atomic_init(&s->next, 0);
    atomic_init(&s->done, 0);
    skl_ordered_sum_init(&s->task.ordered_sum);
    const int64_t threads = skl_min(s->plan->workers, s->item_count); /* never more threads than items */
    skl_pool_run((int)threads, run_tasks, s);
    /* A flag that is 0 again does not complete the items that workers have left. */
    if (is_cancelled(s->plan) || atomic_load_explicit(&s->done, memory_order_relaxed) < s->item_count)
        return false;
    s->work_before += s->item_count;
    if (s->plan->progress != NULL)
        s->plan->progress(s->plan->progress_user, s->work_before, s->work_total);
    return true;
}
