"""Share a draft through the Hub: its own files and its card, and nothing that a training run leaves beside them."""

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
from .model_card import CARD_NAME, FACTS_NAME, DraftCard, is_own_card, write_model_card

logger = logging.get_logger(__name__)

CODE_FILES = ("configuration_dflash.py", "modeling_dflash.py")
WEIGHT_PATTERNS = ["model*.safetensors", INDEX]


def draft_files(folder: str | os.PathLike[str]) -> list[str]:
    """
    Name the files of a folder that belong to the draft saved in it.

    Args:
        folder (`str` or `PathLike`): where a draft was saved, in any layout.

    Returns:
        `list[str]`: configuration and weights; source files, card, its facts and its pictures, where they are there.
        Whatever else is in the folder is not named.

    Raises:
        OSError: configuration or weights are missing or damaged, or an index names a file outside the folder.
    """
    folder = Path(folder)
    read_json(folder / CONFIG_NAME)
    weights = sorted({file.name for file, _ in tensor_shapes(folder).values()})
    index = [INDEX] if weights != [WEIGHTS] else []
    code = [name for name in CODE_FILES if (folder / name).is_file()]
    return [CONFIG_NAME, *weights, *index, *code, *_card_files(folder)]


def _card_files(folder: Path) -> list[str]:
    """The card, if there is one, the facts that it is written from, and the pictures that it shows."""
    card = folder / CARD_NAME
    if not card.is_file():
        return []
    pictures = re.findall(r"!\[[^\]]*\]\(([\w.-]+)\)", card.read_text(encoding="utf-8"))
    return [CARD_NAME, *(name for name in (FACTS_NAME, *pictures) if (folder / name).is_file())]


