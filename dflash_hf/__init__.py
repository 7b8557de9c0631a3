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


def register() -> None:
    """
    Make drafts known to transformers and give the two model files what only the installed package can do.

    Importing the package calls this function. A second call changes nothing.

    - `AutoConfig` and `AutoModel` load the model type `"dflash"`.
    - `DFlashConfig` and `DFlashDraftModel` read the checkpoints of other producers.
    - `draft.push_to_hub` writes the model card of a draft.
    - `save_pretrained` copies the two source files into the checkpoint, so that users of `trust_remote_code=True`
      need no installation.
    """
    # exist_ok: the import must still work with a version of transformers that has a model type `dflash` of its own.
    AutoConfig.register(DFlashConfig.model_type, DFlashConfig, exist_ok=True)
    AutoModel.register(DFlashConfig, DFlashDraftModel, exist_ok=True)
    DFlashConfig.register_format_reader(native_values)
    DFlashDraftModel.register_checkpoint_reader(read_checkpoint)
    DFlashDraftModel.register_hub_writer(push_draft)
    DFlashConfig.register_for_auto_class()
    DFlashDraftModel.register_for_auto_class("AutoModel")


register()

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
