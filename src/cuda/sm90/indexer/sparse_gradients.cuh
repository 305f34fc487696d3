/* Gradients of a sparse indexer by wgmma, from dy, the gradient of its logits (sparse_scores.cuh):
 *
 *   D_g = sum_n dy_n [z_gn > 0] k_n      dq_g = scale w_g D_g      dw_g = scale <q_g, D_g>
 *   dk_key(n) += scale dy_n sum_g (w_g [z_gn > 0]) q_g             z_gn = <q_g, k_n>
 *
 * dq needs z with heads as rows and dk needs it with keys as rows. Both are computed: four products of 64 x 64 x 128
 * per 64 keys, 1,024 clocks, instead of three and a transposition through shared memory. What a list entry adds to
 * dk, 512 bytes, goes to memory by a bulk reduction, in no fixed order. An H200 takes about 2,800 clocks per 64 keys,
 * which are 2.7 TB/s of reductions; as red.global.add.v4.f32 of accumulators they take 3,600.
 *
 *   block      persistent, one per SM, one row at a time; a producer, a dq warpgroup and two dk warpgroups
 *   registers  152 per consumer thread: z (32), D or dk of 64 keys (64), a gated operand (16); 56 per producer thread
 *   shared     6 stages of 64 keys (16 KB at 128 dimensions), queries of two rows, dk of a tile per dk warpgroup:
 *              199 KB
 *
 *   producer   | gather 6 tiles ahead; queries of the next row
 *   dq         | z 0 | gate | D += 0, z 1 | gate | D += 1, z 2 | ...
 *   dk 0       | z 0^T | gate | dk 0 | to shared memory, reduce | z 2^T | gate | dk 2 | ...
 *   dk 1       |       | z 1^T | gate | dk 1 | to shared memory, reduce | z 3^T | ... */
#ifndef SKL_CUDA_SM90_INDEXER_SPARSE_GRADIENTS_CUH
#define SKL_CUDA_SM90_INDEXER_SPARSE_GRADIENTS_CUH

#include "cuda/common/strips/gradients.cuh"
#include "cuda/sm90/indexer/gather_ring.cuh"

