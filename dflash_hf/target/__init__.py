"""The frozen target model: loading it, its hidden states, and their cache."""

from typing import TYPE_CHECKING

from .. import lazy_exports

__all__ = ["target_hidden_states", "target_logits_function", "unwrap_peft"]

if TYPE_CHECKING:
    from .hidden_states import target_hidden_states, target_logits_function, unwrap_peft
else:
    __getattr__ = lazy_exports(
        __name__, {".hidden_states": ["target_hidden_states", "target_logits_function", "unwrap_peft"]}
    )
