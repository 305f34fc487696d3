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
 * (docs/lab/2026-11-17-joint-backward.md). Shared memory has room for one buffer of G.
 *
 * The kernel, the dk warpgroup and the loads are those of fused_backward.cuh with respect to A, where B has
 * gradients, too. The dq warpgroups are separate: they have two G and two dq, and logits of KEYS keys at a time. No
 * measurement says what one body for both would cost; computed row by row, G takes as many instructions. */
#ifndef SKL_CUDA_SM90_ATTENTION_JOINT_BACKWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_JOINT_BACKWARD_CUH

#include "cuda/sm90/attention/fused_backward.cuh"

namespace sm90
{

/* The wrt argument is A, the other one B. */
template <int D> struct joint_shape : dq_dk_block<2, 104> {
    static constexpr int DIM = D, OTHER_DIM = D, GRADIENTS = ARGUMENTS;
    static constexpr bool WIDE = DIM > 64; /* registers and shared memory are short */
    static constexpr bool WIDE_OTHER = false;
    static constexpr int KEYS = WIDE ? 32 : STAGE_KEYS; /* keys of a stage whose logits are in registers together */
    static constexpr int DK_DIMS = WIDE ? 32 : 64;      /* dimensions of dk in a buffer */
    static constexpr int DK_PRODUCT_DIMS = DIM;         /* dimensions of dk in registers */
    static constexpr int DK_BUFFERS = WIDE ? 2 : 1, G_BUFFERS = WIDE ? 1 : 2;
    static constexpr int REG_DIMS = 0, OTHER_SLABS = SLABS_OF<DIM>; /* all queries are in shared memory */
    static constexpr int FIXED = ARGUMENTS * (SLABS_OF<DIM> + G_BUFFERS) * ROWS * 128 +
                                 DK_BUFFERS * DK_DIMS / 32 * STAGE_KEYS * 128 + ROWS * (int)sizeof(row_stats) + 1024;
    static constexpr int DEPTH = depth_for(ARGUMENTS * (int)sizeof(row_stage<DIM>), FIXED, 6);
    typedef long_sums<1> totals_type; /* there is no KL to add up */
};

/* ---- dq ----------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, typename SHAPE> struct joint_dq_warpgroup {
    typedef ELEMENT element;
    typedef SHAPE shape;
    static constexpr bool OF_B = false;
    static constexpr int DIM = SHAPE::DIM;
    const backward_params &params;
    fused_backward_smem<SHAPE> &smem;
    int warpgroup; /* warp-uniform */
    float dq_a[DIM / 8][4], dq_b[DIM / 8][4];

    typedef float logits[SHAPE::KEYS / 8][4];     /* of KEYS keys */
    typedef uint32_t g_frag[SHAPE::KEYS / 16][4]; /* G of KEYS keys as A operands */

    __device__ void load_queries(const block_tile &)
    {
    }

    __device__ void issue_products(logits &x, const void *queries, const void *keys, int first_key)
    {
        wgmma_slabs<ELEMENT, DIM, SHAPE::ROWS, STAGE_KEYS>(x, k_major_operand(queries) + warpgroup * (64 * 128 / 16),
                                                           k_major_operand(keys) + first_key * 128 / 16);
    }

    /* G of KEYS keys. MASKED: masked pairs are 0. The logits are only read: ptxas serialises wgmmas whose
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

    __device__ void issue_dq(float (&dq)[DIM / 8][4], const g_frag &g, const void *keys, int first_key)
    {
        const uint32_t k = mn_major_operand(keys, STAGE_KEYS * 128) + first_key * 128 / 16;
        wgmma_steps<true, SHAPE::KEYS / 16>(dq, g, k, 1, ELEMENT());
    }

    /* Adds 64 x KEYS pairs of stage n. */
    template <bool MASKED> __device__ void add_keys(int n, int first_key)
    {
        const auto &stage = smem.stages[n % smem.DEPTH];
        logits x, y;
        wgmma_fence();
        issue_products(x, &smem.wrt_queries, &stage.wrt, first_key);
        issue_products(y, &smem.other_queries, &stage.other, first_key);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(x);
        fence_operand(y);
        g_frag g_a, g_b;
        compute_g<MASKED>(g_a, g_b, x, y, n, first_key);
        wgmma_fence();
        issue_dq(dq_a, g_a, &stage.wrt, first_key);
        issue_dq(dq_b, g_b, &stage.other, first_key);
        wgmma_commit();
        const int buffer = n % SHAPE::G_BUFFERS, phase = n / SHAPE::G_BUFFERS % 2 ^ 1;
        if (first_key == 0)
            barrier_wait(smem.g_empty[buffer][WRT], phase);
        write_g(smem.g[buffer][WRT], g_a, threadIdx.x, first_key);
        if (first_key == 0)
            barrier_wait(smem.g_empty[buffer][OTHER], phase);
        write_g(smem.g[buffer][OTHER], g_b, threadIdx.x, first_key);
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
#pragma unroll
        for (int e = 0; e < DIM / 2; e++)
            dq_a[e / 4][e % 4] = dq_b[e / 4][e % 4] = 0.0F;
        add_all_stages(*this, smem.keys);
        fence_operand(dq_a);
        fence_operand(dq_b);
    }

    __device__ void store(const block_tile &tile) const
    {
        store_dq<ELEMENT>(side_of(params), tile, smem.count, dq_a, smem.unit);
        store_dq<ELEMENT>(params.teacher_side ? skl_student_of(&params.problem, &params.call)
                                              : skl_teacher_of(&params.problem, &params.call),
                          tile, smem.count, dq_b, smem.unit);
    }
};

/* ---- Launch ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM>
cudaError_t launch_joint_tiles(const char *kernel, const backward_params &of_a, const backward_params &of_b)
{
    typedef joint_dq_warpgroup<ELEMENT, joint_shape<DIM>> dq_type;
    fused_backward_maps<ARGUMENTS> maps;
    if (!encode_all(&maps, of_a, dq_type::shape::ROWS, ELEMENT()) || !encode_dk_sums(&maps.sums[OTHER], of_b))
        return encode_error();
    return with_dk_sums(of_a, [&] {
        return with_dk_sums(of_b, [&] {
            record_launch(kernel, SKL_VARIANT_JOINT, 1);
            return launch_fused_tiles<fused_backward<dq_type>>(of_a, maps);
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
