"""A Hugging Face Hub on this machine: as much of its HTTP as the real client asks for.

Routes, headers and error codes are those that huggingface_hub reads in `file_download.py`,
`_snapshot_download.py`, `utils/_http.py` and `utils/_xet.py`. Large files are redirected to another
host, as the Hub redirects to its storage.
"""

import json
import os
import re
from dataclasses import dataclass
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_test"
LARGE = (".safetensors", ".parquet")
LISTING = re.compile(r"/api/(models|datasets)/(?P<repo>.+)/(?P<kind>revision|tree)/(?P<rev>[^?]+)")
FILE = re.compile(r"/(?P<repo>.+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)")
STORED = re.compile(r"/stored/(?P<digest>\w+)")


@dataclass(frozen=True)
class Repo:
    """A model or data set.

    Attributes:
        files: path -> content.
        commit: where its only branch, main, is.
        gated: only the bearer of `TOKEN` may read it.
        drops: it ends connections without an answer.
        chunked: its large files are in the storage of hf_xet, which here has lost them.
    """

    files: dict[str, bytes]
    commit: str = COMMIT
    gated: bool = False
    drops: bool = False
    chunked: bool = False


class Hub(ThreadingHTTPServer):
    """The server.

    Attributes:
        repos: by "owner/name", data sets by "datasets/owner/name".
        cut: path of a large file -> byte at which its next transfer ends.
        requests: "GET /owner/name/resolve/..."; of a large file, also the byte it is sent from.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repos: dict[str, Repo] = {}
        self.cut: dict[str, int] = {}
        self.requests: list[str] = []

    def environment(self, home: Path) -> dict[str, str]:
        """Of a child process whose Hub is this one, with its cache under `home`."""
        foreign = ("HF_", "HUGGING", "TRANSFORMERS_")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        return inherited | {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "*",
        }

    def stop(self) -> None:
        """Whoever asks is refused the connection."""
        self.shutdown()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    """To one request."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        if found := LISTING.match(self.path):
            kind = "" if found[1] == "models" else "datasets/"
            self._list(kind + found["repo"], found["kind"], found["rev"])
        elif found := FILE.match(self.path):
            self._file(found["repo"], found["rev"], found["path"])
        elif found := STORED.match(self.path):
            self._stored(found["digest"])
        elif self.path == "/xet-token":
            storage = {"X-Xet-Cas-Url": self._url("127.0.0.1", "/xet"), "X-Xet-Access-Token": "t"}
            self._send(200, storage | {"X-Xet-Token-Expiration": "4102444800"})  # the year 2100
        else:
            self._send(404)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests look at `Hub.requests`."""

    def _list(self, name: str, kind: str, revision: str) -> None:
        repo = self._admit(name, revision)
        if repo is None:
            return
        tree = [
            {"type": "file", "path": path, "size": len(content), "oid": _git_oid(content)}
            for path, content in repo.files.items()
        ]
        answer = {"id": name, "sha": repo.commit} if kind == "revision" else tree
        self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _file(self, name: str, revision: str, path: str) -> None:
        repo = self._admit(name, revision)
        if repo is None:
            return
        if path not in repo.files:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        content, headers = repo.files[path], {"X-Repo-Commit": repo.commit}
        if not path.endswith(LARGE):
            self._send(200, headers | {"ETag": f'"{_git_oid(content)}"'}, content)
            return
        digest = sha256(content).hexdigest()
        headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        if repo.chunked:
            refresh = self._url("127.0.0.1", "/xet-token")
            headers |= {"X-Xet-Hash": digest, "X-Xet-Refresh-Route": refresh}
        self._send(302, headers | {"Location": self._url("localhost", f"/stored/{digest}")})

    def _stored(self, digest: str) -> None:
        """A large file, or its rest, or less where it is to be cut."""
        assert "Authorization" not in self.headers, "the token must not leave the Hub"
        files = [item for repo in self.server.repos.values() for item in repo.files.items()]
        path, content = next(f for f in files if sha256(f[1]).hexdigest() == digest)
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        self.server.requests.append(f"{path} from {start}")
        part = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        cut = self.server.cut.pop(path, None)
        self._send(206 if asked else 200, part if asked else {}, content[start:], cut)

    def _admit(self, name: str, revision: str) -> Repo | None:
        """The repository, or None where the answer is an error."""
        repo = self.server.repos.get(name)
        if repo is None:
            self._refuse(401, "RepoNotFound", "Invalid username or password.")
        elif repo.drops:
            self.close_connection = True
        elif repo.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "GatedRepo", f"Access to {name} is restricted. Please log in.")
        elif revision not in ("main", repo.commit):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo
        return None

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, {"X-Error-Code": code, "X-Error-Message": message})

    def _send(
        self,
        status: int,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        cut: int | None = None,
    ) -> None:
        """An answer; its connection ends early, at byte `cut` of the body, where that is given."""
        self.send_response(status)
        for header, value in ((headers or {}) | {"Content-Length": str(len(body))}).items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
            self.close_connection = cut is not None

    def _url(self, host: str, path: str) -> str:
        return f"http://{host}:{self.server.server_port}{path}"


def _git_oid(content: bytes) -> str:
    return sha1(b"blob %d\0" % len(content) + content).hexdigest()
