// The cases that the clients in every language share.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import { judge, judgeFailure, judgeLook, looksSecret, pause, Quota } from "../src/retrying.js";

const vectors = JSON.parse(readFileSync(new URL("../../vectors.json", import.meta.url), "utf8"));

for (const { name, status, headers, body, expect, now = 0, method, in_doubt: inDoubt } of vectors.answers) {
  test(`answer: ${name}`, () => {
    assert.deepEqual(judge(status, new Headers(headers), body, now, { method, inDoubt }), expect);
  });
}

for (const { name, status, headers, body, expect, now = 0 } of vectors.looks) {
  test(`look: ${name}`, () => assert.deepEqual(judgeLook(status, new Headers(headers), body, now), expect));
}

for (const { failure, expect } of vectors.failures) {
  test(`failure: ${failure}`, () => assert.deepEqual(judgeFailure(failure), expect));
}

for (const { attempt, after, dice, expect } of vectors.pauses) {
  test(`pause: ${attempt} ${after} ${dice}`, () => assert.ok(Math.abs(pause(attempt, after, dice) - expect) < 1e-9));
}

for (const { name, steps } of vectors.quotas) {
  test(`quota: ${name}`, () => {
    const quota = new Quota();
    for (const step of steps) {
      if (step.do === "answer") quota.answered(step.at);
      else assert.equal(quota.spend(step.at), step.expect);
    }
  });
}

for (const { header, expect } of vectors.secrets) {
  test(`secret: ${header}`, () => assert.equal(looksSecret(header), expect));
}
