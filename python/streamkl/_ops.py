"""The torch operators of attention_kl: streamkl::forward, streamkl::backward and streamkl::one_pass.

    forward    KL of every row, with the LSEs that a backward needs           differentiable in q and k
    backward   gradients from those LSEs
    one_pass   sum of weighted KLs and its gradients in a single sweep,       differentiable in q and k
               when both LSEs are known; its backward only scales

Tensors come in the caller's layout and gradients go back in it; rows (KL, LSE, weights) are f32 [batch, heads, length],
packed [heads, total]. Only the outputs that are wanted are made and returned.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from . import _library as lib
from ._call import (
    TAGS, Layout, OnceDifferentiable, check_while_tracing, facts_of, new_gradient, row_address, run, weighted,
)  # fmt: skip
from ._checks import check_call

_TENSORS = "Tensor q_t, Tensor k_t, Tensor q_s, Tensor k_s"
_PROBLEM = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? key_lengths, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "bool causal, SymInt window_left, SymInt window_right, float scale_t, float scale_s, float softcap_t, float softcap_s, "
    "bool reverse, bool deterministic, bool heads_first, int gradients"
)
torch.library.define(
    "streamkl::forward", f"({_TENSORS}, Tensor? lse_t, bool return_lse, {_PROBLEM}) -> Tensor[]", tags=TAGS
)
torch.library.define(
    "streamkl::backward",
    f"({_TENSORS}, Tensor lse_t, Tensor lse_s, Tensor? kl, Tensor? dot_t, Tensor grad_kl, {_PROBLEM}) -> Tensor[]",
    tags=TAGS,
)
torch.library.define(
    "streamkl::one_pass",
    f"({_TENSORS}, Tensor lse_t, Tensor lse_s, Tensor? row_weight, {_PROBLEM}) -> Tensor[]",
    tags=TAGS,
)

# ---- A call of the library -----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)  # packed batches have new lengths at every step; a plan is less than a kilobyte
def _plan_for(*call) -> lib.Plan:
    """Checks a combination of shapes, types and devices when it first comes, and plans it."""
    return lib.Plan(check_call(*call))


def _facts(tensors, lse_t, lse_s, row_weight, cu_seqlens_q, cu_seqlens_k, key_lengths, *rest):
    """The arguments of check_call."""
    given = (*tensors, lse_t, lse_s, row_weight, cu_seqlens_q, cu_seqlens_k, key_lengths)
    return (*map(facts_of, given), *rest)


# ---- Outputs -------------------------------------------------------------------------------------------------------

_GRADIENTS = (lib.DQ_T, lib.DK_T, lib.DQ_S, lib.DK_S)  # in the order of the tensors


def _rows_read_by_backward(q_t, q_s, problem) -> tuple[bool, bool]:
    """(kl, dot_t): whether skl_backward reads them besides the LSEs; the rule is in include/streamkl.h."""
    *_, reverse, _, _, gradients = problem
    grouped = Layout(problem).is_grouped(q_t, q_s)
    teacher, student = gradients & (lib.DQ_T | lib.DK_T), gradients & (lib.DQ_S | lib.DK_S)
    first = student if reverse else teacher and not grouped
    return bool(first), bool(teacher and grouped)


def _new_rows(q_t, q_s, return_lse, problem) -> list[torch.Tensor]:
    """kl; with gradients or return_lse: lse_t, lse_s; where a backward will read it: dot_t."""
    layout = Layout(problem)
    rows = [layout.rows_like(q_s)]
    if return_lse or problem[-1]:
        rows += [layout.rows_like(q_t), torch.empty_like(rows[0])]
        if _rows_read_by_backward(q_t, q_s, problem)[1]:
            rows.append(layout.rows_like(q_t))
    return rows


def _new_gradients(tensors, problem) -> list[torch.Tensor]:
    """Those that are wanted."""
    return [new_gradient(tensor) for tensor, bit in zip(tensors, _GRADIENTS) if problem[-1] & bit]


def _for_each_tensor(made, gradients, absent):
    """What was made, spread over the four tensors: `absent` where there is nothing."""
    remaining = iter(made)
    return [next(remaining) if gradients & bit else absent for bit in _GRADIENTS]


def _gradients_struct(made, problem) -> bytes:
    layout = Layout(problem)
    return lib.pack_gradients(*_for_each_tensor(map(layout.address, made), problem[-1], lib.ABSENT))


# ---- The operators; `problem` is the tail of their schemas ---------------------------------------------------------


def _forward(q_t, k_t, q_s, k_s, lse_t, return_lse, *problem):
    tensors = (q_t, k_t, q_s, k_s)
    plan = _plan_for(*_facts(tensors, lse_t, None, None, *problem))
    rows = _new_rows(q_t, q_s, return_lse, problem)
    run(plan, lib.FORWARD, tensors, lse_t, None, None, problem, (lib.pack_rows(*map(row_address, rows)),))
    return rows


def _forward_fake(q_t, k_t, q_s, k_s, lse_t, return_lse, *problem):
    check_while_tracing(check_call, _facts((q_t, k_t, q_s, k_s), lse_t, None, None, *problem))
    return _new_rows(q_t, q_s, return_lse, problem)


def _backward(q_t, k_t, q_s, k_s, lse_t, lse_s, kl, dot_t, grad_kl, *problem):
    tensors = (q_t, k_t, q_s, k_s)
    plan = _plan_for(*_facts(tensors, lse_t, lse_s, grad_kl, *problem))
    made = _new_gradients(tensors, problem)
    structs = (_gradients_struct(made, problem),)
    run(plan, lib.BACKWARD, tensors, lse_t, lse_s, grad_kl, problem, structs, kl, dot_t)
    return made


def _backward_fake(q_t, k_t, q_s, k_s, lse_t, lse_s, kl, dot_t, grad_kl, *problem):
    return _new_gradients((q_t, k_t, q_s, k_s), problem)


def _one_pass(q_t, k_t, q_s, k_s, lse_t, lse_s, row_weight, *problem):
    tensors, layout = (q_t, k_t, q_s, k_s), Layout(problem)
    plan = _plan_for(*_facts(tensors, lse_t, lse_s, row_weight, *problem))
    made = _new_gradients(tensors, problem)
    kl = layout.rows_like(q_s)
    dot_t = layout.rows_like(q_t) if _rows_read_by_backward(q_t, q_s, problem)[1] else None
    rows = lib.pack_rows(row_address(kl), lib.ABSENT, lib.ABSENT, row_address(dot_t))
    structs = (rows, _gradients_struct(made, problem))
    run(plan, lib.FORWARD_BACKWARD, tensors, lse_t, lse_s, row_weight, problem, structs)
    return [weighted(kl, row_weight).sum(), *made]


def _one_pass_fake(q_t, k_t, q_s, k_s, lse_t, lse_s, row_weight, *problem):
    tensors = (q_t, k_t, q_s, k_s)
    check_while_tracing(check_call, _facts(tensors, lse_t, lse_s, row_weight, *problem))
    return [q_s.new_empty((), dtype=torch.float32), *_new_gradients(tensors, problem)]


def partial_states(tensors, lse_t, key_begin, key_end, problem) -> torch.Tensor:
    """skl_row_state of every row over some of the keys: f32 [batch, heads_s, len_q, 5]; not a torch operator."""
    plan = _plan_for(*_facts(tensors, lse_t, None, None, *problem))
    rows = Layout(problem).rows_like(tensors[2])
    states = rows.new_empty((*rows.shape, 5))
    outputs = (key_begin, key_end, states.data_ptr())
    run(plan, lib.PARTIAL, tensors, lse_t, None, None, problem, outputs)
    return states


for _name, _kernel, _fake in (
    ("streamkl::forward", _forward, _forward_fake),
    ("streamkl::backward", _backward, _backward_fake),
    ("streamkl::one_pass", _one_pass, _one_pass_fake),
):
    torch.library.impl(_name, ("cpu", "cuda"), _kernel)
    torch.library.register_fake(_name, _fake)

# ---- Autograd: around the operators, because torch.library.register_autograd takes 200 us a call -------------------


class Forward(torch.autograd.Function):
    """streamkl::forward, and streamkl::backward behind it: kl, lse_t, lse_s."""

    @staticmethod
    def forward(ctx, q_t, k_t, q_s, k_s, lse_t, return_lse, problem):
        kl, out_t, out_s, *dot_t = torch.ops.streamkl.forward(q_t, k_t, q_s, k_s, lse_t, return_lse, *problem)
        ctx.mark_non_differentiable(out_t, out_s)
        ctx.problem = problem[3:]
        kept_kl = kl if _rows_read_by_backward(q_t, q_s, problem)[0] else None
        kept_dot = dot_t[0] if dot_t else None
        ctx.save_for_backward(q_t, k_t, q_s, k_s, out_t, out_s, kept_kl, kept_dot, *problem[:3])
        return kl, out_t, out_s

    @staticmethod
    def backward(ctx, grad_kl, *_):
        *tensors, cu_seqlens_q, cu_seqlens_k, key_lengths = ctx.saved_tensors
        problem = (cu_seqlens_q, cu_seqlens_k, key_lengths, *ctx.problem)
        with torch.no_grad():
            made = torch.ops.streamkl.backward(*tensors, grad_kl, *problem)
        if torch.is_grad_enabled():  # create_graph=True
            made = OnceDifferentiable.apply("attention_kl", len(made), *made, *tensors[:4])
        return (*_for_each_tensor(made, problem[-1], None), None, None, None)


class OnePass(torch.autograd.Function):
    """streamkl::one_pass, whose backward only scales: the loss."""

    @staticmethod
    def forward(ctx, q_t, k_t, q_s, k_s, lse_t, lse_s, row_weight, problem):
        loss, *made = torch.ops.streamkl.one_pass(q_t, k_t, q_s, k_s, lse_t, lse_s, row_weight, *problem)
        ctx.gradients = problem[-1]
        ctx.save_for_backward(*made)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        if torch.is_grad_enabled():  # create_graph=True; nothing is left of what a second derivative would depend on
            raise RuntimeError(
                "streamkl: attention_kl with both LSEs cannot be differentiated twice, nor take create_graph=True"
            )
        made = [gradient * grad_loss for gradient in ctx.saved_tensors]
        return (*_for_each_tensor(made, ctx.gradients, None), None, None, None, None)
