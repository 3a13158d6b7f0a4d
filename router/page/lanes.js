// The two strokes as a picture: workers as rows, requests as lanes, all on one axis of time. A canvas, since sixty-four
// lanes move at once; the same as tables, for whoever does not see it.

import { now, sequences, state, workers } from "./feed.js";
import { describe, drawTables, nameOf, shortName, startOf } from "./words.js";

const AXIS = 22; // heights and widths in CSS pixels
const WORKER = 40;
const GAP = 26; // between prefill and decode workers: here KV is seen on its way
const TITLED = 16; // a lane so high has its title
const LABEL = 44; // from one label of the axis to the next, at least
const BEHIND_S = 0.2; // what is drawn lies so far back that the news of it has come
const at = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");

let canvas, pen, colours = {}, width = 0, height = 0, gutter = 0;
let chosen = null; // the name of the sequence, or of the worker, that is looked at
let frame = 0, drawnAt = 0, laidOut = [];
let slots = []; // of lanes: the sequence in each
export const frames = { count: 0, slowest: 0, spent: 0 }; // how smooth it is

export function start() {
  canvas = at("lanes");
  pen = canvas.getContext("2d");
  new ResizeObserver(changed).observe(at("chart"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  canvas.addEventListener("pointermove", (event) => choose(under(event)));
  canvas.addEventListener("pointerdown", (event) => choose(under(event)));
  canvas.addEventListener("pointerleave", () => { if (document.activeElement !== canvas) choose(null); });
  canvas.addEventListener("blur", () => choose(null));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !laidOut.length) return;
    event.preventDefault();
    const from = laidOut.findIndex((one) => one.name === chosen);
    choose(laidOut[(from + step + laidOut.length) % laidOut.length].name);
  });
  at("span").addEventListener("change", changed);
  at("view").addEventListener("click", () => {
    const tables = at("tables").hidden;
    at("tables").hidden = !tables;
    at("chart").hidden = at("detail").hidden = tables;
    at("view").setAttribute("aria-pressed", String(tables));
    changed();
  });
  document.addEventListener("visibilitychange", changed);
  setInterval(changed, 1000);
  recolour();
}

/** Colours are those of the style sheet. */
export function recolour() {
  const probe = document.createElement("span"); // what a variable comes to, only an element tells
  document.body.append(probe);
  for (const name of ["ink", "ink-2", "ink-3", "line", "card", "accent", "soft", "decode", "bad"]) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  changed();
}

/** There is something new to see. */
export function changed() {
  if (canvas && !frame && !document.hidden) frame = requestAnimationFrame(draw);
}

function choose(name) {
  if (name === chosen) return;
  chosen = name;
  changed();
}

function under(event) {
  const box = canvas.getBoundingClientRect();
  const y = event.clientY - box.top;
  return laidOut.find((one) => y >= one.top && y < one.top + one.height)?.name ?? null;
}

// --- where things are ---

const narrow = () => at("chart").clientWidth < 520;

function layOut(from) {
  const rows = [...workers].map(([name, one]) => ({ name, one, role: one.row.role }));
  rows.sort((a, b) => (a.role === b.role ? a.one.since - b.one.since : a.role === "prefill" ? -1 : 1));
  laidOut = [];
  let top = AXIS;
  let before = null;
  for (const row of rows) {
    if (before === "prefill" && row.role === "decode") top += GAP;
    before = row.role;
    laidOut.push({ name: row.name, worker: row.one, role: row.role, top, height: WORKER });
    top += WORKER + 4;
  }
  if (rows.length) top += 14;
  const seen = [...sequences.values()].filter((one) => !one.over || one.over > from);
  slots = slots.map((name) => (name && seen.some((one) => one.name === name) ? name : null));
  for (const one of seen) {
    if (slots.includes(one.name)) continue;
    const free = slots.indexOf(null);
    free < 0 ? slots.push(one.name) : (slots[free] = one.name);
  }
  while (slots.length && slots.at(-1) === null) slots.pop();
  const lanesTop = top;
  const room = at("chart").clientHeight - lanesTop - 8;
  const least = narrow() ? TITLED : 9; // a phone is not hovered over: each lane says whose it is
  const lane = Math.max(least, Math.min(22, Math.floor(room / Math.max(1, slots.length)))); // more of them scroll
  slots.forEach((name, slot) => {
    if (name) laidOut.push({ name, sequence: sequences.get(name), top: lanesTop + slot * lane, height: lane });
  });
  return lanesTop + Math.max(slots.length, 6) * lane + 6;
}

