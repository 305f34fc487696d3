/* Forward of a student with teacher groups on Hopper's tensor cores (sm_90a): 16-bit types, head sizes up to 128,
 * KL(P || S). The teacher's LSEs are known: the caller's, or those of an earlier launch.
 *
 * Bound: the special function units. 128 queries x 64 keys take 3,100 clocks for the exponentials and logarithms of
 * four teacher heads and the student, and 2,600 on the tensor cores, and on shared memory, at 128 dimensions. It
 * takes 7,400: two warpgroups have too little to overlap (docs/lab/2026-11-16-teacher-groups.md).
 *
 *   block      2 consumer warpgroups of 64 queries, 1 producer warp; one block per SM
 *   registers  240 per consumer thread: P and the logits of two heads (32 each), two row states
 *   shared     queries of all heads, a stage of 64 keys of the student, up to four of the teacher
 *
 * The row state has A = log2 P with the fixed shift -low (group_heads.cuh), because P is a probability already. B has
 * the first head's LSE as its shift, so that the KL of equal inputs is exactly 0, until a tile's sum is out of range.
 */
#ifndef SKL_CUDA_SM90_ATTENTION_GROUP_FORWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_GROUP_FORWARD_CUH

#include "cuda/sm90/attention/group_heads.cuh"

namespace sm90
{

constexpr int GROUP_KEYS = STAGE_KEYS;
constexpr int GROUP_FORWARD_THREADS = 128 * (CONSUMERS + 1);

typedef float group_logits[GROUP_KEYS / 8][4];

template <int DIM_S> struct group_forward_smem {
    smem_rows<DIM_S / 64> queries_s;
    unsigned char keys_s[DIM_S / 64][GROUP_KEYS][128];
    group_barriers barriers;
    block_tile tile; /* this and the rest are in shared memory to save registers */
    int64_t origin;  /* key that the keys below count from */
    int needed;      /* keys up to the last one that some query attends to */
    range32 full;    /* keys that all queries attend to */
    row_ranges<TILE_ROWS<2>> visible;
};

template <int DIM_S>
constexpr int GROUP_FORWARD_FIXED_SIZE = (sizeof(group_forward_smem<DIM_S>) + 1023) / 1024 * 1024;

/* ---- Consumers ---------------------------------------------------------------------------------------------- */

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
    head_products<ELEMENT, DIM_T, GROUP_KEYS, CAPPED, CAPPED> teacher;
    int warpgroup, stages; /* warp-uniform */

