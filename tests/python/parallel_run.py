"""Runs the cases of parallel_cases.py and parallel_tensor.py that the command line names, with torchrun."""

import parallel_cases
import parallel_tensor

if __name__ == "__main__":
    parallel_cases.run_cases({**vars(parallel_cases), **vars(parallel_tensor)})
