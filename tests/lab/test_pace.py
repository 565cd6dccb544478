"""`lab.paced`: the link is as slow as it was told to be, and the core is free meanwhile."""

import time

import pytest
import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.theory import collectives

MB = 10**6


def send(rate, full_bytes):
    tensor = torch.ones(full_bytes // 4)
    dist.all_reduce(tensor)
    with lab.paced(rate):
        lab.barrier()
        start, busy = time.monotonic(), time.process_time()
        dist.all_reduce(tensor)
        seconds, busy = time.monotonic() - start, time.process_time() - busy
    start = time.monotonic()
    dist.all_reduce(tensor)
    return seconds, busy, time.monotonic() - start


@pytest.mark.parametrize("world_size", [2, 4])
def test_no_faster_than_the_link_and_the_core_is_free(world_size):
    full_bytes, rate = 8 * MB, 40 * MB
    expected = collectives.ring_all_reduce_seconds(full_bytes, world_size, 0.0, rate)
    for seconds, busy, afterwards in lab.run(send, world_size, args=(rate, full_bytes)):
        # A loaded machine can only be slower. 5 %: the kernel lets the first few hundred kilobytes go at once.
        assert seconds > 0.95 * expected
        assert busy < 0.5 * expected
        assert afterwards < seconds  # the limit ends with the block


@pytest.mark.parametrize("rate", [0, -1.0, float("inf"), float("nan"), True])
def test_bad_rates_are_named(rate):
    with pytest.raises(ValueError, match="link_bytes_per_s must be"), lab.paced(rate):
        pass


def test_outside_of_a_rank():
    with pytest.raises(RuntimeError, match=r"lab\.paced\(\)"), lab.paced(MB):
        pass
