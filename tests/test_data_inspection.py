from __future__ import annotations

import io
import json
import os
import random
import shutil
import sys
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import datasets
import pytest
from conftest import make_draft
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import dflash_hf.training.trainer
from dflash_hf import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.cli.inspect import TRAINING_SEED
from dflash_hf.data.inspection.figure import draw_rows
from dflash_hf.data.inspection.layout import assign_lanes
from dflash_hf.data.inspection.page import render_page
from dflash_hf.data.inspection.rows import Block, InspectedRow, StepPlan, TrainingRows
from dflash_hf.data.inspection.statistics import Histogram, RowStatistics
from dflash_hf.data.inspection.terminal import ANCHOR_STYLE, print_row, print_statistics, strip, styled_text
from dflash_hf.data.inspection.text import token_pieces, visible
from dflash_hf.target.loading import read_target

PLAN = StepPlan(block_size=4, anchors_per_sample=3, optimizer_step=0, seed=42)
HOSTILE = '<script>alert("1")</script> & \x1b[31m'


@pytest.fixture
def run(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    return partial(run, "inspect")


def conversation(question: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(*masks: str, **columns) -> datasets.Dataset:
    """Prepared rows from masks such as "..xx", where x is supervised; token ids count from 97 ("a")."""
    rows = [
        {
            "input_ids": [64 + n for n in range(len(mask))],
            "supervised_mask": [c == "x" for c in mask],
            "sample_id": 10 + i,
        }
        for i, mask in enumerate(masks)
    ]
    dataset = datasets.Dataset.from_list(rows)
    for name, values in columns.items():
        dataset = dataset.add_column(name, values)
    return dataset


def packed(*masks: str) -> datasets.Dataset:
    """Packed rows, which training keeps even without a supervised token, of one document each."""
    return prepared(*masks).add_column("segment_ids", [[0] * len(mask) for mask in masks])


def row_of(mask: str, *blocks: Block) -> InspectedRow:
    """A row of the text "abc…" with these blocks."""
    return InspectedRow(
        index=0,
        sample_id=0,
        input_ids=[64 + n for n in range(len(mask))],
        supervised_mask=[c == "x" for c in mask],
        pieces=[chr(97 + n) for n in range(len(mask))],
        is_special=[False] * len(mask),
        blocks=list(blocks),
        drop_reason="",
        is_truncated=False,
    )


def statistics_of(rows: TrainingRows, plan: StepPlan = PLAN) -> RowStatistics:
    statistics = RowStatistics()
    statistics.add((rows[index] for index in rows.sample(10**6)), plan)
    return statistics


def test_blocks_shown_are_those_the_trainer_trains_in_step_0(saved_target, tmp_path, monkeypatch):
    folder = saved_target()
    rows = [conversation(f"{n} + {n * n}?", str(n) * n + " it is") for n in (1, 9, 3, 0, 5)]
    rows.insert(2, {"messages": [{"role": "user", "content": "nobody answers this"}]})  # dropped: ids go on counting
    dataset = datasets.load_dataset(
        "json", data_files=str(write_rows(tmp_path / "rows.jsonl", rows)), split="train", cache_dir=str(tmp_path)
    )
    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    plans = []

    def recorded(token_valid_mask, sample_ids, **kwargs):
        plans.append((sample_ids, build(token_valid_mask, sample_ids, **kwargs)))
        return plans[-1][1]

    build = dflash_hf.training.trainer.build_dflash_batch_plan
    monkeypatch.setattr(dflash_hf.training.trainer, "build_dflash_batch_plan", recorded)
    args = DFlashTrainingArguments(
        str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=5, anchors_per_sample=3, max_length=40,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, block_attention="structured",
    )  # fmt: skip
    trainer = DFlashTrainer(
        make_draft(target, mask_token_id=270), target, args, train_dataset=dataset, processing_class=tokenizer
    )
    trainer.train()
    sample_ids, trained = plans[0]
    assert sorted(sample_ids.tolist()) == [0, 1, 3, 4, 5]

    of_target = read_target(folder)
    ours = TrainingRows(
        dataset, of_target.tokenizer, max_length=args.max_length, eos_token_ids=of_target.eos_token_ids
    )
    plan = StepPlan(block_size=4, anchors_per_sample=args.anchors_per_sample, optimizer_step=0, seed=args.seed)
    for place, sample_id in enumerate(sample_ids.tolist()):
        of_row = (trained.sample_rows == place) & trained.block_valid
        inspected = ours.inspect(sample_id, plan)
        shown, length = inspected.blocks, len(inspected.input_ids)
        assert [block.anchor for block in shown] == trained.anchor_positions[of_row].tolist()
        assert [block.context_length for block in shown] == trained.trunk_lengths[of_row].tolist()
        assert [block.num_slots for block in shown] == [min(4, length - block.anchor) for block in shown]
        pairs = zip(trained.label_positions[of_row], trained.loss_mask[of_row], strict=True)
        labels = [row[mask].tolist() for row, mask in pairs]
        assert [list(block.labels) for block in shown] == labels
        assert len(shown) == 3
    assert ours.inspect(2, plan).blocks == []
    assert ours.inspect(2, plan).drop_reason == "without supervised tokens"


def test_another_step_chooses_other_blocks(tokenizer):
    rows = TrainingRows(prepared("." + "x" * 60), tokenizer, max_length=99)
    first, later = (rows.inspect(0, StepPlan(4, 3, step, 42)).blocks for step in (0, 1))
    assert [block.anchor for block in first] != [block.anchor for block in later]


def test_a_block_knows_its_slots_and_labels(tokenizer):
    rows = TrainingRows(prepared("..xx.xx"), tokenizer, max_length=99)
    assert rows.inspect(0, StepPlan(4, 9, 0, 0)).blocks == [
        Block(anchor=1, context_length=1, num_slots=4, num_labels=2),
        Block(anchor=2, context_length=2, num_slots=4, num_labels=1),
        Block(anchor=4, context_length=4, num_slots=3, num_labels=2),
        Block(anchor=5, context_length=5, num_slots=2, num_labels=1),
    ]
    assert rows.inspect(0, StepPlan(4, 9, 0, 0)).covered == {2, 3, 5, 6}


def test_the_context_of_a_packed_row_starts_at_its_document(tokenizer):
    rows = TrainingRows(prepared("..xx..xx", segment_ids=[[0, 0, 0, 0, 1, 1, 1, 1]]), tokenizer, max_length=99)
    blocks = rows.inspect(0, StepPlan(4, 9, 0, 0)).blocks
    assert [(block.anchor, block.context_length, block.num_slots) for block in blocks] == [
        (1, 1, 3), (2, 2, 2), (5, 1, 3), (6, 2, 2),
    ]  # fmt: skip


def test_rows_without_a_window_are_counted(tokenizer):
    rows = TrainingRows(packed("..xxxxx", ".....x", ".....", "x..."), tokenizer, max_length=99)
    statistics = statistics_of(rows)
    assert statistics.lengths == [7, 6, 5, 4]
    assert statistics.supervised == [5, 1, 0, 1]
    assert statistics.eligible == [5, 1, 0, 0]
    assert statistics.has_whole_block == [True, False, False, False]
    assert statistics.num_without_block == 2
    summary = dict(statistics.summary(PLAN, len(rows)))
    assert summary["rows"] == "4"
    assert summary["tokens"] == "22, of which 7 are supervised (31.8%)"
    assert summary["rows without a block"] == "2 (50.0%)"
    assert summary["rows without a whole block of 4"] == "3 (75.0%)"


def test_rows_that_training_drops_are_counted_by_reason(tokenizer):
    raw = prepared("..xxxxx", ".....x", ".....", "x...").rename_column("supervised_mask", "loss_mask")
    statistics = statistics_of(TrainingRows(raw, tokenizer, max_length=5))
    assert dict(statistics.dropped) == {
        "without supervised tokens within max_length": 1,
        "without supervised tokens": 2,
    }
    assert (statistics.lengths, statistics.supervised, statistics.num_truncated, statistics.num_rows) == (
        [5],
        [3],
        1,
        4,
    )
    assert dict(statistics.summary(PLAN, 4))["rows dropped"] == (
        "3 (2 without supervised tokens; 1 without supervised tokens within max_length)"
    )


def test_statistics_equal_a_count_token_by_token(tokenizer):
    drawn = random.Random(5)
    masks = ["".join(drawn.choice(".xx") for _ in range(drawn.choice([1, 2, 5, 17, 40]))) for _ in range(21)]
    rows = TrainingRows(packed(*masks), tokenizer, max_length=99)
    statistics = statistics_of(rows)
    for index, mask in enumerate(masks):
        anchors = [a for a in range(len(mask) - 1) if mask[a + 1] == "x"]
        assert statistics.eligible[index] == len(anchors)
        assert statistics.has_whole_block[index] == any(a + 4 <= len(mask) for a in anchors)
        labels = set()
        for block in rows.inspect(index, PLAN).blocks:
            for position in range(block.anchor + 1, min(block.anchor + 4, len(mask))):
                if mask[position] != "x":
                    break
                labels.add(position)
        assert statistics.covered[index] == len(labels)
    assert len(statistics.lengths) == len(masks)


def test_statistics_of_a_large_data_set_read_only_the_sampled_rows(tokenizer):
    rows = TrainingRows(prepared(*["..xx"] * 50), tokenizer, max_length=99)
    read = []
    rows.dataset = type("Watched", (), {
        "__len__": lambda self: 10**9, "__getitem__": lambda self, index: read.append(index) or {
            "input_ids": [1, 2, 3], "supervised_mask": [False, True, True], "sample_id": index}
    })()  # fmt: skip
    sample = rows.sample(5)
    assert sample == rows.sample(5) == sorted(set(sample))
    assert len(sample) == 5
    assert sample[-1] - sample[0] > 10**8  # from all over the set
    statistics = RowStatistics()
    statistics.add((rows[index] for index in sample), PLAN)
    assert list(rows.first(2)) == [0, 1]
    assert read == [*sample, 0, 1]
    assert dict(statistics.summary(PLAN, len(rows)))["rows"] == (
        "1,000,000,000; the statistics below are of a random sample of 5"
    )


def test_a_histogram_has_round_bins_that_hold_every_value():
    assert Histogram.of([7], 10) == Histogram([7], [1], 1)
    assert Histogram.of([0, 19, 20, 99, 100], 6) == Histogram([0, 20, 40, 60, 80, 100], [2, 1, 0, 0, 1, 1], 20)
    assert Histogram.of([], 5) == Histogram([], [], 1)
    assert Histogram([1000], [3], 500).name(0) == "1,000 – 1,499"
    for high in (9, 10, 11, 99, 12345):
        histogram = Histogram.of([3, high], 7)
        assert len(histogram.starts) <= 7
        assert sum(histogram.counts) == 2


def test_blocks_of_a_lane_do_not_overlap_and_lanes_are_few():
    blocks = [Block(anchor, anchor, 4, 3) for anchor in (0, 1, 3, 4, 9)]
    assert assign_lanes(blocks) == [0, 1, 2, 0, 0]


def test_pieces_join_to_the_text_and_hold_whole_characters(tokenizer):
    text = "<|user|>é𝄞 ok\n<|end|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = token_pieces(tokenizer, ids)
    assert pieces == ["<|user|>", "", "é", "", "", "", "𝄞", " ", "o", "k", "\n", "<|end|>"]
    assert "".join(token_pieces(tokenizer, ids[:2])) == "<|user|>�"  # cut inside a character
    assert token_pieces(tokenizer, []) == []


def test_pieces_keep_blanks_of_a_decoder_that_drops_the_first_one():
    vocabulary = {"▁a": 0, "▁b": 1, "c": 2}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="c"))
    words.decoder = decoders.Metaspace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=words)
    assert token_pieces(wrapped, [0, 1, 2, 0, 1]) == ["a", " b", "c", " a", " b"]