def check_target_name(config: DFlashConfig, target_name: str | None = None) -> None:
    """
    Refuse to share a draft whose target nobody else could find.

    Args:
        config ([`DFlashConfig`]): of the draft.
        target_name (`str`, *optional*): a Hub name that is to stand in its place.

    Raises:
        ValueError: no target is named, or a folder of this machine is.
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
            f"{source}={name or None!r} is no name on the Hub (or a folder here, too): whoever pulls the draft could "
            "not load its target. Give target_name='org/model' (dflash-hf push --target-name org/model), or set "
            "draft.config.target_name_or_path to a name on the Hub before training."
        )


def check_pushing_run(config: DFlashConfig, hub_strategy: HubStrategy) -> None:
    """
    Check before a training run what its pushes need, and say what they leave out.

    Args:
        config ([`DFlashConfig`]): of the draft.
        hub_strategy (`HubStrategy`): of the training arguments.

    Raises:
        ValueError: the draft's target is none on the Hub.
    """
    check_target_name(config)
    if hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        logger.warning(
            f"hub_strategy={hub_strategy.value!r} pushes drafts and cards only: the states of optimizer and random "
            "generators are pickles, which stay in output_dir and are never pushed. Resume from there."
        )


def check_repo_names(repo_id: str, serving_repo: str | None) -> None:
    """
    Check the names of the repositories that a draft is to be pushed to.

    Args:
        repo_id (`str`): of the native layout.
        serving_repo (`str`, *optional*): of the serving layout.

    Raises:
        ValueError: a name is none that the Hub takes, both are one, or a server would not know the serving layout by
            its name.
    """
    validate_repo_id(repo_id)
    if serving_repo is None:
        return
    validate_repo_id(serving_repo)
    if serving_repo == repo_id:
        raise ValueError(
            f"serving_repo={serving_repo!r} is the repository of the native layout, too: both have a config.json. "
            "Give the serving layout a repository of its own."
        )
    if "dflash" not in serving_repo.rpartition("/")[2].lower():
        raise ValueError(
            f"serving_repo={serving_repo!r} has no 'dflash' in its name: vLLM knows the method of a draft by that "
            f"part of its path. Call it {serving_repo}-DFlash, for example."
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
    Upload the files of a saved draft, and only those, in one commit.

    Weight files of an earlier push that are no longer part of the draft are deleted: a `model.safetensors` left beside
    new shards would be loaded in their place. A README that was edited on the Hub is kept, unless the one in the
    folder is edited, too.

    Args:
        folder (`str` or `PathLike`): where the draft was saved.
        repo_id (`str`): an existing repository.
        path_in_repo (`str`, *optional*): folder in the repository; default: its root.
        token (`str` or `bool`, *optional*): of a user who may write there; default: the one that is logged in.
        revision (`str`, *optional*): branch to push to, made if need be; default: `"main"`.
        commit_message, commit_description (`str`, *optional*): of the commit.
        create_pr (`bool`, defaults to `False`): open a pull request instead.

    Returns:
        `CommitInfo`

    Raises:
        OSError: the folder holds no draft, or the Hub refuses (`HfHubHTTPError`).
    """
    folder = Path(folder)
    files = draft_files(folder)
    with _hub_in_reach():
        if revision is not None and not revision.startswith("refs/"):
            create_branch(repo_id, branch=revision, token=token, exist_ok=True)
        if CARD_NAME in files and is_own_card((folder / CARD_NAME).read_text(encoding="utf-8")):
            there = f"{path_in_repo}/{CARD_NAME}" if path_in_repo else CARD_NAME
            if _is_edited_there(repo_id, there, token=token, revision=revision):
                logger.warning(
                    f"The README of {repo_id} was edited there and is kept. Delete it there to get the new card."
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
    try:
        card = hf_hub_download(repo_id, path, **kwargs)
    except RemoteEntryNotFoundError:
        return False
    return not is_own_card(Path(card).read_text(encoding="utf-8", errors="replace"))


def upload_in_background(folder: str | os.PathLike[str], repo_id: str, **kwargs: Any) -> Future[CommitInfo]:
    """
    Upload a draft while the program goes on; the folder may change or go at once, since a copy is uploaded.

    Args:
        folder (`str` or `PathLike`), repo_id (`str`), **kwargs: as in [`upload_draft`].

    Returns:
        `Future`: of the `CommitInfo`. A failure is logged, too.

    Raises:
        OSError: the folder holds no draft.
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
    Push a draft in the native layout with its card: what `draft.push_to_hub` does.

    Args:
        draft ([`DFlashDraftModel`]): what to push.
        repo_id (`str`): its repository; made if need be.
        max_shard_size (`int` or `str`, defaults to `"50GB"`): of a weight file; a larger draft is split.
        tags (`str` or `list[str]`, *optional*): further tags of the card.
        private, token: as in [`publish_draft`].
        commit_message, commit_description, revision, create_pr: as in [`upload_draft`].

    Returns:
        `CommitInfo`

    Raises:
        OSError: the Hub refuses (`HfHubHTTPError`).
    """
    try:
        check_target_name(draft.config)
    except ValueError as error:
        logger.warning(str(error))
    with TemporaryDirectory() as folder:
        draft.save_pretrained(folder, max_shard_size=max_shard_size)
        with _hub_in_reach():
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
    Push a draft to the Hub, and on request also the layout that serving engines load, each with its card.

    Both folders are written and both repositories are at hand before the first file goes up.

    Args:
        draft ([`DFlashDraftModel`], `str` or `PathLike`):
            The draft, or the folder it is saved in; the folder's card comes along.
        repo_id (`str`):
            Repository of the native layout, for transformers; made if need be.
        serving_repo (`str`, *optional*):
            Repository of the layout for vLLM and SGLang, with "dflash" in its name.
        target_name (`str`, *optional*):
            Hub name of the target, written into what is pushed. Needed if the draft names its target by a folder.
        private (`bool`, *optional*):
            Make new repositories private; those that exist stay as they are.
        token (`str` or `bool`, *optional*):
            Of a user who may write to both; default: the one that is logged in.
        revision (`str`, *optional*):
            Branch of both to push to, made if need be; default: `"main"`.
        commit_message (`str`, *optional*):
            Of both commits.

    Returns:
        `dict[str, CommitInfo]`: by the full name of the repository, the native one first.

    Raises:
        ValueError: a name is not usable, the draft's target is none on the Hub, or a layout cannot hold the draft.
        OSError: the folder holds no draft or a damaged one, or the Hub refuses (`HfHubHTTPError`).
        RuntimeError: the native layout is up and the serving layout is not.
    """
    check_repo_names(repo_id, serving_repo)
    with TemporaryDirectory() as temporary:
        native, serving = Path(temporary, "native"), Path(temporary, "serving")
        if isinstance(draft, DFlashDraftModel):
            source, loaded = native, draft
        else:
            source = Path(draft)
            draft_files(source)  # a folder, not a name on the Hub
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
            check_repo_names(native_repo, serving_repo)  # full names may be equal where those given are not
            folders[serving_repo] = serving
        target_id = target_name or given_name
        card = replace(
            card, target_id=target_id, target_folder=None, native_repo=native_repo, serving_repo=serving_repo
        )
        for repository, folder in folders.items():
            if folder != source:
                _copy_files(_card_files(source), source, folder)  # kept if somebody has edited it
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
                    f"The native layout is up at {commits[native_repo].repo_url}, but the serving layout "
                    f"could not be pushed to {repository}: {' '.join(str(error).split())} Push again when that is "
                    "mended; weights that are up are not sent a second time."
                ) from error
        return commits


def _repository(name: str, private: bool | None, token: str | bool | None) -> str:
    """The full name of a repository to which this user may write; it is made if need be."""
    with _hub_in_reach():
        full_name = create_repo(name, private=private, token=token, exist_ok=True).repo_id
        auth_check(full_name, token=token, write=True)
    return full_name


@contextmanager
def _hub_in_reach() -> Iterator[None]:
    """Inside the context a missing login says what to do, and a broken connection is an `OSError`, too."""
    try:
        yield
    except HfHubHTTPError as error:
        if error.response.status_code != 401:
            raise
        raise PermissionError(
            f"The Hub does not know who is pushing: {' '.join(str(error).split())} Log in with hf auth login, or give "
            "a token that may write there."
        ) from error
    except HTTPError as error:
        raise ConnectionError(
            f"The Hub at {constants.ENDPOINT} cannot be reached: {error}. Look at the network, and push again."
        ) from error
