/* All rules about the arguments of run calls. A refused call writes nothing. */
#define _DEFAULT_SOURCE /* alarm */
#include "runner.h"

#include <stdlib.h>
#include <unistd.h>

#include "any_call.h"
#include "case_words.h"
#include "device.h"
#include "edit.h"

/* Problems for the rules below. */
#define SMALL SHAPE(2, 5, 6), HEADS(2, 2), DIMS(4, 4)
static const test_case plain = {"plain", SMALL};
static const test_case reverse = {"reverse", SMALL, REVERSE};
static const test_case bf16 = {"bf16", SMALL, TYPES(BF16, BF16)};
static const test_case no_gradients = {"no gradients", SMALL, .without = ALL_GRADIENTS};
static const test_case teacher_groups = {"teacher_groups", SHAPE(2, 5, 6), HEADS(4, 2), DIMS(4, 4)};
static const test_case padded = {"padded", SHAPE(3, 5, 6), HEADS(2, 2), DIMS(4, 4), KEY_LENGTHS(6, 0, 3)};
static const test_case packed = {"packed", PACKED(3, LENGTHS(0, 3, 3, 7), LENGTHS(0, 2, 7, 8)), HEADS(2, 2),
                                 DIMS(4, 4), TAILS(1, 2)};

static const test_case indexer = {"indexer", SHAPE(2, 5, 6), HEADS(2, 2), DIMS(4, 4), INDEXER(3)};
static const test_case bounded = {"bounded", SHAPE(2, 5, 6), HEADS(2, 2), DIMS(4, 4), BOUNDS(CHUNKS)};
static const test_case sinks = {"sinks", SHAPE(2, 5, 6), HEADS(2, 2), DIMS(4, 4), SINKS};
static const test_case sink_groups = {"sink groups", SHAPE(2, 5, 6), HEADS(4, 2), DIMS(4, 4), SINKS};
static const test_case attention = {"attention",     SHAPE(2, 5, 6), HEADS(2, 2),
                                    KEY_HEADS(1, 1), DIMS(16, 24),   ATTENTION};
static const test_case student_only = {"student only", SMALL, STUDENT_ONLY};
static const test_case sparse = {"sparse", SHAPE(2, 5, 6), HEADS(4, 2), DIMS(4, 4), INDEXER(3), TOP_K(2)};
static const test_case packed_sparse = {
    "packed sparse", PACKED(2, LENGTHS(0, 4, 9), LENGTHS(0, 9, 16)), HEADS(4, 2), DIMS(8, 8), INDEXER(2), TOP_K(3)};
static const test_case pooled = {
    "pooled", SHAPE(1, 5, 17), HEADS(2, 1), DIMS(8, 8), INDEXER(2), TOP_K(3), POOL(MAX, MEAN, COMPLETE, 5)};

#define SET(member, to)           SET_IN(any_call, member, to)
#define SET_AT(member, index, to) SET_AT_IN(any_call, member, index, to)
#define NO(member)                SET_IN(any_call, member, 0)
#define ADD(member, amount)       ADD_IN(any_call, member, amount)
#define COPY(member, from)        COPY_IN(any_call, member, from)

/* A valid call, with edits. */
typedef struct call_rule {
    call_kind kind;
    const test_case *test_case;
    const char *message; /* NULL: accepted */
    edit edits[4];
} call_rule;

/* The formatter would put each value of a row on a line of its own. */
/* clang-format off */
#define ACCEPTED(kind, case, ...)         {kind, &case, NULL, {__VA_ARGS__}}
#define REFUSED(kind, case, message, ...) {kind, &case, message, {__VA_ARGS__}}
/* clang-format on */

