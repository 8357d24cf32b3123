// fetch with an Idempotency-Key that survives retries, and with a storage also the page. What an answer means is in
// retrying.js.

import { judge, judgeFailure, pause, Quota } from "./retrying.js";

const MINUTE = 60_000;
const FOLLOW_SECONDS = 1;
const METHODS = new Set(["POST", "PATCH"]);
const SAFE = new Set(["GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "CONNECT"]);
const NOT_OF_A_LOOK = ["expect", "prefer", "content-length", "content-type", "content-encoding"];
const WITHOUT_BODY = new Set([101, 204, 205, 304]);
const OPTIONS = new Set(
  ["hosts", "deadline", "retention", "storage", "header", "quoted", "followAccepted", "fetch"],
);
// Of Node. A browser tells nothing, so that a request may always have been sent.
const NOT_SENT = new Set(["ECONNREFUSED", "ENOTFOUND", "EAI_AGAIN", "EHOSTUNREACH", "ENETUNREACH", "UND_ERR_CONNECT_TIMEOUT"]);
const UNTRUSTED = /CERT|^UNABLE_TO_|ALTNAME/;

/** Each host's quota, shared by all functions of this program. */
const quotas = new Map();
const MAX_HOSTS = 1000;

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

export class IntentDiffers extends ClientError {}

export function idempotentFetch(options = {}) {
  const unknown = Object.keys(options).find((name) => !OPTIONS.has(name));
  if (unknown) throw new TypeError(`There is no option ${unknown}.`);
  const {
    hosts,
    deadline = 2 * MINUTE,
    retention = 24 * 60 * MINUTE,
    storage = memory(),
    header = "Idempotency-Key",
    quoted = false,
    followAccepted = true,
    fetch: given = globalThis.fetch,
  } = options;
  if (!(deadline > 0 && deadline < retention)) {
    throw new TypeError(
      `The deadline (${deadline} ms) must be above zero and shorter than the server's retention (${retention} ms): ` +
        "a try after it would be a new operation.",
    );
  }
  if (hosts !== undefined && (!Array.isArray(hosts) || hosts.some((host) => typeof host !== "string" || /[/@]/.test(host)))) {
    throw new TypeError("hosts is a list of names such as 'api.example.com' or 'localhost:8000'.");
  }
  const honoured = hosts && new Set(hosts.map((host) => host.toLowerCase()));
  const settings = { deadline, retention, storage, header, quoted, followAccepted, fetch: given };

  const send = async (input, init = {}) => {
    const { intent, ...rest } = init;
    const request = new Request(input, rest);
    const url = new URL(request.url);
    const isHonoured = !honoured || honoured.has(url.hostname) || honoured.has(url.host);
    const ownKey = request.headers.get(header);
    const isGuarded =
      isHonoured && !SAFE.has(request.method) && (METHODS.has(request.method) || ownKey !== null || intent !== undefined);
    if (intent !== undefined && (!isGuarded || typeof intent !== "string" || !intent.trim())) {
      throw new TypeError("An intent is a text, and is for a request with a key, to a host that honours keys.");
    }
    if (!isGuarded) return given(request);
    const body = await request.arrayBuffer();
    const operation = { request, body, intent, key: ownKey ?? newKey(quoted), inDoubt: false };
    if (intent !== undefined) await begin(operation, ownKey, settings);
    return tries(operation, settings);
  };
  send.forget = async (intent) => {
    await storage.removeItem(nameOf(intent));
  };
  return send;
}

async function begin(operation, ownKey, { storage, retention, deadline }) {
  const { intent, request, body } = operation;
  const digest = await digestOf(`${request.method} ${request.url}\n`, body);
  const stored = await storage.getItem(nameOf(intent));
  if (!stored) {
    const entry = { key: operation.key, digest, notAfter: Date.now() + retention - deadline };
    await storage.setItem(nameOf(intent), JSON.stringify(entry)); // Before the first byte leaves.
    return;
  }
  const entry = JSON.parse(stored);
  const about = { key: entry.key, intent };
  if (entry.digest !== digest || (ownKey !== null && ownKey !== entry.key)) {
    throw new IntentDiffers("Another request has this intent. Nothing was sent.", about);
  }
  if (Date.now() >= entry.notAfter) {
    throw new RequestOutcomeUnknown("This intent is past the server's retention, so it is not sent again.", about);
  }
  operation.key = entry.key;
  operation.inDoubt = true; // An earlier page may have sent it.
}

async function tries(operation, settings) {
  const end = now() + settings.deadline / 1000;
  const quota = quotaOf(new URL(operation.request.url).host);
  const about = (more) => ({ key: operation.key, intent: operation.intent, ...more });
  let { inDoubt } = operation;
  let where = null;
  for (let count = 0; ; ) {
    let got;
    try {
      got = await attempt(operation, settings, where, Math.max(end - now(), 0.05));
    } catch (error) {
      if ((!inDoubt && where === null) || operation.request.signal.aborted) throw error;
      throw new RequestOutcomeUnknown(UNKNOWN, about({ cause: error }));
    }
    let verdict = got.error ? judgeFailure(got.failure) : judge(got.status, got.headers, got.text, Date.now() / 1000);
    if (where !== null && isAboutTheLook(got, verdict)) verdict = { verdict: "retry", after: null, in_doubt: true, is_counted: true };
    if (verdict.verdict === "retry") {
      inDoubt ||= verdict.in_doubt || where !== null;
      where = null; // The request itself is sent again: it gets 202, or its answer, marked as a replay.
      count += 1;
      const wait = pause(count, verdict.after, Math.random());
      if (now() + wait >= end || (verdict.is_counted && !quota.spend(now()))) return givenUp(got, inDoubt, about);
      await sleep(wait, operation.request.signal);
    } else if (verdict.verdict === "follow") {
      const there = settings.followAccepted ? statusUrl(operation.request.url, verdict.location) : null;
      const wait = pause(1, verdict.after ?? FOLLOW_SECONDS, Math.random());
      if (there === null || now() + wait >= end) return got.response; // It is true: accepted, and not ended.
      where = there;
      await sleep(wait, operation.request.signal);
    } else if (verdict.verdict === "final") {
      quota.answered(now());
      return got.response;
    } else if (verdict.verdict === "unknown" || (got.status >= 400 && (inDoubt || where !== null))) {
      throw new RequestOutcomeUnknown(UNKNOWN, about({ response: got.response }));
    } else {
      return got.response;
    }
  }
}

/** Whether an answer at the status URL may be one to the look: no success, and not marked as the operation's. */
function isAboutTheLook(got, { verdict }) {
  if (got.error || (got.status >= 200 && got.status < 300) || got.status === 401) return false;
  if (verdict !== "final" && verdict !== "refused") return false;
  return (got.headers.get("idempotent-replayed") ?? "").trim().toLowerCase() !== "true";
}

const UNKNOWN =
  "It is not known whether this request took effect. Send it again with the same key, or look it up; with a new key " +
  "it may take effect twice.";

function givenUp(got, inDoubt, about) {
  if (inDoubt) throw new RequestOutcomeUnknown(UNKNOWN, about({ response: got.response, cause: got.error }));
  if (got.error) throw got.error;
  return got.response;
}

async function attempt({ request, body, key }, { fetch, header }, where, seconds) {
  const headers = new Headers(request.headers);
  const limit = AbortSignal.timeout(Math.max(1, Math.floor(seconds * 1000)));
  const shared = { credentials: request.credentials, signal: AbortSignal.any([request.signal, limit]) };
  if (request.mode && request.mode !== "navigate") shared.mode = request.mode;
  headers.set(header, key);
  let init = { ...shared, method: request.method, headers, redirect: request.redirect };
  if (body.byteLength) init.body = body;
  if (where !== null) {
    for (const name of [...NOT_OF_A_LOOK, header]) headers.delete(name);
    // Not followed: another host must not get what this one is sent.
    init = { ...shared, method: "GET", headers, redirect: "manual" };
  }
  try {
    return await whole(await fetch(where ?? request.url, init));
  } catch (error) {
    const code = String(error?.cause?.code ?? error?.code ?? "");
    if (request.signal.aborted || UNTRUSTED.test(code)) throw error;
    return { error, failure: NOT_SENT.has(code) ? "not sent" : "lost" };
  }
}

/** Read the whole answer, so that a connection that is lost on the way is not the caller's. */
async function whole(response) {
  const { status, headers } = response;
  const got = { status, headers, response, text: "" };
  if ((headers.get("content-type") ?? "").includes("text/event-stream") || response.type === "opaqueredirect") return got;
  const body = await response.arrayBuffer();
  got.response = new Response(WITHOUT_BODY.has(status) ? null : body, { status, statusText: response.statusText, headers });
  Object.defineProperty(got.response, "url", { value: response.url });
  if (status >= 300) got.text = new TextDecoder().decode(body);
  return got;
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
  };
}

function nameOf(intent) {
  return `semel:${intent}`;
}

function now() {
  return performance.now() / 1000;
}

function sleep(seconds, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", stop);
      resolve();
    }, seconds * 1000);
    if (signal.aborted) stop();
    else signal.addEventListener("abort", stop, { once: true });
  });
}
