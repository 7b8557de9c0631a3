from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from conftest import make_draft, make_target
from hub_stand_in import HubStandIn, Repository
from huggingface_hub import ModelCard
from safetensors.torch import load
from tiers import thinned
from training_runs import make_trainer

from dflash_hf import DFlashDraftModel, save_in_layout
from dflash_hf.cli import main
from dflash_hf.hub.push import draft_files, publish_draft, upload_draft, upload_in_background

WEIGHTS_AND_CODE = {"config.json", "model.safetensors", "configuration_dflash.py", "modeling_dflash.py"}
CARD_FILES = {"README.md", "card_facts.json"}
NATIVE_FILES = WEIGHTS_AND_CODE | CARD_FILES


def shareable_draft(seed: int = 1, **overrides) -> DFlashDraftModel:
    """Make a tiny draft whose configuration names a target on the Hub."""
    draft = make_draft(make_target(), seed, **overrides)
    draft.config.target_name_or_path = "org/target"
    return draft


def tensors_in(files: dict[str, bytes]) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path, data in files.items()
        if path.endswith(".safetensors")
        for name, tensor in load(data).items()
    }


def assert_same_tensors(tensors, draft, dtype: torch.dtype = torch.float32) -> None:
    expected = {name: value.to(dtype) for name, value in draft.named_parameters()}
    assert set(tensors) == set(expected)
    assert all(tensors[name].dtype == dtype for name in tensors)
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())


def put(hub: HubStandIn, name: str, folder: Path, **values) -> Repository:
    """Create a repository from a folder without a push."""
    repository = hub.repositories[name] = Repository(**values)
    repository.commit({path.name: path.read_bytes() for path in folder.iterdir()}, "put")
    return repository


def put_target(hub: HubStandIn, folder: Path, **values) -> Repository:
    make_target().save_pretrained(folder)
    return put(hub, "org/target", folder, **values)


# ---- push and pull by the model itself ----


def test_a_pushed_draft_is_its_configuration_weights_code_and_card_and_comes_back_bit_for_bit(hub):
    draft = shareable_draft()
    draft.push_to_hub("org/my-draft")
    files = hub.repositories["org/my-draft"].files()
    assert set(files) == NATIVE_FILES
    assert_same_tensors(tensors_in(files), draft)  # no embedding and no head of the target
    loaded = DFlashDraftModel.from_pretrained("org/my-draft")
    assert_same_tensors(dict(loaded.named_parameters()), draft)
    assert json.loads(loaded.config.to_json_string()) == json.loads(files["config.json"])
    assert not any("/org/target" in path for _, path, _ in hub.requests)


def test_the_card_of_a_pushed_draft_names_repository_and_target_and_takes_tags(hub):
    draft = shareable_draft()
    draft.add_model_tags("of-the-model")
    draft.push_to_hub("my-draft", tags=["mine"])
    metadata = metadata_of(hub, "writer/my-draft")
    assert metadata["base_model"] == "org/target"
    assert {"dflash", "mine", "of-the-model"} <= set(metadata["tags"])
    assert 'from_pretrained("writer/my-draft"' in hub.repositories["writer/my-draft"].files()["README.md"].decode()


def test_a_push_of_a_draft_whose_target_is_a_folder_is_warned_of(hub, tmp_path, caplog):
    draft = shareable_draft()
    draft.config.target_name_or_path = str(tmp_path)
    draft.push_to_hub("org/my-draft")
    assert "is no name on the Hub" in caplog.text


def test_a_readme_that_was_edited_on_the_hub_is_kept_by_every_later_push(hub, tmp_path, caplog):
    draft = shareable_draft()
    draft.push_to_hub("org/my-draft")
    repository = hub.repositories["org/my-draft"]
    repository.commit({"README.md": repository.files()["README.md"] + b"Thanks to all.\n"}, "edited there")
    edited = repository.files()["README.md"]
    draft.norm.weight.data.add_(1)
    draft.push_to_hub("org/my-draft")
    publish_draft(draft, "org/my-draft")
    assert repository.files()["README.md"] == edited
    assert caplog.text.count("was edited there and is kept") == 2
    assert_same_tensors(tensors_in(repository.files()), draft)
    draft.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("# Mine\n")
    publish_draft(tmp_path, "org/my-draft")
    assert repository.files()["README.md"] == b"# Mine\n"


