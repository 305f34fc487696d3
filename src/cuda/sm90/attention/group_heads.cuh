/* Teacher groups on Hopper's tensor cores: what the forward and the fused backward share.
 *
 * A block has 128 queries of a student head. The queries of its r teacher heads stay in shared memory with the
 * student's; keys stream past, KEYS per stage, and P of a stage stays in registers while the heads are multiplied:
 *
 *   head h     X = Q_h K_h^T (wgmma)  ->  P += (2^(X - lse_h) - P) / (h + 1)
 *   student    Y = Q K^T (wgmma)
 *
 * A running mean, because the mean of equal heads is then exactly that head, for any r: equal inputs have KL 0. LSEs
 * in base 2 are split into a float and the rest that it cannot hold (`low`). All P of a row carry the same factor
 * 2^low, with the low of a reference: the student's LSE where it is known, otherwise the first head's. It cancels in
 * the KL, and where head and reference are equal it is exactly 1. */
#ifndef SKL_CUDA_SM90_ATTENTION_GROUP_HEADS_CUH
#define SKL_CUDA_SM90_ATTENTION_GROUP_HEADS_CUH

#include "cuda/common/group_rows.cuh"
#include "cuda/sm90/attention/logit_gradients.cuh"
#include "cuda/sm90/launch.cuh"

namespace sm90
{

/* A pipeline of key stages with a depth that is known at run time. */
struct slot_state {
    int index, phase;

    __device__ void next(int depth)
    {
        index = index + 1 == depth ? 0 : index + 1;
        phase ^= index == 0;
    }
};

constexpr int TEACHER_SLOTS_MAX = 4;

/* Barriers of the pipelines. The student's keys have one slot, because r teacher heads are multiplied between two of
 * its products. */
struct group_barriers {
    uint64_t queries_full;
    uint64_t keys_t_full[TEACHER_SLOTS_MAX], keys_t_empty[TEACHER_SLOTS_MAX];
    uint64_t keys_s_full, keys_s_empty;

    __device__ void init()
    {
        barrier_init(queries_full, 1);
        for (int slot = 0; slot < TEACHER_SLOTS_MAX; slot++) {
            barrier_init(keys_t_full[slot], 1);
            barrier_init(keys_t_empty[slot], CONSUMERS * 4);
        }
        barrier_init(keys_s_full, 1);
        barrier_init(keys_s_empty, CONSUMERS * 4);
    }
};

struct group_maps {
    CUtensorMap queries_t, queries_s, keys_t, keys_s, sums;
};

/* Loads of `keys` keys. */
template <typename ELEMENT>
inline bool encode_group_inputs(group_maps *maps, const skl_cuda_params &params, int keys, ELEMENT element)
{
    const skl_problem *const p = &params.problem;
    const skl_inputs *const in = &params.call.inputs;
    const skl_dtype type = dtype_of_element(element);
    const skl_tensor_rows query_rows = skl_query_rows(p), key_rows = skl_key_rows(p);
    return skl_tensor_map(&maps->queries_t, type, &in->q_t, p->dim_t, p->heads_t, query_rows, block_tile::ROWS) ==
               CUDA_SUCCESS &&
           skl_tensor_map(&maps->queries_s, type, &in->q_s, p->dim_s, p->heads_s, query_rows, block_tile::ROWS) ==
               CUDA_SUCCESS &&
           skl_tensor_map(&maps->keys_t, type, &in->k_t, p->dim_t, p->key_heads_t, key_rows, keys) == CUDA_SUCCESS &&
           skl_tensor_map(&maps->keys_s, type, &in->k_s, p->dim_s, p->key_heads_s, key_rows, keys) == CUDA_SUCCESS;
}

/* The teacher heads of a student head. */
struct teacher_group {
    int first, count, heads_per_key;
    unsigned new_keys; /* bit n: head n has other keys than the one before it. Bits 0 and `count` are set. */

    __device__ static teacher_group of(const skl_cuda_params &params, int head)
    {
        const int count = (int)skl_group_size(&params.problem), heads_per_key = params.a.heads_per_key;
        unsigned new_keys = 1U | 1U << count;
#pragma unroll 1
        for (int n = 1; n < count; n++)
            new_keys |= (unsigned)((head * count + n) % heads_per_key == 0) << n;
        return {head * count, count, heads_per_key, new_keys};
    }

