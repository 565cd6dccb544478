"""A save that training does not wait for: the host gets the state of the moment, though it changes at once."""

import torch

from benchmarks._gpu_clock import Clock
from benchmarks._gpu_moves import Aside, pinned

NUM_BYTES = 2**30  # some 20 ms on the way to the host


def saved(copies_first):
    clock = Clock()
    state, host, aside = torch.ones(NUM_BYTES // 2, device="cuda").bfloat16(), pinned(clock, NUM_BYTES), Aside(clock)
    host.zero_()
    leaving = state.clone() if copies_first else state
    with aside:
        host.copy_(leaving, non_blocking=True)
    state.fill_(2)  # the next step, which waits for nothing
    torch.cuda.synchronize()
    assert host.is_pinned()
    assert state.min() == 2
    return host


def test_a_copy_on_the_card_leaves_while_the_state_changes():
    assert saved(copies_first=True).aminmax() == (1, 1)


def test_the_mutant_without_that_copy_saves_a_state_that_never_was():
    assert saved(copies_first=False).max() == 2