def test_a_draft_above_the_shard_size_is_pushed_in_shards_and_comes_back_bit_for_bit(hub):
    draft = shareable_draft()
    draft.push_to_hub("org/my-draft", max_shard_size="20KB")
    files = hub.repositories["org/my-draft"].files()
    index = json.loads(files["model.safetensors.index.json"])
    shards = {name for name in files if name.endswith(".safetensors")}
    assert len(shards) > 2
    assert shards == set(index["weight_map"].values())
    assert all(len(files[name]) < 25_000 for name in shards)
    assert set(files) == NATIVE_FILES - {"model.safetensors"} | shards | {"model.safetensors.index.json"}
    assert_same_tensors(dict(DFlashDraftModel.from_pretrained("org/my-draft").named_parameters()), draft)


def test_a_revision_is_a_branch_or_a_commit_and_never_reaches_the_target(hub, tmp_path):
    put_target(hub, tmp_path / "target")
    first, second = shareable_draft(1), shareable_draft(2)
    first.push_to_hub("org/my-draft")
    first.push_to_hub("org/my-draft", revision="old")
    second.push_to_hub("org/my-draft")
    commit = hub.repositories["org/my-draft"].references["old"]
    for revision, draft in (("old", first), (commit, first), ("main", second), (None, second)):
        loaded = DFlashDraftModel.from_pretrained("org/my-draft", revision=revision)
        assert_same_tensors(dict(loaded.named_parameters()), draft)
    old = DFlashDraftModel.from_pretrained("org/my-draft", revision="old")
    hub.requests.clear()
    assert torch.equal(old.get_input_embeddings().weight, make_target().get_input_embeddings().weight)
    asked = [path for _, path, _ in hub.requests if "target" in path]
    assert any(path.endswith("/model.safetensors") for path in asked)
    assert not any("old" in path or commit in path for path in asked)


def test_token_cache_folder_and_local_files_only_reach_the_look_up_of_the_target(hub, tmp_path, monkeypatch):
    put_target(hub, tmp_path / "target", private=True)
    shareable_draft().push_to_hub("org/my-draft", private=True)
    assert hub.repositories["org/my-draft"].private
    monkeypatch.delenv("HF_TOKEN")
    places = {"token": "writer", "cache_dir": tmp_path / "cache"}
    draft = DFlashDraftModel.from_pretrained("org/my-draft", **places)
    hub.requests.clear()
    draft.get_input_embeddings()
    asked = [(path, token) for _, path, token in hub.requests if "/large/" not in path]
    assert any(path.endswith("model.safetensors") for path, _ in asked)
    assert all("org/target" in path and token == "writer" for path, token in asked)
    assert {path.name for path in (tmp_path / "cache").glob("models--*")} == {
        "models--org--my-draft",
        "models--org--target",
    }
    hub.requests.clear()
    draft = DFlashDraftModel.from_pretrained("org/my-draft", local_files_only=True, **places)
    draft.get_input_embeddings()
    assert hub.requests == []


def test_cached_repositories_load_offline_and_so_does_the_target(hub, tmp_path, monkeypatch):
    """Files in the cache cause no network request."""
    put_target(hub, tmp_path / "target")
    draft = shareable_draft()
    draft.push_to_hub("org/my-draft")
    weight = DFlashDraftModel.from_pretrained("org/my-draft").get_output_embeddings().weight
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    loaded = DFlashDraftModel.from_pretrained("org/my-draft")
    assert_same_tensors(dict(loaded.named_parameters()), draft)
    assert torch.equal(loaded.get_output_embeddings().weight, weight)
    assert hub.requests == []


def missing(hub, folder):
    return {}


def private_to_others(hub, folder):
    put(hub, "org/thing", folder, private=True)
    return {"token": "reader"}


def gated(hub, folder):
    put(hub, "org/thing", folder, gated=True)
    return {"token": "reader"}


def bad_token(hub, folder):
    put(hub, "org/thing", folder)
    return {"token": "of nobody"}


def no_such_revision(hub, folder):
    put(hub, "org/thing", folder)
    return {"revision": "v9"}


