"""The library, as its header declares it."""

import ctypes

import torch

from .cases import BACKWARD, FORWARD, OPERATIONS

SIZE, I64, I32, FLOAT, POINTER = ctypes.c_size_t, ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p
ENUM = ctypes.c_int
SKL_BF16, SKL_CPU, SKL_CUDA = 2, 0, 1
SKL_DQ_S, SKL_DK_S = 4, 8


def struct(name, *fields):
    return type(name, (ctypes.Structure,), {"_fields_": [(key, kind) for kind, keys in fields for key in keys.split()]})


Problem = struct(
    "Problem",
    (SIZE, "struct_size"),
    (ENUM, "dtype_t dtype_s"),
    (I32, "grad_f32"),
    (ctypes.c_uint32, "gradients"),
    (ENUM, "direction"),
    (I64, "batch len_q len_k heads_t heads_s key_heads_t key_heads_s dim_t dim_s"),
    (FLOAT, "scale_t scale_s softcap_t softcap_s"),
    (I32, "causal"),
    (I64, "window_left window_right"),
    (ENUM, "positions"),
    (I64, "offset_q offset_k"),
    (I32, "packed"),
    (I64, "total_q total_k"),
    (ENUM, "student"),
    (I64, "index_heads"),
    (ENUM, "dtype_w"),
    (I32, "index_linear"),
    (I64, "top_k"),
)
Tensor = struct("Tensor", (POINTER, "data"), (I64, "stride_batch stride_head stride_row"))  # skl_input and skl_output
Inputs = struct(
    "Inputs",
    (SIZE, "struct_size"),
    (Tensor, "q_t k_t q_s k_s lse_t lse_s kl dot_t grad_kl"),
    (POINTER, "cu_seqlens_q cu_seqlens_k key_lengths"),
    (Tensor, "w_s indices"),
)
Rows = struct("Rows", (SIZE, "struct_size"), (Tensor, "kl lse_t lse_s dot_t cross_entropy entropy mass"))
Gradients = struct("Gradients", (SIZE, "struct_size"), (Tensor, "dq_t dk_t dq_s dk_s dw_s"))
Options = struct(
    "Options",
    (SIZE, "struct_size"),
    (ENUM, "device"),
    (I32, "device_index threads deterministic"),
    (ctypes.c_char_p, "kernel"),
    (POINTER, "progress progress_user"),
)


def sized(kind, **values):
    return kind(struct_size=ctypes.sizeof(kind), **values)


def described(tensor):
    """[batch, heads, length, dim], or [batch, heads, length] of a row vector; packed ones with a batch of 1."""
    return Tensor(tensor.data_ptr(), *tensor.stride()[:3])


class Library:
    def __init__(self, path):
        self.calls = calls = ctypes.CDLL(str(path))
        calls.skl_last_error.restype = calls.skl_plan_kernel.restype = calls.skl_version.restype = ctypes.c_char_p
        calls.skl_plan_workspace_size.restype = SIZE
        calls.skl_plan_workspace_size.argtypes = [POINTER, ENUM]
        calls.skl_plan_kernel.argtypes = [POINTER]
        calls.skl_plan_destroy.argtypes = [POINTER]
        calls.skl_plan_destroy.restype = None
        calls.skl_forward.argtypes = [POINTER, POINTER, POINTER, POINTER, SIZE, POINTER]
        calls.skl_backward.argtypes = [POINTER, POINTER, POINTER, POINTER, SIZE, POINTER]
        calls.skl_forward_backward.argtypes = [POINTER, POINTER, POINTER, POINTER, POINTER, SIZE, POINTER]

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.calls.skl_last_error().decode())


def problem_of(case):
    is_packed = bool(case.packed)
    return sized(
        Problem, dtype_t=SKL_BF16, dtype_s=SKL_BF16, gradients=SKL_DQ_S | SKL_DK_S, causal=int(case.causal),
        batch=len(case.sequences), len_q=case.length, len_k=case.length, heads_t=case.heads, heads_s=case.heads,
        key_heads_t=case.keys, key_heads_s=case.keys, dim_t=case.dim, dim_s=case.dim, window_left=-1, window_right=-1,
        packed=int(is_packed), total_q=case.rows if is_packed else 0, total_k=case.rows if is_packed else 0,
    )  # fmt: skip


class Plan:
    """The three calls on one set of tensors, and where their results are."""

    def __init__(self, library, tensors, case, kernel=None, deterministic=False):
        self.library, self.handle = library, POINTER()
        q_t, k_t, q_s, k_s = tensors
        device = SKL_CUDA if q_s.is_cuda else SKL_CPU
        forced = kernel.encode() if kernel else None
        options = sized(Options, device=device, deterministic=int(deterministic), kernel=forced)
        problem, address = problem_of(case), ctypes.byref
        library.check(library.calls.skl_plan_create(address(self.handle), address(problem), address(options)))
        self.kernel = library.calls.skl_plan_kernel(self.handle).decode()
        self.workspace_size = max(library.calls.skl_plan_workspace_size(self.handle, op) for op in OPERATIONS.values())
        self.workspace = torch.empty(max(self.workspace_size, 1), dtype=torch.uint8, device=q_s.device)
        self.kl, self.lse_t, self.lse_s = (q_s.new_empty(q_s.shape[:3], dtype=torch.float32) for _ in range(3))
        self.dq, self.dk = torch.empty_like(q_s), torch.empty_like(k_s)
        given = {"q_t": described(q_t), "k_t": described(k_t), "q_s": described(q_s), "k_s": described(k_s)}
        saved = {"lse_t": described(self.lse_t), "lse_s": described(self.lse_s)}
        self.offsets = None
        if case.packed:
            ends = [end for _, _, end in case.sequences]
            self.offsets = torch.tensor([0, *ends], dtype=torch.int32, device=q_s.device)
            given |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), self.offsets.data_ptr())
        self.inputs, self.saved = sized(Inputs, **given), sized(Inputs, **given, **saved)
        self.rows, self.only_kl = sized(Rows, kl=described(self.kl), **saved), sized(Rows, kl=described(self.kl))
        self.gradients = sized(Gradients, dq_s=described(self.dq), dk_s=described(self.dk))
        self.keep = tensors  # the structs above know only their addresses

    def __del__(self):
        self.library.calls.skl_plan_destroy(self.handle)

    def run(self, operation):
        calls, address = self.library.calls, ctypes.byref
        stream = torch.cuda.current_stream().cuda_stream if self.kl.is_cuda else None
        rest = (self.workspace.data_ptr(), self.workspace_size, stream)
        if operation == FORWARD:
            status = calls.skl_forward(self.handle, address(self.inputs), address(self.rows), *rest)
        elif operation == BACKWARD:
            status = calls.skl_backward(self.handle, address(self.saved), address(self.gradients), *rest)
        else:
            status = calls.skl_forward_backward(
                self.handle, address(self.saved), address(self.only_kl), address(self.gradients), *rest
            )
        self.library.check(status)
