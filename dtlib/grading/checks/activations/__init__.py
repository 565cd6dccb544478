"""The exercises of the chapter on activations, one module each; `kept` is what those on real passes share."""

from .budget import BUDGET
from .chain import CHAIN
from .checkpoint import CHECKPOINT
from .cuts import CUTS
from .gated import GATED
from .layer import LAYER

EXERCISES = (LAYER, CHAIN, CUTS, GATED, CHECKPOINT, BUDGET)
