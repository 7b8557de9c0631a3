"""The model card of a draft: what it is for, how it was made, what was measured."""

from __future__ import annotations

import json
import math
import re
import shlex
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
from ..markdown import (
    NOT_RECORDED,
    arguments_in_words,
    code,
    number,
    share,
    table_cell,
    table_cells,
    text,
    words,
)
from ..model.configuration_dflash import DFlashConfig
from ..provenance import hub_id_or_folder
from .card_picture import draw_slots

logger = logging.get_logger(__name__)

TEMPLATE = Path(__file__).with_name("model_card_template.md")
CARD_NAME = "README.md"
FACTS_NAME = "card_facts.json"
PICTURE_NAME = "slot_acceptance.png"
TAGS = ("dflash", "speculative-decoding", "draft-model")
# The Hub knows finetune, adapter, merge and quantized, and shows a model without a relation as a finetune. A draft
# changes no weight of the target: like an adapter it is trained beside the frozen target and works with it alone.
BASE_MODEL_RELATION = "adapter"
MARK = re.compile(r"\n<!-- Written by dflash_hf, digest ([0-9a-f]{16})\.[^\n]*-->\n\Z")


@dataclass(frozen=True)
class Evaluation:
    """
    What an evaluation of the trainer logged; what it did not compute is `None`.

    Args:
        step (`int`, *optional*): optimizer step of the evaluated weights.
        name (`str`, *optional*): of the evaluation set, if there are several.
        loss (`float`, *optional*): weighted loss of the evaluated blocks.
        accept_len (`float`, *optional*): acceptance length over sampled anchors, the bonus token included.
        serving_accept_len (`float`, *optional*): that of a walk through every answer, as `generate` takes it.
        generate_accept_len (`float`, *optional*): that of `generate` itself.
        slot_accuracy (`Sequence[float]`): share of right predictions in slots 1 … B - 1.
    """

    step: int | None = None
    name: str | None = None
    loss: float | None = None
    accept_len: float | None = None
    serving_accept_len: float | None = None
    generate_accept_len: float | None = None
    slot_accuracy: Sequence[float] = ()


