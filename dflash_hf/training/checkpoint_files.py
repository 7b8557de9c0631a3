"""The files of a checkpoint from which training is resumed: which are missing, truncated or of another model."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import sort_checkpoints
from transformers.utils import logging

from ..checkpoints.io import read_json, tensor_shapes

logger = logging.get_logger(__name__)

STATE = "trainer_state.json"
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
# What torch.save writes: the states of optimizer, schedule, gradient scaler and random generators.
ZIP_FILES = (OPTIMIZER, SCHEDULER, "scaler.pt", "optimizer.bin", "rng_state*.pth")


def last_complete_checkpoint(output_dir: str | Path, only_log: bool = False) -> str | None:
    """
    Return the newest complete checkpoint.

    Args:
        output_dir (`str`): folder of the checkpoints; it need not exist.
        only_log (`bool`, defaults to `False`): require only that the log can be read.

    Returns:
        `str` or `None`: its folder. A newer checkpoint that a crash left incomplete is skipped with a warning.
    """
    for folder in _newest_first(output_dir):
        problem = damaged_state(folder) if only_log else damage(folder)
        if problem is None:
            return folder
        logger.warning(f"{folder} is skipped, since it is incomplete: {problem}.")
    return None


def _newest_first(output_dir: str | Path) -> list[str]:
    """Return the folders of the checkpoints."""
    return list(reversed(sort_checkpoints(str(output_dir)))) if Path(output_dir).is_dir() else []


def damage(folder: str | Path) -> str | None:
    """
    Describe the first damaged file of a checkpoint.

    Whole files are read, since a crash of the machine may leave a file of the right length without its content.
    Files that some checkpoints do not have, such as the state of the optimizer, are not missed here.

    Args:
        folder (`str` or `Path`): the checkpoint.

    Returns:
        `str` or `None`: a clause that begins with the name of the file.
    """
    folder = Path(folder)
    return damaged_state(folder) or _damaged_json(folder) or _damaged_zip(folder) or damaged_weights(folder)


def damaged_state(folder: str | Path) -> str | None:
    """
    Describe what is wrong with the step and the log of a checkpoint.

    Args:
        folder (`str` or `Path`): the checkpoint.

    Returns:
        `str` or `None`: a clause.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return "the folder does not exist"
    if not (folder / STATE).is_file():
        return f"{STATE}, which is written last, is missing"
    try:
        state = TrainerState(**read_json(folder / STATE))
    except (OSError, TypeError) as error:
        return f"{STATE} is unreadable ({error})"
    step, log, callbacks = state.global_step, state.log_history, state.stateful_callbacks
    if not isinstance(step, int) or not isinstance(log, list) or not isinstance(callbacks, dict):
        return f"{STATE} is unreadable (it does not hold the fields that Trainer writes)"
    return None


def _damaged_json(folder: Path) -> str | None:
    """Describe the first damaged configuration or index."""
    for name in ("config.json", "model.safetensors.index.json"):
        if (folder / name).is_file():
            try:
                read_json(folder / name)
            except OSError as error:
                return f"{name} is unreadable ({error})"
    return None


def _damaged_zip(folder: Path) -> str | None:
    """Describe the first damaged file that torch.save wrote."""
    for path in sorted(path for pattern in ZIP_FILES for path in folder.glob(pattern)):
        try:
            with zipfile.ZipFile(path) as archive:
                entry = archive.testzip()
        except (OSError, zipfile.BadZipFile) as error:
            return f"{path.name} is truncated or damaged ({error})"
        if entry is not None:
            return f"{path.name} is damaged (at {entry})"
    return None


