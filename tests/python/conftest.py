import torch

# The models are small and the machine may be busy: waiting for threads would cost more than they save.
torch.set_num_threads(1)
