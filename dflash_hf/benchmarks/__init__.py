"""Benchmarks of training steps, of decoding and of regeneration."""
