"""The mathematics of distributed training: derived in `theory`, done in `ranks`, measured in `lab`."""
