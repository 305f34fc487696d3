"""Errors in a command line or a file: exit code 2, one line that names the cause, and no output file."""

import os

import numpy as np
import pytest
from tool import make_tensors, raw_safetensors, run, save


def assert_refused(done, *fragments, code=2):
    """One line on stderr, "streamkl kl: ...", with all fragments; nothing on stdout."""
    assert done.returncode == code, (done.returncode, done.stderr)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("streamkl")
    assert len(lines) == 1 or lines[1].startswith("Try "), done.stderr  # errors of argp point to the help
    for fragment in fragments:
        assert fragment in done.stderr


# ---- Arguments -----------------------------------------------------------------------------------------------------

def listed(values):
    return ",".join(map(str, values))


# For each command: options, and what the message says.
BAD_ARGUMENTS = {
    "kl": [
        (["--no-such"], "--no-such"),
        (["--window"], "--window"),
        (["--window", "5"], "--window=5"),
        (["--window", "a,b"], "--window=a,b"),
        (["--window", "-2,0"], "--window=-2,0"),
        (["--window", "1,2,3"], "--window=1,2,3"),
        (["--window", "99999999999999999999,0"], "--window="),
        (["--scale-t", "fast"], "--scale-t=fast"),
        (["--scale-s", "nan"], "--scale-s=nan"),
        (["--scale-s", "1e60"], "--scale-s=1e60"),
        (["--scale-t", "1.5x"], "--scale-t=1.5x"),
        (["--scale-s", "1e-50"], "--scale-s=1e-50", "does not round to 0"),
        (["--scale-t", "-1e-60"], "--scale-t=-1e-60", "does not round to 0"),
        (["--softcap-s", "1e-50"], "--softcap-s=1e-50", "does not round to 0"),
        (["--softcap-t", "-1"], "softcap_t=-1"),
        (["--softcap-s", ""], "--softcap-s="),
        (["--direction", "sideways"], "--direction=sideways", "forward or reverse"),
        (["--reduction", "max"], "--reduction=max", "mean, sum or none"),
        (["--layout", "hbnd"], "--layout=hbnd", "bhnd or bnhd"),
        (["--threads", "two"], "--threads=two"),
        (["--threads", "-1"], "--threads=-1"),
        (["--threads", "1000000"], "threads=1000000"),
        (["--device", "tpu"], "--device=tpu", "cpu, cuda"),
        (["--device", "cuda:x"], "--device=cuda:x"),
        (["--kernel", "no_such"], "kernel=no_such"),
        (["--offset-q", "1.5"], "--offset-q=1.5"),
        (["--offset-k", "99999999999999999999"], "--offset-k="),
        (["--key-lengths", "1,x"], "key_lengths=1,x"),
        (["--key-lengths", "1,2,3"], "key_lengths has 3 entries", "one per sequence, 2"),
        (["--key-lengths", "-1,5"], "key_lengths[0]=-1"),
        (["--key-lengths", "5,54"], "key_lengths[1]=54"),
        (["--key-lengths", "no_such"], "no_such", "--key-lengths"),
        (["--q-t", "other"], '"other"', "--q-t"),
        (["--q-t", ""], "--q-t="),
        (["--lse-t", "other"], '"other"', "--lse-t"),
        (["--key-begin", "0,x"], "key_begin=0,x", "integers"),
        (["--key-end", "1,2,3"], "key_end has 3 entries", "one per query, 74"),
        (["--key-begin", listed([-1] + 73 * [0])], "key_begin[0", "=-1"),
        (["--key-end", listed(74 * [54])], "key_end[0", "=54"),
        (["--key-end", listed([5, 4] + 72 * [9])], "key_end[1]=4: must not be below key_end[0]=5"),
        (["--key-end", "ends"], '"ends"', "--key-end NAME"),
        (["--sink-t", "1,2"], "sink_s is missing and sink_t is given"),
        (["--sink-s", "1,2"], "sink_t is missing and sink_s is given"),
        (["--sink-t", "1"], "sink_t=1:", "2 numbers", "one per head"),
        (["--sink-s", "1,2,3"], "sink_s=1,2,3:", "2 numbers"),
        (["--sink-t", "1,b"], "sink_t=1,b:"),
        (["--sink-t", "-nan,1"], "sink_t=-nan,1:", "below infinity"),
        (["--sink-t", "1,inf"], "sink_t=1,inf:", "below infinity"),
        (["--sink-t", "logits"], '"logits"', "--sink-t NAME"),
    ],
    "map": [
        (["--buckets", "0"], "--buckets=0: must be an integer, 1..4096"),
        (["--buckets", "4097"], "--buckets=4097"),
        (["--head", "first"], "--head=first: must be mean, all or the number of a head"),
        (["--out", "/no/such/folder/map.safetensors"], "/no/such/folder/map.safetensors"),
        (["--png", "/no/such/folder/map"], "/no/such/folder/map-p.png"),
        (["--png", "x" * 5000], "--png=xxx"),
    ],
    "stats": [
        (["--rows", "3"], "--rows=3: must be BEGIN,END, two integers"),
        (["--top", "0"], "--top=0: must be"),
        (["--q-s", "absent"], "absent"),
        (["--softcap", "-1"], "softcap_s=-1: must be finite and at least 0"),
    ],
    "info": [
        (["--heads", "2"], "--explain must be given too"),
        (["--gpu", "h100"], "--explain must be given too"),
        (["--explain", "--gpu", ""], "--gpu=: must be not empty"),
        (["--explain", "--top-k", "4"], "--top-k: --index-heads must be given too"),
        (["--explain", "--index-heads", "4", "--grad-teacher"], "--grad-teacher: not available"),
        (["--explain", "--dtype", "f64"], "--dtype=f64: must be f32, f16 or bf16"),
        (["--explain", "--dim", "513"], "dim_t=513"),
        (["--explain", "--kernel", "no_such"], "kernel=no_such"),
    ],
    "demo": [
        (["--context", "0"], "--context=0"),
        (["--heads", "x"], "--heads=x"),
        (["--dim", "513"], "dim_t=513"),
        (["--seed", "1.5"], "--seed=1.5"),
    ],
    "distill": [
        (["--context", "63"], "--context=63: must be an integer, 64.."),
        (["--context", "long"], "--context=long"),
        (["--needles", "257"], "--needles=257"),
        (["--context", "64", "--needles", "17"], "--needles=17"),
        (["--hidden", "47"], "--hidden=47"),
        (["--dim-t", "16"], "--dim-t=16"),
        (["--dim-s", "513"], "--dim-s=513"),
        (["--heads-t", "3"], "--heads-t=3: must be a multiple of --heads-s=2"),
        (["--steps", "0"], "--steps=0"),
        (["--steps", "9223372036854775807"], "--steps=9223372036854775807: must be an integer, 1..16777216"),
        (["--batch", "9223372036854775807"], "--batch=9223372036854775807: must be an integer, 1..1048576"),
        (["--rate", "-1"], "--rate=-1: must be a number above 0"),
        (["--direction", "both"], "--direction=both"),
        (["--out", "/no/such/folder/run"], "--out=/no/such/folder/run"),
        (["now"], "unexpected argument 'now'"),
        (["--kernel", "no_such"], "kernel=no_such"),
        (["--resume"], "unrecognized option '--resume'"),
    ],
}
BAD_ROWS = [(command, *row) for command, rows in BAD_ARGUMENTS.items() for row in rows]
OUTPUTS = {"kl": ["--out", "rows", "--grad", "grad"], "map": ["--out", "maps"], "stats": ["--out", "stats"], "distill": ["--out", "run"]}


