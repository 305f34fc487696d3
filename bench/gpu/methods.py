"""The methods that are compared: StreamKL, and the alternatives that PyTorch offers."""

from dataclasses import dataclass, field
from typing import Callable

import torch
import torch.nn.functional as F

from .cases import BACKWARD, FORWARD, ONE_PASS, PEER_NAMES, Case
from .library import Plan


@dataclass
class Method:
    name: str
    case: Case
    # {pass: function that prepares it and returns the call to be timed}
    passes: dict = field(default_factory=dict)
    # {pass: number of N x N x d matmuls that count as useful work}
    matmuls: dict = field(default_factory=dict)
    # A whole training step with its allocations; returns those of kl, dq and dk that it computes
    step: Callable = dict
    kernel: str = ""
    explanation: str = ""  # launches, and the reason of each choice
    refusal: str = ""  # why it was not measured
    extra_memory: int = 0  # peak bytes of a step in addition to its inputs
    errors: dict = field(default_factory=dict)  # {result: relative error}
    times: dict = field(default_factory=dict)  # {pass: milliseconds of every sample}


# ---- Ours ----------------------------------------------------------------------------------------------------------------


def ours(tensors, case, wanted, name, deterministic=False):
    """Two methods, whose results are checked separately: forward with backward, and one-pass."""
    plan = Plan(tensors, case, deterministic)
    plan.run(FORWARD)  # the LSEs that the other passes read

    def step_of(operations):
        def step():
            fresh = Plan(tensors, case, deterministic)
            for operation in operations:
                fresh.run(operation)
            results = {"kl": fresh.kl, "dq": fresh.dq, "dk": fresh.dk}
            return {"kl": fresh.kl} if operations == [FORWARD] else results

        return step

    def method(timed, operations):
        passes = {operation: lambda operation=operation: lambda: plan.run(operation) for operation in timed}
        matmuls = {FORWARD: 2, BACKWARD: 4, ONE_PASS: 4}
        explanation = "\n".join(plan.explain(operation) for operation in timed)
        return Method(name, case, passes, matmuls, step_of(operations), plan.kernel, explanation)

    methods = []
    if two := [operation for operation in (FORWARD, BACKWARD) if operation in wanted]:
        methods.append(method(two, [FORWARD, BACKWARD] if BACKWARD in wanted else [FORWARD]))
    if ONE_PASS in wanted:
        methods.append(method([ONE_PASS], [FORWARD, ONE_PASS]))
    return methods


# ---- Peers that autograd differentiates ----------------------------------------------------------------------------------


def with_autograd(name, case, wanted, forward, leaves, matmuls, computes_kl=True):
    """Forward without a graph. The backward goes through a graph that is built once per sample."""

    def forward_alone():
        with torch.no_grad():
            return forward()

    def prepare_backward():
        result = forward()
        upstream = torch.ones_like(result)
        return lambda: torch.autograd.grad(result, leaves, upstream, retain_graph=True)

    def step():
        if BACKWARD not in wanted:
            results = {"kl": forward_alone()}
        else:
            result = forward()
            gradients = torch.autograd.grad(result, leaves, torch.ones_like(result))
            results = {"kl": result.detach(), "dq": gradients[0], "dk": gradients[1]}
        return results if computes_kl else {}

    passes = {FORWARD: lambda: forward_alone, BACKWARD: prepare_backward}
    passes = {operation: prepare for operation, prepare in passes.items() if operation in wanted}
    return Method(name, case, passes, matmuls, step)


