// Asks for the run's numbers every two seconds and draws them. No outside script, no markup from data.

import { bytes, clock, colour, count, element, heatTiles, laneBars, laneGrid, lines, nothing, percent, seconds, shareBar } from "./charts.js";

const EVERY_MS = 2000;
const at = (id) => document.getElementById(id);
const PARTS = ["store", "disk", "gather", "transform", "plan", "data", "prepare", "compute", "trainer", "exchange", "reduce", "update", "checkpoint", "evaluation", "other"];
const PART_COLOURS = { store: "var(--c4)", disk: "var(--c4)", gather: "var(--c3)", transform: "var(--c6)", plan: "var(--c5)", data: "var(--c4)", prepare: "var(--c6)", compute: "var(--c0)", trainer: "var(--c0)", exchange: "var(--c7)", reduce: "var(--c1)", update: "var(--c2)", checkpoint: "var(--c5)", evaluation: "var(--c3)", other: "var(--faint)" };
let shown = null;

async function look() {
  try {
    const answer = await fetch("data.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    shown = await answer.json();
    draw(shown);
  } catch (error) {
    const pill = at("state");
    pill.textContent = "the dashboard's server does not answer";
    pill.className = "pill silent";
  }
  setTimeout(look, EVERY_MS);
}

function draw(run) {
  document.title = `${run.run} · shardkit`;
  at("run").textContent = run.run;
  at("state").textContent = run.state;
  at("state").className = `pill ${run.state}`;
  at("progress-bar").style.width = run.steps ? `${(100 * Math.min(1, run.step / run.steps)).toFixed(2)}%` : "0";
  at("progress").hidden = !run.steps;
  at("progress").setAttribute("aria-valuenow", run.step);
  at("progress").setAttribute("aria-valuemax", run.steps || run.step);
  const digits = (text) => text.replace(/^sha256:/, "").slice(0, 12);
  at("ids").textContent = [run.manifest && `manifest ${digits(run.manifest)}`, run.plan && `plan ${digits(run.plan)}`, ...Object.entries(run.software).filter(([name]) => name !== "platform").map(([name, text]) => `${name} ${text}`)].filter(Boolean).join("  ·  ");
  tiles(run);
  anomalies(run.anomalies);
  shares(run);
  const series = run.series, time = series.time;
  lines(at("throughput"), time.length ? [{ name: "samples/s", colour: "var(--c0)", values: series.samples_per_s }] : [], { time, format: count, fill: true, means: true });
  lines(at("waiting"), time.length ? [{ name: "for data (stall)", colour: "var(--c4)", values: series.wait_share }, { name: "for other ranks", colour: "var(--c1)", values: series.peers_share }] : [], { time, format: percent, most: 1, fill: true, means: true });
  lines(at("bytes"), Object.entries(series.bytes_per_s || {}).map(([name, values], i) => ({ name, colour: colour(i + 1), values })), { time, format: bytes, base: 1024, stacked: true, named: true, means: true });
  lines(at("skew"), Object.entries(series.busy_by_rank || {}).filter(([, values]) => values.some((one) => one !== null)).map(([name, values]) => ({ name: isNaN(name) ? name : `rank ${name}`, colour: colour(isNaN(name) ? name.length : Number(name)), values })), { time, format: seconds, named: true, means: true });
  if (run.verification_failures > 0) lines(at("failures"), [{ name: "blocks", colour: "var(--bad)", values: series.failures }], { time, format: count, bars: true, height: 120 });
  else nothing(at("failures"), "none: every block that was read had the right bytes");
  if (run.replication_lag_bytes !== null) lines(at("lag"), [{ name: "below policy", colour: "var(--c5)", values: series.lag_bytes }], { time, format: bytes, base: 1024, fill: true, height: 120 });
  else nothing(at("lag"), "this run watches no replication policy");
  lanes(run);
  laneLoads(run);
  heatTiles(at("shards"), run.hot_shards);
  ranks(run);
  events(run.events);
}

function tiles(run) {
  const wait = run.ranks.length ? run.ranks.reduce((sum, one) => sum + one.data_share, 0) / run.ranks.length : 0;
  const read = Object.values(run.bytes).reduce((sum, one) => sum + one, 0);
  const steps = run.steps ? `of ${count(run.steps)}` : "";
  const found = run.bottleneck;
  const items = [
    ["Bottleneck", found ? `${found.kind}-bound` : "–", found ? `${percent(found.share)} of ${run.world > 1 ? `rank ${found.rank}'s` : "its"} time` : "", ""],
    ["Step", count(run.step), [steps, run.loss === null ? "" : `loss ${run.loss.toFixed(4)}`].filter(Boolean).join("  ·  "), ""],
    ["Throughput", `${count(run.samples_per_s)}/s`, `samples, ${run.world} ${run.world === 1 ? "rank" : "ranks"}`, ""],
    ["Waiting for data", percent(wait), "of the ranks' time", ""],
    ["Read", bytes(read), Object.entries(run.bytes).map(([name, value]) => `${name} ${bytes(value)}`).join(", "), ""],
    ["Verification failures", count(run.verification_failures), run.verification_failures ? "read again elsewhere" : "every block verified", run.verification_failures ? "bad" : ""],
  ];
  at("tiles").replaceChildren(...items.map(([name, value, more, kind]) => {
    const tile = element("div", { class: `tile ${kind}` });
    tile.append(element("div", { class: "name" }, name), element("div", { class: "value", title: value }, value), element("div", { class: "more", title: more }, more));
    return tile;
  }));
}

function anomalies(found) {
  at("anomalies").replaceChildren(...found.slice(0, 6).map((one) => {
    const box = element("div", { class: "anomaly" });
    const line = element("div");
    line.append(element("b", {}, one.kind), document.createTextNode(one.text));
    box.append(line, element("div", { class: "advice" }, `${one.action}: ${one.advice}`));
    return box;
  }));
  if (found.length > 6) at("anomalies").append(element("div", { class: "anomaly" }, `… and ${found.length - 6} more`));
}

function shares(run) {
  if (!run.bottleneck) { at("critical").textContent = ""; return nothing(at("shares"), "no step has been taken yet"); }
  at("critical").textContent = `rank ${run.bottleneck.rank}, last minute`;
  const found = run.bottleneck.shares;
  shareBar(at("shares"), PARTS.filter((name) => found[name] >= 0.005).map((name) => [name, found[name], PART_COLOURS[name]]));
}

function lanes(run) {
  const costs = run.lane_owners.map((owner) => run.cell_s_by_rank[String(owner)] || 0);
  const moves = run.lane_moves.length;
  const hidden = run.num_lanes > run.lane_owners.length ? `, the first ${run.lane_owners.length} of ${count(run.num_lanes)}` : "";
  at("lanes-note").textContent = `columns are lanes, rows are times at which owners changed${hidden}; bars: seconds of own work per cell, as the rank that works the lane knows it; ${moves ? `${moves} lane moves` : "no lane has moved"}`;
  laneGrid(at("lanes"), run.lane_history.slice(-8), costs, moves > 0);
}

function laneLoads(run) {
  const rows = run.lane_loads, told = rows.map((one) => one[2]);
  const mean = told.reduce((sum, one) => sum + one, 0) / (told.length || 1);
  const most = rows.reduce((best, one) => (one[2] > best[2] ? one : best), [0, 0, 0, 0]);
  at("lane-loads-note").textContent = mean > 0 && rows.length > 1
    ? `loading its blocks, in all; lane ${most[0]} takes ${(most[2] / mean).toFixed(1)} times the mean`
    : "loading its blocks, in all";
  laneBars(at("lane-loads"), rows, run.lane_owners);
}

function cells(row, values) {
  for (const [text, kind] of values) row.append(element("td", { class: kind }, text));
  return row;
}

function heading(names) {
  const row = element("tr");
  for (const name of names) row.append(element("th", { scope: "col", class: name.startsWith(">") ? "number" : "" }, name.replace(">", "")));
  return row;
}

function ranks(run) {
  const unusual = new Set(run.anomalies.map((one) => one.rank));
  at("ranks-note").textContent = run.hidden_ranks ? `the ${run.ranks.length} that work longest per step; ${run.hidden_ranks} more` : "";
  const rows = run.ranks.map((one) => {
    const silent = one.state !== "ended" && one.age_s > 15;
    const slow = unusual.has(one.rank);
    return cells(element("tr", { class: silent ? "silent" : slow ? "slow" : "" }), [
      [String(one.rank), "number"], [one.host, ""], [silent ? `silent for ${seconds(one.age_s)}` : one.state, ""], [one.stage || "–", ""],
      [count(one.step), "number"], [`${one.num_lanes}: ${one.lanes.slice(0, 24)}`, ""], [count(one.samples_per_s), "number"], [seconds(one.step_s), "number"],
      ...[one.busy_step_s, one.cell_s].map((own) => [own === null ? "not measured" : seconds(own), "number"]), [percent(one.data_share), "number"], [percent(one.wait_share), "number"],
      [`${bytes(one.bytes_per_s)}/s`, "number"], [bytes(one.memory_bytes), "number"],
    ]);
  });
  at("ranks").replaceChildren(heading([">rank", "host", "state", "stage", ">step", "lanes", ">samples/s", ">step time", ">own work", ">per cell", ">data wait", ">peers", ">read", ">memory"]), ...rows);
}

function events(found) {
  const rows = [...found].reverse().map((one) => cells(element("tr", { class: `${one.event === "anomaly" ? "anomaly" : one.event === "rebalance" ? "rebalance" : "plain"}-row` }), [
    [clock(one.time), "dim"], [one.rank === null || one.rank === undefined || one.rank === -1 ? "" : `rank ${one.rank}`, "dim"], [one.event, "kind"], [one.count > 1 ? `${one.text} ×${one.count}` : one.text, "text"],
  ]));
  at("events").replaceChildren(heading(["time", "rank", "event", "what"]), ...rows);
}

window.addEventListener("resize", () => { if (shown) draw(shown); });
look();