def damaged_weights(folder: str | Path) -> str | None:
    """
    Describe the first damaged or missing file of the weights of a checkpoint.

    Args:
        folder (`str` or `Path`): the checkpoint.

    Returns:
        `str` or `None`: a clause.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return "the folder does not exist"
    if not _has_plain_weights(folder):
        return None
    try:
        tensor_shapes(folder)
    except OSError as error:
        names = re.findall(r"[\w-]+\.safetensors(?:\.index\.json)?", str(error))
        return f"{names[-1] if names else 'the index of the weights'} is missing, truncated or damaged ({error})"
    return None


def _has_plain_weights(folder: Path) -> bool:
    """Return whether `save_model` wrote the weights; DeepSpeed and FSDP write shards in folders."""
    return (folder / "model.safetensors").exists() or not any(path.is_dir() for path in folder.iterdir())


def check_files(folder: str | Path) -> None:
    """
    Refuse a checkpoint with a damaged file.

    Args:
        folder (`str` or `Path`): the checkpoint.

    Raises:
        ValueError: a file is missing or damaged. The message names it, and the newest checkpoint beside it that is
            complete.
    """
    problem = damage(folder)
    if problem is None:
        return
    other = _complete_neighbour(folder)
    advice = (
        f"Resume from {other}, which is complete" if other else "No checkpoint beside it is complete, so train anew"
    )
    raise ValueError(f"{str(folder)!r} is no complete checkpoint: {problem}. {advice}.")


def _complete_neighbour(folder: str | Path) -> str | None:
    """Return the newest complete checkpoint beside a folder."""
    return next((other for other in _newest_first(Path(folder).parent) if damage(other) is None), None)


@contextmanager
def name_of_unwritten(folder: str | Path) -> Iterator[None]:
    """
    Name a checkpoint that cannot be written completely, because its disk is full or read-only.

    Args:
        folder (`str` or `Path`): the checkpoint that is written inside the context.

    Raises:
        OSError: a file could not be written. The message names the newest checkpoint that is complete.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises a RuntimeError
        if damage(folder) is None:
            raise
        other = _complete_neighbour(folder)
        advice = (
            f"resume from {other}, which is complete" if other else "train anew, since no other checkpoint is complete"
        )
        raise OSError(
            f"{str(folder)!r} could not be written completely ({str(error).splitlines()[0]}). Make room on its disk "
            f"or choose another output_dir, and {advice}."
        ) from error


def check_weights(folder: str | Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """
    Refuse a checkpoint whose weights are not those of a draft like the one that is trained.

    Args:
        folder (`str` or `Path`): a checkpoint with complete files.
        shapes (`Mapping`): shape of every tensor of the draft that is saved.

    Raises:
        ValueError: tensors are missing, unknown or of another shape.
    """
    folder = Path(folder)
    if not _has_plain_weights(folder):
        return
    found = {name: shape for name, (_, shape) in tensor_shapes(folder).items()}
    missing, unknown = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    others = sorted(name for name in shapes.keys() & found.keys() if shapes[name] != found[name])
    problems: list[str] = [f"it lacks {_some(missing)}"] if missing else []
    problems += [f"it has {_some(unknown)}, which the draft has not"] if unknown else []
    problems += [f"{_some(others)} have another shape"] if others else []
    if problems:
        raise ValueError(
            f"The weights of {str(folder)!r} are not those of the draft: {'; '.join(problems)}. Resume from a "
            "checkpoint of this draft."
        )


def _some(names: list[str]) -> str:
    """Name the first tensors of a list."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def missing_states(folder: str | Path, args: Any) -> list[str]:
    """
    Name the states that a checkpoint does not hold, and say how the run goes on without them.

    Args:
        folder (`str` or `Path`): the checkpoint.
        args (`TrainingArguments`): arguments of the run that resumes from it.

    Returns:
        `list[str]` of clauses; empty for a checkpoint with every state.
    """
    folder = Path(folder)
    # FSDP and DeepSpeed keep the state of the optimizer in folders.
    is_plain = not any(path.is_dir() for path in folder.iterdir()) and not (folder / "optimizer.bin").is_file()
    names = [name for name in (OPTIMIZER, SCHEDULER) if is_plain and not (folder / name).is_file()]
    found = []
    if names:
        found.append(
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing (save_only_model=True writes none), "
            "so that the optimizer starts afresh, without its moments, and the learning rate begins with the warm-up"
        )
    random = "rng_state.pth" if args.world_size <= 1 else f"rng_state_{args.process_index}.pth"
    if not (folder / random).is_file():
        found.append(f"{random} is missing, so that dropout differs")
    return found
