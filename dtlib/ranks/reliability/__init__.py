"""Training that goes on when something breaks: noticing it, and starting again from what was saved.

A loop that saves and goes on stands in few lines on the chapter's page. With any wrapper:

    sampler = reliability.Sampler(num_samples, batch=64, seed=0)
    ...
    extra = reliability.capture(step=step, scheduler=scheduler, sampler=sampler)
    zero.save(model, folder, extra=extra, keep=3)

and in fresh processes, as the last thing before training:

    step = reliability.restore(zero.load(model, folder), scheduler=scheduler, sampler=sampler)["step"]

| what is saved | by | without it |
|---|---|---|
| weights, an optimizer's states and settings | `save` of `dp`, `zero`, `threed` | it begins anew, or jumps |
| step, scheduler, scaler | `capture` | the rate of step 0, a scale that overflows |
| the sampler's position | `capture` | samples come twice, others never |
| random states of each rank | `capture` | other masks of dropout, other augmentation |
| what each rank has left out of its messages | `capture(own=...)` | a part of the gradient is lost |

`Background` writes while training goes on; `last_saved` says whether there is something to go on from.

With as many ranks as before the next steps are equal to the bit, where torch's kernels are deterministic. With another
number the samples are the same, in the same order, and sums come in another order; dice are then cast anew.

| what is noticed | by |
|---|---|
| who never came to a collective, or is in another one | `flight` |
| replicas that are not alike any more | `Replicas` |
| a bit of weights or states that changed between two steps | `AtRest` |
| gradients that are not finite, a loss that jumps | `not_finite`, `Spikes` |
| whose card, link or input holds all others up | `straggler` |
"""

from dtlib.ranks.shared.background import Background
from dtlib.ranks.shared.checkpoint import NotSaved, last_saved

from . import flight
from .guard import Altered, AtRest, Drifted, Replicas, Spikes, not_finite
from .sampler import Sampler
from .slow import Straggler, straggler
from .state import capture, restore

__all__ = [
    "Altered",
    "AtRest",
    "Background",
    "Drifted",
    "NotSaved",
    "Replicas",
    "Sampler",
    "Spikes",
    "Straggler",
    "capture",
    "flight",
    "last_saved",
    "not_finite",
    "restore",
    "straggler",
]
