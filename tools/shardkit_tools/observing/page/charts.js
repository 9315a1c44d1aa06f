// Drawing, in SVG. Texts go in as text nodes only: nothing that a run says is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8;

export function colour(index) { return `var(--c${((index % COLOURS) + COLOURS) % COLOURS})`; }

export function element(name, attributes = {}, text = null) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

export function shape(name, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

export function count(value) { return Math.round(value).toLocaleString("en-US"); }
export function percent(value) { return `${(100 * value).toFixed(0)} %`; }

export function seconds(value) {
  if (!value) return "–";
  if (value < 1) return `${(1000 * value).toFixed(value < 0.1 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  return `${(value / 60).toFixed(1)} min`;
}

export function clock(time) { return new Date(1000 * time).toLocaleTimeString("en-GB"); }

const tip = document.getElementById("tip");
export function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 10)}px`;
  tip.style.top = `${event.clientY + 14}px`;
}
export function hideTip() { tip.hidden = true; }

// What an axis says: thirds of nothing, and half a block, are not among it.
function ticks(most, format) {
  const whole = format === count || format === bytes;
  return [0, most / 2, most].filter((value) => !whole || Number.isInteger(value));
}

// A drawing is one picture to a screen reader; the numbers behind it are a table that is read and not seen.
function present(place, drawing, parts, names, rows) {
  const title = place.closest("section").querySelector("h2").textContent;
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-label", title);
  const unseen = element("div", { class: "unseen" }), table = element("table");
  table.append(element("caption", {}, title), row("th", names, { scope: "col" }), ...rows.map((values) => row("td", values)));
  unseen.append(table);
  place.replaceChildren(drawing, ...parts, unseen);
}

function row(kind, texts, attributes = {}) {
  const made = element("tr");
  for (const text of texts) made.append(element(kind, attributes, String(text)));
  return made;
}

function nice(most, base, format) {
  if (!(most > 0)) return 1;
  if (format === count || format === bytes) most = Math.max(1, most);
  const unit = base === 1024 ? 1024 ** Math.max(0, Math.floor(Math.log2(most) / 10)) : 1;
  const power = unit * 10 ** Math.floor(Math.log10(most / unit));
  return [1, 2, 4, 5, 10].map((step) => step * power).find((step) => step >= most * 0.999);
}

export function nothing(place, text) { place.replaceChildren(element("div", { class: "nothing" }, text)); }

export function legend(items) {
  const row = element("div", { class: "legend" });
  for (const [name, fill] of items) {
    const label = element("span");
    const swatch = shape("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" });
    swatch.append(shape("rect", { width: 10, height: 10, rx: 3, fill }));
    label.append(swatch, document.createTextNode(name));
    row.append(label);
  }
  return row;
}

const SMOOTHED = 5; // points of a mean; an odd number, so that the mean is at its middle
const SMOOTHED_FROM = 4 * SMOOTHED; // points of a series that is long enough for means

// Mean of the points around each one. A gap stays a gap: a mean does not reach across it.
export function smooth(values) {
  const side = (SMOOTHED - 1) / 2;
  return values.map((value, i) => {
    if (value === null || value === undefined) return value;
    let from = i, to = i;
    while (from > i - side && typeof values[from - 1] === "number") from -= 1;
    while (to < i + side && typeof values[to + 1] === "number") to += 1;
    const near = values.slice(from, to + 1);
    return near.reduce((sum, one) => sum + one, 0) / near.length;
  });
}

