"""Every error message contains the argument, its value and what is accepted."""

import subprocess
import sys
import threading
import time

import pytest
import torch
from cases import make_tensors
from indexer_cases import make_indexer

import streamkl
from streamkl import _library


def replaced(index, tensor):
    tensors = [t.detach() for t in make_tensors()]
    tensors[index] = tensor(tensors[index])
    return tensors


BAD_TENSORS = {
    "rank": (0, lambda t: t[0], r"q_t: shape \[19, 4, 8\] must be \[batch, length, heads, dim\]"),
    "dtype": (
        3,
        lambda t: t.double(),
        r"k_s: dtype torch.float64 must be torch.float32, torch.float16 or torch.bfloat16",
    ),
    "types of a side": (1, lambda t: t.half(), r"q_t is torch.float32 and k_t is torch.float16: must be of one type"),
    "head size": (1, lambda t: t[..., :7], r"q_t \[2, 19, 4, 8\] and k_t \[2, 23, 2, 7\]: head sizes 8 and 7"),
    "batch": (2, lambda t: t[:1], r"q_t \[2, 19, 4, 8\] and q_s \[1, 19, 2, 5\]: batches 2 and 1"),
    "queries": (2, lambda t: t[:, :18], r"q_t \[2, 19, 4, 8\] and q_s \[2, 18, 2, 5\]: query lengths 19 and 18"),
    "keys": (3, lambda t: t[:, :22], r"k_t \[2, 23, 2, 8\] and k_s \[2, 22, 1, 5\]: key lengths 23 and 22"),
    "teacher heads": (0, lambda t: t[:, :, :3], r"3 teacher heads must be a multiple of 2 student heads"),
    "no heads": (2, lambda t: t[:, :, :0], r"q_s: must have at least one head"),
    "key heads": (1, lambda t: t[:, :, [0, 1, 1]], r"q_t has 4 heads: must be a multiple of the 3 heads of k_t"),
    "device": (3, lambda t: t.to("meta"), r"q_t is on cpu and k_s on meta: must be one device"),
}


@pytest.mark.parametrize("fault", BAD_TENSORS)
def test_tensors(fault):
    index, change, message = BAD_TENSORS[fault]
    with pytest.raises(ValueError, match=message):
        streamkl.attention_kl(*replaced(index, change))


