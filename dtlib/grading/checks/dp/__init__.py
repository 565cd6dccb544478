"""The exercises of the chapter on data parallelism, one module or two a kind."""

from .accumulate import ACCUMULATE
from .exposed import EXPOSED
from .overlap import OVERLAP
from .paper import EXERCISES as ON_PAPER
from .weighted import WEIGHTED

EXERCISES = (*ON_PAPER, EXPOSED, WEIGHTED, ACCUMULATE, OVERLAP)
