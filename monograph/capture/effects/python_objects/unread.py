"""What code names and has not read. Of some objects each read is known: what they and nothing else hold needs no guard."""

from __future__ import annotations

from typing import Any

from monograph.capture.guards.sources.places import Content, Source
from monograph.capture.guards.sources.reach.reach import Reach
from monograph.capture.guards.sources.reads import Reads


def without_unread(reach: Reach, reads: Reads) -> list[Source]:
    """The sources of a step that has run, without attributes that it has not read or has set before, and lists in the former."""
    for owner, name in reads.written_first():
        reach.leave_out(owner, name)
    found = ((reach.leave_out(owner, name), name) for owner, name in reads.unread)
    left = {(id(source), name) for source, name in found if source is not None}
    # what an iterator holds, nothing may show
    return list(reach.sources) if reach.has_iterators else _without_content(reach, left)


def _without_content(reach: Reach, left: set[tuple[int, Any]]) -> list[Source]:
    """The sources without lists and dicts to which only these places lead, by ids of sources and keys; and so on in them."""
    kept, dropped = list(reach.sources), set[int]()

    def leads_nowhere(way: Any) -> bool:
        return isinstance(way, tuple) and (
            (id(way[0]), way[1]) in left or (isinstance(way[0], Content) and id(way[0]) in dropped)
        )

    while True:
        new = {
            id(source)
            for source in kept
            if isinstance(source, Content)
            and (ways := reach.ways.get(id(source.content)))
            and all(map(leads_nowhere, ways))
        }
        if not new:
            return kept
        dropped |= new
        kept = [source for source in kept if id(source) not in new]