// series: [{name, colour, values}]; options: {time, format, most, stacked, fill, height, bars, means}
// means: draw means of SMOOTHED points, and the points themselves faintly where series are not stacked
export function lines(place, series, options) {
  const { time, format, stacked = false, fill = false, bars = false, height = 170 } = options;
  const means = options.means && time.length >= SMOOTHED_FROM;
  if (!time.length || !series.length) return nothing(place, "nothing yet");
  const width = Math.max(280, place.clientWidth), left = 58, right = 10, top = 8, bottom = 22;
  const inner = width - left - right, tall = height - top - bottom;
  const drawn = series.map((one) => (means ? smooth(one.values) : one.values));
  const sums = time.map((_, i) => drawn.reduce((sum, values) => sum + (values[i] || 0), 0));
  const highest = stacked ? Math.max(...sums) : Math.max(...series.flatMap((one) => one.values.map((v) => v || 0)));
  const most = options.most || nice(highest, options.base, format);
  const x = (i) => left + (time.length > 1 ? (inner * i) / (time.length - 1) : inner / 2);
  const y = (value) => top + tall * (1 - Math.min(value, most) / most);
  const drawing = shape("svg", { viewBox: `0 0 ${width} ${height}`, height });
  for (const tick of highest > 0 || options.most ? ticks(most, format) : [0]) {
    const at = y(tick);
    drawing.append(shape("line", { x1: left, x2: width - right, y1: at, y2: at, class: "grid" }));
    drawing.append(shape("text", { x: left - 8, y: at + 4, "text-anchor": "end", class: "axis" }, tick ? format(tick) : "0"));
  }
  for (const [i, anchor] of [[0, "start"], [time.length - 1, "end"]]) {
    drawing.append(shape("text", { x: x(i), y: height - 5, "text-anchor": anchor, class: "axis" }, clock(time[i])));
  }
  const below = time.map(() => 0);
  for (const [number, one] of series.entries()) {
    const upper = drawn[number].map((value, i) => (stacked ? below[i] + (value || 0) : value));
    if (means && !stacked) drawing.append(faintLine(one.values, x, y, one.colour));
    if (bars) drawBars(drawing, upper, x, y, inner / time.length, one.colour);
    else drawLine(drawing, upper, stacked ? [...below] : below, x, y, one.colour, stacked || fill, stacked);
    if (stacked) upper.forEach((value, i) => { below[i] = value; });
  }
  follow(drawing, { time, series, format, x, top, bottom: height - bottom, width, left, inner });
  const named = series.length > 1 || options.named ? [legend(series.map((one) => [one.name, one.colour]))] : [];
  if (means) named.push(element("p", { class: "means" }, `${stacked ? "" : "thick: "}means of ${seconds((SMOOTHED * (time[time.length - 1] - time[0])) / (time.length - 1))}${stacked ? "" : "; thin: each point"}`));
  const told = time.map((at, i) => [clock(at), ...series.map((one) => (one.values[i] === null ? "–" : format(one.values[i] || 0)))]);
  present(place, drawing, named, ["time", ...series.map((one) => one.name)], told);
}

function drawLine(drawing, upper, lower, x, y, stroke, filled, stacked) {
  let run = [];
  const flush = () => {
    if (!run.length) return;
    const path = run.map((i) => `${x(i).toFixed(1)},${y(upper[i]).toFixed(1)}`).join(" L");
    if (filled) {
      const back = [...run].reverse().map((i) => `${x(i).toFixed(1)},${y(lower[i]).toFixed(1)}`).join(" L");
      drawing.append(shape("path", { d: `M${path} L${back} Z`, fill: stroke, "fill-opacity": stacked ? 0.55 : 0.13 }));
    }
    if (run.length === 1) drawing.append(shape("circle", { cx: x(run[0]), cy: y(upper[run[0]]), r: 2.5, fill: stroke }));
    drawing.append(shape("path", { d: `M${path}`, fill: "none", stroke, "stroke-width": 2, "stroke-linejoin": "round" }));
    run = [];
  };
  upper.forEach((value, i) => { if (value === null || value === undefined) flush(); else run.push(i); });
  flush();
}

function faintLine(values, x, y, stroke) {
  let path = "";
  values.forEach((value, i) => {
    if (typeof value === "number") path += `${typeof values[i - 1] === "number" ? "L" : "M"}${x(i).toFixed(1)},${y(value).toFixed(1)}`;
  });
  return shape("path", { d: path, fill: "none", stroke, "stroke-width": 1, "stroke-opacity": 0.3, class: "points" });
}

function drawBars(drawing, values, x, y, room, fill) {
  const wide = Math.max(2, Math.min(14, room * 0.7));
  values.forEach((value, i) => {
    if (value > 0) drawing.append(shape("rect", { x: x(i) - wide / 2, y: y(value), width: wide, height: Math.max(1, y(0) - y(value)), rx: 1.5, fill }));
  });
}

function follow(drawing, chart) {
  const cross = shape("line", { class: "cross", y1: chart.top, y2: chart.bottom, visibility: "hidden" });
  drawing.append(cross);
  drawing.addEventListener("mousemove", (event) => {
    const box = drawing.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * chart.width;
    const i = Math.max(0, Math.min(chart.time.length - 1, Math.round(((place - chart.left) / chart.inner) * (chart.time.length - 1))));
    cross.setAttribute("x1", chart.x(i));
    cross.setAttribute("x2", chart.x(i));
    cross.setAttribute("visibility", "visible");
    const values = chart.series.map((one) => `${one.name}: ${one.values[i] === null ? "–" : chart.format(one.values[i] || 0)}`);
    showTip(event, [clock(chart.time[i]), ...values].join("\n"));
  });
  drawing.addEventListener("mouseleave", () => { cross.setAttribute("visibility", "hidden"); hideTip(); });
}

