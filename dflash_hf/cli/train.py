"""`dflash-hf train`: train a draft, with arguments from the command line or from a YAML or JSON file."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..training.block_arguments import BlockTrainingArguments
from .command import Command
from .draft_fields import FIELDS_OF_PARTS, DraftFieldArguments, as_arguments, check_fields_of_draft, draft_fields

if TYPE_CHECKING:
    import datasets

    from ..training.arguments import DFlashTrainingArguments
    from ..training.trainer import DFlashTrainer


USAGE = "dflash-hf train [FILE.yaml] --target T --dataset D [--name value …]"


@dataclass
class DraftAndDataArguments(DraftFieldArguments):
    """Arguments that name the target, the draft and the rows."""

    target: str | None = field(default=None, metadata={"help": "Folder or Hub name of the target (required)."})
    dataset: str | None = field(
        default=None,
        metadata={
            "help": "Training rows: a Hub name, a data file, or a folder of prepare or regenerate "
            "(required). Rows that prepare held out are used for evaluation unless eval_dataset or eval_rows is set."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name of a Hub data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split of the training rows."})
    eval_dataset: str | None = field(default=None, metadata={"help": "Evaluation rows, given like `dataset`."})
    eval_rows: int = field(
        default=0,
        metadata={"help": "Without eval_dataset, hold out this many rows at the end of `dataset` for evaluation."},
    )
    draft: str | None = field(default=None, metadata={"help": "Continue from this draft instead of a new one."})
    draft_config: str | None = field(
        default=None,
        metadata={
            "help": "JSON file with fields of a new draft. Arguments take precedence over it, and fields that neither "
            "sets are derived from the target."
        },
    )
    target_dtype: str = field(
        default="auto", metadata={"help": "dtype of the target: auto, bfloat16, float16 or float32."}
    )
    resume: bool = field(default=True, metadata={"help": "Continue from the last checkpoint in output_dir."})


class TrainCommand(Command):
    """The click command of `train`, whose arguments are fields of dataclasses."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the arguments of this package; those of Trainer would need its import."""
        console = Console()
        introduction = (
            "Train a draft. A YAML or JSON file holds values under the names below; an option of the command line "
            "takes precedence over the file. Underscores may stand for the hyphens of an option."
        )
        console.print(Text(f"Usage: {USAGE}\n\n{introduction}\n"))
        inherited = {item.name for item in fields(DraftFieldArguments)}
        own = [item for item in fields(DraftAndDataArguments) if item.name not in inherited]
        for title, items in (
            ("Target, draft and rows", own),
            ("Fields of a new draft", fields(DraftFieldArguments)),
            ("Training", fields(BlockTrainingArguments)),
        ):
            table = Table(box=None, show_header=False, title=title, title_justify="left", title_style="bold")
            for item in items:
                default = "" if item.default in (None, MISSING) else f" Default: {item.default}."
                table.add_row(f"--{item.name.replace('_', '-')}", Text(item.metadata["help"] + default))
            console.print(table, "")
        others = (
            "All arguments of transformers.TrainingArguments are accepted as well, for example --output-dir, "
            "--num-train-epochs, --per-device-train-batch-size and --eval-strategy. Run `dflash-hf train --help-all` "
            "for a list."
        )
        console.print(Text(others))


def describe_rows(pair: DraftAndDataArguments) -> str:
    """Describe the rows for the model card, without a path on this machine."""
    from ..provenance import hub_id_or_folder

    hub_id, name = hub_id_or_folder(pair.dataset)
    if hub_id is None and Path(str(pair.dataset)).is_file():
        return f"the file {name}"
    return ", ".join(word for word in (hub_id or name, pair.dataset_config, f"split {pair.dataset_split}") if word)


def parse_arguments(arguments: list[str]) -> tuple[DraftAndDataArguments, DFlashTrainingArguments]:
    """
    Parse the command line, an optional YAML or JSON file and the JSON file of `draft_config`.

    The command line takes precedence over the file, and both over the fields of `draft_config`.

    Args:
        arguments (`list[str]`): the words after `train` on the command line.

    Returns:
        `tuple[DraftAndDataArguments, DFlashTrainingArguments]`

    Raises:
        ValueError: the file is no mapping, or an argument or a field of the draft is unknown.
        FileNotFoundError: the file is missing.
    """
    from transformers import HfArgumentParser

    from ..model.configuration_dflash import DFlashConfig
    from ..training.arguments import DFlashTrainingArguments

    kinds: Any = (DraftAndDataArguments, DFlashTrainingArguments)
    parser = HfArgumentParser(kinds, prog="dflash-hf train", usage=USAGE, add_help=False)
    parser.add_argument("--help-all", action="help", help="Show every argument, those of Trainer included.")
    parser.set_defaults(output_dir="dflash-draft", bf16=True, report_to="none")
    values: dict[str, Any] = {}
    if arguments and not arguments[0].startswith("-"):
        values = as_arguments(_read_argument_file(Path(arguments[0])), arguments[0])
        known = {item.name for kind in kinds for item in fields(kind)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"{arguments[0]} names unknown arguments: {', '.join(unknown)}. See dflash-hf train --help."
            )
        parser.set_defaults(**values)
        arguments = arguments[1:]
    draft_config = parser.parse_known_args(arguments)[0].draft_config
    if draft_config is not None:
        parser.set_defaults(**{**as_arguments(DFlashConfig.read_fields(draft_config), draft_config), **values})
    pair, training, unknown = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    if unknown:
        raise ValueError(
            f"dflash-hf train does not know {' '.join(unknown)}. Use names that `dflash-hf train --help-all` lists."
        )
    return pair, training


