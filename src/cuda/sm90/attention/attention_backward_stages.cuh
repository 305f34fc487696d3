/* Shared memory of the attention backward that carries its KL, and its producer. */
#ifndef SKL_CUDA_SM90_ATTENTION_ATTENTION_BACKWARD_STAGES_CUH
#define SKL_CUDA_SM90_ATTENTION_ATTENTION_BACKWARD_STAGES_CUH

#include "cuda/common/attention_rows.cuh"
#include "cuda/sm90/attention/logit_gradients.cuh"

namespace sm90
{

constexpr int TILE_KEYS = CONSUMERS * 64;
constexpr int ATTENTION_BACKWARD_THREADS = 128 * (CONSUMERS + 1);
constexpr int STATS_WARPS = STAGE_ROWS / 32; /* the last ones of the producer */

/* Registers of a thread. A block starts with 168 of them: more than those in total would never become free. */
constexpr int KEY_WARPGROUP_REGS = 240, PRODUCER_REGS = 24;
static_assert(CONSUMERS * KEY_WARPGROUP_REGS + PRODUCER_REGS <= (CONSUMERS + 1) * 168, "registers of a block");

/* Row stats of two adjacent queries: one load of a thread for its two columns. */
struct alignas(16) stage_pair {
    float lse_b[2], shift[2], lse_a[2], weight[2];
};

/* Facts about a stage in shared memory: consumers have no registers for them. */
struct stage_info {
    int row, head; /* place of the stage's first query in the tensor */
    int flags;
    int unknown[STATS_WARPS]; /* whether a query or the gradient of its output may not be finite, by 32 queries */
};
enum { STAGE_NEW_K_A = 1, STAGE_LAST_OF_K_A = 2, STAGE_K_A_PHASE = 4 }; /* the phase that has the new K */

/* DIM: head size of the student, DIM_A: of the teacher. */
template <int DIM, int DIM_A> struct attention_backward_smem {
    static constexpr int DEPTH = DIM == 64 ? 4 : 2, Q_A_DEPTH = DIM_A == 64 ? 4 : DIM == 64 ? 2 : 1;
    static constexpr int INFOS = 8;
    static_assert(INFOS > DEPTH + 1, "a stage's info is still read after the stage is released");
    smem_rows<DIM / 64> k_b, v;
    smem_rows<DIM_A / 64> k_a;
    row_stage<DIM> q_b[DEPTH], d_out[DEPTH];
    row_stage<DIM_A> q_a[Q_A_DEPTH];
    unsigned char ds[2][TILE_KEYS][128];  /* [key][query] */
    unsigned char dq[2][STAGE_ROWS][128]; /* first 64 dimensions of a stage, f32, in slabs of 32 */
    static_assert(CONSUMERS == 2, "dk and dv of a warpgroup leave through one of them");
    stage_pair stats[DEPTH][STAGE_ROWS / 2];
    ring_barriers<DEPTH> of_q_b;
    ring_barriers<DEPTH> of_d_out; /* empty: of the stats, too */
    uint64_t stats_full[DEPTH];
    ring_barriers<Q_A_DEPTH> of_q_a;
    uint64_t k_a_full, k_a_empty, keys_full, ds_full[2], ds_empty[2];
    skl_sequence sequence; /* in shared memory to save registers */
    int batch;
    int first, count;    /* first key of the tile; number of keys that exist */
    int key_head, heads; /* query heads that share the key head */
    stage_schedule queries;
    stage_info info[INFOS];
    int queries_needed; /* up to the last one that attends to a key of the tile */
    bounded_band visible;
    int poisoned;            /* whether a key is not finite */
    float poison[TILE_KEYS]; /* NaN for keys that are not finite, else 0 */
};

struct attention_backward_maps {
    CUtensorMap q_a, q_b, d_out, k_a, k_b, v, dq_sums;
};

/* ---- Producer ----------------------------------------------------------------------------------------------- */

/* All loads of the block, issued by one warp. Stage n belongs to query head n / stages among the heads that share the
 * key head. */
template <int DIM, int DIM_A>
__device__ inline void produce(const attention_backward_params &params, const attention_backward_maps &maps,
                               attention_backward_smem<DIM, DIM_A> &smem)
{
    const stage_schedule queries = warp_uniform(smem.queries);
    const int batch = warp_uniform((int)smem.sequence.batch), heads = warp_uniform(smem.heads);
    const int key_head = warp_uniform(smem.key_head), first_head = key_head * heads;
    const int key_row = warp_uniform((int)smem.sequence.key_begin + smem.first);
    const int heads_per_k_a = params.a.heads_per_key;
    if (queries.stages == 0)
        return;
    barrier_expect_tx(smem.keys_full, smem.k_b.SIZE + smem.v.SIZE);
    load_slabs(smem.k_b.slabs, maps.k_b, key_row, key_head, batch, smem.keys_full);
    load_slabs(smem.v.slabs, maps.v, key_row, key_head, batch, smem.keys_full);
    for (int h = 0, n = 0, k_a_loads = 0; h < heads; h++) {
        const int head = first_head + h;
        const bool new_k_a = h == 0 || head / heads_per_k_a != (head - 1) / heads_per_k_a;
        for (int s = 0; s < queries.stages; s++, n++) {
            const int row = queries.row_at(s);
            load_stage(smem.d_out, smem.of_d_out, maps.d_out, n, row, head, batch);
            load_stage(smem.q_b, smem.of_q_b, maps.q_b, n, row, head, batch);
            if (s == 0 && new_k_a) {
                barrier_wait(smem.k_a_empty, k_a_loads++ % 2 ^ 1);
                barrier_expect_tx(smem.k_a_full, smem.k_a.SIZE);
                load_slabs(smem.k_a.slabs, maps.k_a, key_row, head / heads_per_k_a, batch, smem.k_a_full);
            }
            load_stage(smem.q_a, smem.of_q_a, maps.q_a, n, row, head, batch);
        }
    }
}

/* Row stats of all stages, by two more warps: a row per lane, so that each stage waits for global memory once. */
template <typename ELEMENT, int DIM, int DIM_A>
__device__ inline void produce_stats(const attention_backward_params &params,
                                     attention_backward_smem<DIM, DIM_A> &smem)
{
    const float unit = log2_unit<ELEMENT>(*params.largest);
    const stage_schedule queries = warp_uniform(smem.queries);
    const int heads = warp_uniform(smem.heads), needed = warp_uniform(smem.queries_needed);
    const int64_t rows_per_head = params.problem.packed ? params.problem.total_q : params.problem.len_q;
    const int row = (int)(threadIdx.x % 64); /* index in the stage */
    const attention_row *rows = params.rows +
                                skl_state_index(&params.problem, &smem.sequence, (int64_t)smem.key_head * heads, 0) +
                                queries.row - smem.sequence.query_begin + row;
    const int first_head = warp_uniform(smem.key_head) * heads, heads_per_k_a = params.a.heads_per_key;
    for (int h = 0, n = 0, k_a_loads = 0; h < heads; h++, rows += rows_per_head)
        for (int s = 0; s < queries.stages; s++, n++) {
            const int stage = n % smem.DEPTH, first = queries.stage_at(s) * STAGE_ROWS, head = first_head + h;
            barrier_wait(smem.of_d_out.empty[stage], n / smem.DEPTH % 2 ^ 1);
            if (row == 0) {
                int flags = 0;
                if (s == 0 && (h == 0 || head / heads_per_k_a != (head - 1) / heads_per_k_a))
                    flags |= STAGE_NEW_K_A | (k_a_loads++ % 2 != 0 ? STAGE_K_A_PHASE : 0);
                if (s == queries.stages - 1 && h + 1 < heads && (head + 1) / heads_per_k_a != head / heads_per_k_a)
                    flags |= STAGE_LAST_OF_K_A;
                stage_info &info = smem.info[n % smem.INFOS];
                info.row = queries.row + first;
                info.head = head;
                info.flags = flags;
            }
            attention_row stats = {};
            if (first + row < needed)
                stats = rows[first];
            stage_pair &to = smem.stats[stage][row / 2];
            to.lse_b[row % 2] = stats.lse_b - unit;
            to.shift[row % 2] = stats.shift;
            to.lse_a[row % 2] = stats.lse_a - unit;
            to.weight[row % 2] = stats.weight;
            /* Numbers that are not finite make the LSE or <do, o> not finite; rows that are not needed have neither.
             */
            const bool finite =
                first + row < needed && fabsf(stats.lse_b) < INFINITY && fabsf(stats.shift) < INFINITY;
            const bool unknown = __any_sync(~0U, !finite);
            if (row % 32 == 0)
                smem.info[n % smem.INFOS].unknown[row / 32] = unknown;
            barrier_arrive(smem.stats_full[stage]); /* every lane, because every lane has written */
        }
}

} // namespace sm90

#endif
