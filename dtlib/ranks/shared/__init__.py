"""What the ranks of more than one stem stand on: `peers` for messages, `replicas` for wrappers of a module."""
