"""The page: clear in a real browser, silent to whoever should not see it, and nothing that a run says is executed."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.telemetry import Record, read_run
from shardkit.telemetry.records import record_path
from shardkit_tools.commands.dashboard import dashboard_server
from tests.servers.environments import node_package

TOKEN = "a-token-that-nobody-guesses"
HOSTILE = [
    "<script>window.hacked=1</script>",
    '"><img src=x onerror=window.hacked=1>',
    "</table><svg onload=window.hacked=1>",
    "javascript:window.hacked=1",
    "${window.hacked=1}",
    "{{window.hacked=1}}",
    "'-window.hacked=1-'",
    "\u202eevil\u0000\x1b[2J",
    "../../../etc/passwd",
    "a" * 180,
]


@contextlib.contextmanager
def served(run: Path) -> Iterator[int]:
    server = dashboard_server(run, TOKEN).start()
    yield server.port
    server.close()


@pytest.fixture(scope="module")
def port(slowed_run: Path) -> Iterator[int]:
    with served(slowed_run) as number:
        yield number


def ask(
    port: int, path: str, host: str | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection._validate_path = lambda _path: None  # type: ignore[attr-defined]
    connection.putrequest(method, path, skip_host=host is not None)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body


# ---- who sees it


def test_the_page_and_its_parts(port: int) -> None:
    for name, kind in (
        ("", "text/html"),
        ("dashboard.js", "text/javascript"),
        ("charts.js", "text/javascript"),
        ("style.css", "text/css"),
        ("data.json", "application/json"),
        ("healthz", "application/json"),
    ):
        status, headers, body = ask(port, f"/{TOKEN}/{name}")
        assert status == 200
        assert headers["content-type"].startswith(kind)
        assert body
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers
        assert "access-control-allow-origin" not in headers
    document = json.loads(ask(port, f"/{TOKEN}/data.json")[2])
    assert document["bottleneck"]["kind"] not in ("store", "disk")
    assert [one["kind"] for one in document["anomalies"]] == ["straggler"]


def test_nothing_comes_from_outside(port: int) -> None:
    for name in ("", "dashboard.js", "charts.js", "style.css"):
        text = ask(port, f"/{TOKEN}/{name}")[2].decode()
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), "an XML name, not an address"
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "new Function",
            "onclick",
        ):
            assert way not in text


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/data.json",
        "/wrong/",
        "/wrong/data.json",
        f"/{TOKEN[:-1]}/",
        f"/{TOKEN}x/",
        f"//{TOKEN}/",
        f"/{TOKEN.upper()}/",
        "/healthz",
        "/metrics",
        "/favicon.ico",
        f"/x/{TOKEN}/",
        f"/?{TOKEN}",
    ],
)
def test_without_the_token_everything_is_the_same_nothing(port: int, path: str) -> None:
    status, headers, body = ask(port, path)
    assert (status, body) == (404, b"not found\n")
    assert "location" not in headers


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "",
        "127.0.0.1@evil.example",
        "169.254.169.254",
        "localhost.evil.example",
        "0.0.0.0",
        "[::]",
    ],
)
def test_a_foreign_name_is_refused_even_with_the_token(port: int, host: str) -> None:
    status, _, body = ask(port, f"/{TOKEN}/data.json", host)
    assert status in (400, 403)
    assert b"bottleneck" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_it_can_only_be_looked_at(port: int, method: str) -> None:
    status, _, body = ask(port, f"/{TOKEN}/data.json", method=method)
    assert status == 405
    assert b"bottleneck" not in body


SEGMENTS = st.sampled_from(
    [
        "..",
        ".",
        "%2e%2e",
        "%2f",
        "..%2f",
        "..\\",
        "%5c",
        "etc",
        "passwd",
        "run.json",
        "telemetry",
        "events.jsonl",
        "%00",
        "index.html",
        "dashboard.js",
        "~",
        "//",
        "%c0%ae",
        "file:",
        "web.py",
    ]
)


@settings(max_examples=150)
@given(segments=st.lists(SEGMENTS, min_size=1, max_size=7), token=st.booleans())
def test_no_path_leads_to_a_file(port: int, segments: list[str], token: bool) -> None:
    path = "/".join(segments)
    status, _, body = ask(port, f"/{TOKEN}/{path}" if token else f"/{path}")
    assert status in (200, 400, 404)
    if status == 200:
        assert token
        assert path.strip("/") == "dashboard.js"
    for secret in (b"root:", b'"configuration"', b"shardkit-run", b"def dashboard_server"):
        assert secret not in body


@settings(max_examples=100)
@given(data=st.text(alphabet=st.characters(min_codepoint=1, max_codepoint=255), max_size=60))
def test_any_path_is_survived(port: int, data: str) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(
            b"GET /" + data.encode("latin-1") + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"bottleneck" not in answer
    assert not answer or answer.split(b" ", 2)[1] in (b"400", b"404", b"403", b"405", b"414")


# ---- what a hostile run can do


@pytest.fixture(scope="module")
def hostile_run(slowed_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose every text is an attack, and whose files hold what nobody should see."""
    run = tmp_path_factory.mktemp("hostile") / "<img src=x onerror=window.hacked=1>"
    shutil.copytree(slowed_run, run)
    newest = read_run(run).newest
    with (run / "events.jsonl").open("a") as file:
        for text in HOSTILE:
            event = {
                "time": newest,
                "event": text,
                "rank": text,
                "key": text,
                text: text,
                "password": "canary-of-an-event",
            }
            file.write(json.dumps(event) + "\n")
        for broken in (
            {
                "time": newest,
                "event": "anomaly",
                "anomaly": HOSTILE[0],
                "evidence": [HOSTILE[1]],
                "action": HOSTILE[2],
            },
            {"time": newest, "event": "anomaly", "anomaly": "stall", "evidence": {"silent_s": HOSTILE[0]}},
        ):
            file.write(json.dumps(broken) + "\n")
    with record_path(run, 0).open("ab") as file:
        rows = [[text, 1, 10**9] for text in HOSTILE]
        file.write(
            Record(
                time=newest + 1,
                rank=0,
                world=2,
                host=HOSTILE[0],
                session=HOSTILE[1],
                lanes=tuple(range(12)),
                values={f"reads.bytes_from_{text[:40]}": 5.0 for text in HOSTILE},
                tables={
                    "hot_shards": rows,
                    "stage": [[HOSTILE[1]]],
                    "slow_blocks": rows,
                    "lane_loads": [[text, 1, 1.0, 1] for text in HOSTILE]
                    + [[10**9, 1, 1.0, 1], [-1, 1, 1.0, 1]],
                },
            ).to_line()
        )
    known = json.loads((run / "run.json").read_text())
    known["software"] |= {text: text for text in HOSTILE}
    known["manifest"] = HOSTILE[0]
    (run / "run.json").write_text(json.dumps(known))
    return run


