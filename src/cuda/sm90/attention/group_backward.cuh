/* Fused backward of a student with teacher groups on Hopper's tensor cores (sm_90a): dq, dk and the KL in one pass
 * over the keys. 16-bit types, head sizes up to 128, KL(P || S); LSEs of both sides are given.
 *
 * Bound: shared memory, 4,100 clocks per 128 queries x 64 keys for four teacher heads of 128 dimensions. The tensor
 * cores take 3,600, exponentials and logarithms 3,100.
 *
 *   block      2 dq warpgroups of 64 queries, 1 dk warpgroup, 1 producer warp and 1 warp that sanitizes stages; one
 *              block per SM
 *   registers  208 per dq thread: P and the logits of a head (32 each), dq (DIM_S / 2), G (16); 64 per dk thread: 64
 *              dimensions of dk of a stage (32)
 *   shared     queries of all heads, a stage of 64 keys of both sides (more of the teacher's where there is room), G,
 *              64 dimensions of dk of a stage in f32: 226 KB for four heads of 128 dimensions
 *
 *   dq warpgroups   stage n       X_h (wgmma) -> P, head after head;  Y (wgmma) -> G;  dq += G K (wgmma)
 *   dk warpgroup    stage n - 1   dk = G^T Q (wgmma)  ->  shared memory  ->  global memory += dk (TMA)
 *
 * See group_heads.cuh for P, fused_backward.cuh for dq and dk. On the kernel and the dk loop of the fused backward,
 * where each warp adds its own keys, groups of two heads took 7 to 10 % longer, so this backward has its own. */
#ifndef SKL_CUDA_SM90_ATTENTION_GROUP_BACKWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_GROUP_BACKWARD_CUH

#include "cuda/sm90/attention/group_heads.cuh"
#include "cuda/sm90/attention/query_backward.cuh"