static const call_rule call_rules[] = {
    /* Missing structs. */
    REFUSED(FORWARD, plain, "plan=NULL: must be given", NO(plan)),
    REFUSED(FORWARD, plain, "inputs=NULL: must be given", NO(inputs_address)),
    REFUSED(FORWARD, plain, "rows=NULL: must be given", NO(rows_address)),
    REFUSED(BACKWARD, plain, "plan=NULL: must be given", NO(plan)),
    REFUSED(BACKWARD, plain, "inputs=NULL: must be given", NO(inputs_address)),
    REFUSED(BACKWARD, plain, "gradients=NULL: must be given", NO(gradients_address)),
    REFUSED(ONE_PASS, plain, "plan=NULL: must be given", NO(plan)),
    REFUSED(ONE_PASS, plain, "inputs=NULL: must be given", NO(inputs_address)),
    REFUSED(ONE_PASS, plain, "rows=NULL: must be given", NO(rows_address)),
    REFUSED(ONE_PASS, plain, "gradients=NULL: must be given", NO(gradients_address)),
    REFUSED(PARTIAL, plain, "plan=NULL: must be given", NO(plan)),
    REFUSED(PARTIAL, plain, "inputs=NULL: must be given", NO(inputs_address)),
    REFUSED(PARTIAL, plain, "states=NULL: must be given", NO(states)),
    REFUSED(MERGE, plain, "plan=NULL: must be given", NO(plan)),
    REFUSED(MERGE, plain, "into=NULL: must be given", NO(states)),
    REFUSED(MERGE, plain, "from=NULL: must be given", NO(from)),
    REFUSED(FINISH, plain, "plan=NULL: must be given", NO(plan)),
    REFUSED(FINISH, plain, "rows=NULL: must be given", NO(rows_address)),
    REFUSED(FINISH, plain, "states=NULL: must be given", NO(states)),
    ACCEPTED(FINISH, plain, NO(inputs_address)),
    REFUSED(FINISH, sinks, "sink_t=NULL: must be given when sinks=1", NO(inputs_address)),
    REFUSED(ATTENTION_BACKWARD, attention, "plan=NULL: must be given", NO(plan)),
    REFUSED(ATTENTION_BACKWARD, attention, "attention=NULL: must be given", NO(attention_address)),
    REFUSED(ATTENTION_FORWARD, attention, "plan=NULL: must be given", NO(plan)),
    REFUSED(ATTENTION_FORWARD, attention, "v_s=NULL: must be given", NO(v_s_address)),
    REFUSED(ATTENTION_FORWARD, attention, "o_s=NULL: must be given", NO(o_s_address)),
    REFUSED(STATS, plain, "plan=NULL: must be given", NO(plan)),
    REFUSED(STATS, plain, "inputs=NULL: must be given", NO(inputs_address)),
    REFUSED(STATS, plain, "stats=NULL: must be given", NO(stats_address)),

    /* Sizes of structs. */
    REFUSED(FORWARD, plain, "inputs.struct_size=0: must be the sizeof", SET(inputs.struct_size, 0)),
    REFUSED(FORWARD, plain, "rows.struct_size=8: must be ", SET(rows.struct_size, 8)),
    REFUSED(BACKWARD, plain, "gradients.struct_size=9: must be ", SET(gradients.struct_size, 9)),
    REFUSED(PARTIAL, plain, "inputs.struct_size=0: must be the sizeof", SET(inputs.struct_size, 0)),
    REFUSED(FINISH, plain, "rows.struct_size=0: must be the sizeof", SET(rows.struct_size, 0)),
    REFUSED(ATTENTION_BACKWARD, attention, "attention.struct_size=", ADD(attention.struct_size, -1)),

    /* Missing tensors. */
    REFUSED(FORWARD, plain, "q_t=NULL: must be given", NO(inputs.q_t.data)),
    REFUSED(FORWARD, plain, "k_t=NULL: must be given", NO(inputs.k_t.data)),
    REFUSED(FORWARD, plain, "q_s=NULL: must be given", NO(inputs.q_s.data)),
    REFUSED(FORWARD, plain, "k_s=NULL: must be given", NO(inputs.k_s.data)),
    ACCEPTED(FORWARD, plain, NO(rows.kl.data), NO(rows.lse_t.data), NO(rows.lse_s.data)),
    ACCEPTED(FORWARD, plain, NO(inputs.lse_t.data), NO(inputs.lse_s.data), NO(inputs.kl.data),
             NO(inputs.grad_kl.data)),
    REFUSED(BACKWARD, plain, "lse_t=NULL: must be given: a backward needs the LSEs of the forward",
            NO(inputs.lse_t.data)),
    REFUSED(BACKWARD, plain, "lse_s=NULL: must be given: a backward needs the LSEs of the forward",
            NO(inputs.lse_s.data)),
    REFUSED(BACKWARD, plain, "kl=NULL: must be given: gradients of the first argument of the KL need it",
            NO(inputs.kl.data)),
    ACCEPTED(BACKWARD, plain, NO(inputs.kl.data), NO(gradients.dq_t.data), NO(gradients.dk_t.data)),
    REFUSED(BACKWARD, reverse, "kl=NULL: must be given: gradients of the first argument", NO(inputs.kl.data)),
    ACCEPTED(BACKWARD, reverse, NO(inputs.kl.data), NO(gradients.dq_s.data), NO(gradients.dk_s.data)),
    REFUSED(BACKWARD, teacher_groups, "dot_t=NULL: must be given: teacher gradients with heads_t > heads_s need it",
            NO(inputs.dot_t.data)),
    ACCEPTED(BACKWARD, teacher_groups, NO(inputs.dot_t.data), NO(gradients.dq_t.data), NO(gradients.dk_t.data)),
    REFUSED(ONE_PASS, plain, "lse_t=NULL: must be given", NO(inputs.lse_t.data)),
    REFUSED(ONE_PASS, plain, "lse_s=NULL: must be given", NO(inputs.lse_s.data)),
    REFUSED(ONE_PASS, plain, "rows.kl=NULL: must be given: gradients of the first argument", NO(rows.kl.data)),
    ACCEPTED(ONE_PASS, plain, NO(rows.kl.data), NO(gradients.dq_t.data), NO(gradients.dk_t.data)),
    REFUSED(ONE_PASS, teacher_groups, "rows.dot_t=NULL: must be given: teacher gradients with heads_t > heads_s",
            NO(rows.dot_t.data)),
    REFUSED(PARTIAL, teacher_groups,
            "lse_t=NULL: must be given: partial states with heads_t > heads_s need the LSE of all keys",
            NO(inputs.lse_t.data)),
    ACCEPTED(PARTIAL, plain, NO(inputs.lse_t.data)),
    REFUSED(FINISH, teacher_groups, "lse_t=NULL: must be given: rows.lse_t or sinks with heads_t > heads_s need it",
            NO(inputs.lse_t.data)),
    REFUSED(FINISH, teacher_groups, "lse_t=NULL: must be given", NO(inputs_address)),
    ACCEPTED(FINISH, teacher_groups, NO(inputs_address), NO(rows.lse_t.data)),
    REFUSED(STATS, plain, "k_s=NULL: must be given", NO(inputs.k_s.data)),

    /* Tensors that must not be given. */
    REFUSED(STATS, plain, "stats.lse given: must be NULL if lse_s is given", COPY(stats.lse, rows.kl)),
    REFUSED(FORWARD, plain, "rows.dot_t given: must be NULL unless heads_t > heads_s", COPY(rows.dot_t, rows.kl)),
    REFUSED(ONE_PASS, plain, "rows.lse_t given: must be NULL in a one-pass call", COPY(rows.lse_t, gradients.dq_t)),
    REFUSED(ONE_PASS, plain, "rows.lse_s given: must be NULL in a one-pass call", COPY(rows.lse_s, gradients.dq_t)),
    REFUSED(FINISH, teacher_groups, "rows.dot_t given: must be NULL in skl_states_finish",
            COPY(rows.dot_t, inputs.lse_t)),
    REFUSED(BACKWARD, no_gradients, "dq_t given: must be NULL: the plan's problem.gradients does not name it",
            COPY(gradients.dq_t, inputs.q_t)),
    REFUSED(BACKWARD, no_gradients, "dk_t given: must be NULL", COPY(gradients.dk_t, inputs.k_t)),
    REFUSED(BACKWARD, no_gradients, "dq_s given: must be NULL", COPY(gradients.dq_s, inputs.q_s)),
    REFUSED(BACKWARD, no_gradients, "dk_s given: must be NULL", COPY(gradients.dk_s, inputs.k_s)),

    /* Addresses. */
    REFUSED(FORWARD, plain, "must be aligned to its element size, 4 bytes", ADD(inputs.q_t.data, 1)),
    REFUSED(FORWARD, plain, "must be aligned to its element size, 4 bytes", ADD(inputs.k_s.data, 2)),
    REFUSED(FORWARD, bf16, "must be aligned to its element size, 2 bytes", ADD(inputs.k_t.data, 1)),
    REFUSED(FORWARD, plain, "must be aligned to its element size", ADD(rows.kl.data, 2)),
    REFUSED(BACKWARD, bf16, "must be aligned to its element size, 2 bytes", ADD(gradients.dk_s.data, 1)),
    ACCEPTED(FORWARD, plain, COPY(inputs.k_s, inputs.k_t), COPY(inputs.q_s, inputs.q_t)),

    /* Outputs that overlap other tensors. `plain` has contiguous tensors of [2, 2, 5, 4] and [2, 2, 6, 4] floats. */
    REFUSED(FORWARD, plain, "and rows.lse_s=", COPY(rows.lse_s, rows.kl)),
    REFUSED(FORWARD, plain, "overlap: an output must not share memory with another tensor",
            COPY(rows.lse_s, rows.kl)),
    REFUSED(FORWARD, plain, "q_s=", COPY(rows.kl.data, inputs.q_s.data), ADD(rows.kl.data, 4 * 79)),
    REFUSED(FORWARD, plain, "grad_kl=", COPY(rows.kl, inputs.grad_kl)),
    ACCEPTED(FORWARD, plain, COPY(rows.kl, inputs.kl)),
    ACCEPTED(FORWARD, teacher_groups, COPY(rows.lse_t, inputs.lse_t)),
    REFUSED(FORWARD, teacher_groups, "overlap", COPY(rows.lse_t, inputs.lse_t), ADD(rows.lse_t.data, 4)),
    REFUSED(FORWARD, teacher_groups, "overlap", COPY(rows.lse_t, inputs.lse_t), SET(inputs.lse_t.stride_row, 0)),
    REFUSED(FORWARD, teacher_groups, "overlap", COPY(rows.lse_t, inputs.lse_t), SET(inputs.lse_t.stride_head, 0)),
    REFUSED(FORWARD, teacher_groups, "overlap", COPY(rows.lse_t, inputs.lse_t), SET(inputs.lse_t.stride_batch, 0)),
    REFUSED(BACKWARD, plain, "dq_t=", COPY(gradients.dq_s, gradients.dq_t)),
    REFUSED(BACKWARD, plain, "q_s=", COPY(gradients.dq_s, inputs.q_s)),
    REFUSED(BACKWARD, plain, "overlap", COPY(gradients.dq_s, gradients.dq_t), ADD(gradients.dq_s.data, 4 * 79)),
    REFUSED(BACKWARD, plain, "overlap", COPY(gradients.dq_s, gradients.dq_t), ADD(gradients.dq_s.data, -4 * 79)),
    REFUSED(BACKWARD, plain, "lse_s=", COPY(gradients.dq_t.data, inputs.lse_s.data),
            ADD(gradients.dq_t.data, -4 * 79)),
    REFUSED(PARTIAL, plain, "and states=", COPY(states, inputs.k_t.data)),
    REFUSED(FINISH, plain, "rows.kl=", COPY(rows.lse_t, rows.kl)),
    REFUSED(FINISH, plain, "states=", COPY(rows.kl.data, states)),
    ACCEPTED(FINISH, teacher_groups, COPY(rows.lse_t, inputs.lse_t)),

    /* Outputs in the arrays of lengths. */
    REFUSED(FORWARD, packed, "and rows.kl=", COPY(rows.kl.data, inputs.cu_seqlens_q)),
    REFUSED(FINISH, packed, "cu_seqlens_k=", COPY(rows.kl.data, inputs.cu_seqlens_k)),
    REFUSED(FINISH, padded, "key_lengths=", COPY(rows.lse_s.data, inputs.key_lengths)),
    REFUSED(FINISH, sinks, "sink_s=", COPY(rows.kl.data, inputs.sink_s)),
    REFUSED(FORWARD, padded, "key_lengths=", COPY(rows.lse_s.data, inputs.key_lengths), ADD(rows.lse_s.data, 8)),
    REFUSED(FORWARD, padded, "key_lengths=", ADD(inputs.key_lengths, 2)),

    /* Strides. */
    REFUSED(FORWARD, plain, "q_t.stride_row=-4: must be at least 0", SET(inputs.q_t.stride_row, -4)),
    REFUSED(FORWARD, plain, "k_t.stride_head=-1: must be at least 0", SET(inputs.k_t.stride_head, -1)),
    REFUSED(FORWARD, plain, "k_s.stride_batch=-1: must be at least 0", SET(inputs.k_s.stride_batch, -1)),
    ACCEPTED(FORWARD, packed, SET(inputs.k_s.stride_batch, -1)),
    REFUSED(FORWARD, plain, "k_s strides (batch ", SET(inputs.k_s.stride_batch, INT64_MAX)),
    REFUSED(FORWARD, plain, "span overflows 64 bits", SET(inputs.q_s.stride_row, INT64_MAX / 2)),
    REFUSED(BACKWARD, plain, "span overflows 64 bits", SET(gradients.dq_s.stride_batch, INT64_MAX / 4)),
    REFUSED(FORWARD, plain, "rows.kl.stride_row=0: elements of an output overlap; must be at least 1",
            SET(rows.kl.stride_row, 0)),
    REFUSED(FORWARD, plain, "rows.lse_s.stride_head=4: elements of an output overlap; must be at least 5",
            SET(rows.lse_s.stride_head, 4)),
    REFUSED(BACKWARD, plain, "dk_s.stride_row=3: elements of an output overlap; must be at least 4",
            SET(gradients.dk_s.stride_row, 3)),
    REFUSED(BACKWARD, plain, "dq_t.stride_batch=0: elements of an output overlap",
            SET(gradients.dq_t.stride_batch, 0)),
    REFUSED(FINISH, plain, "rows.kl.stride_row=0: elements of an output overlap", SET(rows.kl.stride_row, 0)),
    REFUSED(FINISH, plain, "rows.lse_t.stride_head=4: elements of an output overlap", SET(rows.lse_t.stride_head, 4)),
    REFUSED(FINISH, plain, "rows.lse_s.stride_batch=9: elements of an output overlap",
            SET(rows.lse_s.stride_batch, 9)),
    REFUSED(FINISH, plain, "overlap: an output must not share memory", COPY(rows.lse_s, rows.kl)),
    REFUSED(FINISH, plain, "overlap: an output must not share memory", COPY(rows.lse_t, rows.kl),
            ADD(rows.lse_t.data, 76)),
    REFUSED(FINISH, plain, "overlap: an output must not share memory", COPY(rows.kl.data, states),
            ADD(rows.kl.data, 396)),
    ACCEPTED(FINISH, plain, COPY(rows.kl.data, states), ADD(rows.kl.data, 400)),
    REFUSED(MERGE, plain, "from=", COPY(from, states)),
    REFUSED(MERGE, plain, "overlap: an output must not share memory", COPY(from, states), ADD(from, 20)),
    REFUSED(MERGE, plain, "overlap: an output must not share memory", COPY(from, states), ADD(from, -396)),
    ACCEPTED(MERGE, plain, COPY(from, states), ADD(from, 400)),
    REFUSED(MERGE, plain, "must be aligned to its element size, 4 bytes", ADD(states, 2)),
    REFUSED(MERGE, plain, "must be aligned to its element size, 4 bytes", ADD(from, 1)),
    REFUSED(FINISH, plain, "must be aligned to its element size, 4 bytes", ADD(states, 2)),

    /* Lengths. */
    REFUSED(FORWARD, packed, "cu_seqlens_q=NULL: must be given when packed=1", NO(inputs.cu_seqlens_q)),
    REFUSED(FORWARD, packed, "cu_seqlens_k=NULL: must be given when packed=1", NO(inputs.cu_seqlens_k)),
    REFUSED(FORWARD, packed, "key_lengths given: must be NULL when packed=1",
            COPY(inputs.key_lengths, inputs.cu_seqlens_q)),
    REFUSED(FORWARD, plain, "cu_seqlens_q given: must be NULL unless packed=1",
            COPY(inputs.cu_seqlens_q, inputs.q_t.data)),
    REFUSED(FORWARD, plain, "cu_seqlens_k given: must be NULL unless packed=1",
            COPY(inputs.cu_seqlens_k, inputs.q_t.data)),
    REFUSED(FINISH, packed, "cu_seqlens_q=NULL: must be given when packed=1", NO(inputs.cu_seqlens_q)),
    ACCEPTED(FINISH, packed, NO(inputs_address)),
    REFUSED(PARTIAL, plain, "key_begin=3: must be at most key_end=2", SET(key_begin, 3), SET(key_end, 2)),

    /* Row bounds. */
    ACCEPTED(FORWARD, bounded, NO(inputs.key_begin)),
    ACCEPTED(BACKWARD, bounded, NO(inputs.key_end)),
    REFUSED(FORWARD, bounded, "key_begin=NULL, key_end=NULL: row_bounds=1 needs at least one of them",
            NO(inputs.key_begin), NO(inputs.key_end)),
    REFUSED(FORWARD, plain, "key_begin given: must be NULL unless row_bounds=1",
            COPY(inputs.key_begin, inputs.q_t.data)),
    REFUSED(ONE_PASS, plain, "key_end given: must be NULL unless row_bounds=1",
            COPY(inputs.key_end, inputs.q_t.data)),
    REFUSED(FORWARD, bounded, "key_end=", COPY(rows.lse_s.data, inputs.key_end), ADD(rows.lse_s.data, 36)),

    /* Sinks. */
    ACCEPTED(FORWARD, sinks, {0}),
    ACCEPTED(BACKWARD, sinks, {0}),
    ACCEPTED(ONE_PASS, sinks, {0}),
    ACCEPTED(FINISH, sinks, {0}),
    ACCEPTED(FORWARD, sinks, NO(rows.kl.data), NO(rows.lse_t.data)),
    REFUSED(FORWARD, sinks,
            "sink_t=NULL: must be given when sinks=1; sinks=0 gives the KL of the distributions on the keys alone",
            NO(inputs.sink_t)),
    REFUSED(BACKWARD, sinks, "sink_s=NULL: must be given when sinks=1", NO(inputs.sink_s)),
    REFUSED(FINISH, sinks, "sink_s=NULL: must be given when sinks=1", NO(inputs.sink_s)),
    REFUSED(FORWARD, plain, "sink_t given: must be NULL unless sinks=1", COPY(inputs.sink_t, inputs.q_t.data)),
    REFUSED(CHECK, plain, "sink_s given: must be NULL unless sinks=1", COPY(inputs.sink_s, inputs.q_t.data)),
    REFUSED(BACKWARD, plain, "dsink_t given: must be NULL: the plan's", COPY(gradients.dsink_t, inputs.q_t.data)),
    REFUSED(BACKWARD, plain, "dsink_s given: must be NULL: the plan's", COPY(gradients.dsink_s, inputs.q_t.data)),
    REFUSED(BACKWARD, sinks, "and dsink_s=", COPY(gradients.dsink_s, inputs.sink_s)),
    ACCEPTED(FORWARD, sinks, NO(rows.lse_t.data), NO(rows.lse_s.data)),
    ACCEPTED(FINISH, sinks, NO(rows.lse_t.data), NO(rows.lse_s.data)),
    ACCEPTED(FORWARD, sink_groups, {0}),
    REFUSED(FORWARD, sink_groups, "rows.dot_t given: must be NULL with sinks", COPY(rows.dot_t, inputs.lse_t)),
    REFUSED(FINISH, sink_groups, "lse_t=NULL: must be given", NO(inputs.lse_t.data)),

    /* The student's attention. */
    REFUSED(ATTENTION_BACKWARD, student_only, "gradients=12: skl_attention_backward needs a plan whose", {0}),
    REFUSED(ATTENTION_BACKWARD, attention, "v_s=NULL: must be given", NO(attention.v_s.data)),
    REFUSED(ATTENTION_BACKWARD, attention, "o_s=NULL: must be given", NO(attention.o_s.data)),
    REFUSED(ATTENTION_BACKWARD, attention, "do_s=NULL: must be given", NO(attention.do_s.data)),
    REFUSED(ATTENTION_BACKWARD, attention, "lse_s=NULL: must be given", NO(inputs.lse_s.data)),
    REFUSED(ATTENTION_BACKWARD, attention, "rows.lse_t given: must be NULL in a one-pass call",
            COPY(rows.lse_t, rows.kl)),
    REFUSED(ATTENTION_BACKWARD, attention, "do_s.stride_row=-1: must be at least 0",
            SET(attention.do_s.stride_row, -1)),
    REFUSED(ATTENTION_BACKWARD, attention, " and dv_s=", COPY(attention.dv_s, gradients.dk_s)),
    REFUSED(ATTENTION_BACKWARD, attention, "overlap: an output must not share memory",
            COPY(attention.dv_s.data, attention.v_s.data)),
};