namespace sm90
{

constexpr int DK_WARPGROUPS = 2;
constexpr int GRADIENT_REGISTERS = 152;                              /* registers per consumer thread */
constexpr int SPARSE_GRADIENT_CONSUMERS = (1 + DK_WARPGROUPS) * 128; /* threads */
constexpr int SPARSE_GRADIENT_THREADS = 128 + SPARSE_GRADIENT_CONSUMERS;

/* f16 operands are multiples of a unit, a power of two. The unit of dy is a constant, because dy is within -1 and 1.
 */
template <typename ELEMENT> constexpr bool HAS_UNITS = std::is_same_v<ELEMENT, skl_f16>;
template <typename ELEMENT> constexpr float DY_UNIT = HAS_UNITS<ELEMENT> ? 0x1p-14F : 1.0F;

template <int DIM> struct sparse_gradient_smem {
    static constexpr int DEPTH = 6;
    static constexpr int DK_STRIDE = DIM + 8; /* floats: stores of pairs have no bank conflicts */

    alignas(1024) row_stage<DIM> stages[DEPTH];
    row_stage<DIM> queries[ROW_SLOTS];
    float dk[DK_WARPGROUPS][STAGE_KEYS][DK_STRIDE]; /* dk of the entries of a tile */
    float dy[DEPTH][STAGE_KEYS];
    row_ring rows;
    uint64_t full[DEPTH], empty[DEPTH];

    __device__ void init_barriers()
    {
        for (int n = 0; n < DEPTH; n++) {
            barrier_init(full[n], 128);
            barrier_init(empty[n], SPARSE_GRADIENT_CONSUMERS);
        }
        for (int n = 0; n < ROW_SLOTS; n++) {
            barrier_init(rows.full[n], 2 * 128); /* each producer thread arrives twice: row; copies of queries */
            barrier_init(rows.empty[n], SPARSE_GRADIENT_CONSUMERS);
        }
    }
};

__device__ inline int tiles_of(const sparse_row32 &row)
{
    return warp_uniform((row.count + STAGE_KEYS - 1) / STAGE_KEYS);
}

/* Calls visit(slot) for each row of the block. */
template <int DIM, typename VISIT>
__device__ inline void for_each_row(sparse_gradient_smem<DIM> &smem, const sparse_params &params, VISIT visit)
{
    ring_position<ROW_SLOTS> at;
#pragma unroll 1
    for (int n = (int)blockIdx.x; n < params.row_count; n += (int)gridDim.x, at.next()) {
        barrier_wait(smem.rows.full[at.stage], at.phase);
        fence_proxy_async();
        visit(at.stage);
        barrier_arrive(smem.rows.empty[at.stage]);
    }
}

/* ---- Producer ------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM>
__device__ inline void produce_gradient_rows(sparse_gradient_smem<DIM> &smem, const sparse_params &params)
{
    constexpr int SLABS = SLABS_OF<DIM>;
    const int thread = (int)(threadIdx.x % 128), looked_up = looked_up_row();
    const int index_heads = (int)params.problem.index_heads;
    ring_position<ROW_SLOTS> slot;
    ring_position<sparse_gradient_smem<DIM>::DEPTH> at;
#pragma unroll 1
    for (int n = (int)blockIdx.x; n < params.row_count; n += (int)gridDim.x, slot.next()) {
        barrier_wait(smem.rows.empty[slot.stage], slot.phase ^ 1);
        const sparse_row32 &row = smem.rows.slots[slot.stage].row;
        const int count = find_row(smem.rows, smem.rows.slots[slot.stage], params, n);
        if (count > 0)
            copy_heads<SLABS>(smem.queries[slot.stage].slabs[0][0],
                              heads_of<ELEMENT>(params.b, row, row.head * index_heads), index_heads);
        cp_async_arrive(smem.rows.full[slot.stage]);
        barrier_arrive(smem.rows.full[slot.stage]);
        const row_source<ELEMENT> keys = keys_of_row<ELEMENT>(params.b, row, row.head / params.b.heads_per_key);
        const float *const dy = params.dy + n * params.problem.top_k;
        int next = row.key(looked_up);
#pragma unroll 1
        for (int first = 0; first < count; first += STAGE_KEYS, at.next()) {
            const int key = next;
            next = row.key(looked_up + first + STAGE_KEYS);
            barrier_wait(smem.empty[at.stage], at.phase ^ 1);
            copy_tile<SLABS>(smem.stages[at.stage].slabs[0][0], keys, key);
            if (thread < STAGE_KEYS)
                cp_async_4(shared_address(&smem.dy[at.stage][thread]), dy + first + thread, first + thread < count);
            cp_async_arrive(smem.full[at.stage]);
        }
    }
}

/* ---- dq and dw ------------------------------------------------------------------------------------------------ */

template <typename ELEMENT, int DIM> struct sparse_dq {
    sparse_gradient_smem<DIM> &smem;
    const sparse_params &params;
    ring_position<sparse_gradient_smem<DIM>::DEPTH> at;

    __device__ static int head_of(int half)
    {
        return (int)(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) + half * 8;
    }

    /* D over all tiles of the row, in units of dy. */
    __device__ void multiply(float (&sums)[DIM / 8][4], const row_stage<DIM> &queries, int tiles)
    {
        constexpr float PER_UNIT = 1.0F / DY_UNIT<ELEMENT>;
        stage_logits z;
        uint32_t gated[STAGE_KEYS / 16][4]; /* dy [z > 0], in units */
        int former = 0;
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++, at.next()) {
            const row_stage<DIM> &stage = smem.stages[at.stage];
            barrier_wait(smem.full[at.stage], at.phase);
            fence_proxy_async();
            wgmma_fence();
            wgmma_slabs<ELEMENT, DIM, STAGE_KEYS, STAGE_KEYS>(z, k_major_operand(queries.slabs),
                                                              k_major_operand(stage.slabs));
            wgmma_commit();
            wgmma_wait<0>();
            fence_operand(z);
            fence_operand(sums);
            if (tile > 0)
                barrier_arrive(smem.empty[former]);
            former = at.stage;
#pragma unroll
            for (int step = 0; step < STAGE_KEYS / 16; step++)
#pragma unroll
                for (int reg = 0; reg < 4; reg++) {
                    const int block = step * 2 + reg / 2, half = reg % 2;
                    const float2 dy = load_shared_2(smem.dy[at.stage][acc_column(block, 0)]);
                    gated[step][reg] = gate_pair<ELEMENT>(dy, z[block][half * 2], z[block][half * 2 + 1],
                                                          make_float2(PER_UNIT, PER_UNIT), params.least);
                }
            wgmma_fence();
            wgmma_steps<true, STAGE_KEYS / 16>(sums, gated, mn_major_operand(stage.slabs, SLAB_SIZE), tile > 0,
                                               ELEMENT());
            wgmma_commit();
        }
        wgmma_wait<0>();
        fence_operand(sums);
        barrier_arrive(smem.empty[former]);
    }