// parts: [[name, share, colour]]
export function shareBar(place, parts) {
  const width = Math.max(280, place.clientWidth), height = 30;
  const drawing = shape("svg", { viewBox: `0 0 ${width} ${height}`, height });
  let x = 0;
  for (const [name, share, fill] of parts) {
    const wide = Math.max(0, width * share);
    const bar = shape("rect", { x, y: 0, width: Math.max(0, wide - 2), height, rx: 4, fill });
    bar.addEventListener("mousemove", (event) => showTip(event, `${name}: ${percent(share)}`));
    bar.addEventListener("mouseleave", hideTip);
    drawing.append(bar);
    x += wide;
  }
  const named = legend(parts.map(([name, share, fill]) => [`${name} ${percent(share)}`, fill]));
  present(place, drawing, [named], ["part", "share"], parts.map(([name, share]) => [name, percent(share)]));
}

// rows: [{time, step, owners}]; costs: seconds per cell of each lane
export function laneGrid(place, rows, costs, moved) {
  if (!rows.length) return nothing(place, "no rank has said which lanes it works");
  const lanes = rows[rows.length - 1].owners.length;
  const width = Math.max(280, place.clientWidth), left = 84, bars = 46, cell = Math.max(2, (width - left - 8) / lanes);
  const tall = Math.max(18, Math.min(30, 150 / rows.length)), height = bars + 14 + rows.length * tall + 22;
  const drawing = shape("svg", { viewBox: `0 0 ${width} ${height}`, height });
  const most = Math.max(...costs, 1e-9), gap = cell > 6 ? 2 : cell > 3 ? 0.5 : 0;
  drawing.append(shape("text", { x: left - 10, y: 14, "text-anchor": "end", class: "axis" }, "per cell"));
  drawing.append(shape("text", { x: left - 10, y: 28, "text-anchor": "end", class: "axis" }, seconds(most)));
  costs.forEach((cost, lane) => {
    const tallest = (bars - 4) * (cost / most), owner = rows[rows.length - 1].owners[lane];
    drawing.append(shape("rect", { x: left + lane * cell, y: bars - tallest, width: Math.max(1, cell - gap), height: tallest, rx: Math.min(2, cell / 4), fill: colour(owner), "fill-opacity": 0.45 }));
  });
  rows.forEach((row, i) => {
    const y = bars + 14 + i * tall;
    drawing.append(shape("text", { x: left - 10, y: y + tall / 2 + 4, "text-anchor": "end", class: "axis" }, `from ${count(row.step)}`));
    row.owners.forEach((owner, lane) => {
      const before = i > 0 ? rows[i - 1].owners[lane] : owner;
      const box = shape("rect", { x: left + lane * cell, y: y + 1, width: Math.max(1, cell - gap), height: tall - 2, rx: Math.min(4, cell / 4), fill: owner < 0 ? "var(--track)" : colour(owner) });
      if (before !== owner) { box.setAttribute("stroke", "var(--ink)"); box.setAttribute("stroke-width", "2"); }
      box.addEventListener("mousemove", (event) => showTip(event, `lane ${lane}, from step ${count(row.step)}\nrank ${owner}${before !== owner ? ` (was rank ${before})` : ""}`));
      box.addEventListener("mouseleave", hideTip);
      drawing.append(box);
      if (cell >= 22) drawing.append(shape("text", { x: left + (lane + 0.5) * cell - gap / 2, y: y + tall / 2 + 4, "text-anchor": "middle", fill: owner < 0 ? "var(--ink)" : "var(--on)", "font-size": 11, "font-weight": 600, "pointer-events": "none" }, owner < 0 ? "" : String(owner)));
    });
  });
  const every = Math.max(1, Math.ceil(28 / cell));
  for (let lane = 0; lane < lanes; lane += every) {
    drawing.append(shape("text", { x: left + (lane + 0.5) * cell, y: height - 6, "text-anchor": "middle", class: "axis" }, String(lane)));
  }
  drawing.append(shape("text", { x: left - 10, y: height - 6, "text-anchor": "end", class: "axis" }, "lane"));
  const owners = [...new Set(rows.flatMap((row) => row.owners))].filter((owner) => owner >= 0).sort((a, b) => a - b);
  const named = [...owners.map((owner) => [`rank ${owner}`, colour(owner)]), ...(moved ? [["outlined: moved", "var(--ink)"]] : [])];
  const told = costs.map((cost, lane) => [lane, seconds(cost), ...rows.map((one) => `rank ${one.owners[lane]}`)]);
  present(place, drawing, owners.length <= COLOURS ? [legend(named)] : [], ["lane", "per cell", ...rows.map((one) => `from step ${count(one.step)}`)], told);
}

