"""The HTTP server: routes of the Open Inference Protocol, health, metrics and a status page."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Final, TypeVar

import torch
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST as METRICS_TYPE
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

import monograph as mg
from monograph.serving import protocol
from monograph.serving.batching import Batcher, Job
from monograph.serving.limits import Limits, RequestError
from monograph.serving.logs import write_logs
from monograph.serving.metrics import Metrics
from monograph.serving.models import ServedModel
from monograph.serving.page import status_page

LOGGER = logging.getLogger("monograph.serving")

Made = TypeVar("Made")
_SMALL: Final = 64 << 10  # bytes of JSON that take no time
_PIECE: Final = 256 << 10  # bytes of an answer
_SECONDS_OF_REFUSED: Final = 5.0
_SECONDS_OF_SILENCE: Final = 15.0

Name = Annotated[str, Path(max_length=200)]
_ERROR: Final = {
    "application/json": {"schema": {"type": "object", "properties": {"error": {"type": "string"}}}}
}
_STATUSES: Final = {
    400: "The request fits not the protocol or not the model.",
    401: "The bearer token is missing or wrong.",
    403: "Without a token only requests to localhost are answered.",
    404: "There is no such model or version.",
    408: "The request did not arrive in time.",
    413: "The request is too large.",
    415: "The request is compressed.",
    422: "JSON cannot hold the results.",
    429: "Too many requests wait.",
    500: "The model failed.",
    503: "The server is not ready.",
    504: "The deadline passed.",
}


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
        """Make every model ready while the server already tells that it is alive."""
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
            LOGGER.info("the model is ready", extra={"fields": fields})
        self.ready = True

    async def authorized(self, request: Request) -> None:
        """Raise for a request without the token; without one, for a page in a browser that was sent here."""
        if self._token is None:
            if not _is_local(request.url.hostname or ""):
                raise RequestError(403, "without a token only requests to localhost are answered")
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._token.encode()):
            raise RequestError(401, "the bearer token is missing or wrong")

    def model(self, name: str, version: str) -> ServedModel:
        """A model by name. Raises if there is none."""
        if name not in self.models or version != "1":
            raise RequestError(404, "there is no such model or version")
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
        now, loop = time.monotonic(), asyncio.get_running_loop()
        late = RequestError(504, "the deadline passed")
        if now >= deadline:
            raise late
        job = Job(tensors, now, deadline, loop.create_future(), loop)
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
    """The body, in memory that tensors may lie in."""
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


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_app(service: Service) -> FastAPI:
    """The routes."""
    app = FastAPI(
        title="Monograph",
        version=mg.__version__,
        lifespan=service.running,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for kind in (RequestError, StarletteHTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _refused)
    open_routes = APIRouter()
    routes = APIRouter(dependencies=[Depends(service.authorized)], responses=_responses(401, 403))

    @open_routes.get("/v2/health/live", response_class=Response)
    async def live() -> Response:
        """Tell that the process answers."""
        return Response()

    @open_routes.get("/v2/health/ready", response_class=Response, responses=_responses(503))
    async def ready() -> Response:
        """Tell whether every model can be called."""
        return Response(status_code=200 if service.ready else 503)

    @routes.get("/v2")
    async def server() -> dict[str, Any]:
        """Tell what answers here."""
        return {"name": "monograph", "version": mg.__version__, "extensions": ["binary_tensor_data"]}

    async def latest(name: Name) -> ServedModel:
        return service.model(name, "1")

    async def of_version(name: Name, version: Name) -> ServedModel:
        return service.model(name, version)

    _add_model(routes, service, "/v2/models/{name}", Depends(latest))
    _add_model(routes, service, "/v2/models/{name}/versions/{version}", Depends(of_version))

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Give the counters to Prometheus."""
        return PlainTextResponse(service.metrics.text(), headers={"content-type": METRICS_TYPE})

    @routes.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        """Show a person what is served."""
        rows = [(model, service.metrics.requests(name)) for name, model in service.models.items()]
        return HTMLResponse(status_page(rows, service.ready))

    app.include_router(open_routes)
    app.include_router(routes)
    app.add_middleware(_Logged, service=service)
    return app


def _add_model(routes: APIRouter, service: Service, path: str, chosen: Any) -> None:
    """The routes of a model, which `chosen` finds by the path."""

    @routes.get(path, responses=_responses(404))
    async def model(model: ServedModel = chosen) -> dict[str, Any]:
        """Tell what a model takes and gives; -1 is a size that varies."""
        return protocol.describe(model)

    @routes.get(f"{path}/ready", response_class=Response, responses=_responses(404, 503))
    async def model_ready(model: ServedModel = chosen) -> Response:
        """Tell whether a model can be called."""
        return Response(status_code=200 if service.ready else 503)

    @routes.post(f"{path}/infer", openapi_extra=_BODY, responses=_responses(*_STATUSES))
    async def infer(request: Request, model: ServedModel = chosen) -> Response:
        """Run a model."""
        return await service.infer(request, model)


def _responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"description": _STATUSES[status], "content": _ERROR} for status in statuses}


def _request_schema() -> dict[str, Any]:
    """The schema of a request in one piece, as a description of the interface needs it."""
    schema = protocol.InferenceRequest.model_json_schema()
    parts = schema.pop("$defs")
    schema["properties"]["inputs"]["items"] = parts["InputTensor"]
    schema["properties"]["outputs"]["items"] = parts["RequestedOutput"]
    return schema


_BODY: Final = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _request_schema()}}}
}


async def _refused(_: Request, error: Exception) -> JSONResponse:
    """The answer to a request that got no results: one sentence, never more."""
    match error:
        case RequestError(status=status, message=message):
            return JSONResponse({"error": message}, status, _HEADERS.get(status))
        case StarletteHTTPException(status_code=status):
            return JSONResponse({"error": str(error.detail)}, status, error.headers)
        case RequestValidationError():
            return JSONResponse({"error": "the path is wrong"}, 404)
    return JSONResponse({"error": "the server failed"}, 500)


_HEADERS: Final = {429: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}


class _Logged:
    """Logs and counts every answer."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            seconds = time.perf_counter() - start
            name = scope.get("path_params", {}).get("name", "")
            if scope["path"].endswith("/infer") and name in self._service.models:
                self._service.metrics.answered(name, status, seconds)
            fields = {"method": scope["method"], "path": scope["path"][:200], "status": status}
            LOGGER.info("request", extra={"fields": fields | {"seconds": round(seconds, 6)}})


def serve(
    models: Sequence[ServedModel], limits: Limits, *, host: str, port: int, token: str | None = None
) -> None:
    """Answer requests until the process is told to end by SIGINT or SIGTERM; those that wait are answered before.

    Raises OSError if the address cannot be used. With port 0 the system chooses one, which the log tells.
    """
    write_logs()
    service = Service(models, limits, token)
    config = uvicorn.Config(
        make_app(service),
        http=_Connection,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(limits.deadline) + 1,
    )
    server = uvicorn.Server(config)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # those of the server come later, and are followed by these
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small answers go at once
    address = listener.getsockname()
    fields = {"host": address[0], "port": address[1], "models": [model.name for model in models]}
    LOGGER.info("listening", extra={"fields": fields})
    server.run(sockets=[listener])
    if service.is_busy:
        logging.shutdown()
        os._exit(0)  # a thread that computes cannot be stopped, and the interpreter does not end around it


class _Connection(H11Protocol):
    """A connection that is closed if no request comes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait."""
        super().connection_made(transport)
        self.loop.call_later(_SECONDS_OF_SILENCE, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()
