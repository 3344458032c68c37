"""A Hugging Face Hub on loopback: the requests that `HfFileSystem` and `datasets` send for dataset repositories.

A repository is a folder `USER/NAME` below the root, another revision of it the folder `USER/NAME@REVISION`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock
from urllib.parse import unquote, urlsplit

from .http_server import RangeHandler, serving

TOKEN = "hf_ThisTokenIsASecret0123456789"
COMMIT = "1" * 40


class HubHandler(RangeHandler):
    """`token`: what requests have to carry, None for a public repository."""

    token: str | None = None
    _file_headers: Mapping[str, str] = {}  # of the answer under way, if it is a file
    status = 0  # of the answer to every request, if it is not 0

    def end_headers(self) -> None:
        for name, value in self._file_headers.items():
            self.send_header(name, value)
        super().end_headers()

    def _answer(self, status: int, body: object, **headers: str) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _serve(self) -> None:
        self._file_headers = {}
        body = self._body()
        given = self.headers.get("Authorization")
        if self.token is not None and given is None:  # as for a repository that does not exist
            return self._answer(401, {"error": "Invalid username or password."}, X_Error_Code="RepoNotFound")
        if self.status or (self.token is not None and given != f"Bearer {self.token}"):
            return self._answer(self.status or 401, {"error": "Invalid credentials in Authorization header"})
        words = [unquote(word) for word in urlsplit(self.path).path.strip("/").split("/")]
        if words == ["api", "validate-yaml"]:
            return self._answer(200, {"errors": [], "warnings": []})
        is_api = words[0] == "api"
        user, name, *rest = words[1 + is_api :]  # after "datasets"
        what, revision, *rest = rest or ["revision", "main"]
        revision = "main" if revision == COMMIT else revision
        repo = Path(self.directory, user, name + f"@{revision}" * (revision != "main"))
        if not Path(self.directory, user, name).is_dir():
            return self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        if not repo.is_dir():
            return self._answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        if is_api:
            path = Path(repo, *(rest if what == "tree" else ()))
            if not path.is_dir():
                return self._answer(404, {"error": "not found"}, X_Error_Code="EntryNotFound")
            recursive = "recursive=true" in self.path.lower()
            answer = self._api(what, repo, path, body, recursive=recursive)
            if answer is None:
                return self._answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
            return self._answer(200, answer)
        path = Path(repo, *rest)
        if not path.is_file():
            return self._answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
        self.path = f"/{path.relative_to(self.directory)}"
        self._file_headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_entry(repo, path)["oid"]}"'}
        return super().do_GET() if self.command == "GET" else super().do_HEAD()

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        return b"".join(pieces)

    def _api(self, what: str, repo: Path, path: Path, body: bytes, *, recursive: bool) -> object:
        if what == "tree":
            return [_entry(repo, each) for each in sorted(path.rglob("*") if recursive else path.iterdir())]
        if what == "paths-info":
            paths = [repo / name for name in json.loads(body)["paths"]]
            return [_entry(repo, each) for each in paths if each.exists()]
        if what == "preupload":
            files = json.loads(body)["files"]
            return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        if what == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            deleted = [line["value"]["path"] for line in lines if line["key"] == "deletedFile"]
            if not all(Path(repo, name).is_file() for name in deleted):  # the commit as a whole is refused
                return None
            for line in lines:
                file = repo / line["value"].get("path", "")
                if line["key"] == "file":
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(base64.b64decode(line["value"]["content"]))
                elif line["key"] == "deletedFile":
                    file.unlink()
            return {"success": True, "commitOid": COMMIT, "commitUrl": f"/datasets/user/name/commit/{COMMIT}"}
        return {"id": f"{repo.parent.name}/{repo.name.partition('@')[0]}", "sha": COMMIT, "siblings": [], "tags": []}

    def _quietly(self) -> None:
        with suppress(ConnectionError):  # the client has closed the connection early
            self._serve()

    do_GET = do_HEAD = do_POST = _quietly


def _entry(repo: Path, path: Path) -> dict[str, object]:
    name = path.relative_to(repo).as_posix()
    if path.is_dir():
        return {"type": "directory", "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0, "path": name}
    data = path.read_bytes()
    return {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name}


@dataclass
class Hub:
    """A running Hub: its folder of repositories, its address, and the class whose `token` and `status` it has."""

    root: Path
    address: str
    handler: type[HubHandler]

    def add(self, folder: Path, repo: str) -> str:
        """Copy a folder to a new repository or revision, `user/name` or `user/name@v1`; returns its URL."""
        shutil.copytree(folder, self.root / repo)
        return f"hf://datasets/{repo}"


@contextmanager
def hub_at(address: str) -> Iterator[None]:
    """Let `hf://` lead to this address, in subprocesses too."""
    from huggingface_hub import HfFileSystem

    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    with (
        mock.patch.dict(os.environ, {"HF_ENDPOINT": address}),
        # why also these: the variable is read when the package is imported
        mock.patch("huggingface_hub.constants.ENDPOINT", address),
        mock.patch("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template),
    ):
        HfFileSystem.clear_instance_cache()
        try:
            yield
        finally:
            HfFileSystem.clear_instance_cache()


@contextmanager
def running_hub(root: Path) -> Iterator[Hub]:
    """A Hub that `hf://` leads to; its files are below `root`, an existing folder."""
    handler = type("Handler", (HubHandler,), {})
    (root / "hub").mkdir()
    own = {"HF_HOME": str(root / "hf-home"), "HF_TOKEN": "", "HF_HUB_DISABLE_TELEMETRY": "1"}
    with mock.patch.dict(os.environ, own), serving(root / "hub", handler) as port:
        address = f"http://127.0.0.1:{port}"
        with hub_at(address):
            yield Hub(root / "hub", address, handler)