@dataclass(frozen=True)
class Protocol:
    """
    How the generation of a card was measured.

    Args:
        prompts (`str`, *optional*): which prompts, in words.
        temperature (`float`, *optional*): 0 is greedy.
        max_new_tokens (`int`, *optional*): longest answer in tokens.
        dtype (`str`, *optional*): of target and draft.
        decoding (`str`, *optional*): which loop, which batch size, in words.
        target_weights (`str`, *optional*): whether they were those of the target's repository, or quantised, in words.
        hardware, software (`str`, *optional*): as [`environment`] gives them.
        seed (`int`, *optional*): of sampling.
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
    All facts of a draft's model card. What is `None` (or empty, where several are possible) prints "not recorded",
    except for `suite`.

    Args:
        config ([`DFlashConfig`]): block size, tapped layers, mask token, geometry, target revision.
        title (`str`): heading, and what the usage snippets load while `native_repo` is unknown.
        target_id (`str`, *optional*): Hub name of the target.
        target_folder (`str`, *optional*): name (no path) of the folder of a target that is not on the Hub.
        has_chat_template (`bool`, *optional*): whether the target's tokenizer has a chat template; the usage snippets
            ask in plain text where it has none.
        chat_template_kwargs (`Mapping`, *optional*): chat-template arguments of the training rows; empty if there
            were none.
        mask_token (`str`, *optional*): text of the mask token.
        num_parameters (`int`, *optional*): of the draft.
        license (`str`, *optional*): of the draft, told by its maker; a Hub identifier such as `apache-2.0`.
        target_license (`str`, *optional*): that of the target's own card; stands in for a missing `license`.
        training_data (`str`, *optional*): what the rows are, in words.
        dataset_ids (`Sequence[str]`): Hub names of the data sets.
        answers_by_target (`bool`, *optional*): whether the target wrote the answers of the rows.
        num_rows, num_tokens (`int`, *optional*): of the training set, after what was cut and dropped.
        training_arguments (`Mapping`, *optional*): those that differ from their defaults; empty if none does.
        initialized_from (`str`, *optional*): the draft that training started from, or that weights were random.
        steps (`int`, *optional*): optimizer steps of the saved weights.
        last_step (`int`, *optional*): optimizer steps of the whole run, where the best weights were kept.
        epochs (`float`, *optional*): at `last_step`, or at `steps`.
        tokens_seen (`int`, *optional*): input tokens trained on.
        train_loss, train_accept_len (`float`, *optional*): of the trained blocks, as last logged.
        seed (`int`, *optional*): of training.
        hardware, software (`str`, *optional*): of training, as [`environment`] gives them.
        evaluations (`Sequence[Evaluation]`): on held-out rows.
        measured ([`Summary`], *optional*): generation with and without the draft.
        protocol ([`Protocol`]): how `measured` was made.
        suite ([`MeasuredSuite`], *optional*): what `dflash-hf eval` measured; without it the card has no such part.
        limits (`str`, *optional*): known to the maker, beyond those of every draft.
        native_repo (`str`, *optional*): Hub name of the draft in the layout of this package.
        serving_repo (`str`, *optional*): Hub name of the same draft in the layout of serving engines.
        languages, tags (`Sequence[str]`): for the metadata, further tags only.
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
    initialized_from: str | None = None
    steps: int | None = None
    last_step: int | None = None
    epochs: float | None = None
    tokens_seen: int | None = None
    train_loss: float | None = None
    train_accept_len: float | None = None
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
        Take from a configuration what it says: target, chat-template arguments.

        Args:
            config ([`DFlashConfig`]): of the draft.
            title (`str`): heading.
            **facts: further fields; they come before those of the configuration.

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
        Read back the card of a saved draft: the facts beside it, else what its configuration and weights say.

        Args:
            folder (`str` or `Path`): where the draft is saved, in any layout.
            config ([`DFlashConfig`], *optional*): of the draft; default: the one in the folder.

        Returns:
            [`DraftCard`]

        Raises:
            OSError: a file is missing or damaged.
            ValueError: the configuration is not that of a draft, or the facts are not those of a card.
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
        The inverse of [`~DraftCard.as_facts`].

        Args:
            facts (`Mapping`): plain values.
            config ([`DFlashConfig`]): of the draft.
            where (`str`): names the facts in messages.

        Returns:
            [`DraftCard`]

        Raises:
            ValueError: a fact is unknown or missing.
        """
        facts = dict(facts)
        try:
            facts["evaluations"] = tuple(Evaluation(**values) for values in facts.get("evaluations") or ())
            facts["protocol"] = Protocol(**(facts.get("protocol") or {}))
            facts["measured"] = Summary(**facts["measured"]) if facts.get("measured") else None
            facts["suite"] = MeasuredSuite.from_facts(facts["suite"]) if facts.get("suite") else None
            return cls(config=config, **facts)
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"{where} does not hold the facts of a draft's card: {error}. Remove it, and the card is written from "
                "the configuration alone."
            ) from error

    def as_facts(self) -> dict[str, Any]:
        """All facts but the configuration (which is saved in a place of its own) as plain values, for JSON."""
        facts = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "config"}
        facts["evaluations"] = [asdict(evaluation) for evaluation in self.evaluations]
        facts["protocol"] = asdict(self.protocol)
        facts["measured"] = self.measured.as_dict() if self.measured is not None else None
        facts["suite"] = self.suite.as_facts() if self.suite is not None else None
        return facts

    def metadata(self) -> ModelCardData:
        """`ModelCardData`: what the Hub reads. Unknown facts are absent."""
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
        self, picture: str | None = None, picture_words: str | None = None, suite_pictures: Sequence[str] = ()
    ) -> ModelCard:
        """
        Make the card.

        Args:
            picture (`str`, *optional*): file name of the per-slot picture beside the card.
            picture_words (`str`, *optional*): what stands in its place if there is none.
            suite_pictures (`Sequence[str]`): file names of the suite's pictures beside the card.

        Returns:
            `ModelCard`
        """
        config, draft = self.config, self.native_repo or self.title
        target = self.target_id or f"path/to/{self.target_folder or 'the-target'}"
        folder = _serving_folder(draft)
        serving = self.serving_repo or folder
        speculative = {"method": "dflash", "model": serving, "num_speculative_tokens": config.block_size - 1}
        card = ModelCard.from_template(
            self.metadata(),
            template_path=str(TEMPLATE),
            heading=text(self.title),
            target_in_words=self._target_in_words(),
            num_drafted=config.block_size - 1,
            block_size=config.block_size,
            target_literal=json.dumps(target, ensure_ascii=False),
            draft_literal=json.dumps(draft, ensure_ascii=False),
            inputs=self._inputs(),
            serving_repo=code(self.serving_repo) if self.serving_repo is not None else None,
            convert=shlex.join(["dflash-hf", "convert", draft, folder, "--layout", "serving"]),
            vllm=shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]),
            sglang=shlex.join(["python", "-m", "sglang.launch_server", "--model-path", target])
            + " \\\n    "
            + shlex.join(["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", serving]),
            measured=table_cells(self._measured_rows()),
            suite=self.suite.markdown(suite_pictures) if self.suite is not None else None,
            picture=picture,
            picture_label=slots[1] if (slots := _slots_of(self)) is not None else None,
            picture_words=picture_words or NOT_RECORDED,
            evaluations=[_evaluation_cells(evaluation) for evaluation in self.evaluations or (Evaluation(),)],
            geometry=table_cells(self._draft_rows()),
            training=table_cells(self._training_rows()),
            limits=text(self.limits) if self.limits else f"Further limits: {NOT_RECORDED}.",
        )
        content = str(card).rstrip("\n") + "\n"
        return ModelCard(content + _mark(content))

    def _inputs(self) -> str:
        """Lines of a snippet that make `inputs` of a question."""
        if self.has_chat_template is False:
            return 'inputs = tokenizer("12 times 13 is", return_tensors="pt")'
        arguments = 'chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"'
        if self.chat_template_kwargs:
            arguments = f"\n    {arguments}, **{dict(self.chat_template_kwargs)!r}\n"
        chat = 'chat = [{"role": "user", "content": "What is 12 times 13?"}]'
        return f"{chat}\ninputs = tokenizer.apply_chat_template({arguments})"

    def _target_in_words(self) -> str:
        if self.target_id is not None:
            return code(self.target_id)
        return f"a target in a local folder, {code(self.target_folder)}" if self.target_folder else "its target"

    def _measured_rows(self) -> list[tuple[str, Any]]:
        summary, protocol = self.measured, self.protocol
        rows: list[tuple[str, Any]] = []
        if summary is None:
            names = ("acceptance length", "slots 1 … k all accepted", "plain → with the draft")
            rows += [(name, None) for name in (*names, "speed-up", "answers identical token by token")]
        else:
            slots = ", ".join(f"{slot}: {share(value)}" for slot, value in enumerate(summary.slot_acceptance, start=1))
            speeds = (summary.plain_tokens_per_s, summary.drafted_tokens_per_s)
            rows += [
                ("acceptance length", f"{number(summary.accept_len)} of {self.config.block_size}"),
                ("slots 1 … k all accepted", slots or None),
                ("plain → with the draft", " → ".join(number(speed, 1) for speed in speeds) + " tokens/s"),
                ("speed-up (median of the prompts)", f"{number(summary.speed_up)}×"),
                ("answers identical token by token", f"{summary.num_identical} of {summary.num_prompts}"),
            ]
        temperature = protocol.temperature
        rows += [
            ("prompts", protocol.prompts),
            ("temperature", "0 (greedy)" if temperature == 0 else temperature),
            ("longest answer", words(protocol.max_new_tokens, "{} tokens")),
            ("dtype", protocol.dtype),
            ("target's weights", protocol.target_weights),
            ("decoding", protocol.decoding),
            ("hardware", protocol.hardware),
            ("software", protocol.software),
            ("seed", "none needed (greedy)" if temperature == 0 and protocol.seed is None else protocol.seed),
        ]
        return rows

    def _draft_rows(self) -> list[tuple[str, Any]]:
        config = self.config
        windows = [config.layer_window(layer) for layer in range(config.num_hidden_layers)]
        attention = ", ".join("full" if window is None else f"window of {window}" for window in windows)
        heads = f"{config.num_attention_heads} query, {config.num_key_value_heads} key-value, {config.head_dim} wide"
        mask_token = f" ({self.mask_token})" if self.mask_token is not None else f", text {NOT_RECORDED}"
        license_words = f"{self.target_license}, that of the target's card" if self.target_license else None
        return [
            ("target", self.target_id or (f"local folder {self.target_folder}" if self.target_folder else None)),
            ("target revision", config.target_revision),
            ("chat template", self.has_chat_template),
            ("chat-template arguments", arguments_in_words(self.chat_template_kwargs)),
            ("block size", config.block_size),
            ("target layers read", f"{config.target_layer_ids} of {config.target_num_hidden_layers}, counted from 0"),
            ("mask token", f"{config.mask_token_id}{mask_token}"),
            ("draft layers", f"{config.num_hidden_layers} ({attention})"),
            ("hidden and intermediate size", f"{config.hidden_size}, {config.intermediate_size}"),
            ("heads", heads),
            ("parameters", words(self.num_parameters, "{:,}")),
            ("licence", self.license or license_words),
            ("layout of this package", self.native_repo),
            ("layout of serving engines", self.serving_repo),
        ]

    def _training_rows(self) -> list[tuple[str, Any]]:
        steps = words(self.steps)
        if self.last_step is not None and self.last_step != self.steps:
            steps += f" (the best; the run had {self.last_step})"
        arguments = self.training_arguments
        return [
            ("data", self.training_data),
            ("answers written by the target", self.answers_by_target),
            ("rows", words(self.num_rows, "{:,}")),
            ("tokens in the rows", words(self.num_tokens, "{:,}")),
            ("started from", self.initialized_from),
            ("optimizer steps", steps),
            ("epochs", words(self.epochs, "{:.4g}")),
            ("input tokens, as Trainer counts them", words(self.tokens_seen, "{:,}")),
            ("loss, last logged", number(self.train_loss, 3)),
            ("acceptance length of trained blocks, last logged", number(self.train_accept_len)),
            ("seed", self.seed),
            ("hardware", self.hardware),
            ("software", self.software),
            (
                "arguments that differ from their defaults",
                None if arguments is None else "below" if arguments else "none",
            ),
            *((f"`{name}`", str(value)) for name, value in (arguments or {}).items()),
        ]


