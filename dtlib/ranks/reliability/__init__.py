"""Training that goes on when something breaks: noticing it, and starting again from what was saved."""