    __device__ void store(const float (&sums)[DIM / 8][4], const row_slot &slot) const
    {
        const skl_problem &p = params.problem;
        const sparse_row32 &row = slot.row;
        const skl_output &dq = params.call.gradients.dq_s, &dw = params.call.gradients.dw_s;
        const int64_t batch = row.sequence.batch, query = row.sequence.query_begin + row.query;
        const row_source<ELEMENT> queries = heads_of<ELEMENT>(params.b, row, row.head * p.index_heads);
        const float factor = upstream(row) * p.scale_s * DY_UNIT<ELEMENT>;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int head = head_of(half);
            const bool exists = head < p.index_heads;
            const auto sum = [&](int n, int parity) { return sums[n][half * 2 + parity]; };
            const float dot =
                dot_of<ELEMENT, DIM / 8>(sum, queries.rows + (exists ? head : 0) * queries.stride, queries.dim);
            if (dw.data != NULL && exists && threadIdx.x % 4 == 0)
                skl_store(dw.data, skl_grad_dtype(&p, p.dtype_w), SKL_ROW(dw, batch, row.head, query) + head,
                          dot * factor);
            if (dq.data == NULL || !exists)
                continue;
            const float weight = slot.weights[head] * factor;
            const gradient_columns columns(dq.data, SKL_ROW(dq, batch, row.head * p.index_heads + head, query),
                                           skl_grad_dtype(&p, p.dtype_s), queries.dim);
#pragma unroll
            for (int n = 0; n < DIM / 8; n++)
                columns.store_pair(n, sum(n, 0) * weight, sum(n, 1) * weight, ELEMENT());
        }
    }

    __device__ float upstream(const sparse_row32 &row) const
    {
        const skl_input &given = params.call.inputs.grad_kl;
        return given.data != NULL ? skl_row_value(&given, &row.sequence, row.head, row.query) : 1.0F;
    }

    /* The gradients of a row without valid entries are 0, whatever its weights and its upstream gradient are. */
    __device__ void clear(const sparse_row32 &row) const
    {
        const skl_problem &p = params.problem;
        const skl_output &dq = params.call.gradients.dq_s, &dw = params.call.gradients.dw_s;
        const int64_t batch = row.sequence.batch, query = row.sequence.query_begin + row.query;
        const int64_t head = row.head * p.index_heads, thread = threadIdx.x % 128;
        for (int64_t n = thread; dq.data != NULL && n < p.index_heads * p.dim_s; n += 128)
            skl_store(dq.data, skl_grad_dtype(&p, p.dtype_s),
                      SKL_ROW(dq, batch, head + n / p.dim_s, query) + n % p.dim_s, 0.0F);
        if (dw.data != NULL && thread < p.index_heads)
            skl_store(dw.data, skl_grad_dtype(&p, p.dtype_w), SKL_ROW(dw, batch, row.head, query) + thread, 0.0F);
    }

    __device__ void run()
    {
        for_each_row(smem, params, [&](int slot) {
            const sparse_row32 &row = smem.rows.slots[slot].row;
            const int tiles = tiles_of(row);
            if (tiles > 0) {
                float sums[DIM / 8][4];
                multiply(sums, smem.queries[slot], tiles);
                store(sums, smem.rows.slots[slot]);
            } else if (row.exists) {
                clear(row);
            }
        });
    }
};

