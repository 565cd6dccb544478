"""From a folder of submissions to what counts of each: found, opened, read and parsed once, as text and no more."""

from .submissions import Submission, find

__all__ = ["Submission", "find"]
