"""What vLLM would be told on its command line, as far as it matters to plugins."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arguments:
    """The words of a command line, in whichever of its spellings: ``--a-b c``, ``--a_b=c``, ``--a.b c``."""

    words: tuple[str, ...] = ()

    def value(self, name: str) -> str | None:
        """What an argument was given, the last time it was; None where it was not."""
        found = None
        for place, word in enumerate(self.words):
            key, equals, value = word.partition("=")
            if key.replace("_", "-") == name:
                following = self.words[place + 1] if place + 1 < len(self.words) else ""
                found = value if equals else "" if following.startswith("--") else following
        return found

    def values(self, name: str) -> list[str]:
        """All that follows an argument that takes several, the last time it is given."""
        found: list[str] = []
        taking = False
        for word in self.words:
            if word.startswith("-"):
                key, _, value = word.partition("=")
                taking = key.replace("_", "-") == name
                found = ([value] if value else []) if taking else found
            elif taking:
                found.append(word)
        return found

    @property
    def model(self) -> str:
        """The model that is named, first or after ``--model``; empty where none is."""
        words = [word for word in self.words[:2] if word not in ("vllm", "serve")]
        first = words[0] if words and not words[0].startswith("-") else ""
        return self.value("--model") or first

    def given(self, name: str) -> bool:
        """Whether an argument is there at all, or a part of it (``--speculative-config.method``)."""
        keys = [word.partition("=")[0].replace("_", "-") for word in self.words]
        return any(key == name or key.startswith(f"{name}.") for key in keys)

    def switched(self, name: str) -> bool | None:
        """A switch with its opposite ``--no-…``: on, off, or None where neither is there."""
        found = None
        for word in self.words:
            key = word.partition("=")[0].replace("_", "-")
            if key in (name, f"--no-{name[2:]}"):
                found = key == name
        return found

    def document(self, name: str) -> dict[str, object]:
        """The JSON that an argument was given; nothing where there is none or it is no object."""
        try:
            found = json.loads(self.value(name) or "{}")
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}
