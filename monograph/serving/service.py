"""What answers requests for inference: admission, the body, the batch, and the answer until it is sent."""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar

import torch
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from monograph.serving import protocol
from monograph.serving.batching import Batcher, Job
from monograph.serving.limits import Limits, RequestError, is_local
from monograph.serving.metrics import Metrics
from monograph.serving.models import ServedModel

LOGGER = logging.getLogger("monograph.serving")
Made = TypeVar("Made")
_SMALL: Final = 64 << 10  # bytes of JSON that take no time
_PIECE: Final = 256 << 10  # bytes of an answer
_SECONDS_OF_REFUSED: Final = 5.0


class Service:
    """Models, what waits for them, and what is counted."""

    def __init__(self, models: Sequence[ServedModel], limits: Limits, token: str | None) -> None:
        self.models = {model.name: model for model in models}
        self.limits, self._token = limits, token
        self.metrics = Metrics()
        self.metrics.inside(lambda: float(self._requests))
        self.ready = False
        self._requests = self._bytes = 0  # of those that are here, until they are answered
        self._batchers = {model.name: Batcher(model, limits, self.metrics) for model in models}
        self._preparing = threading.Thread(target=self._prepare, daemon=True)
        self._ending = False
        self._parsing = asyncio.Semaphore(1)

    @asynccontextmanager
    async def running(self, _: object) -> AsyncIterator[None]:
        """Inside, requests are answered; at the end those that wait are answered first."""
        self._preparing.start()
        yield
        self._ending = True
        for batcher in self._batchers.values():
            await asyncio.to_thread(batcher.close)

    @property
    def is_busy(self) -> bool:
        """Whether a model is still being prepared."""
        return self._preparing.is_alive()

    def _prepare(self) -> None:
        """Make every model ready while the server already says that it is alive."""
        for model in self.models.values():
            if self._ending:
                return
            start = time.perf_counter()
            model.prepare()
            fields = {
                "model": model.name,
                "backend": model.backend,
                "batch_sizes": list(model.batch_sizes),
                "seconds": round(time.perf_counter() - start, 3),
            }
            fields |= {"note": model.note} if model.note else {}
            level = logging.WARNING if model.note else logging.INFO
            LOGGER.log(level, "the model is ready", extra={"fields": fields})
        self.ready = True

    async def authorized(self, request: Request) -> None:
        """Raise for a request without the token; without one, for a page in a browser that was sent here."""
        if self._token is None:
            if not is_local(request.url.hostname or ""):
                raise RequestError(403, "without a token only requests to localhost are answered")
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._token.encode()):
            raise RequestError(401, "the bearer token is missing or wrong")

    def model(self, name: str, version: str) -> ServedModel:
        """A model by name. Raises if there is none."""
        if name not in self.models or version != "1":
            raise RequestError(404, f"there is no such model or version; there are {', '.join(self.models)}")
        return self.models[name]

    async def infer(self, request: Request, model: ServedModel) -> Response:
        """Answer a request for inference."""
        if not self.ready:
            raise RequestError(503, "the server is getting ready")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise RequestError(415, "compressed requests are not taken")
        most = min(self.limits.max_bytes, protocol.most_bytes(model))
        size = (
            most
            if "transfer-encoding" in request.headers
            else int(request.headers.get("content-length", most))
        )
        if size > most:
            raise RequestError(413, f"a request for {model.name} has at most {most} bytes")
        if self._requests >= self.limits.queue or self._bytes + size > self.limits.max_bytes_inside:
            await _throw_away(request, most)
            raise RequestError(429, "too many requests wait: try again later")
        hold = _Hold(self, size)
        try:
            content, headers = await self._inferred(request, model, most)
            hold.grow(len(content))
            return _Answer(content, headers, self.limits.deadline, hold)
        except BaseException:
            hold.end()
            raise

    async def _inferred(
        self, request: Request, model: ServedModel, most: int
    ) -> tuple[bytes, dict[str, str]]:
        start = time.monotonic()
        try:
            async with asyncio.timeout(self.limits.deadline):
                body = await _body(request, most)
        except TimeoutError:
            raise RequestError(408, "the request did not arrive in time") from None
        header_length = request.headers.get(protocol.HEADER_LENGTH)
        inference = await self._aside(
            len(body), protocol.read, model, body, header_length, self.limits.max_json_bytes
        )
        deadline = start + min(self.limits.deadline, inference.seconds or self.limits.deadline)
        results = await self._run(request, model, inference.tensors, deadline)
        size = (
            0
            if all(is_binary for _, is_binary in inference.outputs)
            else sum(item.nbytes for item in results)
        )
        return await self._aside(size, protocol.answer, model, inference, results)

    async def _aside(self, size: int, function: Callable[..., Made], *args: Any) -> Made:
        """Call what takes long if there is much JSON, so that others are answered meanwhile."""
        if size < _SMALL:
            return function(*args)
        async with self._parsing:
            return await asyncio.to_thread(function, *args)

    async def _run(
        self, request: Request, model: ServedModel, tensors: tuple[torch.Tensor, ...], deadline: float
    ) -> list[torch.Tensor]:
        """The results, unless the deadline passes or the client goes away before."""
        now = time.monotonic()
        late = RequestError(504, "the deadline passed")
        if now >= deadline:
            raise late
        job = Job(tensors, now, asyncio.get_running_loop().create_future())
        gone = asyncio.ensure_future(request.receive())  # there is no more to come than that
        batcher = self._batchers[model.name]
        batcher.submit(job)
        try:
            waiting = (job.done, gone)
            await asyncio.wait(waiting, timeout=deadline - now, return_when=asyncio.FIRST_COMPLETED)
            if job.done.done():
                return job.done.result()
            raise RequestError(499, "the client went away") if gone.done() else late
        finally:
            batcher.withdraw(job)
            job.done.cancel()  # an error that comes now is nobody's: asyncio would log its text
            gone.cancel()

    def count(self, requests: int, size: int) -> None:
        """Count what comes in or goes out."""
        self._requests += requests
        self._bytes += size