@pytest.mark.parametrize("row", BAD_ROWS, ids=lambda row: " ".join([row[0], *row[1]])[:60])
def test_bad_argument(row, pair):
    command, options, *fragments = row
    files = [pair] if command in ("kl", "map", "stats") else []
    done = run(command, *files, *OUTPUTS.get(command, []), *options, cwd=pair.parent)
    assert_refused(done, *fragments, code=5 if any("/no/such" in option for option in options) else 2)
    assert list(pair.parent.iterdir()) == [pair]


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "CUDA", ""])
@pytest.mark.parametrize("command", ["kl", "check", "demo"])
def test_unknown_device(command, device, pair):
    files = [pair] if command == "kl" else []
    assert_refused(run(command, *files, "--device", device), f"--device={device}: must be cpu, cuda or cuda:INDEX")


def test_gradients_of_the_teacher_need_a_file(pair):
    assert_refused(run("kl", pair, "--grad-teacher"), "--grad-teacher", "--grad FILE")


def test_no_file_and_no_command():
    for command in ("kl", "map", "stats"):
        assert_refused(run(command), "FILE", f"streamkl {command} --help")
    done = run()
    assert done.returncode == 2
    assert "Commands:" in done.stderr


def test_unknown_command_names_the_commands():
    assert_refused(run("cehck"), "'cehck'", "distill, kl, map, stats, demo, info, check, bench", "--help")


