"""Tiny random models and tokenizers, built in memory."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import functools
import gc
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_stand_in import HubStandIn
from hypothesis import HealthCheck, settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, ProcessorMixin

from dflash_hf import DFlashDraftModel
from dflash_hf.cli import main
from dflash_hf.evaluation.figures import PICTURES

torch.set_num_threads(1)  # tiny models lose more to threads than they gain
# Plain `pytest` tries the same few inputs at every run. `--hypothesis-profile long` tries new ones.
settings.register_profile("fast", max_examples=15, derandomize=True, deadline=None, database=None)
settings.register_profile(
    "long",
    max_examples=int(os.environ.get("PROPERTY_EXAMPLES", "150")),
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("fast")
# A shell starts its background jobs with SIGINT ignored, which their children inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave imported objects out of garbage collections, of which accelerate starts one after every training."""
    gc.collect()
    gc.freeze()


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def make_target(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A random Llama with large weights, so that its greedy text is varied and has no near-ties."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**TINY, **overrides})).eval()


def make_draft(target: LlamaForCausalLM, seed: int = 1, **overrides: Any) -> DFlashDraftModel:
    """A random two-layer draft with blocks of four."""
    torch.manual_seed(seed)
    values = {"num_hidden_layers": 2, "num_target_layers": 2, "block_size": 4, "mask_token_id": 96}
    draft = DFlashDraftModel.from_target(target, **{**values, **overrides})
    for parameter in draft.parameters():  # norms away from 1, so that a swapped norm shows
        parameter.data += 0.2 * torch.randn_like(parameter)
    return draft.eval()


@pytest.fixture
def target() -> LlamaForCausalLM:
    return make_target()


@pytest.fixture
def draft(target: LlamaForCausalLM) -> DFlashDraftModel:
    return make_draft(target)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, with the special tokens of a chat model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=bytes_only, pad_token="<|pad|>", eos_token="<|end|>")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny chat target (vocabulary of the byte tokenizer plus padding rows), saved once for all tests."""
    root, tokenizer = tmp_path_factory.mktemp("targets"), make_tokenizer()
    common = {"vocab_size": 272, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}

    @functools.cache
    def save(**overrides: Any) -> Path:
        folder = root / str(len(list(root.iterdir())))
        make_target(**{**common, **overrides}).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def saved_target(tmp_path: Path, target_folder: Callable[..., Path]) -> Callable[..., str]:
    """Put a tiny chat target into the test's own folder, under a name, and return where it is."""

    def save(name: str = "target", **overrides: Any) -> str:
        torch.manual_seed(0)  # the same numbers follow, whether the target is made here or was made before
        return str(shutil.copytree(target_folder(**overrides), tmp_path / name, dirs_exist_ok=True))

    return save


def greedy(target: LlamaForCausalLM, input_ids: torch.Tensor, max_new_tokens: int, **kwargs: Any) -> list[int]:
    """New tokens of plain or drafted greedy generation for a single prompt."""
    kwargs = {"do_sample": False, "pad_token_id": 0, **kwargs}
    output = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=max_new_tokens, **kwargs
    )
    return output[0, input_ids.shape[1] :].tolist()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    """A Hub in this process, to which huggingface_hub and transformers are connected with an empty cache."""
    with HubStandIn() as stand_in:
        stand_in.connect(monkeypatch, tmp_path / "hub_home")
        yield stand_in


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files without content in place of pictures, whose drawing takes most of the time of a tiny run."""

    def write_blank(results: Any, title: str, folder: str | Path) -> dict[str, str]:
        for name in PICTURES:
            (Path(folder) / name).write_bytes(b"")
        return dict(PICTURES)

    monkeypatch.setattr("dflash_hf.evaluation.output.draw_pictures", write_blank)
    monkeypatch.setattr("dflash_hf.hub.card_picture.SlotChart.save", lambda chart, path: Path(path).write_bytes(b""))


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run the command as a shell would: exit code, what it printed, what it complained about."""

    def invoke(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dflash-hf", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return invoke


def error_line(err: str) -> str:
    """The one line of an error."""
    lines = [line for line in err.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1, err
    return lines[0]


class TextProcessor(ProcessorMixin):
    """A processor with a tokenizer alone, and with a chat template of its own."""

    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer=None, chat_template=None):
        super().__init__(tokenizer, chat_template=chat_template)
