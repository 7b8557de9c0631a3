"""A Hub in memory, with the part of the Hub's HTTP API that pushing and loading a model needs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

LARGE_FILES = (".safetensors", ".bin", ".pt", ".pth", ".png")  # go through the large-file storage, as on the Hub
RELATIONS = ("adapter", "finetune", "merge", "quantized")  # what the Hub takes as base_model_relation


def blob_id(content: bytes) -> str:
    """Return the name that Git gives to the content of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    """A model repository. Each commit holds all files, and a reference is a branch or a tag."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0" * 40: {}})
    references: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes | None], message: str, reference: str = "main") -> str:
        """Commit new files, and remove those that are `None`."""
        content = {**self.commits[self.references[reference]], **files}
        commit = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[commit] = {name: data for name, data in content.items() if data is not None}
        self.references[reference] = commit
        self.messages.append(message)
        return commit

    def files(self, reference: str = "main") -> dict[str, bytes]:
        return self.commits[self.references.get(reference, reference)]


class Refusal(Exception):  # noqa: N818  (an answer of the Hub)
    """A response with an error status and the Hub's error headers."""

    def __init__(self, status: int, code: str | None, message: str, headers: Any = None, **body: str) -> None:
        codes = {} if code is None else {"X-Error-Code": code}
        self.status, self.headers = status, {**codes, "X-Error-Message": message, **(headers or {})}
        self.body = {"error": message, **body}


