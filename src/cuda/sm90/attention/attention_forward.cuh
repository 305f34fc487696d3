/* Attention that carries its KL, forward, on Hopper's tensor cores (sm_90a): the output of the student's attention,
 * both LSEs and the KL of each row in one pass. bf16 and f16, heads of up to 128, one teacher head per student head.
 *
 *   Y = scale_s Q_s K_s^T    X = scale_t Q_t K_t^T    O = softmax(Y) V
 *
 * Three products instead of the four of an attention and a KL forward.
 *
 * Bound: tensor cores, which take 1,152 clocks per 64 queries x 96 keys at DIM = 128, next to about 700 instructions
 * of each warp: they reach 70 %. At DIM = 64 exponentials are the bound: 768 clocks, products 576.
 *
 *   block      2 consumer warpgroups of 64 queries, and a producer warp; one block per SM
 *   registers  240 per consumer thread: O (DIM / 2), Y or Y minus its shift (48), X (48), S (24)
 *   shared     queries of both arguments; a ring of tiles of 96 keys: K_s, K_t, V, K_s, ...: 6 of them at DIM = 128
 *
 *   consumer   wgmma       | O n-1          | Y n | X n             | O n            | Y n+1 ...
 *              other pipes | P, sums of n-1 |     | S and its sum n | P, sums of n   |
 *
 * A tile without P is complete for the output, so O does not wait for P. One warpgroup starts after the first S of
 * the other one; from there on nobody orders them.
 *
 * The shifts of a row are the same in its four lanes, because a row of O sums over all keys. They move if a logit is
 * more than SHIFT_SLACK above in a masked tile, or if a sum passes SKL_LAZY_BOUND in another one, which is then added
 * again: S stays in the range of 16 bits, and O is rarely multiplied. Both sides move by the same rule, so that the
 * KL of equal sides is exactly 0. Keys that no query of a tile sees have zeros for values. A value that is not finite
 * reaches every row of the tile of the logits that its key is in, as in other fused attention. */
#ifndef SKL_CUDA_SM90_ATTENTION_ATTENTION_FORWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_ATTENTION_FORWARD_CUH

#include "cuda/sm90/attention/attention_forward_sums.cuh"
#include "cuda/sm90/attention/tile_kernel.cuh"

