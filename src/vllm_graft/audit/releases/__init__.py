"""Reads releases of vLLM without installing them.

::

    finder = ReleaseFinder()
    release = finder.release("0.31.0")                 # from the catalogue, else from sources
    release.shape("vllm.v1.core.sched.scheduler", "Scheduler.schedule").signature
    finder.text("0.31.0", "vllm.v1.core.sched.scheduler", "Scheduler.schedule")

release_finder.py    ReleaseFinder: a release by its number, "installed" or "latest"
release.py           Release: the questions that every release answers about its names and classes
outline.py           the facts about a module that a release is judged by
catalogue.py         CatalogueRelease: a release of the shipped catalogue; how that is written; CatalogueBuilder
source_release.py    SourceRelease: a release read from its sources
wheels.py            where sources come from: a wheel on the index, read by ranges and cached
package_index.py     PackageIndex: which releases there are, and the client that asks
"""