function fit(needed) {
  const box = at("chart");
  const scale = devicePixelRatio || 1;
  const wide = box.clientWidth;
  const high = Math.max(needed, box.clientHeight - 1);
  if (wide !== width || high !== height || canvas.width !== Math.round(wide * scale)) {
    width = wide;
    height = high;
    canvas.width = Math.round(wide * scale);
    canvas.height = Math.round(high * scale);
    canvas.style.height = `${high}px`;
  }
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  gutter = narrow() ? 92 : 172;
}

// --- drawing ---

function draw() {
  frame = 0;
  const began = performance.now();
  const status = { live: state.sees === "own" ? "live, your requests" : "live", connecting: "connecting", away: "connecting again", full: "too many watch", key: "needs a key" }[state.status];
  const more = state.hidden ? `, ${state.hidden} more under way` : "";
  if (at("feed").textContent !== status + more) at("feed").textContent = status + more;
  at("feed").dataset.status = state.status;
  const end = now() - BEHIND_S;
  if (at("chart").hidden) {
    if (began - drawnAt > 450) { drawnAt = began; drawTables(); }
    return;
  }
  const span = Number(at("span").value);
  const from = end - span;
  fit(layOut(from));
  const scene = { from, end, x: (moment) => gutter + ((Math.max(from, Math.min(end, moment)) - from) / span) * (width - gutter - 8), live: false };
  pen.clearRect(0, 0, width, height);
  axis(scene, span);
  for (const one of laidOut) if (one.worker) workerRow(scene, one);
  for (const one of laidOut) if (one.sequence) ribbon(scene, one);
  for (const one of laidOut) if (one.sequence) moves(scene, one);
  for (const one of laidOut) if (one.sequence) lane(scene, one);
  if (!laidOut.length) words(gutter + 12, height / 2, state.status === "live" ? "Nothing has been asked yet" : "", colours["ink-2"]);
  describe(at("detail"), laidOut.find((one) => one.name === chosen));
  const took = performance.now() - began;
  frames.count += 1;
  frames.spent += took;
  frames.slowest = Math.max(frames.slowest, took);
  // Time goes on as long as there is something in it; with reduced motion, by the second.
  if (scene.live && !still.matches) changed();
}

function words(x, y, text, colour, size = 11, weight = 400) {
  pen.fillStyle = colour;
  pen.font = `${weight} ${size}px system-ui, sans-serif`;
  pen.fillText(text, x, y);
}

function axis({ from, end, x }, span) {
  const step = [1, 5, 10, 20, 30, 60].find((one) => x(end) - x(end - one) >= LABEL) ?? span;
  pen.textAlign = "center";
  for (let back = 0; back <= span; back += step) {
    const place = Math.round(x(end - back)) + 0.5;
    pen.fillStyle = colours.line;
    pen.fillRect(place - 0.5, AXIS - 4, 1, height - AXIS);
    if (place > gutter + 14) words(Math.min(place, width - 16), 12, back ? `\u2212${back} s` : "now", colours["ink-2"], 11);
  }
  pen.textAlign = "left";
}