def test_text_cannot_steer_a_terminal():
    assert visible("a\n\tb\x1b[2J\x07\x9b\u202e") == "a↵\n⇥b␛[2J␇<U+009B><U+202E>"


def test_terminal_text_is_styled_by_what_a_token_is():
    text = styled_text(row_of("..xx.x", Block(1, 1, 4, 2)))
    assert text.plain == "abcdef"
    assert [str(span.style).split() for span in text.spans] == [
        ["dim"], ["dim", ANCHOR_STYLE], ["bold", "green"], ["bold", "green"], ["dim"], ["green"],
    ]  # fmt: skip


def test_a_strip_shows_anchors_supervised_parts_and_labels():
    row = row_of("...xxxxx", Block(2, 2, 3, 2), Block(4, 4, 2, 1))
    assert strip(row, 100) == ["  ▾ ▾   ", "···█████", "   ▔▔▔  "]
    assert strip(row, 4) == [" ▾▾ ", "·███", " ▔▔ "]


def test_the_terminal_view_holds_text_numbers_and_blocks(tokenizer):
    rows = TrainingRows(
        datasets.Dataset.from_list([conversation("1 + 1?", HOSTILE), conversation("?", "two")]),
        tokenizer,
        max_length=99,
    )
    console = Console(file=io.StringIO(), width=100)
    print_statistics(console, statistics_of(rows), PLAN, len(rows))
    for index in (0, 1):
        print_row(console, rows.inspect(index, PLAN), PLAN)
    output = console.file.getvalue()
    assert "<|user|>1 + 1?<|end|><|assistant|>" + HOSTILE.replace("\x1b", "␛") + "<|end|>" in output
    assert "\x1b" not in output
    assert "Row 1 (sample id 1): 8 tokens, 4 supervised; 3 blocks cover 4 of them" in output
    assert "rows by supervised tokens" in output
    block = rows.inspect(1, PLAN).blocks[0]
    assert block == Block(anchor=3, context_length=3, num_slots=4, num_labels=3)
    (line,) = [line.split() for line in output.splitlines() if line.rstrip().endswith(" two")]
    assert line == ["3", "3", "4", "4", "–", "6", "<|assistant|>", "two"]


