"""Batch size on real ranks: the noise scale, measured while gradients are averaged.

    noise = batch.NoiseScale()
    model = dp.BucketedDataParallel(model, exchange=noise)

The chapter's page takes the two squares in a few lines from gradients that it has gathered; here they are taken bucket
by bucket on the way, around an exchange that leaves the exact mean (of another the error counts as noise), layer by
layer if wanted, with counts that differ between ranks, and saved. `MicroBatches` does it on one rank that accumulates,
in micro-batches of equal size.
"""

from .noise import MicroBatches, Noise, NoiseScale

__all__ = ["MicroBatches", "Noise", "NoiseScale"]