/* Values of lengths, bounds and indices. Run calls check them in host memory, skl_inputs_check on any device. */
static const call_rule value_rules[] = {
    REFUSED(FORWARD, packed, "cu_seqlens_q[0]=1: must be 0", SET_AT(inputs.cu_seqlens_q, 0, 1)),
    REFUSED(BACKWARD, packed, "cu_seqlens_k[0]=-1: must be 0", SET_AT(inputs.cu_seqlens_k, 0, -1)),
    REFUSED(FORWARD, packed, "cu_seqlens_q[2]=2: must not be below cu_seqlens_q[1]=3",
            SET_AT(inputs.cu_seqlens_q, 2, 2)),
    REFUSED(ONE_PASS, packed, "cu_seqlens_k[1]=-5: must not be below cu_seqlens_k[0]=0",
            SET_AT(inputs.cu_seqlens_k, 1, -5)),
    REFUSED(PARTIAL, packed, "cu_seqlens_k[3]=11: must be at most 10, the rows of the buffer",
            SET_AT(inputs.cu_seqlens_k, 3, 11)),
    REFUSED(FORWARD, packed, "cu_seqlens_q[3]=2147483647: must be at most 8",
            SET_AT(inputs.cu_seqlens_q, 3, INT32_MAX)),
    REFUSED(FORWARD, packed,
            "cu_seqlens_q[3]=8: sequence 2 has 5 rows; must be at most 4, the longest the problem names",
            SET_AT(inputs.cu_seqlens_q, 3, 8)),
    REFUSED(FORWARD, padded, "key_lengths[1]=-1: must be 0..len_k=6", SET_AT(inputs.key_lengths, 1, -1)),
    REFUSED(BACKWARD, padded, "key_lengths[2]=7: must be 0..len_k=6", SET_AT(inputs.key_lengths, 2, 7)),
    REFUSED(FORWARD, bounded, "key_begin[4]=-1: must be 0..6, the keys of the sequence",
            SET_AT(inputs.key_begin, 4, -1)),
    REFUSED(FORWARD, bounded, "key_begin[2]=7: must be 0..6, the keys of the sequence",
            SET_AT(inputs.key_begin, 2, 7)),
    REFUSED(BACKWARD, bounded, "key_end[9]=7: must be 0..6, the keys of the sequence", SET_AT(inputs.key_end, 9, 7)),
    REFUSED(ONE_PASS, bounded, "key_end[6]=1: must not be below key_end[5]=2 of the same sequence",
            SET_AT(inputs.key_end, 6, 1)),
    ACCEPTED(FORWARD, bounded, SET_AT(inputs.key_end, 5, 0)), /* lower than the last row of the sequence before */
    REFUSED(FORWARD, sparse, "indices[0, 1, 3, 0]=-2: must be -1 (none) or a key of the sequence, 0..5",
            SET_AT(inputs.indices.data, 16, -2)),
    REFUSED(FORWARD, sparse, "indices[1, 1, 4, 1]=6: must be -1 (none) or a key of the sequence, 0..5",
            SET_AT(inputs.indices.data, 39, 6)),
    REFUSED(FORWARD, packed_sparse, "indices[1, 1, 4, 2]=7: must be -1 (none) or a key of the sequence, 0..6",
            SET_AT(inputs.indices.data, 53, 7)),
};

