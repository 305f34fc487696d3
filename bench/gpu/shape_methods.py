"""The calls of one shape of bench/shapes.py: ours, attention by cuDNN, eager PyTorch; exact results of some rows."""

import torch
import torch.nn.functional as F

from streamkl import reference
from streamkl._attention_kl import lses_first
from streamkl._problem import DK_S, DK_T, DQ_S, DQ_T, KL_FORWARD, KL_REVERSE, Options

from .cases import BACKWARD, FORWARD, ONE_PASS, STEP
from .library import Workspace, address, addresses, lib, make_plan
from .measure import WRONG
from .shape_cases import FORWARD_GIVEN

DTYPES = {"f32": (0, torch.float32), "f16": (1, torch.float16), "bf16": (2, torch.bfloat16)}  # {name: (skl_dtype, of torch)}
TENSORS = ("q_t", "k_t", "q_s", "k_s")
ROWS = {"kl": "s", "lse_t": "t", "lse_s": "s", "dot_t": "t"}  # {row vector: the side whose heads it has}

# A larger relative error of f32 gradients is a bug and not rounding; 16-bit ones have the limits of bench/peers.py.
WRONG_F32 = 1e-4


def side_of(name, shape):
    """(heads, dim, type) of q_t, k_t, q_s or k_s."""
    kind, side = name.split("_")
    heads = getattr(shape, ("key_heads_" if kind == "k" else "heads_") + side)
    return heads, getattr(shape, f"dim_{side}"), getattr(shape, f"dtype_{side}")


def random_tensors(shape, device, query_std=1.0):
    """{name: tensor}"""
    made = {}
    for name in TENSORS:
        heads, dim, dtype = side_of(name, shape)
        std = query_std if name.startswith("q") else 1.0
        tensor = torch.randn((shape.batch, heads, shape.length, dim), device=device) * std
        made[name] = tensor.to(DTYPES[dtype][1])
    return made


class ShapePlan:
    """The passes of a shape on one set of tensors, and their results."""

    def __init__(self, tensors, shape, row_weight=None):
        device = tensors["q_s"].device
        trained = TENSORS if shape.teacher_gradients else TENSORS[2:]
        gradients = (DQ_T | DK_T if shape.teacher_gradients else 0) | DQ_S | DK_S
        direction = KL_REVERSE if shape.reverse else KL_FORWARD
        plan = make_plan(
            device, dtype_t=DTYPES[shape.dtype_t][0], dtype_s=DTYPES[shape.dtype_s][0], gradients=gradients,
            direction=direction, batch=shape.batch, len_q=shape.length, len_k=shape.length, heads_t=shape.heads_t,
            heads_s=shape.heads_s, key_heads_t=shape.key_heads_t, key_heads_s=shape.key_heads_s, dim_t=shape.dim_t,
            dim_s=shape.dim_s, softcap_t=shape.softcap, softcap_s=shape.softcap, causal=shape.causal,
            window_left=shape.window, deterministic=shape.deterministic,
        )  # fmt: skip
        self.workspace = Workspace(plan, device)
        self.shape, self.tensors, self.row_weight = shape, tensors, row_weight  # kept: the structs hold only addresses
        heads = {"t": shape.heads_t, "s": shape.heads_s}
        self.rows = {
            name: torch.zeros((shape.batch, heads[side], shape.length), device=device) for name, side in ROWS.items()
        }
        self.gradients = {f"d{name}": torch.empty_like(tensors[name]) for name in trained}
        given, rows = addresses(tensors), addresses(self.rows)
        weight = {} if row_weight is None else {"grad_kl": address(row_weight)}

        def needed(op):
            return lib.rows_needed(op, gradients, direction, plan.problem.student, shape.group_size > 1)

        def some(bits):
            return {name: rows[name] for bit, name in enumerate(lib.ROW_NAMES[:4]) if bits >> bit & 1}

        of_forward = lib.pack_rows(**some(needed(lib.BACKWARD) | lib.KL | lib.LSE_T | lib.LSE_S))
        of_one_pass = lib.pack_rows(**some((needed(lib.FORWARD_BACKWARD) & lib.DOT_T) | lib.KL))
        outputs = lib.pack_gradients(**addresses(self.gradients))
        lses = {name: rows[name] for name in ("lse_t", "lse_s")}
        inputs, one_pass = lib.pack_inputs(**given), (lib.FORWARD_BACKWARD, lib.pack_inputs(**given, **lses, **weight))
        self.calls = {  # {pass: [(operation, inputs, outputs...)]}
            FORWARD: [(lib.FORWARD, inputs, of_forward)],
            FORWARD_GIVEN: [(lib.FORWARD, lib.pack_inputs(**given, lse_t=rows["lse_t"]), lib.pack_rows(kl=rows["kl"]))],
            BACKWARD: [(lib.BACKWARD, lib.pack_inputs(**given, **some(needed(lib.BACKWARD)), **weight), outputs)],
            ONE_PASS: [(*one_pass, of_one_pass, outputs)],
        }
        self.passes = shape.passes
        options = Options(gradients=gradients, direction=direction, heads_first=True)
        if lses_first(tensors["q_t"], tensors["q_s"], options):  # then attention_kl needs no forward and backward
            self.calls[STEP] = [(lib.FORWARD, inputs, lib.pack_rows(**lses)), (*one_pass, of_one_pass, outputs)]
            self.passes = [*shape.passes, STEP]

    def run(self, operation):
        for call in self.calls[operation]:
            self.workspace.run(*call)

    def kernels(self, operation):
        """The kernels of the launches as skl_plan_explain names them: "STEP: KERNEL, ..." per line."""
        texts = [self.workspace.plan.explain(op, inputs) for op, inputs, *_ in self.calls[operation]]
        names = [line.split(": ", 1)[1].split(",")[0].split(" ")[0] for text in texts for line in text.splitlines()]
        return " + ".join(dict.fromkeys(names))

    def results(self):
        return {"kl": self.rows["kl"], **self.gradients}


