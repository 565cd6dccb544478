"""Models as hubs publish them: the sizes that the ``config.json`` beside a model's weights describes.

A key that changes a number and is not understood is a ``ValueError`` that names it.
"""

from .config import from_config

__all__ = ["from_config"]
