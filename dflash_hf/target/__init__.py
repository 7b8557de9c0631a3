"""The frozen target model: loading it, its hidden states, and their cache."""

from .hidden_states import target_hidden_states, target_logits_function, without_peft

__all__ = ["target_hidden_states", "target_logits_function", "without_peft"]