function workerRow(scene, { worker, role, top, height: high, name }) {
  const { x, from, end } = scene;
  const { row, history, gone, since } = worker;
  const right = x(end);
  const until = gone ?? end;
  const used = (each) => (each.total_blocks ? (each.owned_blocks ?? 0) / each.total_blocks : 0);
  const isThere = !gone && row.reachable;
  pen.globalAlpha = chosen === name ? 1 : 0.6;
  pen.fillStyle = colours.soft;
  const left = x(Math.max(from, since));
  if (until > from) pen.fillRect(left, top, x(until) - left, high);
  pen.globalAlpha = 1;
  // Blocks in use, filling and draining, and what waits.
  const base = top + high;
  const shown = history.filter((one, place) => one.at >= from || (history[place + 1]?.at ?? Infinity) >= from);
  pen.fillStyle = role === "prefill" ? colours.accent : colours.decode;
  pen.globalAlpha = 0.3;
  pen.beginPath();
  shown.forEach((one, place) => {
    const begins = x(Math.max(from, one.at));
    const ends = x(Math.min(until, shown[place + 1]?.at ?? until));
    const level = used(one.row) * (high - 4);
    if (ends > begins && level > 0) pen.rect(begins, base - Math.max(1, level), ends - begins, Math.max(1, level));
  });
  pen.fill();
  pen.globalAlpha = 1;
  pen.fillStyle = colours["ink-2"];
  shown.forEach((one, place) => {
    if (!one.row.num_waiting) return;
    const begins = x(Math.max(from, one.at));
    const ends = x(Math.min(until, shown[place + 1]?.at ?? until));
    for (let k = 0; k < Math.min(one.row.num_waiting, 8); k++) pen.fillRect(begins, top + 3 + k * 3, ends - begins, 2);
  });
  shown.forEach((one, place) => { // the router could not reach it
    if (one.row.reachable) return;
    hatch(x(Math.max(from, one.at)), top, x(Math.min(until, shown[place + 1]?.at ?? until)), high);
  });
  if (gone) hatch(x(gone), top, right, high);
  if (shown.some((one) => one.row.num_running || one.row.owned_blocks)) scene.live = true;
  if (gone && gone > from) { scene.live = true; words(Math.min(x(gone) + 6, right - 34), top + 15, "gone", colours.bad, 11, 600); }
  if (since > from && history.length && scene.from > 0 && since - oldest() > 1) { scene.live = true; words(left + 6, top + 15, "joined", colours["ink-2"], 11, 600); }
  // The gutter: name, fill, numbers.
  words(0, top + 12, `${narrow() ? role[0].toUpperCase() : role} ${shortName(row.id)}`, isThere ? colours.ink : colours.bad, 12, 600);
  pen.fillStyle = colours.line;
  pen.fillRect(0, top + 17, gutter - 14, 5);
  pen.fillStyle = role === "prefill" ? colours.accent : colours.decode;
  if (isThere) pen.fillRect(0, top + 17, (gutter - 14) * used(row), 5);
  const told = !isThere ? (gone ? "gone" : "not reached")
    : narrow() ? `${row.num_running ?? 0} run, ${row.num_waiting ?? 0} wait`
    : `${row.owned_blocks ?? 0}/${row.total_blocks} blocks \u00b7 ${row.num_running ?? 0} run \u00b7 ${row.num_waiting ?? 0} wait`;
  words(0, top + 34, told, colours["ink-2"], narrow() ? 10 : 10.5);
}

const oldest = () => Math.min(...[...workers.values()].map((one) => one.since));

function hatch(from, top, to, high) {
  if (to <= from) return;
  pen.save();
  pen.beginPath();
  pen.rect(from, top, to - from, high);
  pen.clip();
  pen.strokeStyle = colours.bad;
  pen.globalAlpha = 0.35;
  pen.beginPath();
  for (let x = from - high; x < to; x += 7) { pen.moveTo(x, top + high); pen.lineTo(x + high, top); }
  pen.stroke();
  pen.restore();
}

