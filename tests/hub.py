"""A stand-in for the Hugging Face Hub on 127.0.0.1: serves folders as dataset repositories, for clients that read."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


class Handler(BaseHTTPRequestHandler):
    """Answers what huggingface_hub and datasets ask for when they load a dataset."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/") if part]
        is_api = parts[0] == "api"
        repository, rest = "/".join(parts[1 + is_api : 3 + is_api]), parts[3 + is_api :]
        root = self.server.repositories.get(repository)
        if root is None:
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        if is_api and (not rest or rest[0] == "revision"):
            if rest[1:] and rest[1] not in ("main", commit(root)):
                return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
            files = [{"rfilename": entry["path"]} for entry in entries(root)]
            return self.reply_json({"id": repository, "sha": commit(root), "siblings": files})
        if is_api and rest[0] == "tree":
            return self.reply_json(entries(root / "/".join(rest[2:]), root))
        if is_api and rest[0] == "paths-info":
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
            return self.reply_json([entry for entry in entries(root) if entry["path"] in paths])
        file = root / "/".join(rest[2:])
        if rest[:1] != ["resolve"] or not file.is_file():
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = file.read_bytes()
        digest = hashlib.sha1(content).hexdigest()
        return self.reply(200, content, {"ETag": f'"{digest}"', "X-Repo-Commit": commit(root)})

    do_HEAD = do_POST = do_GET  # noqa: N815 - names that the standard library asks for

    def reply(self, status: int, content: bytes, headers: dict[str, str]):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def reply_json(self, value):
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def log_message(self, *args):
        pass


def entries(folder: Path, root: Path | None = None) -> list[dict]:
    """Files below a folder, as the Hub lists them."""
    root = root or folder
    return [
        {
            "type": "file",
            "path": file.relative_to(root).as_posix(),
            "size": file.stat().st_size,
            "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
        }
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    ]


def commit(root: Path) -> str:
    """Hash of the files of a repository: as on the Hub, another one after every change."""
    return hashlib.sha1(json.dumps(entries(root)).encode()).hexdigest()


@contextmanager
def serve(
    repositories: dict[str, Path], handler: type[BaseHTTPRequestHandler] = Handler
) -> Iterator[ThreadingHTTPServer]:
    """Serve folders under their repository ids; gives the server, with its `endpoint`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.repositories = repositories
    server.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
