// The server's API: fetch with the key, its errors as exceptions, its server-sent events as an async iterator.

const KEY = "twostroke.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class ApiError extends Error {
  constructor(status, error, retryAfter) {
    super(error.message ?? `status ${status}`);
    this.status = status;
    this.code = error.code ?? "";
    this.param = error.param ?? null;
    this.retryAfter = retryAfter;
  }
}

/** Ask the server. Throws ApiError for what it refuses, TypeError where it can't be reached. */
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: body ? "POST" : "GET", body: body && JSON.stringify(body), headers, signal, cache: "no-store",
  });
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw new ApiError(response.status, told.error ?? {}, response.headers.get("retry-after"));
}

/** The data of each server-sent event, until the stream ends. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    await reader.cancel().catch(() => {}); // whoever stops reading closes the connection
  }
}