/** From the prefill worker's row to the decode worker's: where a sequence's KV travels. */
function ribbon({ from, end, x }, { sequence, name }) {
  if (!sequence.prefill || !sequence.decode ) return;
  const moments = startOf(sequence, end);
  // A worker that has come back has its name, and a row of its own.
  const row = (id) => laidOut.findLast((one) => one.worker?.row.id === id && (one.worker.since <= moments.kvEnd || one.worker.gone === null));
  const [source, target] = [row(sequence.prefill), row(sequence.decode)];
  if (!source || !target || moments.prefill === null || moments.kvEnd < from) return;
  const [a, b] = [x(moments.prefill), Math.max(x(moments.prefill) + 2, x(moments.prefillEnd))];
  const [c, d] = [x(moments.kvBegin), Math.max(x(moments.kvBegin) + 2, x(moments.kvEnd))];
  const high = source.top + source.height;
  const low = target.top;
  const bend = (low - high) / 2;
  const is_chosen = chosen === name || chosen === source.name || chosen === target.name;
  pen.fillStyle = colours.accent;
  pen.globalAlpha = is_chosen ? 0.75 : chosen ? 0.1 : 0.28;
  pen.beginPath();
  pen.moveTo(a, high);
  pen.bezierCurveTo(a, high + bend, c, low - bend, c, low);
  pen.lineTo(d, low);
  pen.bezierCurveTo(d, low - bend, b, high + bend, b, high);
  pen.fill();
  pen.globalAlpha = is_chosen ? 1 : 0.55;
  pen.fillRect(a, high - 4, b - a, 4); // the prompt is computed here
  pen.fillStyle = colours.decode;
  pen.fillRect(x(sequence.decoding ?? end), low, x(sequence.finished ?? end) - x(sequence.decoding ?? end), 4);
  pen.globalAlpha = 1;
}

/** From one worker's row to another's: where a running sequence went on. */
function moves({ from, x }, { sequence, name }) {
  const row = (id, moment) => laidOut.findLast((one) => one.worker?.row.id === id && one.worker.since <= moment);
  for (const [moment, before, after] of sequence.moves ?? []) {
    const [source, target] = [row(before, moment), row(after, moment)];
    if (!source || !target || moment < from) continue;
    const is_down = source.top < target.top;
    const [begins, ends] = is_down ? [source.top + source.height, target.top] : [source.top, target.top + target.height];
    const is_chosen = chosen === name || chosen === source.name || chosen === target.name;
    const place = x(moment);
    const tip = is_down ? -6 : 6;
    pen.strokeStyle = pen.fillStyle = colours.decode;
    pen.globalAlpha = is_chosen ? 1 : chosen ? 0.15 : 0.7;
    pen.lineWidth = 2;
    pen.beginPath();
    pen.moveTo(place, begins);
    pen.lineTo(place, ends);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(place, ends);
    pen.lineTo(place - 4, ends + tip);
    pen.lineTo(place + 4, ends + tip);
    pen.fill();
    pen.globalAlpha = pen.lineWidth = 1;
  }
}