/* ---- dk ------------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM> struct sparse_dk {
    sparse_gradient_smem<DIM> &smem;
    const sparse_params &params;
    int index; /* number of the dk warpgroup, which takes every other tile */
    ring_position<sparse_gradient_smem<DIM>::DEPTH> at;

    /* Adds the dk of a tile's entries to the sums. A warp has 16 keys, and passes them on as rows through shared
     * memory: in its accumulators, a row is spread over four lanes. base: row 0 of the key head. */
    __device__ void add_tile_dk(const float (&dk)[DIM / 8][4], float *base, int key, const float (&factors)[2]) const
    {
        const int lane = (int)(threadIdx.x % 32);
        float(*const rows)[sparse_gradient_smem<DIM>::DK_STRIDE] = smem.dk[index] + threadIdx.x % 128 / 32 * 16;
        tma_wait_read(); /* the tile before has been read */
        __syncwarp();
#pragma unroll
        for (int n = 0; n < DIM / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *(float2 *)(void *)&rows[lane / 4 + half * 8][acc_column(n, 0)] =
                    make_float2(dk[n][half * 2] * factors[half], dk[n][half * 2 + 1] * factors[half]);
        fence_proxy_async();
        __syncwarp();
        if (lane < 16 && key >= 0)
            bulk_reduce_add(base + key * params.dk_sums.stride_row, rows[lane], params.b.dim * (int)sizeof(float));
        bulk_commit();
    }

    /* All tiles of the row. weights: weights of the index heads in the thread's columns, two in each, in the unit of
     * `factor`. */
    __device__ void multiply(const uint32_t (&weights)[INDEX_HEADS / 8], const row_slot &slot,
                             const row_stage<DIM> &queries, int tiles, float factor)
    {
        const sparse_row32 &row = slot.row;
        const skl_output &sums = params.dk_sums;
        float *const base = (float *)sums.data + SKL_ROW(sums, row.sequence.batch, row.head / params.b.heads_per_key,
                                                         row.sequence.key_begin);
        const int first = (int)(threadIdx.x % 128 / 32 * 16), lane = (int)(threadIdx.x % 32);
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++, at.next()) {
            barrier_wait(smem.full[at.stage], at.phase);
            if (tile % DK_WARPGROUPS != index) {
                barrier_arrive(smem.empty[at.stage]);
                continue;
            }
            fence_proxy_async();
            stage_logits z;
            wgmma_fence();
            wgmma_slabs<ELEMENT, DIM, STAGE_KEYS, STAGE_KEYS>(z, k_major_operand(smem.stages[at.stage].slabs),
                                                              k_major_operand(queries.slabs));
            wgmma_commit();
            const int key = row.key(tile * STAGE_KEYS + first + lane % 16);
            const float factors[2] = {load_shared(smem.dy[at.stage][first + lane / 4]) * factor,
                                      load_shared(smem.dy[at.stage][first + lane / 4 + 8]) * factor};
            wgmma_wait<0>();
            fence_operand(z);
            barrier_arrive(smem.empty[at.stage]);
            uint32_t gated[INDEX_HEADS / 16][4]; /* w [z > 0] */
#pragma unroll
            for (int step = 0; step < INDEX_HEADS / 16; step++)
#pragma unroll
                for (int reg = 0; reg < 4; reg++) {
                    const int block = step * 2 + reg / 2, half = reg % 2;
                    const uint32_t low = z[block][half * 2] > params.least ? 0x0000FFFFU : 0U;
                    const uint32_t high = z[block][half * 2 + 1] > params.least ? 0xFFFF0000U : 0U;
                    gated[step][reg] = weights[block] & (low | high);
                }
            float dk[DIM / 8][4];
            wgmma_fence();
            wgmma_steps<true, INDEX_HEADS / 16>(dk, gated, mn_major_operand(queries.slabs, SLAB_SIZE), 0, ELEMENT());
            wgmma_commit();
            wgmma_wait<0>();
            fence_operand(dk);
            add_tile_dk(dk, base, key, factors);
        }
    }

    /* The unit of the row's weights. The four lanes of an accumulator row have all of them. */
    __device__ static float weight_unit(const row_slot &slot)
    {
        if constexpr (!HAS_UNITS<ELEMENT>)
            return 1.0F;
        float largest = 0.0F;
#pragma unroll
        for (int column = 0; column < INDEX_HEADS / 4; column++) {
            const float magnitude = fabsf(slot.weights[acc_column(column / 2, column % 2)]);
            largest = magnitude < INFINITY ? fmaxf(largest, magnitude) : largest;
        }
        largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 1));
        return unit_for(fmaxf(largest, __shfl_xor_sync(~0U, largest, 2)));
    }

    __device__ void run()
    {
        const skl_input &given = params.call.inputs.grad_kl;
        for_each_row(smem, params, [&](int n) {
            const row_slot &slot = smem.rows.slots[n];
            const sparse_row32 &row = slot.row;
            const int tiles = tiles_of(row);
            if (params.dk_sums.data == NULL) {
                for (int tile = 0; tile < tiles; tile++, at.next()) {
                    barrier_wait(smem.full[at.stage], at.phase);
                    barrier_arrive(smem.empty[at.stage]);
                }
                return;
            }
            const float unit = weight_unit(slot);
            uint32_t weights[INDEX_HEADS / 8];
#pragma unroll
            for (int block = 0; block < INDEX_HEADS / 8; block++)
                weights[block] = pack(slot.weights[acc_column(block, 0)] / unit,
                                      slot.weights[acc_column(block, 1)] / unit, ELEMENT());
            const float upstream =
                tiles > 0 && given.data != NULL ? skl_row_value(&given, &row.sequence, row.head, row.query) : 1.0F;
            multiply(weights, slot, smem.queries[n], tiles, upstream * params.problem.scale_s * unit);
        });
        tma_wait_read();
    }
};

