/* Joint backward on Hopper's tensor cores (sm_90a): dq and dk with respect to both arguments in one pass over the
 * keys. 16-bit types, one teacher head per student head, head sizes of up to DIM = 64 or 128. It reads the KL of each
 * row.
 *
 *   P = 2^(X - LSE_a)   S = 2^(Y - LSE_b)   G_a = g P (log P - log S - KL)   G_b = g (S - P)
 *   dq_a = scale_a G_a K_a   dk_a = scale_a G_a^T Q_a   dq_b, dk_b: the same
 *
 * Six products instead of the eight of two fused backwards, two exponentials per pair instead of three.
 *
 * Bound: shared memory, 2,176 clocks per 128 queries x 64 keys at DIM = 64 and 4,350 at 128; tensor cores 1,536 and
 * 3,072, exponentials 1,024.
 *
 *   block      2 dq warpgroups of 64 queries and 1 dk warpgroup, which is also the producer; one block per SM
 *   registers  200 per dq thread: logits, both dq, both G and 24 for the rest; 104 per dk thread: one dk of a stage
 *   shared     Q of both arguments, DEPTH stages of 64 keys of both, both G, one or two buffers for slices of dk, f32
 *
 *   dq warpgroups   stage n       X, Y  ->  exponentials  ->  both dq += G K, both G to shared memory
 *   dk warpgroup    stage n - 1   dk_a = G_a^T Q_a  ->  shared memory  ->  global memory (TMA adds); then dk_b
 *
 * WIDE, DIM = 128: both dq take 128 registers. So logits are those of 32 keys at a time, G takes their registers, and
 * the next logits wait for dq. With logits of 64 keys a dk thread would have 56 registers, for 32 dimensions at a
 * time: its many small wgmmas between those of the dq warpgroups took twice as long as all the rest
 * (docs/dives/backward.md). Shared memory has room for one buffer of G.
 *
 * The rest is as in fused_backward.cuh. On the loader and dk loop of the fused backward this one took 2 to 3 %
 * longer, so it has its own. */
#ifndef SKL_CUDA_SM90_ATTENTION_JOINT_BACKWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_JOINT_BACKWARD_CUH

#include "cuda/sm90/attention/joint_backward_stages.cuh"

