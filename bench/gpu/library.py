"""The library on torch tensors, through the structs of the package: a call without the overhead of a torch operator."""

import torch

from streamkl import _library as lib
from streamkl._problem import CPU, CUDA, DK_S, DQ_S, Problem

from .cases import BACKWARD, FORWARD, ONE_PASS, OPERATIONS

SKL_F32, SKL_BF16 = 0, 2


def address(tensor):
    """skl_input of [batch, heads, length, dim] or of a row vector [batch, heads, length]; packed: a batch of 1."""
    return (tensor.data_ptr(), *tensor.stride()[:3])


def addresses(tensors):
    return {name: address(tensor) for name, tensor in tensors.items()}


def make_plan(device, **fields):
    """Fields of Problem, which has defaults for the others."""
    kind = CUDA if device.type == "cuda" else CPU
    return lib.Plan(Problem(device=kind, device_index=device.index or 0, **fields))


class Workspace:
    """Memory for all operations of a plan, and their calls."""

    def __init__(self, plan, device):
        self.plan, self.device = plan, device
        size = max(plan.workspace_sizes[operation] for operation in OPERATIONS.values())
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)

    def run(self, operation, *structs):
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None
        call, memory = lib.run_function(operation), self.memory
        lib.check(call(self.plan.handle, *structs, memory.data_ptr(), memory.numel(), stream))


class Plan:
    """The three calls on one set of tensors, and their results."""

    def __init__(self, tensors, case, deterministic=False):
        q_t, k_t, q_s, k_s = tensors
        is_packed, device = bool(case.packed), q_s.device
        plan = make_plan(
            device, deterministic=deterministic, dtype_t=SKL_BF16, dtype_s=SKL_BF16, gradients=DQ_S | DK_S,
            causal=case.causal, batch=len(case.sequences), len_q=case.length, len_k=case.length, heads_t=case.heads,
            heads_s=case.heads, key_heads_t=case.keys, key_heads_s=case.keys, dim_t=case.dim, dim_s=case.dim,
            packed=is_packed, total_q=case.rows if is_packed else 0, total_k=case.rows if is_packed else 0,
        )  # fmt: skip
        self.kernel, self.workspace = plan.kernel, Workspace(plan, device)
        self.kl, self.lse_t, self.lse_s = (q_s.new_empty(q_s.shape[:3], dtype=torch.float32) for _ in range(3))
        self.dq, self.dk = torch.empty_like(q_s), torch.empty_like(k_s)
        given = addresses(dict(q_t=q_t, k_t=k_t, q_s=q_s, k_s=k_s))
        saved = addresses(dict(lse_t=self.lse_t, lse_s=self.lse_s))
        self.keep = [*tensors]  # the structs hold only addresses
        if is_packed:
            ends = [end for _, _, end in case.sequences]
            offsets = torch.tensor([0, *ends], dtype=torch.int32, device=device)
            given |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), offsets.data_ptr())
            self.keep.append(offsets)
        kl, inputs = address(self.kl), lib.pack_inputs(**given, **saved)
        gradients = lib.pack_gradients(dq_s=address(self.dq), dk_s=address(self.dk))
        self.structs = {
            FORWARD: (lib.pack_inputs(**given), lib.pack_rows(kl=kl, **saved)),
            BACKWARD: (inputs, gradients),
            ONE_PASS: (inputs, lib.pack_rows(kl=kl), gradients),
        }

    def run(self, operation):
        self.workspace.run(OPERATIONS[operation], *self.structs[operation])

    def explain(self, operation):
        inputs = self.structs[operation][0]
        return self.workspace.plan.explain(OPERATIONS[operation], inputs)
