// Real requests to a server on loopback that loses some of them.

import assert from "node:assert/strict";
import { createServer } from "node:http";
import test from "node:test";

import { idempotentFetch, IntentDiffers, RequestOutcomeUnknown } from "../src/index.js";

async function serve(t, answer) {
  const seen = [];
  const server = createServer(async (request, response) => {
    let body = "";
    for await (const chunk of request) body += chunk;
    seen.push({ method: request.method, path: request.url, headers: request.headers, body });
    answer(response, seen.length, seen.at(-1));
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  t.after(() => (server.closeAllConnections(), server.close()));
  return { seen, url: `http://127.0.0.1:${server.address().port}`, host: `127.0.0.1:${server.address().port}` };
}

const paid = (response) => response.writeHead(201, { "content-type": "application/json" }).end('{"paid":1}');
const payment = { method: "POST", body: '{"amount":5}', headers: { "content-type": "application/json" } };
const keysOf = (seen) => new Set(seen.map((each) => each.headers["idempotency-key"]));

test("a lost request is sent again, with the same key and bytes", async (t) => {
  const { seen, url } = await serve(t, (response, count) => {
    if (count === 1) response.destroy();
    else if (count === 2) response.writeHead(201, { "content-length": "10" }).write("{", () => response.destroy());
    else paid(response);
  });
  const answer = await idempotentFetch()(`${url}/pay`, payment);
  assert.equal(answer.status, 201);
  assert.deepEqual(await answer.json(), { paid: 1 });
  assert.equal(answer.url, `${url}/pay`);
  assert.equal(seen.length, 3);
  assert.equal(keysOf(seen).size, 1);
  assert.deepEqual(new Set(seen.map((each) => each.body)), new Set([payment.body]));
});

test("a form keeps its boundary", async (t) => {
  const { seen, url } = await serve(t, (response, count) => (count === 1 ? response.destroy() : paid(response)));
  const form = new FormData();
  form.set("amount", "5");
  await idempotentFetch()(url, { method: "POST", body: form });
  assert.equal(seen[0].body, seen[1].body);
  assert.equal(seen[0].headers["content-type"], seen[1].headers["content-type"]);
});

test("hosts that do not honour keys, and GET, are not touched", async (t) => {
  const { seen, url } = await serve(t, (response) => response.destroy());
  await assert.rejects(idempotentFetch({ hosts: ["api.example.com"] })(url, payment), TypeError);
  await assert.rejects(idempotentFetch()(url), TypeError);
  assert.equal(seen[0].headers["idempotency-key"], undefined);
  assert.equal(seen.filter((each) => each.method === "POST").length, 1);
});

test("a deadline ends a try that hangs, and the error has the key", async (t) => {
  const { seen, url, host } = await serve(t, () => {});
  const send = idempotentFetch({ deadline: 200, hosts: [host] });
  await assert.rejects(send(url, payment), (error) => {
    assert.ok(error instanceof RequestOutcomeUnknown);
    assert.deepEqual(keysOf(seen), new Set([error.key]));
    return true;
  });
});

test("a connection that is refused is the library's own error", async () => {
  const server = createServer();
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const url = `http://127.0.0.1:${server.address().port}`;
  await new Promise((resolve) => server.close(resolve));
  await assert.rejects(idempotentFetch({ deadline: 2000 })(url, payment), { name: "TypeError", message: "fetch failed" });
});

test("a caller that aborts gets its own reason", async (t) => {
  const { url } = await serve(t, () => {});
  const controller = new AbortController();
  const sending = idempotentFetch()(url, { ...payment, signal: controller.signal });
  controller.abort(new Error("enough"));
  await assert.rejects(sending, /enough/);
});

test("a 202 is followed on the same origin, with credentials and without the key", async (t) => {
  const { seen, url } = await serve(t, (response, count) => {
    if (count < 3) response.writeHead(202, { location: "/status/1", "retry-after": "0" }).end();
    else paid(response);
  });
  const given = { ...payment, headers: { ...payment.headers, authorization: "Bearer x" } };
  assert.equal((await idempotentFetch()(url, given)).status, 201);
  assert.deepEqual(seen.map((each) => `${each.method} ${each.path}`), ["POST /", "GET /status/1", "GET /status/1"]);
  assert.equal(seen[2].headers["idempotency-key"], undefined);
  assert.equal(seen[2].headers.authorization, "Bearer x");

  const other = await serve(t, (response) => response.writeHead(202, { location: `${url}/status` }).end());
  assert.equal((await idempotentFetch()(other.url, given)).status, 202);
});

test("final answers are returned, and an unknown outcome is an error", async (t) => {
  const answers = [
    [500, { "idempotent-replayed": "true" }, ""],
    [422, {}, ""],
    [204, {}, ""],
    [409, { "content-type": "application/problem+json" }, '{"code":"outcome-unknown"}'],
  ];
  const { seen, url } = await serve(t, (response, count) => {
    const [status, headers, body] = answers[count - 1];
    response.writeHead(status, headers).end(body);
  });
  const send = idempotentFetch();
  for (const [status] of answers.slice(0, 3)) assert.equal((await send(url, payment)).status, status);
  await assert.rejects(send(url, payment), (error) => error.response.status === 409 && error.key === [...keysOf(seen)].at(-1));
  assert.equal(seen.length, 4);
});

test("an outage costs at most a tenth more", async (t) => {
  const { seen, url } = await serve(t, (response) => response.writeHead(503, { "retry-after": "0" }).end());
  const send = idempotentFetch();
  for (let count = 0; count < 100; count += 1) await assert.rejects(send(url, payment), RequestOutcomeUnknown);
  assert.ok(seen.length <= 110);
});

test("an intent has one key, in a storage that outlives the page", async (t) => {
  const kept = new Map();
  const storage = {
    getItem: async (name) => kept.get(name),
    setItem: async (name, text) => void kept.set(name, text),
    removeItem: async (name) => void kept.delete(name),
  };
  const { seen, url } = await serve(t, (response, count, request) => {
    assert.ok([...kept.values()].some((text) => text.includes(request.headers["idempotency-key"])));
    paid(response);
  });
  const intent = "invoice 17";
  await idempotentFetch({ storage })(url, { ...payment, intent });
  await idempotentFetch({ storage })(url, { ...payment, intent });
  assert.equal(keysOf(seen).size, 1);
  await assert.rejects(idempotentFetch({ storage })(url, { ...payment, body: "{}", intent }), IntentDiffers);

  const entry = JSON.parse(kept.get("semel:invoice 17"));
  kept.set("semel:invoice 17", JSON.stringify({ ...entry, notAfter: Date.now() - 1 }));
  await assert.rejects(idempotentFetch({ storage })(url, { ...payment, intent }), RequestOutcomeUnknown);
  assert.equal(seen.length, 2);
  await idempotentFetch({ storage }).forget(intent);
  await idempotentFetch({ storage })(url, { ...payment, intent });
  assert.equal(keysOf(seen).size, 2);
});

test("what can't work is refused at once", () => {
  assert.throws(() => idempotentFetch({ deadline: 10, retention: 10 }), /retention/);
  assert.throws(() => idempotentFetch({ hosts: ["https://api.example.com"] }), /names/);
  assert.throws(() => idempotentFetch({ host: [] }), /no option host/);
});
