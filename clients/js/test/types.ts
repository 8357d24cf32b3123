// A program that a type checker reads, and that is never run: what the types take, and what they refuse.

import { ClientError, idempotentFetch, IntentDiffers, RequestOutcomeUnknown } from "semel-client";
import type { KeyStorage, Options } from "semel-client";

const keys = new Map<string, string>();
const storage: KeyStorage = {
  getItem: (name) => keys.get(name),
  setItem: (name, text) => { keys.set(name, text); },
  removeItem: async (name) => { keys.delete(name); },
};
const options: Options = { hosts: ["api.example.com"], deadline: 60_000, tryTimeout: 5_000, retention: 86_400_000, storage, quoted: true };
const send = idempotentFetch(options);

export async function pay(): Promise<number> {
  try {
    const answer = await send(new URL("https://api.example.com/payments"), { method: "POST", body: "{}", intent: "17" });
    await send(new Request("https://api.example.com/payments"));
    await send.forget("17");
    return answer.status;
  } catch (error) {
    if (error instanceof RequestOutcomeUnknown) return error.key?.length ?? error.response?.status ?? 0;
    if (error instanceof IntentDiffers) return error.intent?.length ?? 0;
    if (error instanceof ClientError) return error.message.length;
    throw error;
  }
}

// An option that may be undefined, under exactOptionalPropertyTypes as well.
export function perhaps(intent: string | undefined, deadline: number | undefined): Promise<Response> {
  return idempotentFetch({ deadline, storage: { ...storage, names: () => keys.keys() } })("https://api.example.com", { intent });
}

// What takes fetch takes it, too; and it takes what stands in for fetch.
export const instead: typeof globalThis.fetch = send;
export const around = idempotentFetch({ fetch: instead });

// @ts-expect-error there is no such option
idempotentFetch({ host: "api.example.com" });
// @ts-expect-error an intent is a text
void send("https://api.example.com/payments", { intent: 17 });
