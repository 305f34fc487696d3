import torch

# The models are small and the machine may be busy: threads that wait for each other would cost more than they bring.
torch.set_num_threads(1)