def leaves_of(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def attention(name, backend):
    def make(tensors, case, wanted):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        _, k_t, q_s, k_s = tensors
        leaves = leaves_of(q_s, k_s, k_t)

        def forward():
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return F.scaled_dot_product_attention(*leaves, is_causal=case.causal)

        return with_autograd(name, case, wanted, forward, leaves, {FORWARD: 2, BACKWARD: 5}, computes_kl=False)

    return make


def attention_kl(name, function_of):
    """A peer whose KL is function_of(case, device)(q_t, k_t, q_s, k_s)."""

    def make(tensors, case, wanted):
        q_t, k_t, q_s, k_s = tensors
        leaves, function = leaves_of(q_s, k_s), function_of(case, q_s.device)
        return with_autograd(
            name, case, wanted, lambda: function(q_t, k_t, *leaves), leaves, {FORWARD: 2, BACKWARD: 4}
        )

    return make


def compiled(function):
    """torch.compile, without reuse of saved buffers in the backward: a sample runs several backwards of one graph."""
    import torch._functorch.config as config

    if hasattr(config, "donated_buffer"):
        config.donated_buffer = False
    return torch.compile(function, dynamic=False)


def materialised(case, device):
    """Plain attention KL: two N x N logits, two log_softmax, one sum."""

    def kl(q_t, k_t, q_s, k_s):
        scale = q_s.shape[-1] ** -0.5
        x, y = (q_t @ k_t.mT) * scale, (q_s @ k_s.mT) * scale
        if case.causal:
            hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=device).triu(1)
            x, y = x.masked_fill(hidden, float("-inf")), y.masked_fill(hidden, float("-inf"))
        log_p, log_s = torch.log_softmax(x.float(), -1), torch.log_softmax(y.float(), -1)
        terms = log_p.exp() * (log_p - log_s)
        return (terms.masked_fill(hidden, 0) if case.causal else terms).sum(-1)

    return kl


def flex_composition(case, device):
    """Attention KL from three FlexAttention calls, in O(N) memory. With p = softmax(x), since logits are linear in k:

        sum_j p_j x_j = scale <q_t, attention(q_t, k_t, v = k_t)>
        sum_j p_j y_j = scale <q_s, attention(q_t, k_t, v = k_s)>
        KL = sum_j p_j (x_j - y_j) - lse_x + lse_y

    Gradients flow to q_s through the second line and lse_y, and to k_s through the value of the second call and lse_y. Of the
    third call only the LSE is used. The sums are rounded to bf16 before they are subtracted: see the relative error.
    """
    from torch.nn.attention import flex_attention as flex

    has_aux, scale, mask = hasattr(flex, "AuxRequest"), case.dim**-0.5, None
    if case.causal:
        mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, case.length, case.length, device=device)

    @compiled
    def attend(q, k, v):
        """Attention and LSE. PyTorch 2.9 deprecates return_lse and offers return_aux."""
        if has_aux:
            output, aux = flex.flex_attention(q, k, v, block_mask=mask, return_aux=flex.AuxRequest(lse=True))
            return output, aux.lse
        return flex.flex_attention(q, k, v, block_mask=mask, return_lse=True)

    @compiled
    def mean_logit(q, mean_k):
        return scale * (q.float() * mean_k.float()).sum(-1)

    def kl(q_t, k_t, q_s, k_s):
        mean_k_t, lse_x = attend(q_t, k_t, k_t)
        mean_k_s, _ = attend(q_t, k_t, k_s)
        _, lse_y = attend(q_s, k_s, k_t)
        return mean_logit(q_t, mean_k_t) - mean_logit(q_s, mean_k_s) - lse_x + lse_y

    return kl


# ---- Triton --------------------------------------------------------------------------------------------------------------


def plain_triton(tensors, case, wanted):
    from .triton_kernels import TritonKL

    timed = TritonKL(tensors, case.causal)
    timed.forward()  # the LSEs that the backward reads

    def step():
        fresh = TritonKL(tensors, case.causal)
        fresh.forward()
        if BACKWARD not in wanted:
            return {"kl": fresh.kl}
        fresh.backward()
        return {"kl": fresh.kl, "dq": fresh.dq, "dk": fresh.dk}

    passes = {FORWARD: lambda: timed.forward, BACKWARD: lambda: timed.backward}
    passes = {operation: prepare for operation, prepare in passes.items() if operation in wanted}
    return Method("triton", case, passes, {FORWARD: 2, BACKWARD: 4}, step)


PEERS = {  # in the order of the table; arguments: tensors, case, requested passes
    "cudnn": attention("cudnn", "CUDNN_ATTENTION"),
    "fa2": attention("fa2", "FLASH_ATTENTION"),
    "triton": plain_triton,
    "flex": attention_kl("flex", flex_composition),
    "compile": attention_kl("compile", lambda case, device: compiled(materialised(case, device))),
    "eager": attention_kl("eager", materialised),
}
assert list(PEERS) == PEER_NAMES
