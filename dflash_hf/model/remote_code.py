"""Drafts whose class comes from the source files beside their weights."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from .configuration_dflash import DFlashConfig
from .modeling_dflash import DFlashDraftModel, TargetModules

# Fields of a configuration that a draft completes when it is tied.
FIELDS_SET_BY_TIE = (
    "target_name_or_path",
    "target_num_hidden_layers",
    "input_embedding_scale",
    "selector_embedding_scale",
    "target_tensor_checksums",
)

_local_drafts: WeakKeyDictionary[nn.Module, DFlashDraftModel] = WeakKeyDictionary()
_known_ties: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # the tie that the local draft has


def local_draft(draft: Any, argument: str = "draft") -> DFlashDraftModel:
    """
    Return a draft as an object of this package.

    A draft that was loaded with `trust_remote_code=True` before this package was imported has the class of the source
    files in its folder. It is replaced by an object of this package that shares its weights and its target.

    Args:
        draft ([`DFlashDraftModel`]): the draft, of this package or of its own source files.
        argument (`str`, defaults to `"draft"`): its name in error messages.

    Returns:
        [`DFlashDraftModel`]: the same object for the same draft.

    Raises:
        TypeError: The object is no draft.
    """
    if isinstance(draft, DFlashDraftModel):
        return draft
    kind = f"{type(draft).__module__}.{type(draft).__name__}"
    is_draft = isinstance(draft, PreTrainedModel) and draft.config.model_type == DFlashConfig.model_type
    if not is_draft or "DFlashDraftModel" not in {parent.__name__ for parent in type(draft).__mro__}:
        reason = " Another package has registered its own class for the model type 'dflash'." if is_draft else ""
        raise TypeError(
            f"{argument} has the type {kind} and must be a DFlashDraftModel.{reason} Load the draft with "
            "DFlashDraftModel.from_pretrained."
        )
    if draft not in _local_drafts:
        with torch.device("meta"):
            local = DFlashDraftModel(DFlashConfig.of_this_class(draft.config))
        for (_, ours), (_, theirs) in zip(local.named_parameters(), draft.named_parameters(), strict=True):
            ours.requires_grad_(theirs.requires_grad)
        # keep_vars shares the parameters themselves, so that a later `draft.to(...)` moves both objects.
        local.load_state_dict(draft.state_dict(keep_vars=True), assign=True)
        local._set_target_source(draft._target_source, draft._target_hub_kwargs)
        _local_drafts[draft], _known_ties[draft] = local, None
    local, modules = _local_drafts[draft], draft._target_modules
    if modules is not _known_ties[draft]:  # the draft was tied since the last call
        shared = TargetModules(modules.embedding, modules.head, modules.name, follow=modules.follow)
        object.__setattr__(local, "_target_modules", shared)  # nn.Module would make the target a submodule
        for name in FIELDS_SET_BY_TIE:
            setattr(local.config, name, getattr(draft.config, name, None))
        _known_ties[draft] = modules
    return local.train(draft.training)
