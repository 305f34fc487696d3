"""The library on torch tensors, through the structs of the package: calls without the overhead of a torch operator."""

from functools import cached_property

import torch

from streamkl import _library as lib
from streamkl._problem import CPU, CUDA, Problem

FORWARD, BACKWARD, ONE_PASS, STEP = "forward", "backward", "one pass", "forward + backward"  # passes
RUN = (  # by skl_op
    "skl_forward", "skl_backward", "skl_forward_backward", "skl_partial", "skl_attention_backward", "skl_attention_forward",
    "skl_attention_stats",
)  # fmt: skip
# {name: (skl_dtype, type of torch)}
DTYPES = {"f32": (0, torch.float32), "f16": (1, torch.float16), "bf16": (2, torch.bfloat16)}


def address(tensor):
    """skl_input of [batch, heads, length, dim] or of a row vector [batch, heads, length]; packed: a batch of 1."""
    return (tensor.data_ptr(), *tensor.stride()[:3])


def addresses(tensors):
    return {name: address(tensor) for name, tensor in tensors.items()}


def make_plan(device, **fields):
    """Fields of Problem, which has defaults for the others."""
    kind = CUDA if device.type == "cuda" else CPU
    return lib.Plan(Problem(device=kind, device_index=device.index or 0, **fields))


class Calls:
    """A plan, its workspace, and `calls`: {pass: [(operation, inputs, outputs...)]}, filled by a subclass.

    All calls go to the library that was loaded when the plan was made, so two libraries can be compared in a process.
    """

    def __init__(self, device, **fields):
        self.library, self.device = lib.library(), device
        self.plan = make_plan(device, **fields)
        self.calls = {}

    @cached_property
    def workspace(self):
        return torch.empty(max(map(self.workspace_bytes, self.calls)), dtype=torch.uint8, device=self.device)

    def run(self, name):
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None
        for operation, *structs in self.calls[name]:
            call = getattr(self.library, RUN[operation])
            lib.check(call(self.plan.handle, *structs, self.workspace.data_ptr(), self.workspace.numel(), stream))

    def timed(self, names):
        """{pass: call}"""
        return {name: lambda name=name: self.run(name) for name in names}

    def workspace_bytes(self, name):
        return max(self.plan.workspace_sizes[operation] for operation, *_ in self.calls[name])

    def explain(self, name):
        """The launches as skl_plan_explain names them: "STEP: KERNEL, ..." per line."""
        return "\n".join(self.plan.explain(operation, inputs) for operation, inputs, *_ in self.calls[name])

    def kernels(self, name):
        lines = self.explain(name).splitlines()
        return " + ".join(dict.fromkeys(line.split(": ", 1)[1].split(",")[0].split(" ")[0] for line in lines))
