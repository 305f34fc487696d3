"""A problem of self-attention: its shape, the calls of the library on it, and exact results in float64."""

from dataclasses import dataclass, replace

import torch

from streamkl import reference
from streamkl._attention_kl import lses_first
from streamkl._call import new_rows, row_names
from streamkl._problem import DK_S, DK_T, DQ_S, DQ_T, KL_FORWARD, KL_REVERSE

from .library import BACKWARD, DTYPES, FORWARD, ONE_PASS, STEP, Calls, address, addresses, lib
from .report import worst

FORWARD_GIVEN = "forward, lse_t given"  # differs from the forward only in teacher groups
TENSORS = ("q_t", "k_t", "q_s", "k_s")


@dataclass(frozen=True)
class Shape:
    """The defaults are the base shape of bench/run.py shapes: Llama 3 8B's heads on both sides."""

    name: str = ""
    heads_t: int = 32
    key_heads_t: int = 8
    dim_t: int = 128
    heads_s: int = 32
    key_heads_s: int = 8
    dim_s: int = 128
    batch: int = 1
    length: int = 8192
    packed: tuple = ()  # lengths of packed sequences, in place of batch and length
    dtype_t: str = "bf16"
    dtype_s: str = "bf16"
    causal: bool = True
    window: int = -1  # keys before a query that it attends to; -1: all
    softcap: float = 0.0
    teacher_gradients: bool = False
    deterministic: bool = False
    reverse: bool = False

    heads = property(lambda self: self.heads_s)
    key_heads = property(lambda self: self.key_heads_s)
    dim = property(lambda self: self.dim_s)
    dtype = property(lambda self: self.dtype_s)

    @property
    def group_size(self):
        return self.heads_t // self.heads_s

    @property
    def mask(self):
        return f"window {self.window}" if self.window >= 0 else "causal" if self.causal else "full"

    @property
    def sequences(self):
        """[(batch index, first row, end)]"""
        ends = [sum(self.packed[: index + 1]) for index in range(len(self.packed))]
        packed = [(0, end - length, end) for length, end in zip(self.packed, ends)]
        return packed or [(index, 0, self.length) for index in range(self.batch)]

    @property
    def pairs(self):
        """Visible query-key pairs of one head, all sequences."""
        lengths = [end - begin for _, begin, end in self.sequences]
        if not self.causal:
            return sum(n * n for n in lengths)
        seen = [min(n, self.window + 1) if self.window >= 0 else n for n in lengths]
        return sum(k * (k + 1) // 2 + (n - k) * k for n, k in zip(lengths, seen))

    def flops(self, operation):
        """Work that the loss requires: both logits once; for gradients, dq and dk of every side that has them."""
        if operation == STEP:
            return self.flops(FORWARD) + self.flops(BACKWARD)
        with_gradients = operation in (BACKWARD, ONE_PASS)
        products_s, products_t = (3 if with_gradients else 1), (3 if with_gradients and self.teacher_gradients else 1)
        return 2 * self.pairs * (products_t * self.heads_t * self.dim_t + products_s * self.heads_s * self.dim_s)

    def dense(self):
        """The same work without shared key heads and packing: as many sequences, all of the same length."""
        keys = dict(key_heads_t=self.heads_t, key_heads_s=self.heads_s)
        if not self.packed:
            return replace(self, **keys)
        mean_square = sum(n * n for n in self.packed) / len(self.packed)
        length = max(128, round(mean_square**0.5 / 128) * 128)
        return replace(self, **keys, packed=(), batch=len(self.packed), length=length)


def random_tensors(shape, device, query_std=1.0):
    """{name: tensor [batch, heads, length, dim]}; packed: a batch of 1"""
    made, rows = {}, (1, sum(shape.packed)) if shape.packed else (shape.batch, shape.length)
    for name in TENSORS:
        kind, side = name.split("_")
        heads = getattr(shape, ("key_heads_" if kind == "k" else "heads_") + side)
        size = (rows[0], heads, rows[1], getattr(shape, f"dim_{side}"))
        tensor = torch.randn(size, device=device) * (query_std if kind == "q" else 1.0)
        made[name] = tensor.to(DTYPES[getattr(shape, f"dtype_{side}")])
    return made


class AttentionCalls(Calls):
    """The passes of a shape on one set of tensors, and their results."""

    def __init__(self, tensors, shape, row_weight=None):
        gradients = (DQ_T | DK_T if shape.teacher_gradients else 0) | DQ_S | DK_S
        direction = KL_REVERSE if shape.reverse else KL_FORWARD
        ends = [0, *(end for *_, end in shape.sequences)]
        ends = torch.tensor(ends, dtype=torch.int32, device=tensors["q_s"].device)
        lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ends) if shape.packed else {}
        longest = max(shape.packed, default=-1)
        super().__init__(
            {name: tensor[0] for name, tensor in tensors.items()} | lengths if shape.packed else tensors,
            gradients=gradients, direction=direction, softcap_t=shape.softcap, softcap_s=shape.softcap,
            causal=shape.causal, window_left=shape.window, deterministic=shape.deterministic, max_seqlen_q=longest,
            max_seqlen_k=longest,
        )  # fmt: skip
        self.shape = shape
        self.tensors, self.row_weight, self.ends = tensors, row_weight, ends  # kept: the structs hold only addresses
        kind = gradients, direction, 0, shape.group_size > 1
        needed = [lib.rows_needed(operation, *kind) for operation in (lib.BACKWARD, lib.FORWARD_BACKWARD)]
        of_forward, of_one_pass = needed[0] | lib.KL | lib.LSE_T | lib.LSE_S, (needed[1] & lib.DOT_T) | lib.KL
        made = new_rows(tensors["q_t"], of_forward | of_one_pass, self.plan.problem)
        self.rows = {
            name: row[None] if shape.packed else row for name, row in zip(row_names(of_forward | of_one_pass), made)
        }
        trained = TENSORS if shape.teacher_gradients else TENSORS[2:]
        self.gradients = {f"d{name}": torch.empty_like(tensors[name]) for name in trained}
        given, row = addresses(tensors) | dict.fromkeys(lengths, ends.data_ptr()), addresses(self.rows)
        weight = {} if row_weight is None else {"grad_kl": address(row_weight)}

        def some(bits):
            return {name: row[name] for name in row_names(bits)}

        lses, outputs = some(lib.LSE_T | lib.LSE_S), lib.pack_gradients(**addresses(self.gradients))
        inputs, one_pass = lib.pack_inputs(**given), lib.pack_inputs(**given, **lses, **weight)
        last = (lib.FORWARD_BACKWARD, one_pass, lib.pack_rows(**some(of_one_pass)), outputs)
        self.calls = {
            FORWARD: [(lib.FORWARD, inputs, lib.pack_rows(**some(of_forward)))],
            BACKWARD: [(lib.BACKWARD, lib.pack_inputs(**given, **some(needed[0]), **weight), outputs)],
            ONE_PASS: [last],
        }
        if shape.group_size > 1:
            known = lib.pack_inputs(**given, lse_t=row["lse_t"])
            self.calls[FORWARD_GIVEN] = [(lib.FORWARD, known, lib.pack_rows(kl=row["kl"]))]
        # attention_kl then needs no forward and backward.
        if lses_first(tensors["q_t"], tensors["q_s"], self.plan.problem):
            self.calls[STEP] = [(lib.FORWARD, inputs, lib.pack_rows(**lses)), last]

    def results(self):
        return {"kl": self.rows["kl"], **self.gradients}


