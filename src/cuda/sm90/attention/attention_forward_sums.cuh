/* Sums of the attention forward that carries its KL, over a tile of 64 queries x FORWARD_KEYS keys, and the shifts of
 * its rows. */
#ifndef SKL_CUDA_SM90_ATTENTION_ATTENTION_FORWARD_SUMS_CUH
#define SKL_CUDA_SM90_ATTENTION_ATTENTION_FORWARD_SUMS_CUH

#include "cuda/sm90/attention/attention_forward_stages.cuh"

namespace sm90
{

typedef float forward_logits[FORWARD_KEYS / 8][4];
typedef uint32_t tile_operand[FORWARD_KEYS / 16][4]; /* A operands */

constexpr float SHIFT_SLACK = 8.0F, MASKED_LOGIT = -1000.0F;
constexpr int HALF_BLOCKS = FORWARD_KEYS / 16; /* blocks of 8 columns in half of a tile */

/* How a tile is added. FAST: its logits have no mask, and are not far above the shifts. CAREFUL: any tile. AGAIN: a
 * tile that was not FAST, whose logits minus the former shifts are known. */
enum tile_mode { FAST, CAREFUL, AGAIN };

__device__ inline bool is_between(int block, int parity, const range32 &sees)
{
    const int column = acc_column(block, parity);
    return column >= sees.begin && column < sees.end;
}

/* Moves the shifts of a tile up to its largest logits, where these are far above. seen(half): columns of the tile
 * that a row of the thread sees. */
template <typename SEEN>
__device__ inline void find_shifts(float (&shift)[2], const forward_logits &x, float scale, SEEN seen)
{
    range32 sees[2] = {seen(0), seen(1)};
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int block = 0; block < FORWARD_KEYS / 8; block++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (is_between(block, e % 2, sees[e / 2]))
                largest[e / 2] = fmaxf(largest[e / 2], x[block][e]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        largest[half] = quad_max(largest[half]) * scale;
        shift[half] = largest[half] > shift[half] + SHIFT_SLACK ? largest[half] : shift[half];
    }
}

/* Moves shifts up to the largest of these logits, which are minus the shifts so far. `move`: by how much. */
__device__ inline void move_shifts(float (&shift)[2], float (&move)[2], const forward_logits &b)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float old = shift[half];
        float largest = 0.0F;
#pragma unroll
        for (int e = 0; e < FORWARD_KEYS / 4; e++)
            largest = fmaxf(largest, b[e / 2][half * 2 + e % 2]);
        shift[half] = old + quad_max(largest);
        move[half] = shift[half] - old;
    }
}

/* Computes b = Y minus its shift, S and its sums. Two sums per row keep the exponentials apart. Returns whether the
 * sums are within bounds. */
template <tile_mode MODE, typename ELEMENT, typename SEEN>
__device__ inline bool add_student(tile_operand &s, float (&sum)[2], forward_logits &b, const forward_logits &y,
                                   float scale, const float (&shift)[2], const float (&move)[2], SEEN seen,
                                   ELEMENT element)
{
    range32 sees[2];
#pragma unroll
    for (int half = 0; half < 2 && MODE == CAREFUL; half++)
        sees[half] = seen(half);
    float sums[2][2]; /* [columns' half][row] */
#pragma unroll
    for (int block = 0; block < HALF_BLOCKS; block++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float of_block[2][2];
#pragma unroll
            for (int parity = 0; parity < 2; parity++)
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    const int e = half * 2 + parity, at = block + part * HALF_BLOCKS;
                    const float m = shift[half];
                    b[at][e] = MODE == AGAIN ? b[at][e] - move[half]
                                             : minus_shift(y[at][e], scale, m, MODE == CAREFUL && is_huge(m));
                    if (MODE == CAREFUL && !is_between(at, parity, sees[half]))
                        b[at][e] = MASKED_LOGIT;
                    const float probability = of_block[part][parity] = ex2(b[at][e]);
                    sums[part][half] = block == 0 && parity == 0 ? probability : sums[part][half] + probability;
                }
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const int to = block + part * HALF_BLOCKS;
                s[to / 2][to % 2 * 2 + half] = pack(of_block[part][0], of_block[part][1], element);
            }
        }
    sum[0] = sums[0][0] + sums[1][0];
    sum[1] = sums[0][1] + sums[1][1];
    return sum[0] < SKL_LAZY_BOUND && sum[1] < SKL_LAZY_BOUND;
}

/* The sums with P. Returns whether they are within bounds. */
template <tile_mode MODE, typename SEEN>
__device__ inline bool add_teacher(row_sums (&sum)[2], const forward_logits &x, const forward_logits &b, float scale,
                                   const float (&shift)[2], const float (&move)[2], SEEN seen)
{
    range32 sees[2];
#pragma unroll
    for (int half = 0; half < 2 && MODE == CAREFUL; half++)
        sees[half] = seen(half);
    float sums[2][2], w[2][2];
#pragma unroll
    for (int block = 0; block < HALF_BLOCKS; block++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int parity = 0; parity < 2; parity++)
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    const int e = half * 2 + parity, at = block + part * HALF_BLOCKS;
                    const float m = shift[half];
                    float a = minus_shift(x[at][e], scale, m, MODE == CAREFUL && is_huge(m));
                    if (MODE == AGAIN)
                        a -= move[half];
                    if (MODE == CAREFUL && !is_between(at, parity, sees[half]))
                        a = MASKED_LOGIT;
                    const float probability = ex2(a), difference = a - b[at][e];
                    const bool first = block == 0 && parity == 0;
                    sums[part][half] = first ? probability : sums[part][half] + probability;
                    w[part][half] = first ? probability * difference : fmaf(probability, difference, w[part][half]);
                }
#pragma unroll
    for (int half = 0; half < 2; half++)
        sum[half] = {sums[0][half] + sums[1][half], 0.0F, w[0][half] + w[1][half]};
    return sum[0].l_a < SKL_LAZY_BOUND && sum[1].l_a < SKL_LAZY_BOUND;
}

} // namespace sm90

#endif
