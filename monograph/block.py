"""Block: what `self.model` is inside a Graph. It behaves as the module, and knows its place in the graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import nn

from monograph.compat.modules import submodules_of
from monograph.errors import DefinitionError


class Holder(Protocol):
    """What holds blocks: it knows which modules are computed again in backward, and which are in which stage."""

    def is_checkpointed(self, path: str) -> bool: ...

    def set_checkpointed(self, path: str, mode: bool) -> None: ...

    def stage_of(self, path: str) -> int | None: ...

    def set_stage(self, path: str, stage: int | None, ranks: Sequence[int] | None) -> None: ...


class GraphModule:
    """The graph's view of a module: its path and the module itself. Reached by `block.to(mg.GraphModule)`."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.holder: Holder | None = None

    @property
    def activation_checkpointing(self) -> bool:
        """Whether backward computes again what this module makes in forward, from its inputs.

        Each call of the module is a region as of `torch.utils.checkpoint`: what it makes is dropped, but for what others read
        and random numbers. Set it in `__init__` or between two calls; the next call makes a build.
        """
        return self.holder is not None and self.holder.is_checkpointed(self.name)

    @activation_checkpointing.setter
    def activation_checkpointing(self, mode: bool = True) -> None:
        if self.holder is None:
            raise DefinitionError(
                f"activation_checkpointing of {self.name}: this block belongs to no graph",
                hint="set it on a block of the graph: self.model.to(mg.GraphModule)",
            )
        self.holder.set_checkpointed(self.name, bool(mode))

    @property
    def stage_id(self) -> int | None:
        """The stage of a pipeline that the module is in; None if it was not set."""
        return None if self.holder is None else self.holder.stage_of(self.name)

    def set_stage(self, stage_id: int | None = None, placement: Any = None) -> None:
        """Say in which stage of a pipeline the module is, with all inside of it that has no stage of its own.

        Where there are several processes and `config.set_gradient_accumulation_steps()`, each runs its stages; one process runs
        all, and nothing changes. A `placement` says which process runs the stage, one of each copy of the pipeline; without one it
        is the next in the order of the schedule. The next call makes a build. Raises DefinitionError for what is no stage or no
        placement, and the next call DistributedError for placements that the schedule cannot take.
        """
        if stage_id is not None and (type(stage_id) is not int or stage_id < 0):
            raise DefinitionError(
                f"set_stage({stage_id!r}): a stage is a whole number from 0 on", hint="set_stage(0)"
            )
        if self.holder is None:
            raise DefinitionError(
                f"set_stage({stage_id!r}) of {self.name}: this block belongs to no graph",
                hint="set it on a block of the graph: self.model.to(mg.GraphModule)",
            )
        self.holder.set_stage(self.name, stage_id, None if placement is None else _ranks_of(placement))

    def __repr__(self) -> str:
        return f"(GraphModule:{self.name}({type(self.module).__name__}))"


class Block:
    """A module held by a Graph. Attributes, calls, iteration and `isinstance` work as on the module.

    >>> block = Block("model", nn.Sequential(nn.Linear(2, 2)))
    >>> isinstance(block, nn.Sequential), isinstance(block[0], nn.Linear)
    (True, True)
    """

    __slots__ = ("__weakref__", "_block_children", "_block_module", "_block_view")

    def __init__(self, name: str, module: nn.Module) -> None:
        object.__setattr__(self, "_block_module", module)
        object.__setattr__(self, "_block_view", GraphModule(name, module))
        object.__setattr__(self, "_block_children", {})

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(_module(self))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """`to(GraphModule)` gives the graph's view, `to(torch.nn.Module)` the module; else as `Module.to`."""
        if args and isinstance(args[0], type) and issubclass(args[0], GraphModule):
            return self._block_view_as(args[0])
        if args and args[0] is nn.Module:
            return _module(self)
        _module(self).to(*args, **kwargs)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _module(self)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(_module(self), name)
        return self._block_child(name, value) if isinstance(value, nn.Module) else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_module(self), name, unwrap(value))

    def __delattr__(self, name: str) -> None:
        delattr(_module(self), name)

    def __getitem__(self, key: Any) -> Any:
        value = _module(self)[key]  # type: ignore[index]
        if isinstance(key, int) and key < 0:
            key += len(self)
        return self._block_child(str(key), value) if isinstance(value, nn.Module) else value

    def __len__(self) -> int:
        return len(_module(self))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for index, value in enumerate(iter(_module(self))):  # type: ignore[call-overload]
            yield self._block_child(str(index), value) if isinstance(value, nn.Module) else value

    def __contains__(self, item: Any) -> bool:
        return unwrap(item) in _module(self)  # type: ignore[operator]

    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> list[str]:
        return [*dir(_module(self)), "to"]

    def __repr__(self) -> str:
        return repr(_module(self))

    def __eq__(self, other: object) -> bool:
        return _module(self) is unwrap(other)

    def __hash__(self) -> int:
        return hash(_module(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (object.__getattribute__(self, "_block_view").name, _module(self))

    def _block_child(self, name: str, module: nn.Module) -> Block:
        """The block of a child, the same one each time."""
        children: dict[str, Block] = object.__getattribute__(self, "_block_children")
        present = submodules_of(_module(self))
        for stale in [key for key, block in children.items() if present.get(key) is not _module(block)]:
            del children[stale]
        if (child := children.get(name)) is not None:
            return child
        view: GraphModule = object.__getattribute__(self, "_block_view")
        child = type(self)(f"{view.name}.{name}", module)
        hold(child, view.holder)
        if present.get(name) is module:
            children[name] = child
        return child

    def _block_view_as(self, kind: type[GraphModule]) -> GraphModule:
        """The graph's view, of a kind of it that may hold more."""
        view: GraphModule = object.__getattribute__(self, "_block_view")
        if not isinstance(view, kind):
            view, holder = kind(view.name, view.module), view.holder
            view.holder = holder
            object.__setattr__(self, "_block_view", view)
        return view


def _ranks_of(placement: Any) -> tuple[int, ...]:
    """The processes of a placement."""
    try:
        return tuple(map(int, placement))
    except (TypeError, ValueError):
        raise DefinitionError(
            f"set_stage() got a {type(placement).__name__} as placement",
            hint='mg.distributed.placement("cpu", ranks=[0])',
        ) from None


def _module(block: Block) -> nn.Module:
    module: nn.Module = object.__getattribute__(block, "_block_module")
    return module


def hold(block: Block, holder: Holder | None) -> None:
    """Say what holds a block, and the blocks inside of it from now on."""
    object.__getattribute__(block, "_block_view").holder = holder


def is_block(item: object) -> bool:
    """True for Blocks, which are modules to `isinstance`."""
    return issubclass(type(item), Block)


def unwrap(item: Any) -> Any:
    """The module inside a Block; anything else as it is."""
    return _module(item) if is_block(item) else item
