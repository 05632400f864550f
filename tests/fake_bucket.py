"""A bucket of Google Cloud Storage on this machine: its JSON API, as far as checkpoints use it."""

import base64
import contextlib
import dataclasses
import http.server
import itertools
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator

import google_crc32c

_OBJECT = re.compile(r"(?:/download|/upload)?/storage/v1/b/[^/]+/o(?:/(?P<name>.+))?")


@dataclasses.dataclass
class Bucket:
    """The objects of a bucket, by name: each a generation and its bytes."""

    objects: dict[str, tuple[int, bytes]] = dataclasses.field(default_factory=dict)
    parts: dict[str, bytearray] = dataclasses.field(default_factory=dict)  # of uploads
    fails: str = ""  # a pattern: what matches in a name cannot be written
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)
    generations: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))

    def describe(self, name: str) -> dict[str, str]:
        generation, data = self.objects[name]
        crc32c = base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
        return {
            "kind": "storage#object",
            "bucket": "bucket",
            "name": name,
            "id": f"bucket/{name}/{generation}",
            "generation": str(generation),
            "metageneration": "1",
            "size": str(len(data)),
            "crc32c": crc32c,
            "updated": "2026-01-01T00:00:00.000Z",
            "timeCreated": "2026-01-01T00:00:00.000Z",
        }


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def log_message(self, *_):
        pass

    def _answer(self, status: int, body: bytes | dict | list = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if not isinstance(body, bytes):
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _request(self) -> tuple[str | None, dict[str, str], bytes]:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        match = _OBJECT.fullmatch(url.path)
        name = urllib.parse.unquote(match["name"]) if match and match["name"] else None
        return name, query, body

    def _fails_condition(self, name: str, query: dict[str, str]) -> bool:
        wanted = query.get("ifGenerationMatch")
        found = self.bucket.objects.get(name, (0, b""))[0]
        return wanted is not None and int(wanted) != found

    def do_GET(self) -> None:
        name, query, _ = self._request()
        with self.bucket.lock:
            if name is None and not self.path.partition("?")[0].endswith("/o"):
                return self._answer(200, {"kind": "storage#bucket", "name": "bucket"})
            if name is None:
                return self._answer(200, self._list(query))
            if name not in self.bucket.objects:
                return self._answer(404, {"error": {"code": 404, "message": "No such object"}})
            generation, data = self.bucket.objects[name]
            about = self.bucket.describe(name)
        if query.get("alt") != "media" and "/download/" not in self.path:
            return self._answer(200, about)
        first, end = 0, len(data)
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first = int(wanted[1])
            end = min(end, int(wanted[2]) + 1) if wanted[2] else end
        headers = {"x_goog_generation": str(generation), "Content_Type": "application/octet-stream"}
        if wanted:
            headers["Content_Range"] = f"bytes {first}-{end - 1}/{len(data)}"
        return self._answer(206 if wanted else 200, data[first:end], **headers)

    def _list(self, query: dict[str, str]) -> dict[str, object]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        start, end = query.get("startOffset", ""), query.get("endOffset", "")
        items, prefixes = [], set()
        for name in sorted(self.bucket.objects):
            if not name.startswith(prefix) or name < start or (end and name >= end):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                items.append(self.bucket.describe(name))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}

    def do_POST(self) -> None:
        name, query, body = self._request()
        if self.path.startswith("/batch/"):
            return self._batch(body)
        if query.get("uploadType") == "multipart":
            boundary = re.search(r"boundary=['\"]?([^'\";]+)", self.headers["Content-Type"])[1]
            _, about, content, _ = body.split(f"--{boundary}".encode())
            name = json.loads(about.partition(b"\n\n")[2] or about.partition(b"\r\n\r\n")[2])[
                "name"
            ]
            _, mark, body = content.partition(b"\n\n")
            if not mark:
                body = content.partition(b"\r\n\r\n")[2]
            body = body.removesuffix(b"\n").removesuffix(b"\r")
        elif query.get("uploadType") == "resumable":
            upload = urllib.parse.quote(json.loads(body)["name"], safe="")
            where = f"http://{self.headers['Host']}/upload/storage/v1/b/bucket/o?upload={upload}"
            return self._answer(200, b"", Location=where)
        elif name := query.get("upload"):
            parts = self.bucket.parts.setdefault(name, bytearray())
            parts += body
            if self.headers["Content-Range"].endswith("/*"):  # more of it follows
                return self._answer(308, b"", Range=f"bytes=0-{len(parts) - 1}")
            body = bytes(self.bucket.parts.pop(name))
        return self._write(name or query["name"], query, body)

    def _write(self, name: str, query: dict[str, str], body: bytes) -> None:
        with self.bucket.lock:
            if self.bucket.fails and re.search(self.bucket.fails, name):
                return self._answer(403, {"error": {"code": 403, "message": "no permission"}})
            if self._fails_condition(name, query):
                return self._answer(412, {"error": {"code": 412, "message": "Precondition"}})
            self.bucket.objects[name] = next(self.bucket.generations), body
            return self._answer(200, self.bucket.describe(name))

    def do_DELETE(self) -> None:
        name, query, _ = self._request()
        with self.bucket.lock:
            if name not in self.bucket.objects:
                return self._answer(404, {"error": {"code": 404, "message": "No such object"}})
            if self._fails_condition(name, query):
                return self._answer(412, {"error": {"code": 412, "message": "Precondition"}})
            del self.bucket.objects[name]
        return self._answer(204)

    def _batch(self, body: bytes) -> None:
        """Delete several objects at once."""
        boundary, answers = "batch_x", []
        paths = re.findall(rb"DELETE (\S+)", body)
        for path in paths:
            match = _OBJECT.fullmatch(urllib.parse.urlsplit(path.decode()).path)
            name = urllib.parse.unquote(match["name"])
            with self.bucket.lock:
                found = self.bucket.objects.pop(name, None)
            status = "204 No Content" if found else "404 Not Found"
            answers.append(
                f"--{boundary}\r\nContent-Type: application/http\r\n\r\n"
                f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n\r\n"
            )
        text = "".join(answers) + f"--{boundary}--"
        kind = f"multipart/mixed; boundary={boundary}"
        return self._answer(200, text.encode(), Content_Type=kind)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


@contextlib.contextmanager
def serving(bucket: Bucket) -> Iterator[dict[str, str]]:
    """Serve gs://bucket; yield the environment in which its clients find it."""
    handler = type("Handler", (_Handler,), {"bucket": bucket})
    with _Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        yield {"STORAGE_EMULATOR_HOST": address, "TENSORSTORE_GCS_HTTP_URL": address}
        server.shutdown()