def only_a_pickle(hub, folder):
    torch.save(load((folder / "model.safetensors").read_bytes()), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    put(hub, "org/thing", folder)
    return {}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (missing, "Repository Not Found"),
        (private_to_others, "your token has the required permissions"),
        (gated, "gated"),
        (bad_token, "Invalid credentials"),
        (no_such_revision, "Revision Not Found.*v9"),
        (only_a_pickle, "no model.safetensors"),
    ],
)
def test_a_repository_that_cannot_be_loaded_ends_in_one_line_that_names_it_and_the_reason(hub, make, words, tmp_path):
    shareable_draft().save_pretrained(tmp_path / "draft")
    arguments = make(hub, tmp_path / "draft")
    with pytest.raises((OSError, ValueError), match=words) as error:
        DFlashDraftModel.from_pretrained("org/thing", **arguments)
    assert "'org/thing'" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_repository_of_another_model_is_refused_before_its_weights_are_read(hub, tmp_path):
    put_target(hub, tmp_path)
    with pytest.raises(ValueError, match="no DFlash draft: model_type='llama'"):
        DFlashDraftModel.from_pretrained("org/target")


PULL_WITHOUT_THE_PACKAGE = """
import hashlib, json, sys
class Block:
    def find_spec(self, name, *rest):
        if name.split('.')[0] == 'dflash_hf': raise ImportError(name)
sys.meta_path.insert(0, Block())
import huggingface_hub, torch
from transformers import AutoModel, AutoModelForCausalLM

def digest(draft):
    assert 'dflash_hf' not in sys.modules and 'transformers_modules' in type(draft).__module__
    return {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in draft.state_dict().items()}

draft = AutoModel.from_pretrained("org/my-draft", trust_remote_code=True)
sharded = AutoModel.from_pretrained("org/sharded", trust_remote_code=True)
pinned = AutoModel.from_pretrained("org/my-draft", trust_remote_code=True, revision="old")
target = AutoModelForCausalLM.from_pretrained("org/target").eval()
ids = torch.tensor([[5, 9, 11]])
kwargs = dict(max_new_tokens=9, do_sample=False, pad_token_id=0)
drafted = target.generate(ids, assistant_model=draft.eval(), speculation_type="dflash", **kwargs)
assert torch.equal(target.generate(ids, **kwargs), drafted)
assert torch.equal(draft.get_output_embeddings().weight, target.lm_head.weight)
huggingface_hub.constants.HF_HUB_OFFLINE = True
offline = AutoModel.from_pretrained("org/my-draft", trust_remote_code=True)
print(json.dumps([digest(each) for each in (draft, sharded, pinned, offline)]))
"""


