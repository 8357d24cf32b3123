/** Where the keys of intents are kept: `localStorage` and its like, sync or async. */
export interface KeyStorage {
  getItem(name: string): string | null | undefined | Promise<string | null | undefined>;
  setItem(name: string, text: string): void | Promise<void>;
  removeItem(name: string): void | Promise<void>;
  /**
   * Write it if nothing is there, in one step, and say whether it was written. Needed only where several processes share
   * the storage and there are no Web Locks.
   */
  addItem?(name: string, text: string): boolean | Promise<boolean>;
  /** All names in it, so that old entries can be removed. `localStorage` and `sessionStorage` are listed without it. */
  names?(): Iterable<string> | Promise<Iterable<string>>;
}

export interface Options {
  /** The hosts that honour keys, as `name` or `name:port`. Requests to others are not touched. Without it: all. */
  hosts?: readonly string[] | undefined;
  /** Milliseconds from the first try to the end of the last: 120000. */
  deadline?: number | undefined;
  /** Milliseconds for one try, to the end of its answer: 30000. Then it is sent again, with the same key. */
  tryTimeout?: number | undefined;
  /** Milliseconds that the server remembers a key: 86400000. The deadline must be shorter. */
  retention?: number | undefined;
  /** Where keys of intents are kept. Without it: in memory. */
  storage?: KeyStorage | undefined;
  /** The header of the key: `Idempotency-Key`. */
  header?: string | undefined;
  /** Whether a key is sent in double quotes, by the letter of the IETF's draft. */
  quoted?: boolean | undefined;
  /** Whether a 202 is followed to its result, on the same origin: true. */
  followAccepted?: boolean | undefined;
  /** The function that sends. */
  fetch?: typeof globalThis.fetch | undefined;
}

export interface IdempotentInit extends RequestInit {
  /** The application's name for the operation: its key outlives this page. */
  intent?: string | undefined;
}

export interface IdempotentFetch {
  /**
   * A `signal` ends it. Its reason is what is rejected with if nothing was sent; else it is the `cause` of a
   * `RequestOutcomeUnknown`, which has the key.
   */
  (input: string | URL | Request, init?: IdempotentInit): Promise<Response>;
  /** Sent again, the intent is a new operation. */
  forget(intent: string): Promise<void>;
}

export function idempotentFetch(options?: Options): IdempotentFetch;

export class ClientError extends Error {
  readonly key?: string | undefined;
  readonly intent?: string | undefined;
  /** The last answer, if there was one. */
  readonly response?: Response | undefined;
}

/**
 * It is not known whether the request took effect; `key` is what to send it again with. `cause` is the last error, or
 * the reason of a `signal` that ended it.
 */
export class RequestOutcomeUnknown extends ClientError {}

/** The request was redirected to another origin, which may know nothing of its key, and was not sent there. */
export class RedirectRefused extends ClientError {}

/** Another request has the same intent. Nothing was sent. */
export class IntentDiffers extends ClientError {}
