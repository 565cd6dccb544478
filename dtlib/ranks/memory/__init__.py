"""The recipes of mixed precision, done: an AdamW that stores of each parameter what its recipe says, and nothing else.

    optimizer = memory.MixedAdamW(module.parameters(), "16-byte", lr=1e-3)

AdamW with a master copy in few lines stands on the chapter's page.

| recipe | weights | gradients | in the optimizer |
|---|---|---|---|
| ``12-byte`` | bf16 | bf16 | two moments in fp32 |
| ``16-byte`` | bf16 | bf16 | an fp32 copy of the weights, two moments |
| ``18-byte`` | bf16 | fp32 | an fp32 copy of the weights, two moments |
| ``20-byte`` | bf16 | bf16 | fp32 copies of weights and gradients, two moments |
| ``fp32`` | fp32 | fp32 | two moments |
| ``adam-8bit`` | bf16 | bf16 | an fp32 copy of the weights, two moments in 8 bits with their scales |
"""

from dtlib.ranks.shared.quantise import SIGNED, UNSIGNED, dequantised, quantised

from .mixed import MixedAdamW

__all__ = ["SIGNED", "UNSIGNED", "MixedAdamW", "dequantised", "quantised"]
