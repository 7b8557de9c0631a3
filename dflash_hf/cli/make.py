"""`dflash-hf make`: from a target to a measured draft in one command."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from ..files import lock_folder, refuse_other_settings, write_text
from ..pipeline.plan import Budget, Plan, Speeds, make_plan
from ..regeneration.defaults import BATCH_SIZE
from .options import INTERRUPTED

WORK = "make"  # folder inside the draft's, with everything that the stages write; it is never pushed
RUN_FILE, PROGRESS_FILE = "make.yaml", "progress.json"
KINDS: dict[str, list[str]] = {
    "dflash": [],
    "dflash2": ["--conv-kernel-size", "2", "--selector-rank", "64"],
    "dspark": [
        *("--sample-from-anchor", "true", "--markov-rank", "128", "--enable-confidence-head", "true"),
        *("--confidence-head-with-markov", "true", "--recipe", "dspark"),
    ],
}
ROWS_PER_STEP = 8
HELD_OUT_ROWS = "0.05"  # share of the answers that is evaluated when training ends
ATTEMPTS_PER_PROMPT = 1.25  # texts that a target writes for each usable prompt
CPU_BATCH_SIZE = 32  # completions in progress; more bring nothing on a CPU
TRAINING_MARGIN = 1.25  # training may take this much more or less than planned, so that the whole run ends in time
STAGES = ("prompts", "answers", "rows", "training", "evaluation")


@dataclass(frozen=True)
class MakeSettings:
    """
    The settings of a run, which its YAML file has under `settings`.

    Args:
        target (`str`): Hub name or folder.
        hours (`float`): hours of the whole run.
        prompts (`list[str]`): sources of prompts with their weights.
        domain, system_prompt (`str`, *optional*): for prompts that the target writes.
        rows (`int`, *optional*): training rows at most.
        disk_gb (`float`, *optional*): gigabytes of hidden states at most.
        draft (`str`, *optional*): Hub name or folder of the draft to start from.
        kind (`str`): one of [`KINDS`], for a new draft.
        draft_layers, block_size (`int`): of a new draft.
        max_new_tokens (`int`): longest answer.
        max_length (`int`): longest training row in tokens.
        eval_prompts (`int`): held-out prompts of the evaluation, and prompts of each set beside them.
        suite (`list[str]`): prompt sets of the evaluation beside them.
        prompts_folder (`str`, *optional*): folder of these sets; by default they come from the Hub.
        dtype (`str`): of the target.
        seed (`int`): of prompts, their choice and training.
    """

    target: str
    hours: float = 2.0
    prompts: list[str] = field(default_factory=lambda: ["self"])
    domain: str | None = None
    system_prompt: str | None = None
    rows: int | None = None
    disk_gb: float | None = None
    draft: str | None = None
    kind: str = "dflash"
    draft_layers: int = 3
    block_size: int = 8
    max_new_tokens: int = 256
    max_length: int = 512
    eval_prompts: int = 32
    suite: list[str] = field(default_factory=list)
    prompts_folder: str | None = None
    dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"--kind {self.kind!r} is not known. Pass one of {', '.join(KINDS)}.")
        if self.draft is not None and self.kind != "dflash":
            raise ValueError("--kind chooses a new draft, and --draft starts from one. Leave one of them out.")
        if self.eval_prompts < 1:
            raise ValueError(f"--eval-prompts {self.eval_prompts} must be at least 1. Pass a number of prompts.")
        if self.max_length < self.max_new_tokens:
            raise ValueError(
                f"--max-length {self.max_length} is shorter than an answer of --max-new-tokens {self.max_new_tokens}. "
                "Pass a longer row or shorter answers."
            )

    @property
    def num_evaluation_responses(self) -> int:
        """`int`: responses of the evaluation; MT-Bench has two a prompt."""
        return self.eval_prompts * (1 + sum(2 if name == "mt-bench" else 1 for name in self.suite))


class _Progress:
    """Which stages are complete, and the seconds each has taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {"complete": [], "seconds": {}}
        if path.is_file():
            self.values |= json.loads(path.read_text(encoding="utf-8"))

    def is_complete(self, stage: str) -> bool:
        return stage in self.values["complete"]

    @property
    def has_begun(self) -> bool:
        """Whether a stage was begun after the measurement."""
        return any(stage in self.seconds for stage in STAGES)

    @property
    def seconds(self) -> dict[str, float]:
        return self.values["seconds"]

    def complete(self, stage: str) -> None:
        """Record that a stage is complete."""
        self.values["complete"].append(stage)
        self.save()

    def save(self) -> None:
        write_text(self.path, json.dumps(self.values, indent=1))

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the seconds inside the context to those of a stage, also if it is interrupted."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - start
            self.save()