    template <bool MASKED>
    __device__ void add_tile(skl_row_state (&state)[2], const group_logits &p, const group_logits &y, float scale,
                             int n) const
    {
        const int first = n * GROUP_KEYS;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const range32 sees = MASKED ? smem.visible.of(acc_row<1>(0, half)) : range32{};
            add_group_tile<MASKED>(state[half], p, y, scale, half, {sees.begin - first, sees.end - first});
        }
    }

    __device__ void add_tile(skl_row_state (&state)[2], const group_logits &p, const group_logits &y, float scale,
                             int n) const
    {
        if (covers(smem.full, n * GROUP_KEYS, GROUP_KEYS))
            add_tile<false>(state, p, y, scale, n);
        else
            add_tile<true>(state, p, y, scale, n);
    }

    __device__ void run(skl_row_state (&state)[2])
    {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const skl_lse2 first = split_lse2(teacher.lse[half].load(0));
            state[half] = {-first.low, 0.0F, fabsf(first.value) < INFINITY ? first.value : 0.0F, 0.0F, 0.0F};
            teacher.low[half] = first.low;
        }
        barrier_wait(smem.barriers.queries_full, 0);
        for (int n = 0; n < stages; n++) {
            group_logits p, y;
            teacher.run_stage(
                p, y,
                [&](group_logits &to) {
                    barrier_wait(smem.barriers.keys_s_full, n % 2);
                    wgmma_fence();
                    issue_product<ELEMENT, DIM_S, GROUP_KEYS>(
                        to, k_major_operand(&smem.queries_s) + warpgroup * (64 * 128 / 16),
                        k_major_operand(smem.keys_s));
                    wgmma_commit();
                },
                [] {});
            barrier_arrive_if(smem.barriers.keys_s_empty, threadIdx.x % 32 == 0);
            if (CAPPED) { /* not in place: ptxas serialises wgmmas whose accumulators are written */
                group_logits capped;
                cap_logits(capped, y, params.b);
                add_tile(state, p, capped, 1.0F, n);
            } else {
                add_tile(state, p, y, params.b.scale, n);
            }
        }
    }

    __device__ void write(const skl_row_state (&state)[2]) const
    {
        const block_tile &tile = smem.tile;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = acc_row<1>(0, half);
            const skl_row_state merged = merge_lanes(without_shift_if_empty(state[half]));
            if (threadIdx.x % 4 != 0 || tile.first + row >= tile.sequence.query_count)
                continue;
            if (params.num_splits > 1)
                params.split_states[tile.index * tile.ROWS + row] = merged;
            else
                write_group_results(params, tile.sequence, tile.head, tile.first + row, merged);
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
        smem.origin = keys.origin;
        smem.needed = keys.needed;
        smem.full = reach_of(keys.band, 0, TILE_ROWS<2>).all;
        smem.full.end = min(smem.full.end, keys.needed);
        smem.barriers.init();
        barrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = warpgroup_index(), head = warp_uniform((int)smem.tile.head);
    const int stages = warp_uniform((smem.needed + GROUP_KEYS - 1) / GROUP_KEYS);
    const teacher_group group = teacher_group::of(params, head);
    const teacher_smem<DIM_T, GROUP_KEYS> teacher = {raw + GROUP_FORWARD_FIXED_SIZE<DIM_S>, group.count};
    if (warpgroup == CONSUMERS) {
        reg_dealloc<24>();
        if (warp_in_warpgroup() != 0)
            return;
        const block_tile &tile = smem.tile;
        const group_loader<DIM_T, DIM_S, GROUP_KEYS> loader = {maps,        smem.barriers,
                                                               teacher,     smem.queries_s.slabs,
                                                               smem.keys_s, group,
                                                               depth,       warp_uniform((int)tile.sequence.batch),
                                                               head,        head / params.b.heads_per_key};
        loader.load_queries(warp_uniform((int)(tile.sequence.query_begin + tile.first)));
        const int row = warp_uniform((int)(tile.sequence.key_begin + smem.origin));
        loader.load_stages(stages, [=](int n) { return row + n * GROUP_KEYS; });
    } else {
        reg_alloc<240>();
        group_forward<ELEMENT, DIM_T, DIM_S, CAPPED> consumer = {
            params,
            smem,
            {teacher,
             group,
             smem.barriers,
             k_major_operand(teacher.base) + warpgroup * (64 * 128 / 16),
             depth,
             params.a,
             {teacher_lse::of(params, smem.tile, group.first, acc_row<1>(0, 0)),
              teacher_lse::of(params, smem.tile, group.first, acc_row<1>(0, 1))},
             {},
             {0, 0},
             {0, 0}},
            warpgroup,
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
    const int depth = teacher::depth(GROUP_FORWARD_FIXED_SIZE<DIM_S>, heads, launch->smem_per_block);
    const size_t size =
        (size_t)(GROUP_FORWARD_FIXED_SIZE<DIM_S> + heads * teacher::HEAD_SIZE + depth * teacher::STAGE_SIZE);
    group_maps maps;
    if (depth == 0 || !encode_group_inputs(&maps, kernel_params, GROUP_KEYS, ELEMENT()))
        return encode_error();
    record_launch(kernel, CAPPED ? SKL_VARIANT_GROUPS_SOFTCAP : SKL_VARIANT_GROUPS, launch->num_splits);
    cudaError_t error = cudaFuncSetAttribute(group_forward_kernel<ELEMENT, DIM_T, DIM_S, CAPPED>,
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, (int)size);
    if (error != cudaSuccess)
        return error;
    group_forward_kernel<ELEMENT, DIM_T, DIM_S, CAPPED>
        <<<grid_of(p->batch, p->heads_s, tiles * launch->num_splits), GROUP_FORWARD_THREADS, size,
           params->call.stream>>>(kernel_params, maps, depth);
    error = cudaPeekAtLastError();
    if (error != cudaSuccess || launch->num_splits == 1)
        return error;
    merge_group_splits<2>
        <<<grid_of(p->batch, p->heads_s, tiles), block_tile::ROWS, 0, params->call.stream>>>(kernel_params);
    return cudaPeekAtLastError();
}

} // namespace sm90

#endif
