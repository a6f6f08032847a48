"""A local hub with huggingface_hub's protocol: models at revisions, tokens, gated models, commits."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "hf_of_these_tests"


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False  # files need a token, metadata does not
    private: bool = False  # everything needs a token

    def commit(self, files: dict[str, bytes], *names: str) -> str:
        sha = hashlib.sha1(json.dumps({name: _blob(data) for name, data in files.items()}).encode()).hexdigest()
        self.commits[sha] = files
        self.refs |= dict.fromkeys(names or ["main"], sha)
        return sha


class Hub(ThreadingHTTPServer):
    """Models by name, and the received requests."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: dict[str, Repository] = {}
        self.asked: list[tuple[str, str]] = []
        self.objects: dict[str, bytes] = {}  # of Git LFS
        self.address = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def _blob(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def answer(self, content: bytes | dict | list, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        for name, value in ({"Content-Type": kind, "Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.answer({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def repository(self, name: str, revision: str, for_files: bool) -> dict[str, bytes] | None:
        """The files at a revision; None if refused."""
        found, known = self.server.models.get(name), self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if found is None or (found.private and not known):
            self.refuse(404 if known else 401, "RepoNotFound")
        elif (sha := found.refs.get(revision, revision)) not in found.commits:
            self.refuse(404, "RevisionNotFound")
        elif for_files and found.gated and not known:
            self.refuse(403, "GatedRepo")
        else:
            self.sha = sha
            return found.commits[sha]
        return None

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append((self.command, path))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path):
            files = self.repository(found[1], found[2], False)
            if files is not None:
                siblings = [{"rfilename": name} for name in files]
                self.answer({"id": found[1], "modelId": found[1], "sha": self.sha, "siblings": siblings, "tags": []})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            files = self.repository(found[1], found[2], False)
            if files is not None:
                self.answer(
                    [{"type": "file", "path": name, "size": len(data), "oid": _blob(data)} for name, data in files.items()]
                )
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            files = self.repository(found[1], found[2], True)
            if files is not None and found[3] in files:
                data = files[found[3]]
                self.answer(data, ETag=f'"{_blob(data)}"', X_Repo_Commit=self.sha)
            elif files is not None:
                self.refuse(404, "EntryNotFound")
        else:
            self.refuse(404, "no such address")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.server.asked.append((self.command, self.path))
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refuse(401, "no token")
        elif self.path == "/api/repos/create":
            said = json.loads(body)
            name = f"{said['organization']}/{said['name']}"
            private = bool(said.get("private")) or said.get("visibility") == "private"
            if name not in self.server.models:
                self.server.models[name] = Repository(private=private)
                self.server.models[name].commit({".gitattributes": b""})
            self.answer({"url": f"{self.server.address}/{name}", "id": name, "name": name})
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/main", self.path):
            kinds = [
                {"path": each["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular"}
                for each in json.loads(body)["files"]
            ]  # fmt: skip
            self.answer({"files": kinds})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                each | {"actions": {"upload": {"href": f"{self.server.address}/objects/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json")
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.path):
            model = self.server.models[found[1]]
            files = dict(model.commits[model.refs["main"]])
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.server.objects[value["oid"]]
            sha = model.commit(files)
            url = f"{self.server.address}/{found[1]}/commit/{sha}"
            self.answer({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})
        else:
            self.refuse(404, "no such address")

    def do_PUT(self) -> None:
        self.server.asked.append((self.command, self.path))
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.objects[hashlib.sha256(data).hexdigest()] = data
        self.answer({})
