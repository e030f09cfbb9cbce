"""Draw the pictures of docs/reference/samplers: what the samplers that ship do to a row of logits, or to a text.

    python scripts/sampler_pictures.py [FOLDER]

Nothing is invented: the strategies themselves run, in the pipeline that a worker has. The pictures are static SVG in
the colours of the audit's, for light and for dark screens.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Final
from xml.sax.saxutils import escape

import torch

from vllm_graft.audit.render.presentation import variables
from vllm_graft.bindings.sampling.guarded import GuardedSampler
from vllm_graft.bindings.sampling.pipeline import SamplerPipeline
from vllm_graft.bindings.sampling.step import HostStep, Tokens
from vllm_graft.contracts import ServedModel
from vllm_graft.contracts.sampling import OptInSampler
from vllm_graft.ledger import Ledger
from vllm_graft.plan import PlanItem
from vllm_graft.plan.catalogue import SHIPPED, load
from vllm_graft.plugins.samplers.constrained_json.automaton import JsonState, start, step

FOLDER: Final = Path(__file__).parent.parent / "docs" / "reference" / "samplers"

TOKENS: Final = 40
SHARES: Final = [(rank + 4) ** -2.4 for rank in range(1, TOKENS + 1)]
"""How probable each token is, by its rank, as Zipf and Mandelbrot found words to be; their sum is not one."""

STORY: Final = "she opened the door and went in ⏎ she opened the door and looked * she opened the door and went"
RHYME: Final = "the cat and the dog and the"

WIDTH: Final = 760
EDGE: Final = 16
CHARACTER: Final = 7.9
"""Width of a character: no font of a picture is certain, so boxes have some room to spare."""

STYLE: Final = """
text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:var(--ink)}
.t{font:13px system-ui,-apple-system,"Segoe UI",sans-serif}.s{fill:var(--soft)}.m{text-anchor:middle}.e{text-anchor:end}
.paper{fill:var(--paper)}.axis{stroke:var(--soft);stroke-width:1}.grid{stroke:var(--line);stroke-width:1}
.limit{stroke:var(--ink);stroke-width:1;stroke-dasharray:4 3}.ghost{fill:none;stroke:var(--soft);stroke-width:1}
.stay{fill:var(--news)}.gone{fill:var(--bad)}.stay-box{fill:var(--news-bg)}.gone-box{fill:var(--bad-bg)}
.plain-box{fill:var(--none-bg)}.edge-box{fill:none;stroke:var(--news);stroke-width:1.5}
.a{stroke:var(--news)}.b{stroke:var(--bad)}.c{stroke:var(--idle)}.curve{fill:none;stroke-width:2}
.a-dot{fill:var(--news)}.b-dot{fill:var(--bad)}.c-dot{fill:var(--idle)}
"""


def main(arguments: Sequence[str]) -> int:
    """Write every picture."""
    folder = Path(arguments[0]) if arguments else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"{folder / name}: {len(text)} bytes")
    return 0


def pictures() -> dict[str, str]:
    """File name to picture."""
    return {
        "xtc.svg": xtc(),
        "top-n-sigma.svg": top_n_sigma(),
        "dry.svg": dry(),
        "no-repeat-ngram.svg": no_repeat_ngram(),
        "constrained-json.svg": constrained_json(),
    }


def xtc() -> str:
    """Probabilities before and after a draw."""
    before = torch.tensor(SHARES).log()
    after = run("xtc", before, xtc_probability=1.0, xtc_threshold=0.1)
    kept = [value > -math.inf for value in after.tolist()]
    body = [title("when the draw says so: of the tokens above xtc_threshold only the least probable stays (red: gone)")]
    body += chart("before", EDGE, shares(before), kept, limit=(0.1, "xtc_threshold 0.1"))
    body += chart("after", WIDTH // 2 + 8, shares(after), kept)
    return picture(body, 250, "XTC on a row of 40 tokens, before and after")


def top_n_sigma() -> str:
    """Logits with the limit, and what is left at a high temperature."""
    before = torch.tensor(SHARES).log()
    after = run("top-n-sigma", before, top_n_sigma=1.0)
    kept = [value > -math.inf for value in after.tolist()]
    foot = float(before.min()) - 0.4
    limit = float(before.max() - before.std(correction=0)) - foot
    body = [title("what is left depends on the logits alone: the same tokens at every temperature (red: gone)")]
    body += chart("logits", EDGE, (before - foot).tolist(), kept, limit=(limit, "the greatest - 1.0 sigma"), ticks=())
    name = "at temperature 2 (outlines: without it)"
    body += chart(name, WIDTH // 2 + 8, shares(after / 2), kept, ghosts=shares(before / 2))
    return picture(body, 250, "top-n-sigma on a row of 40 tokens: the limit, and what is left at temperature 2")


def dry() -> str:
    """The penalty over the length of a match, and a text whose tokens are marked with their own penalty."""
    body = [title("how much a token is lowered that would continue a repetition (multiplier 0.8, allowed length 2)")]
    body += _curves((1.5, 1.75, 2.0), top=48)
    words = STORY.split()
    penalties = [penalty_of_last(words[: at + 1], dry_multiplier=0.8) for at in range(len(words))]
    body.append(title("a text, a token for each word; below each by how much it was lowered", 268))
    boxes = [(word, "gone" if by else "plain") for word, by in zip(words, penalties, strict=True)]
    drawn, bottom = strip(boxes, EDGE, 284, [f"-{by:.1f}" if by else "" for by in penalties])
    note = "⏎ (a line's end) and * are breakers: no repetition reaches over them"
    body += [*drawn, f'<text class="s" x="{EDGE}" y="{bottom + 14}">{note}</text>']
    return picture(body, bottom + 30, "DRY: the penalty over the length of a repetition, and the tokens of a text")


def no_repeat_ngram() -> str:
    """What may not come next, for several sizes."""
    words, top = RHYME.split(), 44
    body = [title("which tokens may not come next (red), because of what stands before them (blue)")]
    for size in (2, 3, 4):
        names = sorted(set(words))
        after = run("no-repeat-ngram", torch.zeros(len(names)), words, no_repeat_ngram_size=size)
        banned = [name for name, value in zip(names, after.tolist(), strict=True) if value == -math.inf]
        tones = _why_banned(words, size)
        assert banned == sorted({word for word, tone in zip(words, tones, strict=True) if tone == "gone"})
        body.append(f'<text class="s" x="{EDGE}" y="{top + 17}">no_repeat_ngram_size {size}</text>')
        body += strip(list(zip(words, tones, strict=True)), EDGE + 188, top)[0]
        said = f"not {' or '.join(banned)}" if banned else "anything"
        body.append(f'<text x="{EDGE + 530}" y="{top + 17}">next: {escape(said)}</text>')
        top += 40
    return picture(body, top + 4, "no-repeat-ngram: what may not come next, for sequences of 2, 3 and 4 tokens")


def _why_banned(words: Sequence[str], size: int) -> list[str]:
    """A tone for each word: the text's end, where that stood before, and what came next there."""
    last = len(words) - size + 1
    begins = [at for at in range(last) if words[at : at + size - 1] == words[last:]]
    tones = ["plain"] * last + ["edge"] * (size - 1)
    for at in begins:
        tones[at : at + size - 1] = ["stay"] * (size - 1)
    for at in begins:
        tones[at + size - 1] = "gone"
    return tones