# ---- Attention by cuDNN --------------------------------------------------------------------------------------------------


def cudnn_calls(shape, device):
    """{pass: call} of attention with the heads, head size and type of the teacher. Raises what PyTorch raises.

    Where PyTorch's interface to cuDNN refuses shared key heads, they are expanded beforehand, outside of the time.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if shape.window >= 0:
        raise ValueError("PyTorch's interface to cuDNN has no window")
    made, group_size = random_tensors(shape, device), shape.heads_t // shape.key_heads_t

    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=q.shape[1] != k.shape[1])

    def with_keys(k):
        leaves = [tensor.detach().requires_grad_() for tensor in (made["q_t"], k, torch.randn_like(k))]
        return leaves, attend(*leaves)

    try:
        leaves, result = with_keys(made["k_t"])
    except RuntimeError:
        leaves, result = with_keys(made["k_t"].repeat_interleave(group_size, dim=1))

    def forward():
        with torch.no_grad():
            return attend(*leaves)

    upstream = torch.randn_like(result)
    return {FORWARD: forward, BACKWARD: lambda: torch.autograd.grad(result, leaves, upstream, retain_graph=True)}


# ---- Eager PyTorch -------------------------------------------------------------------------------------------------------


def eager_kl(q_t, k_t, q_s, k_s, causal):
    """KL of every row with stored matrices: bf16 products, f32 softmax, mean over each teacher group."""

    def logits(q, k):
        x = ((q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * q.shape[-1] ** -0.5).float()
        return x.masked_fill_(hidden, -torch.inf) if causal else x

    hidden = torch.ones((q_t.shape[2], k_t.shape[2]), dtype=torch.bool, device=q_t.device).triu(1)
    with torch.no_grad():
        p = torch.softmax(logits(q_t, k_t), -1).unflatten(1, (q_s.shape[1], -1)).mean(2)
    log_s = torch.log_softmax(logits(q_s, k_s), -1)
    if causal:
        log_s = log_s.masked_fill(hidden, 0.0)  # where p is 0
    return (torch.xlogy(p, p) - p * log_s).sum(-1)


def eager_calls(tensors, shape):
    """{pass: call} of eager PyTorch. Raises ValueError for shapes that it does not have."""
    if shape.softcap or shape.reverse or shape.teacher_gradients or shape.window >= 0:
        raise ValueError("only masks and shapes are compared with it")
    q_t, k_t, *student = (tensors[name] for name in TENSORS)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in student]

    def forward():
        with torch.no_grad():
            return eager_kl(q_t, k_t, *leaves, shape.causal)

    def step():
        return torch.autograd.grad(eager_kl(q_t, k_t, *leaves, shape.causal).sum(), leaves)

    return {FORWARD: forward, STEP: step}


# ---- Exact results -------------------------------------------------------------------------------------------------------


CHECKED_ROWS = 24
CHECKED_STD = 4.0  # of the logits: large enough that a softcap which is left out shows


def worst(errors):
    """The largest error; NaN is larger than all."""
    return float("nan") if any(error != error for error in errors) else max(errors)


class Check:
    """Compares a shape with float64 on fresh random inputs.

    Only a sample of rows has a weight, so that the gradients, also those of the keys, depend on no other row.
    """

    def __init__(self, shape, device):
        self.shape = shape
        self.tensors = random_tensors(shape, device, CHECKED_STD)
        count = min(CHECKED_ROWS, shape.length)
        self.rows = torch.randperm(shape.length, device=device)[:count].sort().values
        self.weight = torch.zeros((shape.batch, shape.heads_s, shape.length), device=device)
        self.weight[..., self.rows] = torch.rand((shape.batch, shape.heads_s, count), device=device) + 0.5
        self.exact = [self.compute(index) for index in range(shape.batch)]

    def compute(self, index):
        """{result: float64} of a sequence: kl and dq of the sampled rows, dk of all keys."""
        shape, device = self.shape, self.rows.device
        q_t, k_t, q_s, k_s = (self.tensors[name][index].double() for name in TENSORS)
        parts = [tensor.requires_grad_() for tensor in (q_t[:, self.rows], k_t, q_s[:, self.rows], k_s)]
        keys = torch.arange(shape.length, device=device)
        last = self.rows[:, None] if shape.causal else shape.length - 1
        first = self.rows[:, None] - shape.window if shape.window >= 0 else 0
        visible = ((keys <= last) & (keys >= first)).expand(len(self.rows), -1)
        kl, _, _ = reference.sequence_kl(*parts, visible, None, None, shape.softcap, shape.softcap, shape.reverse)
        weight = self.weight[index][:, self.rows].double()
        gradients = torch.autograd.grad((kl * weight).sum(), parts)
        return {"kl": kl.detach()} | {f"d{name}": gradient for name, gradient in zip(TENSORS, gradients)}

    def sampled(self, name, result):
        return result if name.startswith("dk") else result[..., self.rows] if name == "kl" else result[:, self.rows]

    def errors(self, results):
        """{result: largest relative error in norm of a sequence}"""
        found = {}
        for name, result in results.items():
            pairs = [(self.sampled(name, result[index]).double(), true[name]) for index, true in enumerate(self.exact)]
            errors = [((ours - true).norm() / true.norm()).item() for ours, true in pairs]
            found[name] = worst(errors)
        return found

    def limit(self, name):
        if name == "kl":
            return WRONG["kl"]
        is_f32 = self.tensors[name[1:]].dtype == torch.float32 and self.shape.dtype_t == self.shape.dtype_s
        return WRONG_F32 if is_f32 else WRONG[name[:2]]

    def run(self):
        """{result: largest relative error}, of all ways to loss and gradients; and what is wrong."""
        plan = ShapePlan(self.tensors, self.shape, self.weight)
        errors, wrong = {}, []
        for operations in (FORWARD, BACKWARD), (ONE_PASS,), *([(STEP,)] if STEP in plan.passes else []):
            for result in (plan.rows["kl"], *plan.gradients.values()):
                result.fill_(float("nan"))
            for operation in operations:
                plan.run(operation)
            for name, error in self.errors(plan.results()).items():
                errors[name] = worst([error, errors.get(name, 0.0)])
                if not error <= self.limit(name):
                    wrong.append(f"{name} of {operations[-1]} is off by {error:.1e}")
        return errors, wrong
