"""The library on torch tensors, through the package's own mirror of the C header; the package need not be installed."""

import importlib.util
import os
from pathlib import Path

import torch

from .cases import BACKWARD, FORWARD, ONE_PASS, OPERATIONS

PACKAGE = Path(__file__).resolve().parents[2] / "python/streamkl"


def module_of_the_package(name):
    """One file of python/streamkl that imports no other of it."""
    spec = importlib.util.spec_from_file_location(f"streamkl_{name}", PACKAGE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lib = module_of_the_package("_library")

SKL_F32, SKL_BF16 = 0, 2


def open_library(path, kernel=None):
    """Before anything is planned: which library, and which of its kernels if not the best. Returns its version."""
    os.environ["STREAMKL_LIBRARY"] = str(path)
    if kernel:
        os.environ["STREAMKL_KERNEL"] = kernel
    return lib.library().skl_version().decode()


def described(tensor):
    """[batch, heads, length, dim], or [batch, heads, length] of a row vector; packed ones with a batch of 1."""
    return (tensor.data_ptr(), *tensor.stride()[:3])


def all_described(tensors):
    return {name: described(tensor) for name, tensor in tensors.items()}


def plan_of(device, **problem):
    """Fields of skl_problem; those that are not named have no effect."""
    unset = dict.fromkeys("scale_t scale_s softcap_t softcap_s".split(), 0.0)
    unset |= dict.fromkeys("direction packed total_q total_k".split(), 0) | dict(window_left=-1, window_right=-1)
    unset |= dict(deterministic=False)
    where = lib.CUDA if device.type == "cuda" else lib.CPU
    return lib.Plan(lib.PlanKey(device=where, device_index=device.index or 0, **(unset | problem)))


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
    """The three calls on one set of tensors, and where their results are."""

    def __init__(self, tensors, case, deterministic=False):
        q_t, k_t, q_s, k_s = tensors
        is_packed, device = bool(case.packed), q_s.device
        plan = plan_of(
            device, deterministic=deterministic, dtype_t=SKL_BF16, dtype_s=SKL_BF16, gradients=lib.DQ_S | lib.DK_S,
            causal=case.causal,
            batch=len(case.sequences), len_q=case.length, len_k=case.length, heads_t=case.heads, heads_s=case.heads,
            key_heads_t=case.keys, key_heads_s=case.keys, dim_t=case.dim, dim_s=case.dim,
            packed=is_packed, total_q=case.rows if is_packed else 0, total_k=case.rows if is_packed else 0,
        )  # fmt: skip
        self.kernel, self.workspace = plan.kernel, Workspace(plan, device)
        self.kl, self.lse_t, self.lse_s = (q_s.new_empty(q_s.shape[:3], dtype=torch.float32) for _ in range(3))
        self.dq, self.dk = torch.empty_like(q_s), torch.empty_like(k_s)
        given = all_described(dict(q_t=q_t, k_t=k_t, q_s=q_s, k_s=k_s))
        saved = all_described(dict(lse_t=self.lse_t, lse_s=self.lse_s))
        self.keep = [*tensors]  # the structs below know only their addresses
        if is_packed:
            ends = [end for _, _, end in case.sequences]
            offsets = torch.tensor([0, *ends], dtype=torch.int32, device=device)
            given |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), offsets.data_ptr())
            self.keep.append(offsets)
        kl, inputs = described(self.kl), lib.pack_inputs(**given, **saved)
        gradients = lib.pack_gradients(dq_s=described(self.dq), dk_s=described(self.dk))
        self.structs = {
            FORWARD: (lib.pack_inputs(**given), lib.pack_rows(kl=kl, **saved)),
            BACKWARD: (inputs, gradients),
            ONE_PASS: (inputs, lib.pack_rows(kl=kl), gradients),
        }

    def run(self, operation):
        self.workspace.run(OPERATIONS[operation], *self.structs[operation])
