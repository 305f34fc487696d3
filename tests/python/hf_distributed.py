"""Distillation on several processes: run by test_hf_distributed.py with torchrun. Prints one line per case that works."""

import sys

import torch
import torch.distributed as dist
from hf_models import batch, llama
from torch.nn.parallel import DistributedDataParallel

from streamkl.hf import AttentionDistiller


def models():
    torch.manual_seed(0)
    return llama(), llama()


def shard(inputs):
    """The rows of this process."""
    return {name: tensor.chunk(dist.get_world_size())[dist.get_rank()] for name, tensor in inputs.items()}


def expected_gradients(steps=1):
    """Of one process with the whole batch."""
    teacher, student = models()
    with AttentionDistiller(teacher, student) as distiller:
        for _ in range(steps):
            student.zero_grad()
            student(**batch(size=4))
            distiller.loss().backward()
    return {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


def compare(student):
    for name, expected in expected_gradients().items():
        gradient = student.get_parameter(name).grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6, msg=lambda text: f"{name}: {text}")


def ddp():
    """The KL is the only loss: the language head and the last values receive no gradient."""
    teacher, student = models()
    wrapped = DistributedDataParallel(student)
    with AttentionDistiller(teacher, wrapped) as distiller:
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(**shard(batch(size=4)))
            distiller.loss().backward()
    compare(student)


def ddp_with_loss():
    teacher, student = models()
    wrapped = DistributedDataParallel(student)
    inputs = shard(batch(size=4))
    with AttentionDistiller(teacher, wrapped) as distiller:
        for _ in range(2):
            loss = wrapped(**inputs, labels=inputs["input_ids"]).loss
            (loss + distiller.loss()).backward()


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    teacher, student = models()
    for layer in student.model.layers:
        fully_shard(layer)
    fully_shard(student)
    with AttentionDistiller(teacher, student) as distiller:
        for _ in range(2):
            student.zero_grad()
            student(**shard(batch(size=4)))
            distiller.loss().backward()
    compare(student)


def accelerate_loop():
    """Two processes and two micro-batches per step give the gradient of one process with the whole batch."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    teacher, student = models()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.0)
    student, optimizer = accelerator.prepare(student, optimizer)
    inputs = shard(batch(size=4))
    with AttentionDistiller(teacher, student) as distiller:
        for row in range(2):
            with accelerator.accumulate(student):
                student(**{name: tensor[row : row + 1] for name, tensor in inputs.items()})
                accelerator.backward(distiller.loss())
    compare(accelerator.unwrap_model(student))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in ddp, ddp_with_loss, fsdp2, accelerate_loop:
        if case.__name__ in sys.argv[1:]:
            case()
            dist.barrier()
            if dist.get_rank() == 0:
                print(f"{case.__name__} works", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
