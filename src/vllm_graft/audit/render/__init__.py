"""Render a report for people: plain functions from a ``Report`` to text.

::

    print(text(report, width=120))                   # a terminal
    comment = markdown(report)                       # a comment on a pull request
    Path("audit.html").write_text(html(report))      # one page, no script, nothing loaded from elsewhere
    Path("audit.svg").write_text(svg(report))        # a picture for a README

The same report always gives the same text: the time of an audit is an argument of ``html``.

presentation.py                            the word and colour of each state, the order of rows, the summary
text.py, markdown.py, html.py, svg.py      the renderers
"""

from __future__ import annotations

from vllm_graft.audit.render.html import html as html
from vllm_graft.audit.render.markdown import markdown as markdown
from vllm_graft.audit.render.svg import svg as svg
from vllm_graft.audit.render.text import text as text

__all__ = ["html", "markdown", "svg", "text"]
