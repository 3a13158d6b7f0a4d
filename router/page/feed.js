// The feed of what goes on (GET /events): sequences and workers as they are known here, and the server's clock.

import { ApiError, ask, events } from "./api.js";

const KEPT_S = 130; // of what is over: a little longer than the longest span that is shown

export const sequences = new Map(); // by router and id
export const workers = new Map(); // by id and epoch: the newest row, and `history`, [{at, row}]
export const state = { status: "connecting", sees: "all", hidden: 0, missed: 0, workersAt: 0 };

let offset = null; // of this page's clock to the router's
let heard = 0;

/** The router's clock now, in seconds, as far as it is known. */
export const now = () => (offset === null ? 0 : performance.now() / 1000 - offset);

let connection = null;

/** Listen for as long as the page is there. `changed` is called after every batch of news. */
export async function listen(changed) {
  for (let pause = 0; ; ) {
    connection = new AbortController();
    try {
      const response = await ask("events", { signal: connection.signal });
      let router = "";
      for await (const data of events(response)) {
        const event = JSON.parse(data);
        if (event.kind === "hello") {
          if (event.router !== state.router) offset = null;
          state.router = router = event.router;
          state.sees = event.sees;
        }
        hear(event, router);
        pause = 0;
        state.status = "live";
        changed();
      }
      pause = 0.05; // a connection has its end, and another one follows
    } catch (error) {
      state.status = error instanceof ApiError && error.status === 401 ? "key" : error instanceof ApiError && error.status === 429 ? "full" : "away";
      pause = Math.min(5, Math.max(0.3, pause * 2));
      changed();
    }
    await new Promise((resume) => setTimeout(resume, pause * 1000));
  }
}

/** Connect anew, as another key's owner. */
export function again() {
  sequences.clear();
  workers.clear();
  connection?.abort();
}

function hear(event, router) {
  const behind = performance.now() / 1000 - event.now;
  // The quickest message is the nearest to the truth; clocks that drift apart are followed slowly.
  offset = offset === null ? behind : Math.min(behind, offset + 0.0005);
  if (event.kind === "sequence") hearSequence(event, `${router}/${event.id}`);
  if (event.kind === "workers") hearWorkers(event);
  if (event.kind === "lagged") state.missed += event.missed;
  if (event.now - heard > 5 || event.now < heard) {
    heard = event.now;
    for (const [name, one] of sequences) if (one.over && one.over < event.now - KEPT_S) sequences.delete(name);
    for (const [name, one] of workers) {
      one.history = one.history.filter((each, at) => each.at > event.now - KEPT_S || at === one.history.length - 1);
      if (one.gone && one.gone < event.now - KEPT_S) workers.delete(name);
    }
  }
}

function hearSequence({ kind, now: at, id, ...news }, name) {
  let one = sequences.get(name);
  if (!one) sequences.set(name, (one = { name, id, ticks: [], faults: [], tokensAt: null }));
  const failed = (known) => Math.max(0, (known.attempt ?? 0) - 1 - (known.moves?.length ?? 0)); // a move is no fault
  if (one.attempt && failed({ ...one, ...news }) > failed(one)) one.faults.push(news.begun ?? at);
  if (news.prefill_failures > (one.prefill_failures ?? 0)) one.faults.push(at);
  const [before, stepsBefore] = [one.output_tokens ?? 0, one.output_steps ?? 0];
  Object.assign(one, news);
  if (one.output_tokens > before) {
    const from = one.tokensAt ?? one.first_token ?? at;
    const to = one.finished ?? at;
    one.ticks.push([from, Math.max(from, to), one.output_tokens - before, before === 0, one.output_steps - stepsBefore]);
    one.tokensAt = Math.max(from, to);
  }
  if (one.state === "over") one.over = one.finished ?? at;
}

function hearWorkers({ now: at, workers: rows, hidden }) {
  state.hidden = hidden;
  state.workersAt = at;
  const there = new Set();
  for (const row of rows) {
    const name = `${row.id} ${row.epoch}`;
    there.add(name);
    let one = workers.get(name);
    if (!one) workers.set(name, (one = { name, history: [], since: at, gone: null }));
    one.row = row;
    one.gone = null;
    one.history.push({ at, row });
  }
  for (const [name, one] of workers) if (!there.has(name)) one.gone ??= at;
}
