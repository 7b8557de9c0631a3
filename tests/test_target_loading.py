"""Targets that are opened by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, make_draft, make_target, make_tokenizer
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    BartConfig,
    BertConfig,
    PreTrainedConfig,
    T5Config,
    ViTConfig,
)

from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments, speculative_generate
from dflash_hf.target.loading import load_pair, load_target, open_target, read_target

TEXT = {**TINY, "vocab_size": 272}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def multimodal_config(name: str) -> Any:
    """A tiny configuration of a multimodal family that has no class for text alone under its own name."""
    if name == "qwen2_audio":
        audio = {
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_layers": 1,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 32,
        }
        return CONFIG_MAPPING[name](
            text_config={**TEXT, "model_type": "qwen2"}, audio_token_index=270,
            audio_config={**audio, "num_mel_bins": 16, "max_source_positions": 20},
        )  # fmt: skip
    if name == "voxtral":
        audio = {**VISION, "num_mel_bins": 16, "max_source_positions": 20, "intermediate_size": 128}
        text = {**TEXT, "model_type": "llama"}
        return CONFIG_MAPPING[name](text_config=text, audio_config=audio, audio_token_id=270)
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


@pytest.fixture(params=["llava", "qwen2_vl", "qwen2_audio", "voxtral"])
def saved(request, tmp_path: Path) -> str:
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(multimodal_config(request.param)).eval()
    model.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def test_a_multimodal_target_is_opened_by_its_name(saved, tmp_path):
    target, _ = load_target(saved, "float32")
    assert target.get_output_embeddings() is not None
    assert read_target(saved).num_embeddings == 272
    draft = DFlashDraftModel.from_target(saved, num_hidden_layers=1, block_size=4)
    draft.save_pretrained(tmp_path / "draft")
    opened, paired, _ = load_pair(str(tmp_path / "draft"), saved, "float32")
    assert type(opened) is type(target)
    rows = [{"input_ids": torch.randint(1, 250, (20,)).tolist()} for _ in range(4)]
    args = DFlashTrainingArguments(tmp_path / "run", max_steps=1, report_to="none", per_device_train_batch_size=2)
    trainer = DFlashTrainer(model=paired, target=saved, args=args, train_dataset=rows)
    assert type(trainer.target) is type(target)
    trainer.train()
    prompt, greedy = torch.tensor([[4, 8, 15]]), {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 8}
    drafted = speculative_generate(opened, paired, prompt, **greedy)
    assert torch.equal(drafted.sequences, opened.generate(prompt, **greedy))


WRITERS: dict[str, tuple[Any, str]] = {
    "vision model": (ViTConfig(**VISION), r"is no language model that transformers can open \(ViTConfig\)"),
    "T5": (T5Config(d_model=32, num_layers=1, num_heads=4), r"is no language model .* \(T5Config\)"),
    "encoder-decoder": (BartConfig(d_model=32), "is an encoder-decoder model"),
    "encoder": (BertConfig(**VISION, vocab_size=272), "is an encoder, whose tokens see the later ones"),
    "older encoder": (CONFIG_MAPPING["roformer"](**VISION, vocab_size=272), "is an encoder, whose"),
    "draft": (make_draft(make_target()).config, r"is no language model .* \(DFlashConfig\)"),
    "diffusion model": ({"_class_name": "AutoencoderKL", "in_channels": 3}, "cannot be loaded: Unrecognized model"),
    "diffusion pipeline": (None, "cannot be loaded: Unrecognized model"),
    "list": ([1, 2], "cannot be loaded: "),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_name_that_is_no_language_model_is_one_short_line(name, tmp_path):
    config, expected = WRITERS[name]
    if isinstance(config, PreTrainedConfig):
        config.save_pretrained(tmp_path)
        auto_class = AutoModelForCausalLM if "encoder" in name.split() else AutoModel
        if name != "draft":
            auto_class.from_config(config).save_pretrained(tmp_path)
    elif config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    else:
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    make_tokenizer().save_pretrained(tmp_path)
    for read in (open_target, read_target, lambda folder: load_target(folder, "auto")):
        with pytest.raises((ValueError, OSError), match=expected) as raised:
            read(str(tmp_path))
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 500


def test_an_encoder_is_refused_when_the_trainer_is_made(tmp_path):
    target = AutoModelForCausalLM.from_config(BertConfig(**{**VISION, "num_hidden_layers": 2}, vocab_size=97))
    draft = make_draft(make_target(num_hidden_layers=2), num_target_layers=1)
    args = DFlashTrainingArguments(tmp_path, max_steps=1, report_to="none")
    with pytest.raises(ValueError, match="BertLMHeadModel is an encoder"):
        DFlashTrainer(draft, target, args, train_dataset=[{"input_ids": [1, 2, 3, 4]}])


def test_a_name_without_files_is_one_short_line(tmp_path):
    with pytest.raises(OSError, match="cannot be loaded"):
        load_target(str(tmp_path / "none"), "auto")
    BertConfig().save_pretrained(tmp_path / "config")
    with pytest.raises(OSError, match="cannot be loaded"):
        load_target(str(tmp_path / "config"), "auto")
