"""The mathematics of training on blocks: plan, attention, forward pass, losses and metrics."""
