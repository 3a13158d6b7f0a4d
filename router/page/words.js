// The two strokes in words: what is told of the sequence or worker that is looked at, and all of them as tables.

import { sequences, workers } from "./feed.js";

/** The moments of a sequence's strokes, as far as they are known at `end`. Workers tell durations, so they are laid out
 * from what the router has seen: prefill ends with the prefill worker's reply, KV has come before decoding begins. */
export function startOf(one, end) {
  const isAlone = !one.prefill; // the decode worker computes the prompt, too
  const until = one.over ?? end;
  const prefillEnd = (isAlone ? one.first_token : one.prompt_done ?? one.first_token) ?? until;
  const isSure = one.prefill_s !== null || (isAlone && one.first_token !== null);
  const prefill = one.begun === null ? null : one.prefill_s === null ? one.begun : Math.max(one.arrived, prefillEnd - one.prefill_s);
  const kvEnd = one.decoding === null ? until : one.decoding - (one.decode_queue_s ?? 0);
  const kvBegin = one.transfer_s === null ? prefill ?? until : Math.max(one.arrived, kvEnd - one.transfer_s);
  const chunks = (one.chunks ?? []).map((seconds) => (prefill ?? 0) + seconds);
  return { prefill, prefillEnd, isSure, kvBegin, kvEnd, chunks };
}

export const nameOf = (one) => `#${one.id.replace(/\.0$/, "")}`; // a choice after the first has its number, too

export const shortName = (id) => (id.length > 10 ? id.slice(0, 8) : id);

const ms = (seconds) => (seconds === null || seconds === undefined ? "\u2013" : seconds >= 10 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds * 1000)} ms`);

function bytes(count) {
  if (!count) return "0";
  const step = Math.min(4, Math.floor(Math.log2(count) / 10));
  return `${(count / 2 ** (10 * step)).toFixed(step ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][step]}`;
}

const ttft = (one) => (one.first_token === null ? null : one.first_token - one.arrived);

function itl(one) {
  const last = one.finished ?? one.tokensAt;
  return one.first_token === null || !last || one.output_tokens < 2 ? null : (last - one.first_token) / (one.output_tokens - 1);
}

const ENDS = { stop: "done", length: "done, at its length", left: "the client left" };
const STATES = { waiting: "waits", prompt: "reads the prompt", decoding: "decodes", finished: "done" };
const stateOf = (one) => (one.over === undefined ? STATES[one.state] : ENDS[one.end] ?? one.end);

function ofSequence(one) {
  const facts = [
    ["Request", nameOf(one)],
    ["State", stateOf(one)],
    ["TTFT", ms(ttft(one))],
    ["ITL", ms(itl(one))],
    ["Prompt", `${one.prompt_tokens} tokens`],
    ["Cached", `${one.cached_tokens}`],
    ["Out", `${one.output_tokens}`],
    ["Prefill", one.prefill ? `${shortName(one.prefill)}, ${ms(one.prefill_s)}` : "where it decodes"],
    ["Decode", one.decode ? shortName(one.decode) : "\u2013"],
    ["KV moved", one.prefill ? `${bytes(one.kv_bytes)}, ${ms(one.transfer_s)}` : "none"],
  ];
  if (one.output_tokens > one.output_steps) facts.push(["Tokens per step", (one.output_tokens / one.output_steps).toFixed(1)]);
  if (one.moves?.length) facts.push(["Moves", one.moves.map(([, , target]) => `to ${shortName(target)}`).join(", ")]);
  if (one.attempt > 1) facts.push(["Attempts", `${one.attempt}`]);
  if (one.prefill_failures) facts.push(["Prefill lost", `${one.prefill_failures}`]);
  if (one.preemptions) facts.push(["Preempted", `${one.preemptions}`]);
  return facts;
}

function ofTier(tier) {
  const held = tier.max_bytes ? `${bytes(tier.num_bytes)} of ${bytes(tier.max_bytes)}` : tier.num_bytes ? bytes(tier.num_bytes) : "";
  const found = tier.lookups ? `${Math.round((100 * tier.hits) / tier.lookups)} % of ${tier.lookups} found` : "not asked yet";
  return `${tier.name}: ${[held, found].filter(Boolean).join(", ")}`;
}

function ofWorker(one) {
  const { row } = one;
  const facts = [
    ["Worker", `${row.role} ${row.id}`],
    ["State", one.gone !== null ? "gone" : !row.reachable ? "not reached" : row.is_draining ? "draining" : row.ejected ? "left out" : "there"],
    ["Blocks", `${row.owned_blocks ?? 0} of ${row.total_blocks}`],
    ["Batch", `${row.num_running ?? 0} of ${row.max_batch}`],
    ["Queue", `${row.num_waiting ?? 0}, ${row.num_waiting_tokens ?? 0} tokens`],
    ["KV moved", bytes(row.transfer_bytes)],
    ["Read", `${row.computed_tokens ?? 0} tokens`],
    ["Written", `${row.generated_tokens ?? 0} tokens`],
  ];
  // All rows of the table have it or none has.
  if ([...workers.values()].some((each) => each.row.tiers)) facts.push(["KV tiers", row.tiers?.map(ofTier).join("; ") ?? "none"]);
  return facts;
}

/** What is looked at, as a list of facts. */
export function describe(list, one) {
  const facts = !one ? [] : one.worker ? ofWorker(one.worker) : ofSequence(one.sequence);
  const source = JSON.stringify(facts);
  if (list.dataset.source === source) return;
  list.dataset.source = source;
  if (!one) {
    const hint = document.createElement("div");
    hint.textContent = "Point at a lane or a worker, or choose one with the arrow keys.";
    return list.replaceChildren(hint);
  }
  list.replaceChildren(...facts.map(([name, value]) => {
    const fact = document.createElement("div");
    const [term, told] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = name;
    told.textContent = value;
    fact.append(term, told);
    return fact;
  }));
}

export function drawTables() {
  table(document.getElementById("workers"), [...workers.values()].map(ofWorker));
  table(document.getElementById("requests"), [...sequences.values()].slice(-64).reverse().map((one) => ofSequence(one).slice(0, 10)));
}

function table(target, rows) {
  const source = JSON.stringify(rows);
  if (target.dataset.source === source) return;
  target.dataset.source = source;
  const line = (kind, values) => {
    const made = document.createElement("tr");
    made.append(...values.map((value) => {
      const cell = document.createElement(kind);
      if (kind === "th") cell.scope = "col";
      cell.textContent = value;
      return cell;
    }));
    return made;
  };
  const body = document.createElement("tbody");
  if (rows.length) body.append(line("th", rows[0].map(([name]) => name)));
  body.append(...rows.map((row) => line("td", row.map(([, value]) => value))));
  target.querySelector("tbody")?.remove();
  target.append(body);
}
