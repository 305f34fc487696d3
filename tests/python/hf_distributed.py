"""Distillation on several processes: run by test_hf_distributed.py with torchrun. Prints one line per case that works."""

import re
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from cases import end_of_rank
from hf_models import batch, gemma2, gpt_oss, llama, loss_of
from torch.nn.parallel import DistributedDataParallel
from transformers import MistralConfig, MistralForCausalLM

import streamkl
from streamkl.hf import AttentionDistiller


def models(make=llama):
    torch.manual_seed(0)
    return make(), make()


def shard(inputs):
    """The rows of this process."""
    return {name: tensor.chunk(dist.get_world_size())[dist.get_rank()] for name, tensor in inputs.items()}


def compare(student, make=llama):
    """With the gradients of one process and the whole batch."""
    teacher, whole = models(make)
    loss_of(teacher, whole, batch(size=4)).backward()
    for name, parameter in whole.named_parameters():
        gradient = student.get_parameter(name).grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        if parameter.grad is not None:
            assert_close(name, gradient, parameter.grad)


def assert_close(name, gradient, expected):
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6, msg=lambda text: f"{name}: {text}")


def train(teacher, student, inputs, with_loss=False):
    """Two steps; the student keeps the gradients of the second one."""
    with AttentionDistiller(teacher, student) as distiller:
        for _ in range(2):
            student.zero_grad()
            loss = student(**inputs, labels=inputs["input_ids"] if with_loss else None).loss
            (distiller.loss() + (loss if with_loss else 0)).backward()


def ddp():
    """The KL is the only loss: the language head and the last values receive no gradient."""
    teacher, student = models()
    train(teacher, DistributedDataParallel(student), shard(batch(size=4)))
    compare(student)


def ddp_with_loss():
    teacher, student = models()
    train(teacher, DistributedDataParallel(student), shard(batch(size=4)), with_loss=True)


def fsdp2(make=llama, sharded_teacher=False):
    """Every layer, and the rest of each model."""
    from torch.distributed.fsdp import fully_shard

    teacher, student = models(make)
    if sharded_teacher:  # the student recomputes its layers in the backward
        student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        student.train()
    for model in (teacher, student) if sharded_teacher else (student,):
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    train(teacher, student, shard(batch(size=4)))
    compare(student, make)


def fsdp2_both():
    fsdp2(sharded_teacher=True)


def fsdp2_sinks():
    """The sinks are parameters, which FSDP frees after the forward of their layer."""
    fsdp2(gpt_oss, sharded_teacher=True)


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


def cp_attention(
    module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, **kwargs
):
    """Attention over the zigzag shards of all ranks: what torch's context parallelism computes, on a CPU."""
    from torch.distributed.nn.functional import all_gather

    world, length = dist.get_world_size(), query.shape[2]
    order = torch.argsort(torch.cat([shard_positions(length, rank) for rank in range(world)]))
    keys, values = (torch.cat(all_gather(each.contiguous()), 2)[:, :, order] for each in (key, value))
    position = shard_positions(length, dist.get_rank())[:, None]
    seen = torch.arange(world * length) <= position
    if sliding_window is not None:
        seen = seen & (torch.arange(world * length) > position - sliding_window)
    keys, values = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (keys, values))
    logits = scaling * query @ keys.mT
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return (logits.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(1, 2), None


def shard_positions(length, rank):
    half, world = length // 2, dist.get_world_size()
    chunk = torch.arange(half)
    return torch.cat([rank * half + chunk, (2 * world - 1 - rank) * half + chunk])


def context_parallel_models(make=models, implementation="cp_attention"):
    from transformers import AttentionInterface

    AttentionInterface.register(implementation, cp_attention)
    pair = make()
    for model in pair:
        model.config._attn_implementation_internal = implementation  # transformers has no flash attention for a CPU
    return pair


def context_inputs():
    """The whole batch, without padding."""
    tokens = batch(size=4, length=8 * dist.get_world_size())["input_ids"]
    return tokens, torch.arange(tokens.shape[1])[None].expand_as(tokens).contiguous()


def check_context_parallel(student, loss, tokens, positions, make=models):
    """Loss and averaged gradients are those of one process with whole sequences."""
    teacher_whole, student_whole = make()
    expected = loss_of(teacher_whole, student_whole, dict(input_ids=tokens, position_ids=positions))
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=1e-7)
    for name, parameter in student_whole.named_parameters():
        gradient = student.get_parameter(name).grad
        if parameter.grad is not None and gradient is not None:
            dist.all_reduce(gradient)
            assert_close(name, gradient / dist.get_world_size(), parameter.grad)


