/* Forward of a student with teacher groups on Hopper's tensor cores (sm_90a): 16-bit types, head sizes up to 128,
 * KL(P || S). The teacher's LSEs are known: the caller's, or those of an earlier launch.
 *
 * Bound: the special function units. 128 queries x 64 keys take 3,100 clocks for the exponentials and logarithms of
 * four teacher heads and the student, and 2,600 on the tensor cores, and on shared memory, at 128 dimensions.
 *
 *   block      2 teams of 2 consumer warpgroups with 64 queries each and 1 producer warp; one block per SM
 *   registers  112 per consumer thread: P and the logits of a head (32 each), two row states
 *   shared     queries of all heads; for each team a stage of 64 keys of the student, up to four of the teacher
 *
 * Both teams have the same queries. Team t has the stages t, t + 2, ... of their keys; in the end the row states of
 * the teams are merged. A warpgroup waits for its own wgmmas, and others multiply during its exponentials.
 *
 * The row state has A = log2 P with the fixed shift -low (group_heads.cuh), because P is a probability already. B has
 * the first head's LSE as its shift, so that the KL of equal inputs is exactly 0, until a tile's sum is out of range.
 */
#ifndef SKL_CUDA_SM90_ATTENTION_GROUP_FORWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_GROUP_FORWARD_CUH

#include "cuda/sm90/attention/group_heads.cuh"

namespace sm90
{

constexpr int GROUP_KEYS = STAGE_KEYS, TEAMS = 2;
constexpr int GROUP_FORWARD_CONSUMERS = TEAMS * CONSUMERS;
constexpr int GROUP_FORWARD_THREADS = 128 * (GROUP_FORWARD_CONSUMERS + 1);

typedef float group_logits[GROUP_KEYS / 8][4];

template <int DIM_S> struct group_forward_smem {
    smem_rows<DIM_S / 64> queries_s;
    unsigned char keys_s[TEAMS][DIM_S / 64][GROUP_KEYS][128];
    group_barriers barriers[TEAMS];
    block_tile tile; /* this and the next members are in shared memory to save registers */
    teacher_group group;
    int64_t origin; /* key that the keys below count from */
    int needed;     /* keys up to the last one that some query attends to */
    range32 full;   /* keys that all queries attend to */
    row_ranges<TILE_ROWS<2>> visible;
};

template <int DIM_S>
constexpr int GROUP_FORWARD_FIXED_SIZE = (sizeof(group_forward_smem<DIM_S>) + 1023) / 1024 * 1024;

/* ---- Consumers ---------------------------------------------------------------------------------------------- */

/* Query of the thread's row, counted from the block's first one. */
__device__ inline int row_of_team(int half)
{
    return (int)((unsigned)acc_row<1>(0, half) % block_tile::ROWS);
}

template <logits_kind LOGITS>
__device__ inline void cap_logits_as(group_logits &to, const group_logits &y, const skl_cuda_argument &argument)
{
#pragma unroll
    for (int e = 0; e < GROUP_KEYS / 2; e++)
        to[e / 4][e % 4] = capped_log_probability<LOGITS>(y[e / 4][e % 4], argument, 0.0F).value;
}

/* Logits of a student with softcaps; `to` is not y. */
__device__ inline void cap_logits(group_logits &to, const group_logits &y, const skl_cuda_argument &argument)
{
    if (polynomial_covers(y, argument))
        cap_logits_as<logits_kind::POLYNOMIAL>(to, y, argument);
    else
        cap_logits_as<logits_kind::EXACT>(to, y, argument);
}

template <typename ELEMENT, int DIM_T, int DIM_S, bool CAPPED> struct group_forward {
    const forward_params &params;
    group_forward_smem<DIM_S> &smem;
    head_products<ELEMENT, DIM_T, GROUP_KEYS, CAPPED> teacher;
    int team, warpgroup, stages; /* warp-uniform; warpgroup: of the team */

    /* Keys of stage n that a row of the thread sees, counted from the first. */
    __device__ range32 seen_in(int n, int half) const
    {
        const range32 visible = smem.visible.of(row_of_team(half));
        return {visible.begin - n * GROUP_KEYS, visible.end - n * GROUP_KEYS};
    }

    __device__ bool is_masked(int n) const
    {
        return !covers(smem.full, n * GROUP_KEYS, GROUP_KEYS);
    }

    template <bool MASKED>
    __device__ void add_tile_as(skl_row_state (&state)[2], const group_logits &p, const group_logits &y, float scale,
                                int n) const
    {
#pragma unroll
        for (int half = 0; half < 2; half++)
            add_group_tile<MASKED, CAPPED>(
                state[half], p, y, scale, half, MASKED ? seen_in(n, half) : range32{}, [&] {
                    const int first = teacher.group.first;
                    return split_lse2(teacher_lse::of(params, smem.tile, first, row_of_team(half)).load(0)).value;
                });
    }

    __device__ void add_tile(skl_row_state (&state)[2], const group_logits &p, const group_logits &y, float scale,
                             int n) const
    {
        if (is_masked(n))
            add_tile_as<true>(state, p, y, scale, n);
        else
            add_tile_as<false>(state, p, y, scale, n);
    }

    /* The student's logits in the i-th stage of the team. */
    __device__ void multiply_student(group_logits &y, int i)
    {
        group_barriers &barriers = smem.barriers[team];
        barrier_wait(barriers.keys_s_full, i % 2);
        wgmma_fence();
        issue_product<ELEMENT, DIM_S, GROUP_KEYS>(y, k_major_operand(&smem.queries_s) + warpgroup * (64 * 128 / 16),
                                                  k_major_operand(smem.keys_s[team]));
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(y);
        barrier_arrive_if(barriers.keys_s_empty, threadIdx.x % 32 == 0);
    }

    __device__ void run(skl_row_state (&state)[2])
    {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const skl_lse2 first = split_lse2(teacher.lse[half].load(0));
            state[half] = {-first.low, 0.0F, fabsf(first.value) < INFINITY ? first.value : 0.0F, 0.0F, 0.0F};
        }
        barrier_wait(smem.barriers[0].queries_full, 0);
        for (int n = team; n < stages; n += TEAMS) {
            group_logits p, x;
            float lse[2];
#pragma unroll
            for (int half = 0; half < 2; half++) { /* repeated in every stage to save registers */
                teacher.low[half] = -state[half].m_a;
                if (CAPPED)
                    teacher.lse[half] = teacher_lse::of(params, smem.tile, teacher.group.first, row_of_team(half));
            }
            teacher.run_head(x, lse, 0);
            teacher.template add<true>(p, x, 0, lse);
#pragma unroll 1
            for (int head = 1; head < teacher.group.count; head++) {
                teacher.run_head(x, lse, head);
                teacher.template add<false>(p, x, head, lse);
            }
            if (CAPPED && is_masked(n)) { /* cleared early to save registers later */
                clear_unseen(p, 0, seen_in(n, 0));
                clear_unseen(p, 1, seen_in(n, 1));
            }
            multiply_student(x, n / TEAMS);
            if (CAPPED) { /* a copy: ptxas serializes wgmmas whose accumulators are written */
                group_logits capped;
                cap_logits(capped, x, params.b);
                add_tile(state, p, capped, 1.0F, n);
            } else {
                add_tile(state, p, x, params.b.scale, n);
            }
        }
    }

