"""The exercises of the chapter on data parallelism, one module or more each."""

from .accumulate import ACCUMULATE
from .bill import BILL
from .exposed import EXPOSED
from .overlap import OVERLAP
from .paper import STEP
from .weighted import WEIGHTED

EXERCISES = (STEP, BILL, EXPOSED, WEIGHTED, ACCUMULATE, OVERLAP)
