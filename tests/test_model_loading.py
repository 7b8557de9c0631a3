from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_draft, make_target
from hub_stand_in import Repository
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AutoModel,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import dflash_hf
from dflash_hf import DFlashConfig, DFlashDraftModel, UntiedDraftError
from dflash_hf.checkpoints.io import save_in_layout

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def gemma3_multimodal() -> Gemma3ForConditionalGeneration:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=TINY,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        boi_token_index=90,
        eoi_token_index=91,
        image_token_index=92,
    )
    return Gemma3ForConditionalGeneration(config)


TARGETS = {
    "llama, untied": lambda: make_target(),
    "llama, tied": lambda: make_target(tie_word_embeddings=True),
    "qwen3, tied": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=True)),
    "gemma3, scaled embedding": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**TINY)),
    "gemma3, multimodal": gemma3_multimodal,
}


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("sharded", [False, True])
def test_embedding_and_head_read_from_a_checkpoint_equal_the_live_ones(kind, sharded, tmp_path):
    """A tied target's file has no `lm_head.weight`; its head is not random. The embedding module keeps its scale."""
    target = TARGETS[kind]().eval()
    target.save_pretrained(tmp_path / "target", **({"max_shard_size": "20KB"} if sharded else {}))
    if sharded:
        assert (tmp_path / "target" / "model.safetensors.index.json").exists()
    draft = make_draft(target, num_target_layers=1)
    assert draft.get_input_embeddings() is target.get_input_embeddings()
    assert draft.get_output_embeddings().weight.data_ptr() == target.get_output_embeddings().weight.data_ptr()
    draft.save_pretrained(tmp_path / "draft")
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "draft", target=str(tmp_path / "target"))
    assert not loaded.is_tied
    anchors, hidden = torch.tensor([[3, 4]]), torch.randn(2, 32)
    assert torch.equal(loaded.embed_blocks(anchors), draft.embed_blocks(anchors))
    assert torch.equal(loaded.compute_logits(hidden), draft.compute_logits(hidden))
    assert loaded.is_tied


def test_block_inputs_are_the_anchor_then_masks(draft, target):
    embeds = draft.embed_blocks(torch.tensor([[5, 7]]))
    weight = target.get_input_embeddings().weight
    assert torch.equal(embeds[0], weight[[5, 96, 96, 96, 7, 96, 96, 96]])
    assert not embeds.requires_grad


def test_only_the_drafts_tensors_are_saved_and_come_back_bit_for_bit(draft, tmp_path):
    """The target's embedding and head would make a draft of several gigabytes, or tensors that share memory."""
    draft.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    assert set(saved) == {name for name, _ in draft.named_parameters()}
    assert all(torch.equal(saved[name], value) for name, value in draft.named_parameters())
    size = sum(value.numel() * value.element_size() for value in saved.values())
    assert (tmp_path / "model.safetensors").stat().st_size < size + 5000
    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is DFlashDraftModel
    assert {name for name, _ in loaded.named_parameters()} == set(saved)
    assert all(torch.equal(value, saved[name]) for name, value in loaded.named_parameters())
    assert not (tmp_path / "pytorch_model.bin").exists()


def test_from_pretrained_keeps_the_checkpoints_dtype_unless_told_otherwise(draft, tmp_path):
    draft.to(torch.bfloat16).save_pretrained(tmp_path)
    assert DFlashDraftModel.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_the_tie_names_the_target_in_the_configuration_and_is_lazy(tmp_path):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    draft = DFlashDraftModel.from_target(
        str(tmp_path / "target"), num_hidden_layers=1, num_target_layers=2, block_size=4, mask_token_id=96
    )
    draft.save_pretrained(tmp_path / "draft")
    loaded = AutoModel.from_pretrained(tmp_path / "draft")
    assert not loaded.is_tied
    assert torch.equal(loaded.get_input_embeddings().weight, target.get_input_embeddings().weight)
    assert not any(p.requires_grad for p in loaded.get_input_embeddings().parameters())


def test_untied_use_raises_what_transformers_expects(draft, tmp_path):
    draft.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path, target=False)
    for use in (loaded.get_input_embeddings, loaded.get_output_embeddings):
        with pytest.raises(NotImplementedError, match="not tied to a target"):
            use()
    with pytest.raises(UntiedDraftError):
        loaded.compute_logits(torch.randn(1, 32))
    loaded.enable_input_require_grads()  # transformers skips models whose embedding is not implemented


