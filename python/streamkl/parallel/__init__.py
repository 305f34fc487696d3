"""streamkl.parallel: attention_kl and indexer_kl over the ranks of torch.distributed.

shard, unshard    the part of a tensor that this rank holds in context parallelism, and the whole of it
"""

from ._setup import Groups
from ._shard import shard, unshard

__all__ = ["Groups", "shard", "unshard"]
