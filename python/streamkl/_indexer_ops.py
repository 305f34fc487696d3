"""The torch operators of indexer_kl: streamkl::indexer_rows, streamkl::indexer_backward and streamkl::indexer_one_pass.

    indexer_rows       whichever rows are wanted; nothing but the LSE of the indexer does not look at the teacher
    indexer_backward   gradients from the LSEs of those rows
    indexer_one_pass   rows and gradients in a single sweep, when both LSEs of the visible keys are known

w_s and indices have a heads dimension, where q_s has it; layouts and rows are as in _ops.py.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from . import _library as lib
from ._call import (
    TAGS, Layout, OnceDifferentiable, check_while_tracing, facts_of, new_gradient, row_address, run, weighted,
)  # fmt: skip
from ._checks import check_indexer_call

# Rows that can be wanted, in the order in which they are returned.
KL, LSE_T, LSE_S, CROSS_ENTROPY, ENTROPY, MASS = (1 << bit for bit in range(6))
_ROW_NAMES = {KL: "kl", LSE_T: "lse_t", LSE_S: "lse_s", CROSS_ENTROPY: "cross_entropy", ENTROPY: "entropy", MASS: "mass"}
_GRADIENTS = {lib.DQ_S: "dq_s", lib.DK_S: "dk_s", lib.DW_S: "dw_s"}  # in the order of q_s, k_s, w_s

_TENSORS = "Tensor q_t, Tensor k_t, Tensor q_s, Tensor k_s, Tensor w_s, Tensor? indices"
_PROBLEM = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? key_lengths, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "bool causal, SymInt window_left, SymInt window_right, float scale_t, float scale_s, float softcap_t, bool linear, "
    "bool reverse, bool deterministic, bool heads_first, int gradients"
)
_SCHEMAS = {
    "indexer_rows": "Tensor? lse_t, int wanted",
    "indexer_backward": "Tensor lse_t, Tensor lse_s, Tensor? kl, Tensor grad_kl",
    "indexer_one_pass": "Tensor lse_t, Tensor lse_s, Tensor? row_weight, int wanted",
}
for _name, _own in _SCHEMAS.items():
    torch.library.define(f"streamkl::{_name}", f"({_TENSORS}, {_own}, {_PROBLEM}) -> Tensor[]", tags=TAGS)


@lru_cache(maxsize=4096)  # as in _ops.py
def _plan_for(*call) -> lib.Plan:
    return lib.Plan(check_indexer_call(*call))


def _facts(tensors, lse_t, lse_s, row_weight, cu_seqlens_q, cu_seqlens_k, key_lengths, *rest):
    """The arguments of check_indexer_call."""
    given = (*tensors, lse_t, lse_s, row_weight, cu_seqlens_q, cu_seqlens_k, key_lengths)
    return (*map(facts_of, given), *rest)


# ---- Outputs -------------------------------------------------------------------------------------------------------


def _new_rows(q_t, w_s, wanted, problem) -> list[torch.Tensor]:
    layout = Layout(problem)
    return [layout.rows_like(q_t if bit == LSE_T else w_s) for bit in _ROW_NAMES if wanted & bit]


def row_names(wanted: int) -> list[str]:
    return [name for bit, name in _ROW_NAMES.items() if wanted & bit]


def _rows_struct(rows, wanted) -> bytes:
    return lib.pack_rows(**{name: row_address(row) for name, row in zip(row_names(wanted), rows)})


def _new_gradients(tensors, problem) -> list[torch.Tensor]:
    return [new_gradient(tensor) for tensor, bit in zip(tensors[2:5], _GRADIENTS) if problem[-1] & bit]


def _gradients_struct(made, problem) -> bytes:
    layout = Layout(problem)
    names = [name for bit, name in _GRADIENTS.items() if problem[-1] & bit]
    return lib.pack_gradients(**{name: layout.address(gradient) for name, gradient in zip(names, made)})


def _for_each_argument(made, gradients, count):
    """The gradients of an operator's `count` arguments: q_t and k_t have none, then q_s, k_s and w_s."""
    remaining = iter(made)
    return (None, None, *[next(remaining) if gradients & bit else None for bit in _GRADIENTS], *[None] * (count - 5))


# ---- The operators; `problem` is the tail of their schemas ---------------------------------------------------------


def _rows(q_t, k_t, q_s, k_s, w_s, indices, lse_t, wanted, *problem):
    plan = _plan_for(*_facts((q_t, k_t, q_s, k_s, w_s, indices), lse_t, None, None, *problem))
    rows = _new_rows(q_t, w_s, wanted, problem)
    structs = (_rows_struct(rows, wanted),)
    run(plan, lib.FORWARD, (q_t, k_t, q_s, k_s), lse_t, None, None, problem, structs, w_s=w_s, indices=indices)
    return rows


def _rows_fake(q_t, k_t, q_s, k_s, w_s, indices, lse_t, wanted, *problem):
    check_while_tracing(check_indexer_call, _facts((q_t, k_t, q_s, k_s, w_s, indices), lse_t, None, None, *problem))
    return _new_rows(q_t, w_s, wanted, problem)


