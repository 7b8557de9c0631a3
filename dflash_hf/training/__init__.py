"""The trainer, its arguments, optimizer, checks and resumption."""
