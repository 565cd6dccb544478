"""What is wrong with a schedule, in one sentence; and the messages that a right one needs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from dtlib.theory.valid import amount, flag, whole

from .schedule import Action, Schedule
from .simulate import needs

_BACKWARD = ("B", "I")


def validate(schedule: Schedule, limit: float | None = None, *, blocking: bool = False) -> None:
    """Return if `schedule` can be carried out and trains; else ``ValueError`` says in a sentence what is wrong.

    Looked for are, in this order: an action that does not exist or stands on the wrong rank, one that is done twice or
    missing, messages that are missing or out of order, ranks that wait for each other, with the circle of who waits for
    whom, and more than `limit` activations on a rank, in those of all its stages for one micro-batch. Where sends are
    `blocking` a rank that sends waits until the other one receives.
    """
    if not isinstance(schedule, Schedule):
        raise ValueError(f"schedule must be a Schedule, not {schedule!r}")
    if limit is not None:
        limit = float(amount("limit", limit))
    _check_places(schedule)
    _check_complete(schedule)
    if any(action.of for own in schedule.actions for action in own):
        _check_messages(schedule)
    elif flag("blocking", blocking):
        raise ValueError("blocking must be False for a schedule without messages: add them by with_messages")
    _check_ends(schedule, blocking)
    if limit is not None:
        _check_limit(schedule, limit)


def message_for(action: Action, schedule: Schedule) -> Action | None:
    """The ``receive`` by which what `action` needs comes from another rank; None where nothing has to come."""
    needed = needs(action, schedule.num_stages)
    if needed is None or schedule.placed[needed.stage] == schedule.placed[action.stage]:
        return None
    return Action("receive", needed.stage, needed.micro_batch, "F" if needed.kind == "F" else "B")


def target_of(of: str, stage: int) -> int:
    """The stage that the output of `stage` goes to: forward (of ``"F"``) the next one, backward the one before."""
    return stage + 1 if of == "F" else stage - 1


def with_messages(schedule: Schedule, *, ahead: int = 1) -> Schedule:
    """`schedule` with its sends and receives, in an order that is safe where a pair's messages match in order only.

    A result is sent as soon as it is there. A receive is posted `ahead` computations before it is needed, so that the
    message can come meanwhile, or earlier if a later message of the same sender is needed before. The actions that
    compute keep their order. ``ValueError`` for a schedule that has messages, or that `validate` refuses.
    """
    if any(action.of for own in schedule.actions for action in own):
        raise ValueError("schedule must have no messages yet, and it has some")
    whole("ahead", ahead, 0)
    validate(schedule)
    wanted: list[dict[Action, int]] = []  # of each rank: what it receives, and how many computations come before
    for own in schedule.actions:
        found = ((message_for(action, schedule), place) for place, action in enumerate(own))
        wanted.append({message: place for message, place in found if message})
    posted: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.actions]
    with_sends: list[list[Action]] = []
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)  # by sender and receiver, in order
    for rank, own in enumerate(schedule.actions):
        order: list[Action] = []
        for action in own:
            order.append(action)
            if action.kind == "W":
                continue
            of = "F" if action.kind == "F" else "B"
            to = target_of(of, action.stage)
            if 0 <= to < schedule.num_stages and schedule.placed[to] != rank:
                order.append(Action("send", action.stage, action.micro_batch, of))
                receive = Action("receive", action.stage, action.micro_batch, of)
                sent[rank, schedule.placed[to]].append(receive)
        with_sends.append(order)
    for (_, receiver), messages in sent.items():
        place = len(schedule.actions[receiver])
        for message in reversed(messages):
            place = min(place, max(0, wanted[receiver][message] - ahead))
            posted[receiver][place].insert(0, message)
    actions = []
    for rank, order in enumerate(with_sends):
        merged: list[Action] = []
        place = 0
        for action in order:
            if not action.of:
                merged += posted[rank][place]
                place += 1
            merged.append(action)
        actions.append(tuple(merged))
    return replace(schedule, actions=tuple(actions))


def _check_places(schedule: Schedule) -> None:
    stages, m = schedule.num_stages, schedule.micro_batches
    for rank, own in enumerate(schedule.actions):
        for action in own:
            kind, stage, i, of = action
            if kind not in ("F", "B", "I", "W", "send", "receive") or bool(of) != (kind in ("send", "receive")):
                raise ValueError(f"rank {rank} has {action}, which is no action")
            if not 0 <= stage < stages or not 0 <= i < m:
                raise ValueError(
                    f"rank {rank} has {action}, but there are {stages} stages and {m} micro-batches, from 0"
                )
            place = target_of(of, stage) if kind == "receive" else stage
            if not 0 <= place < stages or schedule.placed[place] != rank:
                raise ValueError(f"rank {rank} has {action}, but stage {place} is not on this rank")


def _check_complete(schedule: Schedule) -> None:
    for rank, own in enumerate(schedule.actions):
        counts = Counter(action for action in own if not action.of)
        for action, count in counts.items():
            if count > 1:
                raise ValueError(f"rank {rank} does {action} {count} times")
        for stage in (stage for stage, where in enumerate(schedule.placed) if where == rank):
            for i in range(schedule.micro_batches):
                found = [kind for kind in "FBIW" if Action(kind, stage, i) in counts]  # type: ignore[arg-type]
                if found not in (["F", "B"], ["F", "I", "W"]):
                    _refuse_kinds(rank, stage, i, found)


def _refuse_kinds(rank: int, stage: int, i: int, found: list[str]) -> None:
    if "B" in found and len(found) > 2:
        raise ValueError(f"rank {rank} goes backward twice with micro-batch {i} in stage {stage}: {', '.join(found)}")
    missing = "F" if "F" not in found else "W" if "I" in found else "I" if "W" in found else "B"
    raise ValueError(f"rank {rank} never does {missing}{stage}.{i}")


def _check_messages(schedule: Schedule) -> None:
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, own in enumerate(schedule.actions):
        seen: set[Action] = set()
        for action in own:
            kind, stage, i, of = action
            if kind == "send":
                made = [Action(each, stage, i) for each in (_BACKWARD if of == "B" else ("F",))]  # type: ignore[arg-type]
                if not seen & set(made):
                    raise ValueError(f"rank {rank} does {action} before it has the result")
                sent[rank, schedule.placed[target_of(of, stage)]].append(action)
            elif kind == "receive":
                received[schedule.placed[stage], rank].append(action)
            else:
                message = message_for(action, schedule)
                if message is not None and message not in seen:
                    raise ValueError(f"rank {rank} does {action} without {message} before it")
            seen.add(action)
    for pair in sent.keys() | received.keys():
        there, here = ([action[1:] for action in by_pair[pair]] for by_pair in (sent, received))
        for k in range(max(len(there), len(here))):
            if there[k : k + 1] != here[k : k + 1]:
                said = [
                    f"{each[k][2]}{each[k][0]}.{each[k][1]}" if k < len(each) else "nothing" for each in (there, here)
                ]
                raise ValueError(
                    f"message {k} from rank {pair[0]} to rank {pair[1]} is {said[0]} where it is sent and {said[1]} "
                    "where it is received"
                )


def _check_ends(schedule: Schedule, blocking: bool) -> None:
    """Carry it out without doing anything; where no rank can go on, say who waits for whom."""
    at, done = [0] * schedule.num_ranks, set[Action]()
    went = True
    while went:
        went = False
        for rank, own in enumerate(schedule.actions):
            while at[rank] < len(own) and _waits_for(schedule, rank, at, done, blocking) is None:
                action = own[at[rank]]
                if blocking and action.kind == "send":
                    at[schedule.placed[target_of(action.of, action.stage)]] += 1  # the receive that it met
                done.add(action._replace(kind="I") if action.kind == "B" else action)
                at[rank] += 1
                went = True
    waits = {
        rank: (own[at[rank]], _waits_for(schedule, rank, at, done, blocking))
        for rank, own in enumerate(schedule.actions)
        if at[rank] < len(own)
    }
    if not waits:
        return
    rank, path = next(iter(waits)), []
    while rank not in path:
        path.append(rank)
        other = waits[rank][1]
        if other is None or other not in waits:
            break
        rank = other
    circle = path[path.index(rank) :]
    if len(circle) == 1:
        action = waits[circle[0]][0]
        raise ValueError(f"rank {circle[0]} does {action} before {_missing(schedule, action)}, which it needs")
    said = ", ".join(f"rank {each} waits before {waits[each][0]} for rank {waits[each][1]}" for each in circle)
    raise ValueError(f"ranks wait for each other: {said}")


def _missing(schedule: Schedule, action: Action) -> Action:
    needed = needs(action, schedule.num_stages)
    assert needed is not None  # it waits
    has = set(schedule.actions[schedule.placed[needed.stage]])
    return needed if needed in has else needed._replace(kind="B")


def _waits_for(schedule: Schedule, rank: int, at: list[int], done: set[Action], blocking: bool) -> int | None:
    """The rank whose result or message `rank` waits for; None where it can go on."""
    action = schedule.actions[rank][at[rank]]
    if action.kind in ("send", "receive"):
        if not blocking:
            return None
        to = target_of(action.of, action.stage)
        other = schedule.placed[to if action.kind == "send" else action.stage]
        if action.kind == "receive":
            return other  # goes on when the sender meets it
        theirs = schedule.actions[other]
        is_met = at[other] < len(theirs) and theirs[at[other]] == action._replace(kind="receive")
        return None if is_met else other
    needed = needs(action, schedule.num_stages)
    return None if needed is None or needed in done else schedule.placed[needed.stage]


def _check_limit(schedule: Schedule, limit: float) -> None:
    for rank, own in enumerate(schedule.actions):
        held = 0
        for action in own:
            held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            if held > limit * schedule.chunks + 1e-9:
                raise ValueError(
                    f"rank {rank} holds {held / schedule.chunks:g} activations after {action}, "
                    f"above the limit of {limit:g}"
                )
