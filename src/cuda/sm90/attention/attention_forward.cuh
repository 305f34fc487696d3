/* Attention that carries its KL, forward, on Hopper's tensor cores (sm_90a): the output of the student's attention,
 * both LSEs and the KL of each row in one pass. bf16 and f16, heads of up to 128, one teacher head per student head.
 *
 *   Y = scale_s Q_s K_s^T    X = scale_t Q_t K_t^T    O = softmax(Y) V
 *
 * Three products instead of the four of an attention and a KL forward.
 *
 * Bound: tensor cores. At DIM = 128 they take 1,536 clocks per 64 queries x 128 keys, exponentials 1,024. At DIM = 64
 * the exponentials are the bound: 1,024 against 768.
 *
 *   block      2 consumer warpgroups of 64 queries, and a producer warp; one block per SM
 *   registers  240 per consumer thread: O (DIM / 2), Y and X (64 each), S (32, in place of Y), 48 for the rest
 *   shared     queries of both arguments; a ring of tiles of 128 keys: K_s, K_t, V, K_s, ...: 225 KB at DIM = 128
 *
 *   warpgroup 0  wgmma       | O n | Y n+1 | X n+1 |                 | O n+1 ...
 *                other pipes |                     | sums, S of n+1  |
 *   warpgroup 1  wgmma       |                     | O n | Y n+1 | X n+1 |
 *                other pipes | sums, S of n        |                     | sums, ...
 *
 * The warpgroups take turns on the tensor cores. X waits for the end of O, whose operand S it overwrites; Y keeps the
 * tensor cores busy meanwhile.
 *
 * The shifts of a row are the same in its four lanes, because a row of O sums over all keys. They move when a logit
 * is more than SHIFT_SLACK above: S stays below 2^SHIFT_SLACK, which 16 bits hold, and O is rarely multiplied. Keys
 * that no query of a tile sees have zeros for values. A value that is not finite reaches every row of the 128 x 128
 * tile of the logits that its key is in, as in other fused attention. */
#ifndef SKL_CUDA_SM90_ATTENTION_ATTENTION_FORWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_ATTENTION_FORWARD_CUH

#include "cuda/sm90/attention/forward_stage.cuh"
#include "cuda/sm90/launch.cuh"

namespace sm90
{

constexpr int FORWARD_KEYS = 128; /* keys per tile */
constexpr int ATTENTION_FORWARD_THREADS = 128 * (CONSUMERS + 1);
constexpr int ATTENTION_FORWARD_REGS = 240, ATTENTION_FORWARD_PRODUCER_REGS = 24;
constexpr float SHIFT_SLACK = 8.0F;

struct attention_forward_maps {
    CUtensorMap q_a, q_b, k_a, k_b, v;
};

/* DIM: head size of the student, DIM_A: of the teacher. */
template <int DIM, int DIM_A> struct attention_forward_smem {
    struct key_tile {
        unsigned char slabs[(DIM > DIM_A ? DIM : DIM_A) / 64][FORWARD_KEYS][128];
    };
    typedef smem_rows<DIM / 64> q_b_rows;
    typedef smem_rows<DIM_A / 64> q_a_rows;
    static constexpr int DEPTH = depth_for(sizeof(key_tile), q_b_rows::SIZE + q_a_rows::SIZE, 8);
    key_tile ring[DEPTH]; /* K_s, K_t and V of a tile follow each other */
    q_b_rows q_b;
    q_a_rows q_a;
    ring_barriers<DEPTH> barriers;
    uint64_t queries_full;
    block_tile tile;
    stage_schedule keys;
    int queries; /* queries of the tile that exist */
    int needed;  /* keys up to the last one that a query of the tile sees */
    row_ranges<block_tile::ROWS> visible;
};

/* Position in the ring of key tiles. */
template <int DEPTH> struct key_ring_position {
    int slot, phase;

    __device__ void advance()
    {
        const bool wraps = slot == DEPTH - 1;
        slot = wraps ? 0 : slot + 1;
        phase ^= (int)wraps;
    }
};

/* ---- Producer ----------------------------------------------------------------------------------------------- */

template <int SLABS, typename TILE>
__device__ inline void load_key_tile(TILE &to, const CUtensorMap &map, int row, int head, int batch, uint64_t &full)
{
    barrier_expect_tx(full, SLABS * FORWARD_KEYS * 128);
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++)
        tma_load(to.slabs[slab], map, slab * 64, row, head, batch, full);
}

