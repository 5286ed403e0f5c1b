"""The page that shows a person what is served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from monograph.serving.models import ServedModel

_STYLE = "body{font:15px system-ui;margin:2em}table{border-collapse:collapse}td,th{padding:.3em 1em;text-align:left;border-bottom:1px solid #ccc}"


def status_page(rows: Iterable[tuple[ServedModel, Mapping[str, int]]], ready: bool) -> str:
    """Each model with its tensors and its answers."""
    heads = "".join(
        f"<th>{name}</th>" for name in ("Model", "Backend", "Takes", "Gives", "Batches", "Answers")
    )
    body = "".join(_row(model, answers) for model, answers in rows)
    state = "ready" if ready else "getting ready"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Monograph</title><style>{_STYLE}</style>"
        f"<h1>Monograph is {state}</h1><table><tr>{heads}</tr>{body}</table>"
        "<p><a href=metrics>metrics</a> <a href=openapi.json>interface</a></p></html>"
    )


def _row(model: ServedModel, answers: Mapping[str, int]) -> str:
    batches = f"up to {model.batch_sizes[-1]} rows" if model.batch_sizes else model.note or "none"
    counts = ", ".join(f"{count} with {status}" for status, count in sorted(answers.items())) or "none yet"
    fields = ("; ".join(map(str, side)) for side in (model.inputs, model.outputs))
    cells = "".join(
        f"<td>{escape(text)}</td>" for text in (model.name, model.backend, *fields, batches, counts)
    )
    return f"<tr>{cells}</tr>"
