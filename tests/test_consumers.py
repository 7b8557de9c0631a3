"""Other software reads the drafts that are written for it: transformers' Muse class, vLLM, dflash, speculators."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import greedy, make_draft, make_target
from demo_runs import QUESTIONS, run_demo
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from dflash_hf import DFlashConfig, DFlashDraftModel, speculative_generate
from dflash_hf.checkpoints.io import save_in_layout
from dflash_hf.checkpoints.read_layouts import native_values
from dflash_hf.data.chat_template import chat_inputs
from dflash_hf.data.prompts import read_prompts
from dflash_hf.target.demo import prepare_demo_target

MAX_NEW_TOKENS = 64


@pytest.mark.parametrize("layers", ["full", "sliding"])
def test_transformers_muse_class_computes_the_same_hidden_states(layers, target, tmp_path):
    """Its sliding window sees one key more than ours at the same value, so the layout has a value one lower."""
    kinds = {
        "full": {},
        "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "is_causal": False},
    }
    draft = make_draft(target, **kinds[layers])
    save_in_layout(draft, tmp_path, "muse")
    muse = AutoModel.from_pretrained(tmp_path).eval()
    assert type(muse) is MuseGlimmerAssistantModel

    torch.manual_seed(2)
    caches = DFlashCache(config=draft.config), DFlashCache(config=muse.config)
    start = 0
    for num_new in (9, 1, 4):  # the prompt, then what two passes of the target accepted
        noise, context = torch.randn(1, 4, 32), torch.randn(1, num_new, 64)
        for cache in caches:
            cache.activate_past_recording()
            cache.set_previous_accepted_tokens(num_new)
        inputs = {
            "noise_embeds": noise,
            "context_hidden_states": context,
            "position_ids": torch.arange(start, start + num_new + 4)[None],
        }
        with torch.no_grad():
            ours, theirs = (
                model(**inputs, cache=cache).last_hidden_state
                for model, cache in zip((draft, muse), caches, strict=True)
            )
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        for cache in caches:
            cache.crop(-4)
        start += num_new


@pytest.mark.parametrize("layers", ["full", "sliding"])
def test_transformers_muse_class_drafts_the_same_tokens_in_generate(layers, target, tmp_path):
    kinds = {
        "full": {},
        "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "is_causal": False},
    }
    draft = make_draft(target, **kinds[layers])
    save_in_layout(draft, tmp_path, "muse")
    muse = AutoModel.from_pretrained(tmp_path).eval()
    prompt = torch.arange(1, 8)[None]

    def run(assistant: torch.nn.Module) -> tuple[list[int], torch.Tensor]:
        proposed: list[torch.Tensor] = []
        hook = assistant.register_forward_hook(
            lambda module, args, output: proposed.append(target.lm_head(output.last_hidden_state[0, 1:]).argmax(-1))
        )
        tokens = greedy(target, prompt, 16, assistant_model=assistant, speculation_type="dflash")
        hook.remove()
        return tokens, torch.stack(proposed)

    tokens, proposed = run(draft)
    muse_tokens, muse_proposed = run(muse)
    assert tokens == muse_tokens == greedy(target, prompt, 16)
    assert torch.equal(proposed, muse_proposed)
    assert len(proposed.unique(dim=0)) > 3


def worker_interpreter(variable: str, package: str) -> str:
    """Return the interpreter that an environment variable names, and skip the test if there is none."""
    interpreter = os.environ.get(variable)
    if not interpreter:
        pytest.skip(f"{variable} names no Python interpreter that has {package}")
    return interpreter


def run_worker(interpreter: str, script: str, *arguments: object) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the worker sends a function to vLLM's own processes
    command = [interpreter, str(Path(__file__).parent / script), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-8000:]
    return result.stdout


@pytest.mark.consumers
def test_speculators_computes_the_same_logits_from_its_layout(saved_target, tmp_path):
    interpreter = worker_interpreter("DFLASH_HF_SPECULATORS_PYTHON", "speculators")
    target = AutoModelForCausalLM.from_pretrained(saved_target())
    draft = make_draft(target, mask_token_id=270, target_layer_ids=[0, 2])
    draft.config.target_name_or_path = target.config.name_or_path
    save_in_layout(draft, tmp_path / "draft", "speculators")

    torch.manual_seed(2)
    block_ids = torch.tensor([[7, 270, 270, 270]])
    inputs = {"noise_embeds": draft.embed_blocks(block_ids[:, :1]), "context_hidden_states": torch.randn(1, 9, 64)}
    save_file({**inputs, "block_ids": block_ids}, tmp_path / "inputs.safetensors")
    files = (tmp_path / "draft", tmp_path / "inputs.safetensors", tmp_path / "outputs.safetensors")
    printed = run_worker(interpreter, "speculators_worker.py", *files)
    assert json.loads(printed.splitlines()[-1]) == {
        "class": "DFlashDraftModel",
        "block_size": 4,
        "mask_token_id": 270,
        "aux_hidden_state_layer_ids": [1, 3],
    }
    theirs = load_file(tmp_path / "outputs.safetensors")
    assert torch.equal(theirs["block_embeds"], inputs["noise_embeds"])
    with torch.no_grad():
        ours = draft.compute_logits(draft(**inputs).last_hidden_state)
    torch.testing.assert_close(ours, theirs["logits"], atol=1e-5, rtol=1e-5)


KINDS_OF_SPECULATORS: dict[str, dict[str, Any]] = {
    "DFlash2DraftModel": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6},
    "DSparkDraftModel, vanilla": {"sample_from_anchor": True, "markov_rank": 4},
    "DSparkDraftModel, gated": {"sample_from_anchor": True, "markov_rank": 4, "markov_head_type": "gated"},
    "DSparkDraftModel, rnn": {"sample_from_anchor": True, "markov_rank": 4, "markov_head_type": "rnn"},
    "DSparkDraftModel, DFlash slots": {"markov_rank": 4},
    "DSparkDraftModel, confidence": {
        "sample_from_anchor": True, "markov_rank": 4, "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "DSparkDraftModel, reduced vocabulary": {"sample_from_anchor": True, "markov_rank": 4, "draft_vocab_size": 100},
    "DFlashDraftModel, reduced vocabulary": {"draft_vocab_size": 100},
}  # fmt: skip


def drafted_block(draft: DFlashDraftModel, hidden_states: torch.Tensor, anchor: int) -> list[int]:
    """Choose the tokens of a block with our heads."""
    head, before, state, tokens = draft.draft_head(), torch.tensor([anchor]), None, []
    for place in range(1, draft.config.tokens_per_block):
        features, state = head.features(before, hidden_states[:, place], state)
        scores, candidates = head.correct(head.logits(hidden_states[:, place]), features)
        choice = scores.argmax(-1, keepdim=True)
        before = head.token_ids(choice if candidates is None else candidates.gather(-1, choice))[:, 0]
        tokens.append(int(before))
    return tokens


@pytest.mark.consumers
@pytest.mark.parametrize("kind", KINDS_OF_SPECULATORS)
def test_speculators_chooses_the_same_tokens_from_its_layouts_of_dflash2_and_dspark(kind, saved_target, tmp_path):
    interpreter = worker_interpreter("DFLASH_HF_SPECULATORS_PYTHON", "speculators")
    target = AutoModelForCausalLM.from_pretrained(saved_target())
    draft = make_draft(target, mask_token_id=270, target_layer_ids=[0, 2], **KINDS_OF_SPECULATORS[kind])
    draft.config.target_name_or_path = target.config.name_or_path
    for name, parameter in draft.named_parameters():
        if name.startswith(("candidate_selector", "markov_head")):
            torch.nn.init.normal_(parameter)
    if draft.d2t is not None:
        draft.set_draft_vocabulary(torch.arange(3, 203, 2))
    save_in_layout(draft, tmp_path / "draft", "speculators")
    torch.manual_seed(2)
    block_ids = torch.tensor([[7, 270, 270, 270]])
    inputs = {"noise_embeds": draft.embed_blocks(block_ids[:, :1]), "context_hidden_states": torch.randn(1, 9, 64)}
    save_file({**inputs, "block_ids": block_ids}, tmp_path / "inputs.safetensors")
    files = (tmp_path / "draft", tmp_path / "inputs.safetensors", tmp_path / "outputs.safetensors")
    printed = run_worker(interpreter, "speculators_worker.py", *files)
    assert json.loads(printed.splitlines()[-1])["class"] == kind.partition(",")[0]
    theirs = load_file(tmp_path / "outputs.safetensors")
    with torch.no_grad():
        hidden_states = draft(**inputs).last_hidden_state
        ours = draft.draft_head().logits(hidden_states[:, -theirs["logits"].shape[1] :])
    torch.testing.assert_close(ours, theirs["logits"], atol=1e-5, rtol=1e-5)
    assert theirs["tokens"][0].tolist() == drafted_block(draft, hidden_states, 7)
    if draft.candidate_selector is not None or draft.markov_head is not None:
        plain = draft.draft_head().logits(hidden_states[0, 1:]).argmax(-1)
        assert theirs["tokens"][0].tolist() != draft.draft_head().token_ids(plain).tolist()


@pytest.mark.consumers
@pytest.mark.parametrize("is_factored", [True, False])
def test_the_dflash_package_decodes_dflash2_in_the_passes_of_our_loop(is_factored, tmp_path, monkeypatch):
    """Its last blocks are shorter, so that passes near the end of the text may differ."""
    reference = pytest.importorskip("dflash.model", reason="the package dflash 0.1.0 is not installed")
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)  # its statistics wait for a GPU
    target = make_target()
    kind = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6}
    draft = make_draft(target, **kind, selector_factored=is_factored)
    for name, parameter in draft.named_parameters():
        if name.startswith("candidate_selector"):
            torch.nn.init.normal_(parameter)
    folder = save_in_layout(draft, tmp_path / "tiny-DFlash2", "serving", dtype=torch.float32)
    theirs, info = reference.DFlash2DraftModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    compared = 0
    for seed in range(4):
        prompt = torch.randint(1, 96, (1, 5), generator=torch.Generator().manual_seed(seed))
        ours = speculative_generate(target, draft, prompt, do_sample=False, pad_token_id=0, max_new_tokens=24)
        run = reference.dflash_generate(theirs.eval(), target, prompt, 24, None, return_stats=True)
        assert torch.equal(run.output_ids, ours.sequences)
        committed = ours.statistics.committed[0]
        whole = next((i for i in range(len(committed)) if sum(committed[i:]) < 4), len(committed))
        assert run.acceptance_lengths[:whole] == committed[:whole]
        compared += whole
    assert compared > 20


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory) -> Path:
    """Return the draft for SmolLM2-135M-Instruct in `DFLASH_HF_DRAFT`, or one that is trained for a minute."""
    if folder := os.environ.get("DFLASH_HF_DRAFT"):
        return Path(folder)
    folder = tmp_path_factory.mktemp("demo")
    run_demo(folder, "--minutes", "1", "--rows", "160", "--questions", "1", "--max-new-tokens", "8")
    return folder / "draft"


@pytest.fixture(scope="module")
def prompt_ids() -> list[list[int]]:
    """Render twelve questions with the chat template. Consumers get token ids, so that tokenizers cannot differ."""
    tokenizer = AutoTokenizer.from_pretrained(prepare_demo_target())
    device = torch.device("cpu")
    return [chat_inputs(tokenizer, prompt, device)["input_ids"][0].tolist() for prompt in read_prompts(QUESTIONS)[:12]]


@pytest.fixture(scope="module")
def own_passes(trained_folder, prompt_ids) -> dict[torch.dtype, list[list[int]]]:
    """Return the tokens that each pass of our loop commits to each response, with a chain of the trained block."""
    passes = {}
    for dtype in (torch.float32, torch.bfloat16):
        passes[dtype] = committed_tokens(trained_folder, prompt_ids, dtype)
        assert mean_length(passes[dtype]) > 1.2
    return passes


def committed_tokens(folder: Path, prompt_ids: list[list[int]], dtype: torch.dtype) -> list[list[int]]:
    """Return the tokens that each pass of our loop commits to the response to each prompt."""
    target = AutoModelForCausalLM.from_pretrained(prepare_demo_target(), dtype=dtype).eval()
    draft = DFlashDraftModel.from_pretrained(folder, dtype=dtype, target=target)
    answers: list[list[int]] = []
    for ids in prompt_ids:
        output = speculative_generate(
            target,
            draft,
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        answers += output.statistics.committed
    return answers


def mean_length(answers: list[list[int]]) -> float:
    """Compute the acceptance length of the passes of several responses."""
    return sum(map(sum, answers)) / sum(map(len, answers))


@pytest.fixture(scope="module")
def exported_folder(trained_folder, tmp_path_factory) -> Any:
    """Return a function that writes the trained draft in a layout and a dtype."""

    def export(layout: str, dtype: torch.dtype) -> Path:
        folder = tmp_path_factory.mktemp("export") / "SmolLM2-135M-Instruct-DFlash"
        draft = DFlashDraftModel.from_pretrained(trained_folder)
        draft.config.target_name_or_path = str(prepare_demo_target())
        return save_in_layout(draft, folder, layout, dtype=dtype)

    return export


@pytest.fixture(scope="module")
def run_vllm(prompt_ids, tmp_path_factory) -> Any:
    interpreter = worker_interpreter("DFLASH_HF_VLLM_PYTHON", "vLLM")
    folder = tmp_path_factory.mktemp("vllm")

    def run(draft: Path | None, dtype: str, **options: Any) -> dict[str, Any]:
        request = {
            "target": str(prepare_demo_target()),
            "draft": None if draft is None else str(draft),
            "dtype": dtype,
            "prompts": prompt_ids,
            "max_new_tokens": MAX_NEW_TOKENS,
            **options,
        }
        (folder / "request.json").write_text(json.dumps(request))
        run_worker(interpreter, "vllm_worker.py", folder / "request.json", folder / "result.json")
        return json.loads((folder / "result.json").read_text())

    return run


@pytest.fixture(scope="module")
def serving_run(run_vllm, exported_folder) -> dict[str, Any]:
    """Return what vLLM does with the serving layout in bf16."""
    return run_vllm(exported_folder("serving", torch.bfloat16), "bfloat16")


@pytest.mark.consumers
def test_vllm_serves_an_exported_draft_and_accepts_as_much_as_our_loop(serving_run, own_passes):
    """The tolerance is a tenth: bf16 texts diverge at near-ties, and vLLM on a CPU normalises keys differently."""
    acceptance_length = 1 + serving_run["num_accepted_tokens"] / serving_run["num_drafts"]
    assert acceptance_length == pytest.approx(mean_length(own_passes[torch.bfloat16]), rel=0.1)


@pytest.mark.consumers
@pytest.mark.parametrize("layout", ["speculators", "muse", "native"])
def test_vllm_runs_the_same_passes_with_every_layout(layout, run_vllm, exported_folder, serving_run):
    """The plugin of this package opens the native layout. The tensors are bf16 in all folders."""
    if layout == "native" and "dflash_hf" not in plugins_of(worker_interpreter("DFLASH_HF_VLLM_PYTHON", "vLLM")):
        pytest.skip("vLLM's environment lacks this package, which `pip install --no-deps -e .` adds")
    result = run_vllm(exported_folder(layout, torch.bfloat16), "bfloat16")
    assert result["num_accepted_tokens"] > 0
    for name in ("token_ids", "accepted", "num_drafts", "num_accepted_tokens", "num_accepted_tokens_per_pos"):
        assert result[name] == serving_run[name]


def plugins_of(interpreter: str) -> list[str]:
    """Return the names of the plugins that vLLM finds in an environment."""
    code = "from importlib.metadata import entry_points; print(*entry_points(group='vllm.general_plugins').names)"
    return subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.consumers
def test_vllm_gives_the_same_fp32_text_with_and_without_a_draft_and_accepts_in_every_pass_what_our_loop_does(
    run_vllm, own_passes, exported_folder
):
    """One response of twelve may diverge at a near-tie. Every pass of the others is equal."""
    plain = run_vllm(None, "float32")
    drafted = run_vllm(exported_folder("serving", torch.float32), "float32", use_each_layers_k_norm=True)
    assert sum(map(list.__ne__, plain["token_ids"], drafted["token_ids"])) <= 1
    assert num_answers_in_other_passes(drafted["accepted"], own_passes[torch.float32]) <= 1


def num_answers_in_other_passes(accepted_by_vllm: list[list[int]], own_answers: list[list[int]]) -> int:
    """Count the responses in one of whose passes vLLM accepted another number of drafted tokens than our loop."""
    count = 0
    for accepted, committed in zip(accepted_by_vllm, own_answers, strict=True):
        # our last pass ends with the answer, and so does the list of ours where one token alone was left
        count += [number + 1 for number in accepted[: len(committed) - 1]] != committed[:-1]
        assert len(committed) > 8
    return count


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100000.0, "original_max_position_embeddings": 2048}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "causal layers": {"is_causal": True},
    "sliding layers": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 32, "is_causal": False},
    "causal sliding layers": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 32},
    "YaRN": {"rope_parameters": YARN},
    "Llama-3 angles": {"rope_parameters": {**LLAMA3, **{k: v for k, v in YARN.items() if "original" in k}}},
    "biases": {"attention_bias": True},
}


@pytest.mark.consumers
@pytest.mark.parametrize("name", VARIANTS)
def test_vllm_runs_drafts_with_other_layers_in_the_passes_of_our_loop(
    name, run_vllm, trained_folder, prompt_ids, own_passes, tmp_path
):
    """The trained weights accept other tokens under another configuration, and so vLLM must have applied it."""
    trained = DFlashDraftModel.from_pretrained(trained_folder, dtype=torch.float32)
    torch.manual_seed(0)
    draft = DFlashDraftModel(DFlashConfig(**{**native_values(trained.config.to_dict()), **VARIANTS[name]}))
    missing, unexpected = draft.load_state_dict(trained.state_dict(), strict=False)
    assert not unexpected
    for bias in missing:
        torch.nn.init.normal_(draft.get_parameter(bias), std=0.2)
    folder = save_in_layout(draft, tmp_path / "variant-DFlash", "serving", dtype=torch.float32)
    own_answers = committed_tokens(folder, prompt_ids[:3], torch.float32)
    assert mean_length(own_answers) > 1.1
    assert num_answers_in_other_passes(
        [[count - 1 for count in committed] for committed in own_passes[torch.float32][:3]], own_answers
    )
    drafted = run_vllm(folder, "float32", prompts=prompt_ids[:3], use_each_layers_k_norm=True)
    assert num_answers_in_other_passes(drafted["accepted"], own_answers) == 0


@pytest.mark.consumers
def test_the_dflash_package_loads_the_export_and_accepts_as_much_as_our_loop(prompt_ids, own_passes, exported_folder):
    """It counts acceptance over all passes of the target, and we leave out a pass for a single last token."""
    reference = pytest.importorskip("dflash.model", reason="the package dflash 0.1.0 is not installed")
    folder = exported_folder("serving", torch.float32)
    draft, info = reference.DFlashDraftModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    target = AutoModelForCausalLM.from_pretrained(prepare_demo_target(), dtype=torch.float32).eval()
    passes: list[None] = []
    target.register_forward_hook(lambda *_: passes.append(None))
    num_tokens = 0
    for ids in prompt_ids:
        prompt = torch.tensor([ids])
        sequence = reference.dflash_generate(draft, target, prompt, MAX_NEW_TOKENS, [target.config.eos_token_id])
        num_tokens += sequence.shape[1] - prompt.shape[1] - 1  # the first one comes from the prefill
    acceptance_length = num_tokens / (len(passes) - len(prompt_ids))
    assert acceptance_length == pytest.approx(mean_length(own_passes[torch.float32]), rel=0.05)
