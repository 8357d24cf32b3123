// fetch with an Idempotency-Key that survives retries, and with a storage also the page. What an answer means is in
// retrying.js.

import { judge, judgeFailure, judgeLook, looksSecret, pause, Quota } from "./retrying.js";

const MINUTE = 60_000;
// Milliseconds: a longer timer fires at once.
const MAX_TIMER = 2 ** 31 - 1;
const FOLLOW_SECONDS = 1;
const METHODS = new Set(["POST", "PATCH"]);
const SAFE = new Set(["GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "CONNECT"]);
const NOT_OF_A_LOOK = ["expect", "prefer", "content-length", "content-type", "content-encoding"];
// How a request is sent, as far as a Request tells.
const OF_A_REQUEST = ["mode", "credentials", "cache", "referrer", "referrerPolicy", "integrity", "keepalive"];
const CHALLENGES = new Set([401, 407]);
// Of which fetch makes a GET.
const TO_A_RESULT = new Set([301, 302, 303]);
const REDIRECTS = new Set([...TO_A_RESULT, 307, 308]);
const MAX_REDIRECTS = 20;
const PREFIX = "semel:";
const DAY = 24 * 60 * MINUTE;
// Milliseconds from when it can't be sent any more until an intent is forgotten, as in the journal of Python.
const KEEP = 90 * DAY;
const WITHOUT_BODY = new Set([101, 204, 205, 304]);
const OPTIONS = new Set(
  ["hosts", "deadline", "tryTimeout", "retention", "storage", "header", "quoted", "followAccepted", "fetch"],
);
// Of Node. A browser tells nothing, so that a request may always have been sent.
const NOT_SENT = new Set(["ECONNREFUSED", "ENOTFOUND", "EAI_AGAIN", "EHOSTUNREACH", "ENETUNREACH", "UND_ERR_CONNECT_TIMEOUT"]);
const UNTRUSTED = /CERT|^UNABLE_TO_|ALTNAME/;

/** Each host's quota, shared by all functions of this program. */
const quotas = new Map();
const MAX_HOSTS = 1000;
/** Keys of operations that may have taken effect: the program may send them again, with the key of the error. */
const doubted = new Set();
const MAX_DOUBTED = 1000;

export class ClientError extends Error {
  constructor(message, { key, intent, response, cause } = {}) {
    super(key ? `${message} Its key is ${key}.` : message, { cause });
    this.name = this.constructor.name;
    this.key = key;
    this.intent = intent;
    this.response = response;
  }
}

export class RequestOutcomeUnknown extends ClientError {}

export class RedirectRefused extends ClientError {}

export class IntentDiffers extends ClientError {}

export function idempotentFetch(options = {}) {
  const unknown = Object.keys(options).find((name) => !OPTIONS.has(name));
  if (unknown) throw new TypeError(`There is no option ${unknown}.`);
  const {
    hosts,
    deadline = 2 * MINUTE,
    tryTimeout = MINUTE / 2,
    retention = 24 * 60 * MINUTE,
    storage = memory(),
    header = "Idempotency-Key",
    quoted = false,
    followAccepted = true,
    fetch: given = globalThis.fetch,
  } = options;
  for (const [name, time] of Object.entries({ deadline, tryTimeout, retention })) {
    if (typeof time !== "number" || !(time > 0)) {
      const said = typeof time === "string" ? `"${time}"` : String(time);
      throw new TypeError(`${name} is a number of milliseconds above zero, not ${said}.`);
    }
  }
  if (deadline >= retention) {
    throw new TypeError(
      `The deadline (${deadline} ms) must be shorter than the server's retention (${retention} ms): ` +
        "a try after it would be a new operation.",
    );
  }
  if (hosts !== undefined && (!Array.isArray(hosts) || hosts.some((host) => typeof host !== "string" || /[/@]/.test(host)))) {
    throw new TypeError("hosts is a list of names such as 'api.example.com' or 'localhost:8000'.");
  }
  const honoured = hosts && new Set(hosts.map((host) => host.toLowerCase()));
  const settings = { deadline, tryTimeout, retention, storage, header, followAccepted, fetch: given };
  let tidiedAt = -Infinity;

  const send = async (input, init = {}) => {
    const { intent, ...rest } = init;
    const request = new Request(input, rest);
    const url = new URL(request.url);
    const isHonoured = !honoured || honoured.has(url.hostname) || honoured.has(url.host);
    const ownKey = request.headers.get(header) || null; // An empty key is none: a server may run what has one each time.
    const isGuarded =
      isHonoured && !SAFE.has(request.method) && (METHODS.has(request.method) || ownKey !== null || intent !== undefined);
    if (intent !== undefined && (!isGuarded || typeof intent !== "string" || !intent.trim())) {
      throw new TypeError("An intent is a text, and is for a request with a key, to a host that honours keys.");
    }
    // As it came: another library's fetch does not know this Request.
    if (!isGuarded) return input instanceof Request ? given(request) : given(input, rest);
    const signal = rest.signal === undefined ? input.signal : rest.signal;
    const body = await limited(signal, null, () => request.arrayBuffer());
    const operation = {
      request,
      // Held: its signal follows the caller's as long as it is not collected as garbage.
      input,
      said: saidOf(input, rest),
      signal,
      elapsed: stopwatch(),
      url: request.url,
      headers: new Headers(request.headers),
      body,
      intent,
      key: ownKey ?? newKey(quoted),
      wasSent: doubted.has(`${url.origin} ${ownKey}`),
    };
    if (intent !== undefined) {
      await fixBoundary(operation);
      const digest = await digestOf(`${request.method} ${request.url}\n`, operation.body);
      try {
        if (now() - tidiedAt > DAY / 1000) (tidiedAt = now()), void tidy(storage);
        await limited(signal, deadline, () => alone(nameOf(intent), () => begin(operation, digest, ownKey, settings)));
      } catch (cause) {
        if (cause instanceof ClientError || signal?.aborted) throw cause;
        throw new ClientError(`The storage of keys has failed (${cause}). Nothing was sent.`, { intent, cause });
      }
    }
    return tries(operation, settings);
  };
  send.forget = async (intent) => {
    await alone(nameOf(intent), () => storage.removeItem(nameOf(intent)));
  };
  return send;
}

function saidOf(input, init) {
  const read = input instanceof Request ? OF_A_REQUEST.filter((name) => input[name] !== undefined) : [];
  const said = { ...Object.fromEntries(read.map((name) => [name, input[name]])), ...init };
  if (said.mode === "navigate") delete said.mode;
  return said;
}

/** The last of those that wait for a name, in this program. */
const turns = new Map();

/** Do some work while no other does it under the same name: in this program, and in other tabs as far as there are locks. */
async function alone(name, work) {
  const before = turns.get(name);
  const turn = (async () => {
    await before?.catch(() => {});
    let isBegun = false;
    const begun = () => ((isBegun = true), work());
    try {
      return await (globalThis.navigator?.locks?.request(name, begun) ?? begun());
    } catch (error) {
      if (isBegun) throw error;
      return await work(); // This page may not use locks.
    }
  })();
  turns.set(name, turn);
  try {
    return await turn;
  } finally {
    if (turns.get(name) === turn) turns.delete(name);
  }
}

async function begin(operation, digest, ownKey, { storage, retention, deadline }) {
  const { intent } = operation;
  const name = nameOf(intent);
  let stored = await storage.getItem(name);
  if (!stored) {
    const forgottenAt = Date.now() + retention;
    const text = JSON.stringify({ key: operation.key, digest, notAfter: forgottenAt - deadline, forgottenAt });
    // Before the first byte leaves. What is read back may be another tab's, where there are no locks.
    // A page's storage shows what is in it as its properties, too.
    if (typeof storage.addItem !== "function") await storage.setItem(name, text);
    else if (await storage.addItem(name, text)) return;
    stored = await storage.getItem(name);
    if (stored === text) return;
    if (!stored) throw new ClientError("The storage has not kept the key. Nothing was sent.", { intent });
  }
  const entry = entryOf(stored);
  if (entry === null) {
    throw new ClientError(`The storage has something else under ${name}. Nothing was sent. Give it a prefix of its own.`, { intent });
  }
  const about = { key: entry.key, intent };
  if (entry.digest !== digest || (ownKey !== null && ownKey !== entry.key)) {
    throw new IntentDiffers("Another request has this intent. Nothing was sent.", about);
  }
  // Another page may have had a shorter deadline.
  if (Date.now() >= entry.notAfter || Date.now() + deadline > entry.forgottenAt) {
    throw new RequestOutcomeUnknown("This intent is past the server's retention, so it is not sent again.", about);
  }
  operation.key = entry.key;
  operation.wasSent = true; // By an earlier page, perhaps.
}

function entryOf(text) {
  try {
    const entry = JSON.parse(text);
    return typeof entry.key === "string" && typeof entry.digest === "string" && entry.notAfter > 0 ? entry : null;
  } catch {
    return null;
  }
}

/** Remove entries that are long past their time, as far as the storage can list them. */
async function tidy(storage) {
  try {
    for (const name of await namesIn(storage)) {
      const isOld = async () => entryOf(await storage.getItem(name))?.notAfter < Date.now() - KEEP;
      if (name.startsWith(PREFIX) && (await isOld())) {
        await alone(name, async () => (await isOld()) && storage.removeItem(name));
      }
    }
  } catch {
    // It can be tidied another time, and may still take a key.
  }
}

async function namesIn(storage) {
  if (typeof storage.names === "function") return [...(await storage.names())];
  return typeof storage.key === "function" ? Array.from({ length: storage.length }, (_, index) => storage.key(index)) : [];
}

async function tries(operation, settings) {
  const { request, signal, elapsed } = operation;
  const end = settings.deadline / 1000;
  const left = () => Math.max(end - elapsed(), 0.05);
  const quota = quotaOf(new URL(request.url).host);
  const about = (more) => ({ key: operation.key, intent: operation.intent, ...more });
  /** Whether a try of this call may have taken effect. */
  let isOpen = false;
  let where = null;
  let hops = 0;
  let got = null;
  const unknown = (more) => {
    if (doubted.size >= MAX_DOUBTED) doubted.delete(doubted.values().next().value);
    doubted.add(`${new URL(request.url).origin} ${operation.key}`);
    return new RequestOutcomeUnknown(UNKNOWN, about(more));
  };
  /** What is known in the end: an answer, if nothing can have happened. */
  const givenUp = () => {
    // Without a try, another program may have sent it since its key was written down.
    if (isOpen || operation.wasSent || got === null) throw unknown({ response: got?.response, cause: got?.error });
    if (got.failure) throw got.error;
    return got.response;
  };
  for (let count = 0; ; ) {
    const inDoubt = isOpen || operation.wasSent;
    if (signal?.aborted) throw inDoubt || where !== null ? unknown({ cause: signal.reason }) : signal.reason;
    // The program was stopped, or its machine slept: by now the server may have forgotten the key.
    if (where === null && (count > 0 || operation.intent !== undefined) && elapsed() >= end) return givenUp();
    try {
      got = await attempt(operation, settings, where, left());
    } catch (error) {
      if (signal?.aborted) throw unknown({ cause: signal.reason }); // The server may have the request.
      if (!inDoubt && where === null) throw error;
      throw unknown({ cause: error });
    }
    if (got.response?.type === "opaqueredirect" && where === null && request.redirect !== "manual") {
      if (request.redirect === "error") throw new RedirectRefused(NOT_WANTED, about({ response: got.response }));
      // A browser does not say where to. Sent again, the server says the same, and the browser follows.
      operation.isFollowedByBrowser = true;
      continue;
    }
    // What the browser came to may be a login: it says nothing of an earlier try.
    if (operation.isFollowedByBrowser && inDoubt && got.response?.redirected) throw unknown({ response: got.response });
    const verdict = judged(got, where, request.method, inDoubt);
    if (verdict.verdict === "retry") {
      isOpen ||= verdict.in_doubt || where !== null;
      where = null; // The request itself is sent again: it gets 202, or its answer, marked as a replay.
      count += 1;
      const wait = pause(count, verdict.after, Math.random());
      if (elapsed() + wait >= end || (verdict.is_counted && !quota.spend(now()))) return givenUp();
      if (got.isHandedOver) got.response.body?.cancel().catch(() => {}); // It is not read: its connection would stay.
      await sleep(wait, signal);
    } else if (verdict.verdict === "follow") {
      if (verdict.location !== null) where = settings.followAccepted ? statusUrl(operation.url, verdict.location) : null;
      const wait = pause(1, verdict.after ?? FOLLOW_SECONDS, Math.random());
      if (where === null || elapsed() + wait >= end) return got.response; // It is true: accepted, and not ended.
      await sleep(wait, signal);
    } else if (verdict.verdict === "moved") {
      if (request.redirect === "manual") return got.response;
      hops += 1;
      const there = redirected(operation, got.response, hops);
      if (there.refused && inDoubt) throw unknown({ response: got.response, cause: new RedirectRefused(there.refused) });
      if (there.refused) throw new RedirectRefused(there.refused, about({ response: got.response }));
      operation.url = there.url;
    } else if (verdict.verdict === "final") {
      quota.answered(now());
      if (!TO_A_RESULT.has(got.status)) return got.response;
      try {
        return await resultOf(operation, got.response, settings, left, about);
      } catch (error) {
        if (error instanceof ClientError) throw error;
        throw unknown({ response: got.response, cause: error }); // It is done, and its result was not seen.
      }
    } else if (verdict.verdict === "unknown") {
      throw unknown({ response: got.response });
    } else {
      const isChallenge = CHALLENGES.has(got.status) && !isOpen && where === null;
      if ((inDoubt || where !== null) && !isChallenge) throw unknown({ response: got.response });
      return got.response;
    }
  }
}

function judged(got, where, method, inDoubt) {
  if (got.failure) return judgeFailure(got.failure);
  const moment = Date.now() / 1000;
  if (where !== null) return judgeLook(got.status, got.headers, got.text(), moment);
  return judge(got.status, got.headers, got.text(), moment, { method, inDoubt });
}

/** Where the same request is to be sent, with the same key: nowhere but on the same origin. */
function redirected({ request, url }, response, hops) {
  if (request.redirect === "error") return { refused: NOT_WANTED };
  if (hops > MAX_REDIRECTS) return { refused: TOO_OFTEN };
  const there = placeOf(url, response);
  return there !== null && there.origin === new URL(url).origin ? { url: there.href } : { refused: ELSEWHERE };
}

/** Get the result that a redirect leads to, as fetch would: without the key, and elsewhere without credentials. */
async function resultOf(operation, response, settings, left, about) {
  const { request } = operation;
  const headers = headersOfALook(request.headers, settings.header);
  let url = operation.url;
  for (let hops = 1; ; hops += 1) {
    const there = REDIRECTS.has(response.status) ? placeOf(url, response) : null;
    if (there === null || request.redirect === "manual") return response;
    if (request.redirect === "error") throw new RedirectRefused(NOT_WANTED, about({ response }));
    if (hops > MAX_REDIRECTS) throw new RedirectRefused(TOO_OFTEN, about({ response }));
    if (there.origin !== new URL(url).origin) [...headers.keys()].filter(looksSecret).forEach((name) => headers.delete(name));
    url = there.href;
    const init = { method: "GET", headers, redirect: "manual", body: undefined };
    response = (await ask(operation, settings, url, init, left(), true)).response;
  }
}

function placeOf(url, response) {
  const location = response.headers.get("location");
  if (location === null || !URL.canParse(location, url)) return null;
  const there = new URL(location, url);
  return /^https?:$/.test(there.protocol) ? there : null;
}

const TOO_OFTEN = "This request was redirected too often.";
const NOT_WANTED = 'This request was redirected, and has redirect: "error".';
const ELSEWHERE =
  "This request was redirected to another origin, which may know nothing of its key. It was not sent there; change its URL.";
const UNKNOWN =
  "It is not known whether this request took effect. Send it again with the same key, or look it up; with a new key " +
  "it may take effect twice.";

async function attempt(operation, settings, where, seconds) {
  const { request, body, key, url } = operation;
  const headers = new Headers(operation.headers);
  headers.set(settings.header, key);
  // Redirects are followed here, if the platform shows them: not to other hosts, and with the body.
  const redirect = operation.isFollowedByBrowser ? "follow" : "manual";
  let init = { method: request.method, headers, redirect, body: request.body === null ? undefined : body };
  if (where !== null) {
    // Not followed: another host must not get what this one is sent.
    init = { method: "GET", headers: headersOfALook(headers, settings.header), redirect: "manual", body: undefined };
  }
  try {
    return await ask(operation, settings, where ?? url, init, seconds, url !== request.url);
  } catch (error) {
    const code = String(error?.cause?.code ?? error?.code ?? "");
    if (operation.signal?.aborted || UNTRUSTED.test(code)) throw error;
    return { error, failure: NOT_SENT.has(code) ? "not sent" : "lost" };
  }
}

/** Of a stream that was handed over, the Request with the signal that ends it: as long as the stream is used. */
const held = new WeakMap();

/** Send one request in the way that the caller has said, and read its answer. */
async function ask({ request, input, said, signal }, { fetch, tryTimeout }, url, init, seconds, isRedirected) {
  // A Request may have what it does not tell, such as undici's dispatcher.
  const target = input instanceof Request && url === request.url ? request : url;
  const got = await limited(signal, Math.min(Math.max(1, seconds * 1000), tryTimeout), async (limit) =>
    whole(await fetch(target, { ...said, ...init, signal: limit }), isRedirected),
  );
  if (got.isHandedOver && got.response.body) held.set(got.response.body, input);
  return got;
}

/**
 * Do some work until its time is over, in milliseconds, or the caller aborts. What limits it is held here: fetch holds
 * its signal weakly, and one that was collected as garbage ends nothing.
 */
async function limited(signal, time, work) {
  signal?.throwIfAborted();
  const controller = new AbortController();
  let stop;
  const stopped = new Promise((_, reject) => (stop = (reason) => (controller.abort(reason), reject(reason))));
  const late = () => stop(new DOMException("No answer came in time.", "TimeoutError"));
  const timer = time !== null && setTimeout(late, Math.min(time, MAX_TIMER));
  const abort = () => stop(signal.reason);
  signal?.addEventListener("abort", abort);
  let got = null;
  try {
    got = await Promise.race([work(controller.signal), stopped]);
    return got;
  } finally {
    clearTimeout(timer);
    if (!got?.isHandedOver) signal?.removeEventListener("abort", abort);
  }
}

function headersOfALook(headers, header) {
  const kept = new Headers(headers);
  for (const name of [...NOT_OF_A_LOOK, header]) kept.delete(name);
  return kept;
}

/** Read the whole answer, so that a connection that is lost on the way is not the caller's. */
async function whole(response, isRedirected = false) {
  const { status, headers } = response;
  const got = { status, headers, response, text: () => "" };
  got.isHandedOver = (headers.get("content-type") ?? "").includes("text/event-stream");
  if (got.isHandedOver || response.type === "opaqueredirect") return got;
  const body = await response.arrayBuffer();
  got.response = new Response(WITHOUT_BODY.has(status) ? null : body, { status, statusText: response.statusText, headers });
  Object.defineProperty(got.response, "url", { value: response.url });
  Object.defineProperty(got.response, "redirected", { value: isRedirected || response.redirected });
  got.text = () => new TextDecoder().decode(body);
  return got;
}

/** Give a form a boundary that follows from its content: made anew, the same form has the same bytes. */
async function fixBoundary(operation) {
  const [, boundary] = /^multipart\/form-data;.*\bboundary="?([^";]+)"?/i.exec(operation.headers.get("content-type") ?? "") ?? [];
  if (boundary === undefined) return;
  const fixed = `semel-${await digestOf("", await replaced(operation.body, boundary, ""))}`;
  operation.body = await replaced(operation.body, boundary, fixed);
  operation.headers.set("content-type", `multipart/form-data; boundary=${fixed}`);
}

