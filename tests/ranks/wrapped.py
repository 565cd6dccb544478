"""The data-parallel wrappers, and a network that they wrap."""

from torch import nn

from dtlib.ranks import dp

ALL = [dp.NaiveDataParallel, dp.FlatDataParallel, dp.BucketedDataParallel]


def network(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