CU = torch.tensor([0, 5, 19], dtype=torch.int32)
BAD_OPTIONS = {
    "direction": (dict(direction="both"), r"direction='both': must be 'forward' or 'reverse'"),
    "reduction": (dict(reduction="batchmean"), r"reduction='batchmean': must be 'mean', 'sum' or 'none'"),
    "layout": (dict(layout="thd"), r"layout='thd': must be 'bnhd' or 'bhnd'"),
    "window": (dict(window_size=4), r"window_size=4: must be a pair"),
    "window type": (dict(window_size=(2.0, 0)), r"window_size=\(2.0, 0\): must be a pair \(left, right\) of whole numbers"),
    "window flag": (dict(window_size=(0, True)), r"window_size=\(0, True\): must be a pair \(left, right\) of whole numbers"),
    "window tensor": (dict(window_size=(torch.tensor(2), 0)), r"window_size=\(tensor\(2\), 0\): must be a pair \(left, right"),
    "window wrap": (dict(window_size=(2**64 + 4, 0)), r"window_size=\(18446744073709551620, 0\): must be a pair .* up to 2\^40"),
    "length wrap": (dict(max_seqlen_k=2**64 + 4), r"max_seqlen_k=18446744073709551620: must be .* at most 2\^40"),
    "huge scale": (dict(softmax_scale_t=2**128), r"softmax_scale_t=340282366920938463463374607431768211456: must be finite"),
    "causal": (dict(causal=1), r"causal=1: must be True or False"),
    "deterministic": (dict(deterministic="no"), r"deterministic='no': must be True or False"),
    "return_lse": (dict(return_lse=0), r"return_lse=0: must be True or False"),
    "window value": (dict(window_size=(-2, 0)), r"window_left=-2: must be -1"),
    "scale": (dict(softmax_scale_s=0.0), r"softmax_scale_s=0.0: must not be 0"),
    "teacher's scale": (dict(softmax_scale_t=0), r"softmax_scale_t=0: must not be 0"),
    "tiny scale": (dict(softmax_scale_t=1e-46), r"softmax_scale_t=1e-46: must not be 0 in float32"),
    "scale type": (dict(softmax_scale_s=True), r"softmax_scale_s=True: must be a number"),
    "scale tensor": (dict(softmax_scale_t=torch.tensor(0.5)), r"softmax_scale_t=tensor\(0.5000\): must be a number"),
    "tiny softcap": (dict(softcap_s=-(2.0**-150)), r"softcap_s=-7.006492321624085e-46: must not be 0 in float32; 0: no cap"),
    "softcap type": (dict(softcap_t="30"), r"softcap_t='30': must be a number"),
    "infinite scale": (dict(softmax_scale_t=float("inf")), r"scale_t=inf: must be finite"),
    "softcap": (dict(softcap_t=-1.0), r"softcap_t=-1: must be finite and at least 0"),
    "cu_seqlens alone": (dict(cu_seqlens_q=CU), r"cu_seqlens_k is missing"),
    "lengths twice": (
        dict(cu_seqlens_q=CU, cu_seqlens_k=CU, key_lengths=CU),
        r"key_lengths: must be None with cu_seqlens",
    ),
    "packed rank": (
        dict(cu_seqlens_q=CU, cu_seqlens_k=CU),
        r"q_t: shape \[2, 19, 4, 8\] must be \[total, heads, dim\]",
    ),
    "key_lengths shape": (dict(key_lengths=CU), r"key_lengths: shape \[3\] must be \[2\]"),
    "key_lengths value": (dict(key_lengths=torch.tensor([0, 24])), r"key_lengths\[1\]=24: must be 0..len_k=23"),
    "key_lengths wrap": (dict(key_lengths=torch.tensor([2**32 + 3, 4])), r"key_lengths\[0\]=4294967299: must be -2147483648..2147483647"),
    "key_lengths below": (dict(key_lengths=torch.tensor([4, 3 - 2**32])), r"key_lengths\[1\]=-4294967293: must be -2147483648..2147483647"),
    "key_lengths float": (
        dict(key_lengths=torch.tensor([3.7, 4.0])),
        r"key_lengths: dtype torch.float32 must be torch.int32 or torch.int64",
    ),
    "key_lengths bool": (
        dict(key_lengths=torch.tensor([True, True])),
        r"key_lengths: dtype torch.bool must be torch.int32 or torch.int64",
    ),
    "key_lengths list": (dict(key_lengths=[3, 4]), r"key_lengths: list must be a tensor of torch.int32 or torch.int64"),
    "weight type": (dict(row_weight=torch.ones(2, 19) * 1j), r"row_weight: dtype torch.complex64 must be real"),
    "lse shape": (dict(lse_t=torch.zeros(2, 19, 4)), r"lse_t: shape \[2, 19, 4\] must be \[2, 4, 19\]"),
    "lse type": (dict(lse_t=torch.zeros(2, 4, 19).half()), r"lse_t: dtype torch.float16 must be torch.float32"),
}


@pytest.mark.parametrize("fault", BAD_OPTIONS)
def test_options(fault):
    options, message = BAD_OPTIONS[fault]
    with pytest.raises(ValueError, match=message):
        streamkl.attention_kl(*make_tensors(), **options)


@pytest.mark.parametrize("change, message", [
    (dict(q_t=(2, 19, 3, 8), k_t=(2, 23, 1, 8)), r"q_t \[2, 19, 3, 8\] and q_s \[2, 19, 2, 5\]: 3 teacher heads must"),
    (dict(k_s=(2, 5, 3, 5)), "q_s has 2 heads: must be a multiple of the 3 heads of k_s"),
    (dict(row_weight=(2, 18)), r"row_weight: .* must be \[2, 19\] or \[2, 2, 19\] with q_s \[2, 19, 2, 5\]"),
])  # fmt: skip
def test_a_pooled_teacher_names_the_queries_of_the_student(change, message):
    """Its student is an indexer whose weights the caller does not know."""
    shapes = dict(q_t=(2, 19, 4, 8), k_t=(2, 23, 2, 8), q_s=(2, 19, 2, 5), k_s=(2, 5, 1, 5)) | change
    with pytest.raises(ValueError, match=message):
        streamkl.attention_kl(**{name: torch.ones(shape) for name, shape in shapes.items()}, pool=("max", 4))