/* Indexers have additional tensors. */
static const call_rule indexer_rules[] = {
    ACCEPTED(FORWARD, indexer, {0}),
    ACCEPTED(BACKWARD, sparse, {0}),
    ACCEPTED(ONE_PASS, indexer, {0}),
    ACCEPTED(PARTIAL, sparse, {0}),
    ACCEPTED(FINISH, indexer, {0}),
    REFUSED(FORWARD, indexer, "w_s=NULL: must be given: the weights of an indexer", NO(inputs.w_s.data)),
    REFUSED(FORWARD, sparse, "indices=NULL: must be given: top_k > 0", NO(inputs.indices.data)),
    REFUSED(FORWARD, indexer, "indices given: must be NULL unless top_k > 0", COPY(inputs.indices, inputs.w_s)),
    REFUSED(FORWARD, sparse, "must be aligned to its element size, 4 bytes", ADD(inputs.indices.data, 2)),
    REFUSED(FORWARD, sparse, "indices.stride_row=-1: must be at least 0", SET(inputs.indices.stride_row, -1)),
    REFUSED(FORWARD, indexer, "w_s strides (batch ", SET(inputs.w_s.stride_batch, INT64_MAX)),
    REFUSED(FORWARD, sparse, "rows.dot_t given: must be NULL for an indexer: its teacher is fixed",
            COPY(rows.dot_t, inputs.lse_t)),
    REFUSED(FORWARD, indexer, "rows.mass=", COPY(rows.mass, rows.entropy)),
    REFUSED(BACKWARD, indexer, "w_s=", COPY(gradients.dw_s, inputs.w_s)),
    REFUSED(BACKWARD, indexer, "dq_t given: must be NULL", COPY(gradients.dq_t, inputs.q_t)),
    REFUSED(BACKWARD, indexer, "dw_s.stride_row=2: elements of an output overlap", SET(gradients.dw_s.stride_row, 2)),
    REFUSED(ONE_PASS, indexer, "rows.mass given: must be NULL in a one-pass call", COPY(rows.mass, inputs.lse_s)),
    REFUSED(PARTIAL, indexer, "lse_t=NULL: must be given: partial states of an indexer need the LSE of all keys",
            NO(inputs.lse_t.data)),
    REFUSED(FINISH, indexer, "lse_t=NULL: must be given: rows.lse_t of an indexer needs it", NO(inputs.lse_t.data)),
    REFUSED(FINISH, indexer, "rows.entropy given: must be NULL in skl_states_finish", COPY(rows.entropy, inputs.kl)),
    REFUSED(FINISH, indexer, "rows.mass given: must be NULL in skl_states_finish", COPY(rows.mass, inputs.kl)),
    REFUSED(FINISH, indexer, "rows.cross_entropy given: must be NULL in", COPY(rows.cross_entropy, inputs.kl)),
    REFUSED(FORWARD, plain, "w_s given: must be NULL unless student=SKL_STUDENT_INDEXER",
            COPY(inputs.w_s, inputs.q_s)),
    REFUSED(FORWARD, plain, "indices given: must be NULL unless top_k > 0", COPY(inputs.indices, inputs.q_s)),
    REFUSED(FORWARD, plain, "rows.cross_entropy given: must be NULL unless", COPY(rows.cross_entropy, inputs.kl)),
    REFUSED(FORWARD, plain, "rows.entropy given: must be NULL unless", COPY(rows.entropy, inputs.kl)),
    REFUSED(FORWARD, plain, "rows.mass given: must be NULL unless", COPY(rows.mass, inputs.kl)),
    REFUSED(BACKWARD, plain, "dw_s given: must be NULL: the plan's", COPY(gradients.dw_s, inputs.q_s)),
};