def _read_argument_file(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file of arguments."""
    if not path.is_file():
        raise FileNotFoundError(f"The argument file {path} does not exist.")
    text = path.read_text(encoding="utf-8")
    try:
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"The argument file {path} cannot be parsed: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"The argument file {path} must hold names and values, not {type(values).__name__}.")
    return values


def split_rows(
    pair: DraftAndDataArguments, rows: datasets.Dataset
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """
    Split off the evaluation rows as the arguments say, or load them.

    Args:
        pair ([`DraftAndDataArguments`]): names the data sets.
        rows (`datasets.Dataset`): the rows of `dataset`.

    Returns:
        `tuple`: the training rows, and the evaluation rows or `None`.

    Raises:
        ValueError: `eval_rows` is not below the number of rows.
    """
    from ..data.loading import load_rows
    from ..data.prepared_folder import EVALUATION_SPLIT, read_report

    held_out = pair.eval_dataset if pair.eval_dataset is not None or pair.eval_rows else pair.dataset
    report = read_report(held_out) if held_out is not None else None
    if report is not None and report["rows"][EVALUATION_SPLIT] and pair.dataset_split != EVALUATION_SPLIT:
        return rows, load_rows(str(held_out), None, EVALUATION_SPLIT)
    if pair.eval_dataset is not None:
        return rows, load_rows(pair.eval_dataset, pair.dataset_config, pair.dataset_split)
    if not pair.eval_rows:
        return rows, None
    if pair.eval_rows >= len(rows):
        raise ValueError(
            f"eval_rows={pair.eval_rows} must be below the {len(rows)} rows of {pair.dataset}. Hold out fewer rows."
        )
    first = len(rows) - pair.eval_rows
    return rows.select(range(first)), rows.select(range(first, len(rows)))


def make_trainer(pair: DraftAndDataArguments, args: DFlashTrainingArguments) -> DFlashTrainer:
    """
    Load target, draft and rows, and make the trainer.

    Args:
        pair ([`DraftAndDataArguments`]): names target, draft and rows.
        args ([`DFlashTrainingArguments`]): of the trainer.

    Returns:
        [`DFlashTrainer`]

    Raises:
        ValueError: no target or no rows are named, or two of them do not fit together.
        OSError: one of them cannot be read.
    """
    from transformers import set_seed

    from ..data.loading import load_rows
    from ..data.prepare import common_template_kwargs
    from ..data.prepared_folder import check_prepared, read_report
    from ..model.modeling_dflash import DFlashDraftModel
    from ..regeneration.run import are_completions_of
    from ..target.loading import load_target
    from ..training.trainer import DFlashTrainer

    if pair.target is None or pair.dataset is None:
        raise ValueError("dflash-hf train needs --target and --dataset (or a file that names them).")
    rows = load_rows(pair.dataset, pair.dataset_config, pair.dataset_split)
    rows, eval_rows = split_rows(pair, rows)
    Path(str(args.output_dir)).mkdir(parents=True, exist_ok=True)

    given = draft_fields(pair)
    target, tokenizer = load_target(pair.target, pair.target_dtype, revision=given.get("target_revision"))
    if pair.draft is not None:
        parts = {name: given[name] for name in FIELDS_OF_PARTS if given.get(name)}
        draft = DFlashDraftModel.from_pretrained(pair.draft, dtype="float32", target=target, **parts)
        check_fields_of_draft(given, draft.config, pair.draft)
    else:
        set_seed(args.seed)
        report = read_report(pair.dataset)
        template_kwargs = report["chat_template_kwargs"] if report else common_template_kwargs(rows, {})
        if report and given.get("chat_template_kwargs", template_kwargs) != template_kwargs:
            raise ValueError(
                f"chat_template_kwargs={given['chat_template_kwargs']} differ from those of the prepared rows in "
                f"{pair.dataset}, {template_kwargs}. Leave them out, or prepare the rows with them."
            )
        fields_of_draft = {"chat_template_kwargs": template_kwargs or None, **given}
        draft = DFlashDraftModel.from_target(target, tokenizer=tokenizer, config=fields_of_draft)
    for part, source in ((rows, pair.dataset), (eval_rows, pair.eval_dataset or pair.dataset)):
        if part is not None and "supervised_mask" in part.column_names:
            check_prepared(
                part, source, tokenizer, max_length=args.max_length, mask_token_id=draft.config.mask_token_id
            )
    if args.answers_by_target is None:
        args.answers_by_target = are_completions_of(rows, pair.target, tokenizer)
    if args.dataset_description is None:
        args.dataset_description = describe_rows(pair)
    return DFlashTrainer(
        model=draft, target=target, args=args, train_dataset=rows, eval_dataset=eval_rows, processing_class=tokenizer
    )


def train(context: typer.Context) -> None:
    """Train a draft: `dflash-hf train [FILE.yaml] --target T --dataset D …` ."""
    from ..provenance import hub_id_or_folder
    from .training_run import describe_acceptance, run_training

    pair, args = parse_arguments(context.args)
    console = Console(quiet=args.process_index > 0)  # only the first process prints
    trainer = make_trainer(pair, args)
    if not run_training(trainer, console, resume=pair.resume):
        raise typer.Exit(130)
    trainer.save_model()
    console.print(f"Draft saved in {args.output_dir}.")
    if trainer.eval_dataset is not None:
        console.print(f"Held-out rows: {describe_acceptance(trainer.evaluate())}.")
    trainer.save_state()
    trainer.create_model_card(dataset_tags=hub_id_or_folder(pair.dataset)[0])