def test_a_moved_target_does_not_keep_the_draft_from_loading(draft, tmp_path):
    """Its repository may have moved or be gated; the weights load alone and are tied later."""
    draft.config.target_name_or_path = str(tmp_path / "gone")
    draft.save_pretrained(tmp_path / "draft")
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    with pytest.raises(UntiedDraftError, match=r"gone.*tie_target"):
        loaded.get_input_embeddings()
    loaded.tie_target(make_target())
    assert loaded.is_tied


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 48}, "width 32 against 48"),
        ({"vocab_size": 128}, "vocabulary 97 against 128"),
        ({"num_hidden_layers": 6}, "depth 4 against 6"),
    ],
)
def test_a_wrong_pair_is_refused_when_tying_with_both_names(draft, change, words, tmp_path):
    other = make_target(**change)
    other.save_pretrained(tmp_path / "other")
    draft.config.target_name_or_path = "org/right-target"
    for target in (other, str(tmp_path / "other")):
        with pytest.raises(ValueError, match=words) as error:
            draft.tie_target(target)
        assert "org/right-target" in str(error.value)
    assert "other" in str(error.value)


def test_a_target_without_a_head_is_refused(draft, target):
    with pytest.raises(ValueError, match="no language model head"):
        draft.tie_target(target.model)


def test_copying_and_moving_a_draft_leaves_the_live_target_alone(draft, target):
    twin = copy.deepcopy(draft)
    assert twin.get_input_embeddings() is target.get_input_embeddings()
    draft.to(torch.bfloat16)
    assert target.dtype == torch.float32
    assert twin.dtype == torch.float32
    ours = {id(parameter) for parameter in draft.parameters()}
    assert ours.isdisjoint(id(parameter) for parameter in target.parameters())


def test_a_live_target_is_not_copied_by_from_pretrained(draft, target, tmp_path):
    draft.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path, target=target)
    assert loaded.get_input_embeddings() is target.get_input_embeddings()


