"""More than one token a pass: heads on a GPT, their losses one after another, and the heads as a draft.

The losses in turn stand in few lines on the chapter's page. What the room adds: modules behind each other as
DeepSeek-V3 has them, the last stage of a pipeline, a vocabulary that is cut over ranks, and decoding with a cache.
"""

from .cache import Cache
from .draft import Drafted, draft_and_check, greedy
from .heads import Heads, IndependentHeads, SequentialModules, ahead
from .stages import LastStage, cut, parallelize

__all__ = [
    "Cache",
    "Drafted",
    "Heads",
    "IndependentHeads",
    "LastStage",
    "SequentialModules",
    "ahead",
    "cut",
    "draft_and_check",
    "greedy",
    "parallelize",
]
