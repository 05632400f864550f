"""A server in this process that speaks as much of the Hugging Face hub's protocol as is used."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"


class FakeHub:
    """Models by name, each a list of commits: dictionaries from a file's name to its content."""

    def __init__(self):
        self.models: dict[str, list[dict[str, bytes]]] = {}
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.truncated = self.broken = False  # whether bodies are cut short; whether it fails
        self.requests: list[str] = []
        self.large: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                hub.answer(self)

            do_HEAD = do_POST = do_PUT = do_GET

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def sha(self, model: str, index: int = -1) -> str:
        index %= len(self.models[model])
        return hashlib.sha1(f"{model} {index}".encode()).hexdigest()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Read a request whole, and send what `_respond` says."""
        content = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if request.headers.get("Transfer-Encoding") == "chunked":
            while size := int(request.rfile.readline(), 16):
                content += request.rfile.read(size)
                request.rfile.readline()
            request.rfile.readline()
        path = unquote(urlsplit(request.path).path)
        self.requests.append(f"{request.command} {path}")
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        status, body, headers = self._respond(f"{request.command} {path}", content, token)
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        request.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            request.send_header(name, str(value))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body[: len(body) // 2] if self.truncated else body)

    def _respond(self, called: str, content: bytes, token: str):
        method, *parts = called.replace(" /", "/").split("/")
        if self.broken:
            return 500, {}, {}
        if token not in ("", TOKEN):
            return 401, {}, {"X-Error-Message": "Invalid credentials in Authorization header"}
        if method in ("POST", "PUT") and parts[0] != "large" and not token:
            return 401, {}, {"X-Error-Message": "Invalid username or password."}
        if parts[:2] == ["api", "repos"]:
            made = json.loads(content)
            model = f"{made['organization']}/{made['name']}"
            if model in self.models:
                return 409, {"error": "it is there", "url": f"{self.url}/{model}"}, {}
            self.models[model] = [{}]
            is_private = made.get("private") or made.get("visibility") == "private"
            self.private |= {model} if is_private else set()
            return 200, {"url": f"{self.url}/{model}"}, {}
        if parts[:2] == ["api", "validate-yaml"]:
            return 200, {"errors": [], "warnings": []}, {}
        if parts[0] == "large":
            self.large[parts[1]] = content
            return 200, {}, {}
        is_api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if is_api else parts
        model = f"{owner}/{name.removesuffix('.git')}"
        if model not in self.models or (model in self.private and not token):
            return 401 if not token else 404, {}, {"X-Error-Code": "RepoNotFound"}
        if "batch" in rest:
            objects = [
                {**o, "actions": {"upload": {"href": f"{self.url}/large/{o['oid']}"}}}
                for o in json.loads(content)["objects"]
            ]
            return 200, {"objects": objects}, {}
        return self._of_model(method, model, rest, content)

    def _of_model(self, method: str, model: str, rest: list[str], content: bytes):
        what, revision, *path = rest or ["revision", "main"]
        commits = self.models[model]
        known = {"main": commits[-1], **{self.sha(model, i): c for i, c in enumerate(commits)}}
        if revision not in known:
            return 404, {}, {"X-Error-Code": "RevisionNotFound"}
        files = known[revision]
        sha = self.sha(model) if revision == "main" else revision
        if what == "revision":
            about = {"id": model, "sha": sha, "private": model in self.private}
            return 200, {**about, "siblings": [{"rfilename": f} for f in files]}, {}
        if what == "tree":
            sizes = {name: {"size": len(data), "oid": _hash(data)} for name, data in files.items()}
            return 200, [{"type": "file", "path": name, **sizes[name]} for name in files], {}
        if what == "preupload":
            asked = [file["path"] for file in json.loads(content)["files"]]
            kinds = ["lfs" if path.endswith(".safetensors") else "regular" for path in asked]
            found = [{"path": p, "uploadMode": k} for p, k in zip(asked, kinds, strict=True)]
            return 200, {"files": [{**file, "shouldIgnore": False} for file in found]}, {}
        if what == "commit":
            lines = [json.loads(line) for line in content.splitlines()]
            commits.append(dict(files))
            for line in lines:
                self._apply(commits[-1], line["key"], line["value"])
            url = f"{self.url}/{model}/commit/{self.sha(model)}"
            return 200, {"commitUrl": url, "commitOid": self.sha(model)}, {}
        if model in self.gated:
            return 403, {}, {"X-Error-Code": "GatedRepo"}
        if (file := "/".join(path)) not in files:
            return 404, {}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}
        return 200, files[file], {"ETag": f'"{_hash(files[file])}"', "X-Repo-Commit": sha}

    def _apply(self, files: dict[str, bytes], key: str, value: dict) -> None:
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = self.large[value["oid"]]
        elif key == "deletedFile":
            del files[value["path"]]


def _hash(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