def _backward(q_t, k_t, q_s, k_s, w_s, indices, lse_t, lse_s, kl, grad_kl, *problem):
    tensors = (q_t, k_t, q_s, k_s, w_s, indices)
    plan = _plan_for(*_facts(tensors, lse_t, lse_s, grad_kl, *problem))
    made = _new_gradients(tensors, problem)
    structs = (_gradients_struct(made, problem),)
    run(plan, lib.BACKWARD, tensors[:4], lse_t, lse_s, grad_kl, problem, structs, kl, w_s=w_s, indices=indices)
    return made


def _backward_fake(q_t, k_t, q_s, k_s, w_s, indices, lse_t, lse_s, kl, grad_kl, *problem):
    return _new_gradients((q_t, k_t, q_s, k_s, w_s), problem)


def _one_pass(q_t, k_t, q_s, k_s, w_s, indices, lse_t, lse_s, row_weight, wanted, *problem):
    tensors = (q_t, k_t, q_s, k_s, w_s, indices)
    plan = _plan_for(*_facts(tensors, lse_t, lse_s, row_weight, *problem))
    rows, made = _new_rows(q_t, w_s, wanted, problem), _new_gradients(tensors, problem)
    structs = (_rows_struct(rows, wanted), _gradients_struct(made, problem))
    run(
        plan, lib.FORWARD_BACKWARD, tensors[:4], lse_t, lse_s, row_weight, problem, structs, w_s=w_s, indices=indices
    )  # fmt: skip
    return [*rows, *made]


def _one_pass_fake(q_t, k_t, q_s, k_s, w_s, indices, lse_t, lse_s, row_weight, wanted, *problem):
    tensors = (q_t, k_t, q_s, k_s, w_s, indices)
    check_while_tracing(check_indexer_call, _facts(tensors, lse_t, lse_s, row_weight, *problem))
    return [*_new_rows(q_t, w_s, wanted, problem), *_new_gradients(tensors, problem)]


for _name, _kernel, _fake in (
    ("streamkl::indexer_rows", _rows, _rows_fake),
    ("streamkl::indexer_backward", _backward, _backward_fake),
    ("streamkl::indexer_one_pass", _one_pass, _one_pass_fake),
):
    torch.library.impl(_name, ("cpu", "cuda"), _kernel)
    torch.library.register_fake(_name, _fake)

# ---- Autograd, as in _ops.py ---------------------------------------------------------------------------------------


class IndexerForward(torch.autograd.Function):
    """streamkl::indexer_rows, and streamkl::indexer_backward behind it: the rows, of which kl can be differentiated."""

    @staticmethod
    def forward(ctx, q_t, k_t, q_s, k_s, w_s, indices, lse_t, wanted, problem):
        rows = torch.ops.streamkl.indexer_rows(q_t, k_t, q_s, k_s, w_s, indices, lse_t, wanted, *problem)
        kl, own_lse_t, lse_s, *_ = rows
        ctx.mark_non_differentiable(*rows[1:])
        ctx.problem = problem[3:]
        reverse = problem[-4]  # gradients of the first argument of the KL read it
        ctx.save_for_backward(
            q_t, k_t, q_s, k_s, w_s, indices, own_lse_t, lse_s, kl if reverse else None, *problem[:3]
        )
        return tuple(rows)

    @staticmethod
    def backward(ctx, grad_kl, *_):
        *tensors, cu_seqlens_q, cu_seqlens_k, key_lengths = ctx.saved_tensors
        problem = (cu_seqlens_q, cu_seqlens_k, key_lengths, *ctx.problem)
        with torch.no_grad():
            made = torch.ops.streamkl.indexer_backward(*tensors, grad_kl, *problem)
        if torch.is_grad_enabled():  # create_graph=True
            made = OnceDifferentiable.apply("indexer_kl", len(made), *made, *tensors[:5])
        return _for_each_argument(made, problem[-1], 9)


class IndexerOnePass(torch.autograd.Function):
    """streamkl::indexer_one_pass, whose backward only scales: the sum of weighted KLs, and the rows."""

    @staticmethod
    def forward(ctx, q_t, k_t, q_s, k_s, w_s, indices, lse_t, lse_s, row_weight, wanted, problem):
        made = torch.ops.streamkl.indexer_one_pass(
            q_t, k_t, q_s, k_s, w_s, indices, lse_t, lse_s, row_weight, wanted, *problem
        )
        row_count = len(row_names(wanted))
        rows = made[:row_count]
        ctx.mark_non_differentiable(*rows)
        ctx.gradients = problem[-1]
        ctx.save_for_backward(*made[row_count:])
        return weighted(rows[0], row_weight).sum(), *rows

    @staticmethod
    def backward(ctx, grad_loss, *_):
        if torch.is_grad_enabled():  # create_graph=True; nothing is left of what a second derivative would depend on
            raise RuntimeError(
                "streamkl: the sum or mean of indexer_kl cannot be differentiated twice, nor take create_graph=True; "
                "streamkl.reference.indexer_kl can"
            )
        made = [gradient * grad_loss for gradient in ctx.saved_tensors]
        return _for_each_argument(made, ctx.gradients, 11)
