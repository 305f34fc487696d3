"""streamkl._problem.Problem: the C struct, the operator schemas and the plan cache derive from it."""

import ctypes
import dataclasses
import inspect
import re
import typing
from pathlib import Path

import pytest
import torch
from cases import make_tensors

import streamkl
from streamkl import _library as lib
from streamkl import _call, _ops
from streamkl._options import (
    DECLARED,
    RULES,
    AttentionOptions,
    CarriedOptions,
    IndexerOptions,
    MapOptions,
    Pool,
    StatsOptions,
    texts_of,
    translate,
)
from streamkl._problem import DK_S, DK_T, DQ_S, DQ_T, DW_S, Options, Problem, SklOptions, SklProblem

HEADER = (Path(__file__).parents[2] / "include/streamkl.h").read_text()
C_TYPES = {
    "size_t": ctypes.c_size_t, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64,
    "float": ctypes.c_float, "void *": ctypes.c_void_p, "const char *": ctypes.c_char_p,
    "skl_progress": ctypes.c_void_p, "const int32_t *": ctypes.c_void_p,
}  # fmt: skip


def fields_in_the_header(struct):
    """[(name, C type)]: enums are ints."""
    body = re.search(rf"typedef struct {struct} \{{(.*?)\}} {struct};", HEADER, re.DOTALL)[1]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    found = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        c_type, names = re.match(r"(.*?[\s*])([\w, ]+)$", declaration, re.DOTALL).groups()
        found += [(name.strip(), C_TYPES.get(c_type.strip(), ctypes.c_int)) for name in names.split(",")]
    return found


@pytest.mark.parametrize("struct, mirror", [("skl_problem", SklProblem), ("skl_options", SklOptions)])
def test_c_structs_equal_the_header(struct, mirror):
    assert mirror._fields_ == fields_in_the_header(struct)


@pytest.mark.parametrize("operator", _ops.KERNELS)
def test_operators_take_all_options_in_the_order_of_the_dataclass(operator):
    names = [argument.name for argument in operator._schema.arguments]
    assert names[-len(Options._fields) :] == list(Options._fields)
    assert set(Options._fields) <= {field.name for field in dataclasses.fields(Problem)}


def test_a_problem_is_frozen_and_hashable():
    problem = Problem(causal=True)
    assert problem == Problem(causal=True) and hash(problem) != hash(Problem())
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.causal = False


def test_every_option_is_part_of_the_key_of_the_plan_cache():
    tensors = [tensor.detach() for tensor in make_tensors()]
    _call.prepared.cache_clear()
    streamkl.attention_kl(*tensors)
    changed = (
        dict(causal=True), dict(window_size=(3, -1)), dict(window_size=(-1, 3)), dict(softmax_scale_t=0.25),
        dict(softmax_scale_s=0.25), dict(softcap_t=2.0), dict(softcap_s=2.0), dict(direction="reverse"),
        dict(deterministic=True),
    )  # fmt: skip
    for _ in range(2):
        for options in changed:
            streamkl.attention_kl(*tensors, **options)
        assert _call.prepared.cache_info().misses == 1 + len(changed)


def test_rows_needed_by_a_backward():
    """The examples of include/streamkl.h."""
    lses, teacher, student = lib.LSE_T | lib.LSE_S, DQ_T | DK_T, DQ_S | DK_S
    for op in lib.BACKWARD, lib.FORWARD_BACKWARD:
        assert lib.rows_needed(op, student, 0, 0, False) == lses
        assert lib.rows_needed(op, DQ_T, 0, 0, False) == lses | lib.KL
        assert lib.rows_needed(op, teacher, 0, 0, True) == lses | lib.DOT_T
        assert lib.rows_needed(op, DK_S, 1, 0, False) == lses | lib.KL
        assert lib.rows_needed(op, teacher | student, 1, 0, True) == lses | lib.KL | lib.DOT_T
        assert lib.rows_needed(op, student | DW_S, 0, 1, True) == lses
        assert lib.rows_needed(op, DW_S, 1, 1, True) == lses | lib.KL