@pytest.mark.parametrize("command", ["info", "check", "demo"])
def test_unexpected_argument(command):
    assert_refused(run(command, "extra"), "extra")


@pytest.mark.parametrize("variable, value", [("STREAMKL_THREADS", "many"), ("STREAMKL_KERNEL", "no_such")])
def test_bad_environment(variable, value, pair):
    assert_refused(run("kl", pair, env={variable: value}), value)


# ---- Files ---------------------------------------------------------------------------------------------------------


def entry(dtype="F32", shape=(1, 1, 2, 4), offsets=(0, 32)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# tests/test_tensor_file.c has every rule of the two formats.
BAD_FILES = {
    "empty": b"",
    "not_a_tensor_file": b"hello, world: this is no tensor file at all",
    "no_json": raw_safetensors(b"{not json", b""),
    "past_the_data": raw_safetensors({"q_t": entry(offsets=(0, 64), shape=(1, 1, 4, 4))}, bytes(32)),
    "unknown_dtype": raw_safetensors({"q_t": entry(dtype="F99")}, bytes(32)),
    "escape_in_a_name": raw_safetensors({"\x1b[31mred\n": entry()}, bytes(32)),
    "npy_truncated": b"\x93NUMPY\x01\x00\xff\xff{'descr'",
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_malformed_file(name, tmp_path):
    path = tmp_path / "bad.file"
    path.write_bytes(BAD_FILES[name])
    done = run("kl", f"q_t={path}", path, "--out", tmp_path / "out", "--grad", tmp_path / "grad")
    assert_refused(done, "bad.file")
    assert "\x1b" not in done.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_path_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert_refused(run("kl", "absent"), "absent: cannot open: No such file or directory")
    assert_refused(run("kl", tmp_path), f"{tmp_path}: Is a directory")
    for path in (tmp_path / "pipe", "/dev/zero"):
        assert_refused(run("kl", path), f"{path}: not a regular file")
    assert_refused(run("kl", 2000 * "p" + "/q.npy"), "streamkl kl: ...ppp", "p/q.npy: cannot open: File name too long")


def test_every_truncation_of_a_good_file(tmp_path):
    """A truncated file is refused at every length."""
    whole = save(tmp_path / "in", make_tensors(batch=1, heads_t=1, heads_s=1, len_q=2, len_k=2, dim_t=2, dim_s=2)).read_bytes()
    path = tmp_path / "cut"
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        assert_refused(run("kl", path), "cut")


# ---- Tensors whose shapes disagree --------------------------------------------------------------------------------

ZEROS = np.zeros


BAD_TENSORS = {
    "batch": ({"k_t": ZEROS((3, 2, 53, 16))}, "q_t [2, 2, 37, 16]", "k_t [3, 2, 53, 16]", "batch"),
    "batch_of_student": ({"q_s": ZEROS((1, 2, 37, 24))}, "q_t", "q_s [1, 2, 37, 24]", "batch"),
    "len_q": ({"q_s": ZEROS((2, 2, 36, 24))}, "q_t [2, 2, 37, 16]", "q_s [2, 2, 36, 24]", "length"),
    "len_k": ({"k_s": ZEROS((2, 2, 52, 24))}, "k_t [2, 2, 53, 16]", "k_s [2, 2, 52, 24]", "length"),
    "dim_t": ({"k_t": ZEROS((2, 2, 53, 17))}, "q_t [2, 2, 37, 16]", "k_t [2, 2, 53, 17]", "head size"),
    "dim_s": ({"q_s": ZEROS((2, 2, 37, 23))}, "q_s [2, 2, 37, 23]", "k_s", "head size"),
    "heads": ({"q_t": ZEROS((2, 3, 37, 16))}, "heads_t=3", "heads_s=2"),
    "key_heads": ({"k_s": ZEROS((2, 3, 53, 24))}, "heads_s=2", "key_heads_s=3"),
    "no_key_heads": ({"k_s": ZEROS((2, 0, 53, 24))}, "k_s [2, 0, 53, 24]", "at least one head"),
    "no_dim": ({"q_s": ZEROS((2, 2, 37, 0)), "k_s": ZEROS((2, 2, 53, 0))}, "dim_s=0", "1..512"),
    "large_dim": ({"q_s": ZEROS((2, 2, 37, 513)), "k_s": ZEROS((2, 2, 53, 513))}, "dim_s=513", "1..512"),
    "rank_1": ({"q_t": ZEROS(5)}, "q_t [5]", "[B, H, N, D]"),
    "rank_5": ({"q_t": ZEROS((1, 1, 1, 1, 1))}, "q_t [1, 1, 1, 1, 1]", "[B, H, N, D]"),
    "lse_shape": ({"lse_t": ZEROS((2, 2, 36))}, "lse_t F32 [2, 2, 36]", "[2, 2, 37]"),
    "lse_rank": ({"lse_t": ZEROS((2, 2, 37, 1))}, "lse_t F32 [2, 2, 37, 1]"),
}


# Tensors, their types, options, and what the message says.
BAD_BOUNDS_AND_SINKS = [
    ({"key_begin": ZEROS((37, 2))}, "i32", [], "key_begin [37, 2]", "[B, N] of the queries, [2, 37]"),
    ({"key_end": ZEROS(37)}, "i32", [], "key_end [37]", "[2, 37]"),
    ({"key_end": ZEROS((2, 37))}, "f32", [], "key_end", "F32", "I32 or I64"),
    ({"key_end": np.full((2, 37), 2**40)}, "i64", [], "key_end[0]=1099511627776", "32 bits"),
    ({"sink_t": ZEROS(3), "sink_s": ZEROS(2)}, "f32", [], "sink_t [3]", "[H]", "2 heads"),
    ({"sink_t": ZEROS((2, 1)), "sink_s": ZEROS(2)}, "f32", [], "sink_t [2, 1]", "[H]"),
    ({"sink_t": ZEROS(2), "sink_s": ZEROS(2)}, "i32", [], "sink_t", "I32"),
    ({"sink_t": ZEROS(2), "sink_s": np.array([0, np.nan])}, "f32", [], "sink_s[1]=nan", "below infinity"),
    ({"sink_t": ZEROS(2), "w_s": ZEROS((2, 1, 37, 2))}, "f32", ["--student", "indexer"], "sinks=1", "indexer"),
]


def assert_refuses_tensors(folder, changes, options, fragments, dtype="f32"):
    path = save(folder / "in.safetensors", {**make_tensors(), **changes}, **dict.fromkeys(changes, dtype))
    assert_refused(run("kl", path, *options, "--out", folder / "out", "--grad", folder / "grad"), *fragments)
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_disagree(name, tmp_path):
    changes, *fragments = BAD_TENSORS[name]
    assert_refuses_tensors(tmp_path, changes, [], fragments)


@pytest.mark.parametrize("row", BAD_BOUNDS_AND_SINKS, ids=lambda row: row[3])
def test_bounds_and_sinks_that_disagree(row, tmp_path):
    changes, dtype, options, *fragments = row
    assert_refuses_tensors(tmp_path, changes, options, fragments, dtype)


@pytest.mark.parametrize("missing", ["q_t", "k_t", "q_s", "k_s"])
def test_missing_tensor(missing, tmp_path):
    tensors = make_tensors()
    del tensors[missing]
    assert_refused(run("kl", save(tmp_path / "in", tensors)), f'"{missing}"', "not found", f"--{missing.replace('_', '-')}")


def test_dtypes(tmp_path):
    assert_refused(run("kl", save(tmp_path / "a", make_tensors(), k_t="f16")), "q_t is F32", "k_t is F16")
    assert_refused(run("kl", save(tmp_path / "b", make_tensors(), q_s="f64")), "q_s", "F64")
    with_lse = {**make_tensors(), "lse_t": np.zeros((2, 2, 37))}
    for dtype in ("f16", "bf16"):
        assert_refused(run("kl", save(tmp_path / dtype, with_lse, lse_t=dtype)), f"lse_t {dtype.upper()} [2, 2, 37]: must be F32")
    cuts = {**make_tensors(batch=1), "cu_seqlens_q": np.array([0, 37])}
    assert_refused(run("kl", save(tmp_path / "c", cuts)), "cu_seqlens_q", "F32", "I32 or I64")


def test_tensor_in_two_files(pair, tmp_path):
    other = save(tmp_path / "other", {"q_t": np.zeros((2, 2, 37, 16))})
    assert_refused(run("kl", pair, other), "q_t", "pair.safetensors", "other")


def test_npy_without_a_role(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4, 4), np.float32))
    assert_refused(run("kl", tmp_path / "a.npy"), "a.npy", "q_t=")
    assert_refused(run("kl", f"qt={tmp_path / 'a.npy'}"), "'qt' is not a role", "q_t")