    /* Merges the states of the teams and writes the results. */
    __device__ void write(const skl_row_state (&state)[2]) const
    {
        const block_tile &tile = smem.tile;
        const skl_row_state merged[2] = {merge_lanes(without_shift_if_empty(state[0])),
                                         merge_lanes(without_shift_if_empty(state[1]))};
        skl_row_state *const of_last_team = (skl_row_state *)(void *)&smem.queries_s;
        named_barrier_sync(1, 128 * GROUP_FORWARD_CONSUMERS); /* the queries are not needed any more */
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (team != 0 && threadIdx.x % 4 == 0)
                of_last_team[row_of_team(half)] = merged[half];
        named_barrier_sync(1, 128 * GROUP_FORWARD_CONSUMERS);
        if (team != 0)
            return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row_of_team(half);
            if (threadIdx.x % 4 != 0 || tile.first + row >= tile.sequence.query_count)
                continue;
            const skl_row_state of_row = skl_state_merge(merged[half], of_last_team[row]);
            if (params.num_splits > 1)
                params.split_states[tile.index * tile.ROWS + row] = of_row;
            else
                write_group_results(params, tile.sequence, tile.head, tile.first + row, of_row);
        }
    }
};

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM_T, int DIM_S, bool CAPPED>
__global__ void __launch_bounds__(GROUP_FORWARD_THREADS, 1)
    group_forward_kernel(const __grid_constant__ forward_params params, const __grid_constant__ group_maps maps,
                         int depth)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    group_forward_smem<DIM_S> &smem = *(group_forward_smem<DIM_S> *)(void *)raw;
    block_tile assigned;
    if (!assigned.find(params, params.num_splits, (unsigned)params.head_group))
        return;
    const int64_t last = skl_min(assigned.first + TILE_ROWS<2>, assigned.sequence.query_count) - 1;
    const skl_band band = skl_key_band(&params.problem, &assigned.sequence);
    const streamed_band keys =
        streamed_split(stream_for(band, assigned.first, last), GROUP_KEYS, assigned.split, params.num_splits);
    smem.visible.fill(keys.band);
    if (threadIdx.x == 0) {
        smem.tile = assigned;
        smem.group = teacher_group::of(params, (int)assigned.head);
        smem.origin = keys.origin;
        smem.needed = keys.needed;
        smem.full = reach_of(keys.band, 0, TILE_ROWS<2>).all;
        smem.full.end = min(smem.full.end, keys.needed);
        for (int team = 0; team < TEAMS; team++)
            smem.barriers[team].init();
        barrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = warpgroup_index(), head = warp_uniform((int)smem.tile.head);
    const int stages = warp_uniform((smem.needed + GROUP_KEYS - 1) / GROUP_KEYS);
    unsigned char *const of_teacher = raw + GROUP_FORWARD_FIXED_SIZE<DIM_S>;
    if (warpgroup == GROUP_FORWARD_CONSUMERS) {
        reg_dealloc<24>();
        const int team = warp_in_warpgroup();
        if (team >= TEAMS)
            return;
        const teacher_group group = warp_uniform(smem.group);
        const auto teacher = teacher_smem<DIM_T, GROUP_KEYS>::of(of_teacher, group.count, team * depth);
        const block_tile &tile = smem.tile;
        const group_loader<DIM_T, DIM_S, GROUP_KEYS> loader = {maps,
                                                               smem.barriers[team],
                                                               teacher,
                                                               smem.queries_s.slabs,
                                                               smem.keys_s[team],
                                                               group,
                                                               depth,
                                                               warp_uniform((int)tile.sequence.batch),
                                                               head,
                                                               head / params.b.heads_per_key};
        if (team == 0)
            loader.load_queries(warp_uniform((int)(tile.sequence.query_begin + tile.first)));
        const int row = warp_uniform((int)(tile.sequence.key_begin + smem.origin));
        slot_state slot = {0, 0};
        for (int n = team; n < stages; n += TEAMS) {
            loader.load_heads(slot, row + n * GROUP_KEYS);
            loader.load_student_keys(n / TEAMS, row + n * GROUP_KEYS);
        }
    } else {
        reg_alloc<112>();
        const int team = warpgroup / CONSUMERS;
        const teacher_group group = warp_uniform(smem.group);
        const auto teacher = teacher_smem<DIM_T, GROUP_KEYS>::of(of_teacher, group.count, team * depth);
        group_forward<ELEMENT, DIM_T, DIM_S, CAPPED> consumer = {
            params,
            smem,
            {teacher,
             group,
             smem.barriers[team],
             k_major_operand(teacher.query_rows) + warpgroup % CONSUMERS * (64 * 128 / 16),
             depth,
             params.a,
             {teacher_lse::of(params, smem.tile, group.first, row_of_team(0)),
              teacher_lse::of(params, smem.tile, group.first, row_of_team(1))},
             {},
             {0, 0},
             {0, 0}},
            team,
            warpgroup % CONSUMERS,
            stages};
        skl_row_state state[2];
        consumer.run(state);
        consumer.write(state);
    }
#endif
}

