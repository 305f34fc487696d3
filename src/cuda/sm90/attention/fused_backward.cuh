/* Fused backward on Hopper's tensor cores (sm_90a): dq and dk with respect to one argument, and with respect to B
 * also the KL, in one pass over the keys. 16-bit types, one teacher head per student head. DIM is the head size of
 * the wrt argument, up to 128, and OTHER_DIM that of the other one, up to 256.
 *
 * Bound: tensor cores and shared memory nearly equally: 2,048 and 2,250 clocks per 128 queries x 64 keys at
 * DIM = OTHER_DIM = 128. Exponentials take 1,024.
 *
 *   block      2 dq warpgroups of 64 queries and 1 dk warpgroup, which is also the producer; one block per SM
 *   registers  200 per dq thread: Q of the other argument (OTHER_DIM / 4), logits of a stage (64), dq (DIM / 2), G
 *              (16), 24 for the rest; 104 per dk thread: dk of a stage (DIM / 2)
 *   shared     Q of the wrt argument, DEPTH stages of 64 keys of both arguments, two buffers of G, dk of a stage in
 *              f32: 208 KB at DIM = OTHER_DIM = 128
 *
 *   dq warpgroups   stage n       X, Y (wgmma)  ->  exponentials  ->  dq += G K (wgmma), G to shared memory
 *   dk warpgroup    stage n - 1   dk = G^T Q (wgmma)  ->  shared memory  ->  global memory += dk (TMA)
 *                   stage n + 2   TMA load (at DEPTH = 3)
 *
 * dq stays in registers. dk of a stage leaves through shared memory; TMA adds it to f32 sums in global memory, in any
 * order, so its last bits differ between runs. A separate warpgroup for dk keeps these stores out of the path from
 * logits to logits: the dq warpgroups wait neither for the sums nor for each other, and one's exponentials overlap
 * the other's wgmmas. Under GQA all query heads add to the key head that they share.
 *
 * ptxas reserves the first 24 registers for ordinary values and places accumulators and operands of wgmma after them.
 * At DIM = OTHER_DIM = 128 that leaves room for 96 dimensions of the other argument's Q; the last 32 come from shared
 * memory.
 *
 * Tall tiles: 192 queries and 3 dq warpgroups, at DIM = 64 and OTHER_DIM = 64 or 128. Exponentials and the chain from
 * logits to logits take most of the time there, and a third warpgroup overlaps them with the others'. That leaves 144
 * registers per dq thread and 72 per dk thread: all of the other argument's Q comes from shared memory.
 *
 * WIDE_OTHER: an other argument of more than 128 dimensions needs more of both. dk is then multiplied and staged 64
 * dimensions at a time, which leaves 216 registers per dq thread and takes half of the shared memory. The two
 * arguments of a stage arrive separately: the dq warpgroups release the other argument's keys as soon as they have
 * the logits, so that its next load starts one stage earlier, and the load of the wrt argument's keys overlaps the
 * products of the other argument.
 *
 * FORM: what the logits are. CAPPED_LOGITS and LINEAR_LOGITS are instances of their own: in one instance the paths of
 * both made softcaps 6 to 9 % slower.
 *
 * One kernel, loader and dk loop for this backward and the joint one cost 2 to 4.5 % here, so each has its own. They
 * share what leaves the machine code unchanged: the stores of G and dq, the loop over stages, the sanitizing of keys,
 * tensor maps and the launch. */
#ifndef SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_CUH

#include "cuda/common/dk_sums.cuh"
#include "cuda/sm90/attention/fused_backward_dq.cuh"

namespace sm90
{

/* ---- dk ----------------------------------------------------------------------------------------------------- */

/* Executed by the dk warpgroup. Only masked stages need it: see logit_gradients.cuh. */
template <typename ELEMENT, typename SMEM> __device__ inline void sanitize_stage(SMEM &smem, int n)
{
    const int stage = n % smem.DEPTH;
    const int row = (int)(threadIdx.x % 128 / 2);
    barrier_wait(smem.full[stage], n / smem.DEPTH % 2);
    const bool finite = smem.template sanitize_key<ELEMENT>(stage, row);
    smem.poison[stage][row] = finite ? 0.0F : NAN;
    fence_proxy_async();
    barrier_arrive(smem.sanitized[stage]); /* every thread, because every thread has written rows or poison */
}

/* Writes dk of a stage to shared memory, in TMA's 128-byte swizzle. Lanes of odd rows swap pairs of 8-dimension
 * blocks with the next pair, which avoids bank conflicts. */
template <int DIM>
__device__ inline void write_dk(unsigned char (&rows)[DIM / 32][STAGE_KEYS][128], const float (&dk)[DIM / 8][4],
                                float factor)
{
    const int lane = (int)(threadIdx.x % 32);
    const int row = (int)(threadIdx.x % 128 / 32) * 16 + lane / 4;
    const bool odd = row % 2;
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) {
        const int chunk = (n % 4 ^ (odd ? 2 : 0)) * 2 + lane % 4 / 2;
        unsigned char *const to = &rows[n / 4][row][(chunk ^ row % 8) * 16 + lane % 2 * 8];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float low = odd ? dk[n ^ 2][half * 2] : dk[n][half * 2];
            const float high = odd ? dk[n ^ 2][half * 2 + 1] : dk[n][half * 2 + 1];
            *(float2 *)(void *)(to + half * 8 * 128) = make_float2(low * factor, high * factor);
        }
    }
}

