"""A chat server that fails as real ones do: on demand, or as a proxy in front of a real one."""

from __future__ import annotations

import http.client
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

# What a second try gets around.
PASSING = ("drop", "reset", "cut", "hang", "429", "429 after", "500", "502 html", "503", "truncated", "no choices",
           "no message", "null", "abort", "null finish")  # fmt: skip


def passing_faults(share: float, seed: int, kinds: tuple[str, ...] = PASSING) -> Callable[[int, dict], str | None]:
    """Faults of all kinds for a share of the calls, drawn from the number of the call alone."""

    def draw(number: int, body: dict[str, Any]) -> str | None:
        drawn = random.Random(f"{seed} {number}")
        return drawn.choice(kinds) if drawn.random() < share else None

    return draw


def answer_of(body: dict[str, Any]) -> dict[str, Any]:
    """The last message backwards, as a chat completion."""
    message = {"role": "assistant", "content": str(body["messages"][-1]["content"])[::-1]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}


@dataclass
class Call:
    """A call of the chat completions."""

    body: dict[str, Any]
    started_s: float
    fault: str | None
    authorization: str | None = None

    @property
    def prompt(self) -> str:
        return self.body["messages"][-1]["content"]


class FaultyServer:
    """
    The server.

    Args:
        fault: from the number of a call and its body to the name of a fault (`PASSING`, or a status such as "400"), or
            None: the call is answered.
        answer: from the body of a call to the response. A response with a `status` is an error.
        models: names that are listed; None has no list.
        target: address of a real server that answers in place of `answer`.
        hang_s: how long a fault "hang" is silent before it drops the connection.
        retry_after: what a fault "429 after" asks for.
    """

    def __init__(
        self,
        fault: Callable[[int, dict], str | None] = lambda number, body: None,
        *,
        answer: Callable[[dict], dict] = answer_of,
        models: list[str] | None = ("tiny",),
        target: str | None = None,
        hang_s: float = 30.0,
        retry_after: str = "0.02",
    ) -> None:
        self.fault, self.answer, self.models, self.target = fault, answer, models, target
        self.hang_s, self.retry_after = hang_s, retry_after
        self.calls: list[Call] = []
        self.most_at_once = self.num_at_once = 0
        self.is_over = threading.Event()
        self.lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"owner": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> FaultyServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.die()

    def die(self) -> None:
        """Stop listening, and drop every connection."""
        if not self.is_over.is_set():
            self.is_over.set()
            self._server.shutdown()
            self._server.server_close()

    def calls_of(self, prompt: str) -> list[Call]:
        return [call for call in self.calls if call.prompt == prompt]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up; that is no news."""


class _Handler(BaseHTTPRequestHandler):
    owner: FaultyServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Nothing on the terminal."""

    def do_GET(self) -> None:
        if self.owner.is_over.is_set():
            return self._hang_up()
        if self.owner.target is not None:
            return self._send(*self._forward(b""))
        if self.owner.models is None:
            return self._send(404, {"detail": "Not Found"})
        return self._send(200, {"object": "list", "data": [{"id": name} for name in self.owner.models]})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        owner = self.owner
        if owner.is_over.is_set():
            return self._hang_up()
        body = json.loads(data)
        with owner.lock:
            fault = owner.fault(len(owner.calls), body)
            owner.calls.append(Call(body, time.monotonic(), fault, self.headers.get("Authorization")))
            owner.num_at_once += 1
            owner.most_at_once = max(owner.most_at_once, owner.num_at_once)
        try:
            self._answer(fault, body, data)
        finally:
            with owner.lock:
                owner.num_at_once -= 1

    def _answer(self, fault: str | None, body: dict[str, Any], data: bytes) -> None:
        if fault in ("drop", "reset"):
            return self._hang_up(by_reset=fault == "reset")
        if fault == "hang":
            self.owner.is_over.wait(self.owner.hang_s)
            return self._hang_up()
        if fault == "502 html":
            return self._send(502, b"<html><body>Bad Gateway</body></html>", content_type="text/html")
        if fault is not None and fault.split()[0].isdigit():
            headers = {"Retry-After": self.owner.retry_after} if fault == "429 after" else {}
            return self._send(int(fault.split()[0]), {"error": {"message": f"this is a {fault}"}}, headers)
        if self.owner.target is not None:
            status, response = self._forward(data)
        else:
            answer = self.owner.answer(body)
            status, response = answer.pop("status", 200), json.dumps(answer).encode()
        if fault is None or status != 200:
            return self._send(status, response)
        if fault == "truncated":
            return self._send(200, response[: len(response) // 2])
        if fault == "cut":
            return self._send(200, response, cut_at=len(response) // 2)
        spoilt = json.loads(response)
        choice = spoilt["choices"][0]
        if fault == "no choices":
            spoilt["choices"] = []
        elif fault == "no message":
            del choice["message"]
        elif fault == "null":
            choice["message"] = {"role": "assistant", "content": None}
        else:
            choice["finish_reason"] = {"abort": "abort", "null finish": None}[fault]
        return self._send(200, spoilt)

    def _forward(self, data: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(urlsplit(self.owner.target).netloc, timeout=120)
        connection.request(self.command, self.path, data or None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, content

    def _send(
        self,
        status: int,
        content: Any,
        headers: dict[str, str] | None = None,
        *,
        content_type: str = "application/json",
        cut_at: int | None = None,
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": content_type, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[:cut_at])
        if cut_at is not None:
            self._hang_up()

    def _hang_up(self, *, by_reset: bool = False) -> None:
        self.close_connection = True
        self.wfile.flush()
        if by_reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
