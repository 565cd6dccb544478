"""The exercises of the chapter on ZeRO, one module or more each."""

from .clip import CLIP
from .gradients import GRADIENTS
from .optimizer import OPTIMIZER
from .split import SPLIT
from .stack import STACK
from .states import STATES
from .traffic import TRAFFIC

EXERCISES = (STATES, TRAFFIC, SPLIT, OPTIMIZER, GRADIENTS, STACK, CLIP)