def prepared_calls(shape, device):
    """The calls on random inputs, after a forward: the LSEs that the other passes read."""
    calls = AttentionCalls(random_tensors(shape, device), shape)
    calls.run(FORWARD)
    return calls


# ---- Exact results -------------------------------------------------------------------------------------------------


# A larger relative error of StreamKL is a bug and not rounding: of KLs and gradients of f32 tensors, and of others.
WRONG, WRONG_16_BITS = 1e-4, 2e-2
SAMPLED_ROWS, BLOCK = 24, 1024


def limits_of(shape):
    """{result: relative error}"""
    is_f32 = shape.dtype_t == shape.dtype_s == "f32"
    return {"kl": WRONG} | dict.fromkeys(("dq_t", "dk_t", "dq_s", "dk_s"), WRONG if is_f32 else WRONG_16_BITS)


def relative_error(result, true):
    return ((result.double() - true).norm() / true.norm()).item()


def exact_rows(shape, tensors, rows, weight):
    """{result: float64} of one sequence [heads, length, dim], for a weight [heads_s, rows] of each KL.

    KL and dq are those of `rows`, a block at a time; dk is that of all keys.
    """
    q_t, k_t, q_s, k_s = (tensors[name] for name in TENSORS)
    k_t, k_s = (k.double().requires_grad_() for k in (k_t, k_s))
    keys, found = torch.arange(k_s.shape[1], device=k_s.device), []
    for block, block_weight in zip(rows.split(BLOCK), weight.split(BLOCK, -1)):
        last = block[:, None] if shape.causal else len(keys) - 1
        first = block[:, None] - shape.window if shape.window >= 0 else 0
        visible = ((keys <= last) & (keys >= first)).expand(len(block), -1)
        parts = [q_t[:, block].double().requires_grad_(), k_t, q_s[:, block].double().requires_grad_(), k_s]
        kl, _, _ = reference.sequence_kl(*parts, visible, None, None, shape.softcap, shape.softcap, shape.reverse)
        found.append((kl.detach(), *torch.autograd.grad((kl * block_weight).sum(), parts)))
    kl, dq_t, dk_t, dq_s, dk_s = zip(*found)
    return {
        "kl": torch.cat(kl, -1), "dq_t": torch.cat(dq_t, 1), "dk_t": sum(dk_t), "dq_s": torch.cat(dq_s, 1), "dk_s": sum(dk_s)
    }  # fmt: skip


