"""What the ranks of more than one stem stand on: `peers` for messages, `replicas` for wrappers of a module, `split` for
parameters of which each rank has a slice, `clipping` for the norm of a gradient that lies on several ranks."""