template <int DIM, int DIM_A>
__device__ inline void produce_keys(const forward_params &params, const attention_forward_maps &maps,
                                    attention_forward_smem<DIM, DIM_A> &smem)
{
    const tma_coord coord = warp_uniform(tma_coord::of(params, smem.tile));
    const stage_schedule keys = warp_uniform(smem.keys);
    barrier_expect_tx(smem.queries_full, smem.q_a.SIZE + smem.q_b.SIZE);
    load_slabs(smem.q_b.slabs, maps.q_b, coord.query, coord.head, coord.batch, smem.queries_full);
    load_slabs(smem.q_a.slabs, maps.q_a, coord.query, coord.head, coord.batch, smem.queries_full);
    key_ring_position<smem.DEPTH> at = {0, 0};
    for (int n = 0; n < keys.stages; n++) {
        const int row = keys.row_at(n, FORWARD_KEYS);
#pragma unroll
        for (int part = 0; part < 3; part++, at.advance()) {
            uint64_t &full = smem.barriers.full[at.slot];
            barrier_wait(smem.barriers.empty[at.slot], at.phase ^ 1);
            if (part == 1)
                load_key_tile<DIM_A / 64>(smem.ring[at.slot], maps.k_a, row, coord.head_a, coord.batch, full);
            else
                load_key_tile<DIM / 64>(smem.ring[at.slot], part == 0 ? maps.k_b : maps.v, row, coord.head_b,
                                        coord.batch, full);
        }
    }
}

/* ---- Consumers ---------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM, int DIM_A> struct attention_forward_rows {
    typedef attention_forward_smem<DIM, DIM_A> memory;
    typedef key_ring_position<memory::DEPTH> position;
    enum { TURN = 1 }; /* the first of two named barriers */

    const forward_params &params;
    memory &smem;
    int warpgroup;
    stage_schedule keys;
    position next; /* the next tile of keys or values to use */
    /* Per thread: */
    float out[DIM / 8][4];
    float x[FORWARD_KEYS / 8][4], y[FORWARD_KEYS / 8][4];
    uint32_t s[FORWARD_KEYS / 16][4]; /* S as an A operand */
    skl_row_state state[2];           /* shifts of the row, sums of this lane's columns */

    /* ---- Products ------------------------------------------------------------------------------------------- */

    __device__ void wait_turn() const
    {
        named_barrier_sync(TURN + warpgroup, CONSUMERS * 128);
    }

    __device__ void pass_turn() const
    {
        named_barrier_arrive(TURN + 1 - warpgroup, CONSUMERS * 128);
    }

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

    __device__ void issue_y(const position &at)
    {
        wgmma_slabs<ELEMENT, DIM, block_tile::ROWS, FORWARD_KEYS>(
            y, k_major_operand(&smem.q_b) + warpgroup * (64 * 128 / 16), k_major_operand(&smem.ring[at.slot]));
        wgmma_commit();
    }

    __device__ void issue_x(const position &at)
    {
        wgmma_slabs<ELEMENT, DIM_A, block_tile::ROWS, FORWARD_KEYS>(
            x, k_major_operand(&smem.q_a) + warpgroup * (64 * 128 / 16), k_major_operand(&smem.ring[at.slot]));
        wgmma_commit();
    }

    __device__ void issue_out(const position &at)
    {
        wgmma_steps<true, FORWARD_KEYS / 16>(out, s, mn_major_operand(&smem.ring[at.slot], FORWARD_KEYS * 128), 1,
                                             ELEMENT());
        wgmma_commit();
    }

    __device__ void fence_s()
    {
#pragma unroll
        for (int k = 0; k < FORWARD_KEYS / 16; k++)
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
        const int first = keys.stage_at(n) * FORWARD_KEYS, key = (int)(threadIdx.x % 128);
        if (n >= keys.masked_stages || (first + FORWARD_KEYS <= smem.needed && !params.problem.row_bounds))
            return;
        if (!is_seen(first + key))
#pragma unroll
            for (int slab = 0; slab < DIM / 64; slab++)
                for (int chunk = 0; chunk < 8; chunk++)
                    ((uint4 *)(void *)smem.ring[at.slot].slabs[slab][key])[chunk] = make_uint4(0, 0, 0, 0);
        fence_proxy_async();
        named_barrier_sync(TURN + CONSUMERS + warpgroup, 128);
    }

    /* ---- Sums ----------------------------------------------------------------------------------------------- */

    /* Moves the shifts if a logit is far above them. `sees`: columns that count, from the tile's first key. */
    template <bool MASKED> __device__ void move_shifts(const range32 (&sees)[2])
    {
        float m_a[2] = {-INFINITY, -INFINITY}, m_b[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int n = 0; n < FORWARD_KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int half = e / 2, column = acc_column(n, e % 2);
                const bool seen = !MASKED || (column >= sees[half].begin && column < sees[half].end);
                m_a[half] = seen ? fmaxf(m_a[half], x[n][e]) : m_a[half];
                m_b[half] = seen ? fmaxf(m_b[half], y[n][e]) : m_b[half];
            }
        bool moves = false;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            m_a[half] = quad_max(m_a[half]) * params.a.scale;
            m_b[half] = quad_max(m_b[half]) * params.b.scale;
            moves = moves || m_a[half] > state[half].m_a + SHIFT_SLACK || m_b[half] > state[half].m_b + SHIFT_SLACK;
        }
        if (!__any_sync(~0U, moves))
            return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float old_b = state[half].m_b;
            const float new_a = m_a[half] > state[half].m_a + SHIFT_SLACK ? m_a[half] : state[half].m_a;
            const float new_b = m_b[half] > old_b + SHIFT_SLACK ? m_b[half] : old_b;
            const float factor = new_b == old_b ? 1.0F : ex2(old_b - new_b);
            state[half] = skl_state_move(state[half], new_a, new_b);