BAD_PACKING = {
    "decreasing": (["--cu-seqlens-q", "0,20,10,37", "--cu-seqlens-k", "0,1,2,3"], "cu_seqlens_q[2]=10"),
    "first": (["--cu-seqlens-q", "1,37"], "cu_seqlens_q[0]=1"),
    "past_the_end": (["--cu-seqlens-q", "0,38", "--cu-seqlens-k", "0,53"], "cu_seqlens_q[1]=38"),
    "keys_past_the_end": (["--cu-seqlens-q", "0,37", "--cu-seqlens-k", "0,54"], "cu_seqlens_k[1]=54"),
    "negative": (["--cu-seqlens-q", "0,-5,37", "--cu-seqlens-k", "0,1,2"], "cu_seqlens_q[1]=-5"),
    "counts": (["--cu-seqlens-q", "0,37", "--cu-seqlens-k", "0,20,53"], "cu_seqlens_q has 2", "cu_seqlens_k 3"),
    "keys_only": (["--cu-seqlens-k", "0,53"], "cu_seqlens_k", "cu_seqlens_q must be given"),
    "text": (["--cu-seqlens-q", "0,,37"], "cu_seqlens_q=0,,37"),
    "huge": (["--cu-seqlens-q", "0,4294967296"], "cu_seqlens_q=0,4294967296"),
    "with_key_lengths": (["--cu-seqlens-q", "0,37", "--cu-seqlens-k", "0,53", "--key-lengths", "5"], "key_lengths"),
}