namespace sm90
{

template <typename ELEMENT, int DIM, int DIM_A> struct attention_forward_rows {
    typedef attention_forward_smem<DIM, DIM_A> memory;
    typedef key_ring_position<memory::DEPTH> position;
    static constexpr int GROUPS = CONSUMERS, REGS = 240, PRODUCER_REGS = 24;
    static constexpr int KEYS = memory::KEYS;
    enum { STARTS = 1, CLEARS = 2 }; /* named barriers; CLEARS of each warpgroup */

    const forward_params &params;
    const attention_forward_maps &maps;
    memory &smem;
    int warpgroup;
    stage_schedule keys;
    position next; /* the next tile of keys or values to use */
    position of_v; /* the values in use */
    /* Per thread: */
    float out[DIM / 8][4];
    tile_operand s;         /* S */
    skl_row_state state[2]; /* shifts of the row, sums of this lane's columns */

    __device__ static bool find(const forward_params &params, memory &, block_tile &tile, row_stream &keys)
    {
        if (!tile.find(params, 1, (unsigned)params.head_group))
            return false;
        keys = keys_of_tile(params, tile, 1, KEYS);
        return true;
    }

    __device__ static void start(const forward_params &, memory &smem, const block_tile &tile, const row_stream &keys)
    {
        smem.tile = tile;
        smem.keys = keys;
        smem.queries = (int)skl_min(block_tile::ROWS, tile.sequence.query_count - tile.first);
        smem.needed = keys.band.of(smem.queries - 1).end;
        barrier_init(smem.queries_full, 1);
        smem.barriers.init(CONSUMERS * 4);
    }

    /* ---- Producer ------------------------------------------------------------------------------------------- */

    __device__ void produce()
    {
        if (warp_index() == CONSUMERS * 4)
            produce_keys(params, maps, smem);
    }

    /* ---- Products ------------------------------------------------------------------------------------------- */

    __device__ void release(const position &at) const
    {
        barrier_arrive_if(smem.barriers.empty[at.slot], threadIdx.x % 32 == 0);
    }

    /* Waits for the next tile of keys or values. */
    __device__ position take()
    {
        const position at = next;
        barrier_wait(smem.barriers.full[at.slot], at.phase);
        next.advance();
        return at;
    }

    /* Issues the products of the warpgroup's queries and the next tile of keys. */
    template <int SLABS> __device__ position issue_logits(forward_logits &x, const smem_rows<SLABS> &queries)
    {
        const position at = take();
        wgmma_fence();
        wgmma_slabs<ELEMENT, SLABS * 64, block_tile::ROWS, KEYS>(
            x, k_major_operand(&queries) + warpgroup * (64 * 128 / 16), k_major_operand(&smem.ring[at.slot]));
        wgmma_commit();
        return at;
    }

    __device__ position issue_out(int n)
    {
        const position at = take();
        clear_unseen_values(n, at);
        wgmma_fence();
        wgmma_steps<true, KEYS / 16>(out, s, mn_major_operand(&smem.ring[at.slot], KEYS * 128), 1, ELEMENT());
        wgmma_commit();
        return at;
    }

    __device__ void fence_s()
    {
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
            for (int reg = 0; reg < 4; reg++)
                asm volatile("" : "+r"(s[k][reg]));
    }

    /* Whether a query of the tile sees a key. Ranges of visible keys begin and end later from row to row, so the last
     * row whose range has begun is the one to ask. */
    __device__ bool is_seen(int key) const
    {
        int begun = 0, end = smem.queries;
        while (begun < end) {
            const int row = (begun + end) / 2;
            if (smem.visible.of(row).begin <= key)
                begun = row + 1;
            else
                end = row;
        }
        return begun > 0 && smem.visible.of(begun - 1).end > key;
    }

    /* Clears the values of keys that no query of the tile sees: 0 times a value that is not finite would be NaN. Both
     * warpgroups write the same zeros. Keys in the middle of a tile are hidden by row bounds alone. */
    __device__ void clear_unseen_values(int n, const position &at)
    {
        const int first = keys.stage_at(n) * KEYS, key = (int)(threadIdx.x % 128);
        if (n >= keys.masked_stages || (first + KEYS <= smem.needed && !params.problem.row_bounds))
            return;
        if (key < KEYS && !is_seen(first + key))
#pragma unroll
            for (int slab = 0; slab < DIM / 64; slab++)
                for (int chunk = 0; chunk < 8; chunk++)
                    ((uint4 *)(void *)smem.ring[at.slot].slabs[slab][key])[chunk] = make_uint4(0, 0, 0, 0);
        fence_proxy_async();
        named_barrier_sync(CLEARS + warpgroup, 128);
    }

    /* ---- Sums ----------------------------------------------------------------------------------------------- */

    /* Columns of a tile that a row sees, from its first key; all of them in a tile without a mask. */
    __device__ range32 seen_columns(int n, int half) const
    {
        if (n >= keys.masked_stages)
            return {0, KEYS};
        const int first = keys.stage_at(n) * KEYS;
        const range32 in_stream = smem.visible.of(acc_row<1>(0, half));
        return {in_stream.begin - first, in_stream.end - first};
    }

    /* The first tile is careful, because the rows have no shifts yet. So is the last one, which saves code: its P is
     * added after the loop. */
    __device__ bool is_careful(int n, float m_0, float m_1) const
    {
        const bool is_rare = n < keys.masked_stages || n == keys.stages - 1;
        return __any_sync(~0U, is_rare || is_huge(m_0) || is_huge(m_1));
    }

    /* S of the n-th tile, and b = Y minus its shift. Returns whether a shift of the warp has moved from `before`. */
    template <bool FIRST = false>
    __device__ bool take_student(forward_logits &b, const forward_logits &y, const float (&before)[2], int n)
    {
        const float scale = params.b.scale;
        const auto seen = [&](int half) { return seen_columns(n, half); };
        float sum[2], shift[2] = {before[0], before[1]}, move[2] = {};
        bool moves = FIRST || is_careful(n, shift[0], shift[1]);
        if (moves) {
            find_shifts(shift, y, scale, seen);
            add_student<CAREFUL>(s, sum, b, y, scale, shift, move, seen, ELEMENT());
        } else if (__any_sync(~0U, !add_student<FAST>(s, sum, b, y, scale, shift, move, seen, ELEMENT()))) {
            moves = true;
            move_shifts(shift, move, b);
            add_student<AGAIN>(s, sum, b, y, scale, shift, move, seen, ELEMENT());
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float factor = moves ? factor_of(before[half], shift[half]) : 1.0F;
            state[half].m_b = shift[half];
            state[half].l_b = fmaf(state[half].l_b, factor, sum[half]);
        }
        return moves;
    }

    __device__ static float factor_of(float before, float shift)
    {
        return shift == before ? 1.0F : ex2(before - shift);
    }

    __device__ void rescale_out(const float (&before)[2])
    {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float factor = factor_of(before[half], state[half].m_b);
#pragma unroll
            for (int block = 0; block < DIM / 8; block++) {
                out[block][half * 2] *= factor;
                out[block][half * 2 + 1] *= factor;
            }
        }
    }

