"""The exercises of the chapter on memory, one module or more each."""

from .backward import BACKWARD
from .encode import ENCODE
from .master import MASTER
from .parameters import PARAMETERS
from .states import STATES
from .utilisation import UTILISATION

EXERCISES = (PARAMETERS, STATES, UTILISATION, ENCODE, MASTER, BACKWARD)