@pytest.mark.parametrize("damage", ["missing", "unexpected", "mismatched"])
def test_no_weight_is_made_up_and_none_is_dropped(draft, tmp_path, damage):
    draft.save_pretrained(tmp_path)
    tensors = dict(draft.named_parameters())
    if damage == "missing":
        del tensors["layers.1.mlp.up_proj.weight"]
    elif damage == "unexpected":
        tensors["markov_head.weight"] = torch.ones(3)
    else:
        tensors["fc.weight"] = torch.ones(32, 96)
    save_file(
        {name: value.detach() for name, value in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises((ValueError, RuntimeError), match=r"layers.1.mlp.up_proj|markov_head|fc.weight"):
        DFlashDraftModel.from_pretrained(tmp_path)


def test_loading_info_is_given_on_request(draft, tmp_path):
    draft.save_pretrained(tmp_path)
    loaded, info = DFlashDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(loaded, DFlashDraftModel)
    assert not info["missing_keys"]


@pytest.mark.parametrize("damage", ["truncated weights", "empty configuration", "no folder"])
def test_damaged_checkpoints_end_in_an_error_not_in_random_weights(draft, damage, tmp_path):
    draft.save_pretrained(tmp_path / "draft")
    if damage == "truncated weights":
        weights = tmp_path / "draft" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    if damage == "empty configuration":
        (tmp_path / "draft" / "config.json").write_text("")
    with pytest.raises((OSError, ValueError, RuntimeError)):
        DFlashDraftModel.from_pretrained(tmp_path / ("nowhere" if damage == "no folder" else "draft"))


ISOLATED = """
import sys, socket
class Refuse(socket.socket):
    def connect(self, *args): raise OSError("network is blocked")
socket.socket = Refuse
{setup}
import torch
from transformers import AutoModel, LlamaForCausalLM
target = LlamaForCausalLM.from_pretrained("target").eval()
draft = AutoModel.from_pretrained("draft"{arguments}).eval()
{check}
ids = torch.tensor([[5, 9, 11]])
kwargs = dict(max_new_tokens=9, do_sample=False, pad_token_id=0)
plain = target.generate(ids, **kwargs)
assert torch.equal(plain, target.generate(ids, assistant_model=draft, speculation_type="dflash", **kwargs))
assert torch.equal(draft.get_output_embeddings().weight, target.lm_head.weight)
draft.save_pretrained("again")
print("done")
"""


def run_isolated(folder: Path, **parts: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    return subprocess.run(
        [sys.executable, "-c", ISOLATED.format(**parts)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(params=["DFlash", "DFlash 2", "DSpark"])
def pair_on_disk(request, tmp_path) -> Path:
    kinds: dict[str, dict[str, Any]] = {
        "DFlash": {},
        "DFlash 2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "learned_mask_embedding": True},
        "DSpark": {"sample_from_anchor": True, "markov_rank": 4, "markov_head_type": "rnn", "draft_vocab_size": 40},
    }
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    draft = make_draft(target, **kinds[request.param])
    draft.config.target_name_or_path = "target"
    draft.save_pretrained(tmp_path / "draft")
    return tmp_path


@pytest.mark.spawns
def test_a_saved_draft_loads_without_the_package_through_remote_code(pair_on_disk):
    """Two source files travel with the checkpoint, and again with what is saved from it."""
    config = json.loads((pair_on_disk / "draft" / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "modeling_dflash.DFlashDraftModel"
    blocked = "\n".join(
        [
            "class Block:",
            "    def find_spec(self, name, *rest):",
            "        if name.split('.')[0] == 'dflash_hf': raise ImportError(name)",
            "sys.meta_path.insert(0, Block())",
        ]
    )
    result = run_isolated(
        pair_on_disk,
        setup=blocked,
        arguments=", trust_remote_code=True",
        check="assert 'dflash_hf' not in sys.modules and 'transformers_modules' in type(draft).__module__",
    )
    assert result.stdout.strip().endswith("done"), result.stderr[-2000:]
    assert (pair_on_disk / "again" / "modeling_dflash.py").exists()


@pytest.mark.spawns
def test_local_folders_need_no_network(pair_on_disk):
    """Loading, tying, training and saving work with sockets blocked."""
    result = run_isolated(
        pair_on_disk,
        setup="import dflash_hf",
        arguments="",
        check="assert type(draft).__module__ == 'dflash_hf.model.modeling_dflash'",
    )
    assert result.stdout.strip().endswith("done"), result.stderr[-2000:]


def test_the_hub_files_import_nothing_else_of_the_package():
    package = Path(DFlashConfig.__module__.replace(".", "/")).parent
    for name in ("configuration_dflash.py", "modeling_dflash.py"):
        source = (Path(__file__).parent.parent / package / name).read_text()
        imports = [line.split()[1] for line in source.splitlines() if line.startswith(("from ", "import "))]
        allowed = {
            "torch",
            "transformers",
            "safetensors",
            "huggingface_hub",
            *sys.stdlib_module_names,
        }
        assert {part.split(".")[0] for part in imports if not part.startswith(".")} <= allowed
        assert {part for part in imports if part.startswith(".")} <= {".configuration_dflash"}


def test_registering_twice_changes_nothing(draft, tmp_path):
    registered = (DFlashConfig._format_reader, DFlashDraftModel._checkpoint_reader, DFlashDraftModel._hub_writer)
    dflash_hf.register()
    assert (
        DFlashConfig._format_reader,
        DFlashDraftModel._checkpoint_reader,
        DFlashDraftModel._hub_writer,
    ) == registered
    assert None not in registered
    draft.save_pretrained(tmp_path)
    assert type(AutoModel.from_pretrained(tmp_path)) is DFlashDraftModel
    assert (tmp_path / "modeling_dflash.py").exists()


@pytest.mark.spawns
def test_a_package_that_imports_ours_and_is_run_with_python_m_registers(draft, tmp_path):
    draft.save_pretrained(tmp_path / "draft")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("import dflash_hf")
    code = "from transformers import AutoModel\nprint(type(AutoModel.from_pretrained('draft')).__module__)"
    (tmp_path / "theirs" / "run.py").write_text(code)
    result = subprocess.run(
        [sys.executable, "-m", "theirs.run"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "dflash_hf.model.modeling_dflash", result.stderr[-2000:]


@pytest.mark.parametrize("layout", ["native", "serving"])
@pytest.mark.parametrize("subfolder", [None, "drafts/best"])
def test_a_repository_gives_the_files_of_its_folder_and_none_below_it(hub, tmp_path, layout, subfolder):
    """A trainer that pushes its checkpoints leaves `checkpoint-N/` and `runs/` beside the draft."""
    draft = make_draft(make_target())
    save_in_layout(draft, tmp_path / "draft", layout, dtype=torch.float32)
    files = {path.name: path.read_bytes() for path in (tmp_path / "draft").iterdir() if path.is_file()}
    folder = f"{subfolder}/" if subfolder else ""
    content = {folder + name: data for name, data in files.items()}
    for below in ("checkpoint-10", "checkpoint-20/global_step20", "runs", "other"):
        content |= {f"{folder}{below}/{name}": b"unread" for name in (*files, "optimizer.pt", "x.safetensors")}
    if subfolder:
        content |= dict.fromkeys(("model.safetensors", "best/model.safetensors"), b"unread")
    hub.repositories["writer/draft"] = Repository()
    hub.repositories["writer/draft"].commit(content, "a draft and what a training left")
    hub.requests.clear()
    place = {"subfolder": subfolder} if subfolder else {}
    loaded = DFlashDraftModel.from_pretrained("writer/draft", target=False, **place)
    for name, tensor in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    fetched = {path.split("/resolve/")[1].split("/", 1)[1] for _, path, _ in hub.requests if "/resolve/" in path}
    assert f"{folder}model.safetensors" in fetched
    allowed = {*(folder + name for name in files), f"{folder}adapter_config.json", f"{folder}config.json"}
    assert {name for name in fetched if "checkpoint-" in name or "runs/" in name or "other/" in name} == set()
    assert not {name for name in fetched - allowed if name.endswith((".safetensors", ".pt", ".bin"))}
