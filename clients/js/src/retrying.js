// What a client does about an answer, or about none. It sends nothing. The cases are in ../../vectors.json, and the
// table is that of src/semel/core/retrying.py: change both.

const FIRST_PAUSE = 0.1;
const MAX_PAUSE = 10;
const SPREAD = 0.1;
const MAX_RETRY_AFTER = 86_400 * 366;

const QUOTA_RETRIES = 10;
const QUOTA_PER_ANSWER = 0.1;
const QUOTA_SECONDS = 30;

const CODES = {
  "idempotency-key-in-progress": "busy",
  idempotency_key_in_use: "busy",
  lock_timeout: "later",
  "request-body-incomplete": "later",
  "no-effect": "later",
  "shutting-down": "later",
  "store-unavailable": "later",
  "upstream-unreachable": "later",
  "answer-not-stored": "doubt",
  "operation-unfinished": "doubt",
  "upstream-lost": "doubt",
  "upstream-timeout": "doubt",
  "idempotency-key-expired": "unknown",
  "operation-abandoned": "unknown",
  "operation-expired": "unknown",
  "operation-not-found": "unknown",
  "outcome-unknown": "unknown",
  "operation-failed": "answer",
  "response-not-replayable": "answer",
  "idempotency-key-reused": "final",
  "idempotency-key-invalid": "refused",
  "idempotency-key-missing": "refused",
  "idempotency-scope-missing": "refused",
  "identity-refused": "refused",
  "request-ambiguous": "refused",
  "request-body-too-large": "refused",
  "unauthenticated": "refused",
};
const STATUSES = { 307: "refused", 308: "refused", 408: "doubt", 425: "later", 429: "later", 501: "final", 505: "final" };
const NOT_ABOUT_THE_OPERATION = new Set([304, 401, 405, 407, 413, 415, 416, 421]);
// Redirects that leave the method and the body as they are. For POST, the first two make a GET of it.
const MOVED = new Set([301, 302, 307, 308]);
const MOVED_FOR_POST = new Set([307, 308]);
// After a try that is in doubt, too: only the application refuses the content of a request.
const OF_THE_APPLICATION = new Set([402, 422]);
const TO_BE_RETRIED = new Set(["busy", "later", "doubt"]);
const RUNNING = new Set(["running", "queued", "inprogress", "notstarted", "processing"]);
const DIRECTIVES = ["stripe-should-retry", "x-should-retry", "transient-error"];
const IN_MILLISECONDS = ["retry-after-ms", "x-ms-retry-after-ms", "x-amz-retry-after"];
const NUMBER = /^[0-9]{1,15}(?:\.[0-9]{1,9})?$/;
// HTTP's three forms of a date begin with a weekday; Date.parse reads much that is none.
const DATE = /^(mon|tue|wed|thu|fri|sat|sun)/i;

// As in src/semel/core/credentials.py.
const SECRET = new RegExp(
  "auth(?!ors?\\b)|token|secret|signature|credential|assertion|cookie|session|passw|passphrase|passcode|macaroon|pwd|bearer" +
    "|hmac|jwt|oidc|saml|wsse|dpop|[cx]srf|keys?\\d*\\b|\\b(sig|pin|otp|totp|tan|mfa|2fa)\\b",
);

/** Whether a header, by its name, is likely to hold a credential. */
export function looksSecret(name) {
  const words = name.toLowerCase().replaceAll("_", "-");
  return SECRET.test(words) && !/idempotency-?key$/.test(words);
}

/**
 * What an answer to a request with a key means. With `inDoubt` an earlier try may have taken effect: then only what the
 * server can't have said without a look at the key, or at the content, is the operation's answer.
 *
 * @param {{ get(name: string): string | null | undefined }} headers
 */
export function judge(status, headers, body, now, { method = "POST", inDoubt = false } = {}) {
  const said = (name) => (headers.get(name) ?? "").trim();
  const after = retryAfter(said, now);
  if (status === 202 && said("location")) return { verdict: "follow", location: said("location"), after };
  if (isSuccess(status)) return { verdict: "final" };
  if ((method === "POST" ? MOVED_FOR_POST : MOVED).has(status) && said("location")) return { verdict: "moved" };
  if (isReplayed(said)) return { verdict: "final" };
  const problem = problemOf(said, body);
  const known = CODES[codeOf(problem)];
  if (known) return verdictOf(inDoubt && known === "final" ? "refused" : known, after);
  let meaning = byStatus(status, after);
  if (inDoubt && meaning === "final") meaning = whenInDoubt(status, said);
  const isRun = problem.safe_new_key !== true;
  const directed = directive(said, problem);
  if (directed === true) return retry(after, isRun);
  // It ends the tries, and is no answer.
  if (directed === false && TO_BE_RETRIED.has(meaning)) return { verdict: "refused", in_doubt: isRun && meaning !== "later" };
  return verdictOf(meaning, after);
}

