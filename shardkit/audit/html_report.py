"""An audit as one HTML file: no script, nothing loaded from elsewhere, everything escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise

from shardkit.audit.result import Audit

_COLOURS = {"clean": "#1a7f4b", "explained": "#946200", "violated": "#b3261e", "unknown": "#6b4fa0"}
_SEVERITIES = (
    ("violated", "Violated"), ("unknown", "Could not check"), ("explained", "Deviations, with their reasons"),
    ("note", "Good to know"),
)  # fmt: skip
_STYLE = """
:root{color-scheme:light dark;--ink:#1c1e21;--soft:#5f6670;--line:#d9dce1;--paper:#fff;--bar:#2f6fb3;--left:#e6e9ee}
@media(prefers-color-scheme:dark){:root{--ink:#e7e9ec;--soft:#9aa2ad;--line:#363b43;--paper:#16181b;--left:#2a2e34}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:62rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}
.verdict{color:#fff;padding:.7rem 1rem;border-radius:.4rem;margin:1rem 0;font-weight:600}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .8rem .3rem 0;
border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500;white-space:nowrap}td.n{text-align:right;font-variant-numeric:tabular-nums}
code{font:13px ui-monospace,monospace;overflow-wrap:anywhere}.soft{color:var(--soft)}svg{display:block;width:100%}
"""
_HOW = (
    "<p><code>shardkit audit {run}</code> computes every figure above again, from the ledger, the manifest and the "
    "plan's settings alone. The trees are those of RFC 6962.</p>"
)


def html_report(audit: Audit) -> str:
    """The report's text."""
    body = [
        "<h1>Audit of a training run</h1>",
        f'<p class="soft"><code>{escape(audit.run)}</code></p>',
        _verdict(audit),
        _facts(audit),
        _findings(audit),
        _epochs(audit),
        _starts(audit),
        _checkpoints(audit),
        _events(audit),
        "<h2>How to check this yourself</h2>",
        _HOW.format(run=escape(audit.run)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Audit: {escape(audit.verdict)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _verdict(audit: Audit) -> str:
    colour = _COLOURS[audit.worst]
    return f'<div class="verdict" style="background:{colour}">{escape(audit.verdict.capitalize())}</div>'


def _facts(audit: Audit) -> str:
    last = max(audit.first, audit.steps - 1)
    steps = f"{audit.first:,} to {last:,}: {audit.steps - audit.first:,} steps, {audit.samples:,} samples"
    rows = [
        ("manifest", _code(audit.manifest)),
        ("plan", _code(audit.plan)),
        ("steps", steps),
        ("recomputed", f"{audit.checked:,} step digests, in {audit.replay_s:.1f} s"),
    ]
    for name in ("steps", "events"):
        if name in audit.head:
            one = audit.head[name]
            rows.append((f"tree of {name}", f"{one['size']:,} leaves, root {_code(one['root'])}"))
    if audit.verified is not None:
        seen = audit.verified
        looked = f"{seen['shards_seen']:,} of {seen['shards']:,} shards checked, level {escape(str(seen['level']))}"
        rows.append(("data", f"{looked}, {seen['stored_bytes']:,} bytes read"))
    if audit.software:
        versions = ", ".join(f"{name} {value}" for name, value in sorted(audit.software.items()))
        rows.append(("software", escape(versions)))
    return _table((), [(f"<th>{name}</th>", _cell(value)) for name, value in rows])


def _findings(audit: Audit) -> str:
    parts = []
    for severity, heading in _SEVERITIES:
        found = [one for one in audit.findings if one.severity == severity]
        if found:
            rows = [
                (_cell(escape(one.kind)), _cell(_code(one.subject)), _cell(escape(one.text))) for one in found
            ]
            parts.append(f"<h2>{heading}: {len(found)}</h2>" + _table(("kind", "where", "what"), rows))
    return "\n".join(parts)


def _epochs(audit: Audit) -> str:
    if not audit.coverage:
        return ""
    rows = []
    for one in audit.coverage:
        share = one.distinct / max(1, one.rows)
        bar = (
            '<svg viewBox="0 0 200 10" height="10" preserveAspectRatio="none" role="img" '
            f'aria-label="{share:.1%}"><rect width="200" height="10" fill="var(--left)"/>'
            f'<rect width="{200 * share:.2f}" height="10" fill="var(--bar)"/></svg>'
        )
        state = "each sample at most once" if one.is_exact else "NOT exact"
        if one.is_whole and one.is_exact:
            state = (
                f"every sample once, but {one.remainder:,} left out"
                if one.remainder > 0
                else "every sample exactly once"
            )
        numbers = (_number(one.last - one.first), _number(one.distinct))
        rows.append((_cell(str(one.epoch)), *numbers, f'<td style="width:40%">{bar}</td>', _cell(state)))
    return "<h2>Coverage</h2>" + _table(("epoch", "steps", "samples", "of the dataset", ""), rows)


def _starts(audit: Audit) -> str:
    """One bar per launch: from the step it went on from to the step that the next one found."""
    if not audit.starts:
        return ""
    first, last = audit.first, max(audit.steps, audit.first + 1)
    ends = [int(later["reached"]) for _, later in pairwise(audit.starts)] + [audit.steps]
    bars = []
    for row, (one, end) in enumerate(zip(audit.starts, ends, strict=True)):
        x = 1000 * (int(one["step"]) - first) / (last - first)
        width = max(2.0, 1000 * (max(end, int(one["step"])) - int(one["step"])) / (last - first))
        title = escape(f"start {one['start']}: from step {one['step']} on {one['ranks']} ranks")
        bars.append(
            f'<rect x="{x:.1f}" y="{row * 14}" width="{width:.1f}" height="11" fill="var(--bar)">'
            f"<title>{title}</title></rect>"
        )
    height = 14 * len(audit.starts)
    return (
        f'<h2>Starts: {len(audit.starts)}</h2><svg viewBox="0 0 1000 {height}" preserveAspectRatio="none" '
        f'height="{min(height, 600)}" role="img" aria-label="starts of the run over its steps">{"".join(bars)}</svg>'
        f'<p class="soft">step {first:,} on the left, {last:,} on the right; a bar begins where a start took it up.</p>'
    )


def _checkpoints(audit: Audit) -> str:
    words = {True: "its head is one of the ledger's", False: "does NOT fit the ledger", None: "holds no head"}
    rows = [(_cell(_code(name)), _number(step), _cell(words[fits])) for name, step, fits in audit.checkpoints]
    return "<h2>Checkpoints</h2>" + _table(("name", "after step", ""), rows) if rows else ""


def _events(audit: Audit) -> str:
    rows = [(_cell(escape(kind)), _number(count)) for kind, count in audit.event_counts.items()]
    return "<h2>Events</h2>" + _table(("kind", "number"), rows) if rows else ""


def _cell(html: str) -> str:
    return f"<td>{html}</td>"


def _number(value: int) -> str:
    return f'<td class="n">{value:,}</td>'


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "<tr>" + "".join(f"<th>{escape(one)}</th>" for one in headings) + "</tr>" if headings else ""
    return "<table>" + head + "".join(f"<tr>{''.join(row)}</tr>" for row in rows) + "</table>"
