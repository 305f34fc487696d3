"""Attention KL, and attention alone, as PyTorch offers them: the peers of bench/run.py peers."""

import torch
import torch.nn.functional as F

from harness.library import BACKWARD, FORWARD
from harness.run import Method
from harness.timing import Prepared

PYTORCH = f"PyTorch {torch.__version__}"
KL_PRODUCTS, ATTENTION_PRODUCTS = {FORWARD: 2, BACKWARD: 4}, {FORWARD: 2, BACKWARD: 5}  # N x N x d, useful work


def flops_of(shape, products):
    return {name: count * shape.flops(FORWARD) // 2 for name, count in products.items()}


def leaves_of(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def with_autograd(name, version, shape, forward, leaves, weight=None):
    """The forward without a graph, and the backward of a graph that is built before, untimed.

    `weight`: the upstream gradient of the KLs that forward() returns; None: an attention, which computes no KL.
    """

    def forward_alone():
        with torch.no_grad():
            return forward()

    def upstream_of(result):
        return torch.ones_like(result) if weight is None or not result.dim() else weight

    def prepare_backward():
        result = forward()
        upstream = upstream_of(result)
        return lambda: torch.autograd.grad(result, leaves, upstream, retain_graph=True)

    def step():
        result = forward()
        gradients = torch.autograd.grad(result, leaves, upstream_of(result))
        return {} if weight is None else {"kl": result.detach(), "dq_s": gradients[0], "dk_s": gradients[1]}

    calls = {FORWARD: forward_alone, BACKWARD: Prepared(prepare_backward)}
    flops = flops_of(shape, ATTENTION_PRODUCTS if weight is None else KL_PRODUCTS)
    return Method(name, calls, version, flops, step)


# ---- Attention alone -----------------------------------------------------------------------------------------------


def sdpa(q, k, v, causal, backend):
    """scaled_dot_product_attention by one backend: CUDNN_ATTENTION, FLASH_ATTENTION, ..."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def attention(name, backend, version):
    """Attention with the heads, head size and type of the teacher. Its make() raises what PyTorch raises.

    Where PyTorch's interface to a backend refuses shared key heads, they are expanded beforehand, outside of the time.
    """

    def make(tensors, shape, weight=None):
        if shape.window >= 0:
            raise ValueError("PyTorch's interface to attention has no window")
        leaves = leaves_of(tensors["q_t"], tensors["k_t"], torch.randn_like(tensors["k_t"]))

        def attend():
            return sdpa(*leaves, shape.causal, backend)

        try:
            attend()
        except RuntimeError:
            group_size = shape.heads_t // shape.key_heads_t
            leaves[1:] = leaves_of(*(tensor.repeat_interleave(group_size, 1) for tensor in leaves[1:]))
            attend()
        return with_autograd(name, version(), shape, attend, leaves)

    return make


# ---- Attention KL that autograd differentiates ---------------------------------------------------------------------


def attention_kl(name, function_of):
    """A peer whose KL is function_of(shape, device)(q_t, k_t, q_s, k_s)."""

    def make(tensors, shape, weight):
        leaves, function = leaves_of(tensors["q_s"], tensors["k_s"]), function_of(shape, weight.device)
        teacher = tensors["q_t"], tensors["k_t"]
        return with_autograd(name, PYTORCH, shape, lambda: function(*teacher, *leaves), leaves, weight)

    return make


def compiled(function):
    """torch.compile, without reuse of saved buffers in the backward: a sample runs several backwards of one graph."""
    import torch._functorch.config as config

    if hasattr(config, "donated_buffer"):
        config.donated_buffer = False
    return torch.compile(function, dynamic=False)


def materialized(shape, device):
    """Plain attention KL: two N x N logits, two softmaxes, one sum."""

    def logits(q, k):
        x = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * q.shape[-1] ** -0.5
        return hide(x, float("-inf")).float()

    def hide(x, value):
        if not shape.causal:
            return x
        return x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool, device=device).triu(1), value)

    def kl(q_t, k_t, q_s, k_s):
        x, log_s = logits(q_t, k_t), torch.log_softmax(logits(q_s, k_s), -1)
        log_p = torch.log_softmax(x, -1)
        return hide(log_p.exp() * (log_p - log_s), 0.0).sum(-1)

    return kl


def flex_attend(visible, length, device, score_mod=None):
    """A compiled FlexAttention of q, k, v that returns its output and its LSE. `visible(b, h, i, j)`; None: all pairs.

    PyTorch 2.9 deprecates return_lse and offers return_aux.
    """
    from torch.nn.attention import flex_attention as flex

    has_aux, options = hasattr(flex, "AuxRequest"), dict(score_mod=score_mod)
    if visible is not None:
        # Eager code takes length^2 bytes.
        create = flex.create_block_mask if length <= 32768 else compiled(flex.create_block_mask)
        options["block_mask"] = create(visible, None, None, length, length, device=device)

    @compiled
    def attend(q, k, v):
        if has_aux:
            output, aux = flex.flex_attention(q, k, v, **options, return_aux=flex.AuxRequest(lse=True))
            return output, aux.lse
        return flex.flex_attention(q, k, v, **options, return_lse=True)

    return attend


def flex_composition(shape, device):
    """Attention KL from three FlexAttention calls, in O(N) memory. With p = softmax(x), since logits are linear in k:

        sum_j p_j x_j = scale <q_t, attention(q_t, k_t, v = k_t)>
        sum_j p_j y_j = scale <q_s, attention(q_t, k_t, v = k_s)>
        KL = sum_j p_j (x_j - y_j) - lse_x + lse_y

    Gradients flow to q_s through the second line and lse_y, and to k_s through the value of the second call and lse_y.
    Of the third call only the LSE is used. The sums are rounded to bf16 before they are subtracted: see the errors.
    """
    scale = shape.dim_s**-0.5
    attend = flex_attend((lambda b, h, i, j: i >= j) if shape.causal else None, shape.length, device)

    @compiled
    def mean_logit(q, mean_k):
        return scale * (q.float() * mean_k.float()).sum(-1)

    def kl(q_t, k_t, q_s, k_s):
        mean_k_t, lse_x = attend(q_t, k_t, k_t)
        mean_k_s, _ = attend(q_t, k_t, k_s)
        _, lse_y = attend(q_s, k_s, k_t)
        return mean_logit(q_t, mean_k_t) - mean_logit(q_s, mean_k_s) - lse_x + lse_y

    return kl


PEERS = {  # in the order of the table; arguments: tensors, shape, weight of each KL
    "cudnn": attention("cudnn", "CUDNN_ATTENTION", lambda: f"cuDNN {torch.backends.cudnn.version()}"),
    "fa2": attention("fa2", "FLASH_ATTENTION", lambda: PYTORCH),
    "flex": attention_kl("flex", flex_composition),
    "compile": attention_kl("compile", lambda shape, device: compiled(materialized(shape, device))),
    "eager": attention_kl("eager", materialized),
}