@pytest.mark.parametrize("command", ["kl", "map"])
@pytest.mark.parametrize("name", BAD_PACKING)
def test_bad_packing(name, command, tmp_path):
    options, *fragments = BAD_PACKING[name]
    path = save(tmp_path / "in", make_tensors(batch=1))
    assert_refused(run(command, path, *options, "--out", tmp_path / "out"), *fragments)
    assert list(tmp_path.iterdir()) == [path]


def test_packing_needs_one_batch(pair):
    assert_refused(run("kl", pair, "--cu-seqlens-q", "0,37"), "q_t [2, 2, 37, 16]", "cu_seqlens_q")


# ---- Outputs -------------------------------------------------------------------------------------------------------


def test_output_in_a_missing_folder(pair, tmp_path):
    target = tmp_path / "absent" / "out"
    assert_refused(run("kl", pair, "--out", target), "--out", "No such file", code=5)
    assert_refused(run("kl", pair, "--out", tmp_path / "out", "--grad", target), "--grad", code=5)
    assert_refused(run("kl", pair, "--out", target, "--grad", tmp_path / "grad"), "--out", code=5)
    assert list(tmp_path.iterdir()) == [pair]


def test_output_with_a_long_path(pair, tmp_path):
    assert_refused(run("kl", pair, "--out", f"{tmp_path}/{2500 * 'x/'}out"), "--out", "must be shorter than 4096 bytes")