def write_model_card(folder: str | Path, card: DraftCard, *, overwrite: bool = False) -> bool:
    """
    Write `README.md`, its picture and the facts of both (`card_facts.json`) into a draft's folder.

    Args:
        folder (`str` or `Path`): where the draft is saved.
        card ([`DraftCard`]): the facts.
        overwrite (`bool`, defaults to `False`): replace a README that somebody has edited, too.

    Returns:
        `bool`: whether the README was written; False if one that this function has not written, or that was edited
        since, was kept.
    """
    folder = Path(folder)
    path = folder / CARD_NAME
    picture = _draw(card, folder / PICTURE_NAME)
    reason = "matplotlib was not installed when this card was written; the table has the numbers."
    has_slots = _slots_of(card) is not None
    write_text(folder / FACTS_NAME, json.dumps(card.as_facts(), indent=1, ensure_ascii=False, default=str) + "\n")
    if path.is_file() and not overwrite and not is_own_card(path.read_text(encoding="utf-8", errors="replace")):
        logger.warning(
            f"{path} was edited or comes from elsewhere, so it is kept as it is. Remove or rename it to get the new "
            f"card; its facts are in {FACTS_NAME}."
        )
        return False
    suite_pictures = [name for name in (card.suite.pictures if card.suite else ()) if (folder / name).is_file()]
    write_text(path, str(card.render(picture, reason if has_slots else None, suite_pictures)))
    return True