@pytest.mark.parametrize("name", ["relu", "indices", "lse_t_wider", "return_rows"])
def test_a_pooled_teacher_takes_no_option_of_an_indexer(name):
    q_t, k_t, q_s, k_s = (tensor.detach() for tensor in make_tensors())
    with pytest.raises(TypeError, match=rf"attention_kl\(\) got an unexpected keyword argument '{name}'"):
        streamkl.attention_kl(q_t, k_t, q_s, k_s[:, :5], pool=("max", 4), **{name: None})


def test_row_weight_shape():
    _, lse_t, lse_s = streamkl.attention_kl(*make_tensors(), return_lse=True)
    for options in (dict(lse_t=lse_t, lse_s=lse_s), {}):
        for reduction in ("mean", "sum", "none"):
            with pytest.raises(ValueError, match=r"row_weight: shape \[2, 18\] must be \[2, 19\] or \[2, 2, 19\]"):
                streamkl.attention_kl(*make_tensors(), row_weight=torch.ones(2, 18), reduction=reduction, **options)
    q_t, k_t, q_s, k_s = make_tensors()
    with pytest.raises(ValueError, match=r"q_s: shape \[19, 2, 5\] must"):
        streamkl.attention_kl(q_t, k_t, q_s[0], k_s, row_weight=torch.ones(2, 19))


@pytest.mark.parametrize("bounds, message", [
    ([0, 9, 5], r"cu_seqlens_q\[2\]=5: must not be below cu_seqlens_q\[1\]=9"),
    ([1, 5, 9], r"cu_seqlens_q\[0\]=1: must be 0"),
    ([0, 5, 20], r"cu_seqlens_q\[2\]=20: must be at most 19"),
    ([0, 5, 2**32 + 19], r"cu_seqlens_q\[2\]=4294967315: must be -2147483648..2147483647"),
    ([0.0, 5.0, 19.0], r"cu_seqlens_q: dtype torch.float32 must be torch.int32 or torch.int64"),
    ([False, True, True], r"cu_seqlens_q: dtype torch.bool must be torch.int32 or torch.int64"),
])  # fmt: skip
def test_cu_seqlens(bounds, message):
    tensors = make_tensors(packed=True)
    with pytest.raises(ValueError, match=message):
        streamkl.attention_kl(*tensors, cu_seqlens_q=torch.tensor(bounds), cu_seqlens_k=torch.tensor([0, 9, 23]))