def context_parallel_group():
    """A group that the caller passes."""
    from streamkl.parallel import shard

    tokens, positions = context_inputs()
    teacher, student = context_parallel_models()
    with AttentionDistiller(teacher, student, parallel=streamkl.Parallel(dist.group.WORLD)) as distiller:
        own = [shard(each, dist.group.WORLD) for each in (tokens, positions)]
        student(input_ids=own[0], position_ids=own[1])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            loss = distiller.loss()
        assert any("context parallelism) are not proven" in str(each.message) for each in warned)
        loss.backward()
    check_context_parallel(student, loss, tokens, positions)


def context_parallel_windows():
    """Windows count in the whole sequence: a shard of 8 tokens does not show one of 12, and no mask shows any."""
    from streamkl.parallel import shard

    tokens, positions = context_inputs()
    own = dict(input_ids=shard(tokens, dist.group.WORLD), position_ids=shard(positions, dist.group.WORLD))
    parallel = streamkl.Parallel(dist.group.WORLD)
    longer = 8 * dist.get_world_size() - 4
    for windows in (5, 5), (longer, longer), (longer, 5), (5, longer), (100, longer):

        def make(windows=windows):
            """Every other layer has a window, so the default layer map depends on them."""
            torch.manual_seed(0)
            return gemma2(layers=4, window=windows[0]), gemma2(layers=2, window=windows[1])

        for implementation in "cp_attention", "flash_attention_2":
            teacher, student = context_parallel_models(make, implementation)
            with AttentionDistiller(teacher, student, parallel=parallel, verify="never") as distiller:
                student(**own)
                loss = distiller.loss()
                loss.backward()
            check_context_parallel(student, loss, tokens, positions, make)

    config = MistralConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        sliding_window=longer,
    )  # fmt: skip
    teacher, student = MistralForCausalLM(config), MistralForCausalLM(config)
    with AttentionDistiller(teacher, student, parallel=parallel, verify="never") as distiller:
        student(input_ids=own["input_ids"])
        message = f"layer 0 .* has a sliding window of {longer} tokens, which attn_implementation='sdpa' did not apply"
        refused(distiller.loss, message)