#pragma unroll
            for (int n = 0; n < DIM / 8; n++) {
                out[n][half * 2] *= factor;
                out[n][half * 2 + 1] *= factor;
            }
        }
    }

    /* Adds the tile's pairs to the sums, and makes S of Y. CAREFUL: with masks and huge logits. Two independent sums
     * per row keep the exponentials apart. */
    template <bool CAREFUL> __device__ void add_pairs(const range32 (&sees)[2])
    {
        constexpr float MASKED_LOGIT = -1000.0F;
        constexpr int HALF = FORWARD_KEYS / 16;
        row_sums sums[2][2]; /* [columns' half][row] */
#pragma unroll
        for (int n = 0; n < HALF; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float m_a = state[half].m_a, m_b = state[half].m_b;
                const bool huge_a = CAREFUL && is_huge(m_a), huge_b = CAREFUL && is_huge(m_b);
                float s_b[2][2];
#pragma unroll
                for (int parity = 0; parity < 2; parity++)
#pragma unroll
                    for (int part = 0; part < 2; part++) {
                        const int block = n + part * HALF, e = half * 2 + parity, column = acc_column(block, parity);
                        const bool seen = !CAREFUL || (column >= sees[half].begin && column < sees[half].end);
                        const float a = minus_shift(x[block][e], params.a.scale, m_a, huge_a);
                        const float b = minus_shift(y[block][e], params.b.scale, m_b, huge_b);
                        s_b[part][parity] = add_pair(sums[part][half], seen ? a : MASKED_LOGIT,
                                                     seen ? b : MASKED_LOGIT, n == 0 && parity == 0);
                    }
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    const int block = n + part * HALF;
                    s[block / 2][block % 2 * 2 + half] = pack(s_b[part][0], s_b[part][1], ELEMENT());
                }
            }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            add_sums(sums[0][half], sums[1][half]);
            add_sums(state[half], sums[0][half]);
        }
    }

    /* The n-th tile of the schedule. */
    __device__ void add_tile(int n)
    {
        fence_operand(y);
        fence_operand(x);
        const int first = keys.stage_at(n) * FORWARD_KEYS;
        range32 sees[2] = {{0, FORWARD_KEYS}, {0, FORWARD_KEYS}};
        bool careful = n < keys.masked_stages;
        if (careful) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const range32 in_stream = smem.visible.of(acc_row<1>(0, half));
                sees[half] = {in_stream.begin - first, in_stream.end - first};
            }
            move_shifts<true>(sees);
        } else {
            move_shifts<false>(sees);
        }
        careful = __any_sync(~0U, careful || is_huge(state[0].m_a) || is_huge(state[0].m_b) ||
                                      is_huge(state[1].m_a) || is_huge(state[1].m_b));
        if (careful)
            add_pairs<true>(sees);
        else
            add_pairs<false>(sees);
    }

    __device__ void run()
    {
#pragma unroll
        for (int n = 0; n < DIM / 8; n++)
            out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0F;
        state[0] = state[1] = skl_state_empty();
        if (keys.stages == 0)
            return;
        if (warpgroup == 1)
            pass_turn();
        barrier_wait(smem.queries_full, 0);
        wait_turn();
        position of_y = take();
        wgmma_fence();
        issue_y(of_y);
        position of_x = take();
        wgmma_fence();
        issue_x(of_x);
        pass_turn();
#pragma unroll 1
        for (int n = 0; n < keys.stages - 1; n++) {
            wgmma_wait<0>();
            release(of_y);
            release(of_x);
            add_tile(n);
            const position of_v = take();
            clear_unseen_values(n, of_v);
            of_y = take();
            wait_turn();
            wgmma_fence();
            issue_out(of_v);
            issue_y(of_y);
            of_x = take();
            wgmma_wait<1>();
            fence_s();
            release(of_v);
            wgmma_fence();
            issue_x(of_x);
            pass_turn();
        }
        wgmma_wait<0>();
        const int last = keys.stages - 1;
        add_tile(last);
        const position of_v = take();
        clear_unseen_values(last, of_v);
        wait_turn();
        wgmma_fence();
        issue_out(of_v);
        if (warpgroup == 0)
            pass_turn();
        wgmma_wait<0>();
        fence_s();
        fence_operand(out);
    }

    /* ---- Results -------------------------------------------------------------------------------------------- */

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

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM, int DIM_A>
__global__ void __launch_bounds__(ATTENTION_FORWARD_THREADS, 1)
    attention_forward_kernel(const __grid_constant__ forward_params params,
                             const __grid_constant__ attention_forward_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char raw[];
    attention_forward_smem<DIM, DIM_A> &smem = *(attention_forward_smem<DIM, DIM_A> *)(void *)raw;
    block_tile tile;
    if (!tile.find(params, 1, (unsigned)params.head_group))
        return;
    const row_stream keys = keys_of_tile(params, tile, 1, FORWARD_KEYS);
    smem.visible.fill(keys.band);
    if (threadIdx.x == 0) {
        smem.tile = tile;
        smem.keys = keys;
        smem.queries = (int)skl_min(block_tile::ROWS, tile.sequence.query_count - tile.first);
        smem.needed = keys.band.of(smem.queries - 1).end;
        barrier_init(smem.queries_full, 1);
        smem.barriers.init(CONSUMERS * 4);
        barrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = warpgroup_index();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<ATTENTION_FORWARD_PRODUCER_REGS>();
        if (warp_index() == CONSUMERS * 4)
            produce_keys(params, maps, smem);
    } else {
        reg_alloc<ATTENTION_FORWARD_REGS>();
        attention_forward_rows<ELEMENT, DIM, DIM_A> rows = {params, smem, warpgroup, warp_uniform(smem.keys)};
        rows.next = {0, 0};
        rows.run();
        rows.write_rows();
        rows.write_out();
    }
#endif
}

template <typename ELEMENT, int DIM, int DIM_A>
cudaError_t launch_attention_forward_tiles(const forward_params &params, const attention_forward_maps &maps)
{
    constexpr int MEMORY = sizeof(attention_forward_smem<DIM, DIM_A>);
    static_assert(MEMORY <= SMEM_MAX, "shared memory of a block");
    static_assert(block_tile::ROWS == SKL_CARRYING_ROWS, "cuda/select counts tiles");
    const skl_problem *const p = &params.problem;
    return launch_blocks(attention_forward_kernel<ELEMENT, DIM, DIM_A>,
                         grid_of(p->batch, p->heads_s, skl_ceil_div(p->len_q, block_tile::ROWS)),
                         ATTENTION_FORWARD_THREADS, MEMORY, params.call.stream, params, maps);
}

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
    return p->dim_s > 64   ? launch_attention_forward_tiles<ELEMENT, 128, 128>(kernel_params, maps)
           : p->dim_t > 64 ? launch_attention_forward_tiles<ELEMENT, 64, 128>(kernel_params, maps)
                           : launch_attention_forward_tiles<ELEMENT, 64, 64>(kernel_params, maps);
}

} // namespace sm90

#endif
