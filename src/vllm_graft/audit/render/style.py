"""The style sheet of the page: calm, dense, readable on a phone and in the dark."""

from __future__ import annotations

from typing import Final, get_args

from vllm_graft.audit.render.colours import variables
from vllm_graft.audit.render.words import Tone

_RULES: Final = """
*{box-sizing:border-box}
html{color-scheme:light dark;font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:2rem 1.5rem 4rem;max-width:82rem;color:var(--ink);background:var(--paper)}
h1{margin:0;font-size:1.5rem;line-height:1.25;letter-spacing:-.01em}
h2{margin:2.5rem 0 .6rem;font-size:1.05rem}
p{margin:.4rem 0;max-width:60rem}
a{color:var(--link)}
small,.soft{color:var(--soft)}
small{font-size:.8rem;font-weight:400}
code,pre,tbody th{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
code{font-size:.86em;overflow-wrap:anywhere}
.lead{font-size:1.1rem;margin:1rem 0 .5rem}
.chips{display:flex;flex-wrap:wrap;gap:.4rem;margin:.8rem 0 0;padding:0;list-style:none;font-size:.85rem}
.chips li,b.w{padding:.05rem .5rem;border-radius:.25rem}
b.w{display:inline-block;min-width:3.2rem;text-align:center;font-size:.8rem;font-weight:500}
.matrix{overflow-x:auto;container-type:inline-size;border-top:1px solid var(--line)}
table{border-collapse:separate;border-spacing:0;min-width:100%}
thead th{white-space:nowrap;padding:.5rem .3rem;font-weight:600;font-size:.85rem;line-height:1.3;text-align:center;
vertical-align:bottom;background:var(--paper);border-bottom:1px solid var(--line)}
thead small{display:block;font-size:.72rem}
thead th:first-child,tbody th{position:sticky;white-space:normal;left:0;z-index:1;background:var(--paper);
text-align:left;padding-left:0}
tbody th{padding:.4rem .8rem 0 0;font-size:.8rem;font-weight:400;line-height:1.35;overflow-wrap:anywhere}
tbody th span{color:var(--soft)}
tbody th b{font-weight:600}
h3.p{margin:1.2rem 0 .2rem;font-size:.95rem}
td{width:5.2rem;min-width:4.6rem;padding:.4rem .12rem 0;text-align:center;vertical-align:top;font-size:.78rem;
line-height:1.35rem}
td>*{display:block;border-radius:.2rem}
td a{color:inherit;text-decoration:none}
td a:hover{text-decoration:underline}
.m td{width:auto;padding:0 0 .35rem;text-align:left;line-height:1.5;border-bottom:1px solid var(--line)}
.m td>div{position:sticky;left:0;width:100cqw;font-size:.78rem;color:var(--soft)}
summary{cursor:pointer;width:fit-content;max-width:100%;overflow-wrap:anywhere}
summary:hover{color:var(--ink)}
.v{margin:.5rem 0 .6rem;padding-left:.8rem;border-left:2px solid var(--line);color:var(--ink)}
.v>*{margin:.25rem 0}
.v p{font-size:.8rem}
.v [id]{scroll-margin-top:30vh}
p:target,li:target{box-shadow:-.8rem 0 var(--paper),-1rem 0 var(--link)}
:target>pre{border-color:var(--link)}
pre{margin:.4rem 0;max-height:70vh;overflow:auto;border:1px solid var(--line);border-radius:.3rem;
font-size:.76rem;line-height:1.45;tab-size:4}
pre code{display:block;width:max-content;min-width:100%;padding:.5rem 0;font-size:inherit;overflow-wrap:normal}
pre :is(ins,del,i,b,span){display:block;padding:0 .7rem;font-style:normal;font-weight:400;text-decoration:none}
pre ins{background:#2ea04324}
pre del{background:#e5534b24}
pre i{color:var(--soft)}
pre b{color:var(--news);background:var(--none-bg)}
.rest{margin:.6rem 0}
.rest>summary{padding:.3rem 0;color:var(--soft)}
.v ul{margin:.4rem 0;padding-left:1.1rem}
.v li{overflow-wrap:anywhere}
.f{margin:0;padding:0;list-style:none}
.f details{font-size:.92rem}
.f li{padding:.5rem 0;border-top:1px solid var(--line);max-width:60rem;overflow-wrap:anywhere}
.f p{margin:.1rem 0;font-size:.92rem}
.f a{font-weight:600;text-decoration:none}
.l{display:grid;grid-template-columns:max-content 1fr;gap:.35rem .9rem;margin:0;font-size:.9rem}
.l dd{margin:0}
@media (min-width:62rem){.fits{overflow:visible}.fits thead th{position:sticky;top:0;z-index:2}
.fits thead th:first-child{z-index:3}}
@media (max-width:40rem){body{padding:1.2rem .9rem 3rem}td{min-width:4.2rem}
tbody th,thead th:first-child{min-width:9.6rem;max-width:46vw}tbody th span{display:block;font-size:.68rem}
.m td>div>details>summary{word-break:break-all}}
"""


def style() -> str:
    """The rules for a ``<style>`` element."""
    tones = "".join(f".{tone}{{color:var(--{tone});background:var(--{tone}-bg)}}" for tone in get_args(Tone))
    return f"{variables(':root')}{_RULES}{tones}"
