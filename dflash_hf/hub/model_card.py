"""The model card of a draft: its facts, how it is rendered and written, and the files that hold them."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers.utils import CONFIG_NAME, logging

from ..checkpoints.io import INDEX, WEIGHTS, read_json, tensor_shapes
from ..checkpoints.read_layouts import TARGET_TENSORS, native_values
from ..evaluation.card_section import MeasuredSuite
from ..evaluation.compare import Summary
from ..evaluation.output import SuiteOutput
from ..files import digest, write_text
from ..markdown import NOT_RECORDED, inline_code, one_line, table_cells
from ..model.configuration_dflash import DFlashConfig
from ..provenance import hub_id_or_folder
from .card_picture import SlotChart
from .card_tables import (
    draft_rows,
    evaluation_cells,
    generation_rows,
    input_snippet,
    serving_commands,
    slot_chart,
    target_phrase,
    training_rows,
)

logger = logging.get_logger(__name__)

TEMPLATE = Path(__file__).with_name("model_card_template.md")
CARD_NAME = "README.md"
FACTS_NAME = "card_facts.json"
PICTURE_NAME = "slot_acceptance.png"
TAGS = ("dflash", "speculative-decoding", "draft-model")
# The Hub knows the relations finetune, adapter, merge and quantized, and shows a model without one as a finetune. A
# draft changes no weight of its target. Like an adapter it is trained beside the frozen target and needs that target.
BASE_MODEL_RELATION = "adapter"
MARK = re.compile(r"\n<!-- Written by dflash_hf, digest ([0-9a-f]{16})\.[^\n]*-->\n\Z")


@dataclass(frozen=True)
class Evaluation:
    """
    What an evaluation during training logged. What it did not compute is `None`.

    Args:
        step (`int`, *optional*): The optimizer step of the evaluated weights.
        name (`str`, *optional*): The name of the evaluation set, if there are several.
        loss (`float`, *optional*): The weighted loss of the evaluated blocks.
        acceptance_length (`float`, *optional*): The acceptance length over sampled anchors.
        serving_acceptance_length (`float`, *optional*): The acceptance length in simulated decoding.
        generate_acceptance_length (`float`, *optional*): The acceptance length of `generate` itself.
        slot_accuracy (`Sequence[float]`): The share of right predictions in slots 1 … B - 1.
    """

    step: int | None = None
    name: str | None = None
    loss: float | None = None
    acceptance_length: float | None = None
    serving_acceptance_length: float | None = None
    generate_acceptance_length: float | None = None
    slot_accuracy: Sequence[float] = ()


@dataclass(frozen=True)
class Protocol:
    """
    How the generation on a card was measured.

    Args:
        prompts (`str`, *optional*): A description of the prompts.
        temperature (`float`, *optional*): The sampling temperature, 0 for greedy decoding.
        max_new_tokens (`int`, *optional*): The maximum length of a response in tokens.
        dtype (`str`, *optional*): The dtype of target and draft.
        decoding (`str`, *optional*): A description of the decoding loop and the batch size.
        target_weights (`str`, *optional*): Whether the target's weights were those of its repository or quantised.
        hardware, software (`str`, *optional*): As [`environment`] returns them.
        seed (`int`, *optional*): The seed of sampling.
    """

    prompts: str | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    dtype: str | None = None
    decoding: str | None = None
    target_weights: str | None = None
    hardware: str | None = None
    software: str | None = None
    seed: int | None = None


@dataclass(frozen=True)
class DraftCard:
    """
    All facts of a draft's model card.

    A fact that is `None` (or empty, where several values are possible) is printed as "not recorded", except for
    `suite`.

    Args:
        config ([`DFlashConfig`]): The draft's configuration.
        title (`str`): The heading, and what the usage snippets load as long as `native_repo` is unknown.
        target_id (`str`, *optional*): Hub name of the target.
        target_folder (`str`, *optional*): Name (without path) of the folder of a target that is not on the Hub.
        has_chat_template (`bool`, *optional*): Whether the target's tokenizer has a chat template. Without one the
            usage snippets ask in plain text.
        chat_template_kwargs (`Mapping`, *optional*): Chat-template arguments of the training rows, empty if there
            were none.
        mask_token (`str`, *optional*): Text of the mask token.
        num_parameters (`int`, *optional*): The number of parameters of the draft.
        license (`str`, *optional*): Licence of the draft, as its maker states it: a Hub identifier such as
            `apache-2.0`.
        target_license (`str`, *optional*): Licence on the target's own card, which is printed if `license` is missing.
        training_data (`str`, *optional*): A description of the training rows.
        dataset_ids (`Sequence[str]`): Hub names of the data sets.
        answers_by_target (`bool`, *optional*): Whether the target wrote the responses in the rows.
        num_rows, num_tokens (`int`, *optional*): Size of the training set after truncation and filtering.
        training_arguments (`Mapping`, *optional*): Training arguments that differ from their defaults, empty if none
            does.
        resumptions (`Sequence[str]`): Step and changes of every resumption with other arguments or rows.
        initialized_from (`str`, *optional*): The draft from which training started, or a statement that the initial
            weights were random.
        steps (`int`, *optional*): Optimizer steps of the saved weights.
        last_step (`int`, *optional*): Optimizer steps of the whole run, where the best weights were kept.
        epochs (`float`, *optional*): Epochs at `last_step`, or at `steps`.
        tokens_seen (`int`, *optional*): The number of input tokens in training.
        train_loss, train_acceptance_length (`float`, *optional*): Last logged values over the trained blocks.
        seed (`int`, *optional*): The seed of training.
        hardware, software (`str`, *optional*): Those of training, as [`environment`] returns them.
        evaluations (`Sequence[Evaluation]`): Evaluations on held-out rows.
        measured ([`Summary`], *optional*): Generation with and without the draft.
        protocol ([`Protocol`]): How `measured` was obtained.
        suite ([`MeasuredSuite`], *optional*): Results of `dflash-hf eval`. Without them the card has no such section.
        limits (`str`, *optional*): Known limits beyond those of every draft.
        native_repo (`str`, *optional*): Hub name of the draft in the layout of this package.
        serving_repo (`str`, *optional*): Hub name of the same draft in the layout of serving engines.
        languages, tags (`Sequence[str]`): Languages and further tags for the metadata.
    """

    config: DFlashConfig
    title: str
    target_id: str | None = None
    target_folder: str | None = None
    has_chat_template: bool | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    mask_token: str | None = None
    num_parameters: int | None = None
    license: str | None = None
    target_license: str | None = None
    training_data: str | None = None
    dataset_ids: Sequence[str] = ()
    answers_by_target: bool | None = None
    num_rows: int | None = None
    num_tokens: int | None = None
    training_arguments: Mapping[str, Any] | None = None
    resumptions: Sequence[str] = ()
    initialized_from: str | None = None
    steps: int | None = None
    last_step: int | None = None
    epochs: float | None = None
    tokens_seen: int | None = None
    train_loss: float | None = None
    train_acceptance_length: float | None = None
    seed: int | None = None
    hardware: str | None = None
    software: str | None = None
    evaluations: Sequence[Evaluation] = ()
    measured: Summary | None = None
    protocol: Protocol = Protocol()
    suite: MeasuredSuite | None = None
    limits: str | None = None
    native_repo: str | None = None
    serving_repo: str | None = None
    languages: Sequence[str] = ()
    tags: Sequence[str] = ()

    @classmethod
    def from_config(cls, config: DFlashConfig, title: str, **facts: Any) -> DraftCard:
        """
        Make a card from what a configuration says about the target and the chat-template arguments.

        Args:
            config ([`DFlashConfig`]): The draft's configuration.
            title (`str`): The heading.
            **facts: Further fields, which take precedence over the configuration.

        Returns:
            [`DraftCard`]
        """
        if not {"target_id", "target_folder"} & facts.keys():
            facts["target_id"], facts["target_folder"] = hub_id_or_folder(config.target_name_or_path)
        facts.setdefault("target_license", license_of_folder(config.target_name_or_path))
        facts.setdefault("chat_template_kwargs", config.chat_template_kwargs)
        return cls(config=config, title=title, **facts)

    @classmethod
    def from_folder(cls, folder: str | Path, config: DFlashConfig | None = None) -> DraftCard:
        """
        Read the card of a saved draft from the facts beside it, or else from its configuration and weights.

        Args:
            folder (`str` or `Path`): The folder of the draft, in any layout.
            config ([`DFlashConfig`], *optional*): The draft's configuration, by default the one in the folder.

        Returns:
            [`DraftCard`]

        Raises:
            OSError: A file is missing or damaged.
            ValueError: The configuration is not that of a draft, or the facts are not those of a card.
        """
        folder = Path(folder)
        if config is None:
            config = DFlashConfig(**native_values(read_json(folder / CONFIG_NAME)))
        facts_file = folder / FACTS_NAME
        if facts_file.is_file():
            return cls.from_facts(read_json(facts_file), config, where=str(facts_file))
        return cls.from_config(config, folder.resolve().name, num_parameters=_count_parameters(folder))

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], config: DFlashConfig, *, where: str = "facts") -> DraftCard:
        """
        Make a card from the plain values that [`~DraftCard.as_facts`] returned, in this version or in version 0.1.0.

        Args:
            facts (`Mapping`): The plain values.
            config ([`DFlashConfig`]): The draft's configuration.
            where (`str`, defaults to `"facts"`): What messages call the facts.

        Returns:
            [`DraftCard`]

        Raises:
            ValueError: A fact is unknown or missing.
        """
        facts = _current_names(cls, facts)
        try:
            facts["evaluations"] = tuple(
                Evaluation(**_current_names(Evaluation, values)) for values in facts.get("evaluations") or ()
            )
            facts["resumptions"] = tuple(facts.get("resumptions") or ())
            facts["protocol"] = Protocol(**(facts.get("protocol") or {}))
            facts["measured"] = Summary.from_dict(facts["measured"]) if facts.get("measured") else None
            facts["suite"] = MeasuredSuite.from_facts(facts["suite"]) if facts.get("suite") else None
            return cls(config=config, **facts)
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"{where} does not hold the facts of a draft's card: {error}. Every fact must be a field of "
                "DraftCard. Remove the file, and the card is written from the configuration alone."
            ) from error

    def as_facts(self) -> dict[str, Any]:
        """Return all facts as plain values for JSON, except the configuration, which has a file of its own."""
        facts = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "config"}
        facts["evaluations"] = [asdict(evaluation) for evaluation in self.evaluations]
        facts["protocol"] = asdict(self.protocol)
        facts["measured"] = self.measured.as_dict() if self.measured is not None else None
        facts["suite"] = self.suite.as_facts() if self.suite is not None else None
        return facts

    def metadata(self) -> ModelCardData:
        """Return the metadata that the Hub reads. Unknown facts are left out."""
        return ModelCardData(
            base_model=self.target_id,
            base_model_relation=BASE_MODEL_RELATION if self.target_id is not None else None,
            base_model_revision=self.config.target_revision if self.target_id is not None else None,
            datasets=list(self.dataset_ids) or None,
            language=list(self.languages) or None,
            library_name="transformers",
            license=self.license or self.target_license,
            pipeline_tag="text-generation",
            tags=list(dict.fromkeys([*TAGS, *self.tags])),
        )

    def render(
        self, picture: str | None = None, no_picture_reason: str | None = None, suite_pictures: Sequence[str] = ()
    ) -> ModelCard:
        """
        Render the card as Markdown.

        Args:
            picture (`str`, *optional*): File name of the picture beside the card.
            no_picture_reason (`str`, *optional*): What is printed in place of a missing picture.
            suite_pictures (`Sequence[str]`): File names of the suite's pictures beside the card.

        Returns:
            `ModelCard`
        """
        config, draft = self.config, self.native_repo or self.title
        target = self.target_id or f"path/to/{self.target_folder or 'the-target'}"
        chart = slot_chart(self)
        card = ModelCard.from_template(
            self.metadata(),
            template_path=str(TEMPLATE),
            heading=one_line(self.title),
            target_phrase=target_phrase(self),
            num_drafted=config.tokens_per_block - 1,
            block_size=config.block_size,
            target_literal=json.dumps(target, ensure_ascii=False),
            draft_literal=json.dumps(draft, ensure_ascii=False),
            inputs=input_snippet(self),
            serving_repo=inline_code(self.serving_repo) if self.serving_repo is not None else None,
            commands=serving_commands(self, target, draft),
            measured=table_cells(generation_rows(self.measured, self.protocol, config.tokens_per_block)),
            suite=self.suite.markdown(suite_pictures) if self.suite is not None else None,
            picture=picture,
            picture_label=chart.label if chart is not None else None,
            no_picture_reason=no_picture_reason or NOT_RECORDED,
            evaluations=[evaluation_cells(evaluation) for evaluation in self.evaluations or (None,)],
            geometry=table_cells(draft_rows(self)),
            training=table_cells(training_rows(self)),
            limits=one_line(self.limits) if self.limits else f"Further limits: {NOT_RECORDED}.",
        )
        content = str(card).rstrip("\n") + "\n"
        return ModelCard(content + _mark(content))


def write_model_card(folder: str | Path, card: DraftCard, *, overwrite: bool = False) -> bool:
    """
    Write `README.md`, its picture and the facts of both (`card_facts.json`) into the folder of a draft.

    Args:
        folder (`str` or `Path`): The folder in which the draft is saved.
        card ([`DraftCard`]): The facts.
        overwrite (`bool`, defaults to `False`): Whether to replace a README that was edited by hand.

    Returns:
        `bool`: whether the README was written. It is kept, and the result is False, if this function has not written
        it or if it was edited since.
    """
    folder = Path(folder)
    path = folder / CARD_NAME
    chart = slot_chart(card)
    picture = _save_picture(chart, folder / PICTURE_NAME)
    write_text(folder / FACTS_NAME, json.dumps(card.as_facts(), indent=1, ensure_ascii=False, default=str) + "\n")
    if path.is_file() and not overwrite and not is_own_card(path.read_text(encoding="utf-8", errors="replace")):
        logger.warning(
            f"{path} was edited or comes from another source, so it is kept. Remove or rename it to get the new "
            f"card, whose facts are in {FACTS_NAME}."
        )
        return False
    suite_pictures = [name for name in (card.suite.pictures if card.suite else ()) if (folder / name).is_file()]
    reason = "matplotlib was not installed when this card was written. The table has the numbers."
    write_text(path, str(card.render(picture, reason if chart is not None else None, suite_pictures)))
    return True


def write_suite_card(draft_folder: str | Path, output: SuiteOutput, folder: str | Path) -> bool:
    """
    Add the results of `dflash-hf eval` to the model card of a saved draft, and copy their pictures beside it.

    Args:
        draft_folder (`str` or `Path`): The folder in which the draft is saved.
        output ([`SuiteOutput`]): The results.
        folder (`str` or `Path`): The folder of the evaluation, which has the pictures.

    Returns:
        `bool`: whether the README was written, as [`write_model_card`] returns it.
    """
    for name in output.record["pictures"]:
        shutil.copyfile(Path(folder) / name, Path(draft_folder) / name)
    card = replace(DraftCard.from_folder(draft_folder), suite=output.for_card())
    return write_model_card(draft_folder, card)


def is_own_card(content: str) -> bool:
    """
    Tell whether [`write_model_card`] wrote a README and nobody has changed it since.

    Args:
        content (`str`): The whole text of the README.

    Returns:
        `bool`
    """
    mark = MARK.search(content)
    return mark is not None and mark.group(1) == digest(content[: mark.start()])


def license_of_folder(folder: str | None) -> str | None:
    """
    Read the licence from the model card in a local folder.

    Args:
        folder (`str`, *optional*): The folder, for example that of a target. A Hub name is not looked up.

    Returns:
        `str` or `None`
    """
    path = Path(folder) / CARD_NAME if folder else None
    if path is None or not path.is_file():
        return None
    try:
        license_id = ModelCard.load(path).data.get("license")
    except (ValueError, yaml.YAMLError):  # The card has no readable metadata.
        return None
    return license_id if isinstance(license_id, str) else None


def _current_names(kind: type[Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Rename facts that version 0.1.0 wrote with `accept_len` in their names to the fields of a dataclass."""
    names = {item.name for item in fields(kind)}
    renamed = {name: name.replace("accept_len", "acceptance_length") for name in facts}
    return {new if (new := renamed[name]) in names else name: value for name, value in facts.items()}


def _mark(content: str) -> str:
    """Return the comment at the end of a card that holds the digest of its text."""
    return f"\n<!-- Written by dflash_hf, digest {digest(content)}. A text that was edited is never overwritten. -->\n"


def _save_picture(chart: SlotChart | None, path: Path) -> str | None:
    """Save the chart if there is one and matplotlib is installed, and return the file's name."""
    try:
        if chart is not None:
            chart.save(path)
            return path.name
    except ImportError:
        pass
    path.unlink(missing_ok=True)  # An old picture would show other numbers.
    return None


def _count_parameters(folder: Path) -> int | None:
    """Count the parameters of a saved draft from the headers of its files. Without weights return `None`."""
    if not any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        return None
    shapes = tensor_shapes(folder)
    return sum(math.prod(shape) for name, (_, shape) in shapes.items() if name not in TARGET_TENSORS)