@pytest.mark.spawns
def test_a_pull_without_the_package_is_bit_equal_and_drafts_by_remote_code(hub, tmp_path):
    """Convert from a repository instead of a folder."""
    draft, old = shareable_draft(1), shareable_draft(2)
    put_target(hub, tmp_path / "target")
    old.push_to_hub("org/my-draft", revision="old")
    draft.push_to_hub("org/my-draft")
    draft.push_to_hub("org/sharded", max_shard_size="20KB")
    result = subprocess.run(
        [sys.executable, "-c", PULL_WITHOUT_THE_PACKAGE],
        cwd=tmp_path,
        env={**os.environ, **hub.environment(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    expected = [
        {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in each.state_dict().items()}
        for each in (draft, draft, old, draft)
    ]
    assert json.loads(result.stdout.splitlines()[-1]) == expected


# ---- publishing by function, trainer and command ----


def weights_of(hub: HubStandIn, name: str) -> dict[str, torch.Tensor]:
    return tensors_in(hub.repositories[name].files())


def metadata_of(hub: HubStandIn, name: str) -> dict:
    return ModelCard(hub.repositories[name].files()["README.md"].decode()).data.to_dict()


@pytest.mark.parametrize("saved", [False, True])
def test_both_layouts_are_published_with_cards_that_name_each_other(hub, saved, tmp_path):
    draft = make_draft(make_target())
    draft.save_pretrained(tmp_path / "draft")
    (tmp_path / "draft" / "optimizer.pt").write_bytes(b"a pickle")
    commits = publish_draft(
        tmp_path / "draft" if saved else draft,
        "my-draft",
        serving_repo="org/my-draft-DFlash",
        target_name="org/target",
        private=True,
    )
    assert list(commits) == ["writer/my-draft", "org/my-draft-DFlash"]
    native, serving = (hub.repositories[name] for name in commits)
    assert set(native.files()) == NATIVE_FILES
    assert set(serving.files()) == {"config.json", "model.safetensors"} | CARD_FILES
    assert native.private
    assert serving.private
    assert json.loads(native.files()["config.json"])["target_name_or_path"] == "org/target"
    assert json.loads(serving.files()["config.json"])["model_type"] == "qwen3"
    assert_same_tensors(tensors_in(native.files()), draft)
    assert_same_tensors(tensors_in(serving.files()), draft, torch.bfloat16)
    for name in commits:
        card = hub.repositories[name].files()["README.md"].decode()
        assert "writer/my-draft" in card
        assert "org/my-draft-DFlash" in card
        assert metadata_of(hub, name)["base_model"] == "org/target"
    assert draft.config.target_name_or_path is None


def test_a_card_that_somebody_has_edited_and_the_picture_it_shows_come_along(hub, tmp_path):
    shareable_draft().save_pretrained(tmp_path)
    card = "---\nlicense: mit\n---\n# Mine\n\n![slots](slots.png) ![elsewhere](https://example.org/a.png)\n"
    (tmp_path / "README.md").write_text(card)
    (tmp_path / "slots.png").write_bytes(b"picture")
    (tmp_path / "other.png").write_bytes(b"not shown")
    publish_draft(tmp_path, "org/my-draft")
    files = hub.repositories["org/my-draft"].files()
    assert set(files) == NATIVE_FILES | {"slots.png"}
    assert files["README.md"].decode() == card


def test_a_draft_of_another_producer_is_published_in_the_native_layout(hub, tmp_path):
    draft = make_draft(make_target())
    save_in_layout(draft, tmp_path / "theirs", "speculators")
    publish_draft(tmp_path / "theirs", "org/my-draft", target_name="org/target")
    files = hub.repositories["org/my-draft"].files()
    assert set(files) == NATIVE_FILES
    assert json.loads(files["config.json"])["model_type"] == "dflash"
    assert_same_tensors(tensors_in(files), draft)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"serving_repo": "org/fast"}, "no 'dflash' in its name"),
        ({"serving_repo": "dflash-team/fast"}, "no 'dflash' in its name"),
        ({"serving_repo": "a/b/my-DFlash"}, "Repo id"),
        ({"repo_id": "org/DFlash-x", "serving_repo": "org/DFlash-x"}, "Use another repository for the serving layout"),
        ({"repo_id": "writer/x-DFlash", "serving_repo": "x-DFlash"}, "Use another repository for the serving layout"),
        ({"target_name": "/somewhere/target"}, "target_name='/somewhere/target' is no name on the Hub"),
        ({"target_name": "./target"}, "no name on the Hub"),
        ({"draft": "tests"}, "holds no config.json"),
        ({"serving_repo": "stranger/x-DFlash"}, "rights to create"),
        ({"serving_repo": "org/locked-DFlash"}, "Forbidden"),
        ({"token": "of nobody"}, "Invalid credentials.* Log in with hf auth login"),
        ({"token": False}, "Invalid username or password.* Log in with hf auth login"),
        ({"token": "reader"}, "rights to create"),
    ],
)
def test_nothing_is_uploaded_before_every_argument_is_checked(hub, arguments, words, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    hub.refused.append("org/locked-DFlash/auth-check")
    call = {"draft": shareable_draft(), "repo_id": "org/my-draft", **arguments}
    with pytest.raises((ValueError, OSError), match=words):
        publish_draft(**call)
    assert all(not repository.messages for repository in hub.repositories.values())
    if words != "Forbidden" and "rights" not in words:
        assert hub.repositories.keys() <= {"writer/x-DFlash"}


def test_a_draft_that_names_no_target_or_perhaps_a_folder_is_not_published(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "target").mkdir(parents=True)
    draft = make_draft(make_target())
    for name in (None, "org/target"):
        draft.config.target_name_or_path = name
        with pytest.raises(ValueError, match=f"target_name_or_path={name!r} is no name on the Hub"):
            publish_draft(draft, "org/my-draft")
    assert hub.repositories == {}
    publish_draft(draft, "org/my-draft", target_name="org/target")  # said to be on the Hub
    assert metadata_of(hub, "org/my-draft")["base_model"] == "org/target"


def test_a_second_upload_that_fails_says_what_is_up_and_can_be_made_up_for(hub):
    draft = shareable_draft()
    hub.refused.append("org/x-DFlash/commit")
    with pytest.raises(RuntimeError, match=r"is up at http://.*/org/my-draft, but .* org/x-DFlash: .*storage is full"):
        publish_draft(draft, "org/my-draft", serving_repo="org/x-DFlash")
    assert set(hub.repositories["org/my-draft"].files()) == NATIVE_FILES
    assert hub.repositories["org/x-DFlash"].files() == {}
    hub.refused.clear()
    hub.requests.clear()
    publish_draft(draft, "org/my-draft", serving_repo="org/x-DFlash")
    assert_same_tensors(weights_of(hub, "org/x-DFlash"), draft, torch.bfloat16)
    assert not any(method == "PUT" for method, _, _ in hub.requests)  # the weights were there already


def test_a_hub_that_cannot_be_reached_ends_in_one_line(hub, monkeypatch):
    hub.close()
    with pytest.raises(ConnectionError, match=rf"The Hub at {hub.url} cannot be reached: .*refused"):
        publish_draft(shareable_draft(), "org/my-draft")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="offline mode is enabled"):
        publish_draft(shareable_draft(), "org/my-draft")


