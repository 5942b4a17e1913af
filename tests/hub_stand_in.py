"""A Hugging Face Hub on loopback: the endpoints that `huggingface_hub` calls to create, fill and read a model repo.

It speaks both ways in which large files travel: git-LFS (`huggingface_hub` before 1.0, or without `hf_xet`) and Xet
(the default since). Everything is kept in memory, so that a test can compare what arrived byte for byte.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

WRITE_TOKEN = "hf_may_write"
READ_TOKEN = "hf_may_only_read"
LARGE_FILE_SUFFIXES = (".safetensors", ".bin")  # what the Hub's default .gitattributes sends to large-file storage
XET_HAS_CHECKSUMS, XET_HAS_SHA256 = 1 << 31, 1 << 30  # flags of a file record in a Xet shard


@dataclass
class StandInRepo:
    """One model repository: its newest files, and the summaries of its commits."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)

    @property
    def sha(self) -> str:
        """A commit id that changes with the content."""
        digest = hashlib.sha1(repr(self.commits).encode())
        for path in sorted(self.files):
            digest.update(path.encode() + b"\0" + self.files[path])
        return digest.hexdigest()


class HubStandIn:
    """What the Hub holds. `requests` lists what was asked of it, as "METHOD /path"."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repos: dict[str, StandInRepo] = {}
        self.blobs: dict[str, bytes] = {}  # large files by sha256
        self.xorbs: dict[str, list[bytes]] = {}  # Xet: the chunks of each uploaded bundle of chunks, by its hash
        self.requests: list[str] = []
        self.transports: set[str] = set()  # how large files arrived: "lfs", "xet"


@contextmanager
def serve_hub() -> Iterator[HubStandIn]:
    """An empty Hub on a free port, for the length of a `with` block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = server.hub = HubStandIn(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> HubStandIn:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def log_message(self, *args: object) -> None:
        """Keeps the test output clean."""

    def handle_request(self) -> None:
        self.path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {self.path}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = self.path.strip("/").split("/")
        match (self.command, *parts):
            case ("POST", "api", "repos", "create"):
                self.create_repo(json.loads(self.body))
            case ("POST", "api", "validate-yaml"):
                self.validate_card(json.loads(self.body)["content"])
            case ("POST" | "PUT", "lfs", oid):
                self.receive_lfs(oid)
            case ("POST", _, name, "info", "lfs", "objects", "batch") if name.endswith(".git"):
                self.lfs_batch(json.loads(self.body))
            case ("POST", "v1", "xorbs", _, xorb):
                self.hub.xorbs[xorb] = list(_chunks(self.body))
                self.reply({"was_inserted": True})
            case ("POST", "v1", "shards"):
                self.receive_shard()
            case ("GET" | "HEAD" | "POST", "api", "models", owner, name, *rest):
                self.model_api(f"{owner}/{name}", rest)
            case ("GET" | "HEAD", owner, name, "resolve", revision, *path):
                self.resolve(f"{owner}/{name}", revision, "/".join(path))
            case _:
                self.reply({"error": "Not Found"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def reply(self, content: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def may_write(self) -> bool:
        """Answers 401 or 403 as the Hub does where the token does not allow writing."""
        if self.token == READ_TOKEN:
            self.reply({"error": "You don't have the rights to create a model under this namespace"}, 403)
        elif self.token != WRITE_TOKEN:
            self.reply({"error": "Invalid credentials in Authorization header"}, 401)
        return self.token == WRITE_TOKEN

    def create_repo(self, wish: dict[str, object]) -> None:
        if not self.may_write():
            return
        repo_id = f"{wish['organization']}/{wish['name']}"
        if repo_id in self.hub.repos:
            answer = {"error": "You already created this model repo", "url": f"{self.hub.url}/{repo_id}"}
            return self.reply(answer, 409)
        private = wish.get("private") is True or wish.get("visibility") == "private"  # the name changed in 1.x
        self.hub.repos[repo_id] = StandInRepo(private=private)
        self.reply({"url": f"{self.hub.url}/{repo_id}", "name": repo_id})

    def validate_card(self, content: str) -> None:
        if content.startswith("---\n") and "\n---\n" in content[4:]:
            return self.reply({"errors": [], "warnings": []})
        self.reply({"errors": [{"message": "no front matter"}], "warnings": []}, 400)

    def model_api(self, repo_id: str, rest: list[str]) -> None:
        repo = self.readable(repo_id)
        if repo is None:
            return
        match (self.command, *rest):
            case ("GET",) | ("GET", "revision", _):
                siblings = [{"rfilename": path} for path in sorted(repo.files)]
                self.reply({"id": repo_id, "private": repo.private, "sha": repo.sha, "siblings": siblings})
            case ("GET", "tree", *_):
                self.reply([_tree_entry(path, content) for path, content in sorted(repo.files.items())])
            case ("POST", "preupload", _):
                if self.may_write():
                    wished = [file["path"] for file in json.loads(self.body)["files"]]
                    self.reply({"files": [_upload_mode(path) for path in wished]})
            case ("GET", "xet-write-token", _):
                if self.may_write():
                    self.grant_xet()
            case ("POST", "commit", _):
                if self.may_write():
                    self.commit(repo_id, repo)
            case _:
                self.reply({"error": "Not Found"}, 404)

    def readable(self, repo_id: str) -> StandInRepo | None:
        """The repo if the token may see it; else answers 404, or 401 without a valid token, and returns None."""
        repo = self.hub.repos.get(repo_id)
        known = self.token in (WRITE_TOKEN, READ_TOKEN)
        if repo is not None and (known or not repo.private):
            return repo
        self.reply({"error": "Repository not found"}, 404 if known else 401, {"X-Error-Code": "RepoNotFound"})
        return None

    def commit(self, repo_id: str, repo: StandInRepo) -> None:
        lines = [json.loads(line) for line in self.body.splitlines()]
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    repo.commits.append(value["summary"])
                case "file":
                    repo.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    repo.files[value["path"]] = self.hub.blobs[value["oid"]]
                case "deletedFile":
                    del repo.files[value["path"]]
        self.reply({"commitUrl": f"{self.hub.url}/{repo_id}/commit/{repo.sha}", "commitOid": repo.sha})

    def lfs_batch(self, wish: dict[str, Any]) -> None:
        if not self.may_write():
            return
        # A verify action makes the client ask once more whether the file is there, as the Hub does.
        objects = []
        for known in wish["objects"]:
            link = {"href": f"{self.hub.url}/lfs/{known['oid']}"}
            objects.append({**known, "actions": {"upload": link, "verify": link}})
        transfer = "xet" if "xet" in wish["transfers"] else "basic"  # huggingface_hub before 1.0 offers both here
        self.reply({"transfer": transfer, "objects": objects}, 200, {"Content-Type": "application/vnd.git-lfs+json"})

    def receive_lfs(self, oid: str) -> None:
        if self.command == "PUT" and hashlib.sha256(self.body).hexdigest() == oid:
            self.hub.blobs[oid] = self.body
            self.hub.transports.add("lfs")
        self.reply({}, 200 if oid in self.hub.blobs else 400)

    def grant_xet(self) -> None:
        url, token, expires = self.hub.url, "xet_token", 2**33  # hf_xet reads the body, older clients the headers
        headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(expires)}
        self.reply({"casUrl": url, "accessToken": token, "exp": expires}, 200, headers)

    def receive_shard(self) -> None:
        for sha256, content in _files(self.body, self.hub.xorbs):
            if hashlib.sha256(content).hexdigest() != sha256:
                return self.reply({"error": "a file of this shard is not what its xorbs hold"}, 400)
            self.hub.blobs[sha256] = content
            self.hub.transports.add("xet")
        self.reply({"result": 1})

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        repo = self.readable(repo_id)
        if repo is None:
            return
        if revision not in ("main", repo.sha):
            return self.reply({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        if path not in repo.files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.sha}
            return self.reply({"error": "Entry not found"}, 404, headers)
        content = repo.files[path]
        self.reply(content, 200, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": repo.sha})


def _upload_mode(path: str) -> dict[str, object]:
    mode = "lfs" if path.endswith(LARGE_FILE_SUFFIXES) else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False}


def _tree_entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def _chunks(xorb: bytes) -> Iterator[bytes]:
    """The chunks of an uploaded xorb: each is a header (version, 3-byte size, compression, 3-byte full size) and data.

    The test process sets HF_XET_XORB_COMPRESSION_POLICY=none, since the standard library has no LZ4.
    """
    at = 0
    while at < len(xorb) and xorb[at : at + 7] != b"XETBLOB":  # a footer may follow the chunks
        size, compression = int.from_bytes(xorb[at + 1 : at + 4], "little"), xorb[at + 4]
        if compression != 0:
            raise ValueError(f"this stand-in reads uncompressed chunks only, got compression {compression}")
        yield xorb[at + 8 : at + 8 + size]
        at += 8 + size


def _files(shard: bytes, xorbs: dict[str, list[bytes]]) -> Iterator[tuple[str, bytes]]:
    """The (sha256, content) of each file that a Xet shard describes as ranges of chunks. Records are 48 bytes."""
    at = 48  # after the shard's own header
    while shard[at : at + 32] != b"\xff" * 32:
        flags, ranges = struct.unpack_from("<II", shard, at + 32)
        content = b""
        for record in range(at + 48, at + 48 + 48 * ranges, 48):
            first, last = struct.unpack_from("<II", shard, record + 40)
            content += b"".join(xorbs[_hex(shard[record : record + 32])][first:last])
        at += 48 * (1 + ranges + (ranges if flags & XET_HAS_CHECKSUMS else 0))
        if not flags & XET_HAS_SHA256:
            raise ValueError("a file of this shard has no sha256, which the Hub needs to name it in a commit")
        yield _hex(shard[at : at + 32]), content
        at += 48


def _hex(digest: bytes) -> str:
    """Xet writes a hash as four little-endian 64-bit words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", digest))
