// Talking to the model: a conversation that is kept in memory alone, its settings, and the answer as it streams.

import { ApiError, ask, events } from "./api.js";
import { show } from "./markdown.js";
import { run as runTool, tools } from "./tools.js";

const MOST_ROUNDS = 8; // of tool calls, before the page stops asking
const NUMBERS = ["temperature", "top_p", "top_k", "max_completion_tokens", "seed"];
const at = (id) => document.getElementById(id);

let model = "";
let messages = []; // {role, content, tool_calls?, tool_call_id?}, and what only the page knows under `_`
let running = null; // the AbortController of the answer under way
let onKeyWanted = () => {};

/** Set the composer going; `wantsKey` is called where the server asks for another API key. */
export function start(wantsKey) {
  onKeyWanted = wantsKey;
  const prompt = at("prompt");
  at("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  prompt.addEventListener("input", () => fit(prompt));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
  at("stop").addEventListener("click", stop);
  at("new").addEventListener("click", () => { stop(); messages = []; draw(); tell(""); prompt.focus(); });
  at("tune").addEventListener("click", () => {
    at("settings").hidden = !at("settings").hidden;
    at("tune").setAttribute("aria-expanded", String(!at("settings").hidden));
  });
  at("reset").addEventListener("click", () => { for (const one of fields()) one.type === "checkbox" ? (one.checked = false) : (one.value = ""); tuned(); });
  at("settings").addEventListener("input", tuned);
  at("curl").addEventListener("click", (event) => {
    const body = request(prompt.value.trim() ? [...messages, { role: "user", content: prompt.value.trim() }] : messages);
    if (body) copy(event.currentTarget, curl(body));
  });
}

/** The model, as /v1/models tells it: its own settings stand where nothing else is set. */
export function serves(card) {
  model = card.id;
  const own = card.sampling_defaults ?? {};
  const usual = { temperature: 1, top_p: 1, top_k: "off" };
  for (const name of ["temperature", "top_p", "top_k"]) at(name).placeholder = own[name] ?? usual[name];
  at("max_completion_tokens").placeholder = card.max_model_len ? `up to ${card.max_model_len}` : "";
}

const fields = () => at("settings").querySelectorAll("input, textarea");

function tuned() {
  const count = [...fields()].filter((one) => (one.type === "checkbox" ? one.checked : one.value.trim())).length;
  at("tuned").textContent = count ? ` (${count})` : "";
  schema();
}

/** The schema that the answer is to follow; undefined: none. What is no JSON is told, and null is returned. */
function schema() {
  const text = at("schema").value.trim();
  let problem = "";
  let value;
  try {
    if (text) value = JSON.parse(text);
  } catch (error) {
    problem = `This is no JSON: ${error.message}`;
    value = null;
  }
  at("schema-problem").textContent = problem;
  at("schema-problem").hidden = !problem;
  at("schema").setAttribute("aria-invalid", String(Boolean(problem)));
  return value;
}

/** The request's body; null where a setting is wrong, which is shown. */
function request(conversation) {
  const wanted = schema();
  const wrong = wanted === null ? at("schema") : NUMBERS.map(at).find((one) => !one.validity.valid);
  if (wrong) {
    at("settings").hidden = false;
    at("tune").setAttribute("aria-expanded", "true");
    wrong.focus();
    wrong.reportValidity();
    return null;
  }
  const system = at("system").value.trim();
  const body = {
    model: model || undefined, // not known yet: the server serves one
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation.map(bare)],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of NUMBERS) if (at(name).value !== "") body[name] = Number(at(name).value);
  if (wanted !== undefined) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: wanted } };
  }
  const chosen = Object.entries(tools).filter(([name]) => at(`tool-${name}`).checked);
  if (chosen.length) {
    body.tools = chosen.map(([name, { description, parameters }]) => ({ type: "function", function: { name, description, parameters } }));
  }
  return body;
}

const bare = (message) => Object.fromEntries(Object.entries(message).filter(([name]) => !name.startsWith("_")));

function send() {
  const text = at("prompt").value.trim();
  if (!text || running) return;
  const next = [...messages, { role: "user", content: text }];
  if (!request(next)) return;
  messages = next;
  at("prompt").value = "";
  fit(at("prompt"));
  answer();
}

function stop() {
  running?.abort();
}

/** Let the model answer once more what it was asked last. */
function regenerate() {
  if (running) return;
  while (messages.length && messages.at(-1).role !== "user") messages.pop();
  if (messages.length) answer();
}

async function answer() {
  const controller = (running = new AbortController());
  tell("");
  busy(true);
  try {
    for (let round = 0; round < MOST_ROUNDS; round++) {
      const body = request(messages);
      if (!body) return;
      const message = { role: "assistant", content: "", _reasoning: "", _state: "asking" };
      messages.push(message);
      draw();
      await stream(body, message, controller.signal);
      if (!message.tool_calls?.length || message._finish !== "tool_calls") return;
      for (const call of message.tool_calls) {
        const content = runTool(call.function.name, call.function.arguments);
        messages.push({ role: "tool", tool_call_id: call.id, content });
      }
      draw();
    }
    tell(`The model called tools ${MOST_ROUNDS} times in a row: ask again to let it go on.`);
  } finally {
    running = null;
    busy(false);
    draw();
  }
}