async function replaced(body, before, after) {
  const bytes = new Uint8Array(body);
  const [from, to] = [before, after].map((text) => new TextEncoder().encode(`--${text}`));
  const parts = [];
  let start = 0;
  for (let at = bytes.indexOf(from[0]); at !== -1; at = bytes.indexOf(from[0], at)) {
    if (from.every((byte, index) => bytes[at + index] === byte)) {
      parts.push(bytes.subarray(start, at), to);
      at = start = at + from.length;
    } else {
      at += 1;
    }
  }
  return new Blob([...parts, bytes.subarray(start)]).arrayBuffer();
}

function statusUrl(url, location) {
  if (!URL.canParse(location, url)) return null;
  const there = new URL(location, url);
  // Another origin must not get what this one is sent: credentials.
  return there.origin === new URL(url).origin ? there.href : null;
}

function newKey(isQuoted) {
  const key = crypto.randomUUID();
  return isQuoted ? `"${key}"` : key;
}

function quotaOf(host) {
  let quota = quotas.get(host);
  if (!quota) {
    if (quotas.size >= MAX_HOSTS) quotas.delete(quotas.keys().next().value);
    quotas.set(host, (quota = new Quota(now())));
  }
  return quota;
}

async function digestOf(head, body) {
  const first = new TextEncoder().encode(head);
  const all = new Uint8Array(first.length + body.byteLength);
  all.set(first);
  all.set(new Uint8Array(body), first.length);
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", all));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function memory() {
  const kept = new Map();
  return {
    getItem: (name) => kept.get(name) ?? null,
    setItem: (name, text) => void kept.set(name, text),
    removeItem: (name) => void kept.delete(name),
    names: () => kept.keys(),
  };
}

function nameOf(intent) {
  return PREFIX + intent;
}

function now() {
  return performance.now() / 1000;
}

/** Count the seconds from now on, by the clock that says most: one stands still asleep, the other may be set back. */
function stopwatch() {
  const [steady, today] = [performance.now(), Date.now()];
  return () => Math.max(performance.now() - steady, Date.now() - today) / 1000;
}

/** Wait for so long, or until the caller aborts. */
function sleep(seconds, signal) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, Math.min(seconds * 1000, MAX_TIMER));
    signal?.addEventListener("abort", end);
    if (signal?.aborted) end();
  });
}
