// Real requests to a server on loopback that loses some of them.

import assert from "node:assert/strict";
import { createServer } from "node:http";
import test from "node:test";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";

import { ClientError, idempotentFetch, IntentDiffers, RedirectRefused, RequestOutcomeUnknown } from "../src/index.js";

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

test("a request whose key is empty gets one", async (t) => {
  const { seen, url } = await serve(t, (response, count) => (count === 1 ? response.destroy() : paid(response)));
  await idempotentFetch()(url, { ...payment, headers: { "Idempotency-Key": "" } });
  assert.match([...keysOf(seen)].join(), /^[0-9a-f-]{36}$/);
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

test("the fetch of another library gets what the caller gave, and no Request of this platform", async () => {
  const given = [];
  const send = idempotentFetch({ fetch: async (...all) => (given.push(all), new Response()), hosts: ["api.example.com"] });
  await send("https://api.example.com/", { method: "GET" });
  await send("https://other.example.com/", payment);
  await send("https://api.example.com/", payment);
  assert.deepEqual(given.slice(0, 2), [["https://api.example.com/", { method: "GET" }], ["https://other.example.com/", payment]]);
  assert.equal(given[2][0], "https://api.example.com/");
});

test("a deadline ends a try that hangs, and the error has the key", async (t) => {
  const { seen, url, host } = await serve(t, () => {});
  const send = idempotentFetch({ deadline: 500, hosts: [host] });
  await assert.rejects(send(url, payment), (error) => {
    assert.ok(error instanceof RequestOutcomeUnknown);
    assert.deepEqual(keysOf(seen), new Set([error.key]));
    return true;
  });
});

/** Where nothing listens. */
async function nowhere() {
  const server = createServer();
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const url = `http://127.0.0.1:${server.address().port}`;
  await new Promise((resolve) => server.close(resolve));
  return url;
}

test("a connection that is refused is the library's own error", async () => {
  const url = await nowhere();
  await assert.rejects(idempotentFetch({ deadline: 2000 })(url, payment), { name: "TypeError", message: "fetch failed" });
});

test("a caller that aborts before anything was sent gets its own reason", async (t) => {
  const { seen, url } = await serve(t, () => {});
  const controller = new AbortController();
  const sending = idempotentFetch()(url, { ...payment, signal: controller.signal });
  controller.abort(new Error("enough"));
  await assert.rejects(sending, /enough/);
  assert.equal(seen.length, 0);

  // In the pause after a connection that was refused.
  const aborting = new AbortController();
  const refused = async (...given) => fetch(...given).finally(() => setImmediate(() => aborting.abort(new Error("enough"))));
  await assert.rejects(idempotentFetch({ fetch: refused })(await nowhere(), { ...payment, signal: aborting.signal }), /^Error: enough/);
});

test("a caller that aborts while its body is read, or its key is written down, gets its own reason", async (t) => {
  const { seen, url } = await serve(t, paid);
  const never = () => new Promise(() => {});
  const held = { getItem: never, setItem: never, removeItem: never };
  const waits = [
    [{}, { body: new ReadableStream({ pull: never }), duplex: "half" }],
    [{ storage: held }, { intent: "invoice held" }],
  ];
  for (const [options, given] of waits) {
    const controller = new AbortController();
    const sending = idempotentFetch(options)(url, { ...payment, ...given, signal: controller.signal });
    setImmediate(() => controller.abort(new Error("enough")));
    await assert.rejects(sending, /^Error: enough/);
  }
  // A storage that does not answer at all is given up at the deadline.
  await assert.rejects(idempotentFetch({ storage: held, deadline: 50 })(url, { ...payment, intent: "invoice never" }), /storage .* Nothing was sent/);
  assert.equal(seen.length, 0);
});

test("the deadline begins when the body has been read", async (t) => {
  const before = Date.now;
  t.after(() => (Date.now = before));
  const { url } = await serve(t, (response, count) => (count === 1 ? response.destroy() : paid(response)));
  const pull = (controller) => {
    Date.now = () => before() + 600_000;
    controller.enqueue(new TextEncoder().encode("slow"));
    controller.close();
  };
  const answer = await idempotentFetch()(url, { method: "POST", body: new ReadableStream({ pull }), duplex: "half" });
  assert.equal(answer.status, 201);
});

test("a fetch that fails without a reason leaves the key as well", async () => {
  const failing = () => Promise.reject(undefined);
  await assert.rejects(idempotentFetch({ fetch: failing, deadline: 100 })("http://localhost", payment), (error) => {
    assert.ok(error instanceof RequestOutcomeUnknown && error.key);
    return true;
  });
});

/** Aborted while a try is under way, in the pause after one, at a status URL, and where a result is read. */
const aborts = {
  "in a try": () => {},
  "in a pause": (response) => response.writeHead(503, { "retry-after": "60" }).end(),
  "before a status is asked for": (response) => response.writeHead(202, { location: "/status", "retry-after": "60" }).end(),
  "while a result is read": (response, { method }) => method === "POST" && response.writeHead(303, { location: "/result" }).end(),
};
for (const [moment, answer] of Object.entries(aborts)) {
  test(`a caller that aborts ${moment} has the key, and its own reason`, async (t) => {
    const controller = new AbortController();
    const { seen, url } = await serve(t, (response, _, request) => {
      if (moment !== "while a result is read" || request.method === "GET") setTimeout(() => controller.abort(reason), 20);
      answer(response, request);
    });
    const reason = new Error("enough");
    await assert.rejects(idempotentFetch()(url, { ...payment, signal: controller.signal }), (error) => {
      assert.ok(error instanceof RequestOutcomeUnknown);
      assert.deepEqual([error.key, error.cause], [seen[0].headers["idempotency-key"], reason]);
      return true;
    });
  });
}

test("a time limit of the caller's own leaves the key as well, in a Request too", async (t) => {
  let controller;
  const late = () => controller.abort(new DOMException("late", "TimeoutError"));
  const { seen, url } = await serve(t, late);
  const limited = () => ({ ...payment, signal: (controller = new AbortController()).signal });
  for (const given of [() => [url, limited()], () => [new Request(url, limited())]]) {
    await assert.rejects(idempotentFetch()(...given()), (error) => {
      assert.deepEqual([error.name, error.cause.name], ["RequestOutcomeUnknown", "TimeoutError"]);
      assert.equal(error.key, seen.at(-1).headers["idempotency-key"]);
      return true;
    });
  }
});

test("a try that gets no answer is ended by its own limit, and sent again with the same key", async (t) => {
  const { seen, url } = await serve(t, (response, count) => {
    if (count === 1) return;
    if (count === 2) response.writeHead(202, { location: "/status", "retry-after": "0" }).end();
    else if (count > 3) paid(response);
  });
  assert.equal((await idempotentFetch({ tryTimeout: 300 })(url, payment)).status, 201);
  assert.deepEqual(seen.map((each) => each.method), ["POST", "POST", "GET", "POST"]);
  assert.equal(keysOf(seen.filter((each) => each.method === "POST")).size, 1);
});

test("limits hold when the garbage is collected", async (t) => {
  setFlagsFromString("--expose-gc");
  const collect = runInNewContext("gc");
  const { url } = await serve(t, () => {});
  let isCollected = 0;
  const collecting = (...given) => {
    for (const wait of [0, 10, 20]) setTimeout(() => (collect(), (isCollected += 1)), wait);
    return fetch(...given);
  };
  const own = () => ({ ...payment, signal: AbortSignal.timeout(200) });
  const limits = [
    [{ deadline: 200 }, () => [url, payment]],
    [{ deadline: 200, tryTimeout: 60 }, () => [url, payment]],
    [{}, () => [url, own()]],
    [{}, () => [new Request(url, own())]],
  ];
  for (const [options, given] of limits) {
    await assert.rejects(idempotentFetch({ fetch: collecting, ...options })(...given()), RequestOutcomeUnknown);
  }
  assert.ok(isCollected >= limits.length);
});

for (const [of, name] of [[Date, "now"], [performance, "now"]]) {
  test(`a program that slept in a pause, by ${of === Date ? "the time of day" : "the steady clock"}, sends nothing more`, async (t) => {
    const before = of[name];
    t.after(() => (of[name] = before));
    const { seen, url } = await serve(t, (response) => {
      response.destroy();
      setTimeout(() => (of[name] = () => before.call(of) + 90_000_000), 20);
    });
    const send = idempotentFetch({ fetch: (...given) => fetch(...given).finally(() => new Promise((done) => setTimeout(done, 30))) });
    for (const intent of [undefined, "invoice 17"]) {
      of[name] = before;
      await assert.rejects(send(url, { ...payment, ...(intent && { intent }) }), (error) => {
        assert.ok(error instanceof RequestOutcomeUnknown);
        assert.equal(error.key, seen.at(-1).headers["idempotency-key"]);
        return true;
      });
    }
    assert.equal(keysOf(seen).size, seen.length);
  });
}

test("a program that slept while its key was written down does not send it", async (t) => {
  const before = Date.now;
  t.after(() => (Date.now = before));
  const { seen, url } = await serve(t, paid);
  const storage = slow();
  const { setItem } = storage;
  storage.setItem = async (...given) => (await setItem(...given), void (Date.now = () => before() + 90_000_000));
  await assert.rejects(idempotentFetch({ storage })(url, { ...payment, intent: "invoice 17" }), RequestOutcomeUnknown);
  assert.equal(seen.length, 0);
});

test("what the caller says about how it is sent holds for every request of the operation", async (t) => {
  const answers = [
    [503, { "retry-after": "0" }],
    [307, { location: "/moved" }],
    [202, { location: "/status", "retry-after": "0" }],
    [200, {}],
    [303, { location: "/result" }],
    [302, { location: "/there" }],
    [200, {}],
    [503, { "retry-after": "0" }],
    [201, {}],
  ];
  const { seen, url } = await serve(t, (response, count) => response.writeHead(...answers[count - 1]).end("paid"));
  await fetch("data:,"); // which makes Node's own dispatcher
  const route = globalThis[Symbol.for("undici.globalDispatcher.1")];
  const routed = [];
  const dispatcher = { dispatch: (options, handler) => (routed.push(options.path), route.dispatch(options, handler)) };
  const said = { referrerPolicy: "no-referrer", cache: "no-store", credentials: "omit", keepalive: true };
  const sent = [];
  const send = idempotentFetch({ fetch: (input, init) => (sent.push(new Request(input, init)), fetch(input, init)) });
  for (let count = 0; count < 2; count += 1) await send(url, { ...payment, ...said, dispatcher });
  assert.equal((await send(new Request(url, { ...payment, ...said, dispatcher }))).status, 201);
  assert.equal(seen.length, answers.length);
  assert.deepEqual(routed, seen.map((each) => each.path));
  for (const each of sent) for (const name of Object.keys(said)) assert.equal(each[name], said[name], name);
});

test("an answer with another digest than the caller says is not returned", async (t) => {
  const { url } = await serve(t, paid);
  const integrity = "sha256-AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
  for (const given of [[url, { ...payment, integrity }], [new Request(url, { ...payment, integrity })]]) {
    await assert.rejects(idempotentFetch({ deadline: 100 })(...given), RequestOutcomeUnknown);
  }
});

test("an event stream that was handed over is not cut by the deadline, and ends when the caller aborts", async (t) => {
  const controller = new AbortController();
  let more;
  const { url } = await serve(t, (response) => {
    response.writeHead(200, { "content-type": "text/event-stream" }).write("data: 1\n\n");
    more = (text) => response.write(text);
  });
  const answer = await idempotentFetch({ deadline: 500, tryTimeout: 400 })(url, { ...payment, signal: controller.signal });
  const reader = answer.body.getReader();
  await reader.read();
  await new Promise((resolve) => setTimeout(resolve, 550)); // past the deadline
  more("data: 2\n\n");
  assert.match(new TextDecoder().decode((await reader.read()).value), /2/);
  controller.abort(new Error("enough"));
  await assert.rejects(reader.read());
});


test("an event stream ends when the caller aborts, in a Request that was collected as garbage, too", async (t) => {
  setFlagsFromString("--expose-gc");
  const collect = runInNewContext("gc");
  const { url } = await serve(t, (response) => response.writeHead(200, { "content-type": "text/event-stream" }).write("data: 1\n\n"));
  const controller = new AbortController();
  const open = () => idempotentFetch()(new Request(url, { ...payment, signal: controller.signal }));
  const reader = (await open()).body.getReader();
  await reader.read();
  for (let count = 0; count < 8; count += 1) {
    collect();
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
  controller.abort(new Error("enough"));
  await assert.rejects(reader.read(), /enough/);
});

test("an event stream of a try that is sent again is closed", async (t) => {
  const closed = [];
  const { url } = await serve(t, (response, count) => {
    if (count > 1) return paid(response);
    closed.push(new Promise((resolve) => response.on("close", resolve)));
    response.writeHead(503, { "content-type": "text/event-stream", "retry-after": "0" }).write("data: 1\n\n");
  });
  assert.equal((await idempotentFetch()(url, payment)).status, 201);
  await Promise.all(closed);
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

test("after a lost try, an answer that says nothing of the operation leaves it unknown", async (t) => {
  const others = [[403], [404], [400], [302, { location: "/login" }], [501], [503, { "x-should-retry": "false" }]];
  for (const [status, headers = {}] of others) {
    const { seen, url } = await serve(t, (response, count) => {
      if (count % 2) response.destroy();
      else response.writeHead(status, headers).end();
    });
    await assert.rejects(idempotentFetch()(url, payment), (error) => {
      assert.ok(error instanceof RequestOutcomeUnknown);
      assert.equal(error.response.status, status);
      return true;
    });
    assert.equal(seen.length, 2);
  }
});

test("a key of an unknown outcome that is sent again is in doubt, and another is not", async (t) => {
  const { url } = await serve(t, (response, count) => (count === 1 ? response.destroy() : response.writeHead(404).end()));
  const send = idempotentFetch();
  const unknown = await send(url, payment).catch((error) => error);
  const again = (key) => send(url, { ...payment, headers: { "Idempotency-Key": key } });
  await assert.rejects(again(unknown.key), (error) => error instanceof RequestOutcomeUnknown && error.response.status === 404);
  assert.equal((await again("another")).status, 404);
});

test("an intent that was sent before is in doubt, and may be asked for a login", async (t) => {
  const answers = [201, 403, 401, 201];
  const { seen, url } = await serve(t, (response, count) => response.writeHead(answers[count - 1]).end());
  const send = idempotentFetch();
  const again = () => send(url, { ...payment, intent: "invoice 17" });
  assert.equal((await again()).status, 201);
  await assert.rejects(again(), RequestOutcomeUnknown);
  assert.equal((await again()).status, 401);
  assert.equal((await again()).status, 201);
  assert.equal(keysOf(seen).size, 1);
});

test("a status URL that says that it runs is asked again", async (t) => {
  const { seen, url } = await serve(t, (response, count) => {
    if (count === 1) response.writeHead(202, { location: "/status/1", "retry-after": "0" }).end();
    else if (count === 2) response.writeHead(202, { "retry-after": "0" }).end();
    else if (count === 3) response.writeHead(200, { "content-type": "application/json", "retry-after": "0" }).end('{"status":"running"}');
    else paid(response);
  });
  assert.equal((await idempotentFetch()(url, payment)).status, 201);
  assert.deepEqual(seen.map((each) => each.path), ["/", "/status/1", "/status/1", "/status/1"]);
});

const elsewhere = (url) => url.replace("127.0.0.1", "localhost");

for (const [status, method] of [[307, "POST"], [308, "POST"], [301, "PATCH"], [302, "PATCH"]]) {
  test(`a ${status} of a ${method} is followed on the same origin, with the key and the body`, async (t) => {
    const { seen, url } = await serve(t, (response, count) => {
      if (count === 1) response.writeHead(status, { location: "/moved" }).end();
      else if (count === 2) response.destroy();
      else paid(response);
    });
    const answer = await idempotentFetch()(`${url}/pay`, { ...payment, method });
    assert.deepEqual([answer.status, answer.url, answer.redirected], [201, `${url}/moved`, true]);
    assert.deepEqual(seen.map((each) => `${each.method} ${each.path} ${each.body}`), [
      `${method} /pay ${payment.body}`,
      `${method} /moved ${payment.body}`,
      `${method} /moved ${payment.body}`,
    ]);
    assert.equal(keysOf(seen).size, 1);
  });
}

test("a redirect to another origin is refused, and nothing is sent there", async (t) => {
  const { seen, url, host } = await serve(t, (response) => response.writeHead(307, { location: elsewhere(url) }).end());
  for (const options of [{}, { hosts: [host] }]) {
    await assert.rejects(idempotentFetch(options)(url, payment), (error) => {
      assert.ok(error instanceof RedirectRefused && error instanceof ClientError);
      assert.deepEqual([error.response.status, error.key], [307, seen.at(-1).headers["idempotency-key"]]);
      return true;
    });
  }
  assert.equal(seen.length, 2);
  assert.equal((await idempotentFetch()(url, { ...payment, redirect: "manual" })).status, 307);
  await assert.rejects(idempotentFetch()(url, { ...payment, redirect: "error" }), /redirect: "error"/);
});

test("a redirect that is refused after a lost try leaves it unknown", async (t) => {
  const { url } = await serve(t, (response, count) => {
    if (count === 1) response.destroy();
    else response.writeHead(307, { location: elsewhere(url) }).end();
  });
  await assert.rejects(idempotentFetch()(url, payment), (error) => {
    assert.ok(error instanceof RequestOutcomeUnknown && error.cause instanceof RedirectRefused);
    return true;
  });
});

test("a result that can't be read leaves no other word than unknown", async (t) => {
  const { url } = await serve(t, (response, count) => {
    if (count === 1) response.writeHead(303, { location: "/result" }).end();
    else response.destroy();
  });
  await assert.rejects(idempotentFetch()(url, payment), (error) => error instanceof RequestOutcomeUnknown && error.response.status === 303);
});

test("a circle of redirects has an end", async (t) => {
  const { seen, url } = await serve(t, (response) => response.writeHead(308, { location: "/" }).end());
  await assert.rejects(idempotentFetch()(url, payment), /too often/);
  assert.equal(seen.length, 21);
});

test("a redirect to the result is followed without the key, and elsewhere without what may be a credential", async (t) => {
  const { seen, url } = await serve(t, (response, count) => {
    if (count === 1 || count === 3) response.writeHead(303, { location: "/result" }).end();
    else if (count === 4) response.writeHead(302, { location: `${elsewhere(url)}/result` }).end();
    else if (count === 6) response.writeHead(303, { location: `${elsewhere(url)}/result` }).end();
    else response.writeHead(200).end("the result");
  });
  const secrets = { authorization: "Bearer x", "x-api-key": "x", "x-auth-token": "x" };
  const given = { ...payment, headers: { ...payment.headers, ...secrets, "x-tenant": "a" } };
  for (const there of ["x", undefined, undefined]) {
    const answer = await idempotentFetch()(url, given);
    assert.deepEqual([await answer.text(), answer.redirected], ["the result", true]);
    const { method, path, headers, body } = seen.at(-1);
    assert.deepEqual([method, path, body, headers["x-tenant"]], ["GET", "/result", "", "a"]);
    assert.deepEqual([headers.authorization, headers["x-api-key"], headers["x-auth-token"]], [there && "Bearer x", there, there]);
    assert.equal(headers["idempotency-key"], undefined);
    assert.equal(headers["content-type"], undefined);
  }
  assert.equal(seen.length, 7);
});

test("a redirect to a result that is no address of HTTP is not followed", async (t) => {
  const { url } = await serve(t, (response) => response.writeHead(303, { location: "data:,forged" }).end());
  assert.equal((await idempotentFetch()(url, payment)).status, 303);
});

test("a browser, which does not show where a redirect leads, follows it by itself", async (t) => {
  const { url } = await serve(t, paid);
  const opaque = Object.defineProperty(new Response(null), "type", { value: "opaqueredirect" });
  const modes = [];
  const browser = (input, init) => (modes.push(init.redirect), init.redirect === "manual" ? opaque : fetch(input, init));
  assert.equal((await idempotentFetch({ fetch: browser })(url, payment)).status, 201);
  assert.deepEqual(modes, ["manual", "follow"]);
  await assert.rejects(idempotentFetch({ fetch: browser })(url, { ...payment, redirect: "error" }), RedirectRefused);

  // After a lost try, what it comes to may be a page to log in.
  const lost = (input, init) => (modes.push(init.redirect), modes.length === 1 ? Promise.reject(new TypeError("lost")) : init.redirect === "manual" ? opaque : loggedOut);
  const loggedOut = Object.defineProperty(new Response("log in"), "redirected", { value: true });
  modes.length = 0;
  await assert.rejects(idempotentFetch({ fetch: lost })(url, payment), RequestOutcomeUnknown);
  assert.deepEqual(modes, ["manual", "manual", "follow"]);
});

/** A storage that takes its time, as IndexedDB does: what is asked at once is answered at once. */
function slow() {
  const kept = new Map();
  const later = (value) => new Promise((resolve) => setImmediate(resolve, value));
  return {
    kept,
    getItem: async (name) => later(kept.get(name)),
    setItem: async (name, text) => (await later(), void kept.set(name, text)),
    removeItem: async (name) => (await later(), void kept.delete(name)),
  };
}

test("calls at once with one intent have one key", async (t) => {
  const { seen, url } = await serve(t, paid);
  const storage = slow();
  const sends = [idempotentFetch({ storage }), idempotentFetch({ storage })];
  await Promise.all([...sends, ...sends].map((send) => send(url, { ...payment, intent: "invoice 17" })));
  assert.deepEqual([seen.length, keysOf(seen).size], [4, 1]);
  const other = sends[0](url, { ...payment, body: "{}", intent: "invoice 17" });
  await assert.rejects(Promise.any([other, sends[1](url, { ...payment, body: "[]", intent: "invoice 17" })]), AggregateError);
});

test("between tabs, Web Locks let one write at a time", async (t) => {
  const { seen, url } = await serve(t, paid);
  const asked = [];
  const locks = { request: async (name, work) => (asked.push(name), work()) };
  const before = Object.getOwnPropertyDescriptor(globalThis, "navigator");
  t.after(() => (before ? Object.defineProperty(globalThis, "navigator", before) : delete globalThis.navigator));
  const navigate = (value) => Object.defineProperty(globalThis, "navigator", { value, configurable: true });
  navigate({ locks });
  const send = idempotentFetch({ storage: slow() });
  await send(url, { ...payment, intent: "invoice 17" });
  assert.deepEqual(asked, ["semel:invoice 17"]);
  navigate({ locks: { request: async () => Promise.reject(new Error("a sandboxed page")) } });
  await send(url, { ...payment, intent: "invoice 17" });
  assert.deepEqual([seen.length, keysOf(seen).size], [2, 1]);
});

test("without locks, what another tab has written counts", async (t) => {
  const { seen, url } = await serve(t, paid);
  const first = slow();
  await idempotentFetch({ storage: first })(url, { ...payment, intent: "invoice 17" });
  const [name, theirs] = [...first.kept][0];
  // Another tab writes between our look and our write, or right after it.
  const overwritten = slow();
  overwritten.setItem = async () => void overwritten.kept.set(name, theirs);
  const atomic = slow();
  atomic.addItem = async () => (atomic.kept.set(name, theirs), false);
  for (const storage of [overwritten, atomic]) {
    await idempotentFetch({ storage })(url, { ...payment, intent: "invoice 17" });
  }
  const own = { ...slow(), addItem: async () => true };
  await idempotentFetch({ storage: own })(url, { ...payment, intent: "invoice 17" });
  assert.equal(keysOf(seen.slice(0, 3)).size, 1);
  assert.equal(keysOf(seen).size, 2);
  const forgetful = { ...slow(), setItem: async () => {} };
  await assert.rejects(idempotentFetch({ storage: forgetful })(url, { ...payment, intent: "invoice 17" }), /has not kept/);
  assert.equal(seen.length, 4);
});

test("a form that is made anew is the same intent, with the same bytes", async (t) => {
  const { seen, url } = await serve(t, paid);
  const send = idempotentFetch();
  const form = (amount) => {
    const made = new FormData();
    made.set("amount", amount);
    made.set("receipt", new Blob(["--a\r\n--", new Uint8Array([45, 45, 200, 45])]), "receipt.bin");
    return { method: "POST", body: made, intent: "invoice 17" };
  };
  for (let count = 0; count < 2; count += 1) await send(url, form("5"));
  assert.equal(seen[0].body, seen[1].body);
  assert.equal(seen[0].headers["content-type"], seen[1].headers["content-type"]);
  const read = await new Response(seen[0].body, { headers: { "content-type": seen[0].headers["content-type"] } }).formData();
  assert.equal(read.get("amount"), "5");
  assert.equal(read.get("receipt").name, "receipt.bin");
  await assert.rejects(send(url, form("6")), IntentDiffers);
});

test("an intent is not sent past the retention by a page with a longer deadline", async (t) => {
  const before = Date.now;
  t.after(() => (Date.now = before));
  const { seen, url } = await serve(t, paid);
  const kept = new Map();
  const storage = { getItem: (name) => kept.get(name), setItem: (...given) => void kept.set(...given), removeItem() {} };
  const pay = (deadline) => idempotentFetch({ storage, deadline, retention: 3_600_000 })(url, { ...payment, intent: "invoice 17" });
  await pay(60_000);
  Date.now = () => before() + 3_000_000;
  await assert.rejects(pay(1_800_000), RequestOutcomeUnknown);
  assert.equal(seen.length, 1);
  assert.equal((await pay(60_000)).status, 201);
});

test("an entry is removed long after its time, and no other", async (t) => {
  const before = Date.now;
  t.after(() => (Date.now = before));
  const { url } = await serve(t, paid);
  const kept = new Map([["theme", "dark"], ["semel:other", "text"]]);
  const storage = {
    getItem: (name) => kept.get(name) ?? null,
    setItem: (name, text) => void kept.set(name, text),
    removeItem: (name) => void kept.delete(name),
  };
  const page = { ...storage, names: "an item", addItem: "another", key: (index) => [...kept.keys()][index], get length() { return kept.size; } };
  const pay = (where, intent) => idempotentFetch({ storage: where })(url, { ...payment, intent });
  await pay(page, "invoice 17");
  for (const days of [2, 90]) {
    Date.now = () => before() + days * 86_400_000;
    await pay(page, `invoice after ${days}`);
    await assert.rejects(pay(page, "invoice 17"), RequestOutcomeUnknown);
  }
  Date.now = () => before() + 92 * 86_400_000;
  await pay(page, "invoice 18");
  assert.deepEqual([...kept.keys()], ["theme", "semel:other", "semel:invoice after 2", "semel:invoice after 90", "semel:invoice 18"]);
  Date.now = () => before() + 200 * 86_400_000;
  await pay(storage, "invoice 19"); // It can't be listed.
  assert.equal(kept.size, 6);
  await pay({ ...storage, names: async () => kept.keys() }, "invoice 20");
  await new Promise((resolve) => setImmediate(resolve));
  assert.deepEqual([...kept.keys()], ["theme", "semel:other", "semel:invoice 19", "semel:invoice 20"]);
});

test("a storage that fails, or has something else, is told in words", async (t) => {
  const { seen, url } = await serve(t, paid);
  const foreign = (text) => ({ ...slow(), getItem: () => text });
  const full = { ...slow(), setItem: () => { throw new DOMException("The quota has been exceeded.", "QuotaExceededError"); } };
  for (const [storage, words] of [[foreign("green"), /something else/], [foreign("7"), /something else/], [full, /quota.*Nothing was sent/]]) {
    await assert.rejects(idempotentFetch({ storage })(url, { ...payment, intent: "invoice 17" }), (error) => {
      assert.ok(error instanceof ClientError);
      assert.match(error.message, words);
      return true;
    });
  }
  assert.equal(seen.length, 0);
});

test("what can't work is refused at once", () => {
  assert.throws(() => idempotentFetch({ deadline: "30s" }), /deadline is a number of milliseconds above zero, not "30s"/);
  assert.throws(() => idempotentFetch({ tryTimeout: 0 }), /tryTimeout is a number/);
  assert.throws(() => idempotentFetch({ deadline: 10, retention: 10 }), /retention/);
  assert.throws(() => idempotentFetch({ hosts: ["https://api.example.com"] }), /names/);
  assert.throws(() => idempotentFetch({ host: [] }), /no option host/);
});