namespace sm90
{

__host__ __device__ inline skl_side side_of_argument(const skl_cuda_params &params, int which)
{
    const bool teacher = (params.problem.direction == SKL_KL_REVERSE) == (which == OF_B);
    return teacher ? skl_teacher_of(&params.problem, &params.call) : skl_student_of(&params.problem, &params.call);
}

template <typename ELEMENT, typename SHAPE> struct joint_backward {
    typedef joint_backward_smem<SHAPE> memory;
    static constexpr int GROUPS = SHAPE::DQ_GROUPS, REGS = SHAPE::DQ_REGS, PRODUCER_REGS = SHAPE::DK_REGS;
    static constexpr int DIM = SHAPE::DIM;
    const backward_params &params;
    const joint_backward_maps &maps;
    memory &smem;
    int warpgroup; /* warp-uniform */
    float dq_a[DIM / 8][4], dq_b[DIM / 8][4];

    typedef float logits[SHAPE::KEYS / 8][4];     /* logits of KEYS keys */
    typedef uint32_t g_frag[SHAPE::KEYS / 16][4]; /* G of KEYS keys as A operands */

    __device__ static bool find(const backward_params &params, memory &, block_tile &tile, row_stream &keys)
    {
        if (!tile.find(params, 1, (unsigned)params.head_group))
            return false;
        keys = keys_of_tile(params, tile, 1);
        return true;
    }

    __device__ static void start(const backward_params &, memory &smem, const block_tile &tile,
                                 const row_stream &keys)
    {
        smem.tile = tile;
        set_rows(smem, tile, keys);
        barrier_init(smem.queries_full, 1);
        for (int stage = 0; stage < smem.DEPTH; stage++) {
            barrier_init(smem.full[stage], 1);
            barrier_init(smem.sanitized[stage], 128);
        }
        for (int buffer = 0; buffer < SHAPE::G_BUFFERS; buffer++) {
            barrier_init(smem.g_full[buffer], SHAPE::DQ_GROUPS * 128);
            for (int which = 0; which < ARGUMENTS; which++)
                barrier_init(smem.g_empty[buffer][which], 4);
        }
    }

    /* ---- dk ------------------------------------------------------------------------------------------------- */

    __device__ void produce()
    {
        const block_tile &tile = smem.tile;
        const int head = warp_uniform((int)tile.head);
        const joint_loader<SHAPE> loader = {smem,
                                            maps,
                                            warp_uniform(smem.keys),
                                            warp_uniform((int)tile.sequence.batch),
                                            head,
                                            {head / params.a.heads_per_key, head / params.b.heads_per_key}};
        if (warp_index() == GROUPS * 4) {
            loader.load_queries(warp_uniform((int)(tile.sequence.query_begin + tile.first)));
            for (int n = 0; n < smem.DEPTH; n++)
                loader.load_stage(n);
        }
        add_dk(loader, side_of_argument(params, OF_A).scale, side_of_argument(params, OF_B).scale);
    }

    __device__ void add_dk(const joint_loader<SHAPE> &loader, float scale_a, float scale_b)
    {
        constexpr int DK_DIMS = SHAPE::DK_DIMS, SLICES = SHAPE::DIM / DK_DIMS;
        const int warp = warp_in_warpgroup();
        float dk[SHAPE::DIM / 8][4];
        if (loader.keys.masked_stages > 0)
            sanitize_stage<ELEMENT>(smem, 0);
        for (int n = 0; n < loader.keys.stages; n++) {
            const int g_buffer = n % SHAPE::G_BUFFERS;
            if (n + 1 < loader.keys.masked_stages)
                sanitize_stage<ELEMENT>(smem, n + 1);
            barrier_wait(smem.g_full[g_buffer], n / SHAPE::G_BUFFERS % 2);
            if (warp == 0 && n > 0) /* G of stage n is full, so both dq warpgroups have released stage n - 1 */
                loader.load_stage(n + smem.DEPTH - 1);
#pragma unroll
            for (int which = 0; which < ARGUMENTS; which++) {
                multiply_dk<ELEMENT, SHAPE::ROWS>(dk, mn_major_operand(smem.g[g_buffer][which], 0),
                                                  mn_major_operand(smem.queries[which].slabs, SHAPE::ROWS * 128));
                if (threadIdx.x % 32 == 0)
                    barrier_arrive(smem.g_empty[g_buffer][which]);
#pragma unroll
                for (int slice = 0; slice < SLICES; slice++) {
                    const int buffer = (which * SLICES + slice) % SHAPE::DK_BUFFERS;
                    tma_wait_read<SHAPE::DK_BUFFERS - 1>();
                    __syncwarp();
                    write_dk<DK_DIMS>(smem.dk[buffer], *(const float(*)[DK_DIMS / 8][4]) & dk[slice * DK_DIMS / 8],
                                      which == OF_A ? scale_a : scale_b);
                    fence_proxy_async();
                    __syncwarp();
                    reduce_add_dk(maps.sums[which], smem.dk[buffer], slice * DK_DIMS, loader.keys, n, warp,
                                  loader.key_head[which], loader.batch);
                }
            }
        }
        tma_wait_read();
    }

    /* ---- dq ------------------------------------------------------------------------------------------------- */

    /* A query that is not finite in one argument makes G of both NaN. */
    __device__ bool sanitize_query(int row, int count) const
    {
        bool finite = true;
#pragma unroll
        for (int which = 0; which < ARGUMENTS; which++)
            finite = sanitize_row<ELEMENT, DIM>(smem.queries[which].slabs, row, row < count) && finite;
        return finite;
    }

    __device__ void set_stats(row_stats &stats, const float (&stat)[4], bool finite) const
    {
        stats = {finite ? lse2_of(stat[0]) : NAN, lse2_of(stat[1]), stat[2], stat[3]};
    }

    template <int WHICH> __device__ void issue_products(logits &x, int stage, int first_key)
    {
        const uint32_t q = k_major_operand(&smem.queries[WHICH]) + warpgroup * (64 * 128 / 16);
        const uint32_t k = k_major_operand(&smem.stages[stage][WHICH]) + first_key * 128 / 16;
        wgmma_slabs<ELEMENT, DIM, SHAPE::ROWS, STAGE_KEYS>(x, q, k);
    }

    /* G of KEYS keys. MASKED: masked pairs are 0. The logits are only read: ptxas serializes wgmmas whose
     * accumulators are written by other instructions. Column by column, so that G takes the registers of logits. */
    template <bool MASKED>
    __device__ void compute_g(g_frag &g_a, g_frag &g_b, const logits &x, const logits &y, int n, int first_key)
    {
        const int first = MASKED ? smem.keys.stage_at(n) * STAGE_KEYS : 0;
        row_stats queries[2];
        range32 sees[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = acc_row<1>(0, half);
            queries[half] = load_row_stats(smem.stats[row]);
            sees[half] = MASKED && row < smem.count ? smem.visible.of(row) : range32{};
        }
#pragma unroll
        for (int i = 0; i < SHAPE::KEYS / 8; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const row_stats &query = queries[half];
                float of_a[2], of_b[2];
#pragma unroll
                for (int parity = 0; parity < 2; parity++) {
                    const int column = first_key + acc_column(i, parity), e = half * 2 + parity;
                    const float minus_lse_a =
                        MASKED ? smem.poison[n % smem.DEPTH][column] - query.lse_a : -query.lse_a;
                    const float log_p_a = fmaf(x[i][e], params.a.scale, minus_lse_a);
                    const float log_p_b = fmaf(y[i][e], params.b.scale, -query.lse_b);
                    const float p_a = ex2(log_p_a), p_b = ex2(log_p_b);
                    const bool seen =
                        !MASKED || (first + column >= sees[half].begin && first + column < sees[half].end);
                    const float ratio = fmaf(SKL_LN2, log_p_a - log_p_b, -query.kl);
                    of_a[parity] = seen ? p_a * ratio * query.grad : 0.0F;
                    of_b[parity] = seen ? (p_b - p_a) * query.grad : 0.0F;
                }
                g_a[i / 2][i % 2 * 2 + half] = pack(of_a[0], of_a[1], ELEMENT());
                g_b[i / 2][i % 2 * 2 + half] = pack(of_b[0], of_b[1], ELEMENT());
            }
    }

    template <int WHICH> __device__ void issue_dq(float (&dq)[DIM / 8][4], const g_frag &g, int stage, int first_key)
    {
        const uint32_t k = mn_major_operand(&smem.stages[stage][WHICH], STAGE_KEYS * 128) + first_key * 128 / 16;
        wgmma_steps<true, SHAPE::KEYS / 16>(dq, g, k, 1, ELEMENT());
    }

    /* Adds 64 x KEYS pairs of stage n. */
    template <bool MASKED> __device__ void add_keys(int n, int first_key)
    {
        const int stage = n % smem.DEPTH;
        logits x, y;
        wgmma_fence();
        issue_products<OF_A>(x, stage, first_key);
        issue_products<OF_B>(y, stage, first_key);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(x);
        fence_operand(y);
        g_frag g_a, g_b;
        compute_g<MASKED>(g_a, g_b, x, y, n, first_key);
        wgmma_fence();
        issue_dq<OF_A>(dq_a, g_a, stage, first_key);
        issue_dq<OF_B>(dq_b, g_b, stage, first_key);
        wgmma_commit();
        const int buffer = n % SHAPE::G_BUFFERS, phase = n / SHAPE::G_BUFFERS % 2 ^ 1;
        const int lane = (int)(threadIdx.x % 32), row = (int)(threadIdx.x / 32) * 16 + lane % 16;
        if (first_key == 0)
            barrier_wait(smem.g_empty[buffer][OF_A], phase);
        write_g(smem.g[buffer][OF_A], g_a, lane, row, first_key);
        if (first_key == 0)
            barrier_wait(smem.g_empty[buffer][OF_B], phase);
        write_g(smem.g[buffer][OF_B], g_b, lane, row, first_key);
    }

    /* Adds the 64 x 64 pairs of stage n. */
    template <bool MASKED> __device__ void add_stage(int n)
    {
        const int stage = n % smem.DEPTH, buffer = n % SHAPE::G_BUFFERS;
        barrier_wait(MASKED ? smem.sanitized[stage] : smem.full[stage], n / smem.DEPTH % 2);
#pragma unroll
        for (int first_key = 0; first_key < STAGE_KEYS; first_key += SHAPE::KEYS) {
            add_keys<MASKED>(n, first_key);
            if (first_key + SHAPE::KEYS < STAGE_KEYS)
                wgmma_wait<0>(); /* the next logits take the registers of G */
        }
        fence_proxy_async();
        __syncwarp();
        if (MASKED)
            barrier_arrive(smem.g_full[buffer]); /* every lane: it has read poison, which is overwritten next */
        else if (threadIdx.x % 32 == 0)
            barrier_arrive_count(smem.g_full[buffer], 32);
        if (SHAPE::WIDE)
            wgmma_wait<0>();
    }

    __device__ void run()
    {
        barrier_wait(smem.queries_full, 0);
        prepare_queries(*this);
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            dq_a[e / 4][e % 4] = dq_b[e / 4][e % 4] = 0.0F;
        add_all_stages(*this, smem.keys);
        fence_operand(dq_a);
        fence_operand(dq_b);
    }

    __device__ void store() const
    {
        dq_output::of(side_of_argument(params, OF_A), smem.tile).template store<ELEMENT>(smem, dq_a);
        dq_output::of(side_of_argument(params, OF_B), smem.tile).template store<ELEMENT>(smem, dq_b);
    }
};

/* ---- Launch ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT>
inline bool encode_joint(joint_backward_maps *maps, const backward_params &of_a, const backward_params &of_b,
                         ELEMENT element)
{
    bool encoded = true;
    for (int which = 0; which < ARGUMENTS; which++) {
        const backward_params &params = which == OF_A ? of_a : of_b;
        const skl_problem *const p = &params.problem;
        encoded = encoded && encode_queries(&maps->queries[which], p, wrt_of(params), TILE_QUERIES, element) &&
                  encode_keys(&maps->keys[which], p, wrt_of(params), STAGE_KEYS, element) &&
                  encode_dk_sums(&maps->sums[which], params);
    }
    return encoded;
}

template <typename ELEMENT, int DIM>
cudaError_t launch_joint_tiles(const char *kernel, const backward_params &of_a, const backward_params &of_b)
{
    joint_backward_maps maps;
    if (!encode_joint(&maps, of_a, of_b, ELEMENT()))
        return encode_error();
    return with_dk_sums(of_a, [&] {
        return with_dk_sums(of_b, [&] {
            record_launch(kernel, SKL_VARIANT_JOINT, 1);
            return launch_query_tiles<joint_backward<ELEMENT, joint_shape<DIM>>>(of_a, maps);
        });
    });
}

template <typename ELEMENT>
cudaError_t launch_joint_backward(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const backward_params of_student = backward_params_of(params, launch);
    backward_params of_teacher = of_student;
    of_teacher.teacher_side = 1;
    of_teacher.dk_sums = dk_sums_of(params, true, launch->sums_t_at);
    const bool reverse = params->problem.direction == SKL_KL_REVERSE;
    const backward_params &of_a = reverse ? of_student : of_teacher, &of_b = reverse ? of_teacher : of_student;
    return skl_max(params->problem.dim_t, params->problem.dim_s) > 64
               ? launch_joint_tiles<ELEMENT, 128>(kernel, of_a, of_b)
               : launch_joint_tiles<ELEMENT, 64>(kernel, of_a, of_b);
}

} // namespace sm90

#endif
