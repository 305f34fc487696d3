"""Running the streamkl tool, and the tensor files it reads and writes."""

import json
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import safetensors.numpy

TOOL = os.environ.get("STREAMKL_CLI", str(Path(__file__).parents[2] / "build/test/cli/streamkl"))
PORTABLE = "cpu_neon" if platform.machine() == "aarch64" else "cpu_portable"  # the kernel that every CPU can run


def run(*arguments, env=None, timeout=80, **options):
    """Runs the tool. Its output is plain text, because a pipe is not a terminal."""
    environment = {**os.environ, **(env or {})}
    command = [TOOL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, **options)


def succeed(*arguments, **options):
    """The output of a run that must succeed."""
    done = run(*arguments, **options)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


device = "cpu"  # of kl_json(): set by the device fixture


@cache
def why_no_gpu():
    """None if the tool can use a GPU."""
    devices = {device["device"]: device for device in json.loads(run("info", "--json").stdout)["devices"]}
    return devices["cuda"].get("why_not")


def kl_json(*arguments, **options):
    done = run("kl", *arguments, "--device", device, "--json", **options)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(done.stdout, parse_constant=refuse)


# ---- bf16, which numpy lacks: the upper half of an f32 ----------------------------------------------------


def bf16_bits(array):
    """Rounds to nearest even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def bf16_values(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(array, dtype):
    """An array rounded to f32, f16 or bf16, in float64."""
    if dtype == "bf16":
        return bf16_values(bf16_bits(array)).astype(np.float64)
    return array.astype({"f32": np.float32, "f16": np.float16}[dtype]).astype(np.float64)


# ---- Files ---------------------------------------------------------------------------------------------------------

NUMPY_TYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i32": np.int32, "i64": np.int64, "f64": np.float64}


def raw_safetensors(header, data):
    """A file of exactly these bytes, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def save(path, tensors, dtype="f32", **dtypes):
    """Writes a safetensors file; `dtypes` overrides the type of single tensors. Without bf16 the reference package writes it."""
    dtypes = {name: dtypes.get(name, dtype) for name in tensors}
    arrays = {
        name: bf16_bits(array) if dtypes[name] == "bf16" else np.ascontiguousarray(array, NUMPY_TYPES[dtypes[name]])
        for name, array in tensors.items()
    }
    if "bf16" not in dtypes.values():
        safetensors.numpy.save_file(arrays, path)
        return path
    header, end = {}, 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": dtypes[name].upper(), "shape": list(array.shape), "data_offsets": [begin, end]}
    path.write_bytes(raw_safetensors(header, b"".join(array.tobytes() for array in arrays.values())))
    return path


def load(path):
    """Reads a safetensors file: {name: (dtype, float64 array)}. tests/cli/test_stats.py reads with the reference package."""
    content = Path(path).read_bytes()
    header_size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_size])
    dtypes = {name: entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    found = {}
    for name, dtype in dtypes.items():
        begin, end = header[name]["data_offsets"]
        stored = np.frombuffer(content[8 + header_size :][begin:end], NUMPY_TYPES[dtype.lower()])
        values = bf16_values(stored) if dtype == "BF16" else stored
        found[name] = (dtype, values.astype(np.float64).reshape(header[name]["shape"]))
    return found


def make_tensors(seed=0, batch=2, heads_t=2, heads_s=2, key_heads_t=None, key_heads_s=None, len_q=37, len_k=53, dim_t=16, dim_s=24):
    random = np.random.default_rng(seed)
    return {
        "q_t": random.standard_normal((batch, heads_t, len_q, dim_t)).astype(np.float32),
        "k_t": random.standard_normal((batch, key_heads_t or heads_t, len_k, dim_t)).astype(np.float32),
        "q_s": random.standard_normal((batch, heads_s, len_q, dim_s)).astype(np.float32),
        "k_s": random.standard_normal((batch, key_heads_s or heads_s, len_k, dim_s)).astype(np.float32),
    }