    __device__ bool has_new_keys(int n) const
    {
        return new_keys >> n & 1;
    }
};

__device__ inline teacher_group warp_uniform(const teacher_group &group)
{
    return {warp_uniform(group.first), warp_uniform(group.count), warp_uniform(group.heads_per_key),
            (unsigned)warp_uniform((int)group.new_keys)};
}

/* Shared memory after the fixed part: queries of r teacher heads, then stages of their keys. */
template <int DIM_T, int KEYS> struct teacher_smem {
    static constexpr int HEAD_SIZE = DIM_T / 64 * block_tile::ROWS * 128, STAGE_SIZE = DIM_T / 64 * KEYS * 128;
    unsigned char *query_rows, *key_stages;

    /* Returns the memory with its stages from `first_slot` on. */
    __device__ static teacher_smem of(unsigned char *base, int heads, int first_slot)
    {
        return {base, base + heads * HEAD_SIZE + first_slot * STAGE_SIZE};
    }

    __device__ unsigned char *queries(int head, int slab) const
    {
        return query_rows + head * HEAD_SIZE + slab * block_tile::ROWS * 128;
    }

    __device__ unsigned char *keys(int slot, int slab) const
    {
        return key_stages + slot * STAGE_SIZE + slab * KEYS * 128;
    }

    /* Slots of each of `pipelines` that fit after a fixed part; 0: not even one. */
    static int depth(int64_t fixed_size, int64_t heads, int64_t smem_max, int pipelines)
    {
        const int64_t left = smem_max - fixed_size - heads * HEAD_SIZE;
        return left < 0 ? 0 : (int)skl_min(left / STAGE_SIZE / pipelines, TEACHER_SLOTS_MAX);
    }
};

/* ---- Producer ----------------------------------------------------------------------------------------------- */

/* Executed by one warp. */
template <int DIM_T, int DIM_S, int KEYS> struct group_loader {
    const group_maps &maps;
    group_barriers &barriers;
    teacher_smem<DIM_T, KEYS> teacher;
    unsigned char (&queries_s)[DIM_S / 64][block_tile::ROWS][128];
    unsigned char (&keys_s)[DIM_S / 64][KEYS][128];
    teacher_group group;
    int depth, batch, head, key_head_s;

    __device__ void load_queries(int row) const
    {
        barrier_expect_tx(barriers.queries_full,
                          group.count * teacher.HEAD_SIZE + DIM_S / 64 * block_tile::ROWS * 128);
        for (int n = 0; n < group.count; n++)
#pragma unroll
            for (int slab = 0; slab < DIM_T / 64; slab++)
                tma_load(teacher.queries(n, slab), maps.queries_t, slab * 64, row, group.first + n, batch,
                         barriers.queries_full);
        load_slabs(queries_s, maps.queries_s, row, head, batch, barriers.queries_full);
    }

    __device__ void load_teacher_keys(slot_state &slot, int n, int row) const
    {
        barrier_wait(barriers.keys_t_empty[slot.index], slot.phase ^ 1);
        barrier_expect_tx(barriers.keys_t_full[slot.index], teacher.STAGE_SIZE);
#pragma unroll
        for (int slab = 0; slab < DIM_T / 64; slab++)
            tma_load(teacher.keys(slot.index, slab), maps.keys_t, slab * 64, row,
                     (group.first + n) / group.heads_per_key, batch, barriers.keys_t_full[slot.index]);
        slot.next(depth);
    }

    /* Keys of all heads of a stage, from `row` of the tensor on. */
    __device__ void load_heads(slot_state &slot, int row) const
    {
        for (int n = 0; n < group.count; n++)
            if (group.has_new_keys(n))
                load_teacher_keys(slot, n, row);
    }

    /* Keys of the student in stage n. */
    __device__ void load_student_keys(int n, int row) const
    {
        barrier_wait(barriers.keys_s_empty, n % 2 ^ 1);
        barrier_expect_tx(barriers.keys_s_full, DIM_S / 64 * KEYS * 128);
        load_slabs(keys_s, maps.keys_s, row, key_head_s, batch, barriers.keys_s_full);
    }
};

/* ---- LSEs --------------------------------------------------------------------------------------------------- */

/* The given LSEs of a row, head after head. */
struct teacher_lse {
    const float *next_head;
    int64_t stride;

    __device__ static teacher_lse of(const skl_cuda_params &params, const block_tile &tile, int first_head, int row)
    {
        const skl_input &lse = params.call.inputs.lse_t;
        const int64_t query = skl_min(tile.first + row, tile.sequence.query_count - 1);
        return {(const float *)lse.data +
                    SKL_ROW(lse, tile.sequence.batch, first_head, tile.sequence.query_begin + query),
                lse.stride_head};
    }