def constrained_json() -> str:
    """A document as it grows, and the characters with which a token may begin at each place."""
    body, top = [title("with which characters a token may go on; all others are taken away before the pick")], 44
    for begun in (
        "",
        "{",
        '{"',
        '{"n',
        '{"n"',
        '{"n":',
        '{"n":-',
        '{"n":-1',
        '{"n":[tr',
        '{"n":[true]',
        '{"n":[true]}',
    ):
        state: JsonState | None = start("object")
        for byte in begun.encode():
            state = step(state, byte, 8) if state is not None else None
        assert state is not None, begun
        next_ones = [chr(byte) for byte in range(32, 127) if step(state, byte, 8) is not None]
        said = " ".join("blank" if each == " " else each for each in next_ones)
        if len(next_ones) > 60:
            said = "any character of a text" if len(next_ones) > 90 else said
        body += strip([(begun or "(nothing)", "edge" if begun else "plain")], EDGE, top)[0]
        body.append(f'<text x="{EDGE + 150}" y="{top + 17}">{escape(said or "the end of the answer")}</text>')
        top += 30
    return picture(body, top + 8, "constrained-json: what may come next as a document grows")


class Words:
    """A tokenizer that has these words."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = [word.replace("⏎", "\n") for word in words]

    def __len__(self) -> int:
        return len(self.words)

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text."""
        return " ".join(self.words[token] for token in tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token that is this text, if there is one."""
        return [self.words.index(text)] if text in self.words else []


def run(name: str, logits: torch.Tensor, words: Sequence[str] = (), **keys: object) -> torch.Tensor:
    """The logits after a step of one sampler, for a request with these keys whose text so far is ``words``."""
    known = sorted(set(words)) or [""] * len(logits)
    tokenizer = Words([*known, *[""] * (len(logits) - len(known))])
    model = ServedModel("a picture", len(logits), 1, torch.device("cpu"), load_tokenizer=lambda: tokenizer)
    kind = load(SHIPPED[name], name, "vllm-graft")
    assert issubclass(kind, OptInSampler)
    ledger = Ledger()
    ledger.set_item("sampler", name, "applied")
    item = PlanItem("sampler", name, SHIPPED[name], "vllm-graft", ("worker",), kind.options)
    guarded = GuardedSampler(item, kind(), model, ledger, None)
    guarded.sampler.setup(model)
    pipeline = SamplerPipeline([guarded], model, 0)
    asked = SimpleNamespace(extra_args=keys, temperature=1.0, top_p=1.0, top_k=0, seed=1, max_tokens=None)
    assert pipeline.enter(0, asked, tuple), f"{name} has nothing to do with {keys}"
    text = Tokens([known.index(word) for word in words], ())
    changed: torch.Tensor = logits.clone()[None]
    pipeline.run(changed, HostStep(pipeline.seeds, {0: text}), [0])
    assert not guarded.aside, f"{name} has failed"
    return changed[0]


def penalty_of_last(words: Sequence[str], **keys: object) -> float:
    """By how much the last of these words was lowered when it was to come next."""
    if len(words) < 2:
        return 0.0
    names = sorted(set(words[:-1]))
    if words[-1] not in names:
        return 0.0
    after = run("dry", torch.zeros(len(names)), words[:-1], **keys)
    return -float(after[names.index(words[-1])])


def shares(logits: torch.Tensor) -> list[float]:
    """Probabilities."""
    found: list[float] = logits.softmax(0).tolist()
    return found


def title(words: str, y: int = 26) -> str:
    """The line above a picture."""
    return f'<text class="t" x="{EDGE}" y="{y}">{escape(words)}</text>'


def chart(
    name: str,
    left: int,
    heights: Sequence[float],
    kept: Sequence[bool],
    *,
    limit: tuple[float, str] | None = None,
    ghosts: Sequence[float] = (),
    ticks: Iterable[float] = (0.1, 0.2, 0.3),
) -> list[str]:
    """A bar for each token: blue for those that stay, red for those that go; ``ghosts`` are drawn as outlines."""
    width, floor, tall = WIDTH // 2 - 24, 226, 160
    scale = tall / (0.34 if ticks else max(heights) * 1.04)
    inner = left + (34 if ticks else 0)
    each = (width - (inner - left)) / len(heights)
    pieces = [f'<text class="s" x="{inner}" y="52">{escape(name)}</text>']
    for tick in ticks:
        y = floor - tick * scale
        pieces.append(f'<line class="grid" x1="{inner}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        pieces.append(f'<text class="s e" x="{inner - 6}" y="{y + 4:.1f}">{tick:g}</text>')
    for at, height in enumerate(heights):
        x = inner + at * each + 1
        if height > 0:
            pieces.append(_rect("stay" if kept[at] else "gone", x, floor - height * scale, each - 2, height * scale))
        if ghosts:
            pieces.append(_rect("ghost", x, floor - ghosts[at] * scale, each - 2, ghosts[at] * scale))
    pieces.append(f'<line class="axis" x1="{inner}" x2="{left + width}" y1="{floor}" y2="{floor}"/>')
    if limit is not None:
        y = floor - limit[0] * scale
        pieces.append(f'<line class="limit" x1="{inner}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        pieces.append(f'<text class="e" x="{left + width}" y="{y - 6:.1f}">{escape(limit[1])}</text>')
    return pieces


def _curves(bases: Sequence[float], top: int) -> list[str]:
    """Penalties on a logarithmic scale, by what the strategy did to a text that repeats itself."""
    floor, left, right, longest = top + 180, EDGE + 40, WIDTH - 150, 8
    x_of = _scale(1, longest, left, right)
    y_of = _scale(math.log10(0.5), 2.0, floor, top)
    pieces = []
    for tick in (1, 10, 100):
        y = y_of(math.log10(tick))
        pieces.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        pieces.append(f'<text class="s e" x="{left - 6}" y="{y + 4:.1f}">{tick}</text>')
    for length in range(2, longest + 1):
        pieces.append(f'<text class="s m" x="{x_of(length):.1f}" y="{floor + 16}">{length}</text>')
    pieces.append(f'<text class="s" x="{right + 12}" y="{floor + 16}">tokens repeated</text>')
    pieces.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{floor}" y2="{floor}"/>')
    for tone, base in zip("abc", bases, strict=True):
        points = [(x_of(length), y_of(math.log10(_penalty(length, base)))) for length in range(2, longest + 1)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        pieces.append(f'<polyline class="curve {tone}" points="{line}"/>')
        pieces += [f'<circle class="{tone}-dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
        pieces.append(f'<text x="{right + 12}" y="{points[-1][1] + 4:.1f}">dry_base {base:g}</text>')
    return pieces


def _penalty(length: int, base: float) -> float:
    """What the strategy takes off the token that would make a repetition of ``length`` tokens one longer."""
    words = [f"w{number}" for number in range(length)]
    return penalty_of_last([*words, "next", *words, "next"], dry_multiplier=0.8, dry_base=base)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def strip(words: Sequence[tuple[str, str]], left: int, top: int, below: Sequence[str] = ()) -> tuple[list[str], int]:
    """Words in boxes, each with its tone, over as many lines as it takes; returns where the last line ends."""
    pieces: list[str] = []
    x, line = float(left), 46 if below else 34
    for at, (word, tone) in enumerate(words):
        note = below[at] if below else ""
        wide = max(len(word), len(note)) * CHARACTER + 12
        if x + wide > WIDTH - EDGE:
            x, top = float(left), top + line
        pieces.append(_rect(f"{tone}-box", x, top, wide, 24, 'rx="4"'))
        pieces.append(f'<text class="m" x="{x + wide / 2:.1f}" y="{top + 16}">{escape(word)}</text>')
        if note:
            pieces.append(f'<text class="gone m" x="{x + wide / 2:.1f}" y="{top + 38}">{escape(note)}</text>')
        x += wide + 5
    return pieces, top + line


def _rect(name: str, x: float, y: float, width: float, height: float, more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{name}" {place}{" " + more if more else ""}/>'


def picture(body: Sequence[str], height: int, name: str) -> str:
    """The whole file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img">\n<title>{escape(name)}</title>\n<style>{variables("svg")}{STYLE}</style>\n'
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