class Spans(HTMLParser):
    """Class, title and text of every token on a page, and all of its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.tokens, self.open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append((tag, values))
        if tag == "span" and "title" in values:
            self.tokens.append([values["class"], values["title"], ""])
        self.open.append((tag, "title" in values))

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self.open and self.open[-1] == ("span", True):
            self.tokens[-1][2] += data


def test_the_page_shows_whatever_the_rows_hold_as_text_and_loads_nothing():
    pieces = ["Say ", HOSTILE, HOSTILE, "</span></div>", '"&amp;\n']
    row = replace(row_of("..xxx", Block(1, 1, 4, 3)), pieces=pieces)
    page = render_page(f"{HOSTILE} rows", RowStatistics(), [row], PLAN, 1)
    spans = Spans(page)
    assert [text for _, _, text in spans.tokens] == [visible(piece) for piece in pieces]
    assert (
        "".join(text for kind, _, text in spans.tokens if kind[0] in "sl")
        == visible(HOSTILE) + '</span></div>"&amp;↵\n'
    )
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in spans.tags}
    assert not [name for _, values in spans.tags for name in values if name in ("src", "href") or name[:2] == "on"]
    assert "url(" not in page
    assert "@import" not in page
    assert "\x1b" not in page
    assert "prefers-color-scheme: dark" in page
    assert {tag for tag, _ in spans.tags} >= {"svg", "rect", "table", "details"}


def test_a_token_of_the_page_tells_id_position_and_blocks():
    page = render_page("rows", RowStatistics(), [row_of("..xx.x", Block(1, 1, 4, 2))], PLAN, 1)
    assert [(kind, title) for kind, title, _ in Spans(page).tokens] == [
        ("c", "token 64 · position 0 · context"),
        ("c a", "token 65 · position 1 · context · anchor of block 0"),
        ("l", "token 66 · position 2 · supervised · label in block 0"),
        ("l", "token 67 · position 3 · supervised · label in block 0"),
        ("c", "token 68 · position 4 · context"),
        ("s", "token 69 · position 5 · supervised"),
    ]


def test_every_block_and_supervised_part_is_drawn_to_scale():
    page = render_page("rows", RowStatistics(), [row_of("..xx.x....", Block(1, 1, 4, 2))], PLAN, 1)
    drawn = [
        (values["class"], float(values["x"]), float(values["width"]))
        for tag, values in Spans(page[page.index("<section>") :]).tags
        if tag == "rect"
    ]
    assert drawn == [
        ("f-c", 0, 1000),
        ("f-s", 200, 200), ("f-s", 500, 100),
        ("f-l", 200, 100), ("f-l", 300, 100),
        ("f-o", 100, 400), ("f-l", 200, 200), ("f-a", 100, 100),
    ]  # fmt: skip


def test_rows_that_are_all_dropped_or_empty_are_shown_all_the_same(tokenizer, tmp_path):
    raw = TrainingRows(datasets.Dataset.from_list([conversation("why?", "")] * 2), tokenizer, max_length=5)
    empty = TrainingRows(packed("", "."), tokenizer, max_length=5)
    for rows, words in (
        (raw, "5 tokens, truncated at max_length, 0 supervised; dropped: without supervised"),
        (empty, "0 blocks"),
    ):
        statistics = statistics_of(rows)
        shown = [rows.inspect(index, PLAN) for index in rows.first(3)]
        assert [row.index for row in shown] == [0, 1]
        console = Console(file=io.StringIO(), width=100)
        print_statistics(console, statistics, PLAN, 2)
        print_row(console, shown[0], PLAN)
        assert words in console.file.getvalue()
        assert words in render_page("rows", statistics, shown, PLAN, 2)
        draw_rows("rows", statistics, shown, PLAN, 2, tmp_path / "rows.png")
        assert (tmp_path / "rows.png").stat().st_size > 5000
    assert statistics_of(raw).dropped.total() == 2
    assert statistics_of(empty).num_without_block == 2


def test_inspect_from_the_shell(run, saved_target, tmp_path):
    folder = Path(saved_target())
    (folder / "model.safetensors").unlink()  # weights are not read
    data = write_rows(tmp_path / "rows.jsonl", [conversation("1?", "one"), conversation("$2?", "two")])
    page, picture = tmp_path / "rows.html", tmp_path / "rows.png"
    code, out, err = run(
        data, "--target", folder, "--block-size", 4, "--row", 1, "--html", page, "--png", picture, "--limit", 1
    )
    assert code == 0, err
    assert "Row 1 (sample id 1)" in out
    assert "<|assistant|>two<|end|>" in out
    assert "Row 0" not in out
    assert "2; the statistics below are of a random sample of 1" in out
    assert "64 blocks per row (seed 42)" in out
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture.read_bytes()) > 10_000
    assert "rows.jsonl for target, blocks of 4" in page.read_text()


def test_bad_input_of_inspect_is_one_clear_line(run, saved_target, tmp_path, monkeypatch):
    target = Path(saved_target())
    bare = tmp_path / "bare"
    shutil.copytree(target, bare)
    (bare / "chat_template.jinja").unlink()
    data = write_rows(tmp_path / "rows.jsonl", [conversation("1?", "one"), conversation("2?", "two")])
    empty = write_rows(tmp_path / "empty.jsonl", [])
    no_ids = write_rows(tmp_path / "no_ids.jsonl", [{"input_ids": [1, 2], "segment_ids": [0, 0]}])
    foreign = write_rows(tmp_path / "foreign.jsonl", [{"input_ids": [1, 999]}])
    closed = tmp_path / "closed"
    closed.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    cases = [
        ([tmp_path / "none.jsonl"], "does not exist"),
        ([empty], "is empty"),
        ([no_ids], "Rows with segment_ids are packed and need input_ids"),
        ([foreign], "the token ids of the target are 0 … 271"),
        ([data, "--row", "2"], "Row 2 does not exist: the data set has rows 0 … 1"),
        ([data, "--row", "-1"], "Row -1 does not exist"),
        ([data, "--rows", "-1"], "--rows -1 must be at least 0"),
        ([data, "--block-size", "1"], "block_size=1 must be at least 2"),
        ([data, "--anchors", "0"], "anchors_per_sample=0 must be at least 1"),
        ([data, "--step", "-1"], "optimizer_step=-1 must be at least 0"),
        ([data, "--max-length", "0"], "max_length=0 must be at least 1"),
        ([data, "--limit", "0"], "limit=0 must be at least 1"),
        (
            [data, "--html", tmp_path / "none" / "rows.html"],
            "none does not exist. Create it, or choose another folder.",
        ),
        ([data, "--html", tmp_path], "is a folder"),
        ([data, "--html", closed / "rows.html"], "is not writable. Choose another file."),
        ([data, "--png", tmp_path / "rows.png"], "pip install 'dflash-hf[demo]'"),
        ([data, "--target", bare], "has no chat template"),
        ([data, "--target", tmp_path / "nothing"], "cannot be loaded"),
    ]
    for arguments, expected in cases:
        code, _, err = run("--target", target, *arguments)
        lines = [line for line in err.splitlines() if line.startswith("Error:")]
        assert (code, len(lines)) == (1, 1), (arguments, err)
        assert expected in lines[0]
    assert not (tmp_path / "rows.png").exists()


def test_the_seed_of_the_command_is_that_of_training():
    assert DFlashTrainingArguments.seed == TRAINING_SEED


def test_rows_with_a_supervised_mask_are_shown_as_training_prepares_them(tokenizer):
    """They were shown without truncation and without a reason to drop them, and training checks them."""
    rows = TrainingRows(prepared("..xxxx", "....", "....xx"), tokenizer, max_length=4)
    shown = [rows.inspect(index, PLAN) for index in range(3)]
    assert [len(row.input_ids) for row in shown] == [4, 4, 4]
    assert [row.drop_reason for row in shown] == [
        "", "without supervised tokens", "without supervised tokens within max_length",
    ]  # fmt: skip
    foreign = TrainingRows(prepared("..xx"), tokenizer, max_length=9, num_embeddings=2)
    with pytest.raises(ValueError, match="token ids of the target are 0 … 1"):
        foreign[0]
