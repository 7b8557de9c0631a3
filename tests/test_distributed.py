"""Two processes train like one: a launch of distributed_worker.py against the same scenarios in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from conftest import make_draft, make_target
from distributed_worker import KINDS, SCENARIOS
from safetensors.torch import load_file
from training_runs import make_trainer, rows_of, weights
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments, DraftCard
from dflash_hf.blocks.head_losses import is_plain_head
from dflash_hf.data.collator import DFlashCollator


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where two ranks have run every scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    tests = Path(__file__).parent
    paths = [str(tests.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch = subprocess.run(
        [*command, str(tests / "distributed_worker.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert launch.returncode == 0, launch.stderr[-8000:]
    return folder


@pytest.fixture(scope="module")
def ranks(folder) -> dict[str, Any]:
    """What two ranks found."""
    return torch.load(folder / "results.pt", weights_only=True)


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Any:
    """What one process finds in a scenario."""
    found: dict[str, Any] = {}

    def run(name: str) -> Any:
        if name not in found:
            found[name] = SCENARIOS[name](tmp_path_factory.mktemp(name), 1)
        return found[name]

    return run


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], atol: float, rtol: float = 1e-5):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], atol=atol, rtol=rtol, msg=lambda text, name=name: f"{name}: {text}"
        )


# The kernels of a convolution multiply states that tensor parallelism sums in another order, so that rounding grows.
TOLERANCES = {"tensor_parallel_dflash2": (1e-5, 5e-5)}
EXACT = {
    "ddp": "DistributedDataParallel",
    "ddp_accumulated": "DistributedDataParallel",
    "fsdp": "FSDPDFlashDraftModel",
    "fsdp_checkpointing": "FSDPDFlashDraftModel",
    "tensor_parallel": "DFlashDraftModel",
    "tensor_parallel_target": "DFlashDraftModel",
    "fully_sharded_target": "DistributedDataParallel",
    "ddp_dflash2": "DistributedDataParallel",
    "ddp_tables": "DistributedDataParallel",
    "ddp_dspark": "DistributedDataParallel",
    "ddp_vocabulary": "DistributedDataParallel",
    "fsdp_dflash2": "FSDPDFlashDraftModel",
    "fsdp_dspark": "FSDPDFlashDraftModel",
    "tensor_parallel_dflash2": "DFlashDraftModel",
    "tensor_parallel_tables": "DFlashDraftModel",
}


@pytest.mark.spawns
@pytest.mark.parametrize("name", EXACT)
def test_training_on_two_ranks_equals_one_process(ranks, single, name):
    """Cases 9, 21, 25: three steps of SGD at rate 1, so that weights differ by no more than gradients."""
    ours, theirs = ranks[name], single(name)
    assert ours["wrapper"] == EXACT[name]
    assert_close(ours["weights"], theirs["weights"], atol=TOLERANCES.get(name, (2e-6, 0))[0])
    fields = KINDS.get(name.rpartition("_")[2], {})
    initial = dict(make_draft(make_target(), **fields).named_parameters())
    assert ours["weights"].keys() == initial.keys()
    assert all(not torch.allclose(value, initial[key], atol=1e-4) for key, value in ours["weights"].items())


@pytest.mark.spawns
@pytest.mark.parametrize("name", EXACT)
def test_what_is_logged_is_of_all_ranks_together(ranks, single, name):
    ours, theirs = ranks[name]["logs"], single(name)["logs"]
    assert len(ours) == 3
    for entry, expected in zip(ours, theirs, strict=True):
        assert entry == pytest.approx(expected, rel=TOLERANCES.get(name, (0, 1e-5))[1])
    assert len({entry["acceptance_length"] for entry in theirs}) > 1


@pytest.mark.spawns
@pytest.mark.parametrize("name", EXACT)
def test_evaluation_on_two_ranks_equals_one_process(ranks, single, name):
    """Five rows in batches of two on two ranks: the last batch is uneven."""
    assert "eval_serving_acceptance_length" in ranks[name]["metrics"]
    assert ranks[name]["metrics"] == pytest.approx(single(name)["metrics"], rel=1e-5)


@pytest.mark.spawns
def test_a_draft_under_fsdp2_is_evaluated_when_training_starts_and_not_before(ranks, single):
    assert ranks["fsdp"]["first_eval_loss"] == pytest.approx(single("fsdp")["first_eval_loss"], rel=1e-5)
    assert "eval_on_start=True" in ranks["fsdp"]["refusal"]


@pytest.mark.spawns
@pytest.mark.parametrize("name", ["half", "none"])
def test_a_rank_without_any_anchor_takes_part_with_a_zero_loss(ranks, single, name):
    ours, theirs = ranks["gradients"][name], single("gradients")[name]
    assert_close(ours, theirs, atol=1e-6)
    assert ours
    assert all(torch.isfinite(value).all() for value in ours.values())
    assert (ours["loss"] == 0) == (name == "none")


@pytest.mark.spawns
@pytest.mark.parametrize("name", ["tensor_parallel_muon", "fsdp_muon"])
def test_training_with_muon_on_two_ranks_equals_one_process(ranks, single, name):
    """
    Within its own rounding: orthogonalisation in bf16 turns the last bit of a gradient of low rank, as tiny data give,
    into some percent of an update. The next test has no tolerance.
    """
    ours, theirs = ranks[name], single(name)
    initial = dict(make_draft(make_target()).named_parameters())
    for key, value in theirs["weights"].items():
        assert (ours["weights"][key] - value).norm() < 0.15 * (value - initial[key]).norm(), key
    for entry, expected in zip(ours["logs"], theirs["logs"], strict=True):
        assert entry == pytest.approx(expected, rel=1e-3)


@pytest.mark.spawns
def test_muon_steps_a_sharded_matrix_as_if_it_were_whole(ranks):
    found = ranks["muon_steps"]
    assert found["plain"]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found["sharded"], found["plain"], strict=True))
    assert found["momentum_is_sharded"] == [True, True]


@pytest.mark.spawns
@pytest.mark.parametrize("name", ["ddp_bf16", "fsdp_bf16"])
def test_bf16_autocast_on_two_ranks_keeps_fp32_weights_and_equals_one_process(ranks, single, name):
    """FSDP2 computes norms in bf16, too, so that it is a little further away."""
    ours, theirs = ranks[name], single(name)
    assert ours["dtypes"] == {"torch.float32"}
    assert_close(ours["weights"], theirs["weights"], atol=0.1 * 2**-5, rtol=0)
    assert ours["metrics"]["eval_loss"] == pytest.approx(theirs["metrics"]["eval_loss"], rel=2**-6)


@pytest.mark.spawns
@pytest.mark.parametrize("name", ["ddp_resumed", "fsdp_muon", "fsdp_sharded_checkpoints"])
def test_resuming_on_two_ranks_equals_an_uninterrupted_run(ranks, name):
    """The loss does not jump on resuming."""
    assert_close(ranks[name]["resumed"]["weights"], ranks[name]["weights"], atol=0, rtol=0)
    assert ranks[name]["resumed"]["logs"] == ranks[name]["logs"]


@pytest.mark.spawns
@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        "fsdp",
        "fsdp_muon/checkpoint-4",
        "fsdp_sharded_checkpoints",
        "fsdp_sharded_checkpoints/checkpoint-4",
        "tensor_parallel",
        "fully_sharded_target",
    ],
)
def test_the_folder_saved_by_two_ranks_holds_the_draft_alone_and_loads_anywhere(folder, ranks, name):
    """Saving under FSDP gathers no target and writes no empty tensor."""
    found = ranks[name.partition("/")[0]]["weights"]
    assert load_file(folder / name / "model.safetensors").keys() == found.keys()
    draft = DFlashDraftModel.from_pretrained(folder / name, target=False)
    assert type(draft) is DFlashDraftModel
    assert_close(weights(draft), found, atol=0, rtol=0)
    config = AutoConfig.from_pretrained(folder / name)
    assert config.architectures == ["DFlashDraftModel"]
    assert config.auto_map["AutoModel"] == "modeling_dflash.DFlashDraftModel"
    assert {path.name for path in (folder / name).glob("*.py")} == {"configuration_dflash.py", "modeling_dflash.py"}
    card = DraftCard.from_folder(folder / name)
    assert card.num_parameters == sum(value.numel() for value in found.values())  # of the whole draft, not of a shard
    assert card.hardware.startswith("2 processes, each with ")


@pytest.mark.spawns
def test_the_ranks_of_a_run_with_a_time_budget_share_one_clock(ranks):
    first, second = ranks["clocks"]
    assert first == second


@pytest.mark.spawns
def test_one_rank_of_a_sharded_run_pushes_the_whole_draft_in_both_layouts(ranks):
    pushed = ranks["pushed"]
    serving = ["README.md", "card_facts.json", "config.json", "model.safetensors"]
    native = sorted([*serving, "configuration_dflash.py", "modeling_dflash.py"])
    assert pushed["in_progress"] == native
    assert pushed["files"] == {"org/trained": native, "org/trained-DFlash": serving}
    for name, dtype in (("org/trained", torch.float32), ("org/trained-DFlash", torch.bfloat16)):
        tensors = pushed["tensors"][name]
        assert tensors
        assert tensors.keys() == pushed["weights"].keys()
        assert all(torch.equal(tensors[key], value.to(dtype)) for key, value in pushed["weights"].items())
    first, *others = pushed["num_requests"]
    assert first > 0
    assert others == [0]


@pytest.mark.spawns
def test_a_tensor_parallel_draft_has_the_outputs_and_gradients_of_a_whole_one(folder, ranks, single):
    """Both passes of an accumulation window count once, in the norms of the heads too."""
    ours, theirs = ranks["tensor_parallel_passes"], single("tensor_parallel_passes")
    torch.testing.assert_close(ours["outputs"], theirs["outputs"], atol=2e-6, rtol=1e-5)
    assert_close(ours["gradients"], theirs["gradients"], atol=1e-6)
    assert len(ours["split"]) == 2 * (7 + 4)  # two layers of seven matrices and four biases
    again = DFlashDraftModel.from_pretrained(folder / "tensor_parallel_passes" / "again", target=False)
    draft = make_draft(make_target(), attention_bias=True)
    assert_close(weights(again), weights(draft), atol=0, rtol=0)


@pytest.mark.spawns
def test_a_fully_sharded_target_gets_no_gradients(ranks):
    assert not ranks["fully_sharded_target"]["target_has_gradients"]


@pytest.mark.spawns
def test_a_tensor_parallel_target_needs_a_draft_that_is_split_alike(ranks):
    assert "tp_size=2 and the draft has tp_size=1" in ranks["tensor_parallel_target"]["mismatch"]


# ---- one process ----


@pytest.mark.parametrize("loader", [DFlashDraftModel, AutoModel])
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            {"tp_size": 3},
            "tp_size=3.*num_key_value_heads=4, num_attention_heads=4, intermediate_size=64.*divisor of 4",
        ),
        ({"tp_size": 8}, "tp_size=8.*num_key_value_heads=4, num_attention_heads=4. .*divisor of 4"),
        ({"tp_size": 2, "enable_sequence_parallel": True}, "enable_sequence_parallel=True"),
        ({"pp_size": 2}, "pp_size=2"),
    ],
)
def test_a_layout_that_does_not_fit_the_draft_is_refused_before_loading(tmp_path, loader, layout, words):
    make_draft(make_target(), num_key_value_heads=4).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=words):
        loader.from_pretrained(tmp_path, distributed_config=DistributedConfig(**layout))


def test_the_deprecated_arguments_of_tensor_parallelism_are_refused(tmp_path):
    make_draft(make_target()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="distributed_config=DistributedConfig"):
        DFlashDraftModel.from_pretrained(tmp_path, tp_plan="auto")


@pytest.mark.parametrize("field", ["cp_size", "sp_size", "tp_size"])
def test_splitting_rows_or_an_unsplit_draft_is_refused_by_name(target, tmp_path, monkeypatch, field):
    with pytest.raises(ValueError, match=f"{field}=2"):
        make_trainer(target, tmp_path, rows=[], parallelism_config=ParallelismConfig(**{field: 2}))
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{field.upper()}", "2")  # as `accelerate launch` does
    with pytest.raises(ValueError, match=f"{field}=2"):
        make_trainer(target, tmp_path, rows=[])


def test_several_gpus_in_one_process_are_refused_unless_the_target_is_spread_over_them(target, tmp_path):
    def trainer() -> DFlashTrainer:
        args = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
        args._n_gpu = 2
        return DFlashTrainer(make_draft(target), target, args)

    with pytest.raises(ValueError, match=r"2 GPUs.*accelerate launch.*torchrun"):
        trainer()
    target.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    assert trainer().args.n_gpu == 1


def test_zero_3_is_refused(target, tmp_path):
    args = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    with pytest.raises(ValueError, match=r"zero_stage=3.*stage 2, or FSDP2"):
        DFlashTrainer(make_draft(target), target, args)


@pytest.mark.parametrize("use_reentrant", [None, True])
def test_gradient_checkpointing_recomputes_layers_and_changes_no_gradient(tmp_path, use_reentrant):
    """Checkpointing over inputs that need no gradient could give parameters none."""
    found = []
    for checkpointing in (False, True):
        target = make_target()
        kwargs = {} if use_reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
        trainer = make_trainer(
            target, tmp_path, gradient_checkpointing=checkpointing, **(kwargs if checkpointing else {})
        )
        calls: list[Any] = []
        for layer in trainer.draft.layers:
            layer.mlp.register_forward_pre_hook(lambda module, _, calls=calls: calls.append(module))
        if checkpointing:
            trainer.draft.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
        batch = DFlashCollator()([trainer.train_dataset[index] for index in range(4)])
        trainer.training_step(trainer.model, batch, None)
        assert len(calls) == (4 if checkpointing else 2)
        found.append({name: parameter.grad for name, parameter in trainer.draft.named_parameters()})
    # the reentrant kind first runs without gradients, which takes another kernel of the norm
    assert_close(found[1], found[0], atol=1e-6)


@pytest.mark.spawns
def test_a_compiled_draft_trains_evaluates_and_is_saved_like_a_plain_one(tmp_path):
    found = []
    for values in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        target = make_target()
        rows = rows_of(target)
        trainer = make_trainer(target, tmp_path, rows=rows, eval_rows=rows, max_steps=1, optim="sgd", **values)
        trainer.train()
        found.append((weights(trainer.draft), trainer.evaluate()["eval_loss"]))
        assert (type(trainer.model_wrapped).__name__ == "OptimizedModule") == bool(values)
        trainer.save_model()
        saved = weights(DFlashDraftModel.from_pretrained(tmp_path / "out", target=target))
        assert_close(saved, found[-1][0], atol=0, rtol=0)
    assert_close(found[1][0], found[0][0], atol=1e-7)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-6)


OFFLOADED = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    **{f"model.layers.{index}": "disk" for index in (1, 2, 3)},
    "model.norm": "disk",
    "lm_head": "disk",
}


@pytest.mark.parametrize("device_map", [{"": "cpu"}, OFFLOADED])
def test_a_target_spread_or_offloaded_by_device_map_trains_the_same_draft(tmp_path, device_map):
    target = make_target()
    rows = rows_of(target)
    target.save_pretrained(tmp_path / "target")
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    assert (spread.lm_head.weight.device.type == "meta") == (device_map is OFFLOADED)
    found = []
    for model in (target, spread):
        trainer = make_trainer(model, tmp_path, rows=rows, eval_rows=rows, optim="sgd", learning_rate=1.0)
        trainer.train()
        found.append((weights(trainer.draft), trainer.evaluate()["eval_loss"]))
    assert_close(found[1][0], found[0][0], atol=0, rtol=0)
    assert found[1][1] == found[0][1]
    assert (spread.lm_head.weight.device.type == "meta") == (device_map is OFFLOADED)


def test_a_target_whose_embedding_is_offloaded_is_refused(tmp_path):
    make_target().save_pretrained(tmp_path / "target")
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map={"": "disk"}, offload_folder=str(tmp_path / "offload")
    )
    with pytest.raises(ValueError, match=r"accelerate has offloaded its embedding.*must be in memory"):
        make_draft(offloaded)


def test_an_offloaded_head_with_a_bias_trains_like_one_at_hand(target, tmp_path):
    target.lm_head = torch.nn.Linear(32, 97)
    rows = rows_of(target)
    gradients = []
    for offloaded in (False, True):
        if offloaded:
            weights_map = {name: value.clone() for name, value in target.lm_head.state_dict().items()}
            hook = AlignDevicesHook(execution_device="cpu", offload=True, weights_map=weights_map)
            add_hook_to_module(target.lm_head, hook)
        assert (target.lm_head.weight.device.type == "meta") == offloaded
        trainer = make_trainer(target, tmp_path, draft=make_draft(make_target()), rows=rows)
        batch = DFlashCollator()([trainer.train_dataset[index] for index in range(4)])
        trainer.training_step(trainer.model, batch, None)
        gradients.append({name: parameter.grad for name, parameter in trainer.draft.named_parameters()})
    assert_close(gradients[1], gradients[0], atol=0, rtol=0)


def test_only_a_whole_matrix_at_hand_is_a_plain_head():
    class Adapted(torch.nn.Linear):
        pass

    assert is_plain_head(torch.nn.Linear(4, 5, bias=False))
    for head in (
        torch.nn.Linear(4, 5),
        Adapted(4, 5, bias=False),
        torch.nn.Linear(4, 5, bias=False, device="meta"),
    ):
        assert not is_plain_head(head)
