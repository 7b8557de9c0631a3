"""What a draft does with the embedding and the head of its target, which it uses but does not own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from conftest import TINY, make_draft, make_target
from decoding_pairs import FAMILIES, NOT_CONTINUING, STATE_SPACE, each_family, make_family, make_multimodal
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BlipConfig,
    BlipForConditionalGeneration,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaForCausalLM,
)

from dflash_hf import DFlashDraftModel, UntiedDraftError, speculative_generate
from dflash_hf.blocks.head_losses import chunked_head_losses


class PackedLinear(nn.Module):
    """A head as quantisation libraries write it: integers under another name, scales in bf16, and no `weight`."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scales = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (weight / scales).round().to(torch.int8))
        self.register_buffer("scales", scales.to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self.scales.dtype
        return x @ (self.qweight.to(self.scales.dtype) * self.scales).t()


class Wrapper(nn.Module):
    """A module around another, as adapters and offloading make them. It has neither `weight` nor sizes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class PackedEmbedding(nn.Module):
    """An embedding without `weight` that tells its sizes."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.register_buffer("table", embedding.weight.detach().clone())

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.table[token_ids]


def with_head(make: Callable[[nn.Linear], nn.Module]) -> LlamaForCausalLM:
    target = make_target()
    target.lm_head = make(target.lm_head)
    return target


def with_embedding(make: Callable[[nn.Embedding], nn.Module]) -> LlamaForCausalLM:
    target = make_target()
    target.model.embed_tokens = make(target.model.embed_tokens)
    return target


def adapted(**kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    return get_peft_model(make_target(), LoraConfig(r=2, target_modules=["q_proj"], **kwargs)).eval()


UNUSUAL = {
    "packed head": lambda: with_head(PackedLinear),
    "packed head in fp32": lambda: with_head(lambda head: PackedLinear(head, torch.float32)),
    "wrapped head": lambda: with_head(Wrapper),
    "packed embedding": lambda: with_embedding(PackedEmbedding),
    "wrapped embedding": lambda: with_embedding(Wrapper),
    "head trained whole by peft": lambda: adapted(modules_to_save=["lm_head"]),
    "embedding trained whole by peft": lambda: adapted(modules_to_save=["embed_tokens"]),
    "head and embedding with LoRA": lambda: get_peft_model(
        make_target(), LoraConfig(r=2, target_modules=["lm_head", "embed_tokens"])
    ).eval(),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_head_or_embedding_without_a_weight_is_called_like_any_other(kind, tmp_path):
    target = UNUSUAL[kind]()
    draft = make_draft(target)
    assert draft.config.vocab_size == 97
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    ids, states = torch.tensor([[3, 4]]), torch.randn(2, 32)
    embedded = draft.embed_blocks(ids)
    assert torch.equal(embedded[0, [0, 4]], embedding(ids)[0])
    dtype = torch.bfloat16 if kind == "packed head" else torch.float32
    assert torch.equal(draft.compute_logits(states), head(states.to(dtype)))
    labels = torch.tensor([5, 7])
    losses = chunked_head_losses(head, states, labels).loss
    expected = nn.functional.cross_entropy(head(states.to(dtype)).float(), labels, reduction="none")
    torch.testing.assert_close(losses, expected)

    draft.check_target(target)
    draft.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path, target=target)
    assert torch.equal(loaded.compute_logits(states), draft.compute_logits(states))


@pytest.mark.parametrize("kind", ["packed head in fp32", "wrapped head", "packed embedding", "wrapped embedding"])
def test_a_target_without_plain_weights_decodes_as_it_would_alone(kind):
    target = UNUSUAL[kind]()
    prompt = torch.arange(1, 9)[None]
    plain = target.generate(prompt, do_sample=False, max_new_tokens=12, pad_token_id=0)
    output = speculative_generate(target, make_draft(target), input_ids=prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(output.sequences, plain)


def test_a_wrapped_head_of_another_width_is_refused_by_the_sizes_that_it_tells():
    target, other = with_head(Wrapper), make_target(hidden_size=48, num_attention_heads=4)
    with pytest.raises(ValueError, match="width 32 against 48"):
        make_draft(target).tie_target(other)
    packed = make_target(hidden_size=48, num_attention_heads=4)
    packed.lm_head = PackedLinear(packed.lm_head)
    with pytest.raises(ValueError, match="width 32 against 48"):
        make_draft(target).tie_target(packed)


@pytest.mark.parametrize("kind", ["plain", "tied", "wrapped head", "head and embedding with LoRA", "bf16"])
def test_gradients_of_a_live_target_stay_empty(kind):
    """`draft.compute_logits(h).sum().backward()` outside the trainer, where the target is not frozen."""
    target = {
        "plain": make_target,
        "tied": lambda: make_target(tie_word_embeddings=True),
        "bf16": lambda: make_target().to(torch.bfloat16),
        **UNUSUAL,
    }[kind]()
    draft = make_draft(target)
    trainable = {name for name, parameter in target.named_parameters() if parameter.requires_grad}
    assert trainable
    states = torch.randn(3, 32, requires_grad=True)
    logits = draft.compute_logits(states)
    embedded = draft.embed_blocks(torch.tensor([[3]]))
    (logits.float().sum() + (embedded * torch.ones((), requires_grad=True)).float().sum()).backward()
    assert states.grad is not None
    assert states.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in target.parameters())
    assert {name for name, parameter in target.named_parameters() if parameter.requires_grad} == trainable


def test_logits_of_a_live_target_make_no_copy_of_its_head():
    target = make_target()
    draft = make_draft(target)
    head = draft.get_output_embeddings()
    assert head is target.get_output_embeddings()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        draft.compute_logits(torch.randn(3, 32, requires_grad=True)).sum().backward()
    of_the_head = [t for t in saved if t.numel() == head.weight.numel()]
    assert of_the_head
    assert all(t.data_ptr() == head.weight.data_ptr() for t in of_the_head)


def tensors_of(target: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in target.state_dict().items()}


HARMLESS: dict[str, Callable[[DFlashDraftModel], object]] = {
    "half": lambda draft: draft.half(),
    "to": lambda draft: draft.to(torch.bfloat16),
    "to meta": lambda draft: draft.to("meta"),
    "apply": lambda draft: draft.apply(lambda module: [p.data.zero_() for p in module.parameters(recurse=False)]),
    "requires_grad_": lambda draft: draft.requires_grad_(False),
    "train": lambda draft: draft.train(),
    "zero_grad": lambda draft: draft.zero_grad(),
    "tie_weights": lambda draft: draft.tie_weights(),
    "init_weights": lambda draft: draft.init_weights(),
    "an adapter of peft": lambda draft: get_peft_model(draft, LoraConfig(r=2, target_modules=["q_proj", "up_proj"])),
    "enable_input_require_grads": lambda draft: draft.enable_input_require_grads(),
    "gradient_checkpointing_enable": lambda draft: draft.gradient_checkpointing_enable(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda draft: pickle.loads(pickle.dumps(draft)),
    "state_dict": lambda draft: draft.load_state_dict({k: torch.zeros_like(v) for k, v in draft.state_dict().items()}),
    "share_memory": lambda draft: draft.share_memory(),
}


@pytest.mark.parametrize("call", HARMLESS)
def test_methods_of_a_draft_leave_its_live_target_alone(call):
    target = make_target()
    draft = make_draft(target)
    before = tensors_of(target)
    target.get_input_embeddings().weight.grad = torch.ones_like(target.get_input_embeddings().weight)
    HARMLESS[call](draft)
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    assert all(parameter.requires_grad for parameter in target.parameters())
    assert {parameter.dtype for parameter in target.parameters()} == {torch.float32}
    assert not any(module.training or module._forward_hooks for module in target.modules())
    assert not any(value.is_shared() for value in target.parameters())
    assert target.get_input_embeddings().weight.grad is not None


@pytest.mark.parametrize(
    "call",
    [
        lambda draft: draft.resize_token_embeddings(120),
        lambda draft: draft.resize_token_embeddings(new_num_tokens=120, mean_resizing=False),
        lambda draft: draft.set_input_embeddings(nn.Embedding(97, 32)),
        lambda draft: draft.set_output_embeddings(nn.Linear(32, 97)),
    ],
)
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_draft_does_not_resize_or_replace_modules_of_its_target(call, is_tied):
    target = make_target()
    draft = make_draft(target)
    if not is_tied:
        draft = DFlashDraftModel(draft.config)
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    with pytest.raises(ValueError, match="target"):
        call(draft)
    assert target.get_input_embeddings() is embedding
    assert target.get_output_embeddings() is head
    assert len(embedding.weight) == target.config.vocab_size == 97


def test_input_gradients_reach_adapters_of_a_frozen_draft():
    draft = make_draft(make_target()).requires_grad_(False).train()
    draft.enable_input_require_grads()
    draft.enable_input_require_grads()  # replaces its hook
    context, inputs = torch.randn(1, 3, 64), torch.randn(1, 4, 32)
    assert draft(inputs, context).last_hidden_state.requires_grad
    draft.disable_input_require_grads()
    assert not draft(inputs, context).last_hidden_state.requires_grad


def test_a_pickled_draft_holds_nothing_of_its_target():
    target = make_target(vocab_size=9700)
    draft = make_draft(target)
    data = pickle.dumps(draft)
    assert len(data) < 4 * target.get_input_embeddings().weight.numel()
    loaded = pickle.loads(data)
    assert not loaded.is_tied
    assert draft.is_tied
    assert copy.deepcopy(draft).is_tied
    loaded.tie_target(target)
    states = torch.randn(2, 32)
    assert torch.equal(loaded.compute_logits(states), draft.compute_logits(states))


@pytest.mark.parametrize(("made_for", "rows"), [(97, 128), (128, 97)])
@pytest.mark.parametrize("is_live", [True, False])
def test_a_target_resized_after_its_draft_was_made_needs_vocab_size_alone(made_for, rows, is_live, tmp_path):
    target = make_target(vocab_size=made_for)
    draft = make_draft(target, mask_token_id=90)
    draft.save_pretrained(tmp_path / "draft")
    target.resize_token_embeddings(rows, mean_resizing=False)
    target.save_pretrained(tmp_path / "target")
    given = target if is_live else str(tmp_path / "target")
    message = rf"vocabulary {made_for} against {rows} embedding rows.*load the draft with vocab_size={rows}"
    with pytest.raises(ValueError, match=message):
        DFlashDraftModel.from_pretrained(tmp_path / "draft", target=given).get_output_embeddings()
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "draft", target=given, vocab_size=rows)
    states = torch.randn(2, 32)
    assert loaded.compute_logits(states).shape == (2, rows)
    assert torch.equal(loaded.compute_logits(states)[:, :97], draft.compute_logits(states)[:, :97])


def test_a_target_resized_below_the_mask_token_names_both(tmp_path):
    draft = make_draft(make_target(vocab_size=128), mask_token_id=120)
    draft.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mask token 120 outside 97 embedding rows"):
        DFlashDraftModel.from_pretrained(tmp_path, target=make_target())
    with pytest.raises(ValueError, match="mask_token_id=120 must be below vocab_size=97"):
        DFlashDraftModel.from_pretrained(tmp_path, target=make_target(), vocab_size=97)


def test_a_target_of_several_residual_streams_is_refused_when_tied():
    target = make_target()
    draft = make_draft(target)
    target.config.hc_mult = 4
    with pytest.raises(ValueError, match=r"several residual streams \(hc_mult=4\)"):
        draft.tie_target(target)


def test_states_with_an_axis_of_streams_are_refused(draft):
    with pytest.raises(ValueError, match=r"\[1, 3, 4, 64\] instead of \[batch, length, width\]"):
        draft(torch.randn(1, 4, 32), torch.randn(1, 3, 4, 64))


def make_gemma4(**overrides: object) -> Gemma4ForCausalLM:
    """A random Gemma 4, whose full layers have other heads than its sliding ones."""
    torch.manual_seed(0)
    sizes = {"head_dim": 8, "global_head_dim": 16, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 4}
    return Gemma4ForCausalLM(Gemma4TextConfig(**{**TINY, "num_hidden_layers": 6, **sizes, **overrides})).eval()


GEMMA_4 = {
    "Gemma 4": {},
    "Gemma 4, no embedding by layer": {"hidden_size_per_layer_input": 0},
    "Gemma 4, experts": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40,
    },
    "Gemma 4, keys as values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "Gemma 4, shared keys": {
        "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["multimodal", *GEMMA_4, *each_family(*FAMILIES, *STATE_SPACE, *NOT_CONTINUING)])
def test_embedding_and_head_of_any_family_are_read_from_its_folder(name, tmp_path):
    """Their modules come from the target built without layers, whose other weights may then have other shapes."""
    if name == "multimodal":
        target = make_multimodal()
    else:
        target = make_gemma4(**GEMMA_4[name]) if name in GEMMA_4 else make_family(name)
    draft = make_draft(target)
    target.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "draft", target=str(tmp_path / "target"))
    states, ids = torch.randn(2, 32), torch.tensor([[3, 4]])
    assert torch.equal(loaded.compute_logits(states), draft.compute_logits(states))
    assert torch.equal(loaded.embed_blocks(ids), draft.embed_blocks(ids))


@pytest.mark.parametrize("name", GEMMA_4)
def test_gemma_4_decodes_as_it_would_alone(name):
    target, prompt = make_gemma4(**GEMMA_4[name]), torch.arange(1, 9)[None]
    plain = target.generate(prompt, do_sample=False, max_new_tokens=12, pad_token_id=0)
    output = speculative_generate(target, make_draft(target), input_ids=prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(output.sequences, plain)


@pytest.mark.parametrize("damage", ["missing", "other shape"])
@pytest.mark.parametrize("tensor", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_target_whose_files_lack_its_head_or_embedding_is_refused(damage, tensor, tmp_path):
    """transformers would fill them with random values."""
    target = make_target()
    target.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if damage == "missing":
        del tensors[tensor]
    else:
        tensors[tensor] = torch.ones(97, 16)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    draft = make_draft(target)
    with pytest.raises(UntiedDraftError, match=f"do not hold {tensor}"):
        draft.tie_target(str(tmp_path))


def test_a_target_that_transformers_opens_without_a_head_is_refused_by_name(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BlipConfig(text_config={**sizes, "vocab_size": 97}, vision_config={**sizes, "image_size": 32})
    BlipForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UntiedDraftError, match="has no language model head"):
        make_draft(make_target()).tie_target(str(tmp_path))