namespace sm90
{

struct group_backward_block {
    static constexpr int DQ_GROUPS = CONSUMERS, DK_WARPGROUP = DQ_GROUPS, PRODUCER_WARPGROUP = DQ_GROUPS + 1;
    static constexpr int THREADS = 128 * (DQ_GROUPS + 2), ROWS = TILE_QUERIES;
};

constexpr int DK_DIMS = 64; /* dimensions of dk at a time */

/* Row stats of a query. */
struct alignas(16) student_stats {
    float lse, low, grad; /* LSE in base 2 as two floats; upstream gradient divided by the unit, times 2^-low */
    int key_begin;        /* first visible key, counted as in row_stream */
};

template <int DIM_S> struct group_backward_smem {
    smem_rows<DIM_S / 64> queries_s;
    row_stage<DIM_S> keys_s;
    unsigned char g[TILE_QUERIES][128]; /* [query][key] */
    unsigned char dk[DK_DIMS / 32][STAGE_KEYS][128];
    student_stats stats[TILE_QUERIES];
    float poison[STAGE_KEYS]; /* NaN for non-finite keys of the student, else 0 */
    group_barriers barriers;
    uint64_t sanitized, g_full, g_empty;
    block_tile tile; /* this and the next members are in shared memory to save registers */
    int count;
    stage_schedule keys;
    int key_ends[TILE_QUERIES]; /* ends of visible keys; student_stats has the begins: every byte counts here */
    float unit;                 /* unit of G */
};

template <int DIM_S> constexpr int GROUP_FIXED_SIZE = (sizeof(group_backward_smem<DIM_S>) + 1023) / 1024 * 1024;

/* ---- dq ----------------------------------------------------------------------------------------------------- */

/* Prepares the student's queries as prepare_queries of the fused backward does. */
template <typename ELEMENT, int DIM_S>
__device__ inline void prepare_student_queries(const backward_params &params, group_backward_smem<DIM_S> &smem)
{
    const int row = (int)(threadIdx.x / 2);
    const block_tile &tile = smem.tile;
    const bool exists = row < smem.count;
    const bool finite = sanitize_row<ELEMENT, DIM_S>(smem.queries_s.slabs, row, exists);
    if (threadIdx.x % 2 == 0) {
        const int64_t query = tile.first + min(row, smem.count - 1);
        const skl_lse2 lse = split_lse2(row_stat(params, 1, tile.sequence, tile.head, query));
        const float grad = row_stat(params, 3, tile.sequence, tile.head, query) / smem.unit;
        smem.stats[row] = {finite ? lse.value : NAN, lse.low, fmaf(grad, -lse.low * SKL_LN2, grad),
                           smem.stats[row].key_begin};
    }
    fence_proxy_async();
    named_barrier_sync(1 + (int)(threadIdx.x / 128), 128);
}

template <typename ELEMENT, int DIM_T, int DIM_S, bool CAPPED> struct group_dq_warpgroup {
    const backward_params &params;
    group_backward_smem<DIM_S> &smem;
    head_products<ELEMENT, DIM_T, STAGE_KEYS, CAPPED> teacher;
    int warpgroup; /* warp-uniform */
    float dq[DIM_S / 8][4];
    row_sums sums[2];

    /* G of a stage as A operands. MASKED: masked pairs are 0. */
    template <bool MASKED, logits_kind LOGITS>
    __device__ void compute_g(uint32_t (&g)[4][4], const stage_logits &p, const stage_logits &y, int n)
    {
        const int first = MASKED ? smem.keys.stage_at(n) * STAGE_KEYS : 0;
        const float scale = params.b.scale;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = acc_row<1>(0, half);
            const float4 stats = load_shared(*(const float4 *)(const void *)&smem.stats[row]);
            const range32 sees =
                MASKED && row < smem.count ? range32{__float_as_int(stats.w), smem.key_ends[row]} : range32{};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float pair[2];
#pragma unroll
                for (int parity = 0; parity < 2; parity++) {
                    const int column = acc_column(i, parity), e = half * 2 + parity;
                    const float minus_lse = MASKED ? smem.poison[column] - stats.x : -stats.x;
                    log_probability log_s = {fmaf(y[i][e], scale, minus_lse), 1.0F};
                    if (LOGITS != logits_kind::PLAIN)
                        log_s = capped_log_probability<LOGITS>(y[i][e], params.b, minus_lse);
                    const float s = ex2(log_s.value);
                    const bool seen = !MASKED || (first + column >= sees.begin && first + column < sees.end);
                    if (seen)
                        add_probabilities(sums[half], p[i][e], s, log_s.value);
                    if (LOGITS == logits_kind::PLAIN) /* one expression: ptxas spills if it is split */
                        pair[parity] = seen ? (s - p[i][e]) * stats.z : 0.0F;
                    else
                        pair[parity] = seen ? (s - p[i][e]) * log_s.slope * stats.z : 0.0F;
                }
                g[i / 2][i % 2 * 2 + half] = pack(pair[0], pair[1], ELEMENT());
            }
        }
    }

    /* p = P of a stage; y = what issue_student(y) issues, which runs during the last exponentials. Calls
     * after_first() when the wgmmas that were issued before the stage have completed. */
    template <typename ISSUE_STUDENT, typename AFTER_FIRST>
    __device__ void run_heads(stage_logits &p, stage_logits &y, ISSUE_STUDENT issue_student, AFTER_FIRST after_first)
    {
        stage_logits x;
        const int count = teacher.group.count;
        float even[2], odd[2];
#pragma unroll
        for (int e = 0; e < STAGE_KEYS / 2; e++)
            p[e / 4][e % 4] = 0.0F;
        teacher.run_head(y, even, 0);
        after_first();
        int n = 0;
        if (count % 2 != 0) { /* an even number is left */
            teacher.template add<false>(p, y, 0, even);
            teacher.run_head(y, even, 1);
            n = 1;
        }
#pragma unroll 1
        for (; n < count; n += 2) {
            teacher.issue(x, n + 1);
            teacher.load_lse(odd, n + 1);
            teacher.template add<false>(p, y, n, even);
            wgmma_wait<0>();
            teacher.complete(x, n + 1);
            const bool more = n + 2 < count;
            if (more) {
                teacher.issue(y, n + 2);
                teacher.load_lse(even, n + 2);
            } else {
                issue_student(y);
            }
            teacher.template add<false>(p, x, n + 1, odd);
            wgmma_wait<0>();
            if (more)
                teacher.complete(y, n + 2);
        }
        fence_operand(y);
    }

    template <bool MASKED> __device__ void add_stage(int n)
    {
        const int lane = (int)(threadIdx.x % 32);
        stage_logits p, y;
        run_heads(
            p, y,
            [&](stage_logits &to) {
                barrier_wait(MASKED ? smem.sanitized : smem.barriers.keys_s_full, n % 2);
                wgmma_fence();
                issue_product<ELEMENT, DIM_S, STAGE_KEYS>(
                    to, k_major_operand(&smem.queries_s) + warpgroup * (64 * 128 / 16),
                    k_major_operand(&smem.keys_s));
                wgmma_commit();
            },
            [&] { barrier_arrive_if(smem.barriers.keys_s_empty, lane == 0 && n > 0); }); /* dq of the last stage */
        uint32_t g[4][4];
        if (!CAPPED)
            compute_g<MASKED, logits_kind::PLAIN>(g, p, y, n);
        else if (polynomial_covers(y, params.b)) /* masked or not, as for the teacher: equal inputs have G = 0 */
            compute_g<MASKED, logits_kind::POLYNOMIAL>(g, p, y, n);
        else
            compute_g<MASKED, logits_kind::EXACT>(g, p, y, n);
        wgmma_fence();
        const uint32_t k = mn_major_operand(&smem.keys_s, STAGE_KEYS * 128);
        wgmma_steps<true, STAGE_KEYS / 16>(dq, g, k, 1, ELEMENT());
        wgmma_commit();
        barrier_wait(smem.g_empty, n % 2 ^ 1);
        const int thread = (int)thread_again(); /* the address then needs no register in the rest of the loop */
        const int row = thread / 32 * 16 + thread % 16;
        write_g(smem.g, g, thread % 32, row);
        fence_proxy_async();
        barrier_arrive(smem.g_full); /* every lane arrives: each has read poison, too */
    }

    __device__ void run()
    {
#pragma unroll
        for (int e = 0; e < DIM_S / 2; e++)
            dq[e / 4][e % 4] = 0.0F;
        sums[0] = sums[1] = {};
        add_all_stages(*this, smem.keys);
        fence_operand(dq);
    }

    __device__ void store() const
    {
        const dq_output out = dq_output::of(side_of(params), smem.tile);
        if (params.kl_in_backward)
            write_one_pass_rows(params, smem.tile, smem.count, sums);
        out.store<ELEMENT>(smem, dq, out.rows.data != NULL);
    }
};

