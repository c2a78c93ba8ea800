"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const el = (tag, props = {}, ...kids) => { const node = Object.assign(document.createElement(tag), props); node.append(...kids); return node; };
const at = (id) => document.getElementById(id);
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
function bytes(n) { let k = 0; while (n >= 1024 && k < UNITS.length - 1) { n /= 1024; k++; } return `${n < 10 && k ? n.toFixed(2) : n < 100 && k ? n.toFixed(1) : Math.round(n)} ${UNITS[k]}`; }
function seconds(s) { return s > 0 && s < 5e-8 ? "< 0.1 µs" : s >= 1 ? `${s.toFixed(2)} s` : s >= 1e-3 ? `${(s * 1e3).toFixed(2)} ms` : `${(s * 1e6).toFixed(1)} µs`; }
const count = (n) => Math.round(n).toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}%`;
const things = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
const plain = (name) => name.replaceAll("_", " ");
const show = { bytes, seconds };
const dark = matchMedia("(prefers-color-scheme: dark)");

// ---- colours: a fixed one for every part of a step and every use of memory; a ramp for the heat map
const PALETTE = ["#3b78c2", "#f2a541", "#4bb39a", "#d2605a", "#8d6bb8", "#9aa5b1", "#c98bb9", "#7fb2e8", "#b8a04a", "#5f7f5a", "#a8694b", "#2f9fb5"];
const names = (key) => [...new Set(data.slices.flatMap((one) => Object.entries(one[key]).sort((a, b) => b[1] - a[1]).map(([name]) => name)))];
const colours = Object.fromEntries(["step_parts", "hbm_parts"].map((key) => [key, new Map(names(key).map((name, k) => [name, PALETTE[k % PALETTE.length]]))]));
const RAMPS = { light: ["#e6f0f8", "#a9cfe6", "#5aa3cf", "#1f6fb2", "#0a3a75"], dark: ["#22303f", "#23537f", "#2c81b5", "#58b4c9", "#d5f0a8"] };
const ramp = () => RAMPS[dark.matches ? "dark" : "light"];
function shade(share) {
  const stops = ramp(), x = Math.min(1, Math.max(0, share)) * (stops.length - 1), k = Math.min(Math.floor(x), stops.length - 2), t = x - k;
  const part = (colour, n) => parseInt(colour.slice(1 + 2 * n, 3 + 2 * n), 16);
  return `rgb(${[0, 1, 2].map((n) => Math.round(part(stops[k], n) * (1 - t) + part(stops[k + 1], n) * t)).join(",")})`;
}

// ---- tables that sort by a click on a column's head
// columns: [key, label, format, draw]; numbers have a format; draw(row, td) adds more than text.
function sortable(table, columns, rows, sorted, down, decorate, most = Infinity) {
  const line = el("tr");
  for (const [key, label, format] of columns) {
    const th = el("th", { className: `${format ? "num " : ""}${key}` }, el("button", { type: "button", textContent: label }));
    if (key === sorted) th.setAttribute("aria-sort", down ? "descending" : "ascending");
    th.firstChild.addEventListener("click", () => sortable(table, columns, rows, key, key === sorted ? !down : Boolean(format), decorate, most));
    line.append(th);
  }
  table.tHead.replaceChildren(line);
  const missing = (value) => value === null || value === undefined;
  const order = (a, b) => {
    const [x, y] = [a[sorted], b[sorted]];
    if (missing(x) || missing(y)) return missing(x) - missing(y);
    return (down ? -1 : 1) * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
  };
  table.tBodies[0].replaceChildren(...[...rows].sort(order).slice(0, most).map((row) => {
    const tr = el("tr");
    for (const [key, , format, draw] of columns) {
      const td = el("td", { className: `${format ? "num " : ""}${key}` }, missing(row[key]) ? "–" : format ? format(row[key]) : row[key]);
      if (draw && !missing(row[key])) draw(row, td);
      tr.append(td);
    }
    decorate(row, tr);
    return tr;
  }));
}
function bar(td, share, pieces = []) {
  const line = el("div", { className: "bar" }), total = pieces.reduce((sum, [value]) => sum + value, 0) || 1;
  line.style.width = `max(2px, calc(var(--longest) * ${share}))`;
  for (const [value, colour, title] of pieces) { const piece = el("i", { title }); piece.style.cssText = `flex:${value / total} 0 0;background:${colour}`; line.append(piece); }
  td.append(line);
}

// ---- the comparison, when there are several slices
function compare() {
  const rows = data.slices.map((one, index) => ({ ...one, index,
    ratio: one.fits ? one.step_seconds / one.lower_bound_seconds : null, per_chip: one.fits ? one.samples_per_second / one.num_chips : null,
    filled: one.hbm_bytes_max / one.hbm_bytes_capacity }));
  const best = (key, most) => { const known = rows.map((row) => row[key]).filter((value) => value != null); return known.length > 1 ? (most ? Math.max : Math.min)(...known) : null; };
  const marked = (key, most) => { const top = best(key, most); return (row, td) => td.classList.toggle("best", row[key] === top); };
  const slowest = best("step_seconds", true) || 1;
  const verdict = (row, td) => td.append(el("div", { className: row.fits ? "yes" : "no", textContent: row.fits ? "fits" : "does not fit" }));
  const columns = [["slice", "slice", null, verdict], ["num_chips", "chips", count],
    ["step_seconds", "step", seconds, (row, td) => { marked("step_seconds", false)(row, td); bar(td, row.step_seconds / slowest, stepPieces(row.step_parts)); }],
    ["ratio", "× bound", (x) => x.toFixed(3)], ["samples_per_second", "samples/s", count, marked("samples_per_second", true)],
    ["per_chip", "samples/s a chip", count, marked("per_chip", true)],
    ["filled", "HBM, fullest", percent, (row, td) => { bar(td, Math.min(1, row.filled)); td.classList.toggle("over", row.filled > 1); }], ["idle_ranks", "idle", count]];
  if (rows.some((row) => row.cost_per_million_examples != null)) columns.push(["cost_per_million_examples", "cost / 1M", (x) => x.toPrecision(3), marked("cost_per_million_examples", false)]);
  sortable(at("slices"), columns, rows, "", false, (row, tr) => {
    tr.dataset.slice = row.index; tr.tabIndex = 0; tr.classList.toggle("chosen", row.index === chosen);
    tr.addEventListener("click", () => choose(row.index));
    tr.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(row.index); });
  });
  at("tabs").replaceChildren(...data.slices.map((one, index) => {
    const tab = el("button", { type: "button", textContent: one.slice });
    tab.setAttribute("role", "tab"); tab.addEventListener("click", () => choose(index));
    return tab;
  }));
  at("compare").hidden = at("tabs").hidden = false;
}
const stepPieces = (parts) => Object.entries(parts).map(([name, value]) => [value, colours.step_parts.get(name), `${plain(name)}: ${seconds(value)}`]);

// ---- one slice
let chosen = 0, metric = "bytes", cells = [];
function choose(index) {
  chosen = index;
  for (const [k, tab] of [...at("tabs").children].entries()) tab.setAttribute("aria-selected", String(k === index));
  for (const tr of at("slices").tBodies[0].rows) tr.classList.toggle("chosen", Number(tr.dataset.slice) === index);
  const one = data.slices[index];
  at("verdict").replaceChildren(el("span", { className: one.fits ? "yes" : "no", textContent: one.fits ? "Fits" : "Does not fit" }),
    ` · ${one.slice}: ${things(one.num_chips, "chip")} (${one.dims.join(" × ")}), ${things(one.num_ranks, "rank")}${one.stopped_early ? " · the search was stopped early: more time may find a better plan" : ""}`);
  at("problems").replaceChildren(...one.problems.map((problem) => el("section", { className: "card problem" }, el("h2", { textContent: problem.message }),
    ...(problem.remedies.length ? [el("p", { textContent: "What would help, each checked by planning it:" }), el("ul", {}, ...problem.remedies.map((text) => el("li", { textContent: text })))] : []))));
  for (const id of ["shares", "torus", "placed"]) at(id).hidden = !one.fits;
  tiles(one);
  shares("time", one.step_parts, "step_parts", seconds);
  shares("memory", one.hbm_parts, "hbm_parts", bytes);
  drawMap(one); paint(); drawTables(one);
  at("assumptions").tBodies[0].replaceChildren(...data.assumptions.map(([name, unit, text], k) => el("tr", {}, el("td", { textContent: name }), el("td", { className: "num", textContent: one.assumed[k] }), el("td", { textContent: unit }), el("td", { className: "why", textContent: text }))));
}
function tiles(one) {
  const found = one.fits ? [["step", seconds(one.step_seconds)], ["samples a second", count(one.samples_per_second)], ["step / lower bound", (one.step_seconds / one.lower_bound_seconds).toFixed(3)],
    ["HBM, fullest rank", bytes(one.hbm_bytes_max)], ["HBM, mean rank", bytes(one.hbm_bytes_mean)], ["HBM usable a rank", bytes(one.hbm_bytes_capacity)], ["idle ranks", count(one.idle_ranks)]] : [];
  if (one.cost_per_million_examples != null) found.push(["cost of 1M examples", one.cost_per_million_examples.toPrecision(3)]);
  at("tiles").replaceChildren(...found.map(([label, value]) => el("div", { className: "tile" }, el("b", { textContent: value }), el("span", { textContent: label }))));
}
function shares(id, parts, key, format) {
  const total = Object.values(parts).reduce((sum, value) => sum + value, 0) || 1, bars = [], keys = [];
  for (const [name, value] of Object.entries(parts).sort((a, b) => b[1] - a[1])) {
    if (value <= 0) continue;
    const piece = el("i", { title: `${plain(name)}: ${format(value)}` }), swatch = el("i");
    piece.style.cssText = `flex:${value / total} 0 0;background:${colours[key].get(name)}`; swatch.style.background = colours[key].get(name);
    bars.push(piece); keys.push(el("span", {}, swatch, `${plain(name)} `, el("em", { textContent: `${format(value)} (${percent(value / total)})` })));
  }
  at(id).replaceChildren(...bars); at(`${id}-legend`).replaceChildren(...keys);
}

// ---- the heat map: a cell a chip; a chip with two ranks shows the higher one. A torus of three dimensions is cut into
// planes across its shortest one, so that there are few and large ones.
const column = (values, k) => (values.length === 1 ? values[0] : values[k]);
let wide = 1, high = 1;
function drawMap(one) {
  cells = []; at("layers").replaceChildren();
  if (!one.fits) return;
  const chips = Array.from({ length: one.num_chips }, () => []);
  for (let rank = 0; rank < one.num_ranks; rank++) {
    const { cells: where, bytes: size, seconds: busy, shards } = one.ranks;
    chips[where[rank]].push({ rank, host: Math.floor(rank / one.ranks_per_host), bytes: column(size, rank), seconds: column(busy, rank), shards: column(shards, rank) });
  }
  const dims = [...one.dims, 1, 1].slice(0, 3), axes = one.dims.length < 3 ? [0, 1, 2] : [0, 1, 2].sort((a, b) => dims[b] - dims[a] || a - b);
  wide = dims[axes[0]]; high = dims[axes[1]];
  const deep = dims[axes[2]], room = Math.min(880, at("layers").clientWidth || 880), beside = Math.min(deep, Math.max(1, Math.floor(room / Math.max(200, 9 * wide))));
  const size = Math.max(3, Math.min(deep > 1 ? 34 : 48, Math.floor((room - 14 * beside) / (wide * beside)) - 1)), large = size >= 16;
  at("layers").className = large ? "layers large" : "layers";
  for (let z = 0; z < deep; z++) {
    const grid = el("div", { className: "grid" });
    grid.style.gridTemplateColumns = `repeat(${wide}, ${large ? size - 2 : size}px)`; grid.style.gridAutoRows = `${large ? size - 2 : size}px`;
    for (let y = 0; y < high; y++) for (let x = 0; x < wide; x++) {
      const place = [0, 0, 0]; place[axes[0]] = x; place[axes[1]] = y; place[axes[2]] = z;
      const cell = el("button", { className: "chip", type: "button", tabIndex: cells.length ? -1 : 0 }), shown = place.slice(0, one.dims.length);
      cell.dataset.cell = cells.length; cell.setAttribute("aria-label", `chip ${shown.join(", ")}`);
      cells.push({ cell, ranks: chips[place[0] + dims[0] * (place[1] + dims[1] * place[2])], place: shown }); grid.append(cell);
    }
    at("layers").append(el("figure", { className: "layer" }, ...(deep > 1 ? [el("figcaption", { textContent: `${"xyz"[axes[2]]} = ${z}` })] : []), grid));
  }
  const flat = (axis) => `${dims[axis]} along ${"xyz"[axis]}`;
  at("torus-title").textContent = `Chips on the torus: ${one.dims.join(" × ")}${deep > 1 ? `, as ${deep} planes with ${flat(axes[0])} (across) and ${flat(axes[1])} (down)` : ""}`;
  at("note").textContent = "Point at a chip for its figures, or at a table below to see where it lives. Arrow keys move between chips.";
}
function describe(number) {
  const one = data.slices[chosen], { ranks, place } = cells[number];
  at("note").replaceChildren(el("b", { textContent: `chip (${place.join(", ")}), host ${ranks[0].host}` }),
    ...ranks.map((r) => el("div", { textContent: `rank ${r.rank}: ${bytes(r.bytes)} (${percent(r.bytes / one.hbm_bytes_capacity)} of HBM), ${seconds(r.seconds)}, ${things(r.shards, "shard")}` })));
}
const hit = (event) => { const cell = event.target.closest(".chip"); if (cell) describe(Number(cell.dataset.cell)); };
at("layers").addEventListener("mouseover", hit);
at("layers").addEventListener("focusin", hit);
at("layers").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide, PageUp: -wide * high, PageDown: wide * high }[event.key];
  const from = Number(event.target.dataset.cell), next = cells[from + step];
  if (!step || !next) return;
  event.preventDefault(); cells[from].cell.tabIndex = -1; next.cell.tabIndex = 0; next.cell.focus();
});
function paint() {
  const one = data.slices[chosen];
  if (!one.fits) return;
  const values = cells.map(({ ranks }) => Math.max(...ranks.map((r) => r[metric]))), stretch = at("stretch").checked;
  const highest = values.reduce((a, b) => Math.max(a, b), 0), lowest = values.reduce((a, b) => Math.min(a, b), Infinity);
  const bottom = stretch ? lowest : 0, top = stretch ? highest : metric === "bytes" ? one.hbm_bytes_capacity : highest, range = top - bottom || 1;
  cells.forEach(({ cell }, k) => { cell.style.background = shade(top > bottom ? (values[k] - bottom) / range : 0.5); });
  at("ramp").style.background = `linear-gradient(90deg, ${ramp().join(",")})`;
  at("low").textContent = show[metric](bottom); at("high").textContent = show[metric](top);
  const all = one.ranks[metric].length === 1 ? Array(one.num_ranks).fill(one.ranks[metric][0]) : one.ranks[metric];
  const sorted = [...all].sort((a, b) => b - a), mean = all.reduce((a, b) => a + b, 0) / all.length;
  const height = (value) => 70 - (66 * value) / (sorted[0] || 1), width = 280 / sorted.length;
  at("curve").innerHTML = `<path d="M0,70 ${sorted.map((value, k) => `L${(k * width).toFixed(1)},${height(value).toFixed(1)} L${((k + 1) * width).toFixed(1)},${height(value).toFixed(1)}`).join(" ")} L280,70 Z"></path><line x1="0" x2="280" y1="${height(mean)}" y2="${height(mean)}"></line>`;
  const even = sorted[0] <= sorted[sorted.length - 1] * 1.0005;
  at("spread").textContent = even ? `All ranks alike: ${show[metric](mean)}.` : `Ranks from the highest to the lowest: ${show[metric](sorted[0])} to ${show[metric](sorted[sorted.length - 1])}; mean ${show[metric](mean)} (dashed).`;
  for (const button of document.querySelectorAll("[data-metric]")) button.setAttribute("aria-pressed", String(button.dataset.metric === metric));
}

// ---- the tables of one slice
const SHOWN = 100; // of many tables at first: a page of thousands of lines helps nobody
let everything = false;
function held(runs) { return (rank) => { for (let k = 0; k < runs.length; k += 2) if (rank >= runs[k] && rank <= runs[k + 1]) return true; return false; }; }
function tablesOf(one) {
  return one.placed.map(([sharding, exchange, runs, parts, why], k) => {
    const [name, num_embeddings, embedding_dim, ids_per_example, bytes] = data.tables[k];
    const spent = Object.fromEntries(parts.map((ns, part) => [one.part_names[part], ns * 1e-9]).filter(([, value]) => value > 0));
    return { name, num_embeddings, embedding_dim, ids_per_example, bytes, sharding: plain(sharding), exchange: plain(exchange), runs, parts: spent, why: one.whys[why],
      num_ranks: runs.reduce((sum, rank, n) => sum + (n % 2 ? rank + 1 : -rank), 0), seconds: Object.values(spent).reduce((a, b) => a + b, 0) };
  });
}
function drawTables(one) {
  const tables = tablesOf(one), rows = tables.filter((table) => table.name.toLowerCase().includes(at("find").value.trim().toLowerCase()));
  const most = (key) => tables.reduce((a, table) => Math.max(a, table[key]), 1e-12), heaviest = most("bytes"), slowest = most("seconds");
  const exchange = (table, td) => { if (table.exchange !== "none") td.append(el("div", { className: "soft", textContent: table.exchange })); };
  const columns = [["name", "table"], ["sharding", "sharding", null, exchange], ["num_ranks", "ranks", count], ["num_embeddings", "rows", count], ["embedding_dim", "dim", count],
    ["ids_per_example", "ids", (x) => String(Number(x.toPrecision(3)))], ["bytes", "bytes in all", bytes, (table, td) => bar(td, table.bytes / heaviest)],
    ["seconds", "time a step", seconds, (table, td) => bar(td, table.seconds / slowest, stepPieces(table.parts))], ["why", "why"]];
  sortable(at("tables"), columns, rows, "seconds", true, (table, tr) => {
    const has = held(table.runs);
    tr.addEventListener("mouseenter", () => { at("layers").classList.add("lit"); for (const { cell, ranks } of cells) cell.classList.toggle("held", ranks.some((r) => has(r.rank))); });
    tr.addEventListener("mouseleave", () => { at("layers").classList.remove("lit"); for (const { cell } of cells) cell.classList.remove("held"); });
  }, everything ? Infinity : SHOWN);
  at("more").hidden = everything || rows.length <= SHOWN;
  at("more").textContent = `show all ${count(rows.length)} tables`;
}

// ---- start
const slices = data.slices.map((one) => one.slice);
document.title = `Sharding plan: ${slices.join(", ")}`;
at("title").textContent = slices.length === 1 ? `Sharding plan for ${slices[0]}` : `Sharding plans for ${slices.length} slices`;
at("about").textContent = `Global batch ${count(data.batch_size)}${data.tables.length ? ` · ${things(data.tables.length, "table")}` : ""}${data.measured ? ` · statistics measured on ${things(data.measured.num_examples, "example")} of ${data.measured.data}` : ""}`;
for (const button of document.querySelectorAll("[data-metric]")) button.addEventListener("click", () => { metric = button.dataset.metric; paint(); });
at("stretch").addEventListener("change", paint);
at("find").addEventListener("input", () => drawTables(data.slices[chosen]));
at("more").addEventListener("click", () => { everything = true; drawTables(data.slices[chosen]); });
dark.addEventListener("change", paint);
if (slices.length > 1) compare();
choose(Math.max(0, data.slices.findIndex((one) => one.fits)));