/** Ask, and fill `message` while its answer comes. Whatever goes wrong is shown, and never thrown. */
async function stream(body, message, signal) {
  const began = performance.now();
  try {
    const response = await ask("v1/chat/completions", { body, signal });
    message._label = response.headers.get("x-request-id");
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(200, chunk.error);
      if (chunk.usage) message._usage = chunk.usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      const delta = choice.delta;
      const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
      if ((delta.content || reasoning || delta.tool_calls) && !message._first) message._first = performance.now() - began;
      message.content += delta.content ?? "";
      message._reasoning += reasoning;
      for (const part of delta.tool_calls ?? []) add(message, part);
      if (choice.finish_reason) message._finish = choice.finish_reason;
      message._state = "streaming";
      soon(message);
    }
    message._state = "done";
  } catch (error) {
    if (signal.aborted) message._state = "stopped";
    else failed(message, error);
  }
  message._took = performance.now() - began;
}

function add(message, part) {
  message.tool_calls ??= [];
  const call = (message.tool_calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  if (part.id) call.id = part.id;
  call.function.name += part.function?.name ?? "";
  call.function.arguments += part.function?.arguments ?? "";
}

function failed(message, error) {
  message._state = "failed";
  if (!message.content && !message.tool_calls) messages.splice(messages.indexOf(message), 1);
  const known = error instanceof ApiError;
  if (known && error.status === 401) onKeyWanted(error.message);
  const again = known && error.retryAfter ? ` (try again in ${error.retryAfter} s)` : "";
  tell(known ? `${error.message}${again}` : "The server can't be reached.", () => regenerate());
}

// --- what is seen ---

function busy(is) {
  at("stop").hidden = !is;
  at("send").hidden = is;
  at("log").setAttribute("aria-busy", String(is)); // read out once it is whole
  if (!is && document.activeElement === document.body) at("prompt").focus();
}

function tell(text, again) {
  const problem = at("problem");
  problem.replaceChildren(text);
  if (again) problem.append(" ", button("Try again", () => again()));
  problem.hidden = !text;
}

function fit(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 220)}px`;
}

let drawing = 0;
function soon(message) {
  drawing ||= requestAnimationFrame(() => { drawing = 0; fill(message); });
}

function draw() {
  const log = at("log");
  for (const one of [...log.querySelectorAll("article")]) if (!messages.some((message) => message._element === one)) one.remove();
  at("empty").hidden = messages.length > 0;
  for (const message of messages) {
    if (!message._element) {
      message._element = element("article", `message ${message.role}`);
      log.append(message._element);
    }
    fill(message);
  }
}

function fill(message) {
  const whole = message._element;
  const log = at("log");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  if (!whole.firstChild) {
    const names = { user: "You", assistant: model || "Model", tool: "Tool" };
    whole.append(element("h3", "", names[message.role]), element("div", "text"), element("footer", "row"));
  }
  const text = whole.querySelector(".text");
  if (message.role === "assistant") {
    thoughts(whole, message);
    show(text, message.content);
    calls(whole, message);
    whole.classList.toggle("asking", message._state === "asking" && !message.content);
    footer(whole.querySelector("footer"), message);
  } else if (message.role === "tool") {
    text.replaceChildren(element("code", "", message.content));
  } else {
    text.textContent = message.content;
  }
  if (follows) log.scrollTop = log.scrollHeight;
}

function thoughts(whole, message) {
  let folded = whole.querySelector("details");
  if (!message._reasoning) return;
  if (!folded) {
    folded = element("details", "thoughts");
    folded.append(element("summary", "", "Thoughts"), element("div"));
    whole.querySelector(".text").before(folded);
  }
  folded.lastChild.textContent = message._reasoning;
}

function calls(whole, message) {
  if (!message.tool_calls) return;
  if (!whole.querySelector(".calls")) whole.querySelector("footer").before(element("div", "calls"));
  const shown = whole.querySelector(".calls");
  shown.replaceChildren(...message.tool_calls.map((call) => element("code", "", `${call.function.name}(${call.function.arguments})`)));
}

function footer(place, message) {
  if (message._state === "asking" || message._state === "streaming") return place.replaceChildren();
  const is_last = messages.at(-1) === message;
  const facts = element("span", "facts", told(message));
  const made = [facts, element("span", "spacer")];
  if (message.content) made.push(button("Copy", (event) => copy(event.currentTarget, message.content)));
  if (is_last && !running) made.push(button("Regenerate", regenerate));
  place.replaceChildren(...made);
}

function told(message) {
  const parts = [];
  const usage = message._usage;
  if (message._state === "stopped") parts.push("stopped");
  if (message._state === "failed") parts.push("broken off");
  if (message._finish === "length") parts.push("cut at its length");
  if (usage) {
    parts.push(`${usage.completion_tokens} tokens`);
    const seconds = (message._took - message._first) / 1000;
    if (seconds > 0.05 && usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)}/s`);
  }
  if (message._first) parts.push(`first after ${Math.round(message._first)} ms`);
  if (usage?.prompt_tokens_details?.cached_tokens) parts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached`);
  return parts.join(" \u00b7 ");
}

function element(name, kind = "", text = "") {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text) made.textContent = text;
  return made;
}

function button(text, act) {
  const made = element("button", "quiet", text);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

/** The request as a command for a shell. The key is not in it. */
function curl(body) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const url = new URL("v1/chat/completions", location.href);
  const key = at("key").hidden ? "" : ` \\\n  -H "Authorization: Bearer $API_KEY"`;
  return `curl -N ${url} \\\n  -H 'content-type: application/json'${key} \\\n  -d '${quoted}'\n`;
}

async function copy(on, text) {
  const before = on.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // there is no clipboard without TLS, but on this very machine
    const area = element("textarea", "hidden");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    on.focus();
  }
  on.textContent = "Copied";
  setTimeout(() => { on.textContent = before; }, 1200);
}