def test_problem_of_a_call():
    tensors = make_tensors(layout="bhnd", dtype=torch.bfloat16)
    streamkl.attention_kl(*tensors, layout="bhnd")
    specs = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
    options = Options(heads_first=True, gradients=15)
    problem = _call.plan_for(tuple(specs), options).problem
    assert (problem.batch, problem.len_q, problem.len_k) == (2, 19, 23)
    assert (problem.heads_t, problem.heads_s, problem.key_heads_t, problem.key_heads_s) == (4, 2, 2, 1)
    assert (problem.dim_t, problem.dim_s, problem.dtype_t, problem.packed) == (8, 5, 2, False)
    assert problem.row_shape(problem.heads_s) == (2, 2, 19)


# ---- Options -------------------------------------------------------------------------------------------------------

FUNCTIONS = {
    AttentionOptions: streamkl.attention_kl,
    IndexerOptions: streamkl.indexer_kl,
    MapOptions: streamkl.attention_map,
    CarriedOptions: streamkl.attention,
    StatsOptions: streamkl.attention_stats,
}


def test_every_declaration_has_a_function():
    assert set(FUNCTIONS) == set(DECLARED)


@pytest.mark.parametrize("options", FUNCTIONS)
def test_a_declared_option_is_in_signature_documentation_and_rules(options):
    function, declared = FUNCTIONS[options], DECLARED[options]
    parameters = inspect.signature(function).parameters
    paragraphs = re.findall(r"^ +(\w+): ", function.__doc__, re.MULTILINE)
    for name, (_, default) in declared.items():
        assert parameters[name].default == default, name
        assert paragraphs.count(name) == 1, name
    assert set(texts_of(options)) == set(declared)
    tensors_and_groups = {
        name for name, (hint, _) in declared.items() if "Tensor" in str(hint) or "Parallel" in str(hint)
    }
    assert set(RULES[options]) == set(declared) - tensors_and_groups


@pytest.mark.parametrize("options", FUNCTIONS)
def test_defaults_written_in_a_function_are_those_of_its_declaration(options):
    source = inspect.getsource(inspect.unwrap(FUNCTIONS[options]))
    for name, (_, default) in DECLARED[options].items():
        written = re.search(rf"^    {name}: .* = (.*),$", source, re.MULTILINE)
        assert written is None or written[1] == repr(default).replace("'", '"'), name


def test_every_field_of_the_problem_that_a_caller_chooses_has_an_option():
    """An option changes a field of its operators, or is one of the loss; a field that no option changes is a forgotten one."""
    samples = {
        bool: [True, False],
        float: [2.0],
        float | None: [0.25],
        int | None: [7],
        tuple[int, int]: [(3, 4)],
        Pool: [("sum", 4)],
    }
    changed, of_loss = set(), set()
    for options in AttentionOptions, IndexerOptions:
        for name, (hint, _) in DECLARED[options].items():
            if name not in RULES[options]:
                continue
            found = set()
            for value in samples.get(hint) or typing.get_args(hint):
                _, made = translate(options, 0, {name: value})
                found |= {field for field in Options._fields if getattr(made, field) != getattr(Options(), field)}
            changed |= found
            of_loss |= set() if found else {name}
    assert changed == set(Options._fields) - {"gradients", "grad_f32"}
    assert of_loss == {"reduction", "check_lse", "lse_t_wider"}


@pytest.mark.parametrize("function", [streamkl.attention_kl, streamkl.attention_map, streamkl.reference.attention_kl])
def test_an_unknown_option_is_a_type_error(function):
    with pytest.raises(TypeError, match="unexpected keyword argument 'relu'"):
        function(*(tensor.detach() for tensor in make_tensors()), relu=True)
