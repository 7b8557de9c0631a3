"""Completions by the target for a set of prompts, written as data-set shards."""
