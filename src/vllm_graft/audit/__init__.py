"""Audits packages against releases of vLLM that need not be installed: what of vLLM each uses, and what became of it.

::

    finder = ReleaseFinder()                            # the shipped catalogue first, then the package index
    package = read("my_plugin")                         # patches, overrides, subclasses and imports, found by reading
    report = audit([package], finder.release("0.31.0"), [finder.release("0.32.0")])
    report.rows                                         # a row for each use, a verdict for each release
    report.findings                                     # what needs attention, with codes P201 and up

No code of vLLM or of the package is run.

model.py          the data: Use, Verdict, ReportCell, ReportRow, Report
uses/             reads a package: which names of vLLM it patches, overrides, subclasses and imports, and how
releases/         reads a release: the shipped catalogue, the package index, a wheel, a folder
compatibility.py  calls, attribute reads, overrides and subclasses against one release
verdicts.py       one name in two releases: the verdict
findings.py       verdicts that need attention, with a code, a level and the next step
report.py         audit(): every use in every release
cache.py          reports and packages' uses, stored between runs
render/           a report as text, Markdown, a page, a picture
copies.py         functions copied from vLLM: the release each was taken from
rebase.py         a copied function carried to another release
merge.py          the three-way merge beneath it
"""