    /* P of the n-th tile. One product makes both moves of w, so that equal sides cancel exactly. */
    template <bool LAST = false>
    __device__ void take_teacher(const forward_logits &x, const forward_logits &b, const float (&before)[2],
                                 bool student_moved, int n)
    {
        row_sums sum[2];
        const float scale = params.a.scale;
        const auto seen = [&](int half) { return seen_columns(n, half); };
        const float old[2] = {state[0].m_a, state[1].m_a};
        float shift[2] = {old[0], old[1]}, move[2] = {};
        bool moves = student_moved;
        if (LAST || is_careful(n, shift[0], shift[1])) {
            moves = true;
            find_shifts(shift, x, scale, seen);
            add_teacher<CAREFUL>(sum, x, b, scale, shift, move, seen);
        } else if (__any_sync(~0U, !add_teacher<FAST>(sum, x, b, scale, shift, move, seen))) {
            moves = true;
            forward_logits a;
#pragma unroll
            for (int e = 0; e < KEYS / 2; e++)
                a[e / 4][e % 4] = fmaf(x[e / 4][e % 4], scale, -old[e % 4 / 2]);
            move_shifts(shift, move, a);
            add_teacher<AGAIN>(sum, x, b, scale, old, move, seen);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            skl_row_state &row = state[half];
            float factor = 1.0F;
            if (moves) {
                const float d_a = row.l_a == 0.0F ? 0.0F : old[half] - shift[half];
                const float d_b = row.l_a == 0.0F ? 0.0F : before[half] - row.m_b;
                factor = factor_of(old[half], shift[half]);
                row.m_a = shift[half];
                row.w = factor * (row.w + row.l_a * (d_a - d_b));
            }
            row.l_a = fmaf(row.l_a, factor, sum[half].l_a);
            row.w += sum[half].w;
        }
    }

    __device__ void run()
    {
        keys = warp_uniform(smem.keys);
        next = of_v = {0, 0};
#pragma unroll
        for (int n = 0; n < DIM / 8; n++)
            out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0F;
        state[0] = state[1] = skl_state_empty();
        if (keys.stages == 0)
            return;
        barrier_wait(smem.queries_full, 0);
        if (warpgroup == 1) /* the warpgroups must not run in step */
            named_barrier_sync(STARTS, CONSUMERS * 128);
        forward_logits x, b;
        float before[2];
        bool moved = multiply_logits<true>(x, b, before, 0);
        if (warpgroup == 0)
            named_barrier_arrive(STARTS, CONSUMERS * 128);
#pragma unroll 1
        for (int n = 1; n < keys.stages; n++) {
            of_v = issue_out(n - 1);
            take_teacher(x, b, before, moved, n - 1);
            moved = multiply_logits<false>(x, b, before, n);
            if (moved)
                rescale_out(before);
        }
        issue_out(keys.stages - 1);
        take_teacher<true>(x, b, before, moved, keys.stages - 1);
        wgmma_wait<0>();
        fence_s();
        fence_operand(out);
    }