/* A pooled teacher has no partial states, because a range of keys may cut a block. One pass computes its LSEs. */
static const call_rule pooled_rules[] = {
    REFUSED(PARTIAL, pooled, "pool=1: pooled teachers have no partial states; must be 0", {0}),
    REFUSED(FINISH, pooled, "pool=1: pooled teachers have no partial states; must be 0", NO(inputs_address)),
    ACCEPTED(ONE_PASS, pooled, NO(inputs.lse_t.data), NO(inputs.lse_s.data)),
    REFUSED(ONE_PASS, pooled, "rows.lse_t=NULL: must be given: the gradients of a pooled teacher read it",
            NO(inputs.lse_t.data), NO(inputs.lse_s.data), NO(rows.lse_t.data)),
    REFUSED(ONE_PASS, pooled, "lse_s given: must be NULL in a one-pass call with a pooled teacher, which computes it",
            NO(inputs.lse_t.data)),
    REFUSED(FORWARD, pooled, "indices[0, 0, 4, 2]=3: must be -1 (none) or a block of the sequence, 0..2",
            SET_AT(inputs.indices.data, 14, 3)),
};

/* skl_inputs_check requires no row vectors. */
static const call_rule check_rules[] = {
    ACCEPTED(CHECK, plain, {0}),
    ACCEPTED(CHECK, packed, {0}),
    ACCEPTED(CHECK, padded, {0}),
    ACCEPTED(CHECK, sparse, {0}),
    ACCEPTED(CHECK, teacher_groups, NO(inputs.lse_t.data), NO(inputs.lse_s.data), NO(inputs.kl.data),
             NO(inputs.dot_t.data)),
    REFUSED(CHECK, plain, "plan=NULL: must be given", NO(plan)),
    REFUSED(CHECK, plain, "inputs=NULL: must be given", NO(inputs_address)),
    REFUSED(CHECK, plain, "inputs.struct_size=0: must be the sizeof", SET(inputs.struct_size, 0)),
    REFUSED(CHECK, plain, "q_t=NULL: must be given", NO(inputs.q_t.data)),
    REFUSED(CHECK, indexer, "w_s=NULL: must be given", NO(inputs.w_s.data)),
    REFUSED(CHECK, sparse, "indices=NULL: must be given", NO(inputs.indices.data)),
    REFUSED(CHECK, plain, "must be aligned to its element size, 4 bytes", ADD(inputs.k_s.data, 2)),
    REFUSED(CHECK, plain, "k_t.stride_head=-1: must be at least 0", SET(inputs.k_t.stride_head, -1)),
    REFUSED(CHECK, plain, "lse_t.stride_row=-1: must be at least 0", SET(inputs.lse_t.stride_row, -1)),
    REFUSED(CHECK, packed, "cu_seqlens_k=NULL: must be given when packed=1", NO(inputs.cu_seqlens_k)),
    ACCEPTED(CHECK, bounded, {0}),
};