def make(
    target: Annotated[str | None, typer.Option(help="Hub name or folder of the target.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the draft. The same command continues a run there.")
    ] = None,
    hours: Annotated[float, typer.Option(help="Hours of the whole run.")] = MakeSettings.hours,
    plan: Annotated[bool, typer.Option("--plan", help="Measure the machine, print the plan, and stop.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="make.yaml of another run, whose settings and plan are taken.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="self, a data file or a Hub data set, each with an optional weight: A.jsonl:0.5. May be repeated. "
            "By default the target writes all prompts."
        ),
    ] = None,
    domain: Annotated[str | None, typer.Option(help="Subject of the prompts that the target writes.")] = None,
    system_prompt: Annotated[
        str | None, typer.Option(help="System message under which the target writes prompts.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Training rows at most.")] = None,
    disk: Annotated[
        float | None, typer.Option(help="Gigabytes of hidden states on the disk at most; 0 computes them each step.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft to start from, instead of a new one.")] = None,
    kind: Annotated[str, typer.Option(help=f"Kind of a new draft: {', '.join(KINDS)}.")] = MakeSettings.kind,
    draft_layers: Annotated[int, typer.Option(help="Layers of a new draft.")] = MakeSettings.draft_layers,
    block_size: Annotated[int, typer.Option(help="Slots of a block of a new draft.")] = MakeSettings.block_size,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = MakeSettings.max_new_tokens,
    max_length: Annotated[int, typer.Option(help="Longest training row in tokens.")] = MakeSettings.max_length,
    eval_prompts: Annotated[int, typer.Option(help="Prompts of each set to evaluate.")] = MakeSettings.eval_prompts,
    suite: Annotated[
        list[str] | None, typer.Option(help="Prompt set to evaluate beside them, as in eval. May be repeated.")
    ] = None,
    prompts_folder: Annotated[
        str | None, typer.Option(help="Folder with a file NAME.jsonl for each set; default: the sets on the Hub.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the target: auto, bfloat16, float16, float32.")] = MakeSettings.dtype,
    seed: Annotated[int, typer.Option(help="Seed of prompts, their choice and training.")] = MakeSettings.seed,
) -> None:
    """Make a draft from nothing but its target: prompts, answers, training, evaluation and card in a given time."""
    if out is None:
        raise ValueError("dflash-hf make needs --out, the folder of the draft. Pass a new folder.")
    console = Console()
    work = out / WORK
    stored = _read_run(config or work / RUN_FILE)
    if config is not None:
        if stored is None:
            raise FileNotFoundError(f"The file {config} does not exist. Pass the {RUN_FILE} of a run.")
        settings = stored[0]
    else:
        if target is None:
            raise ValueError("dflash-hf make needs --target, the model that gets a draft (or --config).")
        settings = MakeSettings(
            target,
            hours,
            prompts or ["self"],
            domain,
            system_prompt,
            rows,
            disk,
            draft,
            kind,
            draft_layers,
            block_size,
            max_new_tokens,
            max_length,
            eval_prompts,
            suite or [],
            prompts_folder,
            dtype,
            seed,
        )
    work.mkdir(parents=True, exist_ok=True)
    with lock_folder(work):
        progress = _Progress(work / PROGRESS_FILE)
        earlier = _read_run(work / RUN_FILE)
        if earlier is not None and earlier[0] != settings:
            if progress.has_begun:
                refuse_other_settings(work, asdict(earlier[0]), asdict(settings))
            stored = stored if config is not None else None  # only a plan was printed before
        try:
            if stored is None:
                console.rule("[bold]measuring this machine")
                with progress.time("setup"):
                    stored = (settings, *_measured_plan(settings, work, console))
            _write_run(work / RUN_FILE, *stored)
            _, speeds, the_plan = stored
            console.print(plan_table(the_plan, speeds))
            if plan:
                return
            _run(settings, the_plan, out, progress, console)
        except KeyboardInterrupt:
            _print(console, "Interrupted. The same command continues.")
            raise typer.Exit(INTERRUPTED) from None
    console.print(_times_table(the_plan, progress))
    _print(console, f"The draft, its card and its checkpoints are in {out}. Talk to it with:")
    _print(console, f"  dflash-hf chat --target {shlex.quote(settings.target)} --draft {shlex.quote(str(out))}")