    /* Multiplies the n-th tile. Returns whether a shift of the student has moved. ptxas would serialize products with
     * x in place of fresh_x, which is read while O is multiplied. */
    template <bool FIRST>
    __device__ bool multiply_logits(forward_logits &x, forward_logits &b, float (&before)[2], int n)
    {
        forward_logits y, fresh_x;
        const position of_y = issue_logits(y, smem.q_b), of_x = issue_logits(fresh_x, smem.q_a);
        wgmma_wait<1>(); /* waits for Y, and O of the tile before */
        fence_operand(y);
        fence_s();
        release(of_y);
        barrier_arrive_if(smem.barriers.empty[of_v.slot], !FIRST && threadIdx.x % 32 == 0);
        before[0] = state[0].m_b;
        before[1] = state[1].m_b;
        const bool moved = take_student<FIRST>(b, y, before, n);
        wgmma_wait<0>(); /* waits for X */
        fence_operand(fresh_x);
        fence_operand(out);
        release(of_x);
#pragma unroll
        for (int e = 0; e < KEYS / 2; e++)
            x[e / 4][e % 4] = fresh_x[e / 4][e % 4];
        return moved;
    }

    /* ---- Results -------------------------------------------------------------------------------------------- */

    __device__ void store()
    {
        write_rows();
        write_out();
    }

    __device__ void write_rows()
    {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const row_sums sums = quad_sum({state[half].l_a, state[half].l_b, state[half].w});
            state[half] = {state[half].m_a, sums.l_a, state[half].m_b, sums.l_b, sums.w};
        }
        write_row_of_two(params, smem.tile, select_state(state[0], state[1], threadIdx.x % 2 != 0));
    }

    /* o = O / l; 0 for a row that sees no key. */
    __device__ void write_out()
    {
        const skl_output &to = params.call.o_s;
        const skl_sequence &q = smem.tile.sequence;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t query = smem.tile.first + acc_row<1>(0, half);
            const float factor = state[half].l_b == 0.0F ? 0.0F : 1.0F / state[half].l_b;
            if (query >= q.query_count)
                continue;
            ELEMENT *const row = (ELEMENT *)to.data + SKL_ROW(to, q.batch, smem.tile.head, q.query_begin + query) +
                                 threadIdx.x % 4 * 2;
#pragma unroll
            for (int n = 0; n < DIM / 8; n++)
                if (n * 8 < params.b.dim)
                    *(uint32_t *)(void *)(row + n * 8) =
                        pack(out[n][half * 2] * factor, out[n][half * 2 + 1] * factor, ELEMENT());
        }
    }
};

/* ---- Launch ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT>
cudaError_t launch_attention_forward(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const forward_params kernel_params = forward_params_of(params, launch);
    const skl_problem *const p = &params->problem;
    skl_cuda_argument values = params->b;
    values.k = params->call.attention->v_s;
    attention_forward_maps maps;
    const ELEMENT element = ELEMENT();

    if (!encode_queries(&maps.q_a, p, &params->a, block_tile::ROWS, element) ||
        !encode_queries(&maps.q_b, p, &params->b, block_tile::ROWS, element) ||
        !encode_keys(&maps.k_a, p, &params->a, FORWARD_KEYS, element) ||
        !encode_keys(&maps.k_b, p, &params->b, FORWARD_KEYS, element) ||
        !encode_keys(&maps.v, p, &values, FORWARD_KEYS, element))
        return encode_error();
    record_launch(kernel, SKL_VARIANT_CARRYING_FORWARD, 1);
    static_assert(block_tile::ROWS == SKL_CARRYING_ROWS, "cuda/select counts tiles");
    return with_head_sizes(*p, [&](auto dim_t, auto dim_s) {
        return launch_tiles<attention_forward_rows<ELEMENT, dim_s(), dim_t()>>(
            kernel_params, maps, p->heads_s, skl_ceil_div(p->len_q, block_tile::ROWS));
    });
}

} // namespace sm90

#endif