static const call_rule workspace_rules[] = {
    REFUSED(FORWARD, plain, "workspace=NULL: must point to ", NO(workspace)),
    REFUSED(FORWARD, plain, "must be at least ", ADD(workspace_size, -1)),
    REFUSED(FORWARD, plain, "workspace_size=0: must be at least ", SET(workspace_size, 0)),
    REFUSED(FORWARD, plain, "must be aligned to 64 bytes", ADD(workspace, 32)),
    REFUSED(BACKWARD, plain, "workspace=NULL: must point to ", NO(workspace)),
    REFUSED(BACKWARD, plain, "must be at least ", ADD(workspace_size, -1)),
    REFUSED(ONE_PASS, plain, "must be at least ", ADD(workspace_size, -1)),
    REFUSED(PARTIAL, plain, "must be aligned to 64 bytes", ADD(workspace, 1)),
    REFUSED(ATTENTION_BACKWARD, attention, "must be at least ", ADD(workspace_size, -1)),
    REFUSED(STATS, plain, "workspace=NULL: must point to ", NO(workspace)),
};

/* Tensors in the workspace. A GPU may need none. */
static const call_rule workspace_overlap_rules[] = {
    REFUSED(FORWARD, plain, "rows.kl=", COPY(rows.kl.data, workspace)),
    REFUSED(FORWARD, plain, "overlap: the workspace must not share memory with", COPY(rows.lse_s.data, workspace)),
    REFUSED(FORWARD, plain, "q_s=", COPY(inputs.q_s.data, workspace), ADD(inputs.q_s.data, -4 * 79)),
    REFUSED(FORWARD, packed, "cu_seqlens_k=", COPY(inputs.cu_seqlens_k, workspace)),
    REFUSED(BACKWARD, plain, "dq_s=", COPY(gradients.dq_s.data, workspace)),
    REFUSED(ONE_PASS, plain, "dk_t=", COPY(gradients.dk_t.data, workspace), ADD(gradients.dk_t.data, -4 * 95)),
    REFUSED(PARTIAL, plain, "states=", COPY(states, workspace)),
};

