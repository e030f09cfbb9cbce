"""The plan, which says what is to be active: resolved once from the configuration, carried to every process.

The configuration has layers, each stronger than the one before it:

1. ``[defaults]`` of ``graft.toml`` (named by ``GRAFT_CONFIG``, else in the working directory)
2. every ``[[profile]]`` whose ``model`` glob matches: its lists add to the defaults, its single values replace them
3. ``VLLM_CUSTOM_PATCHES``: replaces the list of patches; set but empty means no patch
4. ``--additional-config '{"graft": {...}}'``: each key given replaces that key

- ``resolve``    reads the layers for one model and returns a ``Plan``
- ``Plan``       the items, their options, what happens on failure, where each value came from
- ``export_plan`` / ``inherited_plan``   the plan as an environment variable, for the processes vLLM starts
- ``catalogue``  what can be named: the items that ship, and those other packages offer
"""

from vllm_graft.plan.catalogue import CatalogueEntry, catalogue
from vllm_graft.plan.export import Run, clear_exported_plan, export_plan, inherited_plan, inherited_run
from vllm_graft.plan.plan import Plan, PlanItem
from vllm_graft.plan.resolution import PlanRequest, resolve

__all__ = [
    "CatalogueEntry",
    "Plan",
    "PlanItem",
    "PlanRequest",
    "Run",
    "catalogue",
    "clear_exported_plan",
    "export_plan",
    "inherited_plan",
    "inherited_run",
    "resolve",
]
