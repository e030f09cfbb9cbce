"""Ask of every patch of a module what reading says of it, then what the engine of a start says; run in a child."""

import importlib
import json
import sys

from vllm_graft.errors import PatchError
from vllm_graft.patching import Engine, VLLMPatch
from vllm_graft.patching.review import Reviewer


def read(patch):
    try:
        _, sure = Reviewer().examine(patch)
    except PatchError as error:
        return {"plan": error.what, "sure": True}
    return {"plan": "", "sure": sure}


def start(patch):
    engine = Engine()
    try:
        engine.apply([patch])
    except PatchError as error:
        return {"start": error.what}
    engine.revert_all()
    return {"start": ""}


if __name__ == "__main__":
    module = importlib.import_module(sys.argv[1])
    patches = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, VLLMPatch) and one is not VLLMPatch
    ]
    found = {patch.declaration.name: read(patch) for patch in patches}
    assert "vllm" not in sys.modules, "reading has imported vLLM"
    for name in dict.fromkeys(patch.declaration.target.module for patch in patches):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            print(f"there is no {name}", file=sys.stderr)
    for patch in patches:
        found[patch.declaration.name] |= start(patch)
    print("RESULT " + json.dumps(found))