    __device__ float load(int n) const
    {
        return __ldg(next_head + n * stride);
    }
};

/* ---- Products ----------------------------------------------------------------------------------------------- */

/* Issues the wgmmas of x = rows times keys, both in shared memory. `queries`, `keys`: operands. */
template <typename ELEMENT, int DIM, int KEYS, int BLOCKS>
__device__ inline void issue_product(float (&x)[BLOCKS][4], uint32_t queries, uint32_t keys)
{
    static_assert(BLOCKS * 8 == KEYS, "one wgmma covers the keys of a stage");
    wgmma_slabs<ELEMENT, DIM, block_tile::ROWS, KEYS>(x, queries, keys);
}

/* Log2 of a probability with a softcap. The logit is rounded before the LSE is subtracted, for teacher and student:
 * they must agree to the last bit where they are equal, also in the forward, whose student has another shift. */
template <logits_kind LOGITS>
__device__ inline log_probability capped_log_probability(float product, const skl_cuda_argument &argument,
                                                         float minus_lse)
{
    if (LOGITS == logits_kind::EXACT && !argument.capped)
        return {__fadd_rn(__fmul_rn(product, argument.scale), minus_lse), 1.0F};
    const bool fast = LOGITS == logits_kind::POLYNOMIAL;
    const float ratio = fast ? polynomial_tanh(product, argument) : tanhf(product * argument.scale);
    const float factor = fast ? argument.tanh_factor : argument.softcap_2;
    return {__fadd_rn(__fmul_rn(factor, ratio), minus_lse), fmaf(-ratio, ratio, 1.0F)};
}

/* The teacher's side of a consumer warpgroup. */
template <typename ELEMENT, int DIM_T, int KEYS, bool CAPPED> struct head_products {
    typedef float logits[KEYS / 8][4];
    teacher_smem<DIM_T, KEYS> teacher;
    teacher_group group;
    group_barriers &barriers;
    uint32_t queries; /* operand: the warpgroup's rows of head 0 */
    int depth;
    const skl_cuda_argument &argument;
    teacher_lse lse[2]; /* LSEs of the thread's two rows */
    float low[2];       /* low parts of their references */
    slot_state issued, completed;

    __device__ void issue(logits &x, int n)
    {
        barrier_wait(barriers.keys_t_full[issued.index], issued.phase);
        wgmma_fence();
        issue_product<ELEMENT, DIM_T, KEYS>(x, queries + n * (teacher.HEAD_SIZE / 16),
                                            k_major_operand(teacher.keys(issued.index, 0)));
        wgmma_commit();
        if (group.has_new_keys(n + 1))
            issued.next(depth);
    }

    /* Releases the keys of head n, whose wgmmas are complete. */
    __device__ void complete(logits &x, int n)
    {
        fence_operand(x);
        const bool last = group.has_new_keys(n + 1);
        barrier_arrive_if(barriers.keys_t_empty[completed.index], last && threadIdx.x % 32 == 0);
        if (last)
            completed.next(depth);
    }

    /* Adds head n to the running mean. FIRST: it is head 0, and p need not be set. */
    template <bool FIRST, logits_kind LOGITS>
    __device__ void add_as(logits &p, const logits &x, int n, const float (&of_rows)[2]) const
    {
        const skl_lse2 of_head[2] = {split_lse2(of_rows[0]), split_lse2(of_rows[1])};
        const float factor[2] = {fmaf(low[0] - of_head[0].low, SKL_LN2, 1.0F),
                                 fmaf(low[1] - of_head[1].low, SKL_LN2, 1.0F)};
        const float share = __fdividef(1.0F, (float)(n + 1));
#pragma unroll
        for (int block = 0; block < KEYS / 8; block++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float log_p =
                    LOGITS == logits_kind::PLAIN
                        ? fmaf(x[block][e], argument.scale, -of_head[e / 2].value)
                        : capped_log_probability<LOGITS>(x[block][e], argument, -of_head[e / 2].value).value;
                const float of_pair = ex2(log_p);
                float &mean = p[block][e];
                mean = FIRST ? of_pair * factor[e / 2] : fmaf(fmaf(of_pair, factor[e / 2], -mean), share, mean);
            }
    }

    template <bool FIRST> __device__ void add(logits &p, const logits &x, int n, const float (&of_rows)[2]) const
    {
        if (!CAPPED)
            add_as<FIRST, logits_kind::PLAIN>(p, x, n, of_rows);
        else if (polynomial_covers(x, argument))
            add_as<FIRST, logits_kind::POLYNOMIAL>(p, x, n, of_rows);
        else
            add_as<FIRST, logits_kind::EXACT>(p, x, n, of_rows);
    }

    __device__ void load_lse(float (&to)[2], int n) const
    {
        to[0] = lse[0].load(n);
        to[1] = lse[1].load(n);
    }

    /* Runs head n while nothing else runs. */
    __device__ void run_head(logits &x, float (&of_rows)[2], int n)
    {
        issue(x, n);
        load_lse(of_rows, n);
        wgmma_wait<0>();
        complete(x, n);
    }
};

} // namespace sm90

#endif
