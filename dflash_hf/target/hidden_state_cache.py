"""Cache of the target's hidden states, computed once for every row, in memory or in safetensors files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.utils import logging

from ..files import differences, digest, json_digest, remove_partial_files, replace_file, write_text
from .hidden_states import target_hidden_states

logger = logging.get_logger(__name__)

SHARD_BYTES = 512 * 2**20
FINGERPRINT_FILE = "fingerprint.json"
STALE_TEMPORARY_S = 3600  # far longer than the writing of a shard takes
CHECKSUM_SEGMENTS = 1024
# Entries of the configuration that do not change hidden states.
IRRELEVANT_CONFIG = ("architectures", "dtype", "transformers_version", "use_cache", "tie_last_hidden_states")


def row_key(input_ids: Sequence[int] | torch.Tensor) -> bytes:
    """Return the key of a row, a digest of its tokens: equal text has equal states in any data set."""
    return bytes.fromhex(digest(torch.as_tensor(input_ids).cpu().numpy().tobytes(), size=16))


class MemoryHiddenStateCache:
    """Hidden states of rows in memory, by [`row_key`]."""

    is_shared = False  # every process has a cache of its own and needs all rows

    def __init__(self) -> None:
        self._states: dict[bytes, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, key: bytes) -> bool:
        return key in self._states

    def get(self, key: bytes) -> torch.Tensor:
        return self._states[key]

    def add(self, key: bytes, states: torch.Tensor) -> None:
        self._states[key] = states.clone()

    def reserve(self, num_bytes: int) -> str:
        return f"{num_bytes / 2**30:.2f} GiB of memory"

    def flush(self) -> None:
        """Do nothing, since no row waits to be written."""

    def refresh(self) -> None:
        """Do nothing, since no other process adds rows."""


class DiskHiddenStateCache:
    """
    Hidden states of rows in a folder of safetensors shards, which hold one tensor for each row.

    A shard gets its name once it is complete on the disk. An interrupted run therefore leaves only complete shards,
    and the next run computes the rows that none of them holds. Each shard records its target, and several processes
    and runs may add to one folder.

    Args:
        folder (`str` or `Path`): created if it does not exist; may be deleted between runs.
        fingerprint (`dict`): from [`hidden_state_fingerprint`]; `fingerprint.json` in the folder must equal it.
        shard_bytes (`int`, defaults to 512 MiB): rows are collected in memory up to this size and then written.

    Raises:
        ValueError: the folder holds the states of another target, other layers or another dtype; the message names
            each difference.
        OSError: a file of the folder is damaged; the message names it.
    """

    is_shared = True

    def __init__(self, folder: str | Path, fingerprint: dict[str, Any], shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.shard_bytes = Path(folder), shard_bytes
        self.fingerprint = json.loads(json.dumps(fingerprint))
        self._digest = json_digest(_compared(self.fingerprint), size=16)
        self._shards: dict[str, Any] = {}  # kept open, since a mapped file holds no descriptor
        self._shard_of: dict[bytes, Any] = {}
        self._waiting: dict[bytes, torch.Tensor] = {}
        self._waiting_bytes = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        # The pattern matches the start of the name only, since version 0.1.0 ended temporary files differently.
        remove_partial_files(self.folder, ".states-*", STALE_TEMPORARY_S)
        self._check_fingerprint()
        self.refresh()

    def __len__(self) -> int:
        return len(self._shard_of) + len(self._waiting)

    def __contains__(self, key: bytes) -> bool:
        return key in self._shard_of or key in self._waiting

    def get(self, key: bytes) -> torch.Tensor:
        """Return the states of a row, mapped from its file; a `KeyError` if no shard holds it."""
        if key in self._waiting:
            return self._waiting[key]
        return self._shard_of[key].get_tensor(key.hex())

    def add(self, key: bytes, states: torch.Tensor) -> None:
        """Add the states of a row, `[tokens, width]`, which are written together with those of other rows."""
        self._waiting[key] = states.clone()
        self._waiting_bytes += states.numel() * states.element_size()
        if self._waiting_bytes >= self.shard_bytes:
            self.flush()

    def reserve(self, num_bytes: int) -> str:
        """Describe the space for `num_bytes` more bytes; an `OSError` if the disk does not have it."""
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes:
            raise OSError(
                f"The hidden states need {num_bytes / 2**30:.2f} GiB, and the disk of {str(self.folder)!r} has "
                f"{free / 2**30:.2f} GiB left. Pass a state_cache_dir on a larger disk, train on fewer or shorter "
                "rows or fewer target_layer_ids, or leave cache_target_states unset."
            )
        return f"{num_bytes / 2**30:.2f} GiB of {free / 2**30:.2f} GiB free in {str(self.folder)!r}"

    def flush(self) -> None:
        """Write the rows that were added since the last shard."""
        if not self._waiting:
            return
        # The name depends on the rows, so that two runs that fill one folder never give it to different shards.
        name = f"states-{digest(b''.join(sorted(self._waiting)))}.safetensors"
        replace_file(self.folder / name, self._save_waiting)
        self._waiting, self._waiting_bytes = {}, 0
        self._open(name)

    def _save_waiting(self, path: Path) -> None:
        """Write the waiting rows to a file."""
        rows = {key.hex(): states for key, states in self._waiting.items()}
        try:
            save_file(rows, path, metadata={"fingerprint": self._digest})
        except SafetensorError as error:  # safetensors 0.8 raises it if the disk is full
            raise OSError(str(error)) from error

    def refresh(self) -> None:
        """Open the shards that other processes have added."""
        for path in sorted(self.folder.glob("states-*.safetensors")):
            if path.name not in self._shards:
                self._open(path.name)

    def _open(self, name: str) -> None:
        """Open a shard and refuse one that is damaged or of another target."""
        width = self.fingerprint["width"]
        try:
            shard = safe_open(self.folder / name, framework="pt")
        except (SafetensorError, OSError) as error:
            raise self._damaged(name, error) from error
        if (shard.metadata() or {}).get("fingerprint") != self._digest:
            raise self._damaged(name, "it was made for another target, other layers or another dtype")
        keys = list(shard.keys())
        for key in keys:
            shape = shard.get_slice(key).get_shape()
            if len(shape) != 2 or shape[1] != width:
                raise self._damaged(name, f"row {key} has the shape {shape}, not [tokens, {width}]")
        self._shards[name] = shard
        self._shard_of.update((bytes.fromhex(key), shard) for key in keys)

    def _damaged(self, name: str, reason: object) -> OSError:
        """Return the error for a shard that cannot be used."""
        return OSError(
            f"The shard {name!r} of the hidden states in {str(self.folder)!r} cannot be used: {reason}. Delete this "
            "file, and its rows are computed again."
        )

    def _check_fingerprint(self) -> None:
        """Write the fingerprint of a new folder, and refuse a folder with another one."""
        path = self.folder / FINGERPRINT_FILE
        if not path.exists():
            write_text(path, json.dumps(self.fingerprint, indent=1))
            return
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise OSError(
                f"{str(path)!r} is damaged ({error}), so that the target of these hidden states is unknown. Delete "
                f"the folder {str(self.folder)!r}, or pass another state_cache_dir."
            ) from error
        changes = differences(_compared(found), _compared(self.fingerprint))
        if changes:
            raise ValueError(
                f"The hidden states in {str(self.folder)!r} were computed with {found.get('target')!r} and differ "
                f"from those of this run with {self.fingerprint['target']!r}: {'; '.join(map(str, changes))}. Delete "
                "the folder, or pass another state_cache_dir."
            )


HiddenStateCache = MemoryHiddenStateCache | DiskHiddenStateCache


def hidden_state_fingerprint(
    target: PreTrainedModel, target_layer_ids: list[int], *, include_final_state: bool = False
) -> dict[str, Any]:
    """
    Describe everything that the hidden states of a row depend on apart from its tokens.

    Rows are found by their tokens, so that data set and tokenizer are not part of the description. The name of the
    target is recorded but not compared, since a folder may move; its weights are compared instead.

    Args:
        target (`PreTrainedModel`): its configuration is described without the ids of special tokens, and its weights
            by a checksum over all of their bits.
        target_layer_ids (`list[int]`), include_final_state (`bool`): as in [`target_hidden_states`].

    Returns:
        `dict` of JSON values.
    """
    config = json.loads(target.config.to_json_string(use_diff=True))
    text = target.config.get_text_config(decoder=True)
    return {
        "format": 1,
        "target": target.config.name_or_path or type(target).__name__,
        "target_revision": getattr(target.config, "_commit_hash", None),
        "target_layer_ids": list(target_layer_ids),
        "include_final_state": include_final_state,
        "dtype": str(target.dtype).removeprefix("torch."),
        "width": (len(target_layer_ids) + include_final_state) * text.hidden_size,
        "target_config": _relevant(config),
        "target_weights": weights_checksum(target),
    }


def _relevant(config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a configuration that may change hidden states."""
    return {
        name: _relevant(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if not name.startswith("_") and not name.endswith("token_id") and name not in IRRELEVANT_CONFIG
    }


def _compared(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Return the compared entries of a fingerprint with flat names such as `target_config.rope_theta`."""
    flat: dict[str, Any] = {}
    for name, value in fingerprint.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": innermost for inner, innermost in _compared(value).items()}
        elif name not in ("target", "target_revision"):
            flat[name] = value
    return flat


@torch.no_grad()
def weights_checksum(model: PreTrainedModel) -> str:
    """
    Return a checksum of all weights of a model and of the strengths of its adapters.

    It covers names, shapes, dtypes and all bits of the weights, and is the same on every device.

    Args:
        model (`PreTrainedModel`): may be quantised; weights that are not in memory (`meta`) count by their shape.

    Returns:
        `str`: 32 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(model.state_dict().items()):
        for tensor in _plain_tensors(value):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            if tensor.is_meta or tensor.numel() == 0:
                continue
            data = tensor.reshape(-1)
            data = (data.clone() if data.storage_offset() else data).view(torch.uint8)
            # Sums of integers do not depend on the order of summation. Many of them are taken, so that values that
            # exchange their places change the checksum.
            words, rest = data[: data.numel() // 8 * 8].view(torch.int64), data[data.numel() // 8 * 8 :]
            even = words.numel() // CHECKSUM_SEGMENTS * CHECKSUM_SEGMENTS
            sums = words[:even].view(CHECKSUM_SEGMENTS, -1).sum(1)
            sums = torch.cat([sums, words[even:].sum()[None], rest.sum()[None]])
            digest.update(sums.cpu().numpy().tobytes())
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):  # a layer of peft around a layer of the model
            settings = [getattr(module, key, None) for key in ("active_adapters", "disable_adapters", "scaling")]
            digest.update(f"{name} {settings}".encode())
    return digest.hexdigest()


def _plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that hold the data of a tensor, which may be of a quantised tensor class."""
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def fill_hidden_state_cache(
    cache: HiddenStateCache,
    target: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    target_layer_ids: list[int],
    *,
    include_final_state: bool = False,
    description: str = "train",
    batch_tokens: int | None = None,
    accelerator: Accelerator | None = None,
    show_progress: bool = True,
) -> None:
    """
    Compute the hidden states of all rows that the cache does not hold.

    An interrupt (Ctrl-C) loses the rows of the running forward pass. Killing the process loses the rows of the
    unfinished shard of a disk cache. Rows that the cache holds are not computed again.

    Args:
        cache ([`MemoryHiddenStateCache`] or [`DiskHiddenStateCache`]): the cache to fill.
        target (`PreTrainedModel`): in evaluation mode.
        rows (`Sequence[Sequence[int]]`): token ids of each row.
        target_layer_ids (`list[int]`), include_final_state (`bool`): as in [`target_hidden_states`].
        description (`str`, defaults to `"train"`): names the set in messages.
        batch_tokens (`int`, *optional*): tokens of a forward pass, padding included; by default 2,048 on a CPU,
            so that a batch fits its caches, and 16,384 elsewhere.
        accelerator (`Accelerator`, *optional*): in several processes each computes a share of a disk cache and
            waits for the others.
        show_progress (`bool`, defaults to `True`): show a progress bar.

    Raises:
        OSError: the disk is too small, which is checked before the first pass, or another process wrote to a folder
            that this process does not see.
    """
    if batch_tokens is None:
        batch_tokens = 2048 if target.device.type == "cpu" else 16384
    all_missing = {key: ids for ids in rows if (key := row_key(ids)) not in cache}
    num_tokens = sum(len(ids) for ids in all_missing.values())
    hidden_size = target.config.get_text_config(decoder=True).hidden_size
    width = (len(target_layer_ids) + include_final_state) * hidden_size
    space = cache.reserve(num_tokens * width * target.dtype.itemsize)
    is_first = accelerator is None or accelerator.is_main_process
    if is_first:
        logger.warning_advice(
            f"The hidden states of {len(all_missing):,} of {len(rows):,} {description} rows ({num_tokens:,} tokens) "
            f"are computed now. They take {space}."
        )
    if accelerator is not None and cache.is_shared:
        # The key decides the share: a process that starts late already sees rows of the others, and must not divide
        # the remaining rows in another way.
        index, count = accelerator.process_index, accelerator.num_processes
        mine = [ids for key, ids in all_missing.items() if int.from_bytes(key) % count == index]
    else:
        mine = list(all_missing.values())
    share = sorted(mine, key=len)
    progress = logging.tqdm(
        total=sum(len(ids) for ids in share),
        desc=f"Hidden states of the {description} rows",
        unit="token",
        unit_scale=True,
        disable=not (show_progress and is_first),
    )
    try:
        for batch in _batches_by_length(share, batch_tokens):
            input_ids = pad_sequence([torch.as_tensor(ids) for ids in batch], batch_first=True)
            lengths = torch.tensor([len(ids) for ids in batch])
            valid = torch.arange(input_ids.shape[1]) < lengths[:, None]
            states = target_hidden_states(
                target, input_ids, valid, target_layer_ids, include_final_state=include_final_state
            )
            for ids, row in zip(batch, states, strict=True):
                cache.add(row_key(ids), row[: len(ids)])
            progress.update(int(lengths.sum()))
    finally:
        cache.flush()
        progress.close()
    if accelerator is not None and cache.is_shared:
        accelerator.wait_for_everyone()
        cache.refresh()
        unseen = sum(key not in cache for key in all_missing)
        if unseen:
            raise OSError(
                f"{unseen} of {len(all_missing)} rows were computed by other processes and are not in the hidden-"
                "state cache of this one. Every process must see the same folder. Pass a state_cache_dir that all "
                "machines share."
            )


def cached_hidden_states(
    cache: HiddenStateCache, input_ids: torch.Tensor, token_valid_mask: torch.Tensor
) -> torch.Tensor | None:
    """
    Read the hidden states of a batch from a cache.

    Args:
        cache ([`MemoryHiddenStateCache`] or [`DiskHiddenStateCache`]): the cache.
        input_ids (`torch.LongTensor` of shape `[R, S]`): token ids.
        token_valid_mask (`torch.BoolTensor` of shape `[R, S]`): True at real tokens.

    Returns:
        `torch.FloatTensor` of shape `[R, S, width]` on the device of `input_ids`, 0 at padding; `None` if a row is
        not in the cache.
    """
    keys = [row_key(ids[valid]) for ids, valid in zip(input_ids, token_valid_mask, strict=True)]
    if not all(key in cache for key in keys):
        return None
    rows = [cache.get(key) for key in keys]
    states = torch.zeros(*input_ids.shape, rows[0].shape[1], dtype=rows[0].dtype, device=input_ids.device)
    for row, valid, cached in zip(states, token_valid_mask, rows, strict=True):
        row[valid] = cached.to(states.device, non_blocking=True)
    return states


def _batches_by_length(rows: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[Sequence[int]]]:
    """Yield batches of rows that are sorted by length."""
    batch: list[Sequence[int]] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(row) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