def context_parallel_padding():
    """Attention over shards receives no mask. A rank without padding, or with one of the sequences alone, refuses them, too."""
    from streamkl.parallel import shard

    tokens, positions = context_inputs()
    length = tokens.shape[1]
    mask = (torch.arange(length) < length - 2).long().expand_as(tokens).clone()
    packed = (torch.arange(length) % (length // dist.get_world_size())).expand_as(tokens).clone()
    teacher, student = context_parallel_models()

    def loss_of_shards(layout="contiguous", weight=None, **inputs):
        parallel = streamkl.Parallel(dist.group.WORLD, layout=layout)
        with AttentionDistiller(teacher, student, verify="never", parallel=parallel) as distiller, torch.no_grad():
            own = {name: shard(each, dist.group.WORLD, layout=layout) for name, each in inputs.items()}
            student(input_ids=shard(tokens, dist.group.WORLD, layout=layout), use_cache=False, **own)
            weight = None if weight is None else shard(weight, dist.group.WORLD, layout=layout)
            return distiller.loss(row_weight=weight)

    message = "attention_mask hides tokens, and padding is not supported under context parallelism"
    refused(lambda: loss_of_shards(position_ids=positions, attention_mask=mask), message)
    message = "position_ids decrease along the sequence.*layout='contiguous'"
    refused(lambda: loss_of_shards(position_ids=packed), message)
    refused(lambda: loss_of_shards(position_ids=positions.flip(1)), message)

    whole = dict(input_ids=tokens, attention_mask=mask, position_ids=positions)
    expected = loss_of(*models(), whole).detach()
    found = loss_of_shards("zigzag", mask.float(), position_ids=positions, attention_mask=torch.ones_like(mask))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)  # the way out that the message names


def context_parallel_region():
    """torch's region, which accelerate opens, too: the distiller finds its mesh and its layout."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    tokens, positions = context_inputs()
    teacher, student = context_parallel_models()
    buffers = [tokens.clone(), positions.clone()]
    with AttentionDistiller(teacher, student) as distiller:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1]):
            student(input_ids=buffers[0], position_ids=buffers[1])
            loss = distiller.loss()
            loss.backward()
            student(input_ids=buffers[0], position_ids=buffers[1])
        with pytest.raises(RuntimeError, match="inside one context-parallel region"):
            distiller.loss()  # the teacher would run outside
    check_context_parallel(student, loss, tokens, positions)


def accelerate_context_parallel():
    """The region of accelerate's ParallelismConfig. It refuses CPUs, so this sets the mesh that its constructor would."""
    from accelerate import Accelerator, ParallelismConfig

    accelerator = Accelerator(cpu=True)
    accelerator.state.parallelism_config = ParallelismConfig(cp_size=dist.get_world_size())
    accelerator.state.device_mesh = accelerator.parallelism_config.build_device_mesh("cpu")
    tokens, positions = context_inputs()
    teacher, student = context_parallel_models()
    accelerator._prepare_cp(teacher, student)
    buffers = [tokens.clone(), positions.clone()]
    with AttentionDistiller(teacher, student) as distiller:
        with accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1]):
            student(input_ids=buffers[0], position_ids=buffers[1])
            loss = distiller.loss()
            accelerator.backward(loss)
    check_context_parallel(student, loss, tokens, positions)


def tensor_parallel():
    """A rank would compare its own heads alone: models that transformers has split over heads are refused."""
    world, folder = dist.get_world_size(), [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    llama().save_pretrained(folder[0])  # rank 0 writes
    dist.barrier()
    split = type(llama()).from_pretrained(folder[0], tp_plan="auto")
    own = split.model.layers[0].self_attn.q_proj.weight
    assert getattr(own, "to_local", lambda: own)().shape[0] == 32 // world  # the heads are split
    for pair, role in ((split, llama()), "teacher"), ((llama(), split), "student"):
        refused(lambda: AttentionDistiller(*pair), f"{role}: LlamaForCausalLM is tensor parallel .tp_size={world}.")


def refused(call, message):
    """Every rank raises the error: none of them waits for the others."""
    try:
        call()
    except ValueError as error:
        assert re.search(message, str(error)), error
    else:
        raise AssertionError(f"not refused: {message}")


CASES = (
    ddp, ddp_with_loss, fsdp2, fsdp2_both, fsdp2_sinks, accelerate_loop, context_parallel_group, context_parallel_region,
    accelerate_context_parallel, tensor_parallel, context_parallel_padding, context_parallel_windows,
)  # fmt: skip


def lacks(case):
    """What cannot run here: FSDP2 of torch 2.6 does not run on CPUs, and accelerate 1.4 has no context parallelism."""
    import accelerate

    has_fsdp2, has_context = hasattr(torch.cpu.Stream, "record_event"), hasattr(accelerate, "ParallelismConfig")
    if case is tensor_parallel:
        return torch.cuda.is_available()  # transformers would split the model over the GPUs
    return ("fsdp2" in case.__name__ and not has_fsdp2) or (case is accelerate_context_parallel and not has_context)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in CASES:
        is_possible = not lacks(case)
        if is_possible:
            case()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{case.__name__} {'works' if is_possible else 'cannot run here'}", flush=True)
    end_of_rank()


if __name__ == "__main__":
    main()
