"""
The two routes by which a trainer asks a vLLM server for the version of its weights, for vLLM 0.26, the last release for PyTorch 2.11, which has
none yet: `--middleware benchmarks.weight_version.WeightVersion`.
"""

import json
from typing import Any


class WeightVersion:
    """ASGI middleware that answers `/update_weight_version` and `/weight_info`; everything else goes to `app`."""

    def __init__(self, app: Any):
        self.app = app
        self.version = ""  # of a server that has just started

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any):
        """Answer a request."""
        match scope.get("path"):
            case "/update_weight_version":
                self.version = json.loads(await _read(receive))["new_version"]
                await _answer(send, {})
            case "/weight_info":
                await _answer(send, {"weight_version": self.version})
            case _:
                await self.app(scope, receive, send)


async def _read(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def _answer(send: Any, content: dict[str, str]):
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
