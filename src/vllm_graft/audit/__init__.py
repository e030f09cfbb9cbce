"""Packages held against releases of vLLM that need not be installed: what of vLLM each uses, and what became of it.

::

    library = Library()                                 # the shipped catalogue first, then the package index
    package = read("my_plugin")                         # patches, overrides, subclasses and imports, found by reading
    report = audit([package], library.release("0.31.0"), [library.release("0.32.0")])
    report.rows                                         # a row for each use, a verdict for each release
    report.findings                                     # what a person has to look at, with codes P201 and up

Nothing of vLLM is run, and nothing of the package.

model.py       what is passed around: Use, Verdict, Cell, Row, Report
uses/          reads a package: which names of vLLM it patches, overrides, subclasses and imports, and how
releases/      what a release looks like: the shipped catalogue, the package index by ranges, a wheel, a folder
judging.py     one name in two releases: the verdict
auditing.py    audit(): every use in every release
cache.py       reports kept between runs
readings.py    what was read from packages, kept between runs
findings.py    verdicts that a person has to know of
copies.py      functions that were copied from vLLM
render/        a report as text, Markdown, a page, a picture
provenance.py  which release a copied function was taken from
rebase.py      a copied function carried to another release
merge.py       the three-way merge beneath it
layout.py      a copy that a formatter has been over, in upstream's own lines
"""