/* ---- dk ----------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM_S>
__device__ inline void run_group_dk(group_backward_smem<DIM_S> &smem, const group_maps &maps, bool with_dk,
                                    int key_head, float scale)
{
    const bool is_leader = warp_in_warpgroup() == 0; /* the warp that issues TMA */
    const stage_schedule keys = warp_uniform(smem.keys);
    const int batch = warp_uniform((int)smem.tile.sequence.batch);
    const uint32_t g = mn_major_operand(smem.g, 0);
    for (int n = 0; n < keys.stages; n++) {
        barrier_wait(smem.g_full, n % 2);
#pragma unroll
        for (int c = 0; c < DIM_S / DK_DIMS && with_dk; c++) {
            float dk[DK_DIMS / 8][4];
            multiply_dk<ELEMENT, TILE_QUERIES>(dk, g, mn_major_operand(smem.queries_s.slabs[c], 0));
            if (is_leader)
                tma_wait_read();
            named_barrier_sync(1 + group_backward_block::DK_WARPGROUP, 128);
            write_dk<DK_DIMS>(smem.dk, dk, scale * smem.unit);
            fence_proxy_async();
            named_barrier_sync(1 + group_backward_block::DK_WARPGROUP, 128);
            if (is_leader) {
#pragma unroll
                for (int slab = 0; slab < DK_DIMS / 32; slab++)
                    tma_reduce_add(maps.sums, c * DK_DIMS + slab * 32, keys.row_at(n), key_head, batch,
                                   smem.dk[slab]);
                tma_commit();
            }
        }
        __syncwarp(); /* all lanes have passed the wait before G can be filled again */
        if (threadIdx.x % 32 == 0)
            barrier_arrive(smem.g_empty);
    }
    if (is_leader)
        tma_wait_read();
}

