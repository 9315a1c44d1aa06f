"""Render an audit as one HTML page."""

from __future__ import annotations

from html import escape

from shardkit.audit.result import HEADINGS, Audit, facts_of
from shardkit.notebook import table

_COLOURS = {"clean": "#1a7f4b", "explained": "#946200", "violated": "#b3261e", "unknown": "#6b4fa0"}
_STYLE = """
:root{color-scheme:light dark;--ink:#1c1e21;--soft:#5f6670;--line:#d9dce1;--paper:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e7e9ec;--soft:#9aa2ad;--line:#363b43;--paper:#16181b}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:62rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}
.verdict{color:#fff;padding:.7rem 1rem;border-radius:.4rem;margin:1rem 0;font-weight:600}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .8rem .3rem 0;
border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500;white-space:nowrap}td.n{text-align:right;font-variant-numeric:tabular-nums}
code{font:13px ui-monospace,monospace;overflow-wrap:anywhere}.soft{color:var(--soft)}
"""


def html_report(audit: Audit) -> str:
    """Return the audit as one HTML file without scripts or external resources. All values are escaped."""
    run, verdict = escape(audit.run), escape(audit.verdict)
    software = [(f"software: {name}", value) for name, value in sorted(audit.software.items())]
    facts = [*facts_of(audit), *software]
    parts = [table(["", ""], facts, len(facts))]
    for severity, heading in HEADINGS.items():
        rows = [(one.kind, one.subject, one.text) for one in audit.findings if one.severity == severity]
        if rows:
            parts += [f"<h2>{heading}: {len(rows)}</h2>", table(["kind", "where", "what"], rows, len(rows))]
    columns = ("start", "step", "ranks", "repeats")
    words = {True: "its head is one of the ledger's", False: "does NOT fit the ledger", None: "holds no head"}
    starts = [[one.get(name, "") for name in columns] for one in audit.starts]
    checkpoints = [(name, step, words[fits]) for name, step, fits in audit.checkpoints]
    parts += ["<h2>Starts</h2>", table(columns, starts, len(starts))]
    parts += ["<h2>Checkpoints</h2>", table(["name", "after step", ""], checkpoints, len(checkpoints))]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Audit: {verdict}</title><style>{_STYLE}</style></head>\n<body>\n"
        f'<h1>Audit of a training run</h1><p class="soft"><code>{run}</code></p>'
        f'<div class="verdict" style="background:{_COLOURS[audit.worst]}">{verdict.capitalize()}</div>\n'
        + "\n".join(parts)
        + f"<h2>How to check this yourself</h2><p><code>shardkit audit {run}</code> computes every figure above again, "
        "from the ledger, the manifest and the plan's settings alone. The trees are those of RFC 6962.</p>"
        "\n</body></html>\n"
    )
