"""Import, overhead, environment report and examples."""

import platform
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import streamkl
from streamkl import _library, env_report

ROOT = Path(__file__).parents[2]


def run(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=600, **options)


def test_version_equals_the_header():
    numbers = re.findall(r"define SKL_VERSION_\w+ (\d+)", (ROOT / "include/streamkl.h").read_text())
    assert streamkl.__version__ == ".".join(numbers)


def test_modules_are_imported_on_first_use():
    assert streamkl.__getattr__("reference") is sys.modules["streamkl.reference"]
    with pytest.raises(AttributeError, match="module 'streamkl' has no attribute 'references'"):
        streamkl.references


def test_the_library_of_the_package(monkeypatch):
    monkeypatch.delenv("STREAMKL_LIBRARY")
    assert _library.library_path() == Path(streamkl.__file__).with_name("lib") / "libstreamkl.so"


def test_import_is_light():
    """The import loads no transformers and takes a fraction of a second of CPU time after that of torch."""
    code = "import torch, sys, time; t = time.process_time(); import streamkl; print(time.process_time() - t)"
    for _ in range(3):
        answer = run("-c", f"{code}; assert 'transformers' not in sys.modules")
        assert answer.returncode == 0, answer.stderr
        if float(answer.stdout) < 0.3:
            return
    raise AssertionError(f"{answer.stdout.strip()} s, the third time")


def test_call_overhead():
    """CPU time of a forward on tensors of size 1. The goal is 60 us on an idle core (bench/run.py overhead); the limit
    allows for a shared core.
    """
    tensors = [torch.randn(1, 1, 1, 1) for _ in range(4)]
    samples = []
    for _ in range(50):
        begin = time.thread_time()
        for _ in range(20):
            streamkl.attention_kl(*tensors)
        samples.append((time.thread_time() - begin) / 20)
    assert min(samples) < 240e-6


def test_env_report():
    answer = run("-m", "streamkl.env_report")
    assert answer.returncode == 0, answer.stderr
    portable = "cpu_neon" if platform.machine() == "aarch64" else "cpu_portable"  # the kernel that every CPU can run
    for word in (streamkl.__version__, portable, torch.__version__, str(_library.library_path())):
        assert word in answer.stdout
    assert answer.stdout.strip() == env_report.report()


def test_missing_library():
    answer = run(
        "-c",
        "import streamkl",
        env={"STREAMKL_LIBRARY": "/nowhere/libstreamkl.so", "PYTHONPATH": str(ROOT / "python")},
    )
    assert answer.returncode != 0
    assert "ImportError: streamkl: /nowhere/libstreamkl.so cannot be loaded" in answer.stderr


@pytest.mark.parametrize("example", ["distill_loop", "packed_sequences"])
def test_examples(example, capsys):
    runpy.run_path(str(ROOT / f"examples/{example}.py"), run_name="__main__")
    values = [float(value) for value in re.findall(r"attention KL ([\d.]+)", capsys.readouterr().out)]
    assert example != "distill_loop" or values[-1] < values[0] / 2
