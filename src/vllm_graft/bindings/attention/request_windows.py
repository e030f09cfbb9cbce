"""Windows of single requests, narrower than the planned one.

Engine core asks the policy once for each request and stamps the answer on the request's parameters, which vLLM sends to
its workers: the manager that frees blocks and the kernel's tables must never disagree on a window. The stamp is part of
the request's salt for the prefix cache, because keys and values that were computed under one window are wrong under
another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from vllm_graft.bindings.attention.compaction import WindowShape

STAMP: Final = "graft_kv_window"
"""The name among a request's ``extra_args`` under which its window travels."""

_ASKED: Final = "graft_windows"
"""The attribute of a model runner with the windows of its requests, by the names of these."""

# Unknown to clients, who write salts of their own: a request with full attention must not fill the prefix cache for
# those with a window.
_SECRET: Final = os.urandom(8).hex()

Ask = Callable[[Mapping[str, object]], "int | None"]


def stamp_window(request: Any, ask: Ask | None, names: Sequence[str]) -> None:
    """Ask for the window of a request that vLLM's engine core is handed, and stamp it; called before it is hashed.

    Without ``ask`` no request has a window of its own, and a stamp that a client sent is taken off.
    """
    params = request.sampling_params
    extra: dict[str, object] = dict(getattr(params, "extra_args", None) or {})
    # Only engine core may write it: blocks are freed by this value.
    foreign = extra.pop(STAMP, None) is not None
    window = ask(extra) if ask is not None and any(name in extra for name in names) else None
    if window is None and not foreign:
        return
    if window is not None:
        extra[STAMP] = window
        request.cache_salt = f"{request.cache_salt or ''}|{STAMP}={window}|{_SECRET}"
    params.extra_args = extra


def stamped_window(params: Any) -> int | None:
    """Return the window that a request's parameters carry; None for what engine core would never stamp."""
    window: object = (getattr(params, "extra_args", None) or {}).get(STAMP)
    return window if type(window) is int and window > 0 else None


def keep_window(session: Any, update: Any) -> None:
    """Give the next turn of a streaming session the window of its first one.

    The session goes on with its blocks, which were freed by that window and are cached under its salt.
    """
    window, params = stamped_window(session.sampling_params), update.sampling_params
    if stamped_window(params) == window:
        return
    extra = {name: value for name, value in (params.extra_args or {}).items() if name != STAMP}
    params.extra_args = extra if window is None else {**extra, STAMP: window}


def validate(answer: object) -> int | None:
    """Return a policy's answer; raise ValueError for one that is not a window."""
    if answer is not None and (isinstance(answer, bool) or not isinstance(answer, int) or answer < 1):
        raise ValueError(f"request_window() must return a number of tokens or None, but returned {answer!r}")
    return answer


def follow_windows(runner: Any, output: Any) -> None:
    """Take note in a model runner of the requests that begin and end with a step's schedule."""
    # In the runner, because two engines of one process give their requests the same names.
    asked: dict[str, int] = runner.__dict__.setdefault(_ASKED, {})
    for request in output.finished_req_ids:
        asked.pop(request, None)
    for new in output.scheduled_new_reqs:
        window = stamped_window(new.sampling_params)
        if window is not None:
            asked[new.req_id] = window


class RowWindows:
    """In a worker: the windows of the rows of a step whose requests have one of their own."""

    def __init__(self) -> None:
        self.possible = False
        """Whether the policy gives single requests windows at all."""
        self._rows: list[int] = []

    def arrange(self, runner: Any, requests: Sequence[str]) -> None:
        """Take note of the rows of the step that a model runner prepares."""
        asked: dict[str, int] = getattr(runner, _ASKED, {})
        self._rows = [asked.get(request, 0) for request in requests] if asked else []

    def before(self, shape: WindowShape, rows: int, device: torch.device) -> torch.Tensor | None:
        """Return how many tokens before its step each row sees; None if all have the planned window."""
        if not any(self._rows):
            return None
        import torch

        own = [shape.narrowed(window).before if window else shape.before for window in self._rows[:rows]]
        # A captured batch may be padded.
        own += [shape.before] * (rows - len(own))
        found = torch.tensor(own, dtype=torch.int32)
        return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)
