"""The HTTP server: routes of the Open Inference Protocol, health, metrics and a status page."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST as METRICS_TYPE
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

import monograph as mg
from monograph.serving import protocol
from monograph.serving.limits import Limits, RequestError
from monograph.serving.logs import write_logs
from monograph.serving.models import ServedModel
from monograph.serving.page import status_page
from monograph.serving.service import Service

LOGGER = logging.getLogger("monograph.serving")

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
    app.include_router(_open_routes(service))
    app.include_router(_routes(service))
    app.add_middleware(_Logged, service=service)
    return app


def _open_routes(service: Service) -> APIRouter:
    """The routes that anybody may ask."""
    routes = APIRouter()

    @routes.get("/v2/health/live", response_class=Response)
    async def live() -> Response:
        """Say that the process answers."""
        return Response()

    @routes.get("/v2/health/ready", response_class=Response, responses=_responses(503))
    async def ready() -> Response:
        """Say whether every model can be called."""
        return Response(status_code=200 if service.ready else 503)

    return routes


def _routes(service: Service) -> APIRouter:
    """The routes for those who may use the models."""
    routes = APIRouter(dependencies=[Depends(service.authorized)], responses=_responses(401, 403))

    @routes.get("/v2")
    async def server() -> dict[str, Any]:
        """Say what answers here."""
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

    return routes


def _add_model(routes: APIRouter, service: Service, path: str, chosen: Any) -> None:
    """The routes of a model, which `chosen` finds by the path."""

    @routes.get(path, responses=_responses(404))
    async def metadata(model: ServedModel = chosen) -> dict[str, Any]:
        """Say what a model takes and gives; -1 is a size that varies."""
        return protocol.describe(model)

    @routes.get(f"{path}/ready", response_class=Response, responses=_responses(404, 503))
    async def ready(model: ServedModel = chosen) -> Response:
        """Say whether a model can be called."""
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
    """Answer requests until the process is ended by SIGINT or SIGTERM; those that wait are answered before.

    Raises OSError if the address cannot be used. With port 0 the system chooses one, which the log names.
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
    # those of the server come later, and are followed by these
    for number in (signal.SIGINT, signal.SIGTERM):
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
