"""Targets that are opened by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, make_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, BertConfig, ViTConfig, ViTModel

from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.target.loading import load_pair, load_target, open_target

TEXT = {**TINY, "vocab_size": 272}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def multimodal_config(name: str) -> Any:
    """A tiny configuration of a multimodal family that has no class for text alone under its own name."""
    if name == "llava":
        vision = CONFIG_MAPPING["clip_vision_model"](**VISION, image_size=28, patch_size=14)
        text = CONFIG_MAPPING["llama"](**TEXT)
        return CONFIG_MAPPING["llava"](vision_config=vision, text_config=text, image_token_index=270)
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    return CONFIG_MAPPING["qwen2_vl"](
        text_config={**TEXT, "rope_parameters": rotary},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1},
        image_token_id=270, video_token_id=269, vision_start_token_id=268, vision_end_token_id=267,
    )  # fmt: skip


@pytest.fixture(params=["llava", "qwen2_vl"])
def saved(request, tmp_path: Path) -> str:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(multimodal_config(request.param)).eval()
    model.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def test_a_multimodal_target_is_opened_by_its_name(saved, tmp_path):
    target, _ = load_target(saved, "float32")
    assert target.get_output_embeddings() is not None
    draft = DFlashDraftModel.from_target(target, tokenizer=make_tokenizer(), num_hidden_layers=1, block_size=4)
    draft.save_pretrained(tmp_path / "draft")
    opened, paired, _ = load_pair(str(tmp_path / "draft"), saved, "float32")
    assert type(opened) is type(target)
    rows = [{"input_ids": torch.randint(1, 250, (20,)).tolist()} for _ in range(4)]
    args = DFlashTrainingArguments(tmp_path / "run", max_steps=1, report_to="none", per_device_train_batch_size=2)
    trainer = DFlashTrainer(model=paired, target=saved, args=args, train_dataset=rows)
    assert type(trainer.target) is type(target)
    trainer.train()


def test_a_name_that_is_no_language_model_is_one_short_line(tmp_path):
    ViTModel(ViTConfig(**VISION, image_size=28, patch_size=14)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is no language model that transformers can open") as raised:
        open_target(str(tmp_path))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_name_without_files_is_one_short_line(tmp_path):
    with pytest.raises(OSError, match="cannot be loaded"):
        load_target(str(tmp_path / "none"), "auto")
    BertConfig().save_pretrained(tmp_path / "config")
    with pytest.raises(OSError, match="cannot be loaded"):
        load_target(str(tmp_path / "config"), "auto")
