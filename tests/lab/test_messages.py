"""Messages are seen as they are sent and waited for, and their rounds are counted with one port in each direction."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from dtlib import lab
from dtlib.lab.messages import Message, Messages, count_steps

SENT, RECEIVED = "sent", "received"


def _log(rank, *entries):
    return Messages(rank, [Message(kind, peer, 4) for kind, peer in entries])


def test_all_ways_to_send_are_seen():
    def talk():
        rank, tensor = dist.get_rank(), torch.zeros(3)
        with lab.messages() as seen:
            if rank == 0:
                dist.send(tensor, 1)
                dist.isend(tensor, group_dst=1).wait()
                dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1)])[0].wait()
            else:
                dist.recv(tensor, 0)
                dist.irecv(tensor, 0).wait()
                dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, 0)])[0].wait()
        dist.barrier()
        return seen, dist.isend.__name__, dist.irecv.__name__

    (sender, *names), (receiver, *_) = lab.run(talk, 2)
    assert sender.log == [Message(SENT, 1, 12)] * 3
    assert (sender.num_sent, sender.sent_bytes) == (3, 36)
    assert receiver.log == [Message(RECEIVED, 0, 12)] * 3
    assert receiver.sent_bytes == 0
    assert names == ["isend", "irecv"]  # all is as before
    assert count_steps([sender, receiver]) == 3


def test_a_message_counts_as_received_when_it_was_waited_for():
    def pass_on():
        rank, tensors = dist.get_rank(), torch.zeros(2, 1)
        with lab.messages() as seen:
            if rank == 0:
                dist.send(tensors[0], 1)
            elif rank == 1:
                request = dist.irecv(tensors[0], 0)
                request.wait()
                dist.send(tensors[0], 2)
            else:
                dist.recv(tensors[0], 1)
        return seen

    records = lab.run(pass_on, 3)
    assert [m.kind for m in records[1].log] == [RECEIVED, SENT]
    assert count_steps(records) == 2


@pytest.mark.parametrize(
    ("records", "steps"),
    [
        ([_log(0), _log(1)], 0),
        ([_log(0, (SENT, 1), (RECEIVED, 1)), _log(1, (SENT, 0), (RECEIVED, 0))], 1),  # both at once
        ([_log(0, (SENT, 1), (RECEIVED, 1)), _log(1, (RECEIVED, 0), (SENT, 0))], 2),  # one answers
        ([_log(0, (RECEIVED, 1), (RECEIVED, 2)), _log(1, (SENT, 0)), _log(2, (SENT, 0))], 2),  # one port in
        ([_log(0, (SENT, 1), (SENT, 2)), _log(1, (RECEIVED, 0)), _log(2, (RECEIVED, 0))], 2),  # one port out
    ],
)
def test_rounds_by_hand(records, steps):
    assert count_steps(records) == steps
    assert count_steps(records[::-1]) == steps


def test_a_message_from_nowhere_is_named():
    with pytest.raises(ValueError, match="must hold every rank's messages"):
        count_steps([_log(0, (RECEIVED, 1)), _log(1)])


def test_a_functional_collective_is_counted_once():
    def on_a_rank():
        with lab.SendCounter() as seen:
            total = funcol.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
            total = total + 1  # which waits for it
        return seen.collectives, total.tolist()

    assert lab.run(on_a_rank, 2) == [(["all_reduce"], [3.0] * 3)] * 2
