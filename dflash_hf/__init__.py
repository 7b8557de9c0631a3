"""DFlash for Hugging Face: block-parallel draft models that make a language model answer several times sooner."""

from transformers import AutoConfig, AutoModel

from .blocks.plan import DFlashBatchPlan, build_dflash_batch_plan
from .checkpoints.io import convert_checkpoint, read_checkpoint, save_in_layout
from .checkpoints.read_layouts import native_values
from .decoding.generate import DFlashGenerateOutput, dflash_decoding, speculative_generate
from .decoding.statistics import DecodingStatistics
from .hub.model_card import DraftCard, write_model_card
from .hub.push import publish_draft, push_draft
from .model.configuration_dflash import DFlashConfig
from .model.modeling_dflash import DFlashBody, DFlashDraftModel, UntiedDraftError
from .training.arguments import DFlashTrainingArguments
from .training.trainer import DFlashTrainer

# exist_ok: the day transformers has a `dflash` of its own, this import still works.
AutoConfig.register(DFlashConfig.model_type, DFlashConfig, exist_ok=True)
AutoModel.register(DFlashConfig, DFlashDraftModel, exist_ok=True)
# Drafts of all other producers load, too.
DFlashConfig._translate = native_values
DFlashDraftModel._read_checkpoint = read_checkpoint
# What is pushed has a card of its own.
DFlashDraftModel._push = push_draft
# A saved draft carries its two source files, so that `trust_remote_code` users need no installation.
DFlashConfig.register_for_auto_class()
DFlashDraftModel.register_for_auto_class("AutoModel")

__version__ = "0.1.0"

__all__ = [
    "DFlashBatchPlan",
    "DFlashBody",
    "DFlashConfig",
    "DFlashDraftModel",
    "DFlashGenerateOutput",
    "DFlashTrainer",
    "DFlashTrainingArguments",
    "DecodingStatistics",
    "DraftCard",
    "UntiedDraftError",
    "build_dflash_batch_plan",
    "convert_checkpoint",
    "dflash_decoding",
    "publish_draft",
    "save_in_layout",
    "speculative_generate",
    "write_model_card",
]