static void check_call(const fixture *f, const skl_plan *plan, const call_rule *rule, skl_status expected)
{
    fixture_results saved = results_create(f), results = results_create(f);
    const skl_rows saved_rows = results_rows(&saved);
    run_forward(plan, &f->inputs, &saved_rows);
    test_memory workspace = memory_create(skl_plan_workspace_size(plan, (skl_op)rule->kind), SKL_WORKSPACE_ALIGNMENT);
    skl_row_state *const states = states_create(f), *const from = states_create(f);

    any_call call;
    any_call_init(&call, rule->kind, f, &results);
    call.plan = plan;
    call.inputs = results_backward_inputs(f, &saved);
    call.states = states, call.from = from;
    call.workspace = workspace.data, call.workspace_size = workspace.size;
    edit_apply(&call, rule->edits, COUNT_OF(rule->edits));
    const skl_status status = any_call_run(rule->kind, &call);
    device_wait();
    if (rule->message) {
        assert_refused(status, expected, rule->message);
        assert_true(results_untouched(&results) && memory_untouched(&workspace));
    } else {
        assert_ok(status);
    }
    states_destroy(states);
    states_destroy(from);
    memory_destroy(&workspace);
    results_destroy(&saved);
    results_destroy(&results);
}

static void check_rule(const call_rule *rule, skl_status expected)
{
    fixture f;
    fixture_create(&f, rule->test_case);
    skl_plan *const plan = test_plan(&f.problem, NULL, 2);
    /* An operation that a GPU does not have needs no workspace. */
    if (expected != SKL_ERROR_WORKSPACE || skl_plan_supports(plan, (skl_op)rule->kind))
        check_call(&f, plan, rule, expected);
    skl_plan_destroy(plan);
    fixture_destroy(&f);
}

/* Rules whose calls fail with the same status. */
typedef struct rule_set {
    const call_rule *rules;
    size_t count;
    skl_status status;
    int only_cpu; /* 1: skipped on a GPU */
    int as_check; /* 1: skl_inputs_check must refuse the same arguments */
} rule_set;

