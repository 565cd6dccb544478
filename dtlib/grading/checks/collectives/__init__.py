"""The exercises of the chapter on collectives, one module a kind."""

from .all_reduce import ALL_REDUCE
from .broadcast import BROADCAST
from .crossover import CROSSOVER
from .paper import ON_PAPER
from .reduce_scatter import REDUCE_SCATTER
from .vocabulary import VOCABULARY_EXERCISE

EXERCISES = (VOCABULARY_EXERCISE, ON_PAPER, CROSSOVER, BROADCAST, REDUCE_SCATTER, ALL_REDUCE)