/* dk = G^T Q of a stage: 64 keys x N = 64 keys x ROWS queries . ROWS queries x N. `g` and `q` are operands. */
template <typename ELEMENT, int ROWS, int BLOCKS>
__device__ inline void multiply_dk(float (&dk)[BLOCKS][4], uint32_t g, uint32_t q)
{
    wgmma_fence();
    wgmma_steps<true, ROWS / 16>(dk, g, q, 0, ELEMENT());
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(dk);
}

/* Without `with_dk` the warpgroup is only the producer. */
template <typename ELEMENT, typename SHAPE>
__device__ inline void run_dk_warpgroup(fused_backward_smem<SHAPE> &smem, const stage_loader<SHAPE> &loader,
                                        bool with_dk, float scale)
{
    constexpr int DIM = SHAPE::DIM, DK_DIMS = SHAPE::DK_DIMS;
    constexpr bool LOADS_LATE = smem.DEPTH == 2; /* the next stage is not requested before G of this one is full */
    const int warp = warp_in_warpgroup();
    const bool is_leader = warp == 0; /* the warp that issues loads */
    const uint32_t q = mn_major_operand(smem.wrt_queries.slabs, smem.ROWS * 128);
    float dk[DK_DIMS / 8][4];
    if (loader.keys.masked_stages > 0)
        sanitize_stage<ELEMENT>(smem, 0);
    for (int n = 0; n < loader.keys.stages; n++) {
        if (!LOADS_LATE && n + 1 < loader.keys.masked_stages)
            sanitize_stage<ELEMENT>(smem, n + 1);
        barrier_wait(smem.g_full[n % 2], n / 2 % 2);
        if (is_leader && n > 0) /* G of stage n is full, so both dq warpgroups have released stage n - 1 */
            loader.load_stage(n + smem.DEPTH - 1);
        if (is_leader && smem.WIDE_OTHER) /* ... and the other argument's keys of stage n */
            loader.load_other_stage(n + smem.DEPTH);
        if (LOADS_LATE && n + 1 < loader.keys.masked_stages)
            sanitize_stage<ELEMENT>(smem, n + 1);
        if (!with_dk) {
            __syncwarp(); /* all lanes have passed the wait before the buffer can be filled again */
            if (threadIdx.x % 32 == 0)
                barrier_arrive(smem.g_empty[n % 2]);
            continue;
        }
        const uint32_t g = mn_major_operand(smem.g[n % 2], 0);
#pragma unroll
        for (int first_dim = 0; first_dim < DIM; first_dim += DK_DIMS) {
            multiply_dk<ELEMENT, SHAPE::ROWS>(dk, g, q + first_dim / 64 * (smem.ROWS * 128 / 16));
            if (first_dim + DK_DIMS == DIM && threadIdx.x % 32 == 0)
                barrier_arrive(smem.g_empty[n % 2]);
            tma_wait_read(); /* a warp's 16 keys leave by themselves: warps do not wait for each other */
            __syncwarp();
            write_dk<DK_DIMS>(smem.dk, dk, scale * smem.unit);
            fence_proxy_async();
            __syncwarp();
            loader.reduce_add(n, first_dim, warp);
        }
    }
    tma_wait_read();
}

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, typename SHAPE, bool WRT_B, logit_form FORM>
__global__ void __launch_bounds__(SHAPE::THREADS, 1)
    fused_backward_kernel(const __grid_constant__ backward_params params,
                          const __grid_constant__ fused_backward_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    typedef fused_backward_smem<SHAPE> memory;
    memory &smem = *(memory *)(void *)raw;
    typename SHAPE::tile_type assigned;
    if (!assigned.find(params, 1, (unsigned)params.head_group))
        return;
    if (threadIdx.x < 32) {
        const float common = HAS_GRAD_UNIT<ELEMENT, SHAPE> ? find_common_grad(params, assigned) : 0.0F;
        smem.in_units = common != 0.0F;
        smem.unit = common != 0.0F ? common : find_g_unit(params, assigned, ELEMENT());
    }
    const row_stream keys = keys_of_tile(params, assigned, 1);
    smem.visible.fill(keys.band);
    if (threadIdx.x == 0) {
        smem.tile = assigned;
        set_rows(smem, assigned, keys);
        barrier_init(smem.queries_full, 1);
        for (int stage = 0; stage < smem.DEPTH; stage++) {
            barrier_init(smem.full[stage], 1);
            barrier_init(smem.sanitized[stage], 128);
            if (smem.WIDE_OTHER)
                barrier_init(smem.other_full[stage], 1);
        }
        for (int stage = 0; stage < 2; stage++) {
            barrier_init(smem.g_full[stage], SHAPE::DQ_GROUPS * 128);
            barrier_init(smem.g_empty[stage], 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const typename SHAPE::tile_type &tile = smem.tile;
    const int warpgroup = warpgroup_index();
    if (warpgroup == SHAPE::DK_WARPGROUP) {
        reg_dealloc<SHAPE::DK_REGS>();
        const int head = warp_uniform((int)tile.head);
        const stage_loader<SHAPE> loader = {smem,
                                            maps,
                                            warp_uniform(smem.keys),
                                            warp_uniform((int)tile.sequence.batch),
                                            head,
                                            head / wrt_argument<WRT_B>(params).heads_per_key,
                                            head / other_argument<WRT_B>(params).heads_per_key};
        if (warp_index() == SHAPE::DK_WARPGROUP * 4) {
            loader.load_queries(warp_uniform((int)(tile.sequence.query_begin + tile.first)));
            for (int n = 0; n < smem.DEPTH; n++) {
                if (smem.WIDE_OTHER)
                    loader.load_other_stage(n);
                loader.load_stage(n);
            }
        }
        run_dk_warpgroup<ELEMENT>(smem, loader, params.dk_sums.data != NULL,
                                  params.teacher_side ? params.problem.scale_t : params.problem.scale_s);
    } else {
        reg_alloc<SHAPE::DQ_REGS>();
        dq_warpgroup<ELEMENT, SHAPE, WRT_B, FORM> consumer = {params, smem, warpgroup};
        if constexpr (SHAPE::REG_DIMS > 0)
            load_a_frag<SHAPE::REG_DIMS>(
                consumer.other_q,
                queries_of<ELEMENT>(other_argument<WRT_B>(params), tile.sequence, tile.head).from(tile.first),
                smem.count);
        barrier_wait(smem.queries_full, 0);
        prepare_queries<ELEMENT, WRT_B>(params, smem, tile);
        consumer.run();
        consumer.store(tile);
    }
#endif
}

/* ---- Launch ------------------------------------------------------------------------------------------------- */

/* Launches one block with `memory` bytes of shared memory per tile of queries. */
template <typename SHAPE, typename... MAPS>
cudaError_t launch_tiles(void (*kernel)(backward_params, MAPS...), size_t memory, const backward_params &params,
                         const MAPS &...maps)
{
    static_assert(SHAPE::ROWS == (SHAPE::DQ_GROUPS == 3 ? SKL_SM90_TALL_ROWS : SKL_SM90_BACKWARD_ROWS),
                  "cuda/select counts tiles");
    const skl_problem &p = params.problem;
    return launch_blocks(kernel, grid_of(p.batch, p.heads_s, skl_ceil_div(p.len_q, SHAPE::ROWS)), SHAPE::THREADS,
                         memory, params.call.stream, params, maps...);
}

/* Encodes the sums of dk, if there is a dk. `box_rows`: keys that TMA adds at once. */
inline bool encode_dk_sums(CUtensorMap *map, const backward_params &params, int box_rows = 16)
{
    const skl_problem *const p = &params.problem;
    const skl_cuda_argument *const wrt = wrt_of(params);
    return params.dk_sums.data == NULL ||
           encode_sums(map, params.dk_sums, wrt->dim, p->heads_s / wrt->heads_per_key, skl_key_rows(p), box_rows);
}

template <typename ELEMENT>
inline bool encode_all(fused_backward_maps *maps, const backward_params &params, int tile_rows, ELEMENT element)
{
    const skl_problem *const p = &params.problem;
    return encode_queries(&maps->wrt_queries, p, wrt_of(params), tile_rows, element) &&
           encode_queries(&maps->other_queries, p, other_of(params), tile_rows, element) &&
           encode_keys(&maps->wrt_keys, p, wrt_of(params), STAGE_KEYS, element) &&
           encode_keys(&maps->other_keys, p, other_of(params), STAGE_KEYS, element) &&
           encode_dk_sums(&maps->sums, params);
}

/* Clears the sums of dk, calls launch(), which adds to them, and rounds them to dk's type. */
template <typename LAUNCH> cudaError_t with_dk_sums(const backward_params &params, const LAUNCH &launch)
{
    cudaError_t error = clear_dk_sums(&params);
    if (error == cudaSuccess)
        error = launch();
    return error == cudaSuccess ? store_dk_sums(&params) : error;
}

/* f16 has no instances for gradients of A: nothing bounds them that f16 could rely on. */
template <typename ELEMENT> constexpr bool HAS_GRAD_OF_A = true;
template <> constexpr bool HAS_GRAD_OF_A<skl_f16> = false;

/* Tall tiles are for gradients of B. */
template <typename ELEMENT, typename SHAPE> constexpr bool HAS_INSTANCE_OF_A = HAS_GRAD_OF_A<ELEMENT>;
template <typename ELEMENT, int DIM, int OTHER_DIM>
constexpr bool HAS_INSTANCE_OF_A<ELEMENT, fused_backward_shape<DIM, OTHER_DIM, 3>> = false;

template <typename ELEMENT, typename SHAPE, logit_form FORM>
cudaError_t launch_fused_backward_of(const char *kernel, const backward_params &params)
{
    constexpr bool OF_A = HAS_INSTANCE_OF_A<ELEMENT, SHAPE> && FORM != LINEAR_LOGITS;
    constexpr int MEMORY = sizeof(fused_backward_smem<SHAPE>);
    static_assert(MEMORY <= SMEM_MAX, "shared memory of a block");
    const bool wrt_b = is_grad_of_b(params);
    fused_backward_maps maps;
    if (!(wrt_b || OF_A) || !encode_all(&maps, params, SHAPE::ROWS, ELEMENT()))
        return encode_error();
    return with_dk_sums(params, [&] {
        record_launch(kernel,
                      FORM != PLAIN_LOGITS    ? SKL_VARIANT_FUSED_SOFTCAP
                      : SHAPE::DQ_GROUPS == 3 ? SKL_VARIANT_FUSED_TALL
                                              : SKL_VARIANT_FUSED,
                      1);
        if constexpr (OF_A)
            if (!wrt_b)
                return launch_tiles<SHAPE>(fused_backward_kernel<ELEMENT, SHAPE, false, FORM>, MEMORY, params, maps);
        return launch_tiles<SHAPE>(fused_backward_kernel<ELEMENT, SHAPE, true, FORM>, MEMORY, params, maps);
    });
}

/* Without softcaps. */
template <typename ELEMENT, int DIM, int OTHER_DIM>
cudaError_t launch_fused_backward_tiled(const char *kernel, const backward_params &params, bool tall_tiles)
{
    if constexpr (DIM == SKL_SM90_TALL_DIM && OTHER_DIM <= SKL_SM90_TALL_OTHER_DIM)
        if (tall_tiles)
            return launch_fused_backward_of<ELEMENT, fused_backward_shape<DIM, OTHER_DIM, 3>, PLAIN_LOGITS>(kernel,
                                                                                                            params);
    return launch_fused_backward_of<ELEMENT, fused_backward_shape<DIM, OTHER_DIM>, PLAIN_LOGITS>(kernel, params);
}

template <typename ELEMENT, int DIM, bool SOFTCAP>
cudaError_t launch_fused_backward(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const backward_params kernel_params = backward_params_of(params, launch);
    return with_softcap<SOFTCAP>(kernel_params, [&](auto capped) {
        if constexpr (capped()) {
            using SHAPE = fused_backward_shape<DIM, DIM>;
            return kernel_params.b.linear && is_grad_of_b(kernel_params)
                       ? launch_fused_backward_of<ELEMENT, SHAPE, LINEAR_LOGITS>(kernel, kernel_params)
                       : launch_fused_backward_of<ELEMENT, SHAPE, CAPPED_LOGITS>(kernel, kernel_params);
        } else
            return launch_fused_backward_tiled<ELEMENT, DIM, DIM>(kernel, kernel_params, launch->tall_tiles);
    });
}

/* Head sizes that differ: one argument has at most SMALL dimensions, the other one at most LARGE. cuda/select asks
 * for no gradient of more than 128 dimensions, and not with softcaps. */
template <typename ELEMENT, int LARGE, int SMALL>
cudaError_t launch_fused_pair(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const backward_params kernel_params = backward_params_of(params, launch);
    if constexpr (LARGE > SMALL && LARGE <= SKL_SM90_FUSED_DIM_MAX)
        if (wrt_of(kernel_params)->dim > SMALL)
            return launch_fused_backward_of<ELEMENT, fused_backward_shape<LARGE, SMALL>, PLAIN_LOGITS>(kernel,
                                                                                                       kernel_params);
    return launch_fused_backward_tiled<ELEMENT, SMALL, LARGE>(kernel, kernel_params, launch->tall_tiles);
}

} // namespace sm90

#endif