def test_cu_seqlens_of_the_keys():
    tensors = make_tensors(packed=True)
    for bounds, message in (
        (torch.tensor([0, 9, 2**32 + 23]), r"cu_seqlens_k\[2\]=4294967319: must be -2147483648..2147483647"),
        (torch.tensor([0.0, 9.0, 23.0]), r"cu_seqlens_k: dtype torch.float32 must be torch.int32 or torch.int64"),
        (torch.tensor([], dtype=torch.int32), r"cu_seqlens_k: torch.int32 of shape \[0\] must be .* of shape \[sequences \+ 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            streamkl.attention_kl(*tensors, cu_seqlens_q=CU, cu_seqlens_k=bounds)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_max_seqlen(name):
    """The longest sequence has 14 queries and 14 keys: a lower bound is refused, for queries and for keys."""
    letter = name[-1]
    packed, indexer = make_tensors(packed=True), make_indexer(packed=True)
    lengths = dict(cu_seqlens_q=CU, cu_seqlens_k=torch.tensor([0, 9, 23]))
    for function, tensors in (streamkl.attention_kl, packed), (streamkl.indexer_kl, indexer):
        expected = function(*tensors, **lengths)
        for longest in (14, 15, 64, None):
            assert torch.equal(function(*tensors, **lengths, **{name: longest}), expected)
        too_short = rf"cu_seqlens_{letter}\[2\]={19 if letter == 'q' else 23}: sequence 1 has 14 rows; must be at most 13"
        with pytest.raises(ValueError, match=too_short):
            function(*tensors, **lengths, **{name: 13})
        for value, text in (True, "True"), (14.0, "14.0"), (-1, "-1"), (torch.tensor(14), r"tensor\(14\)"):
            with pytest.raises(ValueError, match=rf"{name}={text}: must be None or a whole number, at least 0"):
                function(*tensors, **lengths, **{name: value})


def test_sequence_counts():
    tensors = make_tensors(packed=True)
    with pytest.raises(ValueError, match=r"cu_seqlens_q \[3\] and cu_seqlens_k \[2\]: sequences 2 and 1"):
        streamkl.attention_kl(*tensors, cu_seqlens_q=CU, cu_seqlens_k=torch.tensor([0, 23]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_raises_the_same(dynamic):
    """The message contains numbers even where the compiler uses symbols for sizes."""
    compiled = torch.compile(streamkl.attention_kl, fullgraph=True, backend="eager", dynamic=dynamic)
    with pytest.raises(Exception, match=r"key lengths 23 and 22"):
        compiled(*replaced(3, lambda t: t[:, :22]))


# ---- Indexers ------------------------------------------------------------------------------------------------------

BAD_INDEXERS = {
    "teacher": ("q_t", lambda t: t.requires_grad_(), r"q_t requires a gradient: the teacher of an indexer is fixed; pass q_t.d"),
    "weights rank": (
        "w_s",
        lambda t: t[0, 0],
        r"w_s: shape \[1, 3\] must be \[batch, length, index heads\] or \[batch, length, heads_s, index heads\]",
    ),
    "weights length": ("w_s", lambda t: t[:, :18], r"w_s: shape \[2, 18, 1, 3\] must have batch 2 and length 19, as q_t has"),
    "weights type": ("w_s", lambda t: t.double(), r"w_s: dtype torch.float64 must be torch.float32, torch.float16 or torch.b"),
    "weights heads": (
        "w_s",
        lambda t: t[..., :2],
        r"q_s \[2, 19, 3, 5\] and w_s \[2, 19, 1, 2\]: 3 index query heads must be 1 student heads x 2 weights",
    ),
    "no student head": ("w_s", lambda t: t[:, :, :0], r"w_s: must have at least one student head"),
    "student heads": ("w_s", lambda t: t.transpose(2, 3), r"4 teacher heads must be a multiple of 3 student heads"),
    "key heads": ("k_s", lambda t: t.expand(2, 23, 2, 5), r"w_s has 1 heads: must be a multiple of the 2 heads of k_s"),
    "large index": (
        "indices",
        lambda t: torch.full_like(t, 23),
        r"indices\[0, 0, 0, 0\]=23: must be -1 \(none\) or a key of the sequence, 0..22",
    ),
    "negative index": ("indices", lambda t: torch.full_like(t, -2), r"indices\[0, 0, 0, 0\]=-2: must be -1 \(none\) or a key"),
    "index type": ("indices", lambda t: t.float(), r"indices: dtype torch.float32 must be torch.int32 or torch.int64"),
    "index rank": ("indices", lambda t: t[0, 0], r"indices: shape \[1, 4\] must be \[batch, length, top_k\] or \["),
    "index heads": ("indices", lambda t: t.expand(2, 19, 2, 4), r"student heads 1 and 2 must be equal"),
    "index wrap": ("indices", lambda t: t.long() * 0 + 2**32, r"indices\[0, 0, 0, 0\]=4294967296: must be -2147483648..2147483647"),
    "index flag": ("indices", lambda t: t > 3, r"indices: dtype torch.bool must be torch.int32 or torch.int64"),
    "no index": ("indices", lambda t: t[..., :0], r"indices: shape \[2, 19, 1, 0\] must list at least one key per row"),
    "device": ("w_s", lambda t: t.to("meta"), r"q_t is on cpu and w_s on meta: must be one device"),
}


@pytest.mark.parametrize("fault", BAD_INDEXERS)
def test_indexers(fault):
    name, change, message = BAD_INDEXERS[fault]
    indexer = make_indexer(top_k=4)
    with pytest.raises(ValueError, match=message):
        streamkl.indexer_kl(*indexer._replace(**{name: change(getattr(indexer, name))}))


BAD_INDEXER_OPTIONS = {
    "lse shape": (dict(lse_t=torch.zeros(2, 19, 4)), r"lse_t: shape \[2, 19, 4\] must be \[2, 4, 19\]"),
    "wider than nothing": (dict(lse_t_wider=True), r"lse_t_wider=True: needs lse_t"),
    "scale": (dict(softmax_scale_s=0.0), r"softmax_scale_s=0.0: must not be 0"),
    "relu": (dict(relu="no"), r"relu='no': must be True or False"),
    "wider": (dict(lse_t_wider=1), r"lse_t_wider=1: must be True or False"),
    "return_rows": (dict(return_rows=None), r"return_rows=None: must be True or False"),
    "window": (dict(window_size=(True, 0)), r"window_size=\(True, 0\): must be a pair \(left, right\) of whole numbers"),
    "key_lengths wrap": (dict(key_lengths=torch.tensor([4, 2**32 + 3])), r"key_lengths\[1\]=4294967299: must be -2147483648..2147483647"),
    "key_lengths bool": (dict(key_lengths=torch.tensor([True, True])), r"key_lengths: dtype torch.bool must be torch.int32 or"),
    "reduction": (dict(reduction="batchmean"), r"reduction='batchmean': must be 'mean', 'sum' or 'none'"),
    "row weight": (dict(row_weight=torch.ones(2, 18)), r"row_weight: shape \[2, 18\] must be \[2, 19\] or \[2, 1, 19\]"),
}


@pytest.mark.parametrize("fault", BAD_INDEXER_OPTIONS)
def test_indexer_options(fault):
    options, message = BAD_INDEXER_OPTIONS[fault]
    with pytest.raises(ValueError, match=message):
        streamkl.indexer_kl(*make_indexer(), **options)


def test_index_heads():
    with pytest.raises(ValueError, match=r"index_heads=257: must be 1..256"):
        streamkl.indexer_kl(*make_indexer(index_heads=257))


LENGTHS = torch.tensor([0, 7, 7, 20])
ROWS = torch.arange(20, dtype=torch.int32).expand(2, 20)
LSE_CASES = {
    "dense": dict(),
    "causal window": dict(causal=True, window_size=(4, 0)),
    "softcap and scale": dict(softcap_s=2.0, softmax_scale_s=0.3, softcap_t=3.0),
    "key lengths": dict(key_lengths=torch.tensor([9, 20])),
    "heads first": dict(layout="bhnd", causal=True),
    "packed": dict(cu_seqlens_q=LENGTHS, cu_seqlens_k=LENGTHS, causal=True),
    "row bounds": dict(key_begin=(ROWS - 6).clamp(min=0), key_end=ROWS),
}


@pytest.mark.parametrize("case", LSE_CASES)
def test_check_lse(case, monkeypatch):
    torch.manual_seed(0)
    options = LSE_CASES[case]
    shape = (20, 4, 8) if case == "packed" else (2, 20, 4, 8)
    shape = (2, 4, 20, 8) if case == "heads first" else shape
    tensors = [torch.randn(shape) for _ in range(4)]
    tensors[2].requires_grad_()
    plain, lse_t, lse_s = streamkl.attention_kl(*tensors, return_lse=True, **options)
    loss = streamkl.attention_kl(*tensors, lse_t=lse_t, lse_s=lse_s, check_lse=True, **options)
    torch.testing.assert_close(loss, plain)
    streamkl.attention_kl(*tensors, lse_t=lse_t, lse_s=lse_s * 1.4427, **options)  # of base 2: nothing tells
    first = 5 if case == "row bounds" else 0  # row 0 attends to no key
    with pytest.raises(ValueError, match=rf"lse_s: .* row {first}, head 0 must be .* \(natural logarithm\)"):
        streamkl.attention_kl(*tensors, lse_t=lse_t, lse_s=lse_s * 1.4427, check_lse=True, **options)
    monkeypatch.setenv("STREAMKL_CHECK_LSE", "1")
    with pytest.raises(ValueError, match="lse_t: .* must be"):
        streamkl.attention_kl(*tensors, lse_t=lse_t + 0.1, lse_s=lse_s, **options)


def test_check_lse_of_the_teacher_alone():
    """Teacher groups read it. It may cover more keys."""
    tensors = [tensor.detach() for tensor in make_tensors()]
    loss, lse_t, _ = streamkl.attention_kl(*tensors, return_lse=True)
    torch.testing.assert_close(streamkl.attention_kl(*tensors, lse_t=lse_t + 1, check_lse=True), loss)
    with pytest.raises(ValueError, match="lse_t: .* must be at least"):
        streamkl.attention_kl(*tensors, lse_t=lse_t - 0.1, check_lse=True)


@pytest.mark.parametrize("name", ["lse_t", "lse_s"])
def test_check_lse_of_rows_without_keys(name):
    """A mean counts the rows whose LSE is finite."""
    tensors, sinks = [tensor.detach() for tensor in make_tensors()], dict(sink_t=torch.zeros(4), sink_s=torch.zeros(2))
    for options in dict(key_lengths=torch.tensor([23, 0])), dict(causal=True, key_end=torch.arange(19).expand(2, 19)), sinks:
        options = dict(key_lengths=torch.tensor([23, 0])) | options
        _, lse_t, lse_s = streamkl.attention_kl(*tensors, return_lse=True, **options)
        given = dict(lse_t=lse_t, lse_s=lse_s)
        streamkl.attention_kl(*tensors, check_lse=True, **given, **options)
        given[name] = given[name].nan_to_num(neginf=0.0)
        with pytest.raises(ValueError, match=rf"{name}: 0 at batch [01], row 0, head 0 must be -inf"):
            streamkl.attention_kl(*tensors, check_lse=True, **given, **options)


@pytest.mark.parametrize("status, result", [(0, None), (1, ValueError)])
def test_a_long_call_in_either_thread(status, result):
    """In the main thread it runs in another one; its errors are those of the call."""
    found = []

    def call():
        try:
            found.append(_library.check_interruptible(lambda: status))
        except Exception as error:
            found.append(type(error))

    call()
    other = threading.Thread(target=call)
    other.start()
    other.join()
    assert found == [result, result]


@pytest.mark.parametrize("begun", [False, True])
def test_ctrl_c_while_the_thread_of_a_long_call_starts(begun, monkeypatch):
    """The call has begun, and its end is awaited, because it writes to tensors; or it never begins."""
    start, events = threading.Thread.start, []

    def interrupted(thread):
        if begun:
            start(thread)
            while not events:
                time.sleep(0.01)
        raise KeyboardInterrupt

    def call():
        events.append("begun")
        while not _library._cancel.value:
            time.sleep(0.01)
        events.append("ended")
        return 0

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        _library.check_interruptible(call)
    assert events == ["begun", "ended"] * begun and _library._cancel.value == 0


def test_check_lse_under_autocast():
    """The LSEs of f32 tensors are f32 there, too."""
    tensors = [3 * torch.randn(2, 20, 4, 8) for _ in range(4)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, lse_t, lse_s = streamkl.attention_kl(*tensors, return_lse=True)
        streamkl.attention_kl(*tensors, lse_t=lse_t, lse_s=lse_s, check_lse=True)


def test_check_lse_of_many_sequences():
    """The first eight sequences of a packed batch are checked."""
    tensors = [tensor.detach() for tensor in make_tensors(len_q=24, len_k=24, packed=True)]
    bounds = torch.arange(0, 25, 2)
    lengths = dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    _, lse_t, lse_s = streamkl.attention_kl(*tensors, return_lse=True, **lengths)
    wrong = [torch.where(torch.arange(24) >= row, lse_t + 1, lse_t) for row in (16, 15)]
    streamkl.attention_kl(*tensors, lse_t=wrong[0], lse_s=lse_s, check_lse=True, **lengths)
    with pytest.raises(ValueError, match="lse_t: .* at sequence 7, row 1, head 0 must be"):
        streamkl.attention_kl(*tensors, lse_t=wrong[1], lse_s=lse_s, check_lse=True, **lengths)


def test_ctrl_c_ends_a_long_call():
    """The call below takes minutes. The signal arrives while the library computes."""
    program = """
import os, signal, threading, time, torch, streamkl
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore the signal
q, k = (torch.randn(1, 32768, 8, 64) for _ in range(2))
threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
try:
    streamkl.attention_kl(q, k, k, q)
except KeyboardInterrupt:
    print("interrupted after", time.monotonic() - begin)
print(streamkl.attention_kl(q[:, :1024], k[:, :1024], k[:, :1024], q[:, :1024]).item() > 0)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    words = result.stdout.split()
    assert words[:2] == ["interrupted", "after"] and float(words[2]) < 20 and words[3] == "True", result.stdout