class HubStandIn:
    """
    The server. A token is the name of its user, who may write to the namespace of that name and to `"org"`.

    `repositories` holds what was pushed, and `requests` holds method, path and token of every request. A request whose
    path contains an element of `refused` gets the status 403.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.users = {"writer", "reader"}
        self.large_files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.refused: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.storage_url = f"http://localhost:{self._server.server_port}/large"  # another host, as on the Hub
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> HubStandIn:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()

    def connect(self, monkeypatch: Any, home: Path, token: str | None = "writer") -> None:
        """Make huggingface_hub and transformers of this process use this Hub, with an empty cache in `home`."""
        import huggingface_hub.constants as constants
        from huggingface_hub.hf_api import api

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(api, "endpoint", self.url)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)

    def environment(self, home: Path, token: str | None = "writer") -> dict[str, str]:
        """Return environment variables that make another process use this Hub."""
        tokens = {} if token is None else {"HF_TOKEN": token}
        switches = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), **switches, **tokens}


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Print no log."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        self.hub.requests.append((self.command, path, self.token))
        try:
            if self.token is not None and self.token not in self.hub.users:
                raise Refusal(401, None, "Invalid credentials in Authorization header")
            if any(part in path for part in self.hub.refused):
                raise Refusal(403, None, "Forbidden: this storage is full")
            for method, pattern, action in ROUTES:
                if self.command in method and (match := re.fullmatch(pattern, path)):
                    self._send(*action(self, body, **match.groupdict()))
                    return
            raise Refusal(404, None, f"no route for {self.command} {path}")
        except Refusal as refusal:
            self._send(refusal.status, refusal.body, refusal.headers)

    do_GET = do_HEAD = do_POST = do_PUT = _answer  # noqa: N815  (names of http.server)

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _may_write(self, name: str) -> bool:
        return self.token == "writer" and name.split("/")[0] in ("writer", "org")

    def _repository(self, name: str, revision: str = "main", *, to_write: bool = False) -> tuple[Repository, str]:
        """Return a repository that this user may read (or write), and the commit of a revision."""
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self._may_write(name)):
            raise Refusal(404 if self.token else 401, "RepoNotFound", "Repository not found")
        if to_write and not self._may_write(name):
            raise Refusal(403, None, "You don't have the rights to write to this repository")
        commit = repository.references.get(revision, revision)
        if commit not in repository.commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, commit

    def create(self, body: bytes) -> Any:
        values = json.loads(body)
        name = f"{values['organization'] or self.token}/{values['name']}"
        if self.token is None:
            raise Refusal(401, None, "Invalid username or password.")
        if not self._may_write(name):
            raise Refusal(403, None, f"You don't have the rights to create a model under the namespace of {name}")
        if name in self.hub.repositories:
            raise Refusal(409, None, "You already created this model repo", url=f"{self.hub.url}/{name}")
        self.hub.repositories[name] = Repository(private=values.get("visibility") == "private")
        return 200, {"url": f"{self.hub.url}/{name}"}

    def may_write(self, body: bytes, name: str) -> Any:
        self._repository(name, to_write=True)
        return 200, {}

    def info(self, body: bytes, name: str, revision: str | None) -> Any:
        repository, commit = self._repository(name, revision or "main")
        siblings = [{"rfilename": path} for path in repository.commits[commit]]
        values = {"id": name, "sha": commit, "private": repository.private, "gated": repository.gated}
        return 200, {**values, "siblings": siblings}

    def tree(self, body: bytes, name: str, revision: str) -> Any:
        repository, commit = self._repository(name, revision)
        entries = []
        for path, data in repository.commits[commit].items():
            entries.append({"type": "file", "path": path, "size": len(data), "oid": blob_id(data)})
            if path.endswith(LARGE_FILES):
                large = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
                entries[-1]["lfs"] = large
        return 200, entries

    def branch(self, body: bytes, name: str, branch: str) -> Any:
        repository, commit = self._repository(name, json.loads(body).get("startingPoint", "main"), to_write=True)
        if branch in repository.references:
            raise Refusal(409, None, "Reference already exists")
        repository.references[branch] = commit
        return 200, {}

    def check_card(self, body: bytes) -> Any:
        head = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], flags=re.DOTALL)
        data = (yaml.safe_load(head[1]) if head else None) or {}
        errors = []
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", data.get("base_model", "any/name")):
            errors.append({"message": '"base_model" must be the name of a model on the Hub'})
        if data.get("base_model_relation", RELATIONS[0]) not in RELATIONS:
            errors.append({"message": f'"base_model_relation" must be one of {RELATIONS}'})
        return (400, {"errors": errors}) if errors else (200, {})

    def preupload(self, body: bytes, name: str, revision: str) -> Any:
        repository, commit = self._repository(name, revision, to_write=True)
        present = repository.commits[commit]
        files = []
        for file in json.loads(body)["files"]:
            mode = "lfs" if file["path"].endswith(LARGE_FILES) else "regular"
            known = blob_id(present[file["path"]]) if mode == "regular" and file["path"] in present else None
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": known})
        return 200, {"files": files}

    def large_file_batch(self, body: bytes, name: str) -> Any:
        self._repository(name, to_write=True)
        objects = json.loads(body)["objects"]
        for file in objects:
            if file["oid"] not in self.hub.large_files:
                file["actions"] = {"upload": {"href": f"{self.hub.storage_url}/{file['oid']}"}}
        return 200, {"transfer": "basic", "objects": objects}

    def large_file(self, body: bytes, oid: str) -> Any:
        if self.command != "PUT":
            return 200, self.hub.large_files[oid]
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, None, "the content is not what it was announced to be")
        self.hub.large_files[oid] = body
        return 200, {}

    def commit(self, body: bytes, name: str, revision: str) -> Any:
        repository, _ = self._repository(name, revision, to_write=True)
        files: dict[str, bytes | None] = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large_files[value["oid"]]
            else:
                files[value["path"]] = None
        commit = repository.commit(files, message, revision)
        return 200, {"commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit}

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> Any:
        repository, commit = self._repository(name, revision)
        if repository.gated and not self._may_write(name):
            status = 403 if self.token else 401
            raise Refusal(status, "GatedRepo", f"Access to model {name} is restricted and you are not in its list")
        data = repository.commits[commit].get(path)
        if data is None:
            raise Refusal(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob_id(data)}"'}
        if not path.endswith(LARGE_FILES):
            return 200, data, headers
        oid = hashlib.sha256(data).hexdigest()
        self.hub.large_files[oid] = data
        linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(data))}
        return 302, b"", {**headers, **linked, "Location": f"{self.hub.storage_url}/{oid}"}


NAME, MODEL, REVISION = r"(?P<name>[^/]+/[^/]+?)", r"/api/models/(?P<name>[^/]+/[^/]+)", r"(?P<revision>.+)"
ROUTES = [
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.check_card),
    ("GET", rf"{MODEL}/auth-check/write", _Handler.may_write),
    ("GET", rf"{MODEL}(/revision/{REVISION})?", _Handler.info),
    ("GET", rf"{MODEL}/tree/{REVISION}", _Handler.tree),
    ("POST", rf"{MODEL}/branch/(?P<branch>.+)", _Handler.branch),
    ("POST", rf"{MODEL}/preupload/{REVISION}", _Handler.preupload),
    ("POST", rf"{MODEL}/commit/{REVISION}", _Handler.commit),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", _Handler.large_file_batch),
    ("GET PUT", r"/large/(?P<oid>\w+)", _Handler.large_file),
    ("GET HEAD", rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
]
