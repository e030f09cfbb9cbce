"""What depends on the installed vLLM: arguments and keys that only some releases know."""

from importlib.util import find_spec
from pathlib import Path

import pytest


def entrypoints_name(word: str, file: str) -> bool:
    """Tell whether a file of that name in vLLM's entrypoints has the word; nothing is imported."""
    places = getattr(find_spec("vllm"), "submodule_search_locations", None) or ()
    files = [found for place in places for found in Path(place, "entrypoints").rglob(file)]
    return any(word in found.read_text("utf-8") for found in files)


@pytest.fixture(scope="session")
def tokens_endpoint() -> tuple[str, ...]:
    """Arguments with which a server has the endpoint for tokens; earlier releases have it always, and no argument."""
    return ("--enable-scale-out",) if entrypoints_name("enable_scale_out", "cli_args.py") else ()


@pytest.fixture(scope="session")
def messages_take_keys() -> bool:
    """Whether ``/v1/messages`` has ``vllm_xargs``; earlier releases drop all keys there before a plan sees them."""
    return entrypoints_name("vllm_xargs", "anthropic/protocol.py")


@pytest.fixture(scope="session")
def scoring_takes_salts() -> bool:
    """Whether ``/generative_scoring`` has ``cache_salt``; earlier releases drop it."""
    return entrypoints_name("cache_salt", "generative_scoring/serving.py")
