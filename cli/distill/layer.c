#include "cli/distill/layer.h"
#include "cli/common/cli.h"
#include "cli/common/random.h"
#include "device/device.h"

#include <math.h>
#include <stdlib.h>

/* GCC makes one function per instruction set, and the loader chooses. Other compilers make one slower function. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PER_INSTRUCTION_SET __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define PER_INSTRUCTION_SET
#endif

enum {
    WIDTH = 64,       /* columns whose sums stay in registers */
    BLOCK_INNER = 256 /* rows of b that stay in the L2 cache */
};

typedef struct product {
    float *c;
    matrix a;
    const float *b;
    int64_t columns, inner;
} product;

/* c[columns] += a[depth] b[depth, columns] */
PER_INSTRUCTION_SET static void add_row(float *restrict c, const float *a, int64_t a_stride, const float *restrict b,
                                        int64_t columns, int64_t depth)
{
    int64_t j = 0;
    for (; j + WIDTH <= columns; j += WIDTH) {
        float sum[WIDTH];
        memcpy(sum, c + j, sizeof sum);
        for (int64_t k = 0; k < depth; k++)
            for (int n = 0; n < WIDTH; n++)
                sum[n] += a[k * a_stride] * b[k * columns + j + n];
        memcpy(c + j, sum, sizeof sum);
    }
    for (; j < columns; j++)
        for (int64_t k = 0; k < depth; k++)
            c[j] += a[k * a_stride] * b[k * columns + j];
}

static void run_rows(void *context, int64_t row_begin, int64_t row_end)
{
    const product *const p = context;
    for (int64_t k = 0; k < p->inner; k += BLOCK_INNER)
        for (int64_t i = row_begin; i < row_end; i++)
            add_row(p->c + i * p->columns, p->a.data + i * p->a.row_stride + k * p->a.column_stride,
                    p->a.column_stride, p->b + k * p->columns, p->columns,
                    k + BLOCK_INNER < p->inner ? BLOCK_INNER : p->inner - k);
}

void matmul_add(float *c, matrix a, const float *b, int64_t rows, int64_t columns, int64_t inner, int threads)
{
    product work = {c, a, b, columns, inner};
    parallel_rows(threads, rows, run_rows, &work);
}

/* ---- The layer ---------------------------------------------------------------------------------------------- */

int64_t layer_count(const layer_shape *shape)
{
    return 2 * shape->width * shape->heads * shape->dim;
}

layer layer_zeros(layer_shape shape)
{
    const int64_t count = layer_count(&shape);
    float *const block = cli_allocate_zeros((size_t)count, sizeof *block, "the weights of a layer");
    return (layer){shape, block, block + count / 2};
}

void layer_randomize(layer *weights, uint64_t seed)
{
    const float spread = 1 / sqrtf((float)weights->shape.width);
    uint64_t state = seed;
    for (int64_t i = 0; i < layer_count(&weights->shape); i++)
        weights->w_q[i] = spread * random_normal(&state);
}

static void project(float *out, const float *hidden, const float *weights, int64_t context, int64_t width,
                    int64_t columns, int threads)
{
    memset(out, 0, (size_t)(context * columns) * sizeof *out);
    matmul_add(out, (matrix){hidden, width, 1}, weights, context, columns, width, threads);
}

void layer_project(const layer *weights, const float *hidden, int64_t context, float *q, float *k, int threads)
{
    const layer_shape *const shape = &weights->shape;
    project(q, hidden, weights->w_q, context, shape->width, shape->heads * shape->dim, threads);
    project(k, hidden, weights->w_k, context, shape->width, shape->heads * shape->dim, threads);
}

void layer_gradient_add(layer *gradient, const float *hidden, int64_t context, const float *dq, const float *dk,
                        int threads)
{
    const layer_shape *const shape = &gradient->shape;
    const matrix transposed = {hidden, 1, shape->width};
    matmul_add(gradient->w_q, transposed, dq, shape->width, shape->heads * shape->dim, context, threads);
    matmul_add(gradient->w_k, transposed, dk, shape->width, shape->heads * shape->dim, context, threads);
}

/* ---- A student in training ---------------------------------------------------------------------------------- */

student_model student_of(const layer *initial_weights)
{
    const layer_shape shape = initial_weights->shape;
    const student_model student = {layer_zeros(shape), layer_zeros(shape), layer_zeros(shape), layer_zeros(shape), 0};
    memcpy(student.weights.w_q, initial_weights->w_q, (size_t)layer_count(&shape) * sizeof(float));
    return student;
}

void student_free(student_model *student)
{
    free(student->weights.w_q);
    free(student->gradient.w_q);
    free(student->first_moment.w_q);
    free(student->second_moment.w_q);
}

float adam_rate(float peak, int64_t step, int64_t steps)
{
    static const double warm_up = 0.05, floor_share = 0.02, pi = 3.14159265358979323846;
    const double progress = ((double)step + 0.5) / (double)steps;
    if (progress < warm_up)
        return (float)((double)peak * progress / warm_up);
    const double decay = 0.5 + 0.5 * cos(pi * (progress - warm_up) / (1 - warm_up));
    return (float)((double)peak * (floor_share + (1 - floor_share) * decay));
}

/* m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
 * weights -= rate m' / (sqrt(v') + epsilon), where ' corrects the bias of moments that start at 0 */
void adam_step(student_model *student, float rate)
{
    static const float b1 = 0.9F, b2 = 0.95F, epsilon = 1e-9F;
    const double step = (double)++student->step;
    const float correct_m = (float)(1 / (1 - pow((double)b1, step)));
    const float correct_v = (float)(1 / (1 - pow((double)b2, step)));
    float *const weights = student->weights.w_q, *const gradient = student->gradient.w_q;
    float *const m = student->first_moment.w_q, *const v = student->second_moment.w_q;
    for (int64_t i = 0; i < layer_count(&student->weights.shape); i++) {
        m[i] = b1 * m[i] + (1 - b1) * gradient[i];
        v[i] = b2 * v[i] + (1 - b2) * gradient[i] * gradient[i];
        weights[i] -= rate * correct_m * m[i] / (sqrtf(correct_v * v[i]) + epsilon);
    }
}
