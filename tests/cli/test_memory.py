"""The memory of a forward and a backward does not grow with the context, measured on the process."""

import re
from statistics import median

import numpy as np
import pytest
from tool import kl_json, run, save

MIB = 1 << 20
DIM = 64


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    random = np.random.default_rng(0)

    def make(length):
        tensors = {name: random.standard_normal((length, DIM), np.float32) for name in ("q_t", "k_t", "q_s", "k_s")}
        return save(folder / f"{length}.safetensors", tensors)

    return {length: make(length) for length in (16384, 65536)}


def measure(path, *options):
    outputs = ["--grad", path.with_suffix(".grad"), "--out", path.with_suffix(".out")]
    answer = kl_json(path, "--causal", *outputs, *options)
    assert answer["peak_growth_bytes"] < 64 * MIB
    return answer


COUNTING_BATCH = 128 * 1024  # bytes per thread that Linux may count late


def test_peak_growth_does_not_depend_on_the_length(files):
    """A window shortens the test. Linux counts resident pages in batches per thread: hence the medians."""
    answers = {length: [measure(path, "--window", "512,0") for _ in range(7)] for length, path in files.items()}
    growth = {length: median(answer["peak_growth_bytes"] for answer in runs) for length, runs in answers.items()}
    assert growth[65536] == pytest.approx(growth[16384], rel=0.1, abs=2 * COUNTING_BATCH)
    assert {answer["extra_bytes"] for runs in answers.values() for answer in runs} == {answers[16384][0]["extra_bytes"]}


def test_peak_growth_without_a_window(files):
    """The full causal mask at 16K, where the matrices would take 3 GiB."""
    full, windowed = measure(files[16384]), measure(files[16384], "--window", "512,0")
    assert full["extra_bytes"] == windowed["extra_bytes"]
    assert full["peak_growth_bytes"] < 8 * MIB
    assert full["materialized_bytes"] == 3 * 4 * 16384**2
    assert full["pairs"] == 16384 * 16385 // 2


def test_demo_measures_memory_without_its_tensors():
    """The tensors take 6 MiB and 24 MiB: outputs that were not resident before the measurement would be visible."""
    for context in (4096, 16384):
        done = run("demo", "--context", context)
        streamed, unit = re.search(r"streamed +(\S+) (\S+)", done.stdout).groups()
        assert unit in ("KiB", "MiB")
        assert float(streamed) < (1024 if unit == "KiB" else 4), done.stdout