def test_weights_of_an_earlier_push_do_not_stay_beside_those_of_a_later_one(hub, tmp_path):
    first, second, third = shareable_draft(1), shareable_draft(2), shareable_draft(3)
    publish_draft(first, "org/my-draft")
    hub.repositories["org/my-draft"].commit({"notes.txt": b"of the user"}, "by hand")
    second.save_pretrained(tmp_path / "second", max_shard_size="20KB")
    upload_draft(tmp_path / "second", "org/my-draft")
    assert "model.safetensors" not in hub.repositories["org/my-draft"].files()
    assert_same_tensors(dict(DFlashDraftModel.from_pretrained("org/my-draft").named_parameters()), second)
    publish_draft(third, "org/my-draft")
    assert set(hub.repositories["org/my-draft"].files()) == NATIVE_FILES | {"notes.txt"}
    assert_same_tensors(dict(DFlashDraftModel.from_pretrained("org/my-draft").named_parameters()), third)


def test_a_branch_is_made_for_a_revision(hub):
    draft = shareable_draft()
    publish_draft(draft, "org/my-draft", revision="v1")
    assert set(hub.repositories["org/my-draft"].files("v1")) == NATIVE_FILES
    assert hub.repositories["org/my-draft"].files() == {}


def test_a_sharded_folder_names_its_shards_and_no_file_outside(tmp_path):
    draft = shareable_draft()
    draft.save_pretrained(tmp_path / "draft", max_shard_size="20KB")
    index = tmp_path / "draft" / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values())
    assert set(draft_files(tmp_path / "draft")) == WEIGHTS_AND_CODE - {"model.safetensors"} | shards | {index.name}
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    index.write_text(json.dumps({"weight_map": {"norm.weight": "../secret.safetensors"}}))
    with pytest.raises(OSError, match="of the same folder"):
        draft_files(tmp_path / "draft")


def test_a_push_in_the_background_is_of_what_was_there_when_it_began(hub, tmp_path):
    draft, later = shareable_draft(1), shareable_draft(2)
    draft.save_pretrained(tmp_path / "checkpoint-1")
    huggingface_hub.create_repo("org/my-draft")
    push = upload_in_background(tmp_path / "checkpoint-1", "org/my-draft")
    later.save_pretrained(tmp_path / "checkpoint-1")
    push.result()
    assert_same_tensors(weights_of(hub, "org/my-draft"), draft)
    assert [path.name for path in tmp_path.iterdir() if "push" in path.name] == []


def test_a_push_in_the_background_that_fails_is_heard_of(hub, tmp_path, caplog):
    shareable_draft().save_pretrained(tmp_path / "checkpoint-1")
    with pytest.raises(huggingface_hub.errors.RepositoryNotFoundError):
        upload_in_background(tmp_path / "checkpoint-1", "org/nowhere").result()
    assert "A push to the Hub failed: 404" in caplog.text


def train_and_push(hub, tmp_path, strategy: str, **overrides):
    target = make_target()
    trainer = make_trainer(
        target,
        tmp_path,
        draft=shareable_draft(),
        push_to_hub=True,
        hub_model_id="org/trained",
        hub_strategy=strategy,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        **overrides,
    )
    trainer.train()
    return trainer, hub.repositories["org/trained"]