/* Executed by one warp. Only masked stages need it: see logit_gradients.cuh. */
template <typename ELEMENT, int DIM_S> __device__ inline void sanitize_stages(group_backward_smem<DIM_S> &smem)
{
    for (int n = 0; n < smem.keys.masked_stages; n++) {
        barrier_wait(smem.barriers.keys_s_full, n % 2);
        if (n > 0) /* all lanes have read the poison of the last stage; it is complete since its keys were replaced */
            barrier_wait(smem.g_full, (n - 1) % 2);
        for (int key = (int)read_lane(); key < STAGE_KEYS; key += 32)
            smem.poison[key] = 0.0F;
        __syncwarp();
        sanitize_rows<ELEMENT, DIM_S>(smem.keys_s, smem.poison);
        fence_proxy_async();
        barrier_arrive(smem.sanitized); /* every lane, because every lane has written rows or poison */
    }
}

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM_T, int DIM_S, bool CAPPED>
__global__ void __launch_bounds__(group_backward_block::THREADS, 1)
    group_backward_kernel(const __grid_constant__ backward_params params, const __grid_constant__ group_maps maps,
                          int depth)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    group_backward_smem<DIM_S> &smem = *(group_backward_smem<DIM_S> *)(void *)raw;
    block_tile assigned;
    if (!assigned.find(params, 1, (unsigned)params.head_group))
        return;
    if (threadIdx.x == 0)
        smem.tile = assigned;
    __syncthreads();
    const block_tile &tile = smem.tile;
    if (threadIdx.x < 32)
        smem.unit = find_g_unit(params, tile, ELEMENT());
    const row_stream keys = keys_of_tile(params, tile, 1);
    if (threadIdx.x < TILE_QUERIES) {
        const range32 visible = keys.band.of((int)threadIdx.x);
        smem.stats[threadIdx.x].key_begin = visible.begin;
        smem.key_ends[threadIdx.x] = visible.end;
    }
    if (threadIdx.x == 0) {
        set_rows(smem, tile, keys);
        smem.barriers.init();
        barrier_init(smem.sanitized, 32);
        barrier_init(smem.g_full, CONSUMERS * 128);
        barrier_init(smem.g_empty, 4);
        barrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = warpgroup_index(), head = warp_uniform((int)smem.tile.head);
    const teacher_group group = warp_uniform(teacher_group::of(params, head));
    const auto teacher = teacher_smem<DIM_T, STAGE_KEYS>::of(raw + GROUP_FIXED_SIZE<DIM_S>, group.count, 0);
    const int key_head_s = head / params.b.heads_per_key;
    if (warpgroup == group_backward_block::PRODUCER_WARPGROUP) {
        reg_dealloc<32>();
        if (warp_in_warpgroup() == 0) {
            const stage_schedule keys = warp_uniform(smem.keys);
            const group_loader<DIM_T, DIM_S, STAGE_KEYS> loader = {maps,
                                                                   smem.barriers,
                                                                   teacher,
                                                                   smem.queries_s.slabs,
                                                                   smem.keys_s.slabs,
                                                                   group,
                                                                   depth,
                                                                   warp_uniform((int)smem.tile.sequence.batch),
                                                                   head,
                                                                   key_head_s};
            loader.load_queries(warp_uniform((int)(smem.tile.sequence.query_begin + smem.tile.first)));
            slot_state slot = {0, 0};
            for (int n = 0; n < keys.stages; n++) {
                loader.load_heads(slot, keys.row_at(n));
                loader.load_student_keys(n, keys.row_at(n));
            }
        } else if (warp_in_warpgroup() == 1) {
            sanitize_stages<ELEMENT, DIM_S>(smem);
        }
    } else if (warpgroup == group_backward_block::DK_WARPGROUP) {
        reg_dealloc<64>();
        run_group_dk<ELEMENT, DIM_S>(smem, maps, params.dk_sums.data != NULL, key_head_s, params.problem.scale_s);
    } else {
        reg_alloc<208>();
        barrier_wait(smem.barriers.queries_full, 0);
        prepare_student_queries<ELEMENT, DIM_S>(params, smem);
        const int rows[2] = {acc_row<1>(0, 0), acc_row<1>(0, 1)};
        group_dq_warpgroup<ELEMENT, DIM_T, DIM_S, CAPPED> consumer = {
            params,
            smem,
            {teacher,
             group,
             smem.barriers,
             k_major_operand(teacher.query_rows) + warpgroup * (64 * 128 / 16),
             depth,
             params.a,
             {teacher_lse::of(params, smem.tile, group.first, rows[0]),
              teacher_lse::of(params, smem.tile, group.first, rows[1])},
             {smem.stats[rows[0]].low, smem.stats[rows[1]].low},
             {0, 0},
             {0, 0}},
            warpgroup};
        consumer.run();
        consumer.store();
    }
#endif
}