/* ---- Kernel --------------------------------------------------------------------------------------------------- */

template <typename ELEMENT, int DIM>
__global__ void __launch_bounds__(SPARSE_GRADIENT_THREADS, 1)
    sparse_gradient_kernel(const __grid_constant__ sparse_params params)
{
    extern __shared__ __align__(1024) unsigned char raw[];
    sparse_gradient_smem<DIM> &smem = *(sparse_gradient_smem<DIM> *)(void *)raw;
    static_assert(sizeof smem <= SMEM_MAX, "the stages leave room for the rest");
    if (threadIdx.x == 0)
        smem.init_barriers();
    barrier_init_fence();
    __syncthreads();
    const int warpgroup = warpgroup_index();
    static_assert(PRODUCER_REGISTERS + 3 * GRADIENT_REGISTERS <= 4 * 128, "the block has 128 per thread");
    if (warpgroup == 0) {
        reg_dealloc<PRODUCER_REGISTERS>();
        produce_gradient_rows<ELEMENT>(smem, params);
    } else {
        reg_alloc<GRADIENT_REGISTERS>();
        if (warpgroup == 1) {
            sparse_dq<ELEMENT, DIM> role = {smem, params, {}};
            role.run();
        } else {
            sparse_dk<ELEMENT, DIM> role = {smem, params, warpgroup - 2, {}};
            role.run();
        }
    }
}

} // namespace sm90

#endif
