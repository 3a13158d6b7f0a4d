// Where the page starts: the model, the key, light and dark.

import { ApiError, ask, key } from "./api.js";
import * as chat from "./chat.js";
import * as feed from "./feed.js";
import * as lanes from "./lanes.js";

const at = (id) => document.getElementById(id);

// --- light and dark ---

const THEMES = ["auto", "light", "dark"];
function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  at("theme").textContent = `Theme: ${theme}`;
  localStorage.setItem("twostroke.theme", theme);
  lanes.recolour();
}
at("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(localStorage.getItem("twostroke.theme")) + 1) % THEMES.length]);
});
setTheme(THEMES.includes(localStorage.getItem("twostroke.theme")) ? localStorage.getItem("twostroke.theme") : "auto");

// --- the key ---

function wantKey(problem = "") {
  at("key").hidden = false;
  at("key-problem").textContent = key.get() ? problem : "";
  at("key-problem").hidden = !at("key-problem").textContent;
  at("key-value").value = "";
  if (!at("ask-key").open) at("ask-key").showModal();
}
at("key").addEventListener("click", () => wantKey());
at("ask-key").addEventListener("close", () => {
  if (at("ask-key").returnValue !== "use") return;
  key.set(at("key-value").value.trim());
  at("key-value").value = "";
  feed.again();
  hello();
});

// --- the model ---

async function hello() {
  try {
    const { data } = await (await ask("v1/models")).json();
    at("model").textContent = data[0].id;
    chat.serves(data[0]);
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) return wantKey(error.message);
    at("model").textContent = "the server can't be reached";
    setTimeout(hello, 2000);
  }
}

chat.start(wantKey);
lanes.start();
hello();
feed.listen(lanes.changed);
at("prompt").focus();