def _print(console: Console, text: str) -> None:
    """Print a line without markup, colours and wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _read_run(path: Path) -> tuple[MakeSettings, Speeds, Plan] | None:
    """Read settings, speeds and plan of a run, or None if there is no file."""
    if not path.is_file():
        return None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        return MakeSettings(**values["settings"]), Speeds(**values["speeds"]), Plan(**values["plan"])
    except (yaml.YAMLError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} is not the file of a run ({error}). Restore it, or delete it to measure and plan anew."
        ) from error


def _write_run(path: Path, settings: MakeSettings, speeds: Speeds, plan: Plan) -> None:
    """Write settings, speeds and plan of a run."""
    values = {"settings": asdict(settings), "speeds": asdict(speeds), "plan": asdict(plan)}
    write_text(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def run_command(words: list[str], console: Console) -> None:
    """
    Run a command of this package in this process, and show it.

    Args:
        words (`list[str]`): the words after `dflash-hf`.
        console (`Console`): the console.

    Raises:
        KeyboardInterrupt: the command was interrupted.
        RuntimeError: it ended with another exit code than 0.
    """
    from . import app

    console.print(f"$ dflash-hf {shlex.join(words)}", style="dim", markup=False, highlight=False, soft_wrap=True)
    code = app(words, standalone_mode=False)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise RuntimeError(f"dflash-hf {words[0]} ended with exit code {code}. Its output says why.")


def _batch_size() -> int:
    """Return the number of completions in progress."""
    import torch

    return BATCH_SIZE if torch.accelerator.is_available() else CPU_BATCH_SIZE


def _prompts_words(settings: MakeSettings, number: int, file: Path) -> list[str]:
    """Return the command that lets the target write prompts."""
    words = ["prompts", "--target", settings.target, "--number", str(number), "--out", str(file)]
    words += ["--seed", str(settings.seed), "--dtype", settings.dtype, "--batch-size", str(_batch_size())]
    for option, value in (("--domain", settings.domain), ("--system-prompt", settings.system_prompt)):
        words += [option, value] if value is not None else []
    return words


def _prompts(settings: MakeSettings, number: int, folder: Path, console: Console) -> list[dict[str, Any]]:
    """Collect prompts from all sources of a run, in their shares and without repeats."""
    from ..data.prompt_sources import OWN, divide, parse_source, sampled_prompts

    sources = [parse_source(text) for text in settings.prompts]
    found: list[dict[str, Any]] = []
    known: set[str] = set()
    for source, share in zip(sources, divide(number, [source.weight for source in sources]), strict=True):
        if source.name != OWN:
            found += sampled_prompts(source.name, share, settings.seed, known)
        elif share:
            file = folder / "self.jsonl"
            run_command(_prompts_words(settings, share, file), console)
            found += [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    random.Random(settings.seed).shuffle(found)
    return found


def _choose_prompts(settings: MakeSettings, plan: Plan, work: Path, console: Console) -> None:
    """Write the prompts to answer, and those that are held out for the evaluation."""
    found = _prompts(settings, plan.num_rows + settings.eval_prompts, work, console)
    held_out = min(settings.eval_prompts, len(found) // 2)
    for name, rows in (("held_out.jsonl", found[:held_out]), ("prompts.jsonl", found[held_out:])):
        write_text(work / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _training_words(settings: MakeSettings, rows: Path) -> list[str]:
    """Return the command that trains the draft, without what the plan decides."""
    words = ["--target", settings.target, "--target-dtype", settings.dtype, "--dataset", str(rows)]
    if settings.draft is not None:
        words += ["--draft", settings.draft]
    else:
        words += ["--draft-layers", str(settings.draft_layers), "--block-size", str(settings.block_size)]
        words += KINDS[settings.kind]
    words += ["--anchors-per-sample", "32", "--max-length", str(settings.max_length), "--learning-rate", "4e-3"]
    words += ["--per-device-train-batch-size", str(ROWS_PER_STEP), "--per-device-eval-batch-size", str(ROWS_PER_STEP)]
    return [*words, "--seed", str(settings.seed)]


def _measured_plan(settings: MakeSettings, work: Path, console: Console) -> tuple[Speeds, Plan]:
    """Measure the machine with a batch of prompts, and plan the run."""
    from ..data.prompt_sources import OWN, parse_source
    from ..data.prompts import conversation_of_row
    from ..pipeline.calibration import measure_answers, measure_plain, measure_states, measure_steps, step_arguments
    from ..regeneration.local import LocalBackend
    from ..regeneration.requests import SamplingParameters, TurnRequest
    from ..target.loading import load_target
    from .train import make_trainer, parse_arguments

    start = time.monotonic()
    folder = work / "calibration"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    lines = _prompts(settings, _batch_size(), folder, console)
    requests = [TurnRequest(str(index), conversation_of_row(line).turns[0]) for index, line in enumerate(lines)]
    target, tokenizer = load_target(settings.target, settings.dtype)
    backend = LocalBackend(target, tokenizer, SamplingParameters(settings.max_new_tokens), batch_size=_batch_size())
    rows, answer_tokens, rate = measure_answers(backend, requests)
    _print(console, f"answers: {rate:.0f} tokens/s, {answer_tokens:.0f} tokens each")
    prompt_tokens = sum(
        len(tokenizer(request.messages[-1]["content"], add_special_tokens=False)["input_ids"]) for request in requests
    ) / len(requests)
    plain = measure_plain(target, tokenizer("The draft", return_tensors=None)["input_ids"])
    del target, backend
    path = folder / "rows.jsonl"
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    words = [*_training_words(settings, path), *step_arguments()]
    trainer = make_trainer(*parse_arguments(words))
    prepared: Any = trainer.train_dataset
    ids = [row["input_ids"] for row in prepared]
    row_tokens = sum(map(len, ids)) / len(ids)
    config = trainer.draft.config
    states = measure_states(trainer.target, ids, config.target_layer_ids or [])
    _print(console, f"hidden states: {states:.0f} tokens/s")
    step_s = measure_steps(trainer)
    _print(console, f"training: {60 / step_s:.0f} steps a minute")
    shutil.rmtree(str(trainer.args.output_dir), ignore_errors=True)
    bytes_per_token = len(config.target_layer_ids or []) * config.hidden_size * trainer.target.dtype.itemsize
    sources = [parse_source(text) for text in settings.prompts]
    own_share = sum(each.weight for each in sources if each.name == OWN) / sum(each.weight for each in sources)
    attempts = ATTEMPTS_PER_PROMPT * own_share
    speeds = Speeds(
        prompt_tokens, answer_tokens, attempts, row_tokens, rate, states, step_s, plain, shutil.disk_usage(work).free
    )
    budget = Budget(
        settings.hours,
        settings.num_evaluation_responses,
        ROWS_PER_STEP,
        bytes_per_token,
        setup_s=time.monotonic() - start,
        max_rows=settings.rows,
        max_disk_bytes=None if settings.disk_gb is None else round(settings.disk_gb * 1e9),
    )
    return speeds, make_plan(speeds, budget)


def _run(settings: MakeSettings, plan: Plan, out: Path, progress: _Progress, console: Console) -> None:
    """Run the stages that are not complete."""
    planned = _planned_s(plan)
    for number, stage in enumerate(STAGES, start=1):
        if progress.is_complete(stage):
            continue
        title = f"[bold]{number} of {len(STAGES)} · {stage}"
        console.rule(f"{title} · about {_minutes(planned[stage])}" if planned[stage] else title)
        with progress.time(stage):
            if stage == "prompts":
                _choose_prompts(settings, plan, out / WORK, console)
            elif stage == "training":
                _train(settings, plan, out, progress, console)
            else:
                run_command(_words_of(stage, settings, out), console)
        progress.complete(stage)
        _print(console, f"{stage}: {_minutes(progress.seconds[stage])}.")


def _words_of(stage: str, settings: MakeSettings, out: Path) -> list[str]:
    """Return the command of a stage that does not depend on the plan."""
    work = out / WORK
    if stage == "answers":
        return [
            *("regenerate", "--target", settings.target, "--prompts", str(work / "prompts.jsonl")),
            *("--out", str(work / "answers"), "--max-new-tokens", str(settings.max_new_tokens)),
            *("--dtype", settings.dtype, "--seed", str(settings.seed), "--batch-size", str(_batch_size())),
        ]
    if stage == "rows":
        return [
            *("prepare", "--target", settings.target, "--dataset", str(work / "answers")),
            *("--out", str(work / "rows"), "--max-length", str(settings.max_length)),
            *("--eval-rows", HELD_OUT_ROWS, "--seed", str(settings.seed)),
        ]
    words = ["eval", "--target", settings.target, "--draft", str(out), "--out", str(work / "evaluation")]
    words += ["--prompts", str(work / "held_out.jsonl")]
    words += [word for name in settings.suite for word in ("--suite", name)]
    words += ["--prompts-folder", settings.prompts_folder] if settings.prompts_folder is not None else []
    words += ["--limit", str(settings.eval_prompts), "--max-new-tokens", str(settings.max_new_tokens)]
    return [*words, "--temperatures", "0", "--dtype", settings.dtype, "--seed", str(settings.seed), "--card"]


def _train(settings: MakeSettings, plan: Plan, out: Path, progress: _Progress, console: Console) -> None:
    """Train the draft, for the minutes that the stages before have left of the hours."""
    if "training_minutes" not in progress.values:
        spent_s = sum(progress.seconds.values()) - progress.seconds.get("training", 0.0)
        left_s = settings.hours * 3600 - spent_s - plan.states_s - plan.evaluation_s
        training_s = min(max(left_s, plan.training_s / TRAINING_MARGIN), plan.training_s * TRAINING_MARGIN)
        progress.values["training_minutes"] = round(training_s / 60, 2)
        progress.save()
    words = ["train", *_training_words(settings, out / WORK / "rows"), "--output-dir", str(out)]
    words += ["--max-train-minutes", str(progress.values["training_minutes"])]
    if plan.is_cached:
        words += ["--cache-target-states", "disk", "--state-cache-dir", str(out / WORK / "states")]
    words += ["--logging-steps", "20", "--save-steps", "100", "--save-total-limit", "1"]
    run_command([*words, "--dataset-description", _description(settings)], console)
    shutil.rmtree(out / WORK / "states", ignore_errors=True)


def _description(settings: MakeSettings) -> str:
    """Describe the rows for the model card."""
    from ..data.prompt_sources import OWN, parse_source

    names = [parse_source(text).name for text in settings.prompts]
    own = [Path(name).name for name in names if name != OWN]
    parts = ["prompts that the target wrote itself"] if OWN in names else []
    parts += [f"prompts of {', '.join(own)}"] if own else []
    subject = f" on {settings.domain}" if settings.domain is not None and OWN in names else ""
    return f"{' and '.join(parts)}{subject}, answered greedily by the target"


def _planned_s(plan: Plan) -> dict[str, float]:
    """Return the planned seconds of each stage."""
    return {
        "prompts": plan.prompts_s,
        "answers": plan.answers_s,
        "rows": 0.0,
        "training": plan.states_s + plan.training_s,
        "evaluation": plan.evaluation_s,
    }


def _minutes(seconds: float) -> str:
    """Format seconds as minutes."""
    return f"{seconds / 60:.1f} min" if seconds < 600 else f"{seconds / 60:.0f} min"


def plan_table(plan: Plan, speeds: Speeds) -> Table:
    """
    Make the table of a plan.

    Args:
        plan ([`Plan`]): the plan.
        speeds ([`Speeds`]): what it was made from.

    Returns:
        `rich.table.Table`: at most 80 columns wide.
    """
    table = Table(title=f"Plan: {plan.num_rows:,} prompts and answers", box=box.SIMPLE, pad_edge=False)
    table.add_column("")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    cached = f"{plan.cache_bytes / 1e9:.1f} GB on the disk" if plan.is_cached else "computed in every step"
    for name, seconds, remark in (
        ("measuring", plan.setup_s, ""),
        ("prompts", plan.prompts_s, f"{speeds.generated_tokens_per_s:.0f} tokens/s" if plan.prompts_s else "given"),
        ("answers", plan.answers_s, f"{speeds.answer_tokens:.0f} tokens each"),
        ("hidden states", plan.states_s, cached),
        ("training", plan.training_s, f"{plan.num_steps:,} steps, {plan.epochs:.1f} epochs"),
        ("evaluation", plan.evaluation_s, f"{speeds.plain_tokens_per_s:.0f} tokens/s without the draft"),
    ):
        table.add_row(name, _minutes(seconds), f"{seconds / plan.total_s:.0%}", remark)
    table.add_row("[bold]total", f"[bold]{_minutes(plan.total_s)}", "", "")
    return table


def _times_table(plan: Plan, progress: _Progress) -> Table:
    """Make the table of planned and actual times."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("", "planned", "took"):
        table.add_column(name, justify="right" if name else "left")
    planned = {"setup": plan.setup_s, **_planned_s(plan)}
    for name, seconds in planned.items():
        table.add_row(name, _minutes(seconds), _minutes(progress.seconds.get(name, 0.0)))
    table.add_row("total", _minutes(sum(planned.values())), _minutes(sum(progress.seconds.values())))
    return table