/** What an answer at a status URL means for the operation. It may be about the look alone: a replica is late. */
export function judgeLook(status, headers, body, now) {
  const said = (name) => (headers.get(name) ?? "").trim();
  const isMarked = isReplayed(said);
  if (!isMarked && (status === 202 || (isSuccess(status) && saysRunning(problemOf(said, body))))) {
    return { verdict: "follow", location: (status === 202 && said("location")) || null, after: retryAfter(said, now) };
  }
  const verdict = judge(status, headers, body, now, { method: "GET", inDoubt: true });
  if (isSuccess(status) || status === 401 || isMarked) return verdict.verdict === "moved" ? { verdict: "final" } : verdict;
  return ["final", "refused", "moved"].includes(verdict.verdict) ? retry(null) : verdict;
}

export function judgeFailure(failure) {
  return retry(null, failure === "lost");
}

function retry(after, inDoubt = true, isCounted = true) {
  return { verdict: "retry", after, in_doubt: inDoubt, is_counted: isCounted };
}

function verdictOf(meaning, after) {
  if (meaning === "busy") return retry(after, true, false);
  if (meaning === "later") return retry(after, false);
  if (meaning === "doubt") return retry(after);
  if (meaning === "refused") return { verdict: "refused", in_doubt: false };
  return { verdict: meaning === "answer" ? "final" : meaning };
}

function isSuccess(status) {
  return status >= 200 && status < 300;
}

function isReplayed(said) {
  return said("idempotent-replayed").toLowerCase() === "true";
}

function saysRunning({ status, state, done }) {
  const says = (word) => typeof word === "string" && RUNNING.has(word.toLowerCase().replace(/[^a-z]/g, ""));
  return done === false || says(status) || says(state);
}

function whenInDoubt(status, said) {
  if (OF_THE_APPLICATION.has(status) || (status === 400 && said("content-type").includes("json"))) return "answer";
  return status === 409 ? "doubt" : "refused";
}

function problemOf(said, body) {
  return said("content-type").includes("json") ? parsed(body) : {};
}

function byStatus(status, after) {
  if (status in STATUSES) return STATUSES[status];
  if (status >= 500) return "doubt";
  if (status === 409 && after !== null) return "busy";
  return status < 200 || NOT_ABOUT_THE_OPERATION.has(status) ? "refused" : "final";
}

function directive(said, problem) {
  for (const name of DIRECTIVES) {
    const word = said(name).toLowerCase();
    if (word === "true") return true;
    if (word === "false" && name !== "transient-error") return false;
  }
  return typeof problem.retryable === "boolean" ? problem.retryable : undefined;
}

function parsed(body) {
  try {
    const value = JSON.parse(body);
    return value !== null && typeof value === "object" && !Array.isArray(value) ? value : {};
  } catch {
    return {};
  }
}

function codeOf(problem) {
  const { error } = problem;
  const said = error !== null && typeof error === "object" && !Array.isArray(error) ? error : problem;
  for (const name of ["code", "type", "doc_url"]) {
    if (typeof said[name] !== "string") continue;
    const last = said[name].split(/[/#:]/).at(-1);
    if (Object.hasOwn(CODES, last)) return last;
  }
  return "";
}

function retryAfter(said, now) {
  for (const name of IN_MILLISECONDS) {
    if (NUMBER.test(said(name))) return Math.min(Number(said(name)) / 1000, MAX_RETRY_AFTER);
  }
  const word = said("retry-after");
  if (NUMBER.test(word)) return Math.min(Number(word), MAX_RETRY_AFTER);
  const moment = momentOf(word);
  if (moment === null) return null;
  return Math.min(Math.max(moment - (momentOf(said("date")) ?? now), 0), MAX_RETRY_AFTER);
}

function momentOf(word) {
  const milliseconds = DATE.test(word) ? Date.parse(word) : NaN;
  return Number.isNaN(milliseconds) ? null : milliseconds / 1000;
}

/** Seconds to wait after try number `attempt`, from 1. `dice` is a random number below 1. */
export function pause(attempt, after, dice) {
  if (after !== null) return Math.max(after, FIRST_PAUSE) * (1 + SPREAD * dice);
  return dice * Math.min(MAX_PAUSE, FIRST_PAUSE * 2 ** Math.min(attempt - 1, 30));
}

/** The retries that are left for one host: a token bucket. Times are in seconds. */
export class Quota {
  #left = QUOTA_RETRIES;
  #at;

  constructor(now = 0) {
    this.#at = now;
  }

  answered(now) {
    this.#fill(now, QUOTA_PER_ANSWER);
  }

  /** Take one retry; false: none is left. */
  spend(now) {
    this.#fill(now, 0);
    if (this.#left < 1) return false;
    this.#left -= 1;
    return true;
  }

  #fill(now, more) {
    const passed = Math.max(0, now - this.#at) / QUOTA_SECONDS;
    this.#left = Math.min(QUOTA_RETRIES, Math.min(QUOTA_RETRIES, this.#left + passed) + more);
    this.#at = now;
  }
}