/* ---- Launch ------------------------------------------------------------------------------------------------- */

/* Bytes of shared memory of a block, and in *depth the slots of teacher keys; 0: it does not fit. */
template <int DIM_T, int DIM_S> inline int64_t group_backward_size(int64_t heads, int64_t smem_max, int *depth)
{
    typedef teacher_smem<DIM_T, STAGE_KEYS> teacher;
    *depth = teacher::depth(GROUP_FIXED_SIZE<DIM_S>, heads, smem_max, 1);
    return *depth == 0 ? 0 : GROUP_FIXED_SIZE<DIM_S> + heads * teacher::HEAD_SIZE + *depth * teacher::STAGE_SIZE;
}

template <typename ELEMENT, int DIM_T, int DIM_S, bool CAPPED>
cudaError_t launch_group_backward(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const backward_params kernel_params = backward_params_of(params, launch);
    const skl_problem *const p = &params->problem;
    group_maps maps;
    int depth;
    const int64_t size = group_backward_size<DIM_T, DIM_S>(skl_group_size(p), launch->smem_per_block, &depth);
    if (size == 0 || !encode_group_inputs(&maps, kernel_params, STAGE_KEYS, ELEMENT()) ||
        !encode_dk_sums(&maps.sums, kernel_params, STAGE_KEYS))
        return encode_error();
    return with_dk_sums(kernel_params, [&] {
        record_launch(kernel, CAPPED ? SKL_VARIANT_FUSED_GROUPS_SOFTCAP : SKL_VARIANT_FUSED_GROUPS, 1);
        return launch_blocks(group_backward_kernel<ELEMENT, DIM_T, DIM_S, CAPPED>,
                             grid_of(p->batch, p->heads_s, skl_ceil_div(p->len_q, TILE_QUERIES)),
                             group_backward_block::THREADS, (size_t)size, kernel_params, maps, depth);
    });
}

} // namespace sm90

#endif
