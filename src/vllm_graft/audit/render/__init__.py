"""A report for people: plain functions that take a ``Report`` and give text.

::

    print(text(report, width=120))                   # a terminal
    comment = markdown(report)                       # a comment on a pull request
    Path("audit.html").write_text(html(report))      # one page, no script, nothing loaded from elsewhere
    Path("audit.svg").write_text(svg(report))        # a picture for a README

All of them give the same text for the same report: the time of an audit is told to ``html``, not taken from a clock.

words.py      what each state is called, in which colour, and what it means
colours.py    the colours, for light and for dark screens
selection.py  what of a report is shown, in what order, and the sentence that sums it up
style.py      the style sheet of the page
diffs.py      unified diffs taken apart by line
text.py, markdown.py, html.py, svg.py      the renderers
"""

from __future__ import annotations

from vllm_graft.audit.render.html import html as html
from vllm_graft.audit.render.markdown import markdown as markdown
from vllm_graft.audit.render.svg import svg as svg
from vllm_graft.audit.render.text import text as text

__all__ = ["html", "markdown", "svg", "text"]
