// Stripe's official client for Node, unchanged, driven by lines of JSON.
//
//     drive.mjs BASE_URL [TIMEOUT_SECONDS]
//
// The protocol is that of drive.py. SDK_MODULES names the folder that node_modules stands in.

import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const require = createRequire(`${process.env.SDK_MODULES}/`);
const Stripe = require("stripe");

const [base, timeout] = [new URL(process.argv[2]), Number(process.argv[3] ?? 20)];
const stripe = new Stripe("sk_test_node", {
  host: base.hostname,
  port: base.port,
  protocol: "http",
  maxNetworkRetries: 2,
  timeout: timeout * 1000,
});

// The tests name options as Python does.
function optionsOf(options = {}) {
  const names = { idempotency_key: "idempotencyKey", max_network_retries: "maxNetworkRetries" };
  const translated = Object.entries(options).map(([name, value]) => [names[name] ?? name, value]);
  return translated.length > 0 ? [Object.fromEntries(translated)] : [];
}

const calls = {
  "intents.create": (p, o) => stripe.paymentIntents.create(p, ...o),
  "intents.retrieve": (p, o) => stripe.paymentIntents.retrieve(p.id, {}, ...o),
  "charges.create": (p, o) => stripe.charges.create(p, ...o),
  "charges.retrieve": (p, o) => stripe.charges.retrieve(p.id, {}, ...o),
  "refunds.create": (p, o) => stripe.refunds.create(p, ...o),
  "refunds.retrieve": (p, o) => stripe.refunds.retrieve(p.id, {}, ...o),
};

async function call(line) {
  const request = JSON.parse(line);
  const answer = { id: request.id };
  try {
    const made = await calls[request.do](request.params ?? {}, optionsOf(request.options));
    const last = made.lastResponse;
    answer.ok = {
      object: made,
      key: last.idempotencyKey ?? null,
      replayed: last.headers["idempotent-replayed"] ?? null,
      status: last.statusCode,
    };
  } catch (error) {
    if (error instanceof Stripe.errors.StripeError) {
      answer.error = {
        class: error.type, // the name of the class, in this client
        status: error.statusCode ?? null,
        code: error.code ?? null,
        type: error.rawType ?? null,
        message: error.message,
      };
    } else {
      answer.untyped = String(error?.stack ?? error); // the tests have to see it
    }
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}

for await (const line of createInterface({ input: process.stdin })) {
  void call(line);
}