def test_output_that_is_a_folder(pair, tmp_path):
    (tmp_path / "folder").mkdir()
    assert_refused(run("kl", pair, "--out", tmp_path / "folder"), "--out", "regular file")


def limit_file_size(size):
    import resource

    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_full_disk_leaves_neither_file(pair, tmp_path):
    """--out fits, --grad does not: neither remains."""
    done = run("kl", pair, "--out", tmp_path / "out", "--grad", tmp_path / "grad", preexec_fn=limit_file_size(4096))
    assert_refused(done, "grad: cannot write: File too large", code=5)
    assert list(tmp_path.iterdir()) == [pair]


def test_stdout_on_a_full_disk(pair):
    with open("/dev/full", "w") as full:
        import subprocess

        from tool import TOOL

        for arguments in (["kl", str(pair), "--json"], ["info"], ["kl", "--help"]):
            done = subprocess.run([TOOL, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
            assert done.returncode == 5
            assert "No space left" in done.stderr


def test_out_of_memory_has_its_own_exit_code():
    quiet = {"ASAN_OPTIONS": "allocator_may_return_null=1"}  # for builds with AddressSanitizer
    done = run("demo", "--context", "1000000000", "--heads", "1000", env=quiet)
    assert done.returncode == 3
    assert "streamkl demo: out of memory" in done.stderr


@pytest.mark.parametrize("code", [0x01, 0x1B, 0x7F, 0x85, 0x9B, 0x9D, 0x061C, 0x200E, 0x200F, 0x2028, 0x202A, 0x202E, 0x2066, 0x2069])
def test_no_name_drives_the_terminal(tmp_path, code):
    """Control and bidirectional characters, in names of tensors and files, in errors and in results."""
    name = f"a{chr(code)}b"
    hostile = tmp_path / name
    hostile.write_bytes(raw_safetensors({name: {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}, bytes(4)))
    good = save(tmp_path / "good", make_tensors(len_q=3, len_k=3))
    for done in (run("kl", hostile), run("kl", good, "--q-t", name), run("kl", good, "--out", tmp_path / name)):
        assert chr(code) not in done.stdout + done.stderr and "a?" in done.stdout + done.stderr
    assert "é" in run("kl", "é").stderr


def test_raw_c1_bytes(tmp_path):
    done = run("kl", os.fsdecode(b"a\x9bb\xe9c"), encoding="latin1")
    assert "a?b\xe9c" in done.stderr