function lane(scene, { sequence, top, height: high, name }) {
  const { from, end, x } = scene;
  const moments = startOf(sequence, end);
  const is_over = sequence.over !== undefined;
  if (!is_over || sequence.over > from) scene.live = true;
  const bar = Math.max(4, Math.round(high * 0.45));
  const thick = Math.max(2, Math.round(high * 0.16));
  const y = top + Math.round((high - bar - thick - 1) / 2);
  if (chosen === name) { pen.fillStyle = colours.soft; pen.fillRect(0, top, width, high); }
  if (high >= TITLED) words(0, top + high / 2 + 4, title(sequence), chosen === name ? colours.ink : colours["ink-2"], 11);
  const until = is_over ? sequence.over : end;
  // Waiting.
  pen.fillStyle = colours["ink-3"];
  const line = (begins, ends) => { if (ends > from && ends > begins) pen.fillRect(x(begins), y + bar / 2 - 1, x(ends) - x(begins), 2); };
  const waited = moments.prefill ?? until;
  line(sequence.arrived, Math.min(waited, sequence.first_token ?? until));
  if (sequence.attempt > 1) line(sequence.begun, waited); // once more, on other workers
  // Prefill, by chunk.
  if (moments.prefill !== null && moments.prefillEnd > from) {
    const begins = x(moments.prefill);
    pen.fillStyle = colours.accent;
    pen.globalAlpha = moments.isSure ? 1 : 0.45;
    pen.fillRect(begins, y, Math.max(2, x(moments.prefillEnd) - begins), bar);
    pen.globalAlpha = 1;
    pen.fillStyle = colours.card;
    for (const edge of moments.chunks) if (x(edge) - begins > 2) pen.fillRect(Math.round(x(edge)), y, 1, bar);
  }
  // KV under it.
  if (sequence.prefill && moments.prefill !== null && moments.kvEnd > from) {
    const [begins, ends] = [x(moments.kvBegin), Math.max(x(moments.kvBegin) + 3, x(moments.kvEnd))];
    pen.fillStyle = colours.accent;
    pen.globalAlpha = 0.55;
    pen.fillRect(begins, y + bar + 1, ends - begins, thick);
    pen.globalAlpha = 1;
    if (sequence.decoding === null && !is_over) { // it is on its way: something runs along it
      const along = still.matches ? 1 : (end * 1.2) % 1;
      pen.fillRect(begins + (ends - begins) * along - 4, y + bar + 1, 4, thick);
    }
    pen.beginPath();
    pen.moveTo(ends, y + bar - 1);
    pen.lineTo(ends + thick + 2, y + bar + 1 + thick / 2);
    pen.lineTo(ends, y + bar + thick + 3);
    pen.fill();
  }
  ticks(scene, sequence, y, bar);
  pen.fillStyle = colours.bad;
  for (const moment of sequence.faults) if (moment > from) pen.fillRect(x(moment) - 1, top + 1, 3, high - 2);
  if (is_over && sequence.over > from) cap(sequence, x(sequence.over), y + bar / 2);
}

const title = (sequence) => `${nameOf(sequence)} \u00b7 ${sequence.prompt_tokens}${gutter > 120 ? " in" : ""} \u2192 ${sequence.output_tokens}${gutter > 120 ? " out" : ""}`;

/** A tick a step, the wider the more tokens came together, or, where they stand closer than one sees, a band. */
function ticks({ from, x }, sequence, y, bar) {
  pen.fillStyle = colours.decode;
  for (let place = sequence.ticks.length - 1; place >= 0; place--) {
    const [begins, ends, tokens, isFirst, steps] = sequence.ticks[place];
    if (ends < from) break;
    const [left, right] = [x(begins), x(ends)];
    const count = Math.max(1, steps);
    const pitch = (right - left) / count;
    const wide = Math.min(4, Math.max(1, Math.round(tokens / count)));
    if (count > 1 && pitch < 1.9) {
      pen.globalAlpha = 0.7;
      pen.fillRect(left, y, Math.max(1, right - left), bar);
      pen.globalAlpha = 1;
      continue;
    }
    for (let k = isFirst && count > 1 ? 0 : 1; k <= count; k++) pen.fillRect(Math.round(left + k * pitch), y, wide, bar);
  }
}

function cap(sequence, x, y) {
  const is_fine = sequence.end === "stop" || sequence.end === "length";
  pen.beginPath();
  if (is_fine) {
    pen.fillStyle = colours.ink;
    pen.arc(x + 4, y, 2.5, 0, 7);
    pen.fill();
  } else {
    pen.strokeStyle = sequence.end === "left" ? colours["ink-2"] : colours.bad;
    pen.lineWidth = 1.5;
    pen.moveTo(x + 2, y - 3); pen.lineTo(x + 8, y + 3);
    pen.moveTo(x + 8, y - 3); pen.lineTo(x + 2, y + 3);
    pen.stroke();
    pen.lineWidth = 1;
  }
}
