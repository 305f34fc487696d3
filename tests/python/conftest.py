import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

# The models are small and the machine may be busy: waiting for threads would cost more than they save.
torch.set_num_threads(1)
