// Payments in Express. It knows nothing of idempotency keys: `semel proxy` in front of it does.
// Every charge is a line in a file, so that it can be counted after this process was killed.

const fs = require("node:fs");
const express = require("express");

const LEDGER = process.env.LEDGER ?? "ledger.jsonl";
const app = express();
app.use(express.json());

const charges = () =>
  fs.existsSync(LEDGER) ? fs.readFileSync(LEDGER, "utf8").trim().split("\n").map((line) => JSON.parse(line)) : [];

app.post("/payments", async (request, response) => {
  const payment = {
    id: charges().length + 1,
    user: request.get("X-User"),
    amount: request.body.amount,
    attempt: Number(request.get("Semel-Attempt")) || null,
  };
  fs.appendFileSync(LEDGER, JSON.stringify(payment) + "\n");
  // The charge is made. A process that dies here has taken money and told no one.
  await new Promise((resolve) => setTimeout(resolve, request.body.slow_ms ?? 0));
  response.status(201).location(`/payments/${payment.id}`).json(payment);
});

app.get("/payments", (request, response) => {
  response.json(charges());
});

const server = app.listen(Number(process.env.PORT ?? 3000), "127.0.0.1", () => {
  console.log(`Express on http://127.0.0.1:${server.address().port}`);
});

// A deploy: what has begun is finished first. What is cut off is an outcome that only a person can find out.
process.on("SIGTERM", () => server.close());
