"""Training in which ranks do not wait for each other at each step: what each does, and when they meet.

| what | who meets | what is sent |
|---|---|---|
| `serve`, `work` | a worker and a server, at each gradient | D up, D down |
| `LocalSGD` | all, every `local_steps` steps | one all-reduce of D, or what an exchange makes of it |
| `Gossip` | a rank and one or two others, at each step | D to each |

The loops of a server and of a worker, and local steps with an outer optimizer, stand on the chapter's page; here a
server bounds staleness, shares the weights with others, and lets workers leave, and local steps have weights, parts,
levels, compressed messages and a state to save.
"""

from .gossip import Gossip
from .local import LocalSGD
from .server import HEADER_BYTES, Push, serve, work

__all__ = ["HEADER_BYTES", "Gossip", "LocalSGD", "Push", "serve", "work"]
