"""The checks of the exercises on multi-token prediction."""
