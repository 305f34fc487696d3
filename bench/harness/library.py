"""The library on torch tensors, through the structs of the package: calls without the overhead of a torch operator."""

from functools import cached_property

import torch

from streamkl import _library as lib
from streamkl._call import plan_for, specs_of, stream_of
from streamkl._problem import Options

FORWARD, BACKWARD, ONE_PASS, STEP = "forward", "backward", "one pass", "forward + backward"  # passes
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def address(tensor):
    """skl_input of [batch, heads, length, dim] or of a row vector [batch, heads, length]; packed: a batch of 1."""
    return (tensor.data_ptr(), *tensor.stride()[:3])


def addresses(tensors):
    return {name: address(tensor) for name, tensor in tensors.items()}


class Calls:
    """A plan, its workspace, and `calls`: {pass: [(operation, inputs, outputs...)]}, filled by a subclass.

    The plan is that of inputs [batch, heads, length, dim], or packed [heads, total, dim], by name.
    """

    def __init__(self, inputs, **options):
        self.device = inputs["q_s"].device
        self.plan = plan_for(specs_of(**inputs), Options(heads_first=True, **options))
        self.calls = {}

    @cached_property
    def workspace(self):
        return torch.empty(max(map(self.workspace_bytes, self.calls)), dtype=torch.uint8, device=self.device)

    def prepared(self, name):
        """[(function of the library, its arguments)] of a pass on the current stream."""
        last = self.workspace.data_ptr(), self.workspace.numel(), stream_of(self.device)
        return [(lib.run_function(op), (self.plan.handle, *structs, *last)) for op, *structs in self.calls[name]]

    def run(self, name):
        for function, arguments in self.prepared(name):
            lib.check(function(*arguments))

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