template <typename ELEMENT, int DIM_T, int DIM_S, bool CAPPED>
cudaError_t launch_group_forward(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    typedef teacher_smem<DIM_T, GROUP_KEYS> teacher;
    const forward_params kernel_params = forward_params_of(params, launch);
    const skl_problem *const p = &params->problem;
    const int64_t heads = skl_group_size(p), tiles = skl_ceil_div(p->len_q, block_tile::ROWS);
    const int depth = teacher::depth(GROUP_FORWARD_FIXED_SIZE<DIM_S>, heads, launch->smem_per_block, TEAMS);
    const size_t size =
        (size_t)(GROUP_FORWARD_FIXED_SIZE<DIM_S> + heads * teacher::HEAD_SIZE + TEAMS * depth * teacher::STAGE_SIZE);
    group_maps maps;
    if (depth == 0 || !encode_group_inputs(&maps, kernel_params, GROUP_KEYS, ELEMENT()))
        return encode_error();
    record_launch(kernel, CAPPED ? SKL_VARIANT_GROUPS_SOFTCAP : SKL_VARIANT_GROUPS, launch->num_splits);
    const cudaError_t error = launch_blocks(group_forward_kernel<ELEMENT, DIM_T, DIM_S, CAPPED>,
                                            grid_of(p->batch, p->heads_s, tiles * launch->num_splits),
                                            GROUP_FORWARD_THREADS, size, kernel_params, maps, depth);
    return error == cudaSuccess && launch->num_splits > 1
               ? launch_blocks(merge_group_splits<2>, grid_of(p->batch, p->heads_s, tiles), block_tile::ROWS, 0,
                               kernel_params)
               : error;
}

} // namespace sm90

#endif