def is_own_card(content: str) -> bool:
    """
    Whether a README is one that [`write_model_card`] wrote, and nobody has changed since.

    Args:
        content (`str`): the whole text.

    Returns:
        `bool`
    """
    mark = MARK.search(content)
    return mark is not None and mark.group(1) == digest(content[: mark.start()])


def _mark(content: str) -> str:
    return f"\n<!-- Written by dflash_hf, digest {digest(content)}. A text that was edited is never overwritten. -->\n"


def license_of_folder(folder: str | None) -> str | None:
    """
    The licence that the card in a local folder names.

    Args:
        folder (`str`, *optional*): of a target, say; a Hub name is not looked up.

    Returns:
        `str` or `None`.
    """
    path = Path(folder) / CARD_NAME if folder else None
    if path is None or not path.is_file():
        return None
    try:
        license_id = ModelCard.load(path).data.get("license")
    except (ValueError, yaml.YAMLError):  # no readable metadata
        return None
    return license_id if isinstance(license_id, str) else None


def _count_parameters(folder: Path) -> int | None:
    """Parameters of a saved draft, from the headers of its files; `None` without weights."""
    if not any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        return None
    shapes = tensor_shapes(folder)
    return sum(math.prod(shape) for name, (_, shape) in shapes.items() if name not in TARGET_TENSORS)