@pytest.mark.parametrize("strategy", thinned(["every_save", "checkpoint", "all_checkpoints", "end"], "checkpoint"))
def test_the_trainer_pushes_the_draft_and_its_card_and_no_pickle(hub, tmp_path, strategy, caplog):
    trainer, repository = train_and_push(hub, tmp_path, strategy, hub_always_push=True)
    assert (tmp_path / "out" / "checkpoint-4" / "optimizer.pt").is_file()
    if strategy == "end":
        assert repository.files() == {}
    else:
        assert {"Training in progress, step 2", "Training in progress, step 4"} <= set(repository.messages)
        assert_same_tensors(
            {name.split("/")[-1]: value for name, value in weights_of(hub, "org/trained").items()}, trainer.draft
        )
    inner = {f"checkpoint-{step}/{name}" for step in (2, 4) for name in NATIVE_FILES}
    expected = NATIVE_FILES | (inner if strategy == "all_checkpoints" else set())
    assert set(repository.files()) == (set() if strategy == "end" else expected)
    assert ("never pushed" in caplog.text) == (strategy in ("checkpoint", "all_checkpoints"))
    trainer.push_to_hub()
    assert (tmp_path / "out" / "training_args.bin").is_file()
    assert set(repository.files()) == expected
    assert_same_tensors(load(repository.files()["model.safetensors"]), trainer.draft)
    assert metadata_of(hub, "org/trained")["base_model"] == "org/target"


def test_the_trainer_publishes_the_serving_layout_too(hub, tmp_path):
    trainer = make_trainer(make_target(), tmp_path, draft=shareable_draft(), hub_model_id="org/trained")
    trainer.draft.add_model_tags("of-the-model")
    arguments = {"private": True, "blocking": False, "tags": "mine", "license": "mit"}
    commit = trainer.push_to_hub(serving_repo="org/trained-DFlash", **arguments).result()
    assert commit.repo_url.repo_id == "org/trained"
    assert set(hub.repositories["org/trained"].files()) == NATIVE_FILES
    assert set(hub.repositories["org/trained-DFlash"].files()) == {"config.json", "model.safetensors"} | CARD_FILES
    assert all(repository.private for repository in hub.repositories.values())
    assert_same_tensors(weights_of(hub, "org/trained"), trainer.draft)
    assert_same_tensors(weights_of(hub, "org/trained-DFlash"), trainer.draft, torch.bfloat16)
    for name in ("org/trained", "org/trained-DFlash"):
        card = hub.repositories[name].files()["README.md"].decode()
        assert "org/trained-DFlash" in card
        assert 'from_pretrained("org/trained"' in card
        assert metadata_of(hub, name)["license"] == "mit"
        assert {"mine", "of-the-model"} <= set(metadata_of(hub, name)["tags"])


def test_a_run_that_is_to_be_pushed_is_refused_at_once_if_its_target_is_a_folder(hub, tmp_path):
    target, draft = make_target(), make_draft(make_target())
    draft.config.target_name_or_path = str(tmp_path)
    with pytest.raises(ValueError, match=r"no name on the Hub.*draft\.config\.target_name_or_path"):
        make_trainer(target, tmp_path, draft=draft, push_to_hub=True, hub_model_id="org/trained")
    assert hub.repositories == {}
    trainer = make_trainer(target, tmp_path, draft=draft)
    with pytest.raises(ValueError, match="no name on the Hub"):
        trainer.push_to_hub()
    assert not (tmp_path / "out" / "model.safetensors").exists()


def push(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dflash-hf", "push", *map(str, arguments)])
    try:
        main()
    except SystemExit as exit_:
        return exit_.code or 0
    return 0


def test_the_command_pushes_a_folder_and_prints_where_it_is(hub, tmp_path, monkeypatch, capsys):
    draft = make_draft(make_target())
    draft.config.target_name_or_path = str(tmp_path)
    draft.save_pretrained(tmp_path / "draft")
    assert push(monkeypatch, tmp_path / "draft", "org/my-draft") == 1
    complaint = " ".join(capsys.readouterr().err.split())
    assert "--target-name org/model" in complaint
    assert hub.repositories == {}
    options = ["--target-name", "org/target", "--serving-repo", "org/my-draft-DFlash", "--private"]
    assert push(monkeypatch, tmp_path / "draft", "org/my-draft", *options) == 0
    printed = capsys.readouterr().out
    assert f"Pushed the native layout to {hub.url}/org/my-draft\n" in printed
    assert f"Pushed the serving layout to {hub.url}/org/my-draft-DFlash\n" in printed
    config = json.loads(hub.repositories["org/my-draft"].files()["config.json"])
    assert config["target_name_or_path"] == "org/target"
    assert all(repository.private for repository in hub.repositories.values())
    assert push(monkeypatch, tmp_path / "nowhere", "org/my-draft") == 1
    assert "holds no config.json" in capsys.readouterr().err