// rows: [lane, loads, seconds, bytes]; owners: rank of each lane
export function laneBars(place, rows, owners) {
  if (!rows.length) return nothing(place, "no block has been loaded yet");
  const width = Math.max(280, place.clientWidth), height = 170, left = 58, right = 10, top = 8, bottom = 22;
  const inner = width - left - right, tall = height - top - bottom;
  const most = nice(Math.max(...rows.map((one) => one[2])), 10);
  const room = inner / rows.length, wide = Math.max(1, Math.min(28, room - (room > 6 ? 2 : 0.5)));
  const drawing = shape("svg", { viewBox: `0 0 ${width} ${height}`, height });
  for (const part of [0, 0.5, 1]) {
    const at = top + tall * (1 - part);
    drawing.append(shape("line", { x1: left, x2: width - right, y1: at, y2: at, class: "grid" }));
    drawing.append(shape("text", { x: left - 8, y: at + 4, "text-anchor": "end", class: "axis" }, part ? seconds(part * most) : "0"));
  }
  const every = Math.max(1, Math.ceil(28 / room));
  rows.forEach(([lane, loads, spent, size], i) => {
    const high = tall * (spent / most), x = left + (i + 0.5) * room, owner = owners[lane];
    const known = owner !== undefined && owner >= 0;
    const bar = shape("rect", { x: x - wide / 2, y: top + tall - high, width: wide, height: high, rx: Math.min(2, wide / 4), fill: known ? colour(owner) : "var(--faint)" });
    bar.addEventListener("mousemove", (event) => showTip(event, `lane ${lane}${known ? `, now rank ${owner}'s` : ""}\n${seconds(spent)} for ${count(loads)} blocks, ${bytes(size)}`));
    bar.addEventListener("mouseleave", hideTip);
    drawing.append(bar);
    if (i % every === 0) drawing.append(shape("text", { x, y: height - 5, "text-anchor": "middle", class: "axis" }, String(lane)));
  });
  present(place, drawing, [], ["lane", "blocks", "time", "bytes"], rows.map(([lane, loads, spent, size]) => [lane, count(loads), seconds(spent), bytes(size)]));
}

export function heatTiles(place, shards) {
  if (!shards.length) return nothing(place, "no shard has been read yet");
  const width = Math.max(280, place.clientWidth), columns = Math.max(2, Math.floor(width / 118));
  const wide = width / columns, tall = 44, most = Math.max(...shards.map((one) => one[2]), 1);
  const height = Math.ceil(shards.length / columns) * tall;
  const drawing = shape("svg", { viewBox: `0 0 ${width} ${height}`, height });
  shards.forEach(([name, loads, size], i) => {
    const x = (i % columns) * wide, y = Math.floor(i / columns) * tall, share = size / most;
    const box = shape("rect", { x, y, width: wide - 4, height: tall - 4, rx: 6, fill: `rgba(var(--heat), ${(0.08 + 0.42 * share).toFixed(3)})` });
    box.addEventListener("mousemove", (event) => showTip(event, `shard ${name}\n${count(loads)} blocks loaded, ${bytes(size)}`));
    box.addEventListener("mouseleave", hideTip);
    drawing.append(box);
    drawing.append(shape("text", { x: x + 9, y: y + 17, fill: "var(--ink)", "font-size": 11, "font-family": "ui-monospace, DejaVu Sans Mono, monospace", "pointer-events": "none" }, name));
    drawing.append(shape("text", { x: x + 9, y: y + 32, fill: "var(--ink)", "font-size": 11, "pointer-events": "none" }, `${bytes(size)} · ${count(loads)}×`));
  });
  present(place, drawing, [], ["shard", "blocks", "bytes"], shards.map(([name, loads, size]) => [name, count(loads), bytes(size)]));
}