class _Hold:
    """The place that a request takes until it is answered."""

    def __init__(self, service: Service, size: int) -> None:
        self._service, self._size, self._held = service, size, True
        service.count(1, size)

    def grow(self, size: int) -> None:
        """Take place for the answer too."""
        self._size += size
        self._service.count(0, size)

    def end(self) -> None:
        """Give the place back, once."""
        if self._held:
            self._held = False
            self._service.count(-1, -self._size)


class _Answer(Response):
    """Results, sent in pieces, to a client that has to take them before long."""

    def __init__(self, content: bytes, headers: dict[str, str], seconds: float, hold: _Hold) -> None:
        super().__init__(content, headers=headers)
        self._seconds, self._hold = seconds, hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; what is not taken in time is cut off."""
        content = memoryview(self.body)
        try:
            async with asyncio.timeout(self._seconds):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                for start in range(0, len(content), _PIECE):
                    more = start + _PIECE < len(content)
                    piece = bytes(content[start : start + _PIECE])
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
        except TimeoutError:
            LOGGER.info("a client does not take its answer")
        finally:
            self._hold.end()


async def _body(request: Request, most: int) -> bytearray:
    """The body, in memory that tensors may use."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            if len(body) + len(chunk) > most:
                raise RequestError(413, f"a request for this model has at most {most} bytes")
            body += chunk
    except ClientDisconnect:
        raise RequestError(499, "the client went away") from None
    return body


async def _throw_away(request: Request, most: int) -> None:
    """Read a body and keep nothing, for a while: many clients send all of it before they listen."""
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_SECONDS_OF_REFUSED):
            async for chunk in request.stream():
                most -= len(chunk)
                if most < 0:
                    return
