"""Pushes a draft to the Hub: its files and its card, without other files of a training run."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import (
    CommitInfo,
    auth_check,
    constants,
    create_branch,
    create_repo,
    hf_hub_download,
    run_as_future,
    upload_folder,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, RemoteEntryNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers.trainer_utils import HubStrategy
from transformers.utils import CONFIG_NAME, logging

from ..checkpoints.io import INDEX, WEIGHTS, read_json, save_in_layout, tensor_shapes
from ..model.configuration_dflash import DFlashConfig
from ..model.modeling_dflash import DFlashDraftModel
from ..model.remote_code import local_draft
from .model_card import CARD_NAME, FACTS_NAME, DraftCard, is_own_card, write_model_card

logger = logging.get_logger(__name__)

CODE_FILES = ("configuration_dflash.py", "modeling_dflash.py")
WEIGHT_PATTERNS = ["model*.safetensors", INDEX]


def draft_files(folder: str | os.PathLike[str]) -> list[str]:
    """
    List the files of a folder that belong to the draft saved in it.

    Args:
        folder (`str` or `PathLike`): The folder in which a draft was saved, in any layout.

    Returns:
        `list[str]`: configuration and weights, and where they exist the source files and the card with its facts and
        pictures. No other file of the folder is listed.

    Raises:
        OSError: Configuration or weights are missing or damaged, or an index names a file outside the folder.
    """
    folder = Path(folder)
    read_json(folder / CONFIG_NAME)
    weights = sorted({file.name for file, _ in tensor_shapes(folder).values()})
    index = [INDEX] if weights != [WEIGHTS] else []
    code = [name for name in CODE_FILES if (folder / name).is_file()]
    return [CONFIG_NAME, *weights, *index, *code, *_card_files(folder)]


def _card_files(folder: Path) -> list[str]:
    """List the card, if there is one, with the file of its facts and the pictures that it shows."""
    card = folder / CARD_NAME
    if not card.is_file():
        return []
    pictures = re.findall(r"!\[[^\]]*\]\(([\w.-]+)\)", card.read_text(encoding="utf-8"))
    return [CARD_NAME, *(name for name in (FACTS_NAME, *pictures) if (folder / name).is_file())]


def check_target_name(config: DFlashConfig, target_name: str | None = None) -> None:
    """
    Refuse to push a draft whose target nobody else could find.

    Args:
        config ([`DFlashConfig`]): The draft's configuration.
        target_name (`str`, *optional*): A Hub name that replaces the one in the configuration.

    Raises:
        ValueError: The target has no name, or its name is that of a local folder.
    """
    name = target_name or config.target_name_or_path or ""
    try:
        validate_repo_id(name)
        is_hub_name = target_name is not None or (name != "" and not Path(name).exists())
    except HFValidationError:
        is_hub_name = False
    if not is_hub_name:
        source = "target_name" if target_name is not None else "The draft's target_name_or_path"
        raise ValueError(
            f"{source}={name or None!r} is no name on the Hub, or it is also a local folder. Whoever downloads the "
            "draft must be able to load its target. Pass target_name='org/model' (dflash-hf push --target-name "
            "org/model), or set draft.config.target_name_or_path to a name on the Hub before training."
        )


def check_pushing_run(config: DFlashConfig, hub_strategy: HubStrategy) -> None:
    """
    Check before a training run that its checkpoints can be pushed, and log which files are not pushed.

    Args:
        config ([`DFlashConfig`]): The draft's configuration.
        hub_strategy (`HubStrategy`): The strategy in the training arguments.

    Raises:
        ValueError: The draft's target is not on the Hub.
    """
    check_target_name(config)
    if hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        logger.warning(
            f"hub_strategy={hub_strategy.value!r} pushes only drafts and cards. The states of the optimizer and of "
            "the random generators are pickles, which are never pushed. Resume from output_dir, where they stay."
        )


def check_repo_names(repo_id: str, serving_repo: str | None) -> None:
    """
    Check the names of the repositories to which a draft is pushed.

    Args:
        repo_id (`str`): The repository of the native layout.
        serving_repo (`str`, *optional*): The repository of the serving layout.

    Raises:
        ValueError: The Hub does not allow a name, both names are equal, or vLLM would not recognise the serving layout
            by its name.
    """
    validate_repo_id(repo_id)
    if serving_repo is None:
        return
    validate_repo_id(serving_repo)
    if serving_repo == repo_id:
        raise ValueError(
            f"serving_repo={serving_repo!r} is also the repository of the native layout, but each layout has a "
            "config.json of its own. Use another repository for the serving layout."
        )
    if "dflash" not in serving_repo.rpartition("/")[2].lower():
        raise ValueError(
            f"serving_repo={serving_repo!r} has no 'dflash' in its name, by which vLLM recognises the method of a "
            f"draft. Choose another name, for example {serving_repo}-DFlash."
        )


def upload_draft(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    path_in_repo: str | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """
    Upload only the files of a saved draft, in one commit.

    Weight files of an earlier push that are no longer part of the draft are deleted, because a `model.safetensors`
    beside new shards would be loaded instead of them. A README that was edited on the Hub is kept, unless the one in
    the folder was edited as well.

    Args:
        folder (`str` or `PathLike`): The folder in which the draft was saved.
        repo_id (`str`): An existing repository.
        path_in_repo (`str`, *optional*): A folder in the repository, by default its root.
        token (`str` or `bool`, *optional*): The token of a user with write access, by default that of the login.
        revision (`str`, *optional*): The branch to push to, by default `"main"`. It is created if necessary.
        commit_message, commit_description (`str`, *optional*): Title and description of the commit.
        create_pr (`bool`, defaults to `False`): Whether to open a pull request instead of a commit.

    Returns:
        `CommitInfo`

    Raises:
        OSError: The folder contains no draft, or the Hub refuses the upload (`HfHubHTTPError`).
    """
    folder = Path(folder)
    files = draft_files(folder)
    with _clear_hub_errors():
        if revision is not None and not revision.startswith("refs/"):
            create_branch(repo_id, branch=revision, token=token, exist_ok=True)
        if CARD_NAME in files and is_own_card((folder / CARD_NAME).read_text(encoding="utf-8")):
            there = f"{path_in_repo}/{CARD_NAME}" if path_in_repo else CARD_NAME
            if _is_edited_there(repo_id, there, token=token, revision=revision):
                logger.warning(
                    f"The README of {repo_id} was edited there and is kept. Delete it there and push again to get the "
                    "new card."
                )
                files = [name for name in files if name not in _card_files(folder)]
        return upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            path_in_repo=path_in_repo,
            allow_patterns=files,
            delete_patterns=WEIGHT_PATTERNS,
            token=token,
            revision=revision,
            commit_message=commit_message or "Upload draft",
            commit_description=commit_description,
            create_pr=create_pr,
        )


def _is_edited_there(repo_id: str, path: str, **kwargs: Any) -> bool:
    """Tell whether the README of a repository exists and was edited by hand."""
    try:
        card = hf_hub_download(repo_id, path, **kwargs)
    except RemoteEntryNotFoundError:
        return False
    return not is_own_card(Path(card).read_text(encoding="utf-8", errors="replace"))


def upload_in_background(folder: str | os.PathLike[str], repo_id: str, **kwargs: Any) -> Future[CommitInfo]:
    """
    Upload a draft in a background thread. The upload is of a copy, so that the folder may change immediately.

    Args:
        folder (`str` or `PathLike`), repo_id (`str`), **kwargs: As in [`upload_draft`].

    Returns:
        `Future[CommitInfo]`. A failure is also logged.

    Raises:
        OSError: The folder contains no draft.
    """
    copy = TemporaryDirectory(dir=Path(folder).parent, prefix="_push-")
    _copy_files(draft_files(folder), Path(folder), Path(copy.name))

    def upload() -> CommitInfo:
        with copy:
            try:
                return upload_draft(copy.name, repo_id, **kwargs)
            except (OSError, RuntimeError, ValueError) as error:
                logger.warning(f"A push to the Hub failed: {' '.join(str(error).split())}")
                raise

    return run_as_future(upload)


def _copy_files(names: list[str], source: Path, destination: Path) -> None:
    """Copy files from one folder to another."""
    for name in names:
        shutil.copyfile(source / name, destination / name)


def push_draft(
    draft: DFlashDraftModel,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    tags: str | list[str] | None = None,
) -> CommitInfo:
    """
    Push a draft in the native layout with its card. `draft.push_to_hub` calls this function.

    Args:
        draft ([`DFlashDraftModel`]): The draft.
        repo_id (`str`): Its repository, which is created if necessary.
        max_shard_size (`int` or `str`, defaults to `"50GB"`): Maximum size of a weight file. A larger draft is split.
        tags (`str` or `list[str]`, *optional*): Further tags for the card.
        private, token: As in [`publish_draft`].
        commit_message, commit_description, revision, create_pr: As in [`upload_draft`].

    Returns:
        `CommitInfo`

    Raises:
        OSError: The Hub refuses the upload (`HfHubHTTPError`).
    """
    try:
        check_target_name(draft.config)
    except ValueError as error:
        logger.warning(str(error))
    with TemporaryDirectory() as folder:
        draft.save_pretrained(folder, max_shard_size=max_shard_size)
        with _clear_hub_errors():
            repository = create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        all_tags = [*(draft.model_tags or []), *([tags] if isinstance(tags, str) else tags or [])]
        card = replace(DraftCard.from_folder(folder), title=repository.rpartition("/")[2], native_repo=repository)
        write_model_card(folder, replace(card, tags=all_tags))
        return upload_draft(
            folder,
            repository,
            token=token,
            revision=revision,
            commit_message=commit_message,
            commit_description=commit_description,
            create_pr=create_pr,
        )


def publish_draft(
    draft: DFlashDraftModel | str | os.PathLike[str],
    repo_id: str,
    *,
    serving_repo: str | None = None,
    target_name: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
) -> dict[str, CommitInfo]:
    """
    Push a draft and its card to the Hub, optionally also in the layout of serving engines.

    Both folders are written and both repositories exist before the first file is uploaded.

    Args:
        draft ([`DFlashDraftModel`], `str` or `PathLike`):
            The draft, or the folder in which it is saved, whose card is pushed with it.
        repo_id (`str`):
            Repository of the native layout, for transformers. It is created if necessary.
        serving_repo (`str`, *optional*):
            Repository of the layout for vLLM and SGLang, with "dflash" in its name.
        target_name (`str`, *optional*):
            Hub name of the target, which is written into the pushed files. It is needed if the draft names its target
            by a folder.
        private (`bool`, *optional*):
            Whether new repositories are private. Existing ones do not change.
        token (`str` or `bool`, *optional*):
            The token of a user with write access to both, by default that of the login.
        revision (`str`, *optional*):
            The branch of both to push to, by default `"main"`. It is created if necessary.
        commit_message (`str`, *optional*):
            Title of both commits.

    Returns:
        `dict[str, CommitInfo]`: the commits under the full names of the repositories, the native one first.

    Raises:
        ValueError: A name is not allowed, the draft's target is not on the Hub, or a layout cannot express the draft.
        OSError: The folder contains no draft or a damaged one, or the Hub refuses the upload (`HfHubHTTPError`).
        RuntimeError: The native layout was pushed and the serving layout could not be.
    """
    check_repo_names(repo_id, serving_repo)
    with TemporaryDirectory() as temporary:
        native, serving = Path(temporary, "native"), Path(temporary, "serving")
        if not isinstance(draft, (str, os.PathLike)):
            source, loaded = native, local_draft(draft)
        else:
            source = Path(draft)
            draft_files(source)  # This raises an error if it is a Hub name instead of a folder.
            loaded = DFlashDraftModel.from_pretrained(source, target=False)
        config: DFlashConfig = loaded.config
        check_target_name(config, target_name)
        given_name = config.target_name_or_path
        config.target_name_or_path = target_name or given_name
        try:
            loaded.save_pretrained(native)
            card = DraftCard.from_folder(source, config)
            if serving_repo is not None:
                save_in_layout(loaded, serving, "serving")
        finally:
            config.target_name_or_path = given_name

        native_repo = _repository(repo_id, private, token)
        folders = {native_repo: native}
        if serving_repo is not None:
            serving_repo = _repository(serving_repo, private, token)
            check_repo_names(native_repo, serving_repo)  # Different short names may have equal full names.
            folders[serving_repo] = serving
        target_id = target_name or given_name
        card = replace(
            card, target_id=target_id, target_folder=None, native_repo=native_repo, serving_repo=serving_repo
        )
        for repository, folder in folders.items():
            if folder != source:
                _copy_files(_card_files(source), source, folder)  # A card that was edited by hand is kept.
            write_model_card(folder, replace(card, title=repository.rpartition("/")[2]))
        commits: dict[str, CommitInfo] = {}
        for repository, folder in folders.items():
            try:
                commits[repository] = upload_draft(
                    folder, repository, token=token, revision=revision, commit_message=commit_message
                )
            except (OSError, RuntimeError) as error:
                if not commits:
                    raise
                raise RuntimeError(
                    f"The native layout is up at {commits[native_repo].repo_url}, but the serving layout could not be "
                    f"pushed to {repository}: {' '.join(str(error).split())} Push again when the cause is removed. "
                    "Weights that were uploaded are not sent a second time."
                ) from error
        return commits


def _repository(name: str, private: bool | None, token: str | bool | None) -> str:
    """Create a repository if necessary, check the user's write access, and return its full name."""
    with _clear_hub_errors():
        full_name = create_repo(name, private=private, token=token, exist_ok=True).repo_id
        auth_check(full_name, token=token, write=True)
    return full_name


@contextmanager
def _clear_hub_errors() -> Iterator[None]:
    """Turn a missing login into an error that says what to do, and a broken connection into an `OSError`."""
    try:
        yield
    except HfHubHTTPError as error:
        if error.response.status_code != 401:
            raise
        raise PermissionError(
            f"The Hub does not accept the login: {' '.join(str(error).split())} Pushing needs a user with write "
            "access. Log in with hf auth login, or pass a token."
        ) from error
    except HTTPError as error:
        raise ConnectionError(
            f"The Hub at {constants.ENDPOINT} cannot be reached: {error}. Check the network, and push again."
        ) from error