def _evaluation_cells(evaluation: Evaluation) -> list[str]:
    accuracy = ", ".join(f"{slot}: {share(value)}" for slot, value in enumerate(evaluation.slot_accuracy, start=1))
    values = (evaluation.accept_len, evaluation.serving_accept_len, evaluation.generate_accept_len)
    name = evaluation.name or ("held-out rows" if evaluation != Evaluation() else None)
    cells = [name, evaluation.step, number(evaluation.loss, 3), *map(number, values), accuracy or None]
    return [table_cell(cell) for cell in cells]


def _serving_folder(draft: str) -> str:
    """A folder whose name has "DFlash" in it, by which serving engines know the method, and is not the source's."""
    name = draft.rstrip("/").rsplit("/", 1)[-1]
    return f"{name}-serving" if "dflash" in name.lower() else f"{name}-DFlash"


def _slots_of(card: DraftCard) -> tuple[Sequence[float], str, str] | None:
    """Shares to draw, what they are, and a title: of generation if it was measured, else of the last evaluation."""
    if card.measured is not None and card.measured.slot_acceptance:
        lengths = f"Acceptance length {number(card.measured.accept_len)}, speed-up {number(card.measured.speed_up)}×"
        return card.measured.slot_acceptance, "slots 1 … k accepted", lengths
    for evaluation in card.evaluations:
        if evaluation.slot_accuracy:
            where = f", step {evaluation.step}" if evaluation.step is not None else ""
            title = f"Held-out rows{where}: acceptance length {number(evaluation.accept_len)}"
            return evaluation.slot_accuracy, "slot k right", title
    return None


def _draw(card: DraftCard, path: Path) -> str | None:
    """Draw the card's slots, if it has any and matplotlib (an extra) is there; returns the file's name."""
    slots = _slots_of(card)
    try:
        if slots is not None:
            draw_slots(*slots, path)
            return path.name
    except ImportError:
        pass
    path.unlink(missing_ok=True)  # one of other numbers
    return None


def write_suite_card(draft_folder: str | Path, output: SuiteOutput, folder: str | Path) -> bool:
    """
    Write the results into the model card of a saved draft, and their pictures beside it.

    Args:
        draft_folder (`str` or `Path`): where the draft is saved.
        output ([`SuiteOutput`]): written.
        folder (`str` or `Path`): of the evaluation, which has the pictures.

    Returns:
        `bool`: as of [`write_model_card`].
    """
    for name in output.record["pictures"]:
        shutil.copyfile(Path(folder) / name, Path(draft_folder) / name)
    card = replace(DraftCard.from_folder(draft_folder), suite=output.for_card())
    return write_model_card(draft_folder, card)
