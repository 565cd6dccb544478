"""What the ranks of more than one stem stand on.

- messages: `peers`, `exchange`, `packing` and `quantise`; `alike` refuses calls that differ;
- parameters: `replicas` (who holds which), `split` and `parts` (slices), `held` (what counts here), `clipping`;
- checkpoints: `checkpoint`, with its `planners` and `files`, and `background`.
"""
