"""The network: what crossed it, and how to have a slower one."""

from .counted import Wire, wire
from .pace import paced

__all__ = ["Wire", "paced", "wire"]