class Exact:
    """Exact results of all heads. Only sampled rows have a weight, so that no gradient depends on another row.

    all_rows: every row, with weight 1, for a method that returns the sum of all rows.
    """

    def __init__(self, shape, tensors, all_rows=False):
        self.shape, self.tensors, self.all_rows = shape, tensors, all_rows
        device, (batch, heads, rows, _) = tensors["q_s"].device, tensors["q_s"].shape
        self.limits = limits_of(shape)
        self.weight = torch.zeros((batch, heads, rows), device=device)
        self.places, self.exact = [], []
        for index, begin, end in shape.sequences:
            chosen = torch.randperm(end - begin, device=device)[: None if all_rows else SAMPLED_ROWS].sort().values
            weight = torch.rand((heads, len(chosen)), device=device) + 0.5
            weight = torch.ones_like(weight) if all_rows else weight
            self.weight[index, :, chosen + begin] = weight
            sequence = {name: tensor[index, :, begin:end] for name, tensor in tensors.items()}
            self.places.append((index, slice(begin, end), chosen))
            self.exact.append(exact_rows(shape, sequence, chosen, weight.double()))

    def part(self, name, result, place):
        index, rows, chosen = place
        own = result[index, :, rows]
        return own if name.startswith("dk") else own[:, chosen]

    def errors(self, results):
        """{result: largest relative error in norm of a sequence}; a KL without dimensions is the sum of all rows."""
        found = {}
        for name, result in results.items():
            if not result.dim():
                assert self.all_rows, "a sum of all rows"
                found[name] = relative_error(result, sum(true[name].sum() for true in self.exact))
                continue
            pairs = zip(self.places, self.exact)
            found[name] = worst([relative_error(self.part(name, result, place), true[name]) for place, true in pairs])
        return found