def test_what_is_sent_is_printable_and_redacted(hostile_run: Path) -> None:
    with served(hostile_run) as port:
        body = ask(port, f"/{TOKEN}/data.json")[2].decode()
    assert "canary-of-an-event" not in body
    for text in texts(json.loads(body)):
        assert text.isprintable(), repr(text)
        assert "\u202e" not in text


def texts(value: Any) -> Iterator[str]:
    """Every text of a JSON value, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield name
            yield from texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts(one)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser, in which each test opens a page of its own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        # the machine's own, or the one that playwright may have brought
        paths = [
            *map(shutil.which, ("chromium", "chromium-browser", "google-chrome")),
            started.chromium.executable_path,
        ]
        path = next((one for one in paths if one and Path(one).exists()), None)
        if path is None:
            pytest.skip("no Chromium on this machine")
        # a test machine may run as root, where Chromium's own sandbox does not start
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(chromium: Any, port: int, **options: Any) -> Iterator[Any]:
    page = chromium.new_page(**options)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.goto(f"http://127.0.0.1:{port}/{TOKEN}/")
    page.wait_for_selector("#events td")
    yield page
    assert said == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_person_sees_the_story(chromium: Any, port: int, tmp_path: Path, scheme: str) -> None:
    with opened(chromium, port, viewport={"width": 1280, "height": 900}, color_scheme=scheme) as page:
        assert page.inner_text("#state") == "ended"
        assert "rank 1 takes" in page.inner_text("#anomalies")
        assert "-bound" in page.inner_text("#tiles")
        assert page.locator("#lanes rect[stroke]").count() > 0, "lanes that moved are outlined"
        for chart in ("throughput", "waiting", "bytes", "skew"):
            assert page.locator(f"#{chart} path").count() > 0, chart
        assert page.locator("#lane-loads rect").count() == 12, "a bar for each lane"
        assert page.locator("#shards rect").count() > 3
        assert page.locator("#ranks tr").count() == 3
        assert "rebalance" in page.inner_text("#events")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 200) is (scheme == "dark")
        overflow = page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert overflow <= 0, "nothing is cut off at the side"
        picture = page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
    assert len(picture) > 50_000


CUT = """() => [...document.querySelectorAll("body *")].filter((one) => !one.closest(".unseen, svg")
    && one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== "inline"
    && getComputedStyle(one).overflowX !== "visible").map((one) => one.id || one.className)"""
"""Elements that show less than they hold."""


def axe() -> str:
    return node_package("axe-core")[1].read_text(encoding="utf-8")


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1280), ("light", 390)])
def test_axe_finds_nothing(chromium: Any, port: int, tmp_path: Path, scheme: str, width: int) -> None:
    rules = axe()
    with opened(chromium, port, viewport={"width": width, "height": 844}, color_scheme=scheme) as page:
        page.evaluate(rules)
        found = page.evaluate("axe.run()")
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found["violations"]] == []
        assert len(found["passes"]) > 20
        if width == 1280:
            assert page.evaluate(CUT) == [], "nothing is cut"
            below = "document.documentElement.scrollHeight - document.querySelector('footer').offsetTop"
            assert page.evaluate(below) < 80, "the tables take no room"
        page.screenshot(path=tmp_path / f"{scheme}-{width}.png", full_page=True)


def test_numbers_behind_charts_are_tables(chromium: Any, port: int) -> None:
    with opened(chromium, port) as page:
        drawings = page.locator(".chart svg[role=img], #shares svg[role=img]")
        assert drawings.count() == page.locator(".unseen table").count() >= 8
        assert page.locator("#throughput .unseen table tr").count() > 3
        assert page.locator("#lanes .unseen table tr").count() == 13, "a row for each lane"
        first = page.locator("#lane-loads .unseen table tr").nth(1).text_content()
        assert re.match(r"0\d+[\d.]+ m?s[\d.]+ [KMG]?i?B$", first), first


def test_axes_of_small_counts_have_whole_numbers(chromium: Any, port: int) -> None:
    with opened(chromium, port) as page:
        for most, expected in (
            (1, ["0", "1"]),
            (2, ["0", "1", "2"]),
            (5, ["0", "5"]),
            (60, ["0", "50", "100"]),
        ):
            page.evaluate(
                """async (most) => {
                    const charts = await import("./charts.js");
                    charts.lines(document.getElementById("failures"),
                        [{ name: "blocks", colour: "var(--bad)", values: [0, most] }],
                        { time: [0, 1], format: charts.count, bars: true, height: 120 });
                }""",
                most,
            )
            said = page.locator("#failures svg .axis").all_text_contents()
            assert [one for one in said if ":" not in one] == expected


def test_an_axis_of_zeros_names_no_other_number(chromium: Any, port: int) -> None:
    with opened(chromium, port) as page:
        page.evaluate(
            """async () => {
                const charts = await import("./charts.js");
                charts.lines(document.getElementById("bytes"), [{ name: "root", colour: "red", values: [0, 0] }],
                    { time: [0, 1], format: charts.bytes, base: 1024, stacked: true });
            }"""
        )
        said = page.locator("#bytes svg .axis").all_text_contents()
        assert [one for one in said if ":" not in one] == ["0"]


def test_means_keep_gaps_and_points_stay_visible(chromium: Any, port: int) -> None:
    with opened(chromium, port) as page:
        means = page.evaluate(
            """async () => {
                const charts = await import("./charts.js");
                const saw = Array.from({ length: 30 }, (_, i) => (i % 2) * 10);
                charts.lines(document.getElementById("throughput"), [{ name: "x", colour: "red", values: saw }],
                    { time: saw.map((_, i) => i), format: charts.count, means: true });
                return [charts.smooth([0, 10, 0, 10, 0]), charts.smooth([4, null, 8, 8, 2])];
            }"""
        )
        assert means == [[10 / 3, 5, 4, 5, 10 / 3], [4, None, 6, 6, 6]]
        assert page.locator("#throughput path.points").count() == 1
        assert page.locator("#throughput .means").text_content() == "thick: means of 5.0 s; thin: each point"
        assert page.locator("#throughput table td").nth(3).text_content() == "10", "the table has the points"


def channel(value: float) -> float:
    """Linear light of one channel (WCAG 2.2, relative luminance)."""
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def contrast(one: str, other: str) -> float:
    light = [
        sum(w * channel(int(text[i : i + 2], 16) / 255) for w, i in ((0.2126, 1), (0.7152, 3), (0.0722, 5)))
        for text in (one, other)
    ]
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_texts_of_drawings_have_the_contrast_of_aa(port: int) -> None:
    """axe looks at no text in SVG; all of it is one of these colours on one of these."""
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    style = ask(port, f"/{TOKEN}/style.css")[2].decode()
    schemes = [
        dict(re.findall(r"--([\w-]+): (#\w{6})", part))
        for part in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]
    assert len(schemes) == 2
    for scheme in schemes:
        texts = [(ink, back) for ink in ("ink", "soft", "faint", "warn", "bad") for back in ("page", "panel")]
        texts += [("on", f"c{number}") for number in range(8)] + [("ink", "track")]
        low = {pair: contrast(scheme[pair[0]], scheme[pair[1]]) for pair in texts}
        assert {pair: ratio for pair, ratio in low.items() if ratio < 4.5} == {}


def test_a_narrow_window_is_enough(chromium: Any, port: int) -> None:
    with opened(chromium, port, viewport={"width": 420, "height": 800}) as page:
        assert (
            page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        )


def test_nothing_that_a_run_says_is_executed(chromium: Any, hostile_run: Path) -> None:
    asked: list[str] = []
    with served(hostile_run) as port, opened(chromium, port) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(2_500)  # it has drawn again
        assert page.evaluate("window.hacked") is None
        assert "<script>window.hacked=1</script>" in page.inner_text("#events"), "shown as text"
        assert page.locator("main script, main img, #events svg").count() == 0
        assert all(url.startswith(f"http://127.0.0.1:{port}/{TOKEN}/") for url in asked)
        assert asked