/* clang-format off */
#define RULES(name, array, ...)                                                                                      \
    {"rules_of_" #name, test_rules, NULL, NULL, &(rule_set){.rules = array, .count = COUNT_OF(array), __VA_ARGS__}}
/* clang-format on */

static void test_rules(void **state)
{
    const rule_set *const set = *state;
    if (set->only_cpu && test_device() != SKL_CPU)
        skip();
    for (size_t n = 0; n < set->count; n++) {
        call_rule rule = set->rules[n];
        if (set->as_check)
            rule.kind = CHECK;
        check_rule(&rule, set->status);
    }
}

/* dq and dk interleaved in one [batch, length, 2, heads, dim], the layout of a fused projection. */
static void test_views_of_one_buffer_may_interleave(void **state)
{
    (void)state;
    enum { BATCH = 2, LENGTH = 300, HEAD_COUNT = 2, DIM = 4, ROW = HEAD_COUNT * DIM };
    const test_case square = {"square", SHAPE(BATCH, LENGTH, LENGTH), HEADS(HEAD_COUNT, HEAD_COUNT), DIMS(DIM, DIM)};
    fixture f;
    fixture_create(&f, &square);
    fixture_results separate = results_create(&f);
    run_kernel(&f, NULL, 2, &separate);
    skl_plan *const plan = test_plan(&f.problem, NULL, 2);
    const skl_inputs inputs = results_backward_inputs(&f, &separate);

    test_memory memory = memory_create(BATCH * LENGTH * 2 * ROW * sizeof(float), sizeof(float));
    float(*const fused)[LENGTH][2][HEAD_COUNT][DIM] = (void *)memory.data;
    skl_gradients gradients = {.struct_size = sizeof gradients};
    gradients.dq_s = (skl_output){fused[0][0][0], LENGTH * 2 * ROW, DIM, 2 * ROW};
    gradients.dk_s = (skl_output){fused[0][0][1], LENGTH * 2 * ROW, DIM, 2 * ROW};
    run_backward(plan, &inputs, &gradients);
    for (int64_t b = 0; b < BATCH; b++)
        for (int64_t h = 0; h < HEAD_COUNT; h++)
            for (int64_t i = 0; i < LENGTH; i++)
                for (int64_t c = 0; c < DIM; c++) {
                    const int64_t n = tensor_index(&separate.dq_s, b, h, i) + c;
                    assert_true((double)fused[b][i][0][h][c] == tensor_get(&separate.dq_s, n));
                    assert_true((double)fused[b][i][1][h][c] == tensor_get(&separate.dk_s, n));
                }

    test_memory workspace = memory_create(skl_plan_workspace_size(plan, SKL_OP_BACKWARD), SKL_WORKSPACE_ALIGNMENT);
    gradients.dk_s.data = &fused[0][0][0][1][DIM - 1];
    assert_refused(skl_backward(plan, &inputs, &gradients, workspace.data, workspace.size, NULL), SKL_ERROR_ARGUMENT,
                   "overlap: an output must not share memory with another tensor");
    memory_destroy(&workspace);
    memory_destroy(&memory);
    skl_plan_destroy(plan);
    results_destroy(&separate);
    fixture_destroy(&f);
}

/* Tensors of an empty problem have no address. */
static void test_empty_problems_need_no_tensors(void **state)
{
    (void)state;
    skl_problem problem = skl_problem_default();
    problem.dim_t = problem.dim_s = 4;
    skl_plan *const plan = test_plan(&problem, NULL, 1);
    const skl_inputs inputs = {.struct_size = sizeof inputs};
    const skl_rows rows = {.struct_size = sizeof rows};
    const skl_gradients gradients = {.struct_size = sizeof gradients};
    run_forward(plan, &inputs, &rows);
    run_backward(plan, &inputs, &gradients);
    run_forward_backward(plan, &inputs, &rows, &gradients);
    run_merge(plan, NULL, NULL);
    run_finish(plan, NULL, NULL, &rows);
    skl_plan_destroy(plan);
}

/* A tensor without elements. */
static skl_output no_elements(void)
{
    static float address;
    return (skl_output){&address, 0, 0, 0};
}

static void check_huge_empty_problem(const skl_problem *problem, const char *kernel)
{
    skl_plan *const plan = test_plan(problem, kernel, 2);
    const skl_output none = no_elements();
    const skl_inputs inputs = {.struct_size = sizeof inputs};
    const skl_rows rows = {.struct_size = sizeof rows, .kl = none, .lse_s = none};
    const skl_rows kl_only = {.struct_size = sizeof rows, .kl = none};
    skl_gradients gradients = {.struct_size = sizeof gradients, .dq_s = none, .dk_s = none};
    if (problem->gradients & SKL_DW_S)
        gradients.dw_s = none;
    run_forward(plan, &inputs, &rows);
    run_backward(plan, &inputs, &gradients);
    run_forward_backward(plan, &inputs, &kl_only, &gradients);
    run_finish(plan, NULL, NULL, &rows);
    skl_plan_destroy(plan);
}

/* Any number of sequences and heads without rows is no work: a loop over them would take hours. */
static void test_huge_empty_problems_end_at_once(void **state)
{
    (void)state;
    if (test_device() != SKL_CPU)
        skip();
    enum { SECONDS_MAX = 60 };
    alarm(SECONDS_MAX); /* ends the program */
    for (int32_t k = 0; test_kernel(k); k++)
        for (int32_t grad_f32 = 0; grad_f32 < 2; grad_f32++) {
            skl_problem problem = skl_problem_default();
            problem.batch = INT32_MAX;
            problem.heads_t = problem.heads_s = 1000;
            problem.dim_t = problem.dim_s = 4;
            problem.dtype_t = problem.dtype_s = SKL_F16;
            problem.grad_f32 = grad_f32;
            check_huge_empty_problem(&problem, test_kernel(k));
            problem.student = SKL_STUDENT_INDEXER;
            problem.gradients = SKL_DQ_S | SKL_DK_S | SKL_DW_S;
            problem.index_heads = 2;
            check_huge_empty_problem(&problem, test_kernel(k));
            problem.top_k = 3;
            check_huge_empty_problem(&problem, test_kernel(k));
        }
    alarm(0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        RULES(arguments, call_rules, .status = SKL_ERROR_ARGUMENT),
        RULES(values, value_rules, .status = SKL_ERROR_ARGUMENT, .only_cpu = 1),
        RULES(checked_values, value_rules, .status = SKL_ERROR_ARGUMENT, .as_check = 1),
        RULES(indexers, indexer_rules, .status = SKL_ERROR_ARGUMENT),
        RULES(pooled_teachers, pooled_rules, .status = SKL_ERROR_ARGUMENT, .only_cpu = 1),
        RULES(inputs_check, check_rules, .status = SKL_ERROR_ARGUMENT),
        RULES(workspaces, workspace_rules, .status = SKL_ERROR_WORKSPACE),
        RULES(tensors_in_the_workspace, workspace_overlap_rules, .status = SKL_ERROR_ARGUMENT, .only_cpu = 1),
        cmocka_unit_test(test_views_of_one_buffer_may_interleave),
        cmocka_unit_test(test_empty_problems_need_no_tensors),
        cmocka_unit_test(test_huge_empty_problems_end_at_once),
    };
    return test_run("calls", tests, COUNT_OF(tests));
}
