#include "cli/distill/pair.h"

#include <math.h>

static double share_of(int64_t hits, int64_t references)
{
    return references ? (double)hits / (double)references : NAN;
}

double evaluate_hit_rate_s(const depth_score *score)
{
    return share_of(score->hits_s, score->references);
}

double evaluate_hit_rate_t(const depth_score *score)
{
    return share_of(score->hits_t, score->references);
}

static void add_score(depth_score *score, int hit_t, int hit_s, double kl)
{
    score->references++;
    score->hits_t += hit_t;
    score->hits_s += hit_s;
    score->kl += kl;
}

void evaluate_references(evaluation *result, const attention_pair *pair, const sequence *tokens)
{
    const skl_problem *const p = &pair->problem;
    for (int64_t r = 0; r < tokens->reference_count; r++) {
        const reference asked = tokens->references[r];
        const int64_t depth = asked.key * EVALUATE_DEPTHS / p->len_q;
        for (int64_t head = 0; head < p->heads_s; head++) {
            if (!task_head_retrieves(head))
                continue;
            const int hit_t = attention_pair_p(pair, head, asked.query, asked.key) > 0.5;
            const int hit_s = attention_pair_s(pair, head, asked.query, asked.key) > 0.5;
            const double kl = (double)pair->kl[head * p->len_q + asked.query];
            add_score(&result->depths[depth], hit_t, hit_s, kl);
            add_score(&result->all, hit_t, hit_s, kl);
        }
    }
}

static void add_rows(evaluation *result, const attention_pair *pair, double weight)
{
    const skl_problem *const p = &pair->problem;
    for (int64_t head = 0; head < p->heads_s; head++)
        for (int64_t i = 0; i < p->len_q; i++) {
            const double kl = weight * (double)pair->kl[head * p->len_q + i];
            result->kl += kl / (double)(p->heads_s * p->len_q);
            if (head < EVALUATE_HEADS_MAX)
                result->kl_head[head] += kl / (double)p->len_q;
            result->kl_position[i * EVALUATE_POSITIONS / p->len_q] += kl;
        }
}

/* Sums over the rows of a bucket become means. */
static void divide_positions(evaluation *result, const skl_problem *p)
{
    int64_t rows[EVALUATE_POSITIONS] = {0};
    for (int64_t i = 0; i < p->len_q; i++)
        rows[i * EVALUATE_POSITIONS / p->len_q]++;
    for (int b = 0; b < EVALUATE_POSITIONS; b++)
        result->kl_position[b] /= rows[b] ? (double)(p->heads_s * rows[b]) : 1;
}

evaluation evaluate(attention_pair *pair, retrieval_task *task, const layer *student, int64_t count)
{
    evaluation result = {.kl = 0};
    for (int64_t index = 0; index < count; index++) {
        const sequence tokens = task_sequence(task, SPLIT_HELD_OUT, (uint64_t)index);
        attention_pair_project(pair, &task->teacher, student, &tokens);
        attention_pair_forward(pair);
        add_rows(&result, pair, 1 / (double)count);
        evaluate_references(&result, pair, &tokens);
    }
    divide_positions(&result, &pair->problem);
    return result;
}
